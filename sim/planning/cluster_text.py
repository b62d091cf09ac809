"""A cluster's run as people read it: one line per router, one per replica, one per tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.figures.metrics import select, summarise
from sim.figures.regime import Regime, regime
from sim.planning.cluster import ClusterOutcome, NodeOutcome
from sim.planning.cluster_error import Range
from sim.planning.margin import ModelError
from sim.planning.mix import Traffic, tenant_of
from sim.planning.outcome import queues
from sim.planning.sessions import Session
from sim.planning.text import units_line, wrap
from sim.provenance import Note
from sim.request import Request
from sim.results import RequestRecords, ServerSeries
from sim.workload.spec import WorkloadSpec

COLUMNS = (
    ("request_throughput", "req/s", 9, 2),
    ("output_throughput", "out tok/s", 11, 0),
    ("mean_ttft_ms", "TTFT mean", 11, 1),
    ("p99_ttft_ms", "TTFT P99", 11, 1),
    ("mean_tpot_ms", "TPOT mean", 11, 2),
    ("p99_tpot_ms", "TPOT P99", 10, 2),
    ("p99_e2el_ms", "E2E P99", 11, 0),
)
NAME = 22
RISING = 0.8  # of all requests; fewer sent within the time of arrivals, and no steady state was seen


@dataclass(frozen=True, slots=True)
class About:
    """What stands around the figures.

    Attributes:
        hardware: lines on the replicas and their GPUs.
        offered: requests/s that the load brings while it lasts; None where there is no such rate.
        load: that load in words.
        ranges: by router, the range of each figure over the step times that are possible.
        error: where that range comes from.
        arriving: for how long sessions arrive [s], where the load has such a time.
    """

    hardware: tuple[str, ...] = ()
    offered: float | None = None
    load: str = ""
    ranges: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    error: str = ""
    notes: tuple[Note, ...] = ()
    arriving: float | None = None


def about_traffic(traffic: Traffic, sessions: Sequence[Session]) -> tuple[float, str]:
    """The rate of requests [requests/s] that sessions bring, every turn counted, and the load in words."""
    turns = sum(len(session.turns) for session in sessions)
    offered = turns / traffic.duration
    return offered, (
        f"{offered:.3g} requests/s offered: {len(sessions):,} sessions and single requests arrive in "
        f"{traffic.duration:g} s ({len(sessions) / traffic.duration:.3g}/s), {turns / len(sessions):.3g} "
        "requests each"
    )


def about_client(spec: WorkloadSpec, requests: Sequence[Request]) -> tuple[float | None, str]:
    """The same of a benchmark client's load; None where it sends all at once."""
    times = [request.arrival for request in requests]
    span = max(times, default=0.0) - min(times, default=0.0)
    cap = "" if spec.max_concurrency is None else f", at most {spec.max_concurrency} at a time"
    if span <= 0:
        return None, f"{len(requests):,} requests, none of them held back by a rate{cap}"
    offered = (len(requests) - 1) / span
    return offered, f"{offered:.3g} requests/s offered: {len(requests):,} requests in {span:.3g} s{cap}"


def render_clusters(
    outcomes: Sequence[tuple[str, ClusterOutcome]],
    spec: WorkloadSpec | None = None,
    about: About | None = None,
) -> str:
    """One line per way of routing, with a word where it has no steady state; then replicas and tenants.

    Args:
        spec: the load, where it is a benchmark client's.
    """
    about = about or About()
    lines = list(about.hardware)
    if about.load:
        end = f"; within {about.arriving:g} s, only what was answered by then" if about.arriving else ""
        lines += wrap(
            f"load: {about.load}. req/s is what was answered from the first request to the last answer, the "
            f"end in which nobody new comes included{end}"
        )
    lines += ["", *_head("router")] if lines else _head("router")
    for name, outcome in outcomes:
        lines.append(_line(name, outcome.records, outcome.duration))
        if about.arriving is not None:
            lines.append(_line(f"  within {about.arriving:g} s", *until(outcome, about.arriving)))
        if found := about.ranges.get(name):
            lines += [_range_line("  from", found, 0), _range_line("  to", found, 1)]
        for note in verdict_of(outcome, spec).notes:
            lines += wrap(f"  {note.kind}: {note.subject}: {note.text}", "    ")
    if any(_still_rising(outcome, about) for _, outcome in outcomes):
        lines += wrap(
            "warning: duration: many follow-ups come after it, so the load was still rising when it ended; a "
            "duration of many times a session's length shows the steady state"
        )
    for name, outcome in outcomes:
        until_then = "" if about.arriving is None else f" within {about.arriving:g} s, counters of all"
        lines += ["", f"{name}: replicas{until_then}", *_nodes(outcome, about.arriving)]
        tenants = list(dict.fromkeys(map(tenant_of, outcome.records.request_id)))
        if len(tenants) > 1 and all(":" in rid for rid in outcome.records.request_id):
            lines += [f"{name}: tenants", *_head("tenant")]
            owner = np.array([tenant_of(rid) for rid in outcome.records.request_id])
            for tenant in tenants:
                lines.append(_line(f"  {tenant}", select(outcome.records, owner == tenant), outcome.duration))
    if about.error:
        lines += ["", *wrap(about.error)]
    for note in about.notes:
        lines += wrap(f"{note.kind}: {note.subject}: {note.text}")
    return "\n".join(lines)


def _range_line(name: str, found: Mapping[str, Range], end: int) -> str:
    cells = "".join(
        f"{'':>{width}}" if key not in found else f"{found[key][end]:>{width},.{digits}f}"
        for key, _, width, digits in COLUMNS
    )
    return f"{name:<{NAME}}{cells}"


def error_words(error: ModelError, runs: int) -> str:
    """What the lines `from` and `to` cover, and what they do not."""
    if not runs:
        return (
            f"not in these figures: how far step times may be off ({error.share:.0%}: {error.source}), and "
            "the chance in the load, as it is one seed: --seed N gives another"
        )
    how = (
        f"{runs} other step times that the evidence allows"
        if error.drawn
        else f"step times {error.share:.0%} longer and shorter"
    )
    return (
        f"from, to: the range with {how} ({error.source}); the same requests every time: the chance in the "
        "load is not in it, --seed N gives another"
    )


def verdict_of(outcome: ClusterOutcome, spec: WorkloadSpec | None) -> Regime:
    """Stable or saturated, by the rule for one server: what counts is the queue before the whole cluster."""
    return regime(outcome.records, None, spec)


def figures_of(records: RequestRecords, duration: float) -> dict[str, float | int | None]:
    """The usual figures of a cluster's records."""
    return summarise(records, WorkloadSpec(request_rate=1.0), duration)


def _head(title: str) -> list[str]:
    titles = "".join(f"{text:>{width}}" for _, text, width, _ in COLUMNS)
    return [f"{title:<{NAME}}{titles}", units_line(COLUMNS, NAME)]


def _line(name: str, records: RequestRecords, duration: float) -> str:
    figures = figures_of(records, duration)
    cells = "".join(
        f"{'unknown':>{width}}" if (value := figures.get(key)) is None else f"{value:>{width},.{digits}f}"
        for key, _, width, digits in COLUMNS
    )
    return f"{name:<{NAME}}{cells}"


def _still_rising(outcome: ClusterOutcome, about: About) -> bool:
    """Whether much of what was offered while sessions arrived was asked only after that."""
    if about.arriving is None or not about.offered:
        return False
    return float((outcome.records.sent <= about.arriving).mean()) < RISING


def until(outcome: ClusterOutcome, end: float) -> tuple[RequestRecords, float]:
    """What was answered by then, and over how long: without the drain in which nobody new comes."""
    return select(outcome.records, outcome.records.last_token <= end), min(end, outcome.duration)


def _nodes(outcome: ClusterOutcome, arriving: float | None) -> list[str]:
    titles = ("requests", "KV mean", "KV max", "running", "waiting", "preempted", "prefix hits")
    head = f"{'':<{NAME}}" + "".join(f"{title:>12}" for title in titles)
    end = outcome.duration if arriving is None else min(arriving, outcome.duration)
    return [head, *(_node(node, end) for node in outcome.nodes)]


def _node(node: NodeOutcome, duration: float) -> str:
    use = node.usage
    seen = queues(_before(node.series, duration), duration)
    cells = (
        str(node.requests),
        f"{seen.get('mean_kv_usage') or 0.0:.0%}",
        f"{use.max_kv_used_tokens / use.kv_total_tokens:.0%}" if use.kv_total_tokens else "none",
        f"{seen.get('mean_running') or 0.0:.1f}",
        f"{seen.get('mean_waiting') or 0.0:.1f}",
        str(use.preemptions),
        f"{use.prefix_hits / use.prefix_queries:.0%}" if use.prefix_queries else "none",
    )
    return f"{'  ' + node.name:<{NAME}}" + "".join(f"{cell:>12}" for cell in cells)


def _before(series: ServerSeries, end: float) -> ServerSeries:
    kept = series.time <= end
    return ServerSeries(series.time[kept], series.running[kept], series.waiting[kept], series.kv_usage[kept])
