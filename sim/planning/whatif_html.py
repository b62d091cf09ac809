"""A what-if as one self-contained page."""

from __future__ import annotations

import math

from sim.planning.margin import error_sentences
from sim.planning.mechanism import explain
from sim.planning.page import Page, Table, footer, render_page, sentence
from sim.planning.plan_report import bench_line, serve_line
from sim.planning.svg import Chart, Mark, Series, draw
from sim.planning.whatif import METRICS, MODEL_ERROR, Point, Row, WhatIf, changes, steps_of
from sim.planning.whatif_text import COLUMNS


def whatif_page(answer: WhatIf, title: str) -> str:
    """A what-if as a page."""
    varied = [row.dimension.name for row in answer.rows if row.dimension is not None]
    asked = "What happens if " + (" or ".join(varied) if varied else "all of these together") + " changes?"
    held = ", ".join(f"{key} {value}" for key, value in answer.held)
    why = tuple(
        (
            f"{before.variant.label} to {after.variant.label}",
            tuple(sentence(s) for s in explain(before, after)),
        )
        for row in answer.rows
        if row.dimension is not None
        for before, after in steps_of(row)
    )
    able = [p for row in answer.rows for p in row.points if p.failure is None]
    best = max(able, key=_throughput, default=None)
    return render_page(
        Page(
            title=f"What if: {title}",
            question=(
                asked,
                f"As it stands: {held}; one setting at a time." if varied else f"As it stands: {held}.",
            ),
            headline=_whatif_headline(answer),
            answer=(_seeds(answer),),
            charts=tuple(draw(c) for row in answer.rows for c in _whatif_charts(row)),
            tables=tuple(_whatif_table(row) for row in answer.rows),
            explanations=why,
            assumptions=(
                *(sentence(f"{n.kind}: {n.subject}: {n.text}") for n in answer.notes),
                "Simulated, not measured; each replica as its engine schedules, step by step.",
            ),
            commands=() if best is None else (serve_line(best.scenario), bench_line(best.scenario)),
            footer=footer(f"seeds {', '.join(map(str, answer.seeds))}"),
        )
    )


def _whatif_headline(answer: WhatIf) -> str:
    told = []
    for row in answer.rows:
        points = [p for p in row.points if p.failure is None and p.estimate("output_throughput") is not None]
        if not points:
            continue
        best = max(points, key=_throughput)
        rate = f"{_throughput(best):,.0f} output tokens/s"
        equal = [p for p in points if p is best or not _clearly_less(p, best)]
        if len(points) > 1 and len(equal) == len(points):
            what = "the grid" if row.dimension is None else row.dimension.name
            told.append(f"throughput does not change over {what}: {rate}")
        else:
            told.append(f"most throughput at {' or '.join(p.variant.label for p in equal)}: {rate}")
        told += _largest_move(row)
    text = "; ".join(told)
    return sentence(text) if text else "No point could run."


def _largest_move(row: Row) -> list[str]:
    """The latency that changes by the largest factor between neighbours, if one clearly changes."""
    titles = dict(METRICS)
    found = [
        (
            abs(math.log(ratio.mean)),
            f"{titles[change.key]} x{ratio.mean:.2g} from {a.variant.label} to {b.variant.label}",
        )
        for a, b in steps_of(row)
        for change in changes(a, b)
        if change.key.endswith("_ms") and change.clear and not change.small
        if (ratio := change.ratio) is not None and ratio.mean > 0.0
    ]
    return [max(found)[1]] if found else []


def _clearly_less(point: Point, best: Point) -> bool:
    return any(c.key == "output_throughput" and c.clear and not c.small for c in changes(point, best))


def _throughput(point: Point) -> float:
    value = point.estimate("output_throughput")
    return 0.0 if value is None else value.mean


def _seeds(answer: WhatIf) -> str:
    told = f"The same requests at every point, {len(answer.seeds)} seeds; ± is the 95 % interval over seeds."
    if not answer.random:
        told = "Nothing in this load is random: one run says all, and only the model can be wrong."
    return f"{told} {error_sentences(answer.error, MODEL_ERROR)}"


def _whatif_charts(row: Row) -> list[Chart]:
    names = tuple(
        p.variant.settings[0][1] if row.dimension is not None else str(i + 1)
        for i, p in enumerate(row.points)
    )
    axis = "grid point" if row.dimension is None else row.dimension.name
    charts = []
    for key, title in METRICS:
        marks = []
        for i, point in enumerate(row.points):
            value = point.estimate(key)
            if point.failure is None and value is not None:
                half = "" if not value.half else f" ± {value.half:,.3g}"
                tip = f"{point.variant.label}\n{title} {value.mean:,.4g}{half}"
                marks.append(Mark(float(i), value.mean, tip, value.low, value.high))
        unit = "ms" if key.endswith("_ms") else "per second"
        charts.append(Chart(title, axis, unit, (Series(title, tuple(marks)),), names=names))
    return charts


def _whatif_table(row: Row) -> Table:
    rows = []
    for point in row.points:
        cells = [point.variant.label]
        for key, _, _, digits in COLUMNS:
            value = point.estimate(key) if point.failure is None else None
            half = "" if value is None or not value.half else f" ± {value.half:,.{digits}f}"
            cells.append("unknown" if value is None else f"{value.mean:,.{digits}f}{half}")
        if point.failure is not None:
            cells = [point.variant.label, f"cannot run: {point.failure}", *[""] * (len(COLUMNS) - 1)]
        rows.append(tuple(cells))
    name = "Full grid" if row.dimension is None else row.dimension.name
    titles = (f"{title} (ms)" if key.endswith("_ms") else title for key, title, _, _ in COLUMNS)
    return Table(name, ("", *titles), tuple(rows))
