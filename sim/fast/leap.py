"""Decode steps of a batch that stays as it is, without touching each of its requests in each step.

As `sim.loop.leap`, but step by step where that costs nothing: only what belongs to single requests is put off
to the end of the run.
"""

from __future__ import annotations

import math

from sim.fast.jit import kernel
from sim.fast.replica import join, launch, next_send, stays, work_before
from sim.fast.state import (
    AFTER,
    AT_ENGINE,
    CONTEXT,
    DECODES,
    DELAY,
    END,
    FINISHED,
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
    SAMPLED,
    SENT,
    SINCE_OUTPUT,
    SIZE,
    STOP,
)
from sim.fast.tape import EMISSIONS


@kernel
def next_event(run):
    """The next send of the client, or arrival at the engine, that is known of."""
    ints, when = run.ints, next_send(run)
    event = when if when >= 0.0 else math.inf
    return min(event, run.times[ints[INSIDE], AT_ENGINE]) if ints[INSIDE] < ints[SENT] else event


@kernel
def lasts_one_step(run, overlaps):
    """Whether the next event comes before the result of the batch in flight."""
    ints, ends = run.ints, run.ends
    first = ints[FIRST]
    return overlaps and ints[IN_FLIGHT] and next_event(run) <= ends[first, END] + ends[first, AFTER]


@kernel
def outputs_to_come(run, running, count, overlaps):
    """After how many results the first of the running requests ends; 0 if that cannot be told.

    With `overlaps` the batch in flight has to be theirs, those aside who have ended since.
    """
    rows, ints, batches = run.rows, run.ints, run.batches
    first = ints[FIRST]
    size = batches[first, SIZE]
    if ints[IN_FLIGHT] != overlaps or (overlaps and size < count):
        return 0
    most, at = 1 << 30, MEMBERS
    for i in range(count):
        r = running[i]
        if overlaps:
            while at < MEMBERS + size and batches[first, at] >= 0 and rows[batches[first, at], FINISHED]:
                at += 1
            if at == MEMBERS + size or batches[first, at] != r:
                return 0
            at += 1
        limit = rows[r, MOST]
        if 0 < rows[r, STOP] < limit:
            limit = rows[r, STOP]
        most = min(most, limit - rows[r, OUTPUTS])
    if overlaps and size > count:
        for i in range(at, MEMBERS + size):
            if batches[first, i] < 0 or not rows[batches[first, i], FINISHED]:
                return 0
        batches[first, SIZE] = count
        for i in range(count):
            batches[first, MEMBERS + i] = running[i]
    return most


@kernel
def begin(ints, count, context):
    """Describe a batch of decodes."""
    ints[PREFILL_TOKENS : SAMPLED + 1] = 0
    ints[DECODES] = ints[SAMPLED] = count
    ints[CONTEXT] = context


@kernel
def decode_step(run, kind, slots, waiting, overlaps, running, tape, is_first):
    """Launch the batch once more, process the result that is due, and stream it."""
    ints, floats, ends, counts = run.ints, run.floats, run.ends, tape.counts
    first, count = ints[FIRST], ints[DECODES]
    spare = (first + 1) % 2
    work_before(run)
    launch(run, spare, kind, slots, waiting)
    ints[IN_FLIGHT] -= 1
    due = first if overlaps else spare
    floats[NOW] = max(floats[NOW], ends[due, END]) + ends[due, AFTER]
    if overlaps:
        ends[first, END], ends[first, AFTER] = ends[spare, END], ends[spare, AFTER]
    emission = counts[EMISSIONS]
    stayed = _join_first(run, running, count, tape, emission) if is_first else count
    tape.base[emission], tape.sizes[emission, 0], tape.sizes[emission, 1] = floats[NOW], count, stayed
    counts[EMISSIONS] = emission + 1
    ints[CONTEXT] += count


@kernel
def _join_first(run, running, count, tape, emission):
    """Let those join who had no token in the emission before that one. Returns how many had."""
    rows, time, stayed = run.rows, run.floats[NOW] + run.floats[DELAY], 0
    for i in range(count):
        r = running[i]
        if stays(rows, r, emission):
            stayed += 1
        else:
            join(rows, run.times, run.floats, tape, r, emission, time)
    return stayed


@kernel
def finish(run, running, count, emission, steps):
    """Write down what so many steps, the last of which is that emission, did to each request."""
    rows, times, time = run.rows, run.times, run.floats[NOW] + run.floats[DELAY]
    run.ints[SINCE_OUTPUT] = 0
    for i in range(count):
        r = running[i]
        rows[r, OUTPUTS] += steps
        rows[r, LAST_EMISSION] = emission
        times[r, LAST_TOKEN] = time
