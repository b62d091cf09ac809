"""What a result says of its run, and of the load: its rate, its cap, what else set the times of sending."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RATE_WITHIN = "request_rate_within"  # half a last digit of a rate that was read from a printed report
RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
_TIMED = ("use_trace_arrivals", "ramp_up", "ramp_up_strategy")
_COUNTS = ("num_prompts", "max_concurrency", "gpu_count")


@dataclass(frozen=True, slots=True)
class Pace:
    """What sets the times of sending beside a rate and a cap.

    Attributes:
        ramp: (strategy, first rate, last rate [requests/s]); None: there is none.
        trace: whether requests go out at a trace's own times; None: not told, as clients call the rate of
            those times inf as well.
        scale: how many times as fast as the trace says; None: not told.
    """

    ramp: tuple[str, float, float] | None = None
    trace: bool | None = None
    scale: float | None = None

    def agrees(self, other: Pace) -> bool:
        """Whether the two are one, as far as both are told."""
        pairs = ((self.trace, other.trace), (self.scale, other.scale))
        return self.ramp == other.ramp and all(one == two or None in (one, two) for one, two in pairs)

    def __str__(self) -> str:
        if self.ramp is not None:
            strategy, first, last = self.ramp
            return f"{strategy} ramp from {first:g} to {last:g} requests/s"
        if not self.trace:
            return "by rate and cap"
        if self.scale is None or self.scale == 1.0:
            return "the trace's times"
        return f"the trace's times, {self.scale:g} times as fast"


def fact(identity: Mapping[str, Any], key: str) -> Any:
    """A fact of an identity or of the workload within it; None is unknown or none.

    Rates are floats and counts whole numbers, however a file writes them. Arrivals from a trace or a ramp
    have no one request rate.
    """
    workload = identity.get("workload")
    value = identity.get(key)
    if value is None and isinstance(workload, Mapping):
        value = workload.get(key)
    if key == "engine" and value is None:
        backend = str(identity.get("backend", ""))
        value = next((name for name in ("vllm", "sglang") if backend.startswith(name)), None)
    if value is None:
        return None
    if key == "request_rate":
        return None if followed_times(identity) else _number(value)
    if key == "burstiness":
        return _number(value)
    if key in _COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def load_of(identity: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """(request rate, concurrency cap) of a run; None is unknown or none.

    A client that tells its cap and no rate has none: reports leave out a rate without bound.
    """
    rate, cap = fact(identity, "request_rate"), fact(identity, "max_concurrency")
    if rate is None and cap is not None and not followed_times(identity) and not _within(identity):
        rate = math.inf
    return rate, None if cap is None else int(cap)


def followed_times(identity: Mapping[str, Any]) -> bool:
    """Whether a run says that it sent at a trace's times, or by a ramp."""
    workload = identity.get("workload")
    blocks = (identity, workload if isinstance(workload, Mapping) else {})
    return any(block.get(key) for block in blocks for key in _TIMED)


def pace_of(identity: Mapping[str, Any]) -> Pace:
    """The ramp or the trace that a run says it followed."""
    told = fact(identity, "ramp_up") or tuple(fact(identity, key) for key in RAMP)
    if len(told) == len(RAMP) and None not in told:
        return Pace(ramp=(str(told[0]), float(told[1]), float(told[2])), trace=False)
    trace, rate = fact(identity, "use_trace_arrivals"), fact(identity, "request_rate")
    if not trace:
        untold = trace is None and (rate is None or math.isinf(rate))
        return Pace(trace=None if untold else False)
    scale = fact(identity, "rate_scale")
    return Pace(trace=True, scale=None if scale is None else float(scale))


def tells_load(identity: Mapping[str, Any]) -> bool:
    """Whether a run says anything of its load."""
    return load_of(identity) != (None, None) or followed_times(identity)


def tells_pace(identity: Mapping[str, Any]) -> bool:
    """Whether a run says what set its times of sending; a cap alone does not."""
    return fact(identity, "request_rate") is not None or followed_times(identity)


def same_load(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs say the same of their load; a printed rate is as good as its two digits."""
    (rate, cap), (other_rate, other_cap) = load_of(one), load_of(other)
    if cap != other_cap or not pace_of(one).agrees(pace_of(other)):
        return False
    if rate is None or other_rate is None:
        return rate is other_rate
    return same_rate(rate, other_rate, one, other)


def same_rate(rate: float, other: float, *identities: Mapping[str, Any]) -> bool:
    """Whether two rates [requests/s] agree, as far as those who tell them tell all digits."""
    within = max((_within(identity) for identity in identities), default=0.0)
    return math.isclose(rate, other, rel_tol=1e-6, abs_tol=within * (1.0 + 1e-6))


def _within(identity: Mapping[str, Any]) -> float:
    """How far a rate may lie from what is told of it [requests/s]; above 0 where a rate was printed."""
    value = identity.get(RATE_WITHIN)
    return float(value) if isinstance(value, int | float) else 0.0


def _number(value: Any) -> float | None:
    try:
        return float(value)  # clients write "inf" as text
    except (TypeError, ValueError):
        return None
