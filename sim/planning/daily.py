"""Traffic that changes over the day: arrival times under a rate by the hour, and replicas by the hour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput

Floats = NDArray[np.float64]
HOURS = 24


@dataclass(frozen=True, slots=True)
class DailyProfile:
    """Relative rates of the hours 0..23; only their ratios matter.

    Raises:
        BadInput: not 24 finite numbers of at least 0 that are not all 0.
    """

    factors: tuple[float, ...] = (1.0,) * HOURS

    def __post_init__(self) -> None:
        if len(self.factors) != HOURS:
            raise BadInput("daily", len(self.factors), f"must have {HOURS} numbers, one for each hour")
        if not all(math.isfinite(f) and f >= 0 for f in self.factors) or sum(self.factors) <= 0:
            raise BadInput("daily", None, "must be finite numbers of at least 0, not all of them 0")

    @property
    def peak_factor(self) -> float:
        """Rate of the busiest hour over the mean rate."""
        return max(self.factors) * HOURS / sum(self.factors)

    def rates(self, mean: float) -> tuple[float, ...]:
        """Rate of each hour at a mean rate over the day."""
        scale = mean * HOURS / sum(self.factors)
        return tuple(scale * factor for factor in self.factors)


def arrivals(
    mean_rate: float,
    profile: DailyProfile,
    duration: float,
    rng: np.random.Generator,
    *,
    from_hour: float = 0.0,
    compress: float = 1.0,
    burstiness: float = 1.0,
) -> Floats:
    """Arrival times [s] of a renewal process that runs by the profile's clock.

    Gaps are Gamma(burstiness) as those of `vllm bench serve`; 1 is Poisson. Their unit-rate times are mapped
    through the inverse of the expected number of arrivals, so that every hour has its own rate.

    Args:
        mean_rate: arrivals/s over the whole day.
        duration: simulated seconds.
        from_hour: hour of the day at time 0.
        compress: hours pass this many times faster, at unchanged rates.

    Returns:
        shape (n,), ascending, below `duration`.
    """
    edges, counts = _expected(profile.rates(mean_rate), duration, from_hour, compress)
    total = float(counts[-1])
    if total <= 0:
        return np.empty(0)
    times = np.empty(0)
    size = max(16, int(total + 6 * math.sqrt(total) / math.sqrt(min(burstiness, 1.0)) + 16))
    while not len(times) or times[-1] < total:
        gaps = np.ones(size) if math.isinf(burstiness) else rng.gamma(burstiness, 1.0 / burstiness, size)
        start = times[-1] if len(times) else 0.0
        times = np.concatenate((times, start + np.cumsum(gaps)))
    return np.interp(times[times < total], counts, edges)


def time_for(
    count: float, mean_rate: float, profile: DailyProfile, from_hour: float = 0.0, compress: float = 1.0
) -> float | None:
    """The time in which about `count` arrivals are expected, in two digits and rounded up [s].

    None beyond ten thousand days, or where the rate is 0.
    """
    day = HOURS * 3600.0 / compress
    if mean_rate <= 0:
        return None
    whole = math.floor(count / (mean_rate * day))
    if whole > 10_000:
        return None
    edges, counts = _expected(profile.rates(mean_rate), (whole + 1) * day, from_hour, compress)
    exact = float(np.interp(count, counts, edges))
    step = 10.0 ** (math.floor(math.log10(exact)) - 1)
    return math.ceil(exact / step) * step


def _expected(
    rates: Sequence[float], duration: float, from_hour: float, compress: float
) -> tuple[Floats, Floats]:
    """Edges of constant rate [s] and the expected arrivals up to each."""
    hour = 3600.0 / compress
    offset = (from_hour % HOURS) * hour
    first = math.floor(offset / hour)
    edges, counts = [0.0], [0.0]
    k = first
    while edges[-1] < duration:
        end = min(duration, (k + 1) * hour - offset)
        if end > edges[-1]:
            counts.append(counts[-1] + rates[k % HOURS] * (end - edges[-1]))
            edges.append(end)
        k += 1
    return np.array(edges), np.array(counts)


@dataclass(frozen=True, slots=True)
class DayOfReplicas:
    """Replicas by the hour against a constant number.

    Attributes:
        by_hour: replicas that each hour takes, one of them down.
        constant: replicas that the busiest hour takes.
        replica_hours, constant_hours: over a day.
    """

    rates: tuple[float, ...]
    by_hour: tuple[int, ...]
    constant: int
    replica_hours: int
    constant_hours: int


def day_of_replicas(
    per_replica: float, mean_rate: float, profile: DailyProfile, spare: int = 1
) -> DayOfReplicas:
    """How many replicas each hour of the day takes.

    Args:
        per_replica: sustained by one [requests/s].
        spare: replicas beyond what the rate takes, against a failure.
    """
    rates = profile.rates(mean_rate)
    by_hour = tuple(max(1, math.ceil(rate / per_replica - 1e-9)) + spare for rate in rates)
    most = max(by_hour)
    return DayOfReplicas(rates, by_hour, most, sum(by_hour), most * HOURS)
