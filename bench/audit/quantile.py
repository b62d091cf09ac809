"""What a histogram's buckets allow to be said of a percentile as benchmark clients define it."""

from __future__ import annotations

import math
from itertools import pairwise

from bench.histogram import Histogram, QuantileInterval


def bounds(histogram: Histogram, q: float) -> QuantileInterval | None:
    """Where the linear percentile `q` (0..1) lies; None without observations or buckets.

    Clients interpolate between two order statistics (numpy's "linear"), which may lie in two buckets, far
    apart ones even for few samples. So the interval reaches from the lower edge of the one's bucket to the
    upper edge of the other's; the estimate is the usual one within a bucket, where there is an upper edge.
    """
    n = round(histogram.count)
    usual = histogram.quantile(q)
    if usual is None or n < 1:
        return None
    position = (n - 1) * q
    low, _ = _bucket(histogram, math.floor(position))
    _, high = _bucket(histogram, min(math.ceil(position), n - 1))
    return QuantileInterval(low, high, None if math.isinf(high) else usual.estimate)


def _bucket(histogram: Histogram, index: int) -> tuple[float, float]:
    """Edges of the bucket that holds the `index`-th smallest observation, from 0."""
    edges = [0.0, *histogram.edges]
    for (lower, upper), cumulative in zip(pairwise(edges), histogram.cumulative, strict=True):
        if cumulative > index:
            return lower, upper
    return edges[-2], math.inf
