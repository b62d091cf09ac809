"""vLLM's block pool, compiled: `sim.engines.vllm.block_pool.CountingBlockPool`."""

from __future__ import annotations

from sim.fast.jit import kernel
from sim.fast.vllm_state import (
    BEFORE,
    BEHIND,
    BLOCK,
    CACHES,
    FREE,
    HASHED,
    HEAD,
    HELD,
    LEFT,
    SEPARATE,
    SKIPPED,
    TAIL,
    UNHASHED,
    WAITING,
)


@kernel
def _unlink(rows, ints, r):
    ahead, behind = rows[r, BEFORE], rows[r, BEHIND]
    if ahead >= 0:
        rows[ahead, BEHIND] = behind
    else:
        ints[HEAD] = behind
    if behind >= 0:
        rows[behind, BEFORE] = ahead
    else:
        ints[TAIL] = ahead


@kernel
def take_blocks(rows, ints, count):
    """Take free blocks: those without a hash, then the least recently freed ones. FREE is the caller's."""
    unhashed = min(count, ints[UNHASHED])
    ints[UNHASHED] -= unhashed
    blocks = count - unhashed
    while blocks:
        oldest = ints[HEAD]
        if rows[oldest, LEFT] > blocks:
            rows[oldest, LEFT] -= blocks
            break
        blocks -= rows[oldest, LEFT]
        rows[oldest, LEFT] = 0
        _unlink(rows, ints, oldest)


@kernel
def allocate(rows, ints, r, new, hit):
    """Give a request `new` blocks, behind `hit` ones that it left and finds again."""
    if hit:
        _unlink(rows, ints, r)
        rows[r, LEFT] = 0
        rows[r, HASHED] = rows[r, HELD] = hit
    take_blocks(rows, ints, new)
    ints[FREE] -= new + hit
    rows[r, HELD] += new


@kernel
def free(rows, ints, r):
    """Take all its blocks away; the hashed ones can be found again."""
    ints[UNHASHED] += rows[r, HELD] - rows[r, HASHED]
    ints[FREE] += rows[r, HELD]
    if rows[r, HASHED]:
        rows[r, LEFT] = rows[r, HASHED]
        rows[r, BEFORE], rows[r, BEHIND] = ints[TAIL], -1
        if ints[TAIL] >= 0:
            rows[ints[TAIL], BEHIND] = r
        else:
            ints[HEAD] = r
        ints[TAIL] = r
    rows[r, HELD] = rows[r, HASHED] = 0


@kernel
def register(rows, ints, r, tokens):
    """Its first `tokens` tokens are computed: full blocks get their hash."""
    if ints[CACHES] and (rows[r, HASHED] + 1) * ints[BLOCK] <= tokens:
        rows[r, HASHED] = tokens // ints[BLOCK]


@kernel
def num_waiting(ints):
    """Requests in both queues."""
    return ints[WAITING + 1] + ints[SKIPPED + 1] if ints[SEPARATE] else ints[WAITING + 1]
