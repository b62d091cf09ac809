"""SGLang's decode rounds without a change of the batch, compiled; see `sim.fast.leap`."""

from __future__ import annotations

from sim.fast.chains import EVICTABLE, PAGE
from sim.fast.jit import kernel
from sim.fast.leap import begin, decode_step, finish, lasts_one_step, next_event, outputs_to_come
from sim.fast.prices import DECODE_BATCH
from sim.fast.replica import note_end, note_state
from sim.fast.sglang_pool import drop_finished, end, is_done, make_room
from sim.fast.sglang_state import (
    AVAILABLE,
    CHUNKED,
    DECODE_ROUNDS,
    FREE_SLOTS,
    IS_FULL,
    KV,
    LAST,
    NOBODY,
    OVERLAPS,
    PREFILL_ONLY,
    RATIO,
    RATIO_DECAY,
    RATIO_MIN,
    RATIO_RESETS,
    REQUEST_SLOTS,
    RUNNING,
    SOME_FINISHED,
    TOTAL,
    WAITING,
)
from sim.fast.state import FIRST, IN_FLIGHT, MAX_STEPS, NOW, PREFILL, STEPS
from sim.fast.tape import EMISSIONS, lacks_room


@kernel
def leap(run, nodes, leaves, running, tape, begun):
    """Make the calls that change nothing but contexts, up to the next event. Returns whether there were any.

    `begun` has room for a number per position in a page.
    """
    rows, ints, floats, counts = run.rows, run.ints, run.floats, tape.counts
    waiting, emission = ints[WAITING + 1], counts[EMISSIONS]
    if (
        not ints[RUNNING]
        or ints[LAST] != NOBODY
        or ints[CHUNKED] != NOBODY
        or (waiting and not ints[IS_FULL])
    ):
        return False
    if ints[DECODE_ROUNDS] or ints[PREFILL_ONLY] or ints[RATIO_RESETS] or (waiting and ints[SOME_FINISHED]):
        return False
    overlaps, page = ints[OVERLAPS], ints[PAGE]
    if ints[IN_FLIGHT] and run.batches[ints[FIRST], PREFILL]:
        return False
    if ints[SOME_FINISHED] and drop_finished(rows, ints, running):
        ints[IS_FULL] = 0
    count = ints[RUNNING]
    if not count or lasts_one_step(run, overlaps) or lacks_room(tape, count):
        return False
    until_end = outputs_to_come(run, running, count, overlaps)
    most = min(until_end, len(tape.base) - emission)
    if most < 2:
        return False
    begun[:] = 0
    context = 0
    for i in range(count):
        held = rows[running[i], KV]
        begun[-held % page] += 1
        context += held + 1
    begin(ints, count, context)
    event, steps, slots = next_event(run), 0, ints[REQUEST_SLOTS] - ints[FREE_SLOTS]
    while steps < most and ints[STEPS] < ints[MAX_STEPS]:
        if steps and floats[NOW] >= event:
            break
        taken = begun[steps % page] * page
        make_room(rows, ints, nodes, leaves, taken)
        if taken > ints[AVAILABLE]:
            break
        make_room(rows, ints, nodes, leaves, page * count)
        ints[AVAILABLE] -= taken
        floats[RATIO] = max(floats[RATIO] - floats[RATIO_DECAY], floats[RATIO_MIN])
        used = ints[TOTAL] - ints[AVAILABLE] - ints[EVICTABLE]
        note_state(run, tape, slots, waiting, used, ints[TOTAL])
        decode_step(run, DECODE_BATCH, slots, waiting, overlaps, running, tape, steps == 0)
        steps += 1
    if not steps:
        return False
    finish(run, running, count, counts[EMISSIONS] - 1, steps)
    for i in range(count):
        rows[running[i], KV] += steps
    if steps == until_end:
        for i in range(count):
            if is_done(rows, running[i]):
                end(rows, ints, nodes, leaves, running[i])
                note_end(run, tape, running[i])
    return True
