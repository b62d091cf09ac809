"""Reports of GuideLLM as JSON: one result per entry of `benchmarks` (guidellm/benchmark/schemas, 0.4 to 0.6).

Each metric holds `successful`, `incomplete` and `errored` distributions; names end in `_ms` where times are
in milliseconds, `request_latency` is in seconds.
"""

from __future__ import annotations

import math
from typing import Any

from sim.errors import BadInput
from sim.figures.metrics import Figures, success_verdict
from sim.provenance import Note
from sim.results import BenchResult
from sim.results_io.fields import Object, check_figures, count, number, section, statistics

_MOMENTS = {"mean": "mean", "median": "median", "std": "std_dev"}
_PERCENTILES = {"p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p99.9": "p999"}
_RATES = {
    "requests_per_second": "request_throughput",
    "output_tokens_per_second": "output_throughput",
    "tokens_per_second": "total_token_throughput",
}
_NOTE = Note(
    "warning",
    "tpot",
    "GuideLLM's inter-token latency is a mean per request, so it is read as TPOT (it weights requests by "
    "their tokens); its own time_per_output_token counts the first token in and is left out",
)


# What a strategy's name says of its load: one at a time, all at once, evenly spaced.
_PACES: dict[str, dict[str, Any]] = {
    "synchronous": {"request_rate": "inf", "max_concurrency": 1},
    "concurrent": {"request_rate": "inf"},
    "throughput": {"request_rate": "inf"},
    "constant": {"burstiness": math.inf},
}


def looks_like_guidellm(document: dict[str, Any]) -> bool:
    """Whether an object is a GuideLLM report."""
    return isinstance(document.get("benchmarks"), list)


def read_guidellm(document: dict[str, Any], where: str) -> list[BenchResult]:
    """Every benchmark of a report.

    Raises:
        BadInput: naming file and field.
    """
    results = []
    for i, entry in enumerate(document["benchmarks"]):
        place = f"{where} benchmarks[{i}]"
        if not isinstance(entry, dict):
            raise BadInput(place, None, "must be an object")
        results.append(_one(entry, section(document, "args", where), place))
    if not results:
        raise BadInput(where, None, "holds no benchmark")
    return results


def _one(entry: dict[str, Any], arguments: Object, where: str) -> BenchResult:
    metrics = section(entry, "metrics", where)
    if not metrics:
        raise BadInput(where, None, "lacks the field metrics")
    totals = section(metrics, "request_totals", where)
    figures: Figures = {"duration": _duration(entry, where)}
    figures["completed"] = count(totals, "successful", f"{where} request_totals")
    errored = count(totals, "errored", f"{where} request_totals")
    incomplete = count(totals, "incomplete", f"{where} request_totals")
    figures["failed"] = None if errored is None else errored + (incomplete or 0)
    if incomplete:
        figures["failed_unfinished"] = incomplete
    for theirs, ours in (("prompt_token_count", "input"), ("output_token_count", "output")):
        total = number(_successful(metrics, theirs, where), "total_sum", f"{where} {theirs}")
        figures[f"total_{ours}_tokens"] = None if total is None else round(total)
    for theirs, ours in _RATES.items():
        figures[ours] = number(_successful(metrics, theirs, where), "mean", f"{where} {theirs}")
    for theirs, ours, scale in (
        ("time_to_first_token_ms", "ttft", 1.0),
        ("inter_token_latency_ms", "tpot", 1.0),
        ("request_latency", "e2el", 1e3),
    ):
        block, place = _successful(metrics, theirs, where), f"{where} {theirs}"
        figures.update(statistics(ours, block, place, _MOMENTS, scale))
        figures.update(statistics(ours, section(block, "percentiles", place), place, _PERCENTILES, scale))
    # Weighted by tokens, the mean of per-request means is the mean of the gaps themselves.
    figures["mean_itl_ms"] = figures.get("mean_tpot_ms")
    if figures.get("mean_ttft_ms") is None and figures.get("mean_e2el_ms") is None:
        raise BadInput(f"{where} metrics", None, "has neither time_to_first_token_ms nor request_latency")
    check_figures(figures, where)
    return BenchResult(
        origin="measured",
        tool="guidellm",
        identity=_identity(entry, arguments, where),
        duration=float(figures["duration"] or 0.0),
        aggregates=figures,
        verdict=success_verdict(figures),
        notes=(_NOTE,),
    )


def _successful(metrics: Object, key: str, where: str) -> Object:
    return section(section(metrics, key, where), "successful", f"{where} {key}")


def _duration(entry: Object, where: str) -> float | None:
    given = number(entry, "duration", where)
    if given is not None:
        return given
    start, end = number(entry, "start_time", where), number(entry, "end_time", where)
    if start is not None and end is not None and end > start:
        return end - start
    raise BadInput(where, None, "lacks the field duration")


def _identity(entry: Object, arguments: Object, where: str) -> dict[str, Any]:
    identity: dict[str, Any] = {}
    for key in ("model", "target"):
        if isinstance(arguments.get(key), str):
            identity[key] = arguments[key]
    strategy = section(section(entry, "config", where), "strategy", where)
    for theirs, ours in (
        ("type_", "strategy"),
        ("rate", "request_rate"),
        ("max_concurrency", "max_concurrency"),
        ("streams", "max_concurrency"),
    ):
        if strategy.get(theirs) is not None:
            identity[ours] = strategy[theirs]
    return identity | _PACES.get(str(identity.get("strategy")), {})
