"""vLLM's scheduler, compiled: `sim.engines.vllm.scheduler` under first come, first served.

Prompts share nothing, so the pool is `CountingBlockPool`. Tests hold all of it to the originals.
"""

from __future__ import annotations

import numpy as np

from sim.fast.jit import allocating, kernel
from sim.fast.prices import ANY_BATCH
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
from sim.fast.state import (
    ASKED,
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
    OUTPUTS,
    PREEMPTED,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PROMPT,
    SAMPLED,
    SIZE,
    STEPS,
    STOP,
    TROUBLE,
    note_admission,
    note_chunk,
    pop,
    push_front,
    remove,
)
from sim.fast.tape import is_short, longer, new_tape
from sim.fast.vllm_leap import leap
from sim.fast.vllm_pool import allocate, free, num_waiting, register
from sim.fast.vllm_state import (
    ADAPTIVE,
    BLOCK,
    BLOCKED,
    CACHES,
    CHUNKED,
    COMPUTED,
    FREE,
    HASHED,
    HELD,
    IS_ASYNC,
    LEFT,
    LONG_PREFILL,
    MAX_BATCHED,
    MAX_MODEL_LEN,
    MAX_RUNNING,
    PLACEHOLDERS,
    RESERVE_FULL,
    RUNNING,
    SEPARATE,
    SKIPPED,
    STALE,
    TOKEN_BUDGET,
    UNANNOUNCED,
    USABLE,
    WAITING,
    WATERMARK,
)


@allocating
def simulate(run):
    """`Replica._loop`. ints[TROUBLE] tells whether it came to an end; returns the tape."""
    rows, times, ints, floats, batches = run.rows, run.times, run.ints, run.floats, run.batches
    width, depth = batches.shape[1] - MEMBERS, 2 if ints[IS_ASYNC] else 1
    tape = new_tape(len(rows) + width + 1)
    queue = len(rows) + 1
    lists = np.empty(2 * queue + 3 * width + ints[BLOCK], np.int64)
    waiting, skipped, lists = lists[:queue], lists[queue : 2 * queue], lists[2 * queue :]
    if not ints[SEPARATE]:
        skipped = waiting
    running, got, ended = lists[:width], lists[width : 2 * width], lists[2 * width : 3 * width]
    begun = lists[3 * width :]
    while not ints[TROUBLE]:
        send_due(run)
        if is_over(run):
            break
        if take_in(run, waiting, WAITING):
            ints[BLOCKED] = 0  # how long a chunk may be depends on how many wait
        if leap(run, running, tape, begun):
            continue
        nothing = False
        if ints[RUNNING] or num_waiting(ints) or ints[UNANNOUNCED]:
            slot = (ints[FIRST] + ints[IN_FLIGHT]) % 2
            schedule(rows, times, ints, floats, batches, slot, running, waiting, skipped, got)
            if ints[TROUBLE] or ints[STEPS] >= ints[MAX_STEPS]:
                ints[TROUBLE] = 1
                break
            used, total = (ints[USABLE] - ints[FREE]) * ints[BLOCK], ints[USABLE] * ints[BLOCK]
            note_state(run, tape, ints[RUNNING], num_waiting(ints), used, total)
            work_before(run)
            nothing = batches[slot, SIZE] == 0
            if not nothing:
                launch(run, slot, ANY_BATCH, ints[RUNNING], num_waiting(ints))
                if ints[IN_FLIGHT] < depth:
                    continue
        elif not ints[IN_FLIGHT]:
            if not sleep(run):
                break
            continue
        if ints[IN_FLIGHT]:
            slot = await_result(run)
            update(rows, ints, batches, slot, running, waiting, skipped, got, ended)
            if is_short(tape, width):
                tape = longer(tape, width)
            deliver(run, slot, got, ended, tape)
        elif nothing:
            ints[IDLE_CALLS] += 1
            ints[TROUBLE] |= ints[IDLE_CALLS] > MAX_IDLE_CALLS
        if nothing and ints[RUNNING] + num_waiting(ints):
            floats[NOW] += floats[IDLE_POLL]
    return tape


# -- a scheduling call -------------------------------------------------------------------------------------


@kernel
def schedule(rows, times, ints, floats, batches, slot, running, waiting, skipped, aside):
    """Decide the next batch; `aside` has room for those who wait for results in flight."""
    ints[PREFILL_TOKENS : SAMPLED + 1] = 0
    batches[slot, :MEMBERS] = 0
    threshold = _threshold(ints)
    budget, preempted = _schedule_running(rows, ints, batches, slot, running, waiting, threshold)
    ints[BLOCKED] = 0
    if not preempted:
        _schedule_waiting(
            rows, times, ints, floats, batches, slot, running, waiting, skipped, aside, threshold, budget
        )  # fmt: skip
    ints[UNANNOUNCED] = 0
    if not (batches[slot, SIZE] or preempted or ints[IN_FLIGHT]):
        ints[TROUBLE] |= ints[RUNNING] + num_waiting(ints) > 0
    ints[PREEMPTIONS] += preempted


@kernel
def _threshold(ints):
    requests = ints[RUNNING] + num_waiting(ints)
    if not ints[LONG_PREFILL] or (not ints[SEPARATE] and requests <= 1):
        return ints[MAX_MODEL_LEN]
    if not ints[SEPARATE] and ints[ADAPTIVE]:
        return max(ints[LONG_PREFILL], ints[MAX_BATCHED] // requests)
    return ints[LONG_PREFILL]


@kernel
def _run(rows, ints, batches, slot, r, known, new):
    start = rows[r, COMPUTED]
    end = rows[r, COMPUTED] = start + new
    register(rows, ints, r, min(end, known))
    samples = end >= known + rows[r, PLACEHOLDERS]
    if samples:
        rows[r, PLACEHOLDERS] += ints[IS_ASYNC]
    note_chunk(ints, batches, slot, r, start, new, samples)


@kernel
def _schedule_running(rows, ints, batches, slot, running, waiting, threshold):
    last_position, block, caches, is_async = (
        ints[MAX_MODEL_LEN] - 1,
        ints[BLOCK],
        ints[CACHES],
        ints[IS_ASYNC],
    )
    budget, index, preempted, count = ints[TOKEN_BUDGET], 0, 0, ints[RUNNING]
    size, context, before = 0, 0, 0  # of the decodes that are not written into ints and batches yet
    while index < count and budget > 0:
        r = running[index]
        computed, ahead = rows[r, COMPUTED], rows[r, PLACEHOLDERS]
        if ahead and computed + 2 - ahead >= rows[r, ASKED]:
            index += 1
            continue
        known = rows[r, PROMPT] + rows[r, OUTPUTS]
        new = known + ahead - computed
        if new == 1 and computed < last_position and computed < rows[r, HELD] * block:
            # What `_run` does for a decode; a call would cost as much as all the rest, once per token.
            rows[r, COMPUTED] = computed + 1
            rows[r, PLACEHOLDERS] = ahead + is_async
            if caches and (rows[r, HASHED] + 1) * block <= min(computed + 1, known):
                rows[r, HASHED] = min(computed + 1, known) // block
            batches[slot, MEMBERS + before + size] = r
            size += 1
            context += computed + 1
            budget -= 1
            index += 1
            continue
        if new != 1 or computed >= last_position:
            new = min(min(new, threshold), min(budget, last_position - computed))
            if new <= 0:
                index += 1
                continue
        if computed + new > rows[r, HELD] * block:
            missing = (computed + new + block - 1) // block - rows[r, HELD]
            victim = -1
            while missing > ints[FREE] and victim != r:
                victim = _preempt(rows, ints, batches, running, waiting)
                preempted += 1
            count = ints[RUNNING]
            if victim == r:
                break
            allocate(rows, ints, r, missing, 0)
        _note_decodes(ints, batches, slot, size, context)
        _run(rows, ints, batches, slot, r, known, new)
        size, context, before = 0, 0, batches[slot, SIZE]
        budget -= new
        index += 1
    _note_decodes(ints, batches, slot, size, context)
    return budget, preempted


@kernel
def _note_decodes(ints, batches, slot, count, context):
    batches[slot, SIZE] += count
    ints[DECODES] += count
    ints[SAMPLED] += count
    ints[CONTEXT] += context


@kernel
def _preempt(rows, ints, batches, running, waiting):
    ints[RUNNING] -= 1
    victim = running[ints[RUNNING]]
    rows[victim, PREEMPTED] += 1
    free(rows, ints, victim)
    rows[victim, COMPUTED] = rows[victim, PLACEHOLDERS] = rows[victim, STALE] = 0
    for k in range(ints[IN_FLIGHT]):
        flight = (ints[FIRST] + k) % 2
        for i in range(MEMBERS, MEMBERS + batches[flight, SIZE]):
            if batches[flight, i] == victim or batches[flight, i] == -1 - victim:
                rows[victim, STALE] += 1
    push_front(waiting, ints, WAITING, victim)
    return victim


@kernel
def _schedule_waiting(
    rows, times, ints, floats, batches, slot, running, waiting, skipped, aside, threshold, budget
):  # fmt: skip
    before, num_aside = ints[RUNNING], 0
    while num_waiting(ints) and budget > 0 and ints[RUNNING] < ints[MAX_RUNNING]:
        at = SKIPPED if ints[SEPARATE] and ints[SKIPPED + 1] else WAITING
        queue = skipped if at == SKIPPED else waiting
        r = queue[ints[at]]
        if rows[r, STALE]:
            aside[num_aside] = pop(queue, ints, at)
            num_aside += 1
            continue
        known, hit = rows[r, PROMPT] + rows[r, OUTPUTS], rows[r, LEFT]
        whole = (known + ints[BLOCK] - 1) // ints[BLOCK]
        if whole > ints[USABLE] or hit > (known - 1) // ints[BLOCK]:
            ints[TROUBLE] = 1
            break
        cached = hit * ints[BLOCK]
        new = min(known - cached, threshold)
        if new > budget:
            if not ints[CHUNKED]:
                break
            new = budget
        available = ints[FREE] - hit - (ints[WATERMARK] if ints[RUNNING] else 0)
        missing = (cached + new + ints[BLOCK] - 1) // ints[BLOCK] - hit
        if missing > available or (ints[RESERVE_FULL] and whole - hit > available):
            break
        allocate(rows, ints, r, missing, hit)
        rows[r, COMPUTED] = cached
        note_admission(rows, times, ints, floats[NOW], r, cached)
        pop(queue, ints, at)
        running[ints[RUNNING]] = r
        ints[RUNNING] += 1
        _run(rows, ints, batches, slot, r, known, new)
        budget -= new
    # The same decodes leave the same budget next time, and free blocks only become fewer.
    decodes_only = ints[DECODES] == ints[RUNNING] == batches[slot, SIZE]
    left = num_waiting(ints)
    ints[BLOCKED] = left > 0 and decodes_only and ints[RUNNING] == before and num_aside == 0
    at = SKIPPED if ints[SEPARATE] else WAITING
    for i in range(num_aside - 1, -1, -1):
        push_front(skipped, ints, at, aside[i])


# -- a result ----------------------------------------------------------------------------------------------


@kernel
def update(rows, ints, batches, slot, running, waiting, skipped, got, ended):
    """Process a result: who got a token goes into `got`, who ends into `ended`."""
    num_got = num_ended = 0
    block, caches = ints[BLOCK], ints[CACHES]
    for i in range(MEMBERS, MEMBERS + batches[slot, SIZE]):
        r = batches[slot, i]
        samples = r >= 0
        if not samples:
            r = -1 - r
        if rows[r, STALE]:
            rows[r, STALE] -= 1
        if rows[r, FINISHED] or not samples:
            continue
        outputs = rows[r, OUTPUTS] = rows[r, OUTPUTS] + 1
        got[num_got] = r
        num_got += 1
        if rows[r, PLACEHOLDERS]:
            rows[r, PLACEHOLDERS] -= 1
            tokens = rows[r, COMPUTED] - rows[r, PLACEHOLDERS]
            if caches and (rows[r, HASHED] + 1) * block <= tokens:
                rows[r, HASHED] = tokens // block
        if outputs == rows[r, STOP] or outputs >= rows[r, MOST]:
            rows[r, FINISHED] = 1
            if rows[r, COMPUTED]:
                free(rows, ints, r)
            elif not (ints[SEPARATE] and remove(skipped, ints, SKIPPED, r)):
                remove(waiting, ints, WAITING, r)
            ended[num_ended] = r
            num_ended += 1
    ints[GOT], ints[ENDED] = num_got, num_ended
    if num_ended:
        ints[UNANNOUNCED], ints[BLOCKED] = 1, 0
        kept = 0
        for i in range(ints[RUNNING]):
            if not rows[running[i], FINISHED]:
                running[kept] = running[i]
                kept += 1
        ints[RUNNING] = kept
