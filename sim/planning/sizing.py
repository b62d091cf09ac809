"""How many replicas a rate takes, at its peak, and with one of them down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.errors import BadInput
from sim.planning.capacity import Capacity

MAX_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class Sizing:
    """Replicas for a load that a router splits evenly.

    Attributes:
        rate, peak_rate: mean and peak [requests/s].
        per_replica: what one replica is trusted with: the lower end of its capacity's interval over seeds.
        at_mean, at_peak: replicas that hold the mean and the peak.
        recommended: replicas that hold the peak with one of them down.
        use_at_mean, use_at_peak, use_one_down: shares of `per_replica` in use with the recommended number.
        optimistic, pessimistic: recommended number at the ends of the intervals of what `covers` says; no
            number is enough where the low end carries nothing, or takes more than `MAX_REPLICAS`.
    """

    rate: float
    peak_rate: float
    per_replica: float
    at_mean: int
    at_peak: int
    recommended: int
    use_at_mean: float
    use_at_peak: float
    use_one_down: float
    optimistic: int
    pessimistic: int | None
    covers: str = "seeds and model"

    @property
    def uncertain(self) -> bool:
        """Whether the number changes within the answer's intervals."""
        return self.pessimistic is None or self.optimistic != self.pessimistic


def size(found: Capacity, rate: float, peak_factor: float = 1.0) -> Sizing | None:
    """Replicas for `rate`; None if no replica keeps the objectives at any load, or none is sure to.

    Raises:
        BadInput: a rate or factor that makes no sense.
    """
    if not 0 < rate < float("inf"):
        raise BadInput("--rate", rate, "must be above 0 requests/s and finite")
    if not 1.0 <= peak_factor < float("inf"):
        raise BadInput("--peak-factor", peak_factor, "must be at least 1: the peak over the mean")
    if found.level is None or found.certain is None:
        return None
    each = found.level.value if found.low is None else found.low
    if each <= 0:
        return None
    peak = rate * peak_factor
    recommended = _with_one_down(peak, each)
    worst, best = found.certain
    return Sizing(
        rate,
        peak,
        each,
        _needed(rate, each),
        _needed(peak, each),
        recommended,
        rate / (recommended * each),
        peak / (recommended * each),
        peak / ((recommended - 1) * each),
        _with_one_down(peak, best),
        _with_one_down(peak, worst) if worst * MAX_REPLICAS > peak else None,
        found.covers,
    )


def unsized_words(found: Capacity) -> str:
    """Why a found capacity gives no number of replicas; "" where it does."""
    if found.level is None or found.low is None or found.low > 0:
        return ""
    return (
        "replicas: no number: over these seeds the capacity's interval begins at 0, so no number is sure to "
        "be enough; more --seeds or --prompts narrow it"
    )


def _needed(rate: float, each: float) -> int:
    needed = math.ceil(rate / each - 1e-9)
    if needed > MAX_REPLICAS:
        raise BadInput("--rate", rate, f"would take {needed:,} replicas of {each:.3g} requests/s")
    return max(1, needed)


def _with_one_down(rate: float, each: float) -> int:
    return _needed(rate, each) + 1
