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
    BEFORE_FIXED,
    BEFORE_SEQ,
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
    FIRST,
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
    MAX_USED,
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
    push,
)  # fmt: skip
from sim.fast.tape import APART, EMISSIONS, GAPS, add_run, sample

MAX_IDLE_CALLS = 1000
MAX_RECOMPUTE = 8


@kernel
def next_send(run):
    """When the next request goes out: once it is due and an answer has made room; -1: not known yet."""
    times, ints = run.times, run.ints
    number, cap = ints[SENT], ints[CAP]
    if number == len(times) or (cap and number - ints[ANSWERED] >= cap):
        return -1.0
    when = times[number, ARRIVAL]
    if cap and number >= cap:
        when = max(when, times[number - cap, DELIVERED_AT])
    return when


@kernel
def send_due(run):
    """Send what is due by now; each request queues for the serial front end."""
    times, ints, floats = run.times, run.ints, run.floats
    when = next_send(run)
    while 0.0 <= when <= floats[NOW]:
        number = ints[SENT]
        times[number, SENT_AT] = when
        floats[FRONT_END_FREE] = max(floats[FRONT_END_FREE], when)
        floats[FRONT_END_FREE] += floats[FRONT_REQUEST] + floats[FRONT_TOKEN] * run.rows[number, PROMPT]
        times[number, AT_ENGINE] = floats[FRONT_END_FREE]
        ints[SENT] = number + 1
        when = next_send(run)


@kernel
def is_over(run):
    """Whether every request was answered, and the clock has passed the last answer."""
    return run.ints[ANSWERED] == len(run.rows) and run.floats[LATEST] < run.floats[NOW]


@kernel
def take_in(run, waiting, queue):
    """Let those who have reached the engine join its queue. Returns whether there were any."""
    ints, before = run.ints, run.ints[INSIDE]
    while ints[INSIDE] < ints[SENT] and run.times[ints[INSIDE], AT_ENGINE] <= run.floats[NOW]:
        push(waiting, ints, queue, ints[INSIDE])
        ints[TOKENS_INSIDE] += run.rows[ints[INSIDE], ASKED]
        ints[INSIDE] += 1
    return ints[INSIDE] > before


@kernel
def sleep(run):
    """Go to the next send or arrival at the engine. Returns whether there is one."""
    times, ints, floats = run.times, run.ints, run.floats
    if ints[INSIDE] < ints[SENT]:
        floats[NOW] = max(floats[NOW], times[ints[INSIDE], AT_ENGINE])
        floats[DEVICE_FREE] = max(floats[DEVICE_FREE], floats[NOW])
        return True
    when = next_send(run)
    if when < 0.0:
        ints[TROUBLE] |= ints[ANSWERED] < len(times)
        return False
    floats[NOW] = max(floats[NOW], when)
    floats[DEVICE_FREE] = max(floats[DEVICE_FREE], floats[NOW])
    return True


@kernel
def note_state(run, tape, running, waiting, used, total):
    """What `Replica._note_plan` keeps of queues and KV tokens."""
    run.ints[MAX_USED] = max(run.ints[MAX_USED], used)
    sample(tape, run.floats[NOW], running, waiting, used / total)


@kernel
def work_before(run):
    """The host's work before a launch takes its time."""
    ints, floats = run.ints, run.floats
    floats[NOW] += floats[BEFORE_FIXED] + floats[BEFORE_SEQ] * (ints[DECODES] + ints[PROMPTS])


@kernel
def launch(run, slot, kind, running, waiting):
    """`Replica._launch`: put a batch behind what the device still runs."""
    ints, floats = run.ints, run.floats
    values, decode_sizes, other_sizes, valid = run.model
    tokens = ints[PREFILL_TOKENS] + ints[DECODES]
    start = max(floats[NOW], floats[DEVICE_FREE])
    seconds, resource = price(
        values, decode_sizes, other_sizes, kind, ints[PREFILL_TOKENS], ints[PROMPTS], ints[DECODES],
        ints[PAIRS], ints[PREFILL_CONTEXT], ints[CONTEXT], ints[SAMPLED], start, run.warm,
    )  # fmt: skip
    floats[DEVICE + resource] += seconds
    floats[HOST_TIME] += start - floats[DEVICE_FREE]
    floats[DEVICE_FREE] = start + seconds
    ints[STEPS] += 1
    note_range(valid, run.beyond, ints[PREFILL_TOKENS], ints[PROMPTS], ints[DECODES], ints[CONTEXT])
    if waiting:
        reason = KV
        if tokens >= ints[LIMIT_TOKENS]:
            reason = BUDGET
        elif running >= ints[LIMIT_SEQS]:
            reason = SLOTS
        floats[WAITING + reason] += seconds
    ints[IDLE_CALLS] = 0
    ints[SINCE_OUTPUT] += tokens
    run.ends[slot, END] = floats[DEVICE_FREE]
    run.ends[slot, AFTER] = floats[AFTER_FIXED] + floats[AFTER_SEQ] * (ints[DECODES] + ints[PROMPTS])
    ints[IN_FLIGHT] += 1


@kernel
def await_result(run):
    """Wait for the oldest batch in flight. Returns its slot."""
    ints, floats = run.ints, run.floats
    slot = ints[FIRST]
    ints[FIRST] = (slot + 1) % 2
    ints[IN_FLIGHT] -= 1
    floats[NOW] = max(floats[NOW], run.ends[slot, END])
    return slot


@kernel
def deliver(run, slot, got, ended, tape):
    """Stream the tokens of a result once the host is done with it, and note who is done."""
    rows, times, ints, floats = run.rows, run.times, run.ints, run.floats
    counts = tape.counts
    floats[NOW] += run.ends[slot, AFTER]
    time, apart = floats[NOW] + floats[DELAY], run.batches[slot, PREFILL] != 0
    emission, stayed = counts[EMISSIONS], 0
    if ints[GOT]:
        ints[SINCE_OUTPUT] = 0
    elif ints[SINCE_OUTPUT] > MAX_RECOMPUTE * ints[TOKENS_INSIDE] + MAX_IDLE_CALLS:
        ints[TROUBLE] = 1
    for i in range(ints[GOT]):
        r = got[i]
        if apart:
            _leave(rows, tape, r)
            _receives(rows, times, floats, tape, r, time)
            tape.apart_row[counts[APART]], tape.apart_time[counts[APART]] = r, time
            counts[APART] += 1
        elif stays(rows, r, emission):
            stayed += 1
        else:
            join(rows, times, floats, tape, r, emission, time)
        rows[r, LAST_EMISSION] = -1 if apart else emission
        times[r, LAST_TOKEN] = time
    if ints[GOT] and not apart:
        tape.base[emission], tape.sizes[emission, 0], tape.sizes[emission, 1] = floats[NOW], ints[GOT], stayed
        counts[EMISSIONS] = emission + 1
    for i in range(ints[ENDED]):
        note_end(run, tape, ended[i])


@kernel
def stays(rows, r, emission):
    """Whether the emission before that one had a token for a request."""
    return rows[r, RUN_FIRST] >= 0 and rows[r, LAST_EMISSION] == emission - 1


@kernel
def join(rows, times, floats, tape, r, emission, time):
    """A request has a token in that emission, but none in the one before."""
    _leave(rows, tape, r)
    _receives(rows, times, floats, tape, r, time)
    rows[r, RUN_FIRST] = emission


@kernel
def _leave(rows, tape, r):
    if rows[r, RUN_FIRST] >= 0:
        add_run(tape, r, rows[r, RUN_FIRST], rows[r, LAST_EMISSION])
        rows[r, RUN_FIRST] = -1


@kernel
def _receives(rows, times, floats, tape, r, time):
    """A first token, or one that continues no run."""
    if rows[r, LAST_EMISSION] >= -1:
        tape.gaps[tape.counts[GAPS]] = time - times[r, LAST_TOKEN]
        tape.counts[GAPS] += 1
    else:
        times[r, FIRST_RESULT], times[r, FIRST_TOKEN] = floats[NOW], time


@kernel
def note_end(run, tape, r):
    """The latest token of a request was its last."""
    times, ints, floats = run.times, run.ints, run.floats
    _leave(run.rows, tape, r)
    ints[TOKENS_INSIDE] -= run.rows[r, ASKED]
    floats[LATEST] = max(floats[LATEST], times[r, LAST_TOKEN])
    times[ints[ANSWERED], DELIVERED_AT] = times[r, LAST_TOKEN]
    ints[ANSWERED] += 1
