"""vLLM's decode steps without a change of the batch, compiled; see `sim.fast.leap`."""

from __future__ import annotations

from sim.fast.jit import kernel
from sim.fast.leap import begin, decode_step, finish, lasts_one_step, next_event, outputs_to_come
from sim.fast.prices import ANY_BATCH
from sim.fast.replica import note_state
from sim.fast.state import MAX_STEPS, NOW, OUTPUTS, PROMPT, STEPS
from sim.fast.tape import EMISSIONS, lacks_room
from sim.fast.vllm_pool import num_waiting, take_blocks
from sim.fast.vllm_state import (
    BLOCK,
    BLOCKED,
    CACHES,
    COMPUTED,
    FREE,
    HASHED,
    HELD,
    IS_ASYNC,
    MAX_MODEL_LEN,
    PLACEHOLDERS,
    RUNNING,
    TOKEN_BUDGET,
    UNANNOUNCED,
    USABLE,
)


@kernel
def leap(run, running, tape, begun):
    """Make the calls that change nothing but contexts, up to the next event. Returns whether there were any.

    `begun` has room for a number per position in a block.
    """
    rows, ints, floats, counts = run.rows, run.ints, run.floats, tape.counts
    count, waiting, emission = ints[RUNNING], num_waiting(ints), counts[EMISSIONS]
    if not count or count > ints[TOKEN_BUDGET] or (waiting and not ints[BLOCKED]):
        return False
    overlaps, block = ints[IS_ASYNC], ints[BLOCK]
    if lasts_one_step(run, overlaps) or lacks_room(tape, count):
        return False
    most = outputs_to_come(run, running, count, overlaps) - 1
    most = min(most, len(tape.base) - emission)
    if most < 2:
        return False
    begun[:] = 0
    context = 0
    for i in range(count):
        r = running[i]
        computed = rows[r, COMPUTED]
        room = rows[r, HELD] * block - computed
        new = rows[r, PROMPT] + rows[r, OUTPUTS] + overlaps - computed
        if rows[r, PLACEHOLDERS] != overlaps or new != 1 or room < 0 or room >= block:
            return False
        most = min(most, ints[MAX_MODEL_LEN] - 1 - computed)
        begun[room] += 1
        context += computed + 1
    begin(ints, count, context)
    event, free, steps = next_event(run), ints[FREE], 0
    while steps < most and begun[steps % block] <= free and ints[STEPS] < ints[MAX_STEPS]:
        if steps and floats[NOW] >= event:
            break
        free -= begun[steps % block]
        used, total = (ints[USABLE] - free) * block, ints[USABLE] * block
        note_state(run, tape, count, waiting, used, total)
        decode_step(run, ANY_BATCH, count, waiting, overlaps, running, tape, steps == 0)
        steps += 1
    if not steps:
        return False
    ints[UNANNOUNCED] = 0
    take_blocks(rows, ints, ints[FREE] - free)
    ints[FREE] = free
    finish(run, running, count, counts[EMISSIONS] - 1, steps)
    for i in range(count):
        r = running[i]
        computed = rows[r, COMPUTED] = rows[r, COMPUTED] + steps
        rows[r, HELD] = (computed + block - 1) // block
        if ints[CACHES]:
            rows[r, HASHED] = max(rows[r, HASHED], (computed - overlaps) // block)
    return True
