"""Intervals over replications: means, paired differences, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over replications with the half-width of its 95 % interval.

    `half` is None where one replication cannot give one. `n` counts replications.
    """

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half is None else self.mean + self.half

    @property
    def clear_of_zero(self) -> bool:
        """Whether the interval leaves zero out; without an interval nothing is clear."""
        return self.half is not None and abs(self.mean) > self.half


def t_quantile(level: float, degrees: int) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2.0))


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean and Student's t interval of independent replications, at least one."""
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    mean = float(data.mean())
    if n < 2:
        return Estimate(mean, None, n)
    spread = float(data.std(ddof=1))
    return Estimate(mean, t_quantile(level, n - 1) * spread / math.sqrt(n), n)


def paired_difference(after: Sequence[float], before: Sequence[float]) -> Estimate:
    """after - before, pair by pair: what common random numbers share cancels out."""
    return estimate([a - b for a, b in zip(after, before, strict=True)])


def paired_ratio(after: Sequence[float], before: Sequence[float]) -> Estimate | None:
    """after / before, pair by pair; None where a `before` is not above zero."""
    if any(b <= 0 for b in before):
        return None
    return estimate([a / b for a, b in zip(after, before, strict=True)])


def jackknife(whole: float, left_out: Sequence[float], level: float = 0.95) -> Estimate:
    """`whole`, a statistic of n pooled replications, with its jackknife interval.

    Args:
        left_out: the statistic with each replication left out in turn (Efron & Tibshirani, ch. 11).
    """
    data = np.asarray(left_out, dtype=np.float64)
    n = len(data)
    if n < 2:
        return Estimate(whole, None, n)
    error = math.sqrt((n - 1) / n * float(((data - data.mean()) ** 2).sum()))
    return Estimate(whole, t_quantile(level, n - 1) * error, n)
