"""Decode steps of a batch that stays as it is, without touching each of its requests in each step.

As `sim.loop.leap`, but step by step where that costs nothing: only what belongs to single requests is put off
to the end of the run.
"""

from __future__ import annotations

import math

from sim.fast.jit import kernel
from sim.fast.replica import launch, next_send
from sim.fast.state import (
    AFTER,
    AT_ENGINE,
    BEFORE_FIXED,
    BEFORE_SEQ,
    CONTEXT,
    DECODES,
    DELAY,
    END,
    FIRST,
    IN_FLIGHT,
    INSIDE,
    LAST_EMISSION,
    LAST_TOKEN,
    MEMBERS,
    MOST,
    NOW,
    OUTPUTS,
    PREFILL_TOKENS,
    RUN_FIRST,
    SAMPLED,
    SENT,
    SINCE_OUTPUT,
    SIZE,
    STOP,
)
from sim.fast.tape import EMISSIONS


@kernel
def next_event(times, ints):
    """The next send of the client, or arrival at the engine, that is known of."""
    when = next_send(times, ints)
    event = when if when >= 0.0 else math.inf
    return min(event, times[ints[INSIDE], AT_ENGINE]) if ints[INSIDE] < ints[SENT] else event


@kernel
def outputs_to_come(rows, ints, batches, running, count, emission, overlaps):
    """How many results end none of the running requests; 0 also if they are not one unchanging group.

    With `overlaps` the batch in flight has to be theirs.
    """
    first = ints[FIRST]
    if ints[IN_FLIGHT] != overlaps or (overlaps and batches[first, SIZE] != count):
        return 0
    most = 1 << 30
    for i in range(count):
        r = running[i]
        if rows[r, RUN_FIRST] < 0 or rows[r, LAST_EMISSION] != emission - 1:
            return 0
        if overlaps and batches[first, MEMBERS + i] != r:
            return 0
        limit = rows[r, MOST]
        if 0 < rows[r, STOP] < limit:
            limit = rows[r, STOP]
        most = min(most, limit - rows[r, OUTPUTS] - 1)
    return most


@kernel
def begin(ints, count, context):
    """Describe a batch of decodes."""
    ints[PREFILL_TOKENS : SAMPLED + 1] = 0
    ints[DECODES] = ints[SAMPLED] = count
    ints[CONTEXT] = context


@kernel
def decode_step(
    model, counted, ints, floats, batches, ends, decode_kind, running, waiting, overlaps, warm,
    counts, base, sizes,
):  # fmt: skip
    """Launch the batch once more, process the result that is due, and stream it."""
    first, count = ints[FIRST], ints[DECODES]
    spare = (first + 1) % 2
    floats[NOW] += floats[BEFORE_FIXED] + floats[BEFORE_SEQ] * count
    launch(model, counted, ints, floats, batches, ends, spare, decode_kind, running, waiting, warm)
    ints[IN_FLIGHT] -= 1
    due = first if overlaps else spare
    floats[NOW] = max(floats[NOW], ends[due, END]) + ends[due, AFTER]
    if overlaps:
        ends[first, END], ends[first, AFTER] = ends[spare, END], ends[spare, AFTER]
    emission = counts[EMISSIONS]
    base[emission], sizes[emission, 0], sizes[emission, 1] = floats[NOW], count, count
    counts[EMISSIONS] = emission + 1
    ints[CONTEXT] += count


@kernel
def finish(rows, times, ints, floats, running, count, emission, steps):
    """Write down what so many steps, the last of which is that emission, did to each request."""
    time = floats[NOW] + floats[DELAY]
    ints[SINCE_OUTPUT] = 0
    for i in range(count):
        r = running[i]
        rows[r, OUTPUTS] += steps
        rows[r, LAST_EMISSION] = emission
        times[r, LAST_TOKEN] = time
