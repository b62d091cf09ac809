"""A comparison as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sim.comparison.compare import MARGIN, NOTHING_DECIDES, Comparison, MetricRow
from sim.comparison.loads import load_name

_JUDGED = {"FAIL": "outside", "PASS": "within", "UNDECIDED": "perhaps within"}
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def percent(share: float) -> str:
    """A share as it is asked for: `5%`."""
    return f"{share * 100:.4g}%"


def format_value(value: float | None) -> str:
    """A figure with four significant digits and thousands separators."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 10_000 or value == int(value) else f"{value:,.4g}"


def _percent(share: float) -> str:
    return f"{share:+.1%}" if abs(share) < 10.0 else f"{share:+,.0%}"


def format_row(row: MetricRow, bound: bool = False) -> str:
    """One line of the table; a row that does not decide says why."""
    error = "" if row.error is None else f"{'at least ' if bound else ''}{_percent(row.error)}"
    interval = (
        "" if row.interval is None else f"{_percent(row.interval.low)} to {_percent(row.interval.high)}"
    )
    noise = "" if row.noise is None else f"±{row.noise.share:.1%}{'' if row.noise.repeats else '*'}"
    line = f"  {row.key:<24}{format_value(row.predicted):>14}{format_value(row.measured):>14} {error:>9}"
    line += f" {interval:>19} {noise:>9}"
    return (
        (line.rstrip() + f"  ({row.unscored})") if row.unscored and row.error is not None else line.rstrip()
    )


def _head(comparison: Comparison) -> str:
    if comparison.measured.origin == "predicted":
        return f"  {'figure':<24}{'first':>14}{'second':>14}{'to second':>10}"
    titles = f"{'predicted':>14}{'measured':>14}{'error':>10}{'90 % interval':>20}{'repeats':>10}"
    return f"  {'figure':<24}{titles}"


def format_comparison(
    comparison: Comparison, threshold: float | None = None, *, allow_noise: bool = False
) -> str:
    """A comparison as a table with what it means below.

    Args:
        threshold: the largest error that passes; None measures by the margin of the equivalence test, and
            calls that no gate.
        allow_noise: what measured repeat noise explains passes.
    """
    regimes = comparison.regimes
    lines = [_head(comparison)]
    lines += [format_row(row, bound=comparison.is_bound(row)) for row in comparison.rows]
    if any(row.noise is not None and not row.noise.repeats for row in comparison.rows):
        lines.append("  * assumed from an H100's repeats; give several runs of this load to measure it")
    lines.append(f"  load: {regimes.verdict}: {regimes.text}")
    lines += _of_first(comparison)
    worst, limit = comparison.worst_row(allow_noise=allow_noise), MARGIN if threshold is None else threshold
    if worst is not None:
        verdict = comparison.verdict(limit, allow_noise=allow_noise)
        inside = (
            ", within twice its repeat noise"
            if worst.within_noise and abs(worst.error or 0.0) > limit
            else ""
        )
        if threshold is None:
            judged = f"{_JUDGED[verdict]} {percent(limit)} (not a gate)"
        else:
            judged = f"{verdict} at {percent(limit)}"
        least = "at least " if comparison.is_bound(worst) else ""
        lines.append(f"  worst: {worst.key} {least}{worst.error:+.1%}{inside}: {judged}")
    else:
        judged = "" if threshold is None else f": UNDECIDED at {percent(limit)}"
        lines.append(f"  worst: {NOTHING_DECIDES}{judged}")
    lines += [f"  {note.kind}: {note.text}" for note in comparison.notes]
    return "\n".join(lines)


def _tests(comparison: Comparison) -> list[str]:
    lines = []
    for test in comparison.tests:
        apart = test.distance
        text = f"KS distance {apart.value:.3f} (chance: below {apart.chance:.3f})"
        same = test.equivalence
        if same is not None:
            text += f"; means {same.verdict} within ±{same.margin:.0%} (TOST p {same.p:.2g})"
        lines.append(f"  {_NAMES[test.metric]:<6}{text}")
    return lines


def _sources(comparison: Comparison) -> list[str]:
    sources = comparison.sources
    if sources is None or not sources.parts:
        return []
    parts = ", ".join(f"{part.name} {part.share:+.1%}" for part in sources.parts)
    what = "difference" if comparison.measured.origin == "predicted" else "error"
    since = " from schedule" if sources.from_schedule else ""
    return [f"  {what} of the mean latency{since} by part: {parts} (by {sources.how})"]


def _of_first(comparison: Comparison) -> list[str]:
    """Distributions and parts, which are of one run: the first, if there are several."""
    lines = [*_tests(comparison), *_sources(comparison)]
    if not lines or comparison.runs == 1:
        return lines
    named = f" ({comparison.name})" if comparison.name else ""
    return [f"  of the first of the {comparison.runs} runs{named}:", *lines]


def undecided(comparisons: Sequence[Comparison], threshold: float, *, allow_noise: bool = False) -> list[str]:
    """The loads that neither pass `threshold` nor are off by more, and why nothing can tell."""
    return [
        f"{load_name(comparison.measured)}: {comparison.doubt}"
        for comparison in comparisons
        if comparison.doubt and comparison.verdict(threshold, allow_noise=allow_noise) == "UNDECIDED"
    ]


def comparison_json(
    comparison: Comparison, threshold: float | None = None, *, allow_noise: bool = False
) -> dict[str, Any]:
    """A comparison, JSON-ready; unknown is null. `threshold` and `allow_noise` as in `format_comparison`."""
    limit = MARGIN if threshold is None else threshold
    worst = comparison.worst_row(allow_noise=allow_noise)
    return {
        "load": load_name(comparison.measured),
        "runs": comparison.runs,
        "first_run": comparison.name or None,
        "verdict": comparison.verdict(limit, allow_noise=allow_noise),
        "threshold": limit,
        "gate": threshold is not None,
        "allow_noise": allow_noise,
        "doubt": comparison.doubt or None,
        "worst": None if worst is None else worst.key,
        "rows": [_row(row) for row in comparison.rows],
        "regimes": {**asdict(comparison.regimes), "capacity_error": comparison.regimes.capacity_error},
        "tests": [asdict(test) for test in comparison.tests],
        "sources": None if comparison.sources is None else asdict(comparison.sources),
        "differs": [asdict(difference) for difference in comparison.differs],
        "notes": [asdict(note) for note in comparison.notes],
    }


def _row(row: MetricRow) -> dict[str, Any]:
    interval = None
    if row.interval is not None:
        interval = {"low": row.interval.low, "high": row.interval.high, "parts": dict(row.interval.parts)}
    return {
        "key": row.key,
        "predicted": row.predicted,
        "measured": row.measured,
        "error": row.error,
        "interval": interval,
        "noise": None if row.noise is None else asdict(row.noise),
        "n": row.n,
        "scored": row.scored,
        "unscored": row.unscored or None,
    }
