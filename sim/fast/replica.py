"""The parts of `sim.loop.replica` and `sim.loop.client` that both engines' loops share, compiled."""

from __future__ import annotations

from sim.fast.jit import kernel
from sim.fast.prices import note_range, price
from sim.fast.state import (
    AFTER,
    AFTER_FIXED,
    AFTER_SEQ,
    ANSWERED,
    ARRIVAL,
    ASKED,
    AT_ENGINE,
    BUDGET,
    CAP,
    CONTEXT,
    DECODES,
    DELAY,
    DELIVERED_AT,
    DEVICE,
    DEVICE_FREE,
    END,
    ENDED,
    FIRST_RESULT,
    FIRST_TOKEN,
    FRONT_END_FREE,
    FRONT_REQUEST,
    FRONT_TOKEN,
    GOT,
    HOST_TIME,
    IDLE_CALLS,
    IN_FLIGHT,
    INSIDE,
    KV,
    LAST_EMISSION,
    LAST_TOKEN,
    LATEST,
    LIMIT_SEQS,
    LIMIT_TOKENS,
    NOW,
    PAIRS,
    PREFILL,
    PREFILL_CONTEXT,
    PREFILL_TOKENS,
    PROMPT,
    PROMPTS,
    RUN_FIRST,
    SAMPLED,
    SENT,
    SENT_AT,
    SINCE_OUTPUT,
    SLOTS,
    STEPS,
    TOKENS_INSIDE,
    TROUBLE,
    WAITING,
)  # fmt: skip
from sim.fast.tape import APART, EMISSIONS, GAPS, add_run

MAX_IDLE_CALLS = 1000
MAX_RECOMPUTE = 8


@kernel
def next_send(times, ints):
    """When the next request goes out: once it is due and an answer has made room; -1: not known yet."""
    number, cap = ints[SENT], ints[CAP]
    if number == len(times) or (cap and number - ints[ANSWERED] >= cap):
        return -1.0
    when = times[number, ARRIVAL]
    if cap and number >= cap:
        when = max(when, times[number - cap, DELIVERED_AT])
    return when


@kernel
def send_due(rows, times, ints, floats):
    """Send what is due by now; each request queues for the serial front end."""
    when = next_send(times, ints)
    while 0.0 <= when <= floats[NOW]:
        number = ints[SENT]
        times[number, SENT_AT] = when
        floats[FRONT_END_FREE] = max(floats[FRONT_END_FREE], when)
        floats[FRONT_END_FREE] += floats[FRONT_REQUEST] + floats[FRONT_TOKEN] * rows[number, PROMPT]
        times[number, AT_ENGINE] = floats[FRONT_END_FREE]
        ints[SENT] = number + 1
        when = next_send(times, ints)


@kernel
def sleep(times, ints, floats):
    """Go to the next send or arrival at the engine. Returns whether there is one."""
    if ints[INSIDE] < ints[SENT]:
        floats[NOW] = max(floats[NOW], times[ints[INSIDE], AT_ENGINE])
        floats[DEVICE_FREE] = max(floats[DEVICE_FREE], floats[NOW])
        return True
    when = next_send(times, ints)
    if when < 0.0:
        ints[TROUBLE] |= ints[ANSWERED] < len(times)
        return False
    floats[NOW] = max(floats[NOW], when)
    floats[DEVICE_FREE] = max(floats[DEVICE_FREE], floats[NOW])
    return True


@kernel
def launch(model, counted, ints, floats, batches, ends, slot, decode_kind, running, waiting, warm):
    """`Replica._launch`: put a batch behind what the device still runs."""
    values, decode_sizes, other_sizes, valid = model
    tokens = ints[PREFILL_TOKENS] + ints[DECODES]
    start = max(floats[NOW], floats[DEVICE_FREE])
    seconds, resource = price(
        values, decode_sizes, other_sizes, decode_kind, ints[PREFILL_TOKENS], ints[PROMPTS], ints[DECODES],
        ints[PAIRS], ints[PREFILL_CONTEXT], ints[CONTEXT], ints[SAMPLED], start, warm,
    )  # fmt: skip
    floats[DEVICE + resource] += seconds
    floats[HOST_TIME] += start - floats[DEVICE_FREE]
    floats[DEVICE_FREE] = start + seconds
    ints[STEPS] += 1
    note_range(valid, counted, ints[PREFILL_TOKENS], ints[PROMPTS], ints[DECODES], ints[CONTEXT])
    if waiting:
        reason = KV
        if tokens >= ints[LIMIT_TOKENS]:
            reason = BUDGET
        elif running >= ints[LIMIT_SEQS]:
            reason = SLOTS
        floats[WAITING + reason] += seconds
    ints[IDLE_CALLS] = 0
    ints[SINCE_OUTPUT] += tokens
    ends[slot, END] = floats[DEVICE_FREE]
    ends[slot, AFTER] = floats[AFTER_FIXED] + floats[AFTER_SEQ] * (ints[DECODES] + ints[PROMPTS])
    ints[IN_FLIGHT] += 1


@kernel
def deliver(
    rows,
    times,
    ints,
    floats,
    batches,
    slot,
    got,
    ended,
    counts,
    base,
    sizes,
    gaps,
    runs,
    apart_row,
    apart_time,
):
    """Stream the tokens of a result, and note who is done."""
    time, apart = floats[NOW] + floats[DELAY], batches[slot, PREFILL] != 0
    emission, stayed = counts[EMISSIONS], 0
    if ints[GOT]:
        ints[SINCE_OUTPUT] = 0
    elif ints[SINCE_OUTPUT] > MAX_RECOMPUTE * ints[TOKENS_INSIDE] + MAX_IDLE_CALLS:
        ints[TROUBLE] = 1
    for i in range(ints[GOT]):
        r = got[i]
        if not apart and rows[r, RUN_FIRST] >= 0 and rows[r, LAST_EMISSION] == emission - 1:
            stayed += 1
        else:
            if rows[r, RUN_FIRST] >= 0:
                add_run(counts, runs, r, rows[r, RUN_FIRST], rows[r, LAST_EMISSION])
            if rows[r, LAST_EMISSION] >= -1:
                gaps[counts[GAPS]] = time - times[r, LAST_TOKEN]
                counts[GAPS] += 1
            else:
                times[r, FIRST_RESULT], times[r, FIRST_TOKEN] = floats[NOW], time
            rows[r, RUN_FIRST] = -1 if apart else emission
            if apart:
                apart_row[counts[APART]], apart_time[counts[APART]] = r, time
                counts[APART] += 1
        rows[r, LAST_EMISSION] = -1 if apart else emission
        times[r, LAST_TOKEN] = time
    if ints[GOT] and not apart:
        base[emission], sizes[emission, 0], sizes[emission, 1] = floats[NOW], ints[GOT], stayed
        counts[EMISSIONS] = emission + 1
    for i in range(ints[ENDED]):
        r = ended[i]
        if rows[r, RUN_FIRST] >= 0:
            add_run(counts, runs, r, rows[r, RUN_FIRST], rows[r, LAST_EMISSION])
        ints[TOKENS_INSIDE] -= rows[r, ASKED]
        floats[LATEST] = max(floats[LATEST], times[r, LAST_TOKEN])
        times[ints[ANSWERED], DELIVERED_AT] = times[r, LAST_TOKEN]
        ints[ANSWERED] += 1
