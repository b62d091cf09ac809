"""A what-if as people read it: tables, clear differences, explanations."""

from __future__ import annotations

from collections.abc import Sequence

from sim.planning.margin import error_sentences
from sim.planning.mechanism import explain
from sim.planning.stats import Estimate
from sim.planning.text import units_line, wrap
from sim.planning.whatif import METRICS, MODEL_ERROR, Change, Point, Row, WhatIf, changes, steps_of

COLUMNS = (
    ("request_throughput", "req/s", 8, 2),
    ("output_throughput", "out tok/s", 10, 0),
    ("mean_ttft_ms", "TTFT mean", 10, 1),
    ("p99_ttft_ms", "TTFT P99", 10, 1),
    ("mean_tpot_ms", "TPOT mean", 10, 2),
    ("p99_itl_ms", "ITL P99", 9, 1),
    ("p99_e2el_ms", "E2E P99", 10, 0),
    ("num_preemptions", "preempted", 10, 0),
)
LABEL = 22


def render_whatif(answer: WhatIf, *, explained: bool = False) -> str:
    """All of it, at most 100 columns."""
    lines: list[str] = []
    for row in answer.rows:
        lines += [*_row(row, answer, explained=explained), ""]
    lines += _conditions(answer)
    if explained and len(answer.seeds) > 1:
        lines += wrap(
            "Explanations tell the means over these seeds, and factors seed by seed, as the tables do."
        )
    for note in answer.notes:
        lines += wrap(f"{note.kind}: {note.subject}: {note.text}")
    return "\n".join(lines).rstrip()


def _row(row: Row, answer: WhatIf, *, explained: bool) -> list[str]:
    name = "full grid" if row.dimension is None else row.dimension.name
    lines = [name]
    if row.dimension is not None:
        others = [f"{key} at {value}" for key, value in answer.held if key != row.dimension.name]
        if others:
            lines += wrap(f"  locked: {', '.join(others)}")
    width = max(LABEL, *(len(_label(row, p)) + 2 for p in row.points)) if row.dimension is None else LABEL
    lines.append(f"{'':<{width}}" + "".join(f"{title:>{w}}" for _, title, w, _ in COLUMNS))
    lines.append(units_line(COLUMNS, width))
    for point in row.points:
        if point.failure is not None:
            lines += wrap(f"{_label(row, point):<{width}}cannot run: {point.failure}")
            continue
        cells = "".join(_cell(point.estimate(key), w, digits) for key, _, w, digits in COLUMNS)
        lines.append(f"{_label(row, point):<{width}}{cells}")
        if any(_half(point.estimate(key)) for key, *_ in COLUMNS):
            cells = "".join(_margin(point.estimate(key), w, digits) for key, _, w, digits in COLUMNS)
            lines.append(f"{'':<{width}}{cells}")
        lines += _saturation(point)
    for point in row.points:
        for key, value, why in point.variant.derived:
            lines.append(f"  {point.variant.label}: {key} {value} ({why})")
    if row.dimension is not None:
        for before, after in steps_of(row):
            lines += _step(before, after, explained=explained)
    return lines


def _label(row: Row, point: Point) -> str:
    return point.variant.label if row.dimension is None else f"  {point.variant.settings[0][1]}"


def _cell(value: Estimate | None, width: int, digits: int) -> str:
    return f"{'unknown':>{width}}" if value is None else f"{value.mean:>{width},.{digits}f}"


def _half(value: Estimate | None) -> float | None:
    return None if value is None else value.half


def _margin(value: Estimate | None, width: int, digits: int) -> str:
    half = _half(value)
    return f"{'':>{width}}" if half is None else f"{f'±{half:,.{digits}f}':>{width}}"


def _saturation(point: Point) -> list[str]:
    states = [o.regime.get("state") for o in point.outcomes]
    if "saturated" not in states:
        return []
    rates = [r for o in point.outcomes if (r := o.regime.get("sustainable_rate"))]
    able = f"about {min(rates):.3g} requests/s can be sustained" if rates else "the rate cannot be sustained"
    return [f"    saturated: {able}; latencies there measure the length of the test"]


def _step(before: Point, after: Point, *, explained: bool) -> list[str]:
    head = f"  {before.variant.label} -> {_short(after)}: "
    found = changes(before, after)
    clear = [c for c in found if c.clear and not c.small]
    rest = [c for c in found if c not in clear]
    told = ", ".join(_change(c) for c in clear) or "no difference that is larger than its interval"
    lines = wrap(head + told, "    ")
    if rest and clear:
        lines += wrap("    within interval or model error: " + ", ".join(_title(c.key) for c in rest), "    ")
    if explained:
        for sentence in explain(before, after):
            lines += wrap(f"    - {sentence}", "      ")
    return lines


def _short(point: Point) -> str:
    return point.variant.settings[-1][1] if point.variant.settings else "as given"


def _change(change: Change) -> str:
    if change.ratio is None:
        return f"{_title(change.key)} {change.difference.mean:+,.3g}"
    ratio, half = change.ratio.mean, change.ratio.half
    if 0.5 <= ratio <= 2.0:
        text = f"{ratio - 1:+.1%}" + (f" ± {half:.1%}" if half else "")
    else:
        text = f"x{ratio:.2f}" + (f" ± {half:.2f}" if half else "")
    return f"{_title(change.key)} {text}"


def _title(key: str) -> str:
    return next(title for name, title in METRICS if name == key)


def _conditions(answer: WhatIf) -> list[str]:
    """How the figures came about, and what their intervals cover."""
    seeds = answer.seeds
    if answer.random:
        count = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}: no intervals"
        text = f"{count}, the same requests at every point; ± is the 95 % interval over seeds"
        if len(seeds) == 2:
            text += " (two seeds tell little, of the interval too: raise --seeds)"
    else:
        text = "nothing in this load is random: one run says all, and only the model can be wrong"
    lines = wrap(f"{text}. {error_sentences(answer.error, MODEL_ERROR)}")
    if answer.kept_engine:
        lines += wrap(
            "Points of one load setting ran one after the other on one engine, as a benchmark sweep does, so "
            "that later ones find earlier prompts in the prefix cache; --fresh starts each with an empty one."
        )
    return lines


def table_rows(answer: WhatIf) -> list[dict[str, object]]:
    """Every point as a JSON-ready row: settings, figures with half-widths, state."""
    return [_as_dict(point) for row in answer.rows for point in row.points]


def _as_dict(point: Point) -> dict[str, object]:
    keys: Sequence[str] = [key for key, *_ in COLUMNS]
    figures = {
        key: None if (value := point.estimate(key)) is None else {"mean": value.mean, "half": value.half}
        for key in keys
    }
    return {
        "settings": dict(point.variant.settings),
        "derived": {key: value for key, value, _ in point.variant.derived},
        "seeds": len(point.outcomes),
        "failure": point.failure,
        "figures": {} if point.failure else figures,
        "outcomes": [outcome.to_dict() for outcome in point.outcomes],
    }
