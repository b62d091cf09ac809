"""Percentiles: one definition for measured and predicted, how far to trust them, and weighted ones.

The definition is numpy's "linear" one everywhere, which is also that of `vllm bench serve`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a percentile; None where the sample cannot bound it on that side."""

    low: float | None
    high: float | None


def percentile_word(q: float) -> str:
    """`99` for 99.0 and `99.9` for 99.9, as vllm bench serve writes it in its keys."""
    return str(int(q)) if int(q) == q else str(q)


def supported(n: int, q: float) -> bool:
    """Whether `n` samples reach beyond the percentile at all: on average one must lie on its far side."""
    return n * min(q, 100.0 - q) >= 100.0 - 1e-9


def percentile(values: Floats, q: float) -> float | None:
    """The `q`-th percentile (0..100) of values of shape (n,), linear; None without values."""
    return float(np.percentile(values, q)) if len(values) else None


def percentiles(ordered: Floats, quantiles: Sequence[float]) -> list[float]:
    """`percentile` of values in ascending order, at several levels; there must be one.

    The same to the last bit; numpy's own takes ten times as long for a thousand values.
    """
    last = len(ordered) - 1
    if math.isnan(ordered[last]):
        return [math.nan] * len(quantiles)
    found = []
    for q in quantiles:
        position = last * (q / 100.0)
        below = min(int(position), last)
        low, high, share = float(ordered[below]), float(ordered[min(below + 1, last)]), position - below
        gap = high - low
        found.append(low + gap * share if share < 0.5 else high - gap * (1.0 - share))
    return found


def percentile_interval(values: Floats, q: float, level: float = 0.95) -> Interval:
    """Distribution-free bounds of the true `q`-th percentile, by order statistics.

    The number of samples below the true percentile is binomial(n, q/100); the order statistics whose ranks
    cut off (1 - level)/2 on either side bound it (David & Nagaraja, Order Statistics, 3rd ed., 7.1). A P99
    of fewer than 368 samples has no upper bound at 95 %. Samples must be independent: in a queue they
    are not quite, so the true interval is rather wider. It is widened to hold the estimate, which is
    interpolated: of very few samples it may lie beyond a bound.

    Args:
        values: shape (n,), any order.
        q: 0..100.
        level: confidence.
    """
    ranks = interval_ranks(len(values), q, level)
    ordered = np.sort(values)
    low, high = (None if rank is None else float(ordered[rank - 1]) for rank in ranks)
    if len(ordered):
        (point,) = percentiles(ordered, (q,))
        low, high = (None if low is None else min(low, point)), (None if high is None else max(high, point))
    return Interval(low, high)


def interval_ranks(n: int, q: float, level: float = 0.95) -> tuple[int | None, int | None]:
    """1-based ranks of the order statistics that bound the `q`-th percentile; None: out of reach."""
    if n == 0:
        return None, None
    p = q / 100.0
    if not 0.0 < p < 1.0:
        return (1, None) if p >= 1.0 else (None, n)
    first, cdf = _binomial_cdf(n, p)
    tail = (1.0 - level) / 2.0
    # low: the largest l with P(B <= l - 1) <= tail; high: the smallest u with P(B <= u - 1) >= 1 - tail.
    low = first + int(np.searchsorted(cdf, tail, side="right"))
    high = first + int(np.searchsorted(cdf, 1.0 - tail, side="left")) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def _binomial_cdf(n: int, p: float) -> tuple[int, Floats]:
    """P(B <= k) for k = first, first + 1, ... around the mean; what lies outside is below 1e-30."""
    spread = 12.0 * math.sqrt(n * p * (1.0 - p)) + 40.0
    first, last = max(0, int(n * p - spread)), min(n, int(n * p + spread) + 1)
    k = np.arange(first, last, dtype=np.float64)
    steps = np.log((n - k) / (k + 1.0)) + math.log(p / (1.0 - p))
    log_pmf = np.concatenate(([0.0], np.cumsum(steps)))
    pmf = np.exp(log_pmf - log_pmf.max())
    cdf = np.cumsum(pmf)
    return first, cdf / cdf[-1]


def weighted_percentile(values: Floats, counts: Ints, q: float) -> float | None:
    """`percentile` of a sample in which values[i] occurs counts[i] times; both of shape (n,)."""
    total = int(counts.sum())
    if total == 0:
        return None
    order = np.argsort(values, kind="stable")
    below = np.cumsum(counts[order])
    position = (total - 1) * q / 100.0
    k = math.floor(position)
    ranks = np.array([k, min(k + 1, total - 1)])
    low, high = values[order[np.searchsorted(below, ranks, side="right")]]
    return float(low + (high - low) * (position - k))


@dataclass(frozen=True, slots=True)
class Runs:
    """A sample made of arithmetic progressions: run i holds start[i] + slope[i] * (0 .. count[i] - 1).

    A run of identical decode steps yields such inter-token latencies. All arrays have shape (n,).

    Attributes:
        weight: how often each value of a run occurs (requests that decode together have the same
            latencies); None: once.
        single, single_weight: further values, and how often each occurs; shape (m,).
    """

    start: Floats
    slope: Floats
    count: Ints
    weight: Ints | None = None
    single: Floats = field(default_factory=lambda: np.empty(0))
    single_weight: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        total = (self.count if self.weight is None else self.count * self.weight).sum()
        return int(total) + int(self.single_weight.sum(dtype=np.int64))

    def expand(self) -> Floats:
        """Every value, run by run."""
        ends = np.cumsum(self.count)
        step = np.arange(int(self.count.sum())) - np.repeat(ends - self.count, self.count)
        values: Floats = np.repeat(self.start, self.count) + np.repeat(self.slope, self.count) * step
        if self.weight is not None:
            values = np.repeat(values, np.repeat(self.weight, self.count))
        return np.concatenate((values, np.repeat(self.single, self.single_weight)))

    def mean(self) -> float | None:
        """Mean of all values."""
        n = len(self)
        if not n:
            return None
        c = self.count.astype(np.float64)
        runs = self._weighted(c * self.start + self.slope * c * (c - 1) / 2)
        return (float(runs.sum()) + _product(self.single, self.single_weight)) / n

    def std(self) -> float | None:
        """Standard deviation of all values (divisor n, as numpy's and vLLM's)."""
        mean = self.mean()
        if mean is None:
            return None
        c = self.count.astype(np.float64)
        a = self.start - mean
        squares = c * a**2 + a * self.slope * c * (c - 1) + self.slope**2 * (c - 1) * c * (2 * c - 1) / 6
        total = float(self._weighted(squares).sum())
        total += _product(np.square(self.single - mean), self.single_weight)
        return math.sqrt(max(0.0, total / len(self)))

    def percentile(self, q: float) -> float | None:
        """`percentile` of all values, without making them; to about 1e-13 of the largest one."""
        return self.percentiles((q,))[0]

    def percentiles(self, quantiles: Sequence[float]) -> list[float | None]:
        """`percentile` of all values at several levels."""
        n = len(self)
        if n == 0:
            return [None] * len(quantiles)
        smallest = cache(_Ordered.of(self).smallest)
        found: list[float | None] = []
        for q in quantiles:
            position = (n - 1) * q / 100.0
            k = math.floor(position)
            low = smallest(k)
            high = low if position == k else smallest(min(k + 1, n - 1))
            found.append(low + (high - low) * (position - k))
        return found

    def _weighted(self, values: Floats) -> Floats:
        return values if self.weight is None else values * self.weight


def _product(values: Floats, weights: Ints) -> float:
    """`np.dot`, whose last digits and CPU time depend on the threads that BLAS happens to have."""
    return float((values * weights).sum())


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Order statistics of runs: single values are sorted once, progressions are counted by formula.

    Attributes:
        single, upto: single values in order, and how many values lie at or before each.
        bottom, step, count, weight: progressions of two values or more, each from its smallest value on.
        low, high: the smallest and the largest value.
    """

    single: Floats
    upto: Ints
    bottom: Floats
    step: Floats
    count: Ints
    weight: Ints
    low: float
    high: float

    @classmethod
    def of(cls, runs: Runs) -> _Ordered:
        weight = np.ones(len(runs.count), dtype=np.int64) if runs.weight is None else runs.weight
        last = runs.start + runs.slope * (runs.count - 1)
        bottom, top = np.minimum(runs.start, last), np.maximum(runs.start, last)
        held, some = (runs.count > 0) & (weight > 0), runs.single_weight > 0
        low = min(bottom[held].min(initial=math.inf), runs.single[some].min(initial=math.inf))
        high = max(top[held].max(initial=-math.inf), runs.single[some].max(initial=-math.inf))
        step = np.abs(runs.slope)
        flat = held & ((step * runs.count <= 1e-13 * max(abs(low), abs(high))) | (runs.count == 1))
        single = np.concatenate((bottom[flat], runs.single))
        times = np.concatenate(((runs.count * weight)[flat], runs.single_weight))
        order = np.argsort(single, kind="stable")
        rest = held & ~flat
        return cls(
            single[order],
            np.cumsum(times[order], dtype=np.int64),
            bottom[rest],
            step[rest],
            runs.count[rest],
            weight[rest],
            float(low),
            float(high),
        )

    def smallest(self, k: int) -> float:
        """The k-th smallest value (from 0), by bisection on how many values lie at or below a bound."""
        if not len(self.bottom):
            return float(self.single[np.searchsorted(self.upto, k, side="right")])
        low, high = self.low, self.high
        slack = 1e-13 * max(abs(low), abs(high))
        bottom, step, count, weight = self.bottom, self.step, self.count, self.weight
        sure = 0  # values of progressions that lie below the bracket as a whole
        while high - low > slack:
            middle = (low + high) / 2
            if not low < middle < high:
                break
            inside = np.clip(np.floor((middle - bottom) / step) + 1, 0, count)
            at = int(np.searchsorted(self.single, middle, side="right"))
            below = int(self.upto[at - 1]) if at else 0
            if sure + below + int((inside * weight).sum()) > k:
                high = middle
                matters = inside > 0
                gone = 0
            else:
                low = middle
                matters = inside < count
                gone = int((count * weight)[~matters].sum())
            if len(bottom) > 64 and 2 * int(matters.sum()) < len(bottom):
                bottom, step, count, weight = (a[matters] for a in (bottom, step, count, weight))
                sure += gone
        return high
