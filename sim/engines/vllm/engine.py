"""vLLM's resolved configuration as scheduler, graph buckets and caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from sim.engines.base import Scheduler
from sim.engines.glue import EngineGlue, Limits
from sim.engines.vllm.config import VllmSchedulerConfig
from sim.engines.vllm.memory import account
from sim.engines.vllm.scheduler import VllmScheduler
from sim.memory import MemoryAccount
from sim.request import Request, can_share_prefixes
from sim.scenario import EngineConfig
from sim.steptime.buckets import NO_GRAPHS, GraphBuckets

# v1/engine/core.py `_process_engine_step` sleeps when no model was executed but requests are unfinished.
IDLE_POLL = 0.001

_FROM_POOL = {"num_gpu_blocks", "block_size", "version"}


def make_scheduler(
    config: EngineConfig, pool: MemoryAccount, requests: Sequence[Request], seed: int
) -> Scheduler:
    """The scheduler that this configuration starts; vLLM decides nothing by chance."""
    del seed
    names = {f.name for f in fields(VllmSchedulerConfig)} - _FROM_POOL
    values = {name: config[name] for name in names if name in config.values}
    if pool.longest is not None:
        values["max_model_len"] = pool.longest
    return VllmScheduler(
        VllmSchedulerConfig(
            num_gpu_blocks=pool.num_gpu_blocks,
            block_size=pool.block_size,
            version=config.version,
            **values,
        ),
        shares_prefixes=can_share_prefixes(requests),
    )


def graph_buckets(config: EngineConfig) -> GraphBuckets:
    """Captured sizes by kind of batch (vllm/v1/cudagraph_dispatcher.py, 0.28).

    A batch of decodes alone uses a whole graph up to `max_num_seqs`; others use the pieces between
    attention calls. `--enforce-eager` and O0 have no graphs, O1 only the pieces.
    """
    mode, sizes = config["cudagraph_mode"], tuple(config["cudagraph_capture_sizes"])
    decode = tuple(size for size in sizes if size <= config["max_num_seqs"])
    if mode == "NONE":
        return NO_GRAPHS
    if mode == "PIECEWISE":
        return GraphBuckets(other=sizes)
    if mode == "FULL":
        return GraphBuckets(decode=decode, other=sizes, other_launch="graph")
    if mode == "FULL_DECODE_ONLY":
        return GraphBuckets(decode=decode)
    return GraphBuckets(decode=decode, other=sizes)


def limits(config: EngineConfig, pool: MemoryAccount) -> Limits:
    """Sequence slots and the token budget of a step."""
    del pool
    return Limits(config["max_num_seqs"], config["max_num_scheduled_tokens"])


ENGINE = EngineGlue(account, make_scheduler, graph_buckets, limits, IDLE_POLL)
