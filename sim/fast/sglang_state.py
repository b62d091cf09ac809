"""Where SGLang's kernel keeps its numbers, besides those of `sim.fast.state`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.new_token_ratio import NewTokenRatio
from sim.fast.chains import PAGE, ROOT, TOPMOST
from sim.fast.state import OWN, OWN_F, OWN_K

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NOBODY = -1

# Columns of rows: `LiveRequest`; one more belongs to `sim.fast.chains`.
KV, PREFIX, START, STOPS_AT, OWNED, NODE, HOLDS_SLOT, RETRACTED = range(OWN + 1, OWN + 9)
NUM_COLUMNS = OWN + 9
# ints: running requests, those of the last prefill (-1: none), its chunked one; the request that is being
# chunked; free slots; available tokens; calls for decodes alone; flags: `batch_is_full`, whether the running
# batch and the last prefill have nothing to generate, idle, whether the ratio is to be reset, whether a
# running one finished; the queue; what `PrefillAdder` holds; the settings.
(
    RUNNING, LAST, LAST_CHUNKED, CHUNKED, FREE_SLOTS, AVAILABLE, DECODE_ROUNDS, IS_FULL, PREFILL_ONLY,
    LAST_PREFILL_ONLY, IDLE, RATIO_RESETS, SOME_FINISHED, WAITING, _, CAN_RUN, NEW_CHUNKED, REM_INPUT,
    REM_CHUNK, CURRENT_OFFSET, OVERLAPS, TOTAL, REQUEST_SLOTS, CHUNK, MAX_PREFILL, MAX_REQUESTS, INTERVAL,
    NUM_K,
) = range(OWN_K + 6, OWN_K + 34)  # fmt: skip
# floats: the ratio and its course; the adder's total offset.
RATIO, RATIO_INIT, RATIO_MIN, RATIO_DECAY, TOTAL_OFFSET, NUM_F = range(OWN_F, OWN_F + 6)


def prepare(
    config: SglangSchedulerConfig, ratio: NewTokenRatio, rows: Ints, ints: Ints, floats: Floats
) -> None:
    """Write a fresh engine into the arrays."""
    rows[:, TOPMOST] = rows[:, NODE] = ROOT
    ints[LAST] = ints[LAST_CHUNKED] = ints[CHUNKED] = NOBODY
    ints[FREE_SLOTS] = ints[REQUEST_SLOTS] = config.request_slots
    ints[AVAILABLE] = ints[TOTAL] = config.pool_tokens
    ints[PAGE], ints[IDLE] = config.page_size, 1
    ints[OVERLAPS] = not config.disable_overlap_schedule
    ints[CHUNK] = config.chunk_tokens or NOBODY
    ints[MAX_PREFILL], ints[MAX_REQUESTS] = config.max_prefill_tokens, config.prefill_max_requests or NOBODY
    ints[INTERVAL] = config.prefill_decode_interval
    floats[RATIO], floats[RATIO_INIT], floats[RATIO_MIN], floats[RATIO_DECAY] = (
        ratio.current,
        ratio.init,
        ratio.min,
        ratio.decay,
    )
