"""A cluster's run as people read it: one line per router, one per replica, one per tenant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.figures.metrics import select, summarise
from sim.figures.regime import Regime, regime
from sim.planning.cluster import ClusterOutcome, NodeOutcome
from sim.planning.mix import tenant_of
from sim.planning.outcome import queues
from sim.planning.text import units_line, wrap
from sim.results import RequestRecords
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


def render_clusters(outcomes: Sequence[tuple[str, ClusterOutcome]], spec: WorkloadSpec | None = None) -> str:
    """One line per way of routing, with a word where it has no steady state; then replicas and tenants.

    Args:
        spec: the load, where it is a benchmark client's.
    """
    lines = _head("router")
    for name, outcome in outcomes:
        lines.append(_line(name, outcome.records, outcome.duration))
        for note in verdict_of(outcome, spec).notes:
            lines += wrap(f"  {note.kind}: {note.subject}: {note.text}", "    ")
    for name, outcome in outcomes:
        lines += ["", f"{name}: replicas", *_nodes(outcome)]
        tenants = list(dict.fromkeys(map(tenant_of, outcome.records.request_id)))
        if len(tenants) > 1 and all(":" in rid for rid in outcome.records.request_id):
            lines += [f"{name}: tenants", *_head("tenant")]
            owner = np.array([tenant_of(rid) for rid in outcome.records.request_id])
            for tenant in tenants:
                lines.append(_line(f"  {tenant}", select(outcome.records, owner == tenant), outcome.duration))
    return "\n".join(lines)


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


def _nodes(outcome: ClusterOutcome) -> list[str]:
    titles = ("requests", "KV mean", "KV max", "running", "waiting", "preempted", "prefix hits")
    head = f"{'':<{NAME}}" + "".join(f"{title:>12}" for title in titles)
    return [head, *(_node(node, outcome.duration) for node in outcome.nodes)]


def _node(node: NodeOutcome, duration: float) -> str:
    use = node.usage
    seen = queues(node.series, duration)
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
