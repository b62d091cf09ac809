"""The rows of a comparison: every figure that both sides can state, and whether it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.comparison.facts import load_of
from sim.comparison.figures import (
    LATENCY_KEYS,
    METRICS,
    THROUGHPUTS,
    beyond_sample,
    both,
    samples,
    split_key,
)
from sim.comparison.intervals import ErrorInterval, error_interval, is_silent, prediction_interval
from sim.comparison.noise import Noise, repeat_noise
from sim.comparison.regimes import Regimes
from sim.comparison.sampling import log_ratio_spread
from sim.results import BenchResult

_SERVER_KEYS = ("num_preemptions", "kv_cache_tokens", "max_kv_usage")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One figure on both sides. `error` is predicted / measured - 1, None where a side is unknown or 0.

    Attributes:
        measured: mean over the repeats, where there are several.
        n: samples behind it; None: unknown.
        interval: of the error, at 90 %; None where nothing tells it.
        noise: repeat noise of the measured figure; None where nothing tells it.
        scored: whether the figure decides.
        unscored: why not.
    """

    key: str
    predicted: float | None
    measured: float | None
    n: int | None = None
    interval: ErrorInterval | None = None
    noise: Noise | None = None
    scored: bool = True
    unscored: str = ""

    @property
    def error(self) -> float | None:
        """Signed relative error of the prediction."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0

    @property
    def excused(self) -> bool:
        """Whether the measured repeat noise explains the error; an assumed one excuses nothing."""
        return self.within_noise and self.noise is not None and self.noise.repeats > 0

    @property
    def within_noise(self) -> bool:
        """Whether the error is no larger than twice what the measurement itself varies by."""
        return self.error is not None and self.noise is not None and abs(self.error) <= 2 * self.noise.share


def metric_rows(predicted: BenchResult, repeats: Sequence[BenchResult], regimes: Regimes) -> list[MetricRow]:
    """All rows, in a fixed order; what decides follows from the regimes, the sample and the definitions."""
    first = repeats[0]
    alike = first.origin == "predicted"
    spreads: dict[str, float] = {}
    if predicted.records is not None and first.records is not None:
        spreads = log_ratio_spread(predicted.records, first.records, LATENCY_KEYS)
    apart = schedules_apart(predicted, first)
    rows = []
    if regimes.capacity_predicted and regimes.capacity_measured and not regimes.scores("mean_ttft_ms"):
        rows.append(MetricRow("capacity", regimes.capacity_predicted, regimes.capacity_measured))
    for key in ("duration", *THROUGHPUTS, *LATENCY_KEYS):
        pairs = [both(predicted, run, key) for run in repeats]
        known = [theirs for _, theirs in pairs if theirs is not None]
        ours = pairs[0][0]
        if ours is None or not known:
            continue
        noise = None if alike else repeat_noise(key, repeats)
        n = min((count for run in repeats if (count := _samples_of(run, key)) is not None), default=None)
        reason = _unscored(key, n, predicted, repeats, regimes)
        row = MetricRow(
            key, ours, sum(known) / len(known), n, noise=noise, scored=not reason, unscored=reason
        )
        interval = None
        if not alike and not is_silent(predicted, key):
            interval = error_interval(
                key,
                row.error,
                prediction_interval(predicted, key),
                spreads.get(key),
                noise,
                len(known),
                schedule=apart if key in ("duration", *THROUGHPUTS) else 0.0,
            )
        rows.append(replace(row, interval=interval))
    for key in _SERVER_KEYS:
        ours, theirs = predicted.server.get(key), first.server.get(key)
        if theirs is not None:
            value = None if ours is None else float(ours)
            rows.append(MetricRow(key, value, float(theirs), scored=False, unscored="not a latency"))
    return rows


def _unscored(
    key: str, n: int | None, predicted: BenchResult, repeats: Sequence[BenchResult], regimes: Regimes
) -> str:
    """Why a figure does not decide; empty if it does."""
    if not regimes.scores(key):
        return str(regimes.verdict)
    if beyond_sample(key, n):
        return f"beyond {n} samples"
    parts = split_key(key)
    if parts is not None and parts[1] in defined_otherwise(predicted, *repeats):
        return "another definition"
    return ""


def defined_otherwise(*results: BenchResult) -> set[str]:
    """Metrics that a client of which no requests are known computes by a rule of its own, as it is noted."""
    return {
        note.subject
        for result in results
        for note in result.notes
        if result.records is None and note.kind == "warning" and note.subject in METRICS
    }


def schedules_apart(predicted: BenchResult, measured: BenchResult) -> float:
    """By what share the prediction took longer to send than the run did; 0 where answers set the pace.

    Two draws of one rate take different times; that says nothing of an engine.
    """
    rate = load_of(measured.identity)[0]
    if rate is None or not math.isfinite(rate) or predicted.records is None or measured.records is None:
        return 0.0
    spans = [float(np.nanmax(r.sent) - np.nanmin(r.sent)) for r in (predicted.records, measured.records)]
    return spans[0] / spans[1] - 1.0 if min(spans) > 0 else 0.0


def _samples_of(result: BenchResult, key: str) -> int | None:
    parts = split_key(key)
    if parts is None:
        return None
    if result.records is not None:
        return len(samples(result.records, parts[1]))
    told: Any = result.aggregates.get(f"n_{parts[1]}", result.aggregates.get("completed"))
    # Gaps are pooled over requests: how many there are is not told by the number of requests.
    return None if told is None or parts[1] == "itl" else int(told)
