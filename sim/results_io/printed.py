"""The report that `vllm bench serve` or `sglang.bench_serving` prints, pasted into a text file."""

from __future__ import annotations

import math
import re
from typing import Any

from sim.errors import BadInput
from sim.figures.metrics import Figures, success_verdict
from sim.results import BenchResult
from sim.results_io.fields import TO_MS, check_figures
from sim.results_io.said import with_trace

HEADER = re.compile(r"=+ *Serving Benchmark Result *=+")
# One figure: a label with perhaps a unit in brackets, a colon, one value. What stands in front is a
# log's, what follows in a column of its own an interval of a prediction.
_LINE = re.compile(
    r"(?P<label>[A-Z][A-Za-z0-9. -]*?)\s*(?:\((?P<unit>[^)]*)\))?\s*:\s+(?P<value>\S+)"
    r"(?:\s+(?:90%|n = ).*)?\s*$"
)
_PREDICTED = re.compile(r"^predicted: ", re.MULTILINE)
_LATENCY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?) (ttft|tpot|itl|e2el|e2e latency|e2e)")
_ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|[\w.+-]+)")
_METRICS = {"e2e latency": "e2el", "e2e": "e2el"}

COUNTS = {
    "successful requests": "completed",
    "failed requests": "failed",
    "total input tokens": "total_input_tokens",
    "total generated tokens": "total_output_tokens",
    "peak concurrent requests": "max_concurrent_requests",
}
RATES = {
    "request throughput": "request_throughput",
    "request goodput": "request_goodput",
    "output token throughput": "output_throughput",
    "peak output token throughput": "max_output_tokens_per_s",
    "total token throughput": "total_token_throughput",
    "total throughput": "total_token_throughput",
}
SETTINGS = {
    "maximum request concurrency": "max_concurrency",
    "max request concurrency": "max_concurrency",
    "request rate configured": "request_rate",
    "traffic request rate": "request_rate",
    "burstiness factor": "burstiness",
    "backend": "backend",
}
ARGUMENTS = ("model", "dataset_name", "seed", "num_prompts", "request_rate", "max_concurrency", "burstiness")


def looks_printed(text: str) -> bool:
    """Whether a text holds a printed report."""
    return HEADER.search(text) is not None or re.search(r"Mean TTFT \(\w+\):", text) is not None


def read_printed(text: str, where: str) -> list[BenchResult]:
    """Every report of a text, in order; what stands between them (logs, arguments) tells the settings.

    Raises:
        BadInput: naming file, line and figure; a report without its essential lines is called truncated.
    """
    starts = [m.start() for m in HEADER.finditer(text)] or [0]
    ends = [*starts[1:], len(text)]
    results = []
    before = 0
    for start, end in zip(starts, ends, strict=True):
        line = text.count("\n", 0, start) + 1
        results.append(_one(text[before:start], text[start:end], where, line))
        closing = re.search(r"^.{0,20}={50}\s*$", text[start:end][60:], re.MULTILINE)
        before = start + 60 + closing.end() if closing else end
    return results


def _one(preamble: str, body: str, where: str, first_line: int) -> BenchResult:
    figures: Figures = {}
    identity: dict[str, Any] = _arguments(preamble)
    for line in preamble.splitlines():
        match = _LINE.search(line.split(" (Poisson")[0])
        if match and match["label"].lower() in SETTINGS:
            identity[SETTINGS[match["label"].lower()]] = _setting(match["value"])
    for offset, line in enumerate(body.splitlines()):
        match = _LINE.search(line)
        if match:
            _take(match, figures, identity, f"{where} line {first_line + offset}")
    for key, label in (("completed", "Successful requests"), ("duration", "Benchmark duration (s)")):
        if key not in figures:
            raise BadInput(where, None, f'the report lacks the line "{label}:"; is it truncated?')
    if not any(key.endswith("_ms") for key in figures):
        raise BadInput(where, None, "the report has no latencies; is it truncated?")
    check_figures(figures, where)
    sglang = "backend" in identity or "End-to-End Latency" in body
    tool = "sglang.bench_serving" if sglang else "vllm bench serve"
    predicted = _PREDICTED.search(preamble) is not None
    return BenchResult(
        origin="predicted" if predicted else "measured",
        tool="servecast predict" if predicted else tool,
        identity=with_trace(identity),
        duration=float(figures["duration"] or 0.0),
        aggregates=figures,
        verdict=success_verdict(figures),
        extra={"format": "printed report"},
    )


def _take(match: re.Match[str], figures: Figures, identity: dict[str, Any], where: str) -> None:
    label, unit = match["label"].lower(), (match["unit"] or "").lower()
    latency = _LATENCY.fullmatch(label)
    if latency:
        if unit not in TO_MS:
            raise BadInput(f"{where} {match['label']}", match["unit"], "is not a unit of time")
        statistic, metric = latency[1], _METRICS.get(latency[2], latency[2])
        figures[f"{statistic}_{metric}_ms"] = _number(match["value"], match["label"], where) * TO_MS[unit]
    elif label == "benchmark duration":
        if unit not in TO_MS:
            raise BadInput(f"{where} {match['label']}", match["unit"], "is not a unit of time")
        figures["duration"] = _number(match["value"], match["label"], where) * TO_MS[unit] / 1e3
    elif label in COUNTS and not unit:
        figures[COUNTS[label]] = int(_number(match["value"], match["label"], where))
    elif label in RATES:
        figures[RATES[label]] = _number(match["value"], match["label"], where)
    elif label in SETTINGS:
        identity[SETTINGS[label]] = _setting(match["value"])


def _number(text: str, label: str, where: str) -> float:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise BadInput(f"{where} {label}", text, "must be a number, finite and not negative")
    return value


def _setting(text: str) -> int | float | str | None:
    """A setting as a number where it is one; "None" and "not" (set) are no setting."""
    if text in ("None", "not"):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _arguments(preamble: str) -> dict[str, Any]:
    """What a client's printed `Namespace(...)` tells of the run."""
    place = preamble.rfind("Namespace(")
    if place < 0:
        return {}
    line = preamble[place:].split("\n", 1)[0]
    found = {key: value.strip("'") for key, value in _ARGUMENT.findall(line)}
    return {key: _setting(found[key]) for key in ARGUMENTS if _setting(found.get(key, "None")) is not None}
