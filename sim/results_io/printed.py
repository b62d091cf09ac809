"""The report that `vllm bench serve`, `sglang.bench_serving` or servecast prints, pasted into a text file."""

from __future__ import annotations

import math
import re
from typing import Any

from sim.comparison.facts import RAMP, RATE_WITHIN, same_rate
from sim.errors import BadInput
from sim.figures.metrics import Figures, success_verdict
from sim.results import BenchResult
from sim.results_io.fields import TO_MS, check_figures
from sim.results_io.printed_head import read_head, worse
from sim.results_io.said import with_trace

HEADER = re.compile(r"=+ *Serving Benchmark Result *=+")
# One figure: a label with perhaps a unit in brackets, a colon, one value. What stands in front is a
# log's, what follows in a column of its own ours: an interval, a sample, kinds of failures, a share.
_LINE = re.compile(
    r"(?P<label>[A-Z][A-Za-z0-9. -]*?)\s*(?:\((?P<unit>[^)]*)\))?\s*:\s+(?P<value>\S+)"
    r"(?:\s+(?:90%|n = |\d+ [a-z]|[\d.]+% of ).*)?\s*$"
)
_CLOSING = re.compile(r"^.{0,20}={50}\s*$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LATENCY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?) (ttft|tpot|itl|e2el|e2e latency|e2e)")
_ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|[\w.+-]+)")
_METRICS = {"e2e latency": "e2el", "e2e": "e2el"}

UNKNOWN = "unknown"  # as we print what nobody knows
ROUNDED_RATE = "request rate configured"  # printed with two digits
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
ARGUMENTS = (
    "model",
    "dataset_name",
    "seed",
    "num_prompts",
    "request_rate",
    "max_concurrency",
    "burstiness",
    *RAMP,
)


def looks_printed(text: str) -> bool:
    """Whether a text holds a printed report."""
    return HEADER.search(text) is not None or re.search(r"Mean TTFT \(\w+\):", text) is not None


def read_printed(text: str, where: str) -> list[BenchResult]:
    """Every report of a text, in order; what stands between them (logs, arguments) tells the settings.

    Raises:
        BadInput: naming file, line and figure; a report without its essential lines is called truncated.
    """
    text = _COLOUR.sub("", text)
    headers = [match.start() for match in HEADER.finditer(text)]
    starts = headers or [0]
    ends = [*starts[1:], len(text)]
    results = []
    before = 0
    for start, end in zip(starts, ends, strict=True):
        line = text.count("\n", 0, start) + 1
        closing = _CLOSING.search(text[start:end], 60) if headers else None
        stop = start + closing.end() if closing else end
        # What follows the closing line may be the next run's settings.
        results.append(_one(text[before:start], text[start:stop], where, line))
        before = stop
    return results


def _one(preamble: str, body: str, where: str, first_line: int) -> BenchResult:
    figures: Figures = {}
    identity: dict[str, Any] = _arguments(preamble)
    for line in preamble.splitlines():
        match = _LINE.search(line.split(" (Poisson")[0])
        if match and match["label"].lower() in SETTINGS:
            _set(match, identity)
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
    verdict = success_verdict(figures)
    head = read_head(preamble)
    if head is not None:
        tool = "servecast predict" if head.origin == "predicted" else "servecast bench"
        identity = {**head.identity, **identity}
        verdict = worse(verdict, head.verdict)
    return BenchResult(
        origin="measured" if head is None else head.origin,
        tool=tool,
        identity=with_trace(identity),
        duration=float(figures["duration"] or 0.0),
        aggregates=figures,
        verdict=verdict,
        extra={"format": "printed report"},
    )


def _take(match: re.Match[str], figures: Figures, identity: dict[str, Any], where: str) -> None:
    label, unit = match["label"].lower(), (match["unit"] or "").lower()
    if match["value"] == UNKNOWN:
        return
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
        _set(match, identity)


def _set(match: re.Match[str], identity: dict[str, Any]) -> None:
    """Take a setting over; a rate that the report rounds gives way to one that is told in full."""
    label, value = match["label"].lower(), _setting(match["value"])
    key, decimals = SETTINGS[label], match["value"].partition(".")[2]
    if label != ROUNDED_RATE or not isinstance(value, float) or not decimals.isdigit():
        identity[key] = value
        return
    within = {RATE_WITHIN: 0.5 * 10.0 ** -len(decimals)}
    told = identity.get(key)
    if isinstance(told, int | float) and same_rate(told, value, within):
        return
    identity.update(within)
    if value:
        identity[key] = value
    else:  # less than a digit shows; nobody knows how much
        identity.pop(key, None)


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
