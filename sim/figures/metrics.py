"""From request records to the figures that `vllm bench serve` reports, and those that it leaves out.

One set of definitions for measured and predicted runs (vllm/benchmarks/serve.py calculate_metrics, 0.28):
TTFT and E2EL count from the moment of sending; TPOT = (E2EL - TTFT) / (output tokens - 1) and does not
exist for one token; ITLs are pooled over all requests; failed requests enter nothing but the failure count;
percentiles are linear; throughputs divide by the whole duration. What does not exist is None, never 0.

What a user waits for counts from the schedule instead: with a concurrency cap a client may hold requests
back and still report a fine TTFT (coordinated omission). Those figures have `from_schedule` in their names.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.figures.quantiles import Runs, percentile_interval, percentile_word, percentiles
from sim.loop.records import SimulatedRecords
from sim.provenance import Note
from sim.results import RequestRecords, Verdict
from sim.workload.arrivals import ArrivalStats, arrival_stats
from sim.workload.spec import WorkloadSpec

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LONGEST_COUNTED = 1e7  # s
Figures = dict[str, float | int | None]

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
GOODPUT_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el", "e2el": "e2el"}
MIN_SUCCESS = 0.99
CLIENT_LIMITED = 0.1  # dispatch delay above this share of the latency from schedule


@dataclass(frozen=True)
class Latencies:
    """Per-request latencies of the requests that succeeded, in seconds.

    Attributes:
        records: what they are taken from.
        ok: shape (all requests,): which ones succeeded. All other arrays but `itl` have one entry for each of
            those.
        tpot: NaN for outputs of one token.
        delay: from scheduled to sent.
    """

    records: RequestRecords
    ok: Bools
    ttft: Floats
    tpot: Floats
    e2el: Floats
    delay: Floats

    @cached_property
    def itl(self) -> Floats:
        """Inter-token latencies pooled over all requests, in their order."""
        if bool(self.ok.all()):
            return self.records.itls
        return self.records.itls[np.repeat(self.ok, np.diff(self.records.itl_offsets))]

    @cached_property
    def itl_sample(self) -> Floats | Runs:
        """The same latencies, as runs where those are known: of a million requests they fit into memory."""
        runs = self.records.itl_runs if isinstance(self.records, SimulatedRecords) else None
        return runs if runs is not None and bool(self.ok.all()) else self.itl


def latencies(records: RequestRecords) -> Latencies:
    """Latencies of the successful requests of a run."""
    ok = np.array([status == "ok" for status in records.status], dtype=np.bool_)
    sent, first, last = records.sent[ok], records.first_token[ok], records.last_token[ok]
    decoded = records.output_len[ok] - 1
    tpot = np.where(decoded > 0, (last - first) / np.maximum(decoded, 1), np.nan)
    return Latencies(records, ok, first - sent, tpot, last - sent, sent - records.scheduled[ok])


def summarise(records: RequestRecords, spec: WorkloadSpec | None, duration: float) -> Figures:
    """Every figure of a run, under `vllm bench serve`'s keys and our own; times in ms, rates per second.

    Ours: `n_<metric>`, `p99_<metric>_ms_low`/`_high` (95 % bounds by order statistics; None: the sample
    cannot bound it), `*_from_schedule_ms`, `*_dispatch_delay_ms`, `offered_rate` and `offered_cv` of the
    schedule, `failed_<status>`, goodput attainment, parts of TTFT where known, cached prompt tokens.

    Args:
        records: one row per request.
        spec: tells percentiles, metrics and goodput limits; None: the usual ones, no goodput.
        duration: seconds from just before the first send to the last answer.
    """
    lat = latencies(records)
    figures = _totals(records, lat, spec, duration)
    quantiles = PERCENTILES if spec is None else spec.percentiles
    wanted = METRICS if spec is None else spec.percentile_metrics
    tpot = lat.tpot[~np.isnan(lat.tpot)]
    samples = {"ttft": lat.ttft, "tpot": tpot, "e2el": lat.e2el}
    for name in METRICS:
        if name in wanted or (name == "e2el" and "e2e" in wanted):
            sample = lat.itl_sample if name == "itl" else samples[name]
            figures.update(distribution(name, sample, quantiles))
    for name in METRICS:
        figures[f"n_{name}"] = len(lat.itl_sample if name == "itl" else samples[name])
        # Gaps of one request are no independent draws: bounds from many of them would pretend precision.
        if name in wanted and (name != "itl" or len(lat.itl_sample) < 100):
            few = lat.itl if name == "itl" else samples[name]
            figures.update(bounds(name, few, quantiles))
    figures.update(_from_schedule(records, lat, quantiles, spec is not None and spec.closed_loop))
    figures.update(_parts(records, lat))
    if spec is not None and spec.goodput:
        figures.update(_goodput(lat, spec, duration, len(records)))
    return figures


def distribution(name: str, seconds: Floats | Runs, quantiles: tuple[float, ...]) -> Figures:
    """mean_, median_, std_ and percentiles of `name` in ms, under vllm bench serve's keys."""
    if isinstance(seconds, Runs):
        return _run_distribution(name, seconds, quantiles)
    some = len(seconds) > 0
    figures: Figures = {
        f"mean_{name}_ms": float(seconds.mean()) * 1000.0 if some else None,
        f"median_{name}_ms": median(seconds) * 1000.0 if some else None,
        f"std_{name}_ms": float(seconds.std()) * 1000.0 if some else None,
    }
    values = percentiles(np.sort(seconds), quantiles) if some else []
    for i, q in enumerate(quantiles):
        figures[f"p{percentile_word(q)}_{name}_ms"] = values[i] * 1000.0 if some else None
    return figures


def median(values: Floats) -> float:
    """`np.median`, which would load numpy's masked arrays to look for NaN."""
    middle, last = len(values) // 2, len(values) - 1
    ordered = np.partition(values, (max(0, middle - 1), middle, last))
    if np.isnan(ordered[last]):
        return math.nan
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0)


def _run_distribution(name: str, runs: Runs, quantiles: tuple[float, ...]) -> Figures:
    """`distribution` without making the values."""
    median, *others = runs.percentiles((50.0, *quantiles))
    named = {"mean": runs.mean(), "median": median, "std": runs.std()}
    named |= {f"p{percentile_word(q)}": value for q, value in zip(quantiles, others, strict=True)}
    return {f"{key}_{name}_ms": None if v is None else v * 1000.0 for key, v in named.items()}


def bounds(name: str, seconds: Floats, quantiles: tuple[float, ...]) -> Figures:
    """95 % bounds of percentiles in ms."""
    figures: Figures = {}
    ordered = np.sort(seconds) * 1000.0
    for q in quantiles:
        key = f"p{percentile_word(q)}_{name}_ms"
        interval = percentile_interval(ordered, q)
        figures[f"{key}_low"], figures[f"{key}_high"] = interval.low, interval.high
    return figures


def _totals(records: RequestRecords, lat: Latencies, spec: WorkloadSpec | None, duration: float) -> Figures:
    completed = int(lat.ok.sum())
    total_in = int(records.prompt_len[lat.ok].sum())
    total_out = int(records.output_len[lat.ok].sum())

    def per_second(amount: float) -> float | None:
        return amount / duration if duration > 0 else None

    good = None
    if spec is not None and spec.goodput:
        good = per_second(float(_meets(lat, spec, 0.0).all(axis=0).sum()))
    figures: Figures = {
        "duration": duration,
        "completed": completed,
        "failed": len(records) - completed,
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": per_second(completed),
        "request_goodput": good,
        "output_throughput": per_second(total_out),
        "total_token_throughput": per_second(total_in + total_out),
        "max_output_tokens_per_s": _peak_tokens(records, lat.ok, per_second(total_out)),
        "max_concurrent_requests": _peak_concurrency(records.sent[lat.ok], records.last_token[lat.ok]),
        "success_rate": completed / len(records) if len(records) else None,
    }
    for status, count in sorted(Counter(records.status).items()):
        if status != "ok":
            figures[f"failed_{status}"] = count
    return figures


def _peak_tokens(records: RequestRecords, ok: Bools, average: float | None) -> float | None:
    """Most output tokens in one second, seconds counted from the first send.

    A message may carry several tokens: each counts for its request's tokens per message. vLLM counts
    messages instead, so its peak can lie below the average, which cannot be. None if even ours does (a run
    of a second or less), and for runs of months, whose seconds are too many to count.
    """
    if not ok.any() or average is None:
        return None
    start = float(records.sent[ok].min())
    if float(records.last_token[ok].max()) - start > LONGEST_COUNTED:
        return None
    if isinstance(records, SimulatedRecords) and bool(ok.all()) and records.emissions.interval == 1:
        most = float(records.emissions.per_second(start).max())
        return most if most >= average else None
    counts = np.diff(records.itl_offsets)
    rows = np.flatnonzero(ok)
    weight = records.output_len[rows] / (counts[rows] + 1)
    first = records.first_token[rows] - start
    owner = np.repeat(np.arange(len(rows)), counts[rows])
    gaps = records.itls if len(rows) == len(ok) else records.itls[np.repeat(ok, counts)]
    run = np.cumsum(gaps)
    ends = np.cumsum(counts[rows])
    before = np.concatenate(([0.0], run))[ends - counts[rows]]
    later = first[owner] + run - before[owner]
    times, weights = np.concatenate((first, later)), np.concatenate((weight, weight[owner]))
    known = ~np.isnan(times)
    if not known.any():
        return None
    peak = float(np.bincount(times[known].astype(np.int64), weights[known]).max())
    return peak if peak >= average else None


def _peak_concurrency(sent: Floats, last: Floats) -> int | None:
    """Most requests in flight at one instant; one that ends as another is sent makes room for it."""
    known = ~(np.isnan(sent) | np.isnan(last))
    if not known.any():
        return None
    times = np.concatenate((last[known], sent[known]))
    change = np.repeat((-1, 1), int(known.sum()))
    order = np.argsort(times, kind="stable")
    return int(np.cumsum(change[order]).max())


def _from_schedule(
    records: RequestRecords, lat: Latencies, quantiles: tuple[float, ...], closed: bool
) -> Figures:
    """Latency as users see it, and what the client's own waiting made of it.

    A closed loop has no schedule to be late for, and files of other tools do not record theirs: None.
    """
    known = not closed and not bool(np.isnan(lat.delay).any())
    delay = lat.delay if known else lat.delay[:0]
    figures = distribution("ttft_from_schedule", lat.ttft[: len(delay)] + delay, quantiles)
    figures.update(distribution("e2el_from_schedule", lat.e2el[: len(delay)] + delay, quantiles))
    figures["mean_dispatch_delay_ms"] = float(delay.mean()) * 1000.0 if len(delay) else None
    figures["max_dispatch_delay_ms"] = float(delay.max()) * 1000.0 if len(delay) else None
    offered = arrival_stats(np.sort(records.scheduled)) if known else ArrivalStats(None, None)
    figures["offered_rate"], figures["offered_cv"] = offered.rate, offered.cv
    figures["dispatch_rate"] = arrival_stats(np.sort(records.sent[~np.isnan(records.sent)])).rate
    return figures


def client_limited(figures: Figures) -> bool:
    """Whether requests waited in the client for more than a tenth of what their users waited in all."""
    delay, whole = figures.get("mean_dispatch_delay_ms"), figures.get("mean_e2el_from_schedule_ms")
    return delay is not None and whole is not None and delay > CLIENT_LIMITED * whole


def success_verdict(figures: Figures) -> Verdict:
    """INVALID where fewer than 99 % of the requests succeeded; says how many failed, and how.

    An unknown number of failures is SUSPECT.
    """
    completed, failed = figures.get("completed"), figures.get("failed")
    if completed is None or failed is None:
        text = "the file does not say how many requests failed"
        return Verdict("SUSPECT", (Note("warning", "failures", text),))
    total = completed + failed
    if total and completed / total >= MIN_SUCCESS:
        return Verdict("VALID")
    kinds = [f"{count} {key[7:]}" for key, count in figures.items() if key.startswith("failed_") and count]
    text = f"{failed} of {total} requests failed" + (f" ({', '.join(kinds)})" if kinds else "")
    return Verdict("INVALID", (Note("warning", "failures", text),))


def _parts(records: RequestRecords, lat: Latencies) -> Figures:
    """Parts of TTFT, cached prompt tokens and preemptions, as far as the records know them."""
    figures: Figures = {}
    queue, prefill = records.queue[lat.ok] * 1000.0, records.prefill[lat.ok] * 1000.0
    known = ~(np.isnan(queue) | np.isnan(prefill))
    some = bool(known.any())
    rest = lat.ttft[known] * 1000.0 - queue[known] - prefill[known]
    figures["mean_queue_ms"] = float(queue[known].mean()) if some else None
    figures["mean_prefill_ms"] = float(prefill[known].mean()) if some else None
    figures["mean_first_token_delivery_ms"] = float(rest.mean()) if some else None
    cached, prompts = records.cached_tokens[lat.ok], records.prompt_len[lat.ok]
    told = cached >= 0
    total = int(prompts[told].sum())
    figures["total_cached_tokens"] = int(cached[told].sum()) if total else None
    figures["cached_token_share"] = float(cached[told].sum() / total) if total else None
    counted = records.preemptions[records.preemptions >= 0]
    figures["num_preemptions"] = int(counted.sum()) if len(counted) else None
    return figures


def _limits(spec: WorkloadSpec) -> dict[str, float]:
    return {GOODPUT_NAMES[name]: limit for name, limit in spec.goodput}


def _meets(lat: Latencies, spec: WorkloadSpec, shift: Floats | float) -> Bools:
    """shape (limits, successful requests): which limit [ms] each request keeps; a missing TPOT keeps it."""
    values = {"ttft": lat.ttft + shift, "tpot": lat.tpot, "e2el": lat.e2el + shift}
    # The comparison of vllm bench serve: in seconds, limit included. NaN (no TPOT) breaks no limit.
    return np.array([~(values[name] > limit / 1000.0) for name, limit in _limits(spec).items()])


def _goodput(lat: Latencies, spec: WorkloadSpec, duration: float, sent: int) -> Figures:
    """Goodput and attainment; a failed request is a miss. Beside vLLM's, the same from the schedule."""
    meets = _meets(lat, spec, 0.0)
    good = int(meets.all(axis=0).sum())
    figures: Figures = {
        "goodput_good": good,
        "goodput_attainment": good / sent if sent else None,
        "goodput_attainment_from_schedule": None,
        "request_goodput_from_schedule": None,
    }
    if sent and duration > 0 and not spec.closed_loop and not bool(np.isnan(lat.delay).any()):
        good_users = int(_meets(lat, spec, lat.delay).all(axis=0).sum())
        figures["goodput_attainment_from_schedule"] = good_users / sent
        figures["request_goodput_from_schedule"] = good_users / duration
    for name, kept in zip(_limits(spec), meets, strict=True):
        figures[f"goodput_attainment_{name}"] = int(kept.sum()) / sent if sent else None
    if "tpot" in _limits(spec):
        figures["goodput_na_tpot"] = int(np.isnan(lat.tpot).sum())
    return figures


def select(records: RequestRecords, keep: Bools) -> RequestRecords:
    """The rows that `keep`, of shape (n,), marks; for example those sent within a steady window."""
    counts = np.diff(records.itl_offsets)
    chosen = {
        f.name: getattr(records, f.name)[keep]
        for f in fields(records)
        if f.name not in ("request_id", "status", "itls", "itl_offsets")
    }
    rows = np.flatnonzero(keep).tolist()
    return RequestRecords(
        request_id=tuple(records.request_id[i] for i in rows),
        status=tuple(records.status[i] for i in rows),
        itls=records.itls[np.repeat(keep, counts)],
        itl_offsets=np.concatenate(([0], np.cumsum(counts[keep]))).astype(np.int64),
        **chosen,
    )


def run_duration(records: RequestRecords) -> float:
    """Seconds from the first send to the last answer of any request; 0 for none."""
    ends = np.concatenate((records.last_token, records.sent))
    if not len(records) or bool(np.isnan(ends).all()) or bool(np.isnan(records.sent).all()):
        return 0.0
    return (
        max(0.0, float(np.nanmax(ends) - np.nanmin(records.sent))) if math.isfinite(np.nanmax(ends)) else 0.0
    )
