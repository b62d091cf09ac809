"""Queue states over time, as few as a chart needs, at a cost per change."""

from __future__ import annotations

from array import array
from itertools import chain

import numpy as np

from sim.results import Floats, ServerSeries

ROW = 10  # numbers per run of samples, see `SeriesBuffer._rows`


class SeriesBuffer:
    """Queue states over time, thinned by half whenever there are too many; the first one is kept.

    They come in runs, during which no queue changes, and are only told apart when somebody reads them.

    Args:
        limit: fewer samples than that are kept.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._stride = 1
        self._count = 0  # samples that came
        self._kept = 0
        self._block = self._total = 1  # tokens
        self._columns: Floats = np.empty((4, 0))
        # Of each run: its first sample that is kept, how many are, the five numbers of `moments`, requests
        # running and waiting, tokens held. Of each sample: blocks begun since.
        self._rows: list[tuple[float, ...]] = []
        self._begun = array("q")

    def add(self, now: float, running: int, waiting: int, used: int, total: int) -> None:
        """Take a sample if it is its turn."""
        if self._count % self._stride == 0:
            self._total = total
            self._rows.append((0, 1, now, 0.0, 0.0, 0.0, 0.0, running, waiting, used))
            self._begun.append(0)
            self._kept += 1
            if self._kept >= self._limit:
                self._thin_out()
        self._count += 1

    def add_run(
        self,
        stretch: tuple[float, float, float, float, float],
        begun: list[int],
        block: int,
        state: tuple[int, int, int, int],
    ) -> None:
        """Take those samples of a run whose turn it is.

        Args:
            stretch: when they are taken, see `moments`.
            begun: how many blocks more than `state` says are held at each of them.
            block: tokens per block.
            state: requests running and waiting, tokens held and in all.
        """
        count, stride = len(begun), self._stride
        turn = -self._count % stride
        self._count += count
        if turn >= count:
            return
        if stride > 1:
            begun = begun[turn::stride]
            count = len(begun)
        running, waiting, held, self._total = state
        self._block = block
        self._rows.append((turn, count, *stretch, running, waiting, held))
        self._begun.extend(begun)
        self._kept += count
        if self._kept >= self._limit:
            self._thin_out()

    def _thin_out(self) -> None:
        columns = self._told_apart()
        while columns.shape[1] >= self._limit:
            columns = columns[:, ::2]
            self._stride *= 2
        self._columns = columns.copy()
        self._kept = columns.shape[1]
        self._rows, self._begun = [], array("q")

    def _told_apart(self) -> Floats:
        """Time, running, waiting, KV usage of all samples, shape (4, n)."""
        if not self._rows:
            return self._columns
        rows = np.fromiter(chain.from_iterable(self._rows), np.float64).reshape(-1, ROW)
        counts = rows[:, 1].astype(np.int64)
        of = np.repeat(np.arange(len(rows)), counts)
        place = np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
        calls = rows[of, 0].astype(np.int64) + place * self._stride
        held = rows[of, 9] + np.frombuffer(self._begun, dtype=np.int64) * self._block
        usage = held / self._total if self._total else np.zeros(len(of))
        later = np.array([moments(rows[of, 2:7], calls), rows[of, 7], rows[of, 8], usage])
        return np.concatenate([self._columns, later], axis=1)

    def since(self, start: float) -> ServerSeries:
        """The samples, `start` being time 0."""
        time, running, waiting, kv_usage = self._told_apart()
        return ServerSeries(time - start, running, waiting, kv_usage)


def moments(stretch: Floats, calls: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    """When calls are made, see `sim.loop.leap.Stretch`; its numbers are the columns of `stretch`."""
    now, first, begin, period, growth = stretch.T
    i = np.maximum(calls - 1, 0)
    times: Floats = begin + (i * period + growth * (i * (i - 1) // 2))
    return np.where(calls > 1, times, np.where(calls == 1, first, now))
