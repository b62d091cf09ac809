"""A plan as one self-contained page: question, answer, pictures, evidence, assumptions, commands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.output.sidebyside import label
from sim.planning.capacity import Capacity
from sim.planning.daily import DayOfReplicas
from sim.planning.hardware import Candidate, OperatingPoint
from sim.planning.page import Page, Table, footer, render_page, sentence
from sim.planning.plan import Plan
from sim.planning.plan_report import assumptions, best_found, billed_words, confirming_commands
from sim.planning.plan_text import (
    answer_words,
    binding_words,
    error_words,
    headroom_words,
    rate_words,
    replicas_words,
    use_words,
)
from sim.planning.prices import Cost
from sim.planning.sizing import unsized_words
from sim.planning.svg import Band, Chart, Mark, Series, draw
from sim.planning.text import milliseconds
from sim.provenance import Note


def plan_page(plan: Plan) -> str:
    """A plan as a page."""
    best = best_found(plan)
    found = plan.found or best
    scenario = plan.source.build() if found is None else found.scenario
    asked = [f"Highest load that keeps {plan.question.slos}."]
    if plan.question.rate is not None:
        asked.append(
            f"Replicas for {plan.question.rate:g} requests/s, peak factor {plan.question.peak_factor:g}."
        )
    if plan.candidates:
        asked.append(f"Compared: {', '.join(c.name for c in plan.candidates)}.")
    headline, answer = _answer(plan, best)
    return render_page(
        Page(
            title=f"Plan: {label(scenario)}",
            question=tuple(asked),
            headline=headline,
            answer=tuple(answer),
            charts=tuple(draw(chart) for chart in _plan_charts(plan)),
            tables=tuple(_plan_tables(plan)),
            details=tuple(_level_tables(plan)),
            assumptions=_assumed(assumptions(plan), found),
            commands=() if best is None else tuple(confirming_commands(best)),
            footer=footer(f"{plan.question.effort.replications} seeds per level from {scenario.seed}"),
        )
    )


def _answer(plan: Plan, best: Capacity | None) -> tuple[str, list[str]]:
    if best is None or best.level is None:
        blocked = plan.found
        if blocked is None:
            return "No candidate keeps the objectives at any load.", []
        told = [f"Blocked by {blocked.binding}: {blocked.cause.text}."]
        for promise in blocked.promises:
            if promise.value is not None and promise.what != "goodput":
                best_value, limit = milliseconds(promise.value * 1e3), milliseconds(promise.limit * 1e3)
                told.append(f"{promise.what}: {best_value} at best, {limit} wanted.")
        return "The objectives cannot be met at any load.", told
    lines: list[str] = []
    headline = answer_words(best)
    if plan.candidates:
        name = next(c.name for c in plan.candidates if c.found is best)
        headline = f"{name}: {headline}"
        cheapest = [p for p in plan.points if p.pareto]
        names = ", ".join(dict.fromkeys(p.name for p in cheapest))
        lines.append(
            f"Not beaten in cost and margin: {names}." if names else "Capacity of the strongest candidate."
        )
    lines += [f"Binding: {binding_words(best)}.", sentence(error_words(best))]
    if best.use is not None:
        lines.append(f"In use there: {use_words(best.use)}.")
    lines.append(sentence(headroom_words(best)))
    if plan.sizing is not None:
        s = plan.sizing
        lines.append(
            f"{s.recommended} replicas hold the peak of {s.peak_rate:.4g} requests/s with one down "
            f"({s.at_peak} without), each trusted with {s.per_replica:.3g}, of which {s.use_at_mean:.0%} is "
            "used on average."
        )
        if s.uncertain:
            worst = "no number" if s.pessimistic is None else str(s.pessimistic)
            lines.append(
                f"WARNING: within the intervals of {s.covers} it is {s.optimistic} to {worst} replicas."
            )
    elif plan.question.rate is not None and plan.found is not None and unsized_words(plan.found):
        lines.append(sentence(unsized_words(plan.found)))
    return headline, lines


def _plan_charts(plan: Plan) -> list[Chart]:
    found = [("capacity", plan.found)] if plan.found is not None else []
    found += [(c.name, c.found) for c in plan.candidates if c.found is not None]
    series = tuple(Series(name, _load_marks(f)) for name, f in found if f is not None and f.readings)
    bands: tuple[Band, ...] = ()
    if len(found) == 1 and found[0][1] is not None:
        bands = _bands(found[0][1])
    unit = "requests in flight" if plan.question.kind == "concurrency" else "requests/s per replica"
    charts = []
    if series:
        charts.append(
            Chart("Load", unit, "share of the worst objective", series, bands, 1.0, "limit", y_max=2.0)
        )
    if plan.points:
        charts.append(_pareto(plan.points, plan.question.prices.currency if plan.question.prices else ""))
    return charts


def _load_marks(found: Capacity) -> tuple[Mark, ...]:
    return tuple(
        Mark(load, used, f"{load:.3g}: {used:.0%} of the worst objective used")
        for load, used, _ in found.readings
        if math.isfinite(used)
    )


def _bands(found: Capacity) -> tuple[Band, ...]:
    if found.level is None:
        return ()
    bands = [Band(found.level.value, found.level.value, answer_words(found))]
    if found.low is not None and found.high is not None:
        bands.append(Band(found.low, found.high, "95 % over seeds"))
    if found.certain is not None:
        bands.append(Band(*found.certain, "with the model's error", faint=True))
    return tuple(bands)


def _pareto(points: Sequence[OperatingPoint], currency: str) -> Chart:
    by_hour = any(p.replicas is not None for p in points)
    series = []
    for name in dict.fromkeys(p.name for p in points):
        marks = tuple(
            Mark(
                p.per_hour if by_hour else p.per_1m_output,
                p.margin,
                f"{name}{f', {p.replicas} replicas' if p.replicas else ''}\n{p.load:.3g} requests/s each\n"
                f"{p.per_hour:,.2f} {currency}/hour, {p.per_1m_output:,.3f} per million output tokens\n"
                f"margin {p.margin:.0%}{', not beaten' if p.pareto else ''}",
                strong=p.pareto,
            )
            for p in points
            if p.name == name
        )
        series.append(Series(name, marks, line=False))
    unit = "hour" if by_hour else "million output tokens"
    return Chart(
        "Cost against margin", f"{currency} per {unit}", "margin to the worst objective", tuple(series)
    )


def _plan_tables(plan: Plan) -> list[Table]:
    tables = []
    if plan.found is not None:
        rows = []
        for p in plan.found.promises:
            share = p.what == "goodput"
            value = (
                "unknown" if p.value is None else f"{p.value:.2%}" if share else milliseconds(p.value * 1e3)
            )
            limit = f"{p.limit:.4g}" if share else milliseconds(p.limit * 1e3)
            rows.append((p.what, value, limit, "" if p.used is None else f"{p.used:.0%}"))
        where = str(plan.found.kept) if plan.found.level is not None else "one request at a time"
        head = ("objective", "value", "limit", "used")
        tables.append(Table(f"Objectives at {where}", head, tuple(rows)))
    if plan.candidates:
        tables.append(_candidate_table(plan))
    if plan.day is not None:
        tables.append(_day_table(plan.day))
    if plan.bill is not None:
        tables.append(_bill_table(plan.bill, plan.billed))
    if plan.points and plan.question.prices is not None:
        tables.append(_points_table(plan.points, plan.question.prices.currency))
    return tables


def _level_tables(plan: Plan) -> list[Table]:
    tables = []
    for name, found in [("", plan.found), *((c.name, c.found) for c in plan.candidates)]:
        if found is not None and found.readings:
            readings = tuple(
                (f"{load:.3g}", f"{used:.1%}", str(seeds)) for load, used, seeds in found.readings
            )
            title = f"Simulated levels of load {name}".strip()
            tables.append(Table(title, ("load", "worst objective used", "seeds"), readings))
    return tables


def _candidate_table(plan: Plan) -> Table:
    rows, sized = [], plan.question.rate is not None
    for c in plan.candidates:
        if c.found is None or c.found.level is None:
            reason = c.failure or (c.found.cause.text if c.found else "")
            rows.append((c.name, str(c.gpus_per_replica), "none", "", "", reason))
            continue
        interval = (
            "" if c.found.low is None or c.found.high is None else f"{c.found.low:.3g} to {c.found.high:.3g}"
        )
        replicas = replicas_words(c.sizing, c.found, sized)
        value = f"{c.found.level.value:.3g}"
        rows.append((c.name, str(c.gpus_per_replica), value, interval, replicas, c.found.binding))
    head = ("replica", "GPUs", "requests/s", "95 %", "replicas (peak, one down)", "binding")
    return Table("Candidates", head, tuple(rows))


def _day_table(day: DayOfReplicas) -> Table:
    rows = tuple((str(h), rate_words(day.rates[h]), f"{n:,}") for h, n in enumerate(day.by_hour))
    title = (
        f"Replicas by the hour, one of them to spare: {day.replica_hours} replica hours a day, "
        f"{day.constant_hours} with {day.constant} all day"
    )
    return Table(title, ("hour", "requests/s", "replicas"), rows)


def _bill_table(bill: Cost, billed: Candidate | None) -> Table:
    named = (
        ("per hour", bill.per_hour),
        ("per million output tokens (whole bill on output)", bill.per_1m_output),
        ("per million input tokens (whole bill on input)", bill.per_1m_input),
        ("per million input and output tokens together", bill.per_1m_total),
        ("per thousand requests", bill.per_1k_requests),
    )
    rows = tuple((name, "unknown" if v is None else f"{v:,.4g} {bill.currency}") for name, v in named)
    of = "" if billed is None else f" of {billed_words(billed, among=1)}"
    title = f"Cost{of} at {bill.utilisation:.0%} of the capacity under the objectives"
    return Table(title, ("", "cost"), rows)


def _points_table(points: Sequence[OperatingPoint], currency: str) -> Table:
    rows = tuple(
        (
            p.name + (" *" if p.pareto else ""),
            "" if p.replicas is None else str(p.replicas),
            f"{p.load:.3g}",
            f"{p.margin:.0%}{'' if p.sure else ' ?'}",
            f"{p.per_hour:,.2f}",
            f"{p.per_1m_output:,.3f}",
        )
        for p in points
    )
    head = (
        "way to run",
        "replicas (peak, none down)",
        "requests/s each",
        "margin",
        f"{currency}/hour",
        f"{currency}/1M output",
    )
    title = "Ways to run; * is not beaten in both cost and margin"
    if not all(p.sure for p in points):
        title += "; ? may miss the objectives within the intervals"
    return Table(title, head, rows)


def _assumed(notes: Sequence[Note], found: Capacity | None) -> tuple[str, ...]:
    both = (*notes, *(found.notes if found else ()))
    lines = [sentence(f"{n.kind}: {n.subject}: {n.text}") for n in both]
    if found is not None:
        lines.append(sentence(f"step times: {found.error.source}"))
    lines.append("Replicas share the load evenly; each is simulated alone.")
    return tuple(dict.fromkeys(lines))
