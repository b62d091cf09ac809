"""vLLM's scheduler, compiled: `sim.engines.vllm.scheduler` under first come, first served.

Prompts share nothing, so the pool is `CountingBlockPool`. Tests hold all of it to the originals.
"""

from __future__ import annotations

import numpy as np

from sim.fast.jit import borrowed, kernel
from sim.fast.prices import lent as lent_model
from sim.fast.replica import MAX_IDLE_CALLS, deliver, launch, send_due, sleep
from sim.fast.state import (
    AFTER,
    ANSWERED,
    ASKED,
    AT_ENGINE,
    BEFORE_FIXED,
    BEFORE_SEQ,
    CONTEXT,
    DECODES,
    END,
    ENDED,
    FINISHED,
    FIRST,
    GOT,
    IDLE_CALLS,
    IDLE_POLL,
    IN_FLIGHT,
    INSIDE,
    LATEST,
    MAX_STEPS,
    MAX_USED,
    MEMBERS,
    MOST,
    NOW,
    OUTPUTS,
    PREEMPTED,
    PREEMPTIONS,
    PREFILL_TOKENS,
    PROMPT,
    PROMPTS,
    SAMPLED,
    SENT,
    SIZE,
    STEPS,
    STOP,
    TOKENS_INSIDE,
    TROUBLE,
    note_admission,
    note_chunk,
    pop,
    push,
    push_front,
    remove,
)
from sim.fast.tape import is_short, lent, longer, new_tape, sample
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


@kernel
def simulate(model, counted, rows, times, ints, floats, batches, ends, warm):
    """`Replica._loop`. ints[TROUBLE] tells whether it came to an end; returns the tape."""
    width, depth = batches.shape[1] - MEMBERS, 2 if ints[IS_ASYNC] else 1
    model, counted = lent_model(model, counted)
    rows, times, ints, floats = borrowed(rows), borrowed(times), borrowed(ints), borrowed(floats)
    batches, ends, warm = borrowed(batches), borrowed(ends), borrowed(warm)
    tape = new_tape(len(rows) + width + 1)
    counts, base, sizes, gaps, runs, apart_row, apart_time, samples = lent(tape)
    queue = len(rows) + 1
    room = np.empty(2 * queue + 3 * width + ints[BLOCK], np.int64)
    lists = borrowed(room)
    waiting, skipped, lists = lists[:queue], lists[queue : 2 * queue], lists[2 * queue :]
    if not ints[SEPARATE]:
        skipped = waiting
    running, got, ended = lists[:width], lists[width : 2 * width], lists[2 * width : 3 * width]
    begun = lists[3 * width :]
    while not ints[TROUBLE]:
        send_due(rows, times, ints, floats)
        if ints[ANSWERED] == len(rows) and floats[LATEST] < floats[NOW]:
            break
        while ints[INSIDE] < ints[SENT] and times[ints[INSIDE], AT_ENGINE] <= floats[NOW]:
            push(waiting, ints, WAITING, ints[INSIDE])
            ints[TOKENS_INSIDE] += rows[ints[INSIDE], ASKED]
            ints[INSIDE] += 1
        nothing = False
        if leap(
            model, counted, rows, times, ints, floats, batches, ends, running, warm, counts, base, sizes,
            samples, begun,
        ):  # fmt: skip
            continue
        if ints[RUNNING] or num_waiting(ints) or ints[UNANNOUNCED]:
            slot = (ints[FIRST] + ints[IN_FLIGHT]) % 2
            schedule(rows, times, ints, floats, batches, slot, running, waiting, skipped)
            if ints[TROUBLE] or ints[STEPS] >= ints[MAX_STEPS]:
                ints[TROUBLE] = 1
                break
            used, total = (ints[USABLE] - ints[FREE]) * ints[BLOCK], ints[USABLE] * ints[BLOCK]
            ints[MAX_USED] = max(ints[MAX_USED], used)
            sample(counts, samples, floats[NOW], ints[RUNNING], num_waiting(ints), used / total)
            floats[NOW] += floats[BEFORE_FIXED] + floats[BEFORE_SEQ] * (ints[DECODES] + ints[PROMPTS])
            nothing = batches[slot, SIZE] == 0
            if not nothing:
                launch(
                    model,
                    counted,
                    ints,
                    floats,
                    batches,
                    ends,
                    slot,
                    False,
                    ints[RUNNING],
                    num_waiting(ints),
                    warm,
                )
                if ints[IN_FLIGHT] < depth:
                    continue
        elif not ints[IN_FLIGHT]:
            if not sleep(times, ints, floats):
                break
            continue
        if ints[IN_FLIGHT]:
            slot = ints[FIRST]
            ints[FIRST] = (slot + 1) % 2
            ints[IN_FLIGHT] -= 1
            floats[NOW] = max(floats[NOW], ends[slot, END])
            update(rows, ints, batches, slot, running, waiting, skipped, got, ended)
            floats[NOW] += ends[slot, AFTER]
            if is_short(counts, base, gaps, runs, apart_row, width):
                tape = longer(tape, width)
                counts, base, sizes, gaps, runs, apart_row, apart_time, samples = lent(tape)
            deliver(
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
            )
        elif nothing:
            ints[IDLE_CALLS] += 1
            ints[TROUBLE] |= ints[IDLE_CALLS] > MAX_IDLE_CALLS
        if nothing and (ints[RUNNING] or num_waiting(ints)):
            floats[NOW] += floats[IDLE_POLL]
    room[0] = 0  # what was borrowed from it is used no more
    return tape


# -- a scheduling call -------------------------------------------------------------------------------------


@kernel
def schedule(rows, times, ints, floats, batches, slot, running, waiting, skipped):
    """Decide the next batch."""
    ints[PREFILL_TOKENS : SAMPLED + 1] = 0
    batches[slot, :MEMBERS] = 0
    threshold = _threshold(ints)
    budget, preempted = _schedule_running(rows, ints, batches, slot, running, waiting, threshold)
    ints[BLOCKED] = 0
    if not preempted:
        _schedule_waiting(
            rows, times, ints, floats, batches, slot, running, waiting, skipped, threshold, budget
        )
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
def _schedule_waiting(rows, times, ints, floats, batches, slot, running, waiting, skipped, threshold, budget):
    aside = [0 for _ in range(0)]
    before = ints[RUNNING]
    while num_waiting(ints) and budget > 0 and ints[RUNNING] < ints[MAX_RUNNING]:
        at = SKIPPED if ints[SEPARATE] and ints[SKIPPED + 1] else WAITING
        queue = skipped if at == SKIPPED else waiting
        r = queue[ints[at]]
        if rows[r, STALE]:
            aside.append(pop(queue, ints, at))
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
    ints[BLOCKED] = left > 0 and decodes_only and ints[RUNNING] == before and len(aside) == 0
    at = SKIPPED if ints[SEPARATE] else WAITING
    for i in range(len(aside) - 1, -1, -1):
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
