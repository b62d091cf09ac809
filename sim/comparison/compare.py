"""Set a prediction beside measured runs, metric by metric, and say how far to trust each difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sim.comparison.caveats import caveats
from sim.comparison.figures import (
    LATENCY_KEYS,
    METRICS,
    STATISTICS,
    THROUGHPUTS,
    beyond_sample,
    both,
    common_window,
    figure,
    in_window,
    samples,
    split_key,
)
from sim.comparison.identity import Difference, differences, load_of
from sim.comparison.intervals import ErrorInterval, error_interval, is_silent, prediction_interval
from sim.comparison.noise import Noise, repeat_noise
from sim.comparison.regimes import Regimes, judge
from sim.comparison.sampling import Distance, Equivalence, distance, equivalence, log_ratio_spread
from sim.comparison.sources import Sources, cancellation, does_not_add_up, error_sources
from sim.errors import NotComparable
from sim.figures.regime import MIN_REQUESTS
from sim.provenance import Note
from sim.results import BenchResult

__all__ = [
    "METRICS",
    "STATISTICS",
    "THROUGHPUTS",
    "Comparison",
    "MetricRow",
    "MetricTest",
    "compare",
    "exceeds",
    "figure",
    "samples",
    "work_differences",
]

MARGIN = 0.10
SAME_SCHEDULE = 0.002  # of the time of sending; a larger difference is told
# Amounts of work that must agree before any timing may be compared, with the relative slack allowed.
WORK = {"completed": 0.0, "total_input_tokens": 0.01, "total_output_tokens": 0.01}
BOTH_PREDICTED = (
    "both are predictions: a wrong step time is wrong in both, so no interval is told; `whatif` gives those "
    "of differences, over paired seeds"
)
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


@dataclass(frozen=True, slots=True)
class MetricTest:
    """Distributions of one metric: their distance, and whether their means are equivalent."""

    metric: str
    distance: Distance
    equivalence: Equivalence | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction beside one measured load.

    Attributes:
        measured: the (first) measured run.
        runs: measured runs of this load.
        tests: per metric, where both sides have records.
        sources: where the error of the latency comes from.
        differs: facts on which the two results differ.
    """

    predicted: BenchResult
    measured: BenchResult
    rows: tuple[MetricRow, ...]
    notes: tuple[Note, ...]
    regimes: Regimes
    runs: int = 1
    tests: tuple[MetricTest, ...] = ()
    sources: Sources | None = None
    differs: tuple[Difference, ...] = ()

    @property
    def sides(self) -> tuple[str, str]:
        """What to call the two: two predictions are compared as well."""
        return sides_of(self.measured)

    @property
    def worst(self) -> MetricRow | None:
        """The deciding row with the largest absolute error: errors that cancel elsewhere do not hide."""
        return self.worst_row()

    def worst_row(self, *, allow_noise: bool = False) -> MetricRow | None:
        """As `worst`; with `allow_noise` of those rows that their measured repeat noise does not excuse."""
        scored = [row for row in self.rows if row.scored and row.error is not None]
        if allow_noise:
            scored = [row for row in scored if not row.excused] or scored
        return max(scored, key=lambda row: abs(row.error or 0.0)) if scored else None

    def verdict(
        self, threshold: float = MARGIN, *, allow_noise: bool = False
    ) -> Literal["PASS", "FAIL", "UNDECIDED"]:
        """Whether the worst figure is within `threshold`.

        UNDECIDED if no figure decides, or if the one that does is only known to be off by at least so much.
        """
        worst = self.worst_row(allow_noise=allow_noise)
        if worst is None or worst.error is None:
            return "UNDECIDED"
        if abs(worst.error) > threshold and not (allow_noise and worst.excused):
            return "FAIL"
        return "UNDECIDED" if self.is_bound(worst) else "PASS"

    def is_bound(self, row: MetricRow) -> bool:
        """Whether the row's error is at least as large as told, and nobody knows how large."""
        return self.regimes.bound and row.key == "capacity"


def sides_of(measured: BenchResult) -> tuple[str, str]:
    """(first, second) in a few words."""
    if measured.origin == "predicted":
        return "in the first", "in the second"
    return "predicted", "measured"


def work_differences(predicted: BenchResult, measured: BenchResult) -> list[str]:
    """Say where two results did not do the same work (requests, tokens); empty if they did."""
    out = []
    first, second = sides_of(measured)
    for key, slack in WORK.items():
        ours, theirs = predicted.aggregates.get(key), measured.aggregates.get(key)
        if ours is None or theirs is None:
            continue
        if abs(ours - theirs) > slack * abs(theirs):
            out.append(f"{key} is {ours:,} {first} but {theirs:,} {second}")
    return out


def compare(
    predicted: BenchResult,
    measured: BenchResult | Sequence[BenchResult],
    *,
    force: bool = False,
    margin: float = MARGIN,
    window: Literal["whole", "steady"] = "whole",
    capacities: tuple[float | None, float | None] = (None, None),
    name: str | None = None,
) -> Comparison:
    """Set a prediction beside a measured load.

    Rows are the figures that both sides can state, by one definition where both have records.

    Args:
        measured: one run, or several of the same load: their spread is the repeat noise.
        force: what forbids a comparison becomes a note.
        margin: of the equivalence test.
        window: "steady" leaves out what either side took to fill up and to drain.
        capacities: (predicted, measured) requests/s where known otherwise; see `judge`.
        name: what to call the measured run in a refusal, such as its file; its tool if None.

    Raises:
        NotComparable: the sides are of different engines, versions, models, GPUs or loads, did not do the
            same work, or a measured run is INVALID.
    """
    repeats = [measured] if isinstance(measured, BenchResult) else list(measured)
    first = repeats[0]
    differs = differences(predicted.identity, first.identity)
    sides = sides_of(first)
    problems = [difference.told(*sides) for difference in differs if difference.fatal]
    problems += _problems(predicted, repeats)
    if problems and not force:
        raise NotComparable(f"{name or first.tool}: not comparable: " + "; ".join(problems))
    notes = [Note("warning", "comparable", text) for text in problems]
    notes += caveats(predicted, repeats, sides)
    notes += [Note("warning", d.key, d.told(*sides)) for d in differs if not d.fatal]
    if first.origin == "predicted":
        notes.append(Note("info", "intervals", BOTH_PREDICTED))
    regimes = judge(predicted, first, *capacities)
    if window == "steady":
        predicted, repeats, note = _steady(predicted, repeats)
        notes.append(note)
    rows = _rows(predicted, repeats, regimes)
    notes += _remarks(predicted, repeats[0], rows)
    return Comparison(
        predicted,
        repeats[0],
        tuple(rows),
        tuple(notes),
        regimes,
        len(repeats),
        _tests(predicted, repeats[0], rows, margin),
        error_sources(predicted, repeats[0]),
        differs,
    )


def exceeds(comparisons: Sequence[Comparison], threshold: float, *, allow_noise: bool = False) -> list[str]:
    """The deciding figures whose absolute error is above `threshold` (0.05 is 5 %), or may well be.

    `allow_noise` passes those within twice their measured repeat noise; an assumed noise excuses nothing.
    """
    over = []
    for comparison in comparisons:
        for row in comparison.rows:
            if not row.scored or row.error is None or (allow_noise and row.excused):
                continue
            if abs(row.error) > threshold:
                over.append(f"{row.key} {row.error:+.1%}")
            elif comparison.is_bound(row):
                over.append(f"{row.key} at least {row.error:+.1%} (undecided: {comparison.regimes.verdict})")
    return over


def _problems(predicted: BenchResult, repeats: Sequence[BenchResult]) -> list[str]:
    out = []
    for run in repeats:
        out += work_differences(predicted, run)
        if run.verdict.status == "INVALID":
            out += [f"the measured run is INVALID ({reason.text})" for reason in run.verdict.reasons]
    return list(dict.fromkeys(out))


def _steady(
    predicted: BenchResult, repeats: list[BenchResult]
) -> tuple[BenchResult, list[BenchResult], Note]:
    window = common_window(predicted, repeats[0])
    if window is None:
        text = (
            f"no steady window: under {MIN_REQUESTS} requests, a side without records, or no time at which "
            "both were steady; the whole run is compared"
        )
        return predicted, repeats, Note("warning", "window", text)
    cut = [in_window(run, *window) for run in repeats]
    text = f"requests sent {window[0]:.1f} to {window[1]:.1f} s after the first, on both sides"
    return in_window(predicted, *window), cut, Note("info", "window", text)


def _rows(predicted: BenchResult, repeats: list[BenchResult], regimes: Regimes) -> list[MetricRow]:
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
        reason = "" if regimes.scores(key) else str(regimes.verdict)
        n = _samples_of(first, key)
        if not reason and beyond_sample(key, n):
            reason = f"beyond {n} samples"
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


def _tests(
    predicted: BenchResult, measured: BenchResult, rows: Sequence[MetricRow], margin: float
) -> tuple[MetricTest, ...]:
    if predicted.records is None or measured.records is None:
        return ()
    found = []
    by_key = {row.key: row for row in rows}
    for metric in METRICS:
        apart = distance(predicted.records, measured.records, metric)
        row = by_key.get(f"mean_{metric}_ms")
        if apart is None or row is None:
            continue
        same = None
        if row.error is not None and row.interval is not None:
            same = equivalence(1.0 + row.error, row.interval.spread, margin)
        found.append(MetricTest(metric, apart, same))
    return tuple(found)


def _remarks(predicted: BenchResult, measured: BenchResult, rows: Sequence[MetricRow]) -> list[Note]:
    notes = []
    if (text := cancellation(predicted, measured)) is not None:
        notes.append(Note("warning", "cancellation", text))
    notes += [Note("warning", "identity", text) for text in does_not_add_up(predicted, measured)]
    if abs(apart := schedules_apart(predicted, measured)) > SAME_SCHEDULE:
        text = f"the times of sending differ, in all by {apart:+.1%}, and duration and throughput with them"
        notes.append(Note("info", "schedule", f"{text}; --replay sends requests as recorded"))
    completed = measured.aggregates.get("completed")
    if completed is not None and completed < 100 and any("p99" in row.key for row in rows):
        text = f"P99 of {int(completed)} requests is about their maximum; it is shown and does not decide"
        notes.append(Note("warning", "p99", text))
    return notes
