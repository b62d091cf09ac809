"""What a validation yields: figures predicted and measured, with bounds that were set beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sim.figures.intervals import Interval

COVERAGE = (0.80, 0.97)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one held-out run.

    Attributes:
        show: which validation it belongs to.
        case: the run, and what the fit had seen.
        figure: its name, with its unit.
        bound: largest absolute relative error allowed, or None where the error is only stated.
        held_out: whether the row counts for coverage: the fit has not seen this run, and it is no second look
            at one that counts already.
    """

    show: str
    case: str
    figure: str
    measured: float
    predicted: Interval
    bound: float | None
    held_out: bool = True

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted.centre / self.measured - 1.0

    @property
    def missed(self) -> bool:
        """Whether the bound is exceeded."""
        return self.bound is not None and not abs(self.error) <= self.bound

    @property
    def covered(self) -> bool:
        """Whether the measurement lies within the 90 % interval."""
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is right or wrong without a figure: a verdict, say."""

    show: str
    case: str
    text: str
    held: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that one data set says; `notes` tell how it was read and what was assumed."""

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()


def rows_for(
    show: str,
    case: str,
    measured: Mapping[str, float | int | None],
    predicted: Mapping[str, Interval],
    bounds: Mapping[str, float | None],
    *,
    held_out: bool = True,
) -> list[Row]:
    """Rows of the figures that `bounds` names and both sides know."""
    found = []
    for key, bound in bounds.items():
        theirs, ours = measured.get(key), predicted.get(key)
        if theirs and ours is not None:
            found.append(Row(show, case, key, float(theirs), ours, bound, held_out))
    return found


def coverage(rows: Iterable[Row]) -> tuple[int, int]:
    """How many held-out figures lie within their intervals, of how many."""
    counted = [row for row in rows if row.held_out]
    return sum(row.covered for row in counted), len(counted)


def render(outcomes: Sequence[Outcome], *, pooled: bool = True) -> str:
    """The table, the claims, the notes, and the coverage, as text without a line end.

    `pooled`: all data sets are there; the coverage of some alone is told and not judged.
    """
    head = f"{'show':<5} {'case':<52} {'figure':<18} {'measured':>10} {'predicted':>10} "
    head += f"{'90 % interval':>23} {'error':>7} {'bound':>6}"
    lines = [head, "-" * len(head)]
    for outcome in outcomes:
        for row in outcome.rows:
            interval = f"{row.predicted.low:,.2f} .. {row.predicted.high:,.2f}"
            if not math.isfinite(row.predicted.high):
                interval = "unknown"
            bound = "" if row.bound is None else f"{100 * row.bound:.0f} %"
            mark = "  MISSED" if row.missed else "" if row.covered else "  outside"
            lines.append(
                f"{row.show:<5} {row.case:<52} {row.figure:<18} {row.measured:>10,.2f} "
                f"{row.predicted.centre:>10,.2f} {interval:>23} {100 * row.error:>+6.1f}% {bound:>6}{mark}"
            )
        lines += [
            f"{claim.show:<5} {claim.case:<52} {claim.text}{'' if claim.held else '  MISSED'}"
            for claim in outcome.claims
        ]
    for outcome in outcomes:
        lines += [f"note: {note}" for note in outcome.notes]
    rows = [row for outcome in outcomes for row in outcome.rows]
    inside, count = coverage(rows)
    if count:
        low, high = (100 * share for share in COVERAGE)
        verdict = "" if covers(rows) else "  MISSED"
        if not pooled:
            verdict = "; of all data sets together, so it is not judged here"
        lines.append(
            f"90 % intervals: {inside} of {count} held-out figures inside ({100 * inside / count:.0f} %, "
            f"to be {low:.0f} to {high:.0f} %){verdict}"
        )
    missed = sum(row.missed for row in rows) + sum(not c.held for o in outcomes for c in o.claims)
    bounded = sum(row.bound is not None for row in rows) + sum(len(o.claims) for o in outcomes)
    lines.append(f"bounds: {bounded - missed} of {bounded} kept")
    return "\n".join(lines)


def covers(rows: Sequence[Row]) -> bool:
    """Whether the pooled coverage lies where it should, to the next whole figure."""
    inside, count = coverage(rows)
    low, high = COVERAGE
    return not count or math.floor(low * count) <= inside <= math.ceil(high * count)


def passed(outcomes: Sequence[Outcome], *, pooled: bool = True) -> bool:
    """Whether every bound, every claim and, of all data sets together, the coverage hold."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    claims = [claim for outcome in outcomes for claim in outcome.claims]
    if any(row.missed for row in rows) or not all(claim.held for claim in claims):
        return False
    return not pooled or covers(rows)
