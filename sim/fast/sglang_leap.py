"""SGLang's decode rounds without a change of the batch, compiled; see `sim.fast.leap`."""

from __future__ import annotations

from sim.fast.chains import EVICTABLE, PAGE
from sim.fast.jit import kernel
from sim.fast.leap import begin, decode_step, finish, next_event, outputs_to_come
from sim.fast.sglang_pool import make_room
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
from sim.fast.state import FIRST, IN_FLIGHT, MAX_STEPS, MAX_USED, NOW, PREFILL, STEPS
from sim.fast.tape import EMISSIONS, sample


@kernel
def leap(
    model, counted, rows, times, ints, floats, batches, ends, nodes, leaves, running, warm, counts, base,
    sizes, samples, begun,
):  # fmt: skip
    """Make the calls that change nothing but contexts, up to the next event. Returns whether there were any.

    `begun` has room for a number per position in a page.
    """
    count, waiting, emission = ints[RUNNING], ints[WAITING + 1], counts[EMISSIONS]
    if not count or ints[LAST] != NOBODY or ints[CHUNKED] != NOBODY or (waiting and not ints[IS_FULL]):
        return False
    if ints[SOME_FINISHED] or ints[DECODE_ROUNDS] or ints[PREFILL_ONLY] or ints[RATIO_RESETS]:
        return False
    overlaps, page = ints[OVERLAPS], ints[PAGE]
    if ints[IN_FLIGHT] and batches[ints[FIRST], PREFILL]:
        return False
    most = outputs_to_come(rows, ints, batches, running, count, emission, overlaps)
    most = min(most, len(base) - emission)
    if most < 2:
        return False
    begun[:] = 0
    context = 0
    for i in range(count):
        held = rows[running[i], KV]
        begun[-held % page] += 1
        context += held + 1
    begin(ints, count, context)
    event, steps, slots = next_event(times, ints), 0, ints[REQUEST_SLOTS] - ints[FREE_SLOTS]
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
        ints[MAX_USED] = max(ints[MAX_USED], used)
        sample(counts, samples, floats[NOW], slots, waiting, used / ints[TOTAL])
        decode_step(
            model, counted, ints, floats, batches, ends, True, slots, waiting, overlaps, warm,
            counts, base, sizes,
        )  # fmt: skip
        steps += 1
    if not steps:
        return False
    finish(rows, times, ints, floats, running, count, counts[EMISSIONS] - 1, steps)
    for i in range(count):
        rows[running[i], KV] += steps
    return True
