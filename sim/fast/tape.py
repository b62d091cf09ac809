"""What a compiled run writes down besides columns: emissions, runs of them by request, and samples.

`counts` (see the indices) tells how much of each array is filled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.fast.jit import allocating, kernel

EMISSIONS, GAPS, RUNS, APART, SAMPLES, OFFERED, STRIDE = range(7)
SAMPLE_LIMIT = 4096


class Tape(NamedTuple):
    """See `sim.loop.tokens.EmissionTable` and `sim.loop.series.SeriesBuffer`.

    Attributes:
        counts: shape (7,).
        base: of each emission [s].
        sizes: of each emission: requests served, and how many of them the one before served, too; (n, 2).
        gaps: inter-token latencies that do not follow from the emissions [s].
        runs: (row, first, last emission), shape (n, 3).
        apart_row, apart_time: tokens outside the group's emissions.
        samples: shape (SAMPLE_LIMIT, 4).
    """

    counts: NDArray[np.int64]
    base: NDArray[np.float64]
    sizes: NDArray[np.int32]
    gaps: NDArray[np.float64]
    runs: NDArray[np.int64]
    apart_row: NDArray[np.int64]
    apart_time: NDArray[np.float64]
    samples: NDArray[np.float64]


@allocating
def new_tape(room):
    """An empty tape; `room` is the least for which no array has to grow at once."""
    counts = np.zeros(7, np.int64)
    counts[STRIDE] = 1
    return Tape(
        counts,
        np.empty(room),
        np.empty((room, 2), np.int32),
        np.empty(room),
        np.empty((room, 3), np.int64),
        np.empty(room, np.int64),
        np.empty(room),
        np.empty((SAMPLE_LIMIT, 4)),
    )


@kernel
def is_short(tape, more):
    """Whether any array has room for fewer than that many further entries."""
    counts = tape.counts
    return (
        counts[EMISSIONS] + more > len(tape.base)
        or counts[APART] + more > len(tape.apart_row)
        or lacks_room(tape, more)
    )


@kernel
def lacks_room(tape, more):
    """Whether gaps or runs have room for fewer than that many further entries."""
    counts = tape.counts
    return counts[GAPS] + more > len(tape.gaps) or counts[RUNS] + 2 * more > len(tape.runs)


@allocating
def longer(tape, more):
    """The same tape with room for that many further entries of each sort."""
    counts = tape.counts
    base = np.empty(_room(len(tape.base), counts[EMISSIONS] + more))
    base[: counts[EMISSIONS]] = tape.base[: counts[EMISSIONS]]
    sizes = np.empty((len(base), 2), np.int32)
    sizes[: counts[EMISSIONS]] = tape.sizes[: counts[EMISSIONS]]
    gaps = np.empty(_room(len(tape.gaps), counts[GAPS] + more))
    gaps[: counts[GAPS]] = tape.gaps[: counts[GAPS]]
    runs = np.empty((_room(len(tape.runs), counts[RUNS] + 2 * more), 3), np.int64)
    runs[: counts[RUNS]] = tape.runs[: counts[RUNS]]
    apart_row = np.empty(_room(len(tape.apart_row), counts[APART] + more), np.int64)
    apart_row[: counts[APART]] = tape.apart_row[: counts[APART]]
    apart_time = np.empty(len(apart_row))
    apart_time[: counts[APART]] = tape.apart_time[: counts[APART]]
    return Tape(counts, base, sizes, gaps, runs, apart_row, apart_time, tape.samples)


@kernel
def _room(now, needed):
    return now if needed <= now else max(needed, now + now // 2)


@kernel
def add_run(tape, row, first, last):
    """A request was served by these consecutive emissions."""
    counts, runs = tape.counts, tape.runs
    at = counts[RUNS]
    runs[at, 0], runs[at, 1], runs[at, 2] = row, first, last
    counts[RUNS] = at + 1


@kernel
def sample(tape, time, running, waiting, usage):
    """A queue state, kept if it is its turn."""
    counts, samples = tape.counts, tape.samples
    if counts[OFFERED] % counts[STRIDE] == 0:
        at = counts[SAMPLES]
        samples[at, 0], samples[at, 1], samples[at, 2], samples[at, 3] = time, running, waiting, usage
        at += 1
        if at == SAMPLE_LIMIT:
            at = SAMPLE_LIMIT // 2
            for i in range(at):
                for column in range(4):
                    samples[i, column] = samples[2 * i, column]
            counts[STRIDE] *= 2
        counts[SAMPLES] = at
    counts[OFFERED] += 1
