"""Pictures of plans, drawn by matplotlib, which is imported only here and only when it draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.planning.whatif import METRICS, Row, WhatIf
from sim.plots import LINES, new_figure, save

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
