"""Pictures of one measured run: what the client saw over time, beside what the server said of itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.output.plots import METRIC_COLOURS, draw_timeline, new_figure, result_cdfs, save, title
from sim.results import BenchResult, RequestRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_run(result: BenchResult, path: Path) -> None:
    """Draw TTFT and ITL over time, throughput, the server's series, and the latency distributions.

    Draws nothing of a result without requests.

    Raises:
        BadInput: the place cannot be written to.
    """
    if result.records is None:
        return
    figure, axes = new_figure(4, 1, 9.0, 13.0)
    _latencies_over_time(axes[0], result.records)
    _throughput(axes[1], result.records)
    draw_timeline(axes[2], result)
    result_cdfs(axes[3], result)
    figure.suptitle(title(result), fontsize=10)
    save(figure, path)


def token_times(records: RequestRecords) -> np.ndarray:
    """When each token of every request came, in no particular order [s since the run's start].

    Between the first token and the last one, tokens stand where the request's inter-token latencies put them.
    """
    times = []
    for row in np.flatnonzero(~np.isnan(records.first_token)):
        gaps = records.itls[records.itl_offsets[row] : records.itl_offsets[row + 1]]
        times.append(records.first_token[row] + np.concatenate([[0.0], np.cumsum(gaps)]))
    return np.concatenate(times) if times else np.empty(0)


def _latencies_over_time(axes: Axes, records: RequestRecords) -> None:
    axes.plot(
        records.sent,
        (records.first_token - records.sent) * 1e3,
        ".",
        color=METRIC_COLOURS["ttft"],
        label="TTFT",
    )
    middles, medians = _itl_medians(records)
    if len(middles):
        axes.plot(middles, medians * 1e3, "-", color=METRIC_COLOURS["itl"], label="ITL, median per slice")
    axes.set(xlabel="time [s]", ylabel="ms", yscale="log", title="TTFT (by send time) and ITL over time")
    axes.legend(frameon=False, fontsize=8)


def _itl_medians(records: RequestRecords, slices: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Median ITL [s] in slices of the run, at the slices' middles [s]."""
    starts = np.repeat(records.first_token, np.diff(records.itl_offsets))
    sums = np.cumsum(records.itls)
    before = np.concatenate([[0.0], sums])[records.itl_offsets[:-1]]
    at = starts + sums - np.repeat(before, np.diff(records.itl_offsets))
    known = ~np.isnan(at)
    if not known.any():
        return np.empty(0), np.empty(0)
    edges = np.linspace(at[known].min(), at[known].max(), slices + 1)
    which = np.clip(np.digitize(at[known], edges) - 1, 0, slices - 1)
    found = [(index, np.median(records.itls[known][which == index])) for index in np.unique(which)]
    # Tokens that came in one message have no time between them; a log scale has no place for that.
    found = [(index, median) for index, median in found if median > 0]
    middles = (edges[:-1] + edges[1:]) / 2
    return np.array([middles[index] for index, _ in found]), np.array([median for _, median in found])


def _throughput(axes: Axes, records: RequestRecords) -> None:
    times = token_times(records)
    axes.set(xlabel="time [s]", ylabel="output tokens/s", title="Output throughput")
    if not len(times):
        return
    width = max(times.max() / 60, 1e-3)
    counts, edges = np.histogram(
        times, bins=max(1, int(np.ceil(times.max() / width))), range=(0, times.max())
    )
    rates = counts / np.diff(edges)
    axes.step(edges[:-1], rates, where="post", color=METRIC_COLOURS["tpot"])
    axes.set_ylim(bottom=0)
