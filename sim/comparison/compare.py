"""Set a prediction beside measured runs, metric by metric, and say how far to trust each difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.comparison.caveats import caveats
from sim.comparison.figures import METRICS, STATISTICS, THROUGHPUTS, figure, samples
from sim.comparison.identity import Difference, differences
from sim.comparison.regimes import Regimes, judge, strictest
from sim.comparison.rows import MetricRow, metric_rows, schedules_apart
from sim.comparison.sampling import Distance, Equivalence, distance, equivalence
from sim.comparison.sources import Sources, cancellation, does_not_add_up, error_sources
from sim.comparison.window import common_window, in_window
from sim.comparison.work import sides_of, work_differences
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
]

MARGIN = 0.10
SAME_SCHEDULE = 0.002  # of the time of sending; a larger difference is told
BOTH_PREDICTED = (
    "both are predictions: a wrong step time is wrong in both, so no interval is told; `whatif` gives those "
    "of differences, over paired seeds"
)
NOTHING_DECIDES = "no figure decides"
BLIND = (
    "near saturation, and one of the capacities is not known: two sides that keep up both serve what is "
    "offered, so that throughput shows no error; measure an overload as well, or a lower rate"
)


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
        regimes: of several runs, those that let the least pass.
        runs: measured runs of this load.
        tests: per metric, where both sides have records; of the first run.
        sources: where the error of the latency comes from; of the first run.
        differs: facts on which the prediction and any of the runs differ.
        name: of the first run, such as its file; may be empty.
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
    name: str = ""

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

        UNDECIDED if nothing can tell (see `doubt`), or if the figure that decides is only known to be off by
        at least so much.
        """
        worst = self.worst_row(allow_noise=allow_noise)
        if worst is None or worst.error is None:
            return "UNDECIDED"
        if abs(worst.error) > threshold and not (allow_noise and worst.excused):
            return "FAIL"
        return "UNDECIDED" if self.doubt or self.is_bound(worst) else "PASS"

    @property
    def doubt(self) -> str:
        """Why small errors would not tell that the prediction is right; empty where they do."""
        if self.worst is None:
            return NOTHING_DECIDES
        return BLIND if self.regimes.blind else ""

    def is_bound(self, row: MetricRow) -> bool:
        """Whether the row's error is at least as large as told, and nobody knows how large."""
        return self.regimes.bound and row.key == "capacity"


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
        name: what to call the (first) measured run, such as its file; its tool if None.

    Raises:
        NotComparable: the sides are of different engines, versions, models, GPUs or loads, did not do the
            same work, or a measured run is INVALID.
    """
    repeats = [measured] if isinstance(measured, BenchResult) else list(measured)
    first = repeats[0]
    differs = tuple(
        dict.fromkeys(found for run in repeats for found in differences(predicted.identity, run.identity))
    )
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
    judged = [judge(predicted, run, *capacities) for run in repeats]
    regimes = strictest(judged)
    notes += _of_regimes(judged, regimes)
    if window == "steady":
        predicted, repeats, note = _steady(predicted, repeats)
        notes.append(note)
    rows = metric_rows(predicted, repeats, regimes)
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
        name or "",
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
            said = [f"the measured run is INVALID ({reason.text})" for reason in run.verdict.reasons]
            out += said or ["the measured run is INVALID"]
    return list(dict.fromkeys(out))


def _of_regimes(judged: Sequence[Regimes], taken: Regimes) -> list[Note]:
    """That repeats were judged differently, and that none of the figures that decide can."""
    notes = []
    counts = Counter(found.verdict for found in judged)
    if len(counts) > 1:
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        text = f"the runs do not agree on the load: {told}; the verdict that lets the least pass is taken"
        notes.append(Note("warning", "load", text))
    if taken.blind:
        notes.append(Note("warning", "capacity", BLIND))
    return notes


def _steady(
    predicted: BenchResult, repeats: list[BenchResult]
) -> tuple[BenchResult, list[BenchResult], Note]:
    window = common_window([predicted, *repeats])
    if window is None:
        text = (
            f"no steady window: under {MIN_REQUESTS} requests, a side without records, or no time at which "
            "all were steady; the whole run is compared"
        )
        return predicted, repeats, Note("warning", "window", text)
    cut = [in_window(run, *window) for run in repeats]
    text = (
        f"requests sent {window[0]:.1f} to {window[1]:.1f} s after the first, on both sides; throughputs "
        "count what came out in that time"
    )
    return in_window(predicted, *window), cut, Note("info", "window", text)


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
