"""Pictures of plans, drawn by matplotlib, which is imported only here and only when it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.output.plots import LINES, new_figure, save
from sim.planning.capacity import Capacity
from sim.planning.hardware import OperatingPoint
from sim.planning.plan import Plan
from sim.planning.whatif import METRICS, Row, WhatIf

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_whatif(answer: WhatIf, path: Path) -> None:
    """One small picture per metric and varied setting, with intervals, written to `path`."""
    save(draw_whatif(answer), path)


def draw_whatif(answer: WhatIf) -> Figure:
    """The picture of a what-if: a row of pictures per varied setting, one per metric."""
    rows = len(answer.rows)
    figure, axes = new_figure(rows, len(METRICS), 2.1 * len(METRICS), 2.3 * rows + 0.4)
    grid = axes.reshape(rows, len(METRICS))
    for line, row in zip(grid, answer.rows, strict=True):
        for place, (key, title) in zip(line, METRICS, strict=True):
            _draw(place, row, key, title)
    return figure


def _draw(axes: Any, row: Row, key: str, title: str) -> None:
    labels, places, means, halves = [], [], [], []
    for i, point in enumerate(row.points):
        labels.append(point.variant.settings[0][1] if row.dimension is not None else str(i + 1))
        value = point.estimate(key)
        if point.failure is None and value is not None:
            places.append(i)
            means.append(value.mean)
            halves.append(value.half or 0.0)
    axes.errorbar(places, means, yerr=halves, marker="o", ms=4, lw=1.2, capsize=2, color=LINES[0])
    axes.set_xticks(range(len(labels)), labels, rotation=30 if max(map(len, labels)) > 4 else 0, fontsize=7)
    axes.set_xlim(-0.4, len(labels) - 0.6)
    if means:
        axes.set_ylim(0, max(m + h for m, h in zip(means, halves, strict=True)) * 1.12 or 1.0)
    axes.set_title(title + (" [ms]" if key.endswith("_ms") else ""), fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("full grid" if row.dimension is None else row.dimension.name, fontsize=8)


def plot_plan(plan: Plan, path: Path) -> None:
    """The picture of a plan, written to `path`."""
    save(draw_plan(plan), path)


def draw_plan(plan: Plan) -> Figure:
    """Load against objectives for each candidate, and cost against margin where there are prices."""
    found = [("capacity", plan.found)] if plan.found is not None else []
    found += [(c.name, c.found) for c in plan.candidates if c.found is not None]
    priced = bool(plan.points)
    figure, axes = new_figure(1, 2 if priced else 1, 9.0 if priced else 5.5, 3.6)
    first = axes[0] if priced else axes
    for colour, (name, capacity) in zip(cycle(LINES), found, strict=False):
        if capacity is not None:
            draw_load(first, capacity, name, colour)
    first.axhline(1.0, color="black", lw=0.8)
    first.set_ylim(0, 2)
    first.set(xlabel=_load_axis(plan), ylabel="share of the worst objective used", title="Load")
    if first.get_legend_handles_labels()[0]:
        first.legend(frameon=False, fontsize=8)
    if priced:
        draw_pareto(axes[1], plan.points, plan.question.prices.currency if plan.question.prices else "")
    return figure


def draw_load(axes: Any, capacity: Capacity, name: str, colour: str) -> None:
    """One curve of use against load, the answer's interval shaded."""
    points = [(load, used) for load, used, _ in capacity.readings if math.isfinite(used)]
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, color=colour, label=name)
    ends = capacity.certain
    if ends is not None and capacity.level is not None:
        axes.axvspan(*ends, color=colour, alpha=0.08, lw=0)
        if capacity.low is not None and capacity.high is not None:
            axes.axvspan(capacity.low, capacity.high, color=colour, alpha=0.2, lw=0)
        axes.axvline(capacity.level.value, color=colour, lw=1.0, ls="--")


def draw_pareto(axes: Any, points: Sequence[OperatingPoint], currency: str) -> None:
    """Cost against margin, a colour per kind of replica; points that no other beats are joined."""
    by_hour = any(p.replicas is not None for p in points)
    names = list(dict.fromkeys(p.name for p in points))
    for colour, name in zip(cycle(LINES), names, strict=False):
        own = [p for p in points if p.name == name]
        axes.plot(
            [_price(p, by_hour) for p in own], [p.margin for p in own], "o", ms=4, color=colour, label=name
        )
    best = sorted((p for p in points if p.pareto), key=lambda p: _price(p, by_hour))
    axes.plot([_price(p, by_hour) for p in best], [p.margin for p in best], color="#999999", lw=1.0, zorder=0)
    unit = "hour" if by_hour else "million output tokens"
    axes.set(
        xlabel=f"{currency} per {unit}", ylabel="margin to the worst objective", title="Cost against margin"
    )
    axes.axhline(0.0, color="black", lw=0.8)
    axes.legend(frameon=False, fontsize=8)


def _price(point: OperatingPoint, by_hour: bool) -> float:
    return point.per_hour if by_hour else point.per_1m_output


def _load_axis(plan: Plan) -> str:
    return "requests in flight" if plan.question.kind == "concurrency" else "requests/s per replica"
