"""Stable, saturated or neither alike: what of two runs may be set beside each other at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sim.comparison.facts import fact, load_of
from sim.comparison.figures import THROUGHPUTS, split_key
from sim.figures.regime import TURNED_OVER, Regime, comparability, regime
from sim.results import BenchResult
from sim.workload.spec import WorkloadSpec

Verdict = Literal["comparable", "near saturation", "regime mismatch", "overloaded", "closed loop", "unknown"]

SHORT_SERVED = 0.9  # an aggregate run that serves less than this share of the offered rate was overloaded
_SAYS: dict[str, str] = {
    "comparable": "both sides keep up with the load",
    "near saturation": "near saturation a few per cent of capacity become any latency: latencies are shown, "
    "capacity and throughput decide",
    "regime mismatch": "one side is overloaded and the other is not: capacity is compared, not latencies",
    "overloaded": "both sides are overloaded: latencies grow with the length of the test, capacity and "
    "throughput decide",
    "closed loop": "the client waits for answers, so load cannot outrun the server",
    "unknown": "whether the server kept up cannot be told",
}
# Repeats of one load that were judged differently are compared by the verdict that lets the least pass.
_STRICTEST = ("regime mismatch", "near saturation", "overloaded", "unknown", "closed loop", "comparable")


@dataclass(frozen=True, slots=True)
class Regimes:
    """The regime verdict of a comparison.

    Attributes:
        verdict: see `sim.figures.regime.comparability`; "closed loop" and "unknown" beside it.
        predicted, measured: the state of each side, see `sim.figures.regime.Regime`.
        rate: offered, requests/s; None for a closed loop.
        capacity_predicted, capacity_measured: requests/s that each side can sustain; None: it did not show.
        bound: the capacity error is at least as large as computed, as one side's capacity is only known to
            exceed the offered rate.
        text: the same for people.
    """

    verdict: Verdict
    predicted: str
    measured: str
    rate: float | None
    capacity_predicted: float | None
    capacity_measured: float | None
    bound: bool
    text: str

    @property
    def capacity_error(self) -> float | None:
        """Signed relative error of the capacity; a bound where `bound` says so."""
        if not self.capacity_predicted or not self.capacity_measured:
            return None
        return self.capacity_predicted / self.capacity_measured - 1.0

    @property
    def blind(self) -> bool:
        """Whether the figures that decide would agree whatever the prediction's error.

        Two sides that keep up both serve what is offered; near saturation nothing else decides unless both
        capacities are known.
        """
        return self.verdict == "near saturation" and self.capacity_error is None

    def scores(self, key: str) -> bool:
        """Whether a figure decides in this regime."""
        latency = split_key(key) is not None
        if self.verdict in ("comparable", "closed loop", "unknown"):
            return latency or key in (*THROUGHPUTS, "duration")
        return key == "capacity" or (key in THROUGHPUTS and self.verdict != "regime mismatch")


def judge(
    predicted: BenchResult,
    measured: BenchResult,
    capacity_predicted: float | None = None,
    capacity_measured: float | None = None,
) -> Regimes:
    """Judge both sides by the same rule.

    Args:
        capacity_predicted, capacity_measured: requests/s found otherwise, e.g. by simulating the load sent at
            once; without them an overloaded side shows its capacity itself.
    """
    ours, theirs = state_of(predicted), state_of(measured)
    rate = next((r for r in (ours.offered_rate, theirs.offered_rate) if r is not None), None)
    caps = (
        capacity_predicted or (ours.sustainable_rate if ours.state == "saturated" else None),
        capacity_measured or (theirs.sustainable_rate if theirs.state == "saturated" else None),
    )
    verdict = _verdict(ours, theirs, rate, *caps)
    bound = False
    if verdict == "regime mismatch" and rate is not None and None in caps:
        # The side that keeps up can do at least what was asked of it.
        caps = (caps[0] or rate, caps[1] or rate)
        bound = True
    return Regimes(verdict, ours.state, theirs.state, rate, caps[0], caps[1], bound, _SAYS[verdict])


def strictest(found: Sequence[Regimes]) -> Regimes:
    """Of the repeats' regimes the one that lets the least pass, in whatever order they come."""

    def rank(regimes: Regimes) -> tuple[int, bool, bool, float, float]:
        error = abs(regimes.capacity_error or 0.0)
        at = _STRICTEST.index(regimes.verdict)
        return at, not regimes.blind, not regimes.bound, -error, regimes.rate or 0.0

    return min(found, key=rank)


def state_of(result: BenchResult) -> Regime:
    """The regime of one side: by its records, else by what it served of what was offered."""
    records = result.records
    if records is not None and not bool(np.isnan(records.scheduled).all()):
        return regime(records, None, _spec(result.identity))
    rate, cap = load_of(result.identity)
    if rate is None or math.isinf(rate):
        # Of a ramp or a trace no one rate tells whether the server kept up.
        return Regime("unknown" if rate is None else "closed-loop")
    found = regime_of_figures(rate, result.aggregates)
    return (
        Regime("capped", rate, found.served_rate) if found.state == "saturated" and cap is not None else found
    )


def regime_of_figures(rate: float, figures: Mapping[str, float | int | None]) -> Regime:
    """The regime of an open loop of which only figures are known: by what it served of what was offered.

    A run lasts from the first send to the last answer, so the last request's own time is no lack of capacity.
    """
    completed, duration = figures.get("completed"), figures.get("duration")
    served = figures.get("request_throughput") or (completed / duration if completed and duration else None)
    if not served or not completed:
        return Regime("unknown", rate)
    decode = _decode_seconds(figures)
    if completed < rate * decode / TURNED_OVER:
        return Regime("unknown", rate, served)  # the batch was still filling when the last request was sent
    latency = (figures.get("mean_e2el_ms") or 0.0) / 1e3 or decode + (
        figures.get("mean_ttft_ms") or 0.0
    ) / 1e3
    fair = completed / ((completed - 1) / rate + latency)
    if served < SHORT_SERVED * fair:
        return Regime("saturated", rate, served, served, rate / served)
    return Regime("stable", rate, served)


def _decode_seconds(figures: Mapping[str, float | int | None]) -> float:
    """Mean time from a request's first token to its last, or all of its time [s]; 0 if nothing tells it."""
    e2el, ttft, tpot = (figures.get(f"mean_{key}_ms") for key in ("e2el", "ttft", "tpot"))
    if e2el is not None:
        return max(e2el - (ttft or 0.0), 0.0) / 1e3
    tokens, completed = figures.get("total_output_tokens"), figures.get("completed")
    if tpot is None or not tokens or not completed:
        return 0.0
    return tpot * max(tokens / completed - 1.0, 0.0) / 1e3


def _verdict(
    ours: Regime, theirs: Regime, rate: float | None, predicted: float | None, measured: float | None
) -> Verdict:
    states = (ours.state, theirs.state)
    if "closed-loop" in states or "capped" in states:
        return "closed loop"
    if rate is not None and predicted and measured:
        return _as_verdict(comparability(rate, predicted, measured))
    if "unknown" in states:
        return "unknown"
    if states == ("saturated", "saturated"):
        return "overloaded"
    if "saturated" in states:
        return "regime mismatch"
    known = predicted or measured
    near = rate is not None and known is not None and rate / known >= 0.9
    drifts = any(side.notes for side in (ours, theirs))
    return "near saturation" if near or drifts else "comparable"


def _as_verdict(word: str) -> Verdict:
    for verdict in ("comparable", "near saturation", "regime mismatch", "overloaded"):
        if word == verdict:
            return verdict
    raise ValueError(word)


def _spec(identity: Mapping[str, Any]) -> WorkloadSpec:
    """As much of the load's description as the regime depends on."""
    rate, cap = load_of(identity)
    return WorkloadSpec(
        # A ramp, a trace, or nobody knows: the schedule is that of the records.
        request_rate=1.0 if rate is None else rate,
        max_concurrency=cap,
        burstiness=float(fact(identity, "burstiness") or 1.0),
    )
