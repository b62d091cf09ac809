"""The lines that engines print of themselves while they serve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogSample:
    """One periodic line: what the engine says of its own load; None where the line does not say.

    Attributes:
        clock: the time that the line carries, as printed (no date rules are applied).
        source: "Engine 000" of vLLM, "TP0" of SGLang, or "".
        running, waiting: requests.
        kv_usage: share of the KV pool in use, 0..1.
        hit_rate: prefix-cache hit rate, 0..1 (vLLM: over its last 1000 requests; SGLang: of this batch).
        preemptions: vLLM, since the last line.
        prompt_throughput, generation_throughput: [tokens/s].
    """

    clock: str
    source: str
    running: int | None
    waiting: int | None
    kv_usage: float | None
    hit_rate: float | None
    preemptions: int | None = None
    prompt_throughput: float | None = None
    generation_throughput: float | None = None


def read_samples(text: str) -> Iterator[LogSample]:
    """Yield the periodic lines of vLLM (v1/metrics/loggers.py) and SGLang (scheduler metrics) in a log."""
    for line in text.splitlines():
        if "Avg prompt throughput:" in line or "Avg generation throughput:" in line:
            yield _vllm(line)
        elif "Decode batch" in line or "Prefill batch" in line:
            yield _sglang(line)


_VLLM_CLOCK = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_SGLANG_CLOCK = re.compile(r"^\[([\d-]+ [\d:]+)\s*([A-Z]+\d[^\]]*)?\]")


def _vllm(line: str) -> LogSample:
    clock = _VLLM_CLOCK.search(line)
    source = re.search(r"\b(Engine \d+):", line)
    usage = _float(line, r"KV cache usage: ([\d.]+)%")
    hits = _float(line, r"Prefix cache hit rate: (?:GPU: )?([\d.]+)%")
    waiting = _int(line, r"(?:Waiting|Pending): (\d+) reqs")
    return LogSample(
        clock=clock[1] if clock else "",
        source=source[1] if source else "",
        running=_int(line, r"Running: (\d+) reqs"),
        waiting=waiting,
        kv_usage=None if usage is None else usage / 100,
        hit_rate=None if hits is None else hits / 100,
        preemptions=_int(line, r"Preemptions: (\d+)"),
        prompt_throughput=_float(line, r"Avg prompt throughput: ([\d.]+)"),
        generation_throughput=_float(line, r"Avg generation throughput: ([\d.]+)"),
    )


def _sglang(line: str) -> LogSample:
    head = _SGLANG_CLOCK.match(line)
    cached, new = _int(line, r"#cached-token: (\d+)"), _int(line, r"#new-token: (\d+)")
    prompt = None if cached is None or new is None else cached + new
    return LogSample(
        clock=head[1] if head else "",
        source=(head[2] or "") if head else "",
        running=_int(line, r"#running-req: (\d+)"),
        waiting=_int(line, r"#queue-req: (\d+)"),
        kv_usage=_float(line, r"\btoken usage: ([\d.]+)"),
        hit_rate=cached / prompt if cached is not None and prompt else None,
        prompt_throughput=_float(line, r"input throughput \(token/s\): ([\d.]+)"),
        generation_throughput=_float(line, r"gen throughput \(token/s\): ([\d.]+)"),
    )


def _int(line: str, pattern: str) -> int | None:
    match = re.search(pattern, line)
    return int(match[1]) if match else None


def _float(line: str, pattern: str) -> float | None:
    match = re.search(pattern, line)
    return float(match[1]) if match else None
