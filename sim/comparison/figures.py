"""The figures of a result by their `vllm bench serve` keys: one rule for both sides of a comparison."""

from __future__ import annotations

import re

import numpy as np

from sim.figures.metrics import latencies
from sim.figures.quantiles import supported
from sim.results import BenchResult, Floats, RequestRecords

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
LATENCY_KEYS = tuple(f"{stat}_{metric}_ms" for metric in METRICS for stat in STATISTICS)
_LATENCY = re.compile(r"(mean|median|std|p(\d+(?:\.\d+)?))_(ttft|tpot|itl|e2el)_ms")


def samples(records: RequestRecords, metric: str) -> Floats:
    """Per-request (or, for "itl", per-token) samples of a metric in seconds, completed requests only.

    TPOT leaves out outputs of one token; see `sim.figures.metrics.latencies`.
    """
    found = latencies(records)
    if metric == "tpot":
        return found.tpot[~np.isnan(found.tpot)]
    values: Floats = getattr(found, metric)
    return values


def split_key(key: str) -> tuple[str, str, float | None] | None:
    """(statistic, metric, percentile) of a latency key, e.g. ("p99", "ttft", 99.0); None for other keys.

    The percentile of a mean or a standard deviation is None, that of a median 50.
    """
    parts = _LATENCY.fullmatch(key)
    if parts is None:
        return None
    level = 50.0 if parts[1] == "median" else None if parts[2] is None else float(parts[2])
    return parts[1], parts[3], level


def statistic(values: Floats, name: str, level: float | None) -> float:
    """A mean, standard deviation or percentile of values of shape (n,), n > 0."""
    if level is not None:
        return float(np.percentile(values, level))
    return float(values.std() if name == "std" else values.mean())


def figure(result: BenchResult, key: str) -> float | None:
    """One figure by its `vllm bench serve` key, computed from records where the key was not reported.

    `p50_x_ms` and `median_x_ms` are the same figure.
    """
    if key == "duration":
        return result.duration
    for name in (key, key.replace("median_", "p50_"), key.replace("p50_", "median_")):
        value = result.aggregates.get(name)
        if value is not None:
            return float(value)
    return from_records(result, key)


def from_records(result: BenchResult, key: str) -> float | None:
    """A latency by our own definition; None without records or for other keys."""
    parts = split_key(key)
    if result.records is None or parts is None:
        return None
    values = samples(result.records, parts[1])
    return statistic(values, parts[0], parts[2]) * 1e3 if len(values) else None


def both(predicted: BenchResult, measured: BenchResult, key: str) -> tuple[float | None, float | None]:
    """A figure of both sides; where both have records, by one definition whatever the tools reported."""
    if predicted.records is not None and measured.records is not None:
        ours, theirs = from_records(predicted, key), from_records(measured, key)
        if ours is not None and theirs is not None:
            return ours, theirs
    return figure(predicted, key), figure(measured, key)


def beyond_sample(key: str, n: int | None) -> bool:
    """Whether a percentile lies beyond what `n` samples can tell; unknown n: no."""
    parts = split_key(key)
    return n is not None and parts is not None and parts[2] is not None and not supported(n, parts[2])


def same_requests(predicted: RequestRecords, measured: RequestRecords) -> bool:
    """Whether row i of both sides is the same request: equal lengths, and completed on both sides."""
    if len(predicted) != len(measured) or predicted.status != measured.status:
        return False
    return bool(
        np.array_equal(predicted.prompt_len, measured.prompt_len)
        and np.array_equal(predicted.output_len, measured.output_len)
    )
