"""SGLang's scheduler, compiled: `sim.engines.sglang.scheduler` under first come, first served.

With a radix cache, without priorities and mixed batches; prompts share nothing (`sim.fast.chains`). Tests
hold all of it to the originals.
"""

from __future__ import annotations

import numpy as np

from sim.engines.sglang.new_token_ratio import RETRACT_DECODE_STEPS
from sim.fast.chains import EVICTABLE, PAGE, is_full, larger
from sim.fast.jit import allocating, kernel
from sim.fast.prices import DECODE_BATCH, PREFILL_BATCH
from sim.fast.replica import (
    MAX_IDLE_CALLS,
    await_result,
    deliver,
    is_over,
    launch,
    note_state,
    send_due,
    sleep,
    take_in,
    work_before,
)
from sim.fast.sglang_admission import new_prefill_batch
from sim.fast.sglang_leap import leap
from sim.fast.sglang_pool import (
    allocate_extend,
    decode_fits,
    drop_finished,
    end,
    is_done,
    make_room,
    new_pages,
    release,
    store_unfinished,
)
from sim.fast.sglang_state import (
    AVAILABLE,
    CAN_RUN,
    CHUNKED,
    DECODE_ROUNDS,
    FREE_SLOTS,
    HOLDS_SLOT,
    IDLE,
    INTERVAL,
    IS_FULL,
    KV,
    LAST,
    LAST_CHUNKED,
    LAST_PREFILL_ONLY,
    NOBODY,
    OVERLAPS,
    PREFILL_ONLY,
    PREFIX,
    RATIO,
    RATIO_DECAY,
    RATIO_INIT,
    RATIO_MIN,
    RATIO_RESETS,
    REQUEST_SLOTS,
    RETRACTED,
    RUNNING,
    SOME_FINISHED,
    START,
    STOPS_AT,
    TOTAL,
    WAITING,
)
from sim.fast.state import (
    CHUNKED_ONE,
    CONTEXT,
    DECODES,
    ENDED,
    FINISHED,
    FIRST,
    GOT,
    IDLE_CALLS,
    IDLE_POLL,
    IN_FLIGHT,
    MAX_STEPS,
    MEMBERS,
    MOST,
    NOW,
    NUM_PREFILL,
    OUTPUTS,
    PREEMPTED,
    PREEMPTIONS,
    PREFILL,
    PREFILL_TOKENS,
    PROMPT,
    SAMPLED,
    SIZE,
    STEPS,
    TROUBLE,
    note_chunk,
    push,
)
from sim.fast.tape import is_short, longer, new_tape

RETRACT_STEPS = RETRACT_DECODE_STEPS


@allocating
def simulate(run):
    """`Replica._loop`. ints[TROUBLE] tells whether it came to an end; returns the tape."""
    rows, times, ints, floats, batches = run.rows, run.times, run.ints, run.floats, run.batches
    width, depth = batches.shape[1] - MEMBERS, 2 if ints[OVERLAPS] else 1
    tape = new_tape(len(rows) + width + 1)
    lists = np.empty(len(rows) + 1 + 6 * width + ints[PAGE], np.int64)
    running, last, can_run = lists[: 2 * width], lists[2 * width : 3 * width], lists[3 * width : 4 * width]
    got, ended, lists = lists[4 * width : 5 * width], lists[5 * width : 6 * width], lists[6 * width :]
    begun, waiting = lists[: ints[PAGE]], lists[ints[PAGE] :]
    nodes, leaves = np.zeros((6 * width + 64, 7), np.int64), np.zeros((6 * width + 64, 3), np.int64)
    while not ints[TROUBLE]:
        send_due(run)
        if is_over(run):
            break
        if take_in(run, waiting, WAITING):
            ints[IDLE] = 0
        if is_full(ints, nodes, 3 * width + 8):
            nodes, leaves = larger(nodes, leaves)
        if leap(run, nodes, leaves, running, tape, begun):
            continue
        nothing = False
        if not ints[IDLE]:
            slot = (ints[FIRST] + ints[IN_FLIGHT]) % 2
            schedule(rows, times, ints, floats, batches, nodes, leaves, slot, running, last, can_run, waiting)
            if ints[TROUBLE] or ints[STEPS] >= ints[MAX_STEPS]:
                ints[TROUBLE] = 1
                break
            used = ints[TOTAL] - ints[AVAILABLE] - ints[EVICTABLE]
            note_state(run, tape, num_running(ints), ints[WAITING + 1], used, ints[TOTAL])
            work_before(run)
            nothing = batches[slot, SIZE] == 0
            if not nothing:
                kind = PREFILL_BATCH if batches[slot, PREFILL] else DECODE_BATCH
                launch(run, slot, kind, num_running(ints), ints[WAITING + 1])
                if ints[IN_FLIGHT] < depth:
                    continue
        elif not ints[IN_FLIGHT]:
            if not sleep(run):
                break
            continue
        if ints[IN_FLIGHT]:
            slot = await_result(run)
            update(rows, ints, batches, nodes, leaves, slot, got, ended)
            if is_short(tape, width):
                tape = longer(tape, width)
            deliver(run, slot, got, ended, tape)
        elif nothing:
            ints[IDLE_CALLS] += 1
            ints[TROUBLE] |= ints[IDLE_CALLS] > MAX_IDLE_CALLS
        if nothing and num_running(ints) + ints[WAITING + 1]:
            floats[NOW] += floats[IDLE_POLL]
    return tape


@kernel
def num_running(ints):
    """Requests with a slot."""
    return ints[REQUEST_SLOTS] - ints[FREE_SLOTS]


# -- a scheduling call -------------------------------------------------------------------------------------


@kernel
def schedule(rows, times, ints, floats, batches, nodes, leaves, slot, running, last, can_run, waiting):
    """Decide the next batch."""
    ints[PREFILL_TOKENS : SAMPLED + 1] = 0
    batches[slot, :MEMBERS] = 0
    batches[slot, CHUNKED_ONE] = NOBODY
    if ints[RATIO_RESETS]:
        ints[RATIO_RESETS] = 0
        floats[RATIO] = floats[RATIO_INIT]
    _merge_last_prefill(rows, ints, nodes, leaves, running, last)
    stands_still = ints[DECODE_ROUNDS] == 0
    if ints[DECODE_ROUNDS]:
        ints[DECODE_ROUNDS] -= 1
    elif new_prefill_batch(rows, times, ints, floats, nodes, leaves, running, can_run, waiting):
        ints[DECODE_ROUNDS] = ints[INTERVAL]
        _launch_prefill(rows, ints, batches, nodes, leaves, slot, last, can_run)
        return
    if ints[RUNNING] and not ints[PREFILL_ONLY]:
        _update_running(rows, ints, floats, nodes, leaves, running, waiting)
        stands_still = False
    if ints[RUNNING] and not ints[PREFILL_ONLY]:
        _launch_decode(rows, ints, batches, nodes, leaves, slot, running)
    elif not ints[IN_FLIGHT]:
        if ints[WAITING + 1]:
            ints[TROUBLE] |= stands_still
        else:
            ints[IDLE] = ints[RATIO_RESETS] = ints[CHUNKED] == NOBODY


@kernel
def _merge_last_prefill(rows, ints, nodes, leaves, running, last):
    chunked = ints[CHUNKED]
    if chunked != NOBODY and rows[chunked, STOPS_AT] > rows[chunked, PREFIX]:
        store_unfinished(rows, ints, nodes, leaves, chunked)
    if ints[LAST] != NOBODY:
        count, ready = ints[LAST], 0
        ints[LAST] = NOBODY
        for i in range(count):
            r = last[i]
            if not (rows[r, FINISHED] or r == chunked or r == ints[LAST_CHUNKED]):
                running[ints[RUNNING] + ready] = r
                ready += 1
        if ready < count:
            ints[IS_FULL] = 0
        if ready and not ints[RUNNING]:
            ints[IS_FULL], ints[PREFILL_ONLY] = 0, ints[LAST_PREFILL_ONLY]
        elif ready:
            ints[PREFILL_ONLY] &= ints[LAST_PREFILL_ONLY]
        ints[RUNNING] += ready
    if ints[PREFILL_ONLY]:
        drop_finished(rows, ints, running)
        if not ints[RUNNING]:
            ints[IS_FULL] = 0


@kernel
def _launch_prefill(rows, ints, batches, nodes, leaves, slot, last, can_run):
    for i in range(ints[CAN_RUN]):
        r = can_run[i]
        if not rows[r, HOLDS_SLOT]:
            rows[r, HOLDS_SLOT] = 1
            ints[FREE_SLOTS] -= 1
        rows[r, RETRACTED] = 0
    allocate_extend(rows, ints, nodes, leaves, can_run)
    for i in range(ints[CAN_RUN]):
        r = can_run[i]
        last[i] = r
        note_chunk(
            ints,
            batches,
            slot,
            r,
            rows[r, START],
            rows[r, STOPS_AT] - rows[r, START],
            r != ints[LAST_CHUNKED],
        )
    batches[slot, NUM_PREFILL], batches[slot, CHUNKED_ONE], batches[slot, PREFILL] = (
        ints[CAN_RUN],
        ints[LAST_CHUNKED],
        1,
    )
    ints[LAST] = ints[CAN_RUN]


@kernel
def _update_running(rows, ints, floats, nodes, leaves, running, waiting):
    shrank = ints[SOME_FINISHED] and drop_finished(rows, ints, running)
    if not ints[RUNNING]:
        ints[IS_FULL] = 0
        return
    if decode_fits(rows, ints, nodes, leaves, running, ints[RUNNING]):
        floats[RATIO] = max(floats[RATIO] - floats[RATIO_DECAY], floats[RATIO_MIN])
    else:
        _retract(rows, ints, floats, nodes, leaves, running, waiting)
        shrank = True
    if shrank:
        ints[IS_FULL] = 0


@allocating
def _retract(rows, ints, floats, nodes, leaves, running, waiting):
    """`retract_decode`: the fewest outputs go first, among equals the longest prompt."""
    count = ints[RUNNING]
    order = np.empty(count, np.int64)
    for i in range(count):
        order[i] = rows[running[i], PROMPT] - (rows[running[i], OUTPUTS] << 32)
    running[:count] = running[:count][np.argsort(order, kind="mergesort")]
    before = count
    while count > 1 and (count == before or not decode_fits(rows, ints, nodes, leaves, running, count)):
        count -= 1
        victim = running[count]
        release(rows, ints, nodes, leaves, victim, False)
        make_room(rows, ints, nodes, leaves, RETRACT_STEPS * count)
        rows[victim, RETRACTED], rows[victim, HOLDS_SLOT] = 1, 0
        rows[victim, PREEMPTED] += 1
        ints[FREE_SLOTS] += 1
    if count == 1 and not decode_fits(rows, ints, nodes, leaves, running, count):
        ints[TROUBLE] = 1
    for i in range(before - 1, count - 1, -1):
        push(waiting, ints, WAITING, running[i])
    ints[PREEMPTIONS] += before - count
    ints[RUNNING] = count
    outputs = limits = 0
    for i in range(count):
        outputs += rows[running[i], OUTPUTS]
        limits += rows[running[i], MOST]
    floats[RATIO] = min(1.0, (outputs + RETRACT_STEPS * count) / (limits + 1))


@kernel
def _launch_decode(rows, ints, batches, nodes, leaves, slot, running):
    make_room(rows, ints, nodes, leaves, ints[PAGE] * ints[RUNNING])
    taken = new_pages(rows, ints, running, ints[RUNNING])
    if taken > ints[AVAILABLE]:
        ints[TROUBLE] = 1
    ints[AVAILABLE] -= taken
    count, context = ints[RUNNING], 0
    for i in range(count):
        r = running[i]
        held = rows[r, KV] = rows[r, KV] + 1
        context += held
        batches[slot, MEMBERS + i] = r
    ints[DECODES] = ints[SAMPLED] = batches[slot, SIZE] = count
    ints[CONTEXT] = context


# -- a result ----------------------------------------------------------------------------------------------


@kernel
def update(rows, ints, batches, nodes, leaves, slot, got, ended):
    """Process a result: who got a token goes into `got`, who ends into `ended`."""
    num_got = num_ended = 0
    for i in range(batches[slot, SIZE]):
        r = batches[slot, MEMBERS + i]
        if r < 0 or rows[r, FINISHED] or rows[r, RETRACTED]:
            continue
        rows[r, OUTPUTS] += 1
        got[num_got] = r
        num_got += 1
        if is_done(rows, r):
            end(rows, ints, nodes, leaves, r)
            ended[num_ended] = r
            num_ended += 1
        elif i < batches[slot, NUM_PREFILL]:
            store_unfinished(rows, ints, nodes, leaves, r)
    ints[GOT], ints[ENDED] = num_got, num_ended
