"""SGLang's resolved configuration as scheduler, graph buckets and caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sim.engines.base import Scheduler
from sim.engines.glue import EngineGlue, Limits
from sim.engines.sglang.args import default_max_running_requests
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.memory import account
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.sglang.stuck import never_fits
from sim.memory import MemoryAccount
from sim.request import Request
from sim.scenario import EngineConfig
from sim.steptime.buckets import GraphBuckets

# The event loop spins without a pause (srt/managers/scheduler.py, 0.5.21).
IDLE_POLL = 0.0

_COMPUTED = {"max_running_requests", "max_total_tokens", "page_size", "seed", "version"}


def make_scheduler(
    config: EngineConfig, pool: MemoryAccount, requests: Sequence[Request], seed: int
) -> Scheduler:
    """The scheduler that this configuration starts; `seed` feeds the "random" policy.

    Raises:
        EngineStuck: one of the requests can never be admitted, however long the others take before it.
    """
    names = {f.name for f in fields(SglangSchedulerConfig)} - _COMPUTED
    values: dict[str, Any] = {name: config[name] for name in names if name in config.values}
    resolved = SglangSchedulerConfig(
        max_running_requests=_max_running(config, pool),
        max_total_tokens=pool.kv_cache_tokens,
        page_size=pool.block_size,
        seed=seed,
        version=config.version,
        **values,
    )
    refuse_hopeless(resolved, requests)
    return SglangScheduler(resolved)


def refuse_hopeless(config: SglangSchedulerConfig, requests: Sequence[Request]) -> None:
    """Say at once that a request will wait for ever.

    Without the radix cache, a request that ignores EOS is admitted only if more than one token is left free
    when it is played to its end (managers/schedule_policy.py `add_one_req_ignore_eos`, 0.5.21). Its output is
    clipped to what the pool holds beside its prompt and a page, which leaves exactly one.

    Raises:
        EngineStuck: naming the first such request.
    """
    if not config.disable_radix_cache:
        return
    longest = min(config.context_length, config.pool_tokens) - 1
    for request in requests:
        if not request.ignore_eos or request.prompt_len >= longest - 5:
            continue  # a prompt that is too long is refused, not queued
        pinned = (-(-request.prompt_len // config.page_size) + 1) * config.page_size
        room = config.pool_tokens - pinned - 1
        wanted = min(request.max_tokens, config.context_length - request.prompt_len - 2)
        # Clipped to nothing, a request ends with the token of its prefill and is not played at all.
        if pinned > config.pool_tokens or 0 < room <= wanted:
            raise never_fits(request.request_id, request.prompt_len, request.max_tokens, config.pool_tokens)


def graph_buckets(config: EngineConfig) -> GraphBuckets:
    """Decode graphs by batch size, prefill graphs by tokens, the latter padded to at most twice the batch.

    Source: model_executor/runner (decode and prefill graph runners), 0.5.21.
    """
    decode = () if config["cuda_graph_backend_decode"] == "disabled" else config["cuda_graph_bs_decode"]
    prefill = () if config["cuda_graph_backend_prefill"] == "disabled" else config["cuda_graph_bs_prefill"]
    return GraphBuckets(tuple(decode or ()), tuple(prefill or ()), "piecewise", max_padding=2.0)


def limits(config: EngineConfig, pool: MemoryAccount) -> Limits:
    """Request slots and the chunk of one prefill batch."""
    chunk = config["chunked_prefill_size"]
    return Limits(_max_running(config, pool), chunk if chunk and chunk > 0 else config["max_prefill_tokens"])


def _max_running(config: EngineConfig, pool: MemoryAccount) -> int:
    asked: int | None = config["max_running_requests"]
    if asked is not None:
        return asked
    return default_max_running_requests(pool.kv_cache_tokens, config["context_length"])


ENGINE = EngineGlue(account, make_scheduler, graph_buckets, limits, IDLE_POLL)
