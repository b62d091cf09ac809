"""Prometheus histograms, and what a bucket grid lets one say.

A histogram does not know its quantiles: it knows intervals. So every quantile here is the bucket it lies
in, with the usual linear interpolation as a point estimate inside; and in the last bucket, which has no
upper edge, there is a lower bound and no estimate at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class QuantileInterval:
    """Where a quantile lies: low <= quantile <= high (`high` is inf in the last bucket).

    `estimate` interpolates linearly within the bucket (as `histogram_quantile` does); None if there is no
    upper edge to interpolate to.
    """

    low: float
    high: float
    estimate: float | None

    @property
    def censored_at_least(self) -> float | None:
        """The last finite edge if the quantile is only known to be at or above it, else None."""
        return self.low if math.isinf(self.high) else None

    def __str__(self) -> str:
        if self.estimate is None:
            return f">= {self.low:g}"
        return f"{self.estimate:.4g} [{self.low:g}, {self.high:g}]"

    def distinguishable(self, other: QuantileInterval) -> bool:
        """Whether the two must differ: their intervals do not overlap."""
        return self.high < other.low or other.high < self.low


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts at ascending upper edges; the last edge is inf.

    Attributes:
        edges, cumulative: same length; empty if the exporter sent `_sum` and `_count` alone.
        count, total: number and sum of the observations.
    """

    edges: tuple[float, ...]
    cumulative: tuple[float, ...]
    count: float
    total: float

    @property
    def mean(self) -> float | None:
        """sum / count: exact, whatever the grid."""
        return self.total / self.count if self.count > 0 else None

    def quantile(self, q: float) -> QuantileInterval | None:
        """The bucket that holds quantile `q` (0..1), as `histogram_quantile` finds it; None without any.

        That is the smallest observation with at least the share `q` at or below it; to set beside a client's
        percentile, take `percentile`.
        """
        if self.count <= 0 or not self.edges:
            return None
        rank = q * self.count
        lower, below = 0.0, 0.0
        for edge, cumulative in zip(self.edges, self.cumulative, strict=True):
            if cumulative >= rank and cumulative > below:
                if math.isinf(edge):
                    return QuantileInterval(lower, math.inf, None)
                share = (rank - below) / (cumulative - below)
                estimate = min(edge, lower + (edge - lower) * share)  # rounding may carry it beyond
                return QuantileInterval(lower, edge, estimate)
            lower, below = edge, cumulative
        return QuantileInterval(lower, math.inf, None)

    def percentile(self, q: float) -> QuantileInterval | None:
        """Where the percentile `q` (0..1) of benchmark clients lies; None without observations or buckets.

        Clients interpolate between two order statistics (numpy's "linear"), which may lie in two buckets, far
        apart ones even for few samples. So the interval reaches from the lower edge of the one's bucket to
        the upper edge of the other's; the estimate is that of `quantile`, where there is an upper edge.
        """
        usual, n = self.quantile(q), round(self.count)
        if usual is None or n < 1:
            return None
        position = (n - 1) * q
        low, _ = self._bucket(math.floor(position))
        _, high = self._bucket(min(math.ceil(position), n - 1))
        return QuantileInterval(low, high, None if math.isinf(high) else usual.estimate)

    def _bucket(self, index: int) -> tuple[float, float]:
        """Edges of the bucket that holds the `index`-th smallest observation, from 0."""
        edges = [0.0, *self.edges]
        for (lower, upper), cumulative in zip(pairwise(edges), self.cumulative, strict=True):
            if cumulative > index:
                return lower, upper
        return edges[-2], math.inf

    def minus(self, earlier: Histogram) -> Histogram:
        """The observations made since `earlier`, on the same grid.

        Raises:
            ValueError: the grids differ, or a count went down (the engine was restarted in between).
        """
        if self.edges != earlier.edges:
            raise ValueError("histograms on two different bucket grids cannot be subtracted")
        counts = tuple(now - then for now, then in zip(self.cumulative, earlier.cumulative, strict=True))
        if self.count < earlier.count or any(count < 0 for count in counts):
            raise ValueError("a histogram went backwards: the engine was restarted in between")
        return Histogram(self.edges, counts, self.count - earlier.count, self.total - earlier.total)


def merge(parts: Iterable[Histogram]) -> Histogram | None:
    """Add up the histograms of several engines; None if there are none.

    Engines on one grid add bucket by bucket; on different grids only counts and sums can be added.
    """
    histograms = list(parts)
    if not histograms:
        return None
    edges = histograms[0].edges
    count = sum(part.count for part in histograms)
    total = sum(part.total for part in histograms)
    if any(part.edges != edges for part in histograms):
        return Histogram((), (), count, total)
    columns = zip(*(part.cumulative for part in histograms), strict=True)
    return Histogram(edges, tuple(sum(column) for column in columns), count, total)


def from_buckets(buckets: Mapping[float, float], count: float, total: float) -> Histogram:
    """Build one from cumulative counts by edge; a missing +Inf bucket is the count."""
    edges = sorted(buckets)
    cumulative = [buckets[edge] for edge in edges]
    if edges and not math.isinf(edges[-1]):
        edges.append(math.inf)
        cumulative.append(count)
    return Histogram(tuple(edges), tuple(cumulative), count, total)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether a server-side histogram may be used, with the reasons against it."""

    trusted: bool
    reasons: tuple[str, ...]
    server_mean: float | None


def check_against_client(
    histogram: Histogram,
    *,
    client_mean: float | None = None,
    client_count: int | None = None,
    tolerance: float = 0.5,
) -> Trust:
    """Distrust a histogram that is degenerate or contradicts what the client saw.

    A count that differs is a reason worth noting but no proof (other clients); a degenerate shape or a mean
    that is off by more than `tolerance` (relative to the client's, and by more than 50 ms: the client sees
    network and tokeniser too) is.

    Args:
        histogram: observations of the run alone.
        client_mean: the same quantity as the client measured it, in the same unit.
        client_count: how many observations the client would expect.
    """
    reasons: list[str] = []
    mean = histogram.mean
    if histogram.edges and histogram.count > 0:
        first = histogram.cumulative[0]
        edge = histogram.edges[0]
        # All in the first bucket is honest for a fast server; with a mean far below the edge, or a client
        # that waited longer than the edge, it is an engine that observed zeros.
        slower = client_mean is not None and client_mean > edge
        if first >= histogram.count and mean is not None and (mean < 0.1 * edge or slower):
            reasons.append("all samples in first bucket")
    if client_mean is not None and mean is not None:
        gap = abs(mean - client_mean)
        if gap > tolerance * client_mean and gap > 0.05:
            reasons.append("mean disagrees with client")
    untrusted = bool(reasons)
    if client_count is not None and histogram.count != client_count:
        reasons.append("count mismatch")
    return Trust(not untrusted, tuple(reasons), mean)
