"""All questions over all runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.audit import load, pair, quality
from bench.audit.facts import Run
from bench.audit.finding import Finding, in_order

CHECKS: tuple[Callable[[Sequence[Run]], list[Finding]], ...] = (
    load.failures,
    pair.input_distribution,
    pair.client,
    pair.dimensions,
    quality.percentiles,
    quality.warmup,
    load.cache,
    quality.samples,
    load.client_limited,
    load.saturated,
    load.capacity,
)


def audit(runs: Sequence[Run]) -> list[Finding]:
    """Every finding, in the order of the questions; start-up logs alone leave most of them open."""
    measured = any(run.figures or run.view is not None for run in runs)
    checks = CHECKS if measured else (pair.dimensions, load.capacity)
    return in_order(finding for check in checks for finding in check(runs))
