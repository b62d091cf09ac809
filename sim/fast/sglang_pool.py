"""SGLang's KV pool, compiled: `sim.engines.sglang.kv_pool` with a prefix tree (`sim.fast.chains`)."""

from __future__ import annotations

from sim.fast.chains import PAGE, ROOT, evict, insert, lock, unlock
from sim.fast.jit import kernel
from sim.fast.sglang_state import (
    AVAILABLE,
    CAN_RUN,
    FREE_SLOTS,
    HOLDS_SLOT,
    KV,
    NODE,
    OWNED,
    PREFIX,
    RUNNING,
    SOME_FINISHED,
    START,
    STOPS_AT,
)
from sim.fast.state import FINISHED, MOST, OUTPUTS, PROMPT, STOP, TROUBLE


@kernel
def whole_pages(ints, tokens):
    """Tokens of the pages that so many tokens begin."""
    return (tokens + ints[PAGE] - 1) // ints[PAGE] * ints[PAGE]


@kernel
def make_room(rows, ints, nodes, leaves, tokens):
    """Evict until that many tokens are available, or nothing can be evicted."""
    if tokens > ints[AVAILABLE]:
        ints[AVAILABLE] += evict(rows, ints, nodes, leaves, tokens - ints[AVAILABLE])


@kernel
def allocate_extend(rows, ints, nodes, leaves, can_run):
    """Slots for the chunks of a prefill batch."""
    tokens = taken = 0
    for i in range(ints[CAN_RUN]):
        start, end = rows[can_run[i], START], rows[can_run[i], STOPS_AT]
        tokens += end - start
        taken += whole_pages(ints, end) - whole_pages(ints, start)
    make_room(rows, ints, nodes, leaves, tokens if ints[PAGE] == 1 else tokens + ints[PAGE] * ints[CAN_RUN])
    if taken > ints[AVAILABLE]:
        ints[TROUBLE] = 1
    ints[AVAILABLE] -= taken
    for i in range(ints[CAN_RUN]):
        rows[can_run[i], KV] = rows[can_run[i], STOPS_AT]


@kernel
def new_pages(rows, ints, running, count):
    """Tokens of the pages that the first `count` running requests begin with their next position."""
    if ints[PAGE] == 1:
        return count
    pages = 0
    for i in range(count):
        pages += rows[running[i], KV] % ints[PAGE] == 0
    return pages * ints[PAGE]


@kernel
def decode_fits(rows, ints, nodes, leaves, running, count):
    """Whether the first `count` running requests have room for one more position each; evicts for it."""
    needed = new_pages(rows, ints, running, count)
    make_room(rows, ints, nodes, leaves, needed)
    return needed <= ints[AVAILABLE]


@kernel
def store_unfinished(rows, ints, nodes, leaves, r):
    """Put what a request has computed into the tree, and go on from there."""
    rows[r, PREFIX] = rows[r, STOPS_AT]
    size = rows[r, STOPS_AT] // ints[PAGE] * ints[PAGE]
    known, node = insert(rows, ints, nodes, leaves, r, size)
    ints[AVAILABLE] += known - rows[r, OWNED]
    lock(ints, nodes, node)
    unlock(ints, nodes, leaves, rows[r, NODE])
    rows[r, NODE] = node
    rows[r, OWNED] = size


@kernel
def release(rows, ints, nodes, leaves, r, store):
    """Give a request's slots back, to the tree (`store`) or to the pool."""
    pages = whole_pages(ints, rows[r, KV])
    if store:
        size, prompt = rows[r, KV] // ints[PAGE] * ints[PAGE], rows[r, PROMPT] // ints[PAGE] * ints[PAGE]
        known, _ = insert(rows, ints, nodes, leaves, r, size)
        if 0 < prompt < size:
            insert(rows, ints, nodes, leaves, r, prompt)
        ints[AVAILABLE] += known - rows[r, OWNED] + pages - size
    else:
        ints[AVAILABLE] += pages - rows[r, OWNED]
    unlock(ints, nodes, leaves, rows[r, NODE])
    rows[r, NODE] = ROOT
    rows[r, KV] = rows[r, OWNED] = rows[r, PREFIX] = 0


@kernel
def is_done(rows, r):
    """Whether a request's latest output was its last."""
    outputs = rows[r, OUTPUTS]
    return outputs == rows[r, STOP] or outputs >= rows[r, MOST]


@kernel
def end(rows, ints, nodes, leaves, r):
    """A result ended a request."""
    rows[r, FINISHED], rows[r, HOLDS_SLOT] = 1, 0
    ints[FREE_SLOTS] += 1
    ints[SOME_FINISHED] = 1
    release(rows, ints, nodes, leaves, r, True)


@kernel
def drop_finished(rows, ints, running):
    """Keep the running requests that have not ended. Returns whether anything left."""
    kept, before = 0, ints[RUNNING]
    for i in range(before):
        if not rows[running[i], FINISHED]:
            running[kept] = running[i]
            kept += 1
    ints[RUNNING], ints[SOME_FINISHED] = kept, 0
    return kept < before
