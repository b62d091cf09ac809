"""When requests are sent: the send times that a benchmark client plans before it starts.

The draws come from numpy's legacy generator (`np.random.RandomState`), because both clients draw from the
global one; with the client's seed the times are the client's own, to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput

Floats = NDArray[np.float64]
RampUp = tuple[Literal["linear", "exponential"], float, float]


def check_arrivals(
    rate: float, burstiness: float, ramp_up: RampUp | None, client: Literal["vllm", "sglang"]
) -> None:
    """Refuse rates and shapes that no client could send.

    Raises:
        BadInput: naming the client's flag.
    """
    if math.isnan(rate) or rate <= 0:
        raise BadInput("--request-rate", rate, "must be above 0 requests/s, or inf")
    if math.isnan(burstiness) or burstiness <= 0:
        raise BadInput(
            "--burstiness", burstiness, "must be above 0 (1 is Poisson, lower is burstier, inf is constant)"
        )
    if client == "sglang" and burstiness != 1.0:
        raise BadInput("--burstiness", burstiness, "sglang.bench_serving only sends Poisson traffic")
    if ramp_up is None:
        return
    if client == "sglang":
        raise BadInput("--ramp-up-strategy", ramp_up[0], "sglang.bench_serving has no ramp-up")
    kind, start, end = ramp_up
    if not math.isinf(rate):
        raise BadInput("--request-rate", rate, "a ramp-up sets the rate; give one of the two")
    for flag, value in (("--ramp-up-start-rps", start), ("--ramp-up-end-rps", end)):
        if not math.isfinite(value) or value <= 0:
            raise BadInput(flag, value, "must be above 0 requests/s and finite")
    if start > end:
        raise BadInput("--ramp-up-start-rps", start, f"must not exceed --ramp-up-end-rps ({end})")
    if kind not in ("linear", "exponential"):
        raise BadInput("--ramp-up-strategy", kind, "must be linear or exponential")


def ramp_rates(n: int, ramp_up: RampUp) -> Floats:
    """Rate in force at each request of a ramp-up, by request index (vllm/benchmarks/serve.py, 0.28).

    Returns:
        shape (n,), requests/s.
    """
    kind, start, end = ramp_up
    progress = np.arange(n, dtype=np.float64) / max(n - 1, 1)
    if kind == "linear":
        return start + (end - start) * progress
    ratio = end / start
    # Python's pow, as the client uses: numpy's differs from it in the last bit now and then.
    return np.array([start * ratio**p for p in progress.tolist()], dtype=np.float64)


def vllm_arrivals(
    n: int, rate: float, burstiness: float, ramp_up: RampUp | None, rng: np.random.RandomState
) -> Floats:
    """Send times of `vllm bench serve` (get_request in vllm/benchmarks/serve.py, 0.28).

    Gaps are Gamma(shape=burstiness, scale=1/(rate*burstiness)): mean 1/rate, coefficient of variation
    1/sqrt(burstiness). The first request waits its gap too. Without a ramp-up all times are stretched so
    that the last request goes exactly at n/rate.

    Returns:
        shape (n,), seconds since the start of the run, ascending.
    """
    if ramp_up is None and math.isinf(rate):
        return np.zeros(n)
    rates = np.full(n, rate) if ramp_up is None else ramp_rates(n, ramp_up)
    gaps = 1.0 / rates if math.isinf(burstiness) else rng.gamma(burstiness, 1.0 / (rates * burstiness))
    times: Floats = np.cumsum(gaps)
    if ramp_up is None and times[-1] != 0:
        times *= (n / rate) / times[-1]
    return times


def sglang_arrivals(n: int, rate: float, rng: np.random.RandomState) -> Floats:
    """Send times of sglang.bench_serving 0.5.21: the first at 0, exponential gaps, no stretching.

    Returns:
        shape (n,), seconds since the start of the run, ascending.
    """
    times = np.zeros(n)
    if n > 1 and not math.isinf(rate):
        times[1:] = np.cumsum(rng.exponential(1.0 / rate, size=n - 1))
    return times


@dataclass(frozen=True, slots=True)
class ArrivalStats:
    """What a drawn (or recorded) set of send times really was.

    Attributes:
        rate: requests/s; None if all were sent at once or there is only one.
        cv: coefficient of variation of the gaps; None for fewer than two gaps or no time between them.
    """

    rate: float | None
    cv: float | None


def arrival_stats(times: Floats) -> ArrivalStats:
    """Realised rate and burstiness of send times of shape (n,) [s], in ascending order."""
    gaps = np.diff(times)
    if len(gaps) == 0 or times[-1] <= times[0]:
        return ArrivalStats(None, None)
    mean = float(gaps.mean())
    return ArrivalStats(1.0 / mean, float(gaps.std() / mean) if len(gaps) > 1 else None)
