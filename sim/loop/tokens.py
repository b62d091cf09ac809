"""When every output token of a simulated run reached its client, kept by emission instead of by token.

An emission is one result of the engine: one token for each of several requests, streamed one after the other.
Emissions of the running group are numbered; a request's tokens are the emissions from one number to another,
at a place in the stream that moves up when somebody before it leaves. Whatever is written per token is made
only when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.figures.quantiles import Runs
from sim.results import Floats, Ints

Sizes = NDArray[np.int32]
AT_ONCE = 1 << 18  # emissions looked at together
LEAPS_AT_ONCE = 4096
SHORT = 32  # gaps in a leap


@dataclass(frozen=True)
class EmissionTable:
    """Every token of a run. Times are seconds of simulated time; a place costs `cost` [s], counted from 1.

    Attributes:
        base, size, stayed: shape (pieces,): when a piece's first emission begins to be streamed, how many
            requests each of its emissions serves, and how many of them the emission before served, too, at
            the same place.
        leap_piece, leap_count, leap_gap, leap_slope: shape (leaps,): pieces of more than one emission; the
            gaps between theirs are gap, gap + slope, gap + 2 slope ...
        gaps: shape (n, 2): inter-token latencies that do not follow from the pieces, and how many requests
        had
            them.
        run_row, run_first, run_last, run_place: shape (runs,): request `row` was served by these
            consecutive emissions, at first at that place.
        apart_row, apart_time: shape (n,): tokens that came outside the group's emissions.
        cost, delay: seconds per place, and from there to the client.
        start: the moment that counts as 0.
        interval: tokens per streamed chunk.
    """

    base: Floats
    size: Sizes
    stayed: Sizes
    leap_piece: Ints
    leap_count: Ints
    leap_gap: Floats
    leap_slope: Floats
    gaps: Floats
    run_row: Ints
    run_first: Ints
    run_last: Ints
    run_place: Ints
    apart_row: Ints
    apart_time: Floats
    cost: float
    delay: float
    start: float
    interval: int

    @cached_property
    def _count(self) -> Ints:
        count = np.ones(len(self.base), dtype=np.int64)
        count[self.leap_piece] = self.leap_count
        return count

    def itl_runs(self) -> Runs:
        """All inter-token latencies, pooled. Only for chunks of one token."""
        inner = self.leap_count - 1
        last = self.base[:-1].copy()
        reached = self.leap_piece < len(last)
        ends = self.leap_gap * inner + self.leap_slope * (inner * (inner - 1) // 2)
        last[self.leap_piece[reached]] += ends[reached]
        follows = self.stayed[1:] > 0
        single = np.concatenate(((self.base[1:] - last)[follows], self.gaps[:, 0]))
        single_weight = np.concatenate((self.stayed[1:][follows], self.gaps[:, 1])).astype(np.int64)
        start, slope, weight = self.leap_gap, self.leap_slope, self.size[self.leap_piece].astype(np.int64)
        if (few := int(inner.sum())) <= min(AT_ONCE, SHORT * len(inner)):
            # Sorting some thousand gaps once takes less than counting along progressions for each percentile.
            k = np.arange(few) - np.repeat(np.cumsum(inner) - inner, inner)
            gaps = np.repeat(start, inner) + np.repeat(slope, inner) * k
            single = np.concatenate((gaps, single))
            single_weight = np.concatenate((np.repeat(weight, inner), single_weight))
            start, slope, inner, weight = start[:0], slope[:0], inner[:0], weight[:0]
        return Runs(start, slope, inner, weight, single, single_weight)

    def per_second(self, start: float) -> Floats:
        """Tokens in each second from `start` on, in the run's own time."""
        bases, sizes = self._bases(), np.repeat(self.size, self._count)
        shift = self.delay - self.start - start
        parts = [
            self._in_seconds(bases[at : at + AT_ONCE] + shift, sizes[at : at + AT_ONCE])
            for at in range(0, len(bases), AT_ONCE)
        ]
        alone = self.apart_time - self.start - start - self.cost
        parts.append(self._in_seconds(alone, np.ones(len(alone), dtype=np.int32)))
        total = np.zeros(max(map(len, parts)))
        for part in parts:
            total[: len(part)] += part
        return total

    def _in_seconds(self, begin: Floats, size: Sizes) -> Floats:
        """Tokens in each second of emissions that begin to reach the client then."""
        if not len(begin):
            return np.zeros(0)
        last_second = (begin + self.cost * size).astype(np.int64)
        second = (begin + self.cost).astype(np.int64)
        total = np.zeros(int(last_second.max()) + 1)
        done = np.zeros(len(begin), dtype=np.int64)
        while len(begin):  # once for each second that an emission reaches into
            ends = second == last_second
            upto = np.where(ends, size, done)
            if self.cost:
                # Places whose time lies before the next full second.
                before = np.ceil((second + 1 - begin) / self.cost).astype(np.int64) - 1
                upto = np.where(ends, size, np.clip(before, done, size))
            total += np.bincount(second, weights=upto - done, minlength=len(total))
            begin, size, done = begin[~ends], size[~ends], upto[~ends]
            second, last_second = second[~ends] + 1, last_second[~ends]
        return total

    def token_times(self, rows: int) -> list[Floats]:
        """The times of every token of each of `rows` requests, in the run's own time."""
        pieces: list[list[Floats]] = [[] for _ in range(rows)]
        bases = self._bases() + (self.delay - self.start)
        for run, times in zip(self._in_order(), self._run_times(bases), strict=True):
            pieces[self.run_row[run]].append(times)
        for row, time in zip(self.apart_row.tolist(), self.apart_time.tolist(), strict=True):
            pieces[row].append(np.array([time - self.start]))
        return [_merged(parts) for parts in pieces]

    def itls(self, rows: int) -> Floats:
        """The gaps between the chunks of each of `rows` requests, one request after the other."""
        gaps = [np.diff(times[streamed(len(times), self.interval)]) for times in self.token_times(rows)]
        return np.concatenate(gaps) if gaps else np.empty(0)

    def spans(self, rows: int) -> tuple[Floats, list[tuple[int, int]]] | None:
        """Gaps between consecutive emissions, and which of them (from, to before) each request saw.

        None if that does not tell every inter-token latency of each of `rows` requests: some tokens came
        apart, after a pause, several at once, or at a place that costs time.
        """
        if self.cost or self.interval != 1 or len(self.apart_row) or len(self.run_row) != rows:
            return None
        order = np.argsort(self.run_row, kind="stable")
        if not np.array_equal(self.run_row[order], np.arange(rows)):
            return None
        ends = zip(self.run_first[order].tolist(), self.run_last[order].tolist(), strict=True)
        return np.diff(self._bases() + (self.delay - self.start)), list(ends)

    def _bases(self) -> Floats:
        """When each emission begins to be streamed."""
        bases = np.repeat(self.base, self._count)
        first = np.cumsum(self._count) - self._count
        for begin in range(0, len(self.leap_piece), LEAPS_AT_ONCE):
            some = slice(begin, begin + LEAPS_AT_ONCE)
            count = self.leap_count[some]
            k = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            at = np.repeat(first[self.leap_piece[some]], count) + k
            gap, slope = np.repeat(self.leap_gap[some], count), np.repeat(self.leap_slope[some], count)
            bases[at] += gap * k + slope * (k * (k - 1) // 2)
        return bases

    def _in_order(self) -> list[int]:
        """Runs in the order in which they began."""
        order: list[int] = np.lexsort((self.run_place, self.run_first)).tolist()
        return order

    def _run_times(self, bases: Floats) -> Iterable[Floats]:
        """Token times of each run, in the order in which the runs began."""
        firsts, lasts, places = self.run_first.tolist(), self.run_last.tolist(), self.run_place.tolist()
        present: list[int] = []
        for run in self._in_order():
            first, last = firsts[run], lasts[run]
            times = bases[first : last + 1]
            if self.cost:
                present = [other for other in present if lasts[other] >= first]
                ahead = np.sort([lasts[other] for other in present[: places[run]]])
                left = np.searchsorted(ahead, np.arange(first, last + 1), side="left")
                times = times + (places[run] + 1 - left) * self.cost
                present.append(run)
            yield times


def streamed(num_tokens: int, interval: int) -> slice | list[int]:
    """Indices of the tokens at which a chunk goes out.

    Both engines send the first token, then whenever `interval` tokens are unsent, and at the finish
    (vllm v1/engine/output_processor.py, sglang scheduler output processing).
    """
    if interval == 1:
        return slice(None)
    sent = list(range(0, num_tokens, interval))
    if num_tokens and sent[-1] != num_tokens - 1:
        sent.append(num_tokens - 1)
    return sent


def num_gaps(num_tokens: Ints, interval: int) -> Ints:
    """How many gaps `streamed` leaves between its chunks, by request."""
    gaps: Ints = -(-np.maximum(num_tokens - 1, 0) // interval)
    return gaps


def _merged(parts: list[Floats]) -> Floats:
    if not parts:
        return np.empty(0)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(sorted(parts, key=lambda part: float(part[0])))
