"""Exports of AIPerf (and GenAI-Perf): profile_export_aiperf.json and .csv (schema 1.0 to 1.5).

The `unit` of a metric says how to read it. AIPerf's inter-token latency is (E2EL - TTFT) / (tokens - 1) of a
request: vLLM's TPOT.
"""

from __future__ import annotations

import csv
import math
import re
from typing import Any

from sim.errors import BadInput
from sim.figures.metrics import Figures, success_verdict
from sim.provenance import Note
from sim.results import BenchResult
from sim.results_io.fields import TO_MS, check_figures, number, percentile_names, section, statistics

_NAMES = {"mean": "avg", "median": "p50", "std": "std"} | percentile_names((50.0, 75.0, 90.0, 95.0, 99.0))
_LATENCIES = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
    "request_latency": "e2el",
}
_RATES = {
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
    "goodput": "request_goodput",
}
_PER_SECOND = ("requests/sec", "tokens/sec", "per sec", "requests/s", "tokens/s", "")
_NOTE = Note("info", "tpot", "AIPerf's inter-token latency is a mean per request: read as TPOT")


def looks_like_aiperf(document: dict[str, Any]) -> bool:
    """Whether an object is a summary of AIPerf."""
    latency = document.get("request_latency")
    return isinstance(latency, dict) and "unit" in latency


def looks_like_aiperf_csv(text: str) -> bool:
    """Whether a text is AIPerf's table of metrics."""
    return re.match(r"\ufeff?\"?Metric\"?,", text) is not None


def read_aiperf(document: dict[str, Any], where: str) -> BenchResult:
    """The summary of one run.

    Raises:
        BadInput: naming file and metric.
    """
    figures: Figures = {}
    for theirs, ours in _LATENCIES.items():
        block = section(document, theirs, where)
        if block:
            place = f"{where} {theirs}"
            figures.update(statistics(ours, block, place, _NAMES, _scale(block, place)))
    if "mean_ttft_ms" not in figures and "mean_e2el_ms" not in figures:
        raise BadInput(where, None, "has neither time_to_first_token nor request_latency")
    for theirs, ours in _RATES.items():
        block = section(document, theirs, where)
        if block and str(block.get("unit", "")).lower() not in _PER_SECOND:
            raise BadInput(f"{where} {theirs} unit", str(block["unit"]), "must be a rate per second")
        figures[ours] = number(block, "avg", f"{where} {theirs}")
    figures["completed"] = _whole(document, "request_count", where)
    errors = _whole(document, "error_request_count", where)
    told = isinstance(document.get("error_summary"), list) and not document["error_summary"]
    figures["failed"] = 0 if errors is None and told else errors
    for theirs, ours in (("input_sequence_length", "input"), ("output_sequence_length", "output")):
        figures[f"total_{ours}_tokens"] = _total(document, theirs, figures["completed"], where)
    figures["duration"] = _duration(document, figures, where)
    if figures.get("total_token_throughput") is None:
        tokens_in, tokens_out = figures["total_input_tokens"], figures["total_output_tokens"]
        if tokens_in is not None and tokens_out is not None and figures["duration"]:
            figures["total_token_throughput"] = (tokens_in + tokens_out) / figures["duration"]
    check_figures(figures, where)
    known = {k: document[k] for k in ("aiperf_version", "benchmark_id") if document.get(k) is not None}
    identity = {**known, **_load(document)}
    return BenchResult(
        origin="measured",
        tool="aiperf",
        identity=identity,
        duration=float(figures["duration"] or 0.0),
        aggregates=figures,
        verdict=success_verdict(figures),
        notes=(_NOTE,),
    )


def _load(document: dict[str, Any]) -> dict[str, Any]:
    """Model, rate and cap of `input_config`, as far as it has a `loadgen` and an `endpoint`."""
    config = document.get("input_config")
    config = config if isinstance(config, dict) else {}
    loadgen, endpoint = (config.get(key) for key in ("loadgen", "endpoint"))
    found: dict[str, Any] = {}
    if isinstance(loadgen, dict):
        for theirs, ours in (("request_rate", "request_rate"), ("concurrency", "max_concurrency")):
            if loadgen.get(theirs) is not None:
                found[ours] = loadgen[theirs]
        if loadgen.get("arrival_pattern") == "constant":
            found["burstiness"] = math.inf
    names = endpoint.get("model_names") if isinstance(endpoint, dict) else None
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        found["model"] = names[0]
    return found


def read_aiperf_csv(text: str, where: str) -> BenchResult:
    """The same from the table: rows of statistics, a blank line, rows of single values.

    Raises:
        BadInput: naming file, line and column.
    """
    document: dict[str, Any] = {}
    header: list[str] = []
    rows = csv.reader(text.splitlines())
    for row in rows:
        if not row or not row[0].strip():
            continue
        if row[0].lstrip("\ufeff").strip() == "Metric":
            header = ["avg" if name.strip() == "Value" else name.strip() for name in row[1:]]
            continue
        if row[0].strip() == "Endpoint":
            break  # the telemetry of the GPUs follows
        place = f"{where} line {rows.line_num}"
        if len(row) - 1 > len(header):
            raise BadInput(place, None, f"has {len(row)} columns, its header has {len(header) + 1}")
        match = re.fullmatch(r"(.*?)\s*(?:\(([^()]*)\))?", row[0].strip())
        name, unit = (match[1], match[2]) if match else (row[0], None)
        block: dict[str, Any] = {"unit": unit or ""}
        for column, cell in zip(header, row[1:], strict=False):
            if cell.strip():
                block[column] = _cell(cell, f"{place} {column}")
        document[re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")] = block
    return read_aiperf(document, where)


def _cell(text: str, where: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        if re.search(r"\d", text):
            raise BadInput(where, text, "must be a number") from None
        return text


def _scale(block: dict[str, Any], where: str) -> float:
    unit = str(block.get("unit", ""))
    if unit.lower() not in TO_MS:
        raise BadInput(f"{where} unit", unit, f"must be a unit of time: {', '.join(TO_MS)}")
    return TO_MS[unit.lower()]


def _whole(document: dict[str, Any], key: str, where: str) -> int | None:
    value = number(section(document, key, where), "avg", f"{where} {key}")
    return None if value is None else round(value)


def _total(document: dict[str, Any], key: str, completed: float | int | None, where: str) -> int | None:
    block = section(document, key, where)
    total = number(block, "sum", f"{where} {key}")
    mean = number(block, "avg", f"{where} {key}")
    if total is None and mean is not None and completed is not None:
        total = mean * completed
    return None if total is None else round(total)


def _duration(document: dict[str, Any], figures: Figures, where: str) -> float:
    block = section(document, "benchmark_duration", where)
    value = number(block, "avg", f"{where} benchmark_duration")
    if value is not None:
        return value * _scale(block, f"{where} benchmark_duration") / 1e3
    completed, rate = figures["completed"], figures["request_throughput"]
    if completed and rate:
        return completed / rate
    raise BadInput(where, None, "lacks benchmark_duration, and request_count with request_throughput")
