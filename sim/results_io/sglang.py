"""Results of `sglang.bench_serving`: JSON lines, one run per line (sglang/benchmark/serving.py, 0.5.21)."""

from __future__ import annotations

from typing import Any

from sim.figures.metrics import Figures, success_verdict
from sim.provenance import Note
from sim.results import BenchResult
from sim.results_io.fields import (
    check_figures,
    count,
    number,
    percentile_names,
    required,
    section,
    statistics,
)
from sim.results_io.said import with_trace

_NAMES = {k: k for k in ("mean", "median", "std")} | percentile_names((90.0, 95.0, 99.0))
_METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e_latency": "e2el"}
_TOTALS = {
    "total_input_tokens": "total_input_tokens",
    "total_output_tokens": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
    "total_throughput": "total_token_throughput",
    "max_output_tokens_per_s": "max_output_tokens_per_s",
    "max_concurrent_requests": "max_concurrent_requests",
}
_SETTINGS = (
    "backend",
    "dataset_name",
    "request_rate",
    "max_concurrency",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
)


def looks_like_sglang(document: dict[str, Any]) -> bool:
    """Whether an object is a result of sglang.bench_serving."""
    return "total_throughput" in document and "mean_e2e_latency_ms" in document


def read_sglang(document: dict[str, Any], where: str) -> BenchResult:
    """One line of a result file. It records no send times, so there are no records even with details.

    Raises:
        BadInput: naming file and field.
    """
    figures: Figures = {"duration": required(document, "duration", where)}
    figures["completed"] = int(required(document, "completed", where))
    errors = document.get("errors")
    figures["failed"] = sum(1 for e in errors if e) if isinstance(errors, list) else None
    for theirs, ours in _TOTALS.items():
        whole = ours.startswith(("total_input", "total_output", "max_concurrent"))
        figures[ours] = (count if whole else number)(document, theirs, where)
    for theirs, ours in _METRICS.items():
        names = {k: f"{v}_{theirs}_ms" for k, v in _NAMES.items()}
        figures.update(statistics(ours, document, where, names))
    check_figures(figures, where)
    cache = section(document, "cache_report", where)
    text = "E2EL of this client runs to the last line of the stream, [DONE] included"
    return BenchResult(
        origin="measured",
        tool="sglang.bench_serving",
        identity=with_trace(
            {"engine": "sglang"} | {k: document[k] for k in _SETTINGS if document.get(k) is not None}
        ),
        duration=float(figures["duration"] or 0.0),
        aggregates=figures,
        server={k: cache[k] for k in ("total_prompt_tokens", "total_cached_tokens") if k in cache},
        verdict=success_verdict(figures),
        notes=(Note("info", "e2el", text),),
        extra={"concurrency": document.get("concurrency"), "accept_length": document.get("accept_length")},
    )
