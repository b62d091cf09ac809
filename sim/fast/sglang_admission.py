"""SGLang's admission of prefills, compiled: `sim.engines.sglang.prefill_adder`."""

from __future__ import annotations

from sim.engines.sglang.prefill_adder import CLIP_MAX_NEW_TOKENS
from sim.fast.chains import EVICTABLE, PAGE, lock, match, unlock
from sim.fast.jit import kernel
from sim.fast.sglang_pool import whole_pages
from sim.fast.sglang_state import (
    AVAILABLE,
    CAN_RUN,
    CHUNK,
    CHUNKED,
    CURRENT_OFFSET,
    FREE_SLOTS,
    IS_FULL,
    LAST_CHUNKED,
    LAST_PREFILL_ONLY,
    MAX_PREFILL,
    MAX_REQUESTS,
    NEW_CHUNKED,
    NOBODY,
    NODE,
    OWNED,
    PREFIX,
    RATIO,
    REM_CHUNK,
    REM_INPUT,
    REQUEST_SLOTS,
    RUNNING,
    START,
    STOPS_AT,
    TOTAL_OFFSET,
    WAITING,
)
from sim.fast.state import MOST, NOW, OUTPUTS, PROMPT, note_admission, pop

CLIP = CLIP_MAX_NEW_TOKENS
CONTINUE, NO_TOKEN, OTHER = range(3)


@kernel
def _rem_total(ints, floats):
    return ints[AVAILABLE] + ints[EVICTABLE] - floats[TOTAL_OFFSET]


@kernel
def _begin_admission(rows, ints, floats, running):
    ints[CAN_RUN], ints[NEW_CHUNKED], ints[CURRENT_OFFSET] = 0, NOBODY, 0
    ints[REM_INPUT], ints[REM_CHUNK] = ints[MAX_PREFILL], ints[CHUNK]
    reserve, ratio = 0.0, floats[RATIO]
    for i in range(ints[RUNNING]):
        r = running[i]
        reserve += min(rows[r, MOST] - rows[r, OUTPUTS], CLIP) * ratio
    floats[TOTAL_OFFSET] = reserve


@kernel
def _admit(rows, ints, floats, can_run, r, tokens, truncated):
    rows[r, START] = rows[r, PREFIX]
    rows[r, STOPS_AT] = rows[r, START] + tokens
    can_run[ints[CAN_RUN]] = r
    ints[CAN_RUN] += 1
    paged = whole_pages(ints, tokens)
    reserve = 0 if truncated else min(rows[r, MOST], CLIP)
    ints[CURRENT_OFFSET] += paged + ints[PAGE]
    floats[TOTAL_OFFSET] += paged + ints[PAGE] + reserve
    ints[REM_INPUT] -= paged
    if ints[CHUNK] != NOBODY:
        ints[REM_CHUNK] -= paged


@kernel
def _add_chunked(rows, ints, floats, can_run, r):
    """Returns whether a part of the prompt remains."""
    limit = min(ints[REM_CHUNK], int(_rem_total(ints, floats)))
    if limit <= 0:
        limit = ints[REM_CHUNK]
    remaining = rows[r, PROMPT] + rows[r, OUTPUTS] - rows[r, PREFIX]
    _admit(rows, ints, floats, can_run, r, min(remaining, limit), remaining > limit)
    return remaining > limit


@kernel
def _add(rows, ints, floats, nodes, leaves, can_run, r):
    if ints[MAX_REQUESTS] != NOBODY and ints[CAN_RUN] >= ints[MAX_REQUESTS]:
        return OTHER
    lock(ints, nodes, rows[r, NODE])
    before = ints[CAN_RUN]
    verdict = _add_normal(rows, ints, floats, can_run, r)
    if ints[CAN_RUN] == before:
        unlock(ints, nodes, leaves, rows[r, NODE])
    return verdict


@kernel
def _add_normal(rows, ints, floats, can_run, r):
    extend = rows[r, PROMPT] + rows[r, OUTPUTS] - rows[r, PREFIX]
    left = min(max(rows[r, MOST] - rows[r, OUTPUTS], 0), CLIP)
    if extend + left + ints[PAGE] >= _rem_total(ints, floats):
        return NO_TOKEN
    paged = whole_pages(ints, extend)
    if ints[CHUNK] == NOBODY:
        if ints[CAN_RUN] and paged >= ints[REM_INPUT]:
            return OTHER
    elif paged > ints[REM_CHUNK]:
        end = (rows[r, PREFIX] + ints[REM_CHUNK] // ints[PAGE] * ints[PAGE]) // ints[PAGE] * ints[PAGE]
        if end <= rows[r, PREFIX]:
            return OTHER
        _admit(rows, ints, floats, can_run, r, end - rows[r, PREFIX], True)
        ints[NEW_CHUNKED] = r
        return _verdict(ints, floats)
    _admit(rows, ints, floats, can_run, r, extend, False)
    return _verdict(ints, floats)


@kernel
def _verdict(ints, floats):
    if _rem_total(ints, floats) <= 0 or ints[AVAILABLE] + ints[EVICTABLE] - ints[CURRENT_OFFSET] <= 0:
        return NO_TOKEN
    if ints[REM_INPUT] <= 0 or (ints[CHUNK] != NOBODY and ints[REM_CHUNK] <= 0):
        return OTHER
    return CONTINUE


@kernel
def new_prefill_batch(rows, times, ints, floats, nodes, leaves, running, can_run, waiting):
    """Admit what slots and budgets allow. Returns whether there is a batch."""
    if (ints[IS_FULL] or not ints[WAITING + 1]) and ints[CHUNKED] == NOBODY:
        return False
    allocatable = min(ints[REQUEST_SLOTS] - ints[RUNNING], ints[FREE_SLOTS])
    if ints[CHUNKED] == NOBODY and allocatable <= 0:
        ints[IS_FULL] = 1
        return False
    _begin_admission(rows, ints, floats, running)
    if ints[CHUNKED] != NOBODY and not _add_chunked(rows, ints, floats, can_run, ints[CHUNKED]):
        ints[CHUNKED] = NOBODY
    while ints[WAITING + 1]:
        if ints[CAN_RUN] >= allocatable:
            ints[IS_FULL] = 1
        if ints[IS_FULL]:
            break
        r = waiting[ints[WAITING]]
        matched, rows[r, NODE] = match(rows, ints, nodes, leaves, r, rows[r, PROMPT] + rows[r, OUTPUTS] - 1)
        rows[r, PREFIX] = rows[r, OWNED] = matched
        before = ints[CAN_RUN]
        verdict = _add(rows, ints, floats, nodes, leaves, can_run, r)
        if ints[CAN_RUN] > before:
            pop(waiting, ints, WAITING)
            note_admission(rows, times, ints, floats[NOW], r, rows[r, START])
        if verdict != CONTINUE:
            ints[IS_FULL] |= verdict == NO_TOKEN
            break
    if not ints[CAN_RUN]:
        return False
    if ints[NEW_CHUNKED] != NOBODY:
        ints[CHUNKED] = ints[NEW_CHUNKED]
    ints[LAST_CHUNKED], ints[LAST_PREFILL_ONLY] = ints[CHUNKED], 1
    for i in range(ints[CAN_RUN]):
        ints[LAST_PREFILL_ONLY] &= rows[can_run[i], MOST] == 0
    return True
