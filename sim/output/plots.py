"""Pictures of results. The only module of `sim` that imports matplotlib, and only when it draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.comparison.compare import Comparison, samples
from sim.comparison.compare import figure as figure_of
from sim.comparison.identity import load_of
from sim.errors import BadInput
from sim.output.report import SEES_SCHEDULE
from sim.output.sidebyside import Curve
from sim.results import BenchResult, Floats, RequestRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour per meaning, the same in every picture (Okabe-Ito, readable with colour blindness).
COLOURS = {
    "client": "#999999",
    "queue": "#D55E00",
    "prefill": "#0072B2",
    "stream": "#56B4E9",
    "running": "#009E73",
    "waiting": "#D55E00",
    "kv": "#CC79A7",
    "predicted": "#0072B2",
    "measured": "#E69F00",
}
METRIC_COLOURS = {"ttft": "#0072B2", "tpot": "#009E73", "itl": "#CC79A7", "e2el": "#E69F00"}
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """A figure and its axes on a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def check_place(path: Path) -> None:
    """Refuse a place that no picture can be written to.

    Raises:
        BadInput: the suffix is not a picture's, or the folder does not exist.
    """
    if path.suffix not in SUFFIXES:
        raise BadInput("--plot", str(path), f"use one of the suffixes {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise BadInput("--plot", str(path), "its folder does not exist")


def save(figure: Figure, path: Path) -> None:
    """Write a picture under a temporary name, then rename it.

    Raises:
        BadInput: the place cannot be written to; see `check_place`.
    """
    from matplotlib import pyplot

    check_place(path)
    temporary = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BadInput("--plot", str(path), f"cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)


def ttft_parts(records: RequestRecords) -> dict[str, Floats]:
    """TTFT from schedule in its parts [s]: client wait, queue, prefill, the rest; completed requests only."""
    done = np.array([status == "ok" for status in records.status], dtype=bool)
    queue, prefill = np.nan_to_num(records.queue[done]), np.nan_to_num(records.prefill[done])
    ttft = (records.first_token - records.sent)[done]
    return {
        "client": (records.sent - records.scheduled)[done],
        "queue": queue,
        "prefill": prefill,
        "stream": np.maximum(ttft - queue - prefill, 0.0),
    }


def plot_result(result: BenchResult, path: Path) -> None:
    """Draw one run: TTFT composition, running / waiting / KV use over time, latency distributions."""
    if result.records is None:
        raise BadInput("--plot", str(path), "this result has no per-request records to draw")
    figure, axes = new_figure(3, 1, 9.0, 10.0)
    draw_ttft_parts(axes[0], result)
    draw_timeline(axes[1], result)
    result_cdfs(axes[2], result)
    figure.suptitle(title(result), fontsize=10)
    save(figure, path)


def title(result: BenchResult) -> str:
    """What was run, on a second line under which load, and what is wrong with it."""
    identity = result.identity
    parts = [identity.get(key) for key in ("engine", "engine_version", "model")]
    gpus = identity.get("gpu_count")
    many = f"{gpus} x " if isinstance(gpus, int) and gpus > 1 else ""
    parts.append(f"{many}{identity['gpu']}" if identity.get("gpu") else None)
    first = f"{result.origin}: " + " · ".join(str(part) for part in parts if part)
    second = " · ".join((*_load(identity), *_caution(result)))
    return f"{first}\n{second}" if second else first


def _load(identity: Mapping[str, Any]) -> Iterator[str]:
    rate, cap = load_of(identity)
    if rate is not None and np.isfinite(rate):
        yield f"{rate:g} requests/s"
    elif rate is not None and cap is None:
        yield "all requests at once"
    if cap is not None:
        yield f"concurrency {cap}"


def _caution(result: BenchResult) -> Iterator[str]:
    if result.verdict.status != "VALID":
        yield result.verdict.status
    if is_saturated(result):
        yield "saturated"


def is_saturated(result: BenchResult) -> bool:
    """Whether more was offered than the server completes, so that TTFT and E2E measure the test's length."""
    regime = result.extra.get("regime")
    return isinstance(regime, Mapping) and regime.get("state") == "saturated"


def result_cdfs(axes: Axes, result: BenchResult) -> None:
    """One run's distributions; above capacity TTFT and E2E are marked as the test's own."""
    if result.records is None:
        return
    draw_cdfs(axes, [(result.origin, result.records)], grows=is_saturated(result))


def draw_ttft_parts(axes: Axes, result: BenchResult) -> None:
    """Stacked TTFT of each request in the order of sending (averaged in at most 200 groups).

    In a closed loop the wait for a free place is part of the plan, so it is left out.
    """
    if result.records is None:
        return
    parts = ttft_parts(result.records)
    if result.extra.get("regime", {}).get("state") in ("closed-loop", "capped"):
        del parts["client"]
    count = len(parts["queue"])
    groups = np.array_split(np.arange(count), min(count, 200)) if count else []
    edges = np.array([0.5, *(group[-1] + 1.5 for group in groups)])
    labels = {
        "client": "client wait (before sending)",
        "queue": "queue",
        "prefill": "prefill",
        "stream": "first token: front end, stream",
    }
    bottom = np.zeros(len(groups))
    for name, values in parts.items():
        height = np.array([values[group].mean() for group in groups])
        if height.any():
            axes.stairs(
                bottom + height, edges, baseline=bottom, fill=True, color=COLOURS[name], label=labels[name]
            )
            bottom = bottom + height
    axes.set(xlabel="request, in order of sending", ylabel="TTFT [s]", title="What TTFT is made of")
    axes.legend(frameon=False, fontsize=8)


def draw_timeline(axes: Axes, result: BenchResult) -> None:
    """Running and waiting requests, and KV use on a second axis."""
    axes.set(xlabel="time [s]", ylabel="requests", title="Running, waiting, KV use")
    series = result.series
    if series is None:
        axes.text(0.5, 0.5, "no server-side series", ha="center", transform=axes.transAxes)
        return
    axes.step(series.time, series.running, where="post", color=COLOURS["running"], label="running")
    axes.step(series.time, series.waiting, where="post", color=COLOURS["waiting"], label="waiting")
    right = axes.twinx()
    right.plot(series.time, series.kv_usage * 100, color=COLOURS["kv"], lw=1, label="KV use")
    right.set(ylabel="KV pool in use [%]", ylim=(0, 105))
    right.spines["right"].set_visible(True)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)


def draw_cdfs(
    axes: Axes, runs: Sequence[tuple[str, RequestRecords]], log: bool = True, *, grows: bool = False
) -> None:
    """Cumulative distributions of TTFT, TPOT, ITL and E2E; one line style per run.

    Args:
        grows: the load was above capacity: say at TTFT and E2E that they grow with the test.
    """
    for (name, records), style in zip(runs, ("-", "--", ":", "-."), strict=False):
        for metric, colour in METRIC_COLOURS.items():
            values = np.sort(samples(records, metric)) * 1e3
            values = values[values > 0] if log else values
            if not len(values):
                continue
            keep = np.unique(np.linspace(0, len(values) - 1, min(len(values), 2000)).astype(int))
            label = f"{metric.upper()} {name}" if len(runs) > 1 else metric.upper()
            label += ", above capacity: grows with the test" if grows and metric in SEES_SCHEDULE else ""
            axes.plot(values[keep], (keep + 1) / len(values), style, color=colour, label=label)
    if log:
        axes.set_xscale("log")
    axes.set(xlabel="ms", ylabel="share of samples", title="Latency distributions", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)


def run_name(result: BenchResult, index: int) -> str:
    """A legend entry: the run's concurrency where known, else its place."""
    level = result.identity.get("max_concurrency")
    return f"{result.tool}, concurrency {level}" if level else f"{result.tool} #{index + 1}"


def plot_curves(curves: Sequence[Curve], path: Path) -> None:
    """Draw P99 TTFT and output throughput against concurrency, one line per scenario, knees marked.

    Loads without a cap on concurrency have no such axis: they become one bar per scenario.
    """
    figure, axes = new_figure(2, 1, 8.0, 8.0)
    panels = (("p99_ttft_ms", "TTFT P99 [ms]", "log"), ("output_throughput", "output tokens/s", "linear"))
    figure.suptitle("predicted", fontsize=10)
    capped = any(point.concurrency for curve in curves for point in curve.points)
    for axis, (key, title_, scale) in zip(axes, panels, strict=True):
        if not capped:
            draw_bars(axis, curves, key, title_)
            continue
        for curve, colour in zip(curves, LINES * len(curves), strict=False):
            points = [(p.concurrency or 0, figure_of(p.result, key)) for p in curve.points]
            known = [(x, y) for x, y in points if y is not None]
            axis.plot([x for x, _ in known], [y for _, y in known], "o-", color=colour, label=curve.name)
            knee = curve.knee
            if knee is not None and (height := figure_of(knee.result, key)) is not None:
                axis.plot([knee.concurrency], [height], "o", ms=13, mfc="none", mec=colour, mew=2)
                axis.annotate(
                    "knee",
                    (knee.concurrency or 0, height),
                    (10, -12),
                    textcoords="offset points",
                    color=colour,
                )
        axis.set(xlabel="concurrency", ylabel=title_, yscale=scale, xscale="log")
        levels_axis(axis, sorted({p.concurrency for c in curves for p in c.points if p.concurrency}))
        axis.legend(frameon=False, fontsize=8)
    axes[1].set_ylim(bottom=0)
    save(figure, path)


def draw_bars(axes: Axes, curves: Sequence[Curve], key: str, name: str) -> None:
    """One bar per scenario for a figure of its only point, its value written on it."""
    for place, (curve, colour) in enumerate(zip(curves, LINES * len(curves), strict=False)):
        value = figure_of(curve.points[0].result, key)
        if value is not None:
            axes.bar_label(axes.bar([place], [value], 0.5, color=colour), fmt="{:,.0f}")
    axes.set(ylabel=name, xlim=(-0.6, len(curves) - 0.4))
    axes.set_xticks(range(len(curves)), [curve.name.replace(" · ", "\n") for curve in curves])


def levels_axis(axes: Axes, levels: Sequence[float]) -> None:
    """Ticks at the given loads only, on a logarithmic axis."""
    axes.set_xscale("log")
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.set_xticks([], minor=True)


def plot_demo(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the reference: errors at each load, then the busiest run's TTFT, timeline and distributions."""
    figure, axes = new_figure(2, 2, 13.0, 9.0)
    draw_errors(axes[0][0], comparisons)
    busiest = comparisons[-1].predicted
    draw_ttft_parts(axes[0][1], busiest)
    if busiest.records is not None:
        result_cdfs(axes[1][1], busiest)
        draw_measured_marks(axes[1][1], comparisons[-1].measured)
    draw_timeline(axes[1][0], busiest)
    figure.suptitle(title(busiest), fontsize=10)
    save(figure, path)


def draw_measured_marks(axes: Axes, measured: BenchResult) -> None:
    """Put reported percentiles as crosses on top of predicted distributions."""
    labelled = False
    for metric, colour in METRIC_COLOURS.items():
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
            value = measured.aggregates.get(f"{name}_{metric}_ms")
            if value is not None:
                axes.plot(
                    value, share, "x", color=colour, ms=8, mew=2, label=None if labelled else "measured"
                )
                labelled = True
    axes.legend(frameon=False, fontsize=8)


def draw_errors(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Signed relative error of every figure, one marker per measured run."""
    keys = list(dict.fromkeys(row.key for c in comparisons for row in c.rows if row.error is not None))
    for index, comparison in enumerate(comparisons):
        rows = [row for row in comparison.rows if row.error is not None]
        errors = [100 * (row.error or 0.0) for row in rows]
        places = [keys.index(row.key) + 0.15 * (index - (len(comparisons) - 1) / 2) for row in rows]
        axes.hlines(places, 0, errors, color=COLOURS["client"], lw=1)
        colour = f"C{index % 10}"
        axes.plot(errors, places, "o", ms=5, color=colour, label=run_name(comparison.measured, index))
        for row, place in zip(rows, places, strict=True):
            if row.interval is not None:
                bounds = (100 * row.interval.low, 100 * row.interval.high)
                axes.hlines(place, *bounds, color=colour, lw=3, alpha=0.25)
        labels = zip(errors, places, strict=True) if len(comparisons) <= 2 else ()
        for error, place in labels:
            side = 6 if error >= 0 else -6
            axes.annotate(
                f"{error:+.1f} %",
                (error, place),
                (side, 0),
                textcoords="offset points",
                va="center",
                ha="left" if side > 0 else "right",
                fontsize=7,
            )
    axes.axvline(0, color="black", lw=0.8)
    axes.axvspan(-5, 5, color=COLOURS["client"], alpha=0.15, lw=0)
    axes.set_yticks(range(len(keys)), keys)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(xlabel="predicted against measured [%], band ±5 %", title="Error of each figure")
    if len(comparisons) > 1:
        axes.legend(frameon=False, fontsize=8)
