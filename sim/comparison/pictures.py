"""Pictures of comparisons: errors, predicted against measured, residuals over load, CDF overlays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.comparison.compare import Comparison, MetricRow
from sim.comparison.identity import load_of
from sim.comparison.loads import load_name
from sim.output.plots import (
    COLOURS,
    METRIC_COLOURS,
    draw_cdfs,
    draw_errors,
    levels_axis,
    new_figure,
    save,
    title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.10
MOST_OVERLAYS = 6
AGAINST = ("mean", "median", "p99")
MARKERS = {"mean": "o", "median": "s", "p99": "^"}


def plot_comparison(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw all panels that the comparisons have data for.

    Raises:
        BadInput: the place cannot be written to.
    """
    overlays = [c for c in comparisons if c.predicted.records is not None and c.measured.records is not None][
        :MOST_OVERLAYS
    ]
    loads = [load_position(c) for c in comparisons]
    over_load = len({load for load in loads if load is not None}) > 1
    longest = max(len(c.rows) for c in comparisons)
    rows = 2 + over_load + len(overlays)
    figure, axes = new_figure(rows, 1, 9.0, 1.5 + 0.22 * longest + 4.0 * (rows - 1))
    panels = iter(np.atleast_1d(axes))
    draw_errors(next(panels), comparisons)
    draw_against(next(panels), comparisons)
    if over_load:
        draw_residuals(next(panels), comparisons)
    for comparison in overlays:
        panel = next(panels)
        assert comparison.predicted.records is not None
        assert comparison.measured.records is not None
        sides = [("predicted", comparison.predicted.records), ("measured", comparison.measured.records)]
        draw_cdfs(panel, sides)
        panel.set_title(f"Latency distributions, {load_name(comparison.measured)}")
    figure.suptitle(title(comparisons[0].predicted), fontsize=10)
    save(figure, path)


def load_position(comparison: Comparison) -> float | None:
    """Where a load stands on an axis: its rate, else its concurrency; None for neither."""
    rate, cap = load_of(comparison.measured.identity)
    if rate is not None and np.isfinite(rate):
        return rate
    return None if cap is None else float(cap)


def draw_against(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Predicted over measured latencies on logarithmic axes, with intervals and a band of ±10 %."""
    points = [
        (row, name, metric)
        for comparison in comparisons
        for metric in METRIC_COLOURS
        for name in AGAINST
        if (row := _row(comparison, f"{name}_{metric}_ms")) is not None and (row.measured or 0.0) > 0
    ]
    values = [v for row, _, _ in points for v in (row.measured, row.predicted) if v is not None and v > 0]
    axes.set(xlabel="measured [ms]", ylabel="predicted [ms]", title="Predicted against measured, band ±10 %")
    if not values:
        axes.text(0.5, 0.5, "no latency on both sides", ha="center", transform=axes.transAxes)
        return
    ends = np.array([min(values) / 1.3, max(values) * 1.3])
    axes.fill_between(ends, ends / (1 + BAND), ends * (1 + BAND), color=COLOURS["client"], alpha=0.2, lw=0)
    axes.plot(ends, ends, color="black", lw=0.8)
    labelled: set[str] = set()
    for row, name, metric in points:
        label = f"{metric.upper()} {name}"
        axes.errorbar(
            row.measured or np.nan,
            row.predicted or np.nan,
            yerr=_bars(row),
            fmt=MARKERS[name],
            ms=5,
            mfc=METRIC_COLOURS[metric] if row.scored else "none",
            color=METRIC_COLOURS[metric],
            elinewidth=1,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.legend(frameon=False, fontsize=7, ncols=2)


def draw_residuals(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Signed error of the means over load, with intervals; a hollow mark does not decide."""
    placed = sorted(
        ((x, c) for c in comparisons if (x := load_position(c)) is not None), key=lambda pair: pair[0]
    )
    for metric, colour in METRIC_COLOURS.items():
        found = [
            (x, row) for x, c in placed if (row := _row(c, f"mean_{metric}_ms")) and row.error is not None
        ]
        if not found:
            continue
        errors = np.array([100 * (row.error or 0.0) for _, row in found])
        xs = [x for x, _ in found]
        axes.plot(xs, errors, "-", color=colour, lw=1, label=f"mean {metric.upper()}")
        for x, error, (_, row) in zip(xs, errors, found, strict=True):
            if row.interval is not None:
                axes.vlines(x, 100 * row.interval.low, 100 * row.interval.high, color=colour, lw=1, alpha=0.5)
            axes.plot(x, error, "o", ms=5, color=colour, mfc=colour if row.scored else "none")
    axes.axhline(0, color="black", lw=0.8)
    axes.axhspan(-5, 5, color=COLOURS["client"], alpha=0.15, lw=0)
    rates = all(load_of(c.measured.identity)[0] not in (None, float("inf")) for _, c in placed)
    axes.set(
        xlabel="offered rate [requests/s]" if rates else "load (requests/s, or concurrency)",
        ylabel="error [%]",
        title="Residuals over load, band ±5 %",
    )
    levels_axis(axes, sorted({x for x, _ in placed}))
    axes.legend(frameon=False, fontsize=8)


def _row(comparison: Comparison, key: str) -> MetricRow | None:
    return next((row for row in comparison.rows if row.key == key), None)


def _bars(row: MetricRow) -> np.ndarray[tuple[int, int], np.dtype[np.float64]] | None:
    """Distances to the interval's ends, as bars of the prediction."""
    if row.interval is None or row.error is None or row.predicted is None or not row.measured:
        return None
    low, high = ((1 + bound) * row.measured for bound in (row.interval.low, row.interval.high))
    return np.array([[max(0.0, row.predicted - low)], [max(0.0, high - row.predicted)]])
