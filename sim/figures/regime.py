"""Stable or saturated: whether the latencies of a run mean anything, and what rate could be sustained.

Above its capacity an open-loop load has no steady state: the backlog grows for as long as the test lasts, and
a mean TTFT measures the test, not the server. The signs: fewer requests served than offered, a backlog at the
end about twice its mean, waits that rise with send time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.provenance import Note
from sim.results import RequestRecords, ServerSeries
from sim.workload.arrivals import arrival_stats
from sim.workload.spec import WorkloadSpec

Floats = NDArray[np.float64]
State = Literal["stable", "saturated", "capped", "closed-loop", "unknown"]

MIN_REQUESTS = 20
BLOCKS = 10
GROWTH = 0.02  # backlog growth as a share of the offered rate
TREND = 0.6  # Kendall's tau of block means of the wait over send time; p < 0.01 for ten blocks
TURNED_OVER = 0.5  # of the requests, ended while a rate is measured: else a batch is still filling
SIGMAS = 2.0  # backlog at the last send, in standard deviations of a balanced queue's random walk


@dataclass(frozen=True, slots=True)
class Regime:
    """The verdict with its evidence; None is unknown.

    Attributes:
        state: "closed-loop": the client waits for answers (or sent all at once), so load cannot outrun the
            server and queueing is the client's choice. "capped": the schedule outruns the server, but
            `max_concurrency` holds requests back in the client, so what is counted from the sending on holds
            for this concurrency. "unknown": too few requests, or too short a time, to say.
        offered_rate: requests/s of the schedule.
        served_rate: requests/s that got their first token while requests were still being sent.
        sustainable_rate: requests/s that the server completes while it has a backlog; None if it never had.
        rho: offered over sustainable rate; None if stable, as the capacity does not show.
        backlog_growth: requests/s that the queue before the first token grew by.
        backlog_at_last_send: requests without a first token when the last one was sent.
        backlog_end_over_mean: about 2 for steady growth, about 1 for a steady queue.
        wait_trend: Kendall's tau of TTFT from schedule over send time, by blocks; 1 is a steady rise.
        notes: the same for people.
    """

    state: State
    offered_rate: float | None = None
    served_rate: float | None = None
    sustainable_rate: float | None = None
    rho: float | None = None
    backlog_growth: float | None = None
    backlog_at_last_send: int | None = None
    backlog_end_over_mean: float | None = None
    wait_trend: float | None = None
    notes: tuple[Note, ...] = ()


def regime(records: RequestRecords, series: ServerSeries | None, spec: WorkloadSpec | None) -> Regime:
    """Judge a run by its records: the same rule for simulator and bench.

    Failed requests count as offered, not as served. `series` adds the server's own queue at the end.
    """
    ready = ~np.isnan(records.first_token)
    scheduled = records.scheduled[~np.isnan(records.scheduled)]
    if len(scheduled) < 2 or scheduled.max() <= scheduled.min() or (spec and spec.closed_loop):
        return _closed_loop(records, spec)
    offered = arrival_stats(np.sort(scheduled))
    if len(scheduled) < MIN_REQUESTS or offered.rate is None or int(ready.sum()) < MIN_REQUESTS:
        note = Note(
            "warning", "steadiness", f"{len(scheduled)} requests are too few to tell a trend from chance"
        )
        return Regime("unknown", offered.rate, notes=(note,))
    start, end = float(scheduled.min()), float(scheduled.max())
    arrivals, firsts = np.sort(scheduled), np.sort(records.first_token[ready])
    times = np.linspace(start + 0.1 * (end - start), end, 20 * BLOCKS + 1)
    backlog = (
        np.searchsorted(arrivals, times, side="right") - np.searchsorted(firsts, times, side="right")
    ).astype(np.float64)
    growth = _slope(times - start, backlog)
    at_end = int(backlog[-1])
    mean = float(backlog.mean())
    trend = _trend(records.scheduled[ready], records.first_token[ready] - records.scheduled[ready])
    served = float(np.searchsorted(firsts, end, side="right")) / (end - start)
    # A balanced queue wanders: what it may gather by chance is the random walk's width.
    noise = SIGMAS * (offered.cv or 0.0) * math.sqrt(len(arrivals))
    saturated = growth > GROWTH * offered.rate and trend >= TREND and at_end > max(2.0, noise)
    sustainable = _sustainable(records, ready) if saturated else None
    rho = offered.rate / sustainable if sustainable else None
    cap = spec.max_concurrency if spec is not None else None
    state: State = "stable"
    notes = _drift(growth / offered.rate, trend)
    if saturated and cap is not None:
        state, notes = "capped", _say_capped(offered.rate, sustainable, cap)
    elif saturated:
        state, notes = "saturated", _say(offered.rate, sustainable, growth, at_end, series, end)
    elif (ended := int((records.last_token <= end).sum())) < TURNED_OVER * len(scheduled):
        state, notes = "unknown", _say_short(offered.rate, ended, len(scheduled))
    return Regime(
        state,
        offered.rate,
        served,
        sustainable,
        rho,
        growth,
        at_end,
        at_end / mean if mean > 0 else None,
        trend,
        notes,
    )


def _closed_loop(records: RequestRecords, spec: WorkloadSpec | None) -> Regime:
    """Nothing can outrun the server; what it completes per second is its rate at this concurrency."""
    ready = ~np.isnan(records.first_token)
    rate = _sustainable(records, ready) if int(ready.sum()) >= 2 else None
    cap = spec.max_concurrency if spec is not None else None
    text = "all requests are sent at once: TTFT is mostly the wait for those in front"
    if cap is not None:
        text = f"closed loop of {cap}: the rate follows from the latency, TTFT holds for this concurrency"
    return Regime("closed-loop", served_rate=rate, sustainable_rate=rate, notes=(Note("info", "load", text),))


def _slope(x: Floats, y: Floats) -> float:
    """Of the straight line that fits best, by least squares."""
    across = x - x.mean()
    return float((across * (y - y.mean())).sum() / np.square(across).sum())


def _trend(send: Floats, wait: Floats) -> float:
    """Kendall's tau of the mean waits of ten blocks in order of send time."""
    order = np.argsort(send, kind="stable")
    means = np.array([float(block.mean()) for block in np.array_split(wait[order], BLOCKS)])
    upper = np.triu_indices(BLOCKS, 1)
    return float(np.sign(means[upper[1]] - means[upper[0]]).mean())


def _sustainable(records: RequestRecords, ready: NDArray[np.bool_]) -> float | None:
    """Requests/s completed while requests were waiting: from the first tenth to the last first token.

    A request counts by the part of its output that falls into the window, so that bursts of finishes at the
    window's edges do not matter. Left out: the filling of the first batch, and the drain after the last
    first token with its ever smaller batch.

    Returns:
        None where less than half of the requests ended within that time: then it holds a filling batch,
        more prefill than a steady server has.
    """
    done = ready & ~np.isnan(records.last_token)
    first, last = records.first_token[done], records.last_token[done]
    if len(first) < 2:
        return None
    begin, stop = float(np.quantile(first, 0.1, method="lower")), float(first.max())
    if stop <= begin or (last <= stop).mean() < TURNED_OVER:
        return None
    length = last - first
    share = (np.minimum(last, stop) - np.maximum(first, begin)) / np.where(length > 0, length, 1.0)
    inside = np.where(length > 0, np.clip(share, 0.0, 1.0), (first > begin) & (first <= stop))
    return float(inside.sum()) / (stop - begin)


def _drift(growth: float, trend: float) -> tuple[Note, ...]:
    """A rise that chance could explain is still worth a word."""
    if growth <= GROWTH or trend < TREND:
        return ()
    text = "waits rise with send time: near saturation, or too short a run; send more requests to tell"
    return (Note("warning", "steadiness", text),)


def _say_short(offered: float, ended: int, count: int) -> tuple[Note, ...]:
    text = (
        f"too short to tell whether {offered:.3g} requests/s can be sustained: {ended} of {count} requests "
        "had ended when the last one was sent; send more"
    )
    return (Note("warning", "steadiness", text),)


def _say_capped(offered: float, answered: float | None, cap: int) -> tuple[Note, ...]:
    rate = f"about {answered:.3g}" if answered else "fewer"
    text = (
        f"{offered:.3g} requests/s scheduled, {rate} answered with {cap} in flight: the others wait in the "
        "client, which TTFT does not count"
    )
    return (Note("info", "load", text),)


def _say(
    offered: float,
    sustainable: float | None,
    growth: float,
    at_end: int,
    series: ServerSeries | None,
    end: float,
) -> tuple[Note, ...]:
    rate = f"about {sustainable:.3g}" if sustainable else "fewer"
    notes = [
        Note(
            "warning",
            "saturated",
            f"{offered:.3g} requests/s offered, {rate} sustained: the queue grows by {growth:.3g}/s, "
            f"{at_end} wait at the last send; latencies measure the length of the test",
        )
    ]
    if series is not None and len(series.time):
        waiting = float(series.waiting[np.searchsorted(series.time, end, side="right") - 1])
        notes.append(Note("info", "saturated", f"the server's own queue at the last send: {waiting:.0f}"))
    return tuple(notes)


def comparability(rate: float, capacity_predicted: float, capacity_measured: float) -> str:
    """What of two runs at `rate` may be compared; capacities in requests/s.

    "comparable" (both below 90 % load), "near saturation" (capacity error only), "regime mismatch" (one is
    overloaded, the other is not: capacity error only) or "overloaded" (both: throughput only).
    """
    loads = (rate / capacity_predicted, rate / capacity_measured)
    if min(loads) >= 1.0:
        return "overloaded"
    if max(loads) >= 1.0:
        return "regime mismatch"
    return "comparable" if max(loads) < 0.9 else "near saturation"


def sending_clock(records: RequestRecords) -> Floats:
    """When each request was to be sent; when it was, where the load had no schedule or nobody knows it."""
    scheduled = records.scheduled
    if np.isnan(scheduled).any() or not len(scheduled) or float(np.ptp(scheduled)) == 0.0:
        return records.sent
    return scheduled


def steady_window(records: RequestRecords) -> tuple[float, float] | None:
    """Send times between which a run is neither filling up nor draining; None if there is no telling.

    The start truncates the transient by the smallest marginal standard error of batch means of five TTFTs
    (MSER-5, White 1997), within the first half; the end is the last send.
    """
    ready = ~np.isnan(records.first_token)
    if int(ready.sum()) < MIN_REQUESTS:
        return None
    clock = sending_clock(records)[ready]
    order = np.argsort(clock, kind="stable")
    send = clock[order]
    waits = (records.first_token[ready] - clock)[order]
    batches = len(waits) // 5
    means = waits[: batches * 5].reshape(batches, 5).mean(axis=1)
    # Suffix sums give the variance of every truncated tail at once.
    tail = np.arange(batches, 0, -1, dtype=np.float64)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (squares / tail - (sums / tail) ** 2) / tail
    cut = int(np.argmin(errors[: max(1, batches // 2)]))
    return float(send[cut * 5]), float(send[-1])
