"""Where vLLM's kernel keeps its numbers, besides those of `sim.fast.state`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.engines.vllm.config import VllmSchedulerConfig
from sim.fast.state import OWN, OWN_K

Ints = NDArray[np.int64]

# Columns of rows: `EngineRequest` and `BlockTable`; blocks left free but hashed, and the list of who has such
# blocks.
COMPUTED, PLACEHOLDERS, STALE, HELD, HASHED, LEFT, BEFORE, BEHIND = range(OWN, OWN + 8)
NUM_COLUMNS = OWN + 8
# ints: running requests; whether a finish is yet to be announced; free blocks, those without a hash, the ends
# of that list (the first to be evicted in front); the queues, two places each; the settings; whether nobody
# who waits can be admitted until a request ends or is preempted.
(
    RUNNING, UNANNOUNCED, FREE, UNHASHED, HEAD, TAIL, WAITING, _, SKIPPED, _, IS_ASYNC, SEPARATE, BLOCK,
    USABLE, CACHES, TOKEN_BUDGET, MAX_RUNNING, MAX_MODEL_LEN, MAX_BATCHED, LONG_PREFILL, ADAPTIVE, CHUNKED,
    RESERVE_FULL, WATERMARK, BLOCKED, NUM_K,
) = range(OWN_K, OWN_K + 26)  # fmt: skip


def prepare(config: VllmSchedulerConfig, rows: Ints, ints: Ints) -> None:
    """Write a fresh engine into the arrays."""
    rows[:, BEFORE:] = -1
    budget, slots = config.max_num_batched_tokens, config.max_num_seqs
    ints[FREE] = ints[UNHASHED] = ints[USABLE] = config.num_gpu_blocks - 1
    ints[HEAD] = ints[TAIL] = -1
    ints[IS_ASYNC], ints[SEPARATE] = config.async_scheduling, not config.follows_0_33
    ints[BLOCK], ints[CACHES] = config.block_size, config.enable_prefix_caching
    ints[TOKEN_BUDGET] = min(budget, config.max_num_scheduled_tokens or budget)
    ints[MAX_RUNNING] = min(slots, config.max_num_active_seqs or slots)
    ints[MAX_MODEL_LEN], ints[MAX_BATCHED] = config.max_model_len, budget
    ints[LONG_PREFILL] = config.long_prefill_token_threshold
    ints[ADAPTIVE] = config.long_prefill_token_threshold_adaptive
    ints[CHUNKED], ints[RESERVE_FULL] = config.enable_chunked_prefill, config.scheduler_reserve_full_isl
    ints[WATERMARK] = int(config.watermark * config.num_gpu_blocks)
