"""Where a compiled run keeps its numbers: a few arrays whose rows and columns have the names below.

rows (int64) and times (float64, seconds) have a row per request, ints (int64) and floats (float64) hold
single numbers, batches (int64) and ends (float64) have a row per batch in flight. Numba passes few arrays
faster than many, or than objects.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.fast.jit import kernel
from sim.fast.prices import Beyond, FlatModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Columns of rows for either engine: tokens of the prompt, prompt and asked outputs, most outputs, the stop
# token (0: none); outputs so far; whether it ended; first prefix hit (-1: none yet); preemptions; the
# emission at which its run of emissions began (-1: none is open), and the latest one (-1: a token apart, -2:
# nothing yet).
PROMPT, ASKED, MOST, STOP, OUTPUTS, FINISHED, CACHED, PREEMPTED, RUN_FIRST, LAST_EMISSION = range(10)
OWN = 10  # the engine's own columns begin here

# Columns of times.
ARRIVAL, SENT_AT, AT_ENGINE, FIRST_SCHEDULED, FIRST_RESULT, FIRST_TOKEN, LAST_TOKEN, DELIVERED_AT = range(8)

# ints: how many requests were sent, taken in, answered; batches in flight and the first of them; what
# `sim.loop.replica.Usage` counts; its watchdogs; the batch that is being made, as of `StepShape`; tokens and
# ends of the result at hand.
(
    SENT, INSIDE, ANSWERED, IN_FLIGHT, FIRST, STEPS, PREEMPTIONS, QUERIES, HITS, MAX_USED, IDLE_CALLS,
    TOKENS_INSIDE, SINCE_OUTPUT, TROUBLE, PREFILL_TOKENS, PROMPTS, DECODES, PAIRS, PREFILL_CONTEXT, CONTEXT,
    SAMPLED, GOT, ENDED,
) = range(23)  # fmt: skip
# ints: settings of the client, and what names the reasons for waiting.
CAP, LIMIT_SEQS, LIMIT_TOKENS, MAX_STEPS = range(23, 27)
OWN_K = 27

# floats: now; when device and front end are free; when the last answer is complete; the device waiting for
# the host; device time by resource; waiting time by reason; settings.
NOW, DEVICE_FREE, FRONT_END_FREE, LATEST, HOST_TIME = range(5)
DEVICE, WAITING = 5, 8
(
    FRONT_REQUEST, FRONT_TOKEN, DELAY, BEFORE_FIXED, BEFORE_SEQ, AFTER_FIXED, AFTER_SEQ, IDLE_POLL,
) = range(11, 19)  # fmt: skip
OWN_F = 19

# Columns of batches: requests of the batch, how many of them are prefills, the request whose prompt goes on,
# whether prompts alone; then the requests, negative (-1 - request) where no token comes out. Columns of ends:
# end, host time after.
SIZE, NUM_PREFILL, CHUNKED_ONE, PREFILL, MEMBERS = range(5)
END, AFTER = range(2)

SLOTS, BUDGET, KV = range(3)


class Run(NamedTuple):
    """All that a run consists of, whichever the engine.

    Attributes:
        model: prices the steps.
        beyond: counts those out of its range.
        rows, times, ints, floats, batches, ends: see above.
        warm: see `sim.fast.prices.price`.
    """

    model: FlatModel
    beyond: Beyond
    rows: Ints
    times: Floats
    ints: Ints
    floats: Floats
    batches: Ints
    ends: Floats
    warm: Floats


@kernel
def note_chunk(ints, batches, slot, request, start, tokens, samples):
    """Put a chunk into a batch and sum it up, as `StepPlan.shape` does."""
    if tokens == 1:
        ints[DECODES] += 1
        ints[CONTEXT] += start + 1
    else:
        ints[PROMPTS] += 1
        ints[PREFILL_TOKENS] += tokens
        ints[PAIRS] += tokens * start + tokens * (tokens + 1) // 2
        ints[PREFILL_CONTEXT] += start + tokens
    batches[slot, MEMBERS + batches[slot, SIZE]] = request if samples else -1 - request
    batches[slot, SIZE] += 1
    ints[SAMPLED] += samples


@kernel
def note_admission(rows, times, ints, now, request, hit):
    """What the recorder keeps of a request's first admission."""
    if rows[request, CACHED] < 0:
        rows[request, CACHED] = hit
        times[request, FIRST_SCHEDULED] = now
        ints[QUERIES] += rows[request, PROMPT]
        ints[HITS] += hit


# -- a queue of requests as a ring; its place in ints holds the front and the length -----------------------


@kernel
def push(ring, ints, at, request):
    """Put one at the end."""
    ring[(ints[at] + ints[at + 1]) % len(ring)] = request
    ints[at + 1] += 1


@kernel
def push_front(ring, ints, at, request):
    """Put one at the front."""
    ints[at] = (ints[at] - 1) % len(ring)
    ring[ints[at]] = request
    ints[at + 1] += 1


@kernel
def pop(ring, ints, at):
    """Take the next one."""
    request = ring[ints[at]]
    ints[at] = (ints[at] + 1) % len(ring)
    ints[at + 1] -= 1
    return request


@kernel
def remove(ring, ints, at, request):
    """Take one out wherever it stands; returns whether it was there."""
    size, begin = len(ring), ints[at]
    for i in range(ints[at + 1]):
        if ring[(begin + i) % size] == request:
            for j in range(i, ints[at + 1] - 1):
                ring[(begin + j) % size] = ring[(begin + j + 1) % size]
            ints[at + 1] -= 1
            return True
    return False
