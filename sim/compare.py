"""Set results side by side, metric by metric: predicted against measured, or run against run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.errors import NotComparable
from sim.provenance import Note
from sim.results import BenchResult, Floats, RequestRecords

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
# Amounts of work that must agree before any timing may be compared, with the relative slack allowed.
WORK = {"completed": 0.0, "total_input_tokens": 0.01, "total_output_tokens": 0.01}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One figure on both sides. `error` is predicted / measured - 1, None where a side is unknown or 0."""

    key: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Signed relative error of the prediction."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction beside one measured run."""

    predicted: BenchResult
    measured: BenchResult
    rows: tuple[MetricRow, ...]
    notes: tuple[Note, ...]

    @property
    def worst(self) -> MetricRow | None:
        """The row with the largest absolute error: errors that cancel in another metric do not hide."""
        scored = [row for row in self.rows if row.error is not None]
        return max(scored, key=lambda row: abs(row.error or 0.0)) if scored else None


def samples(records: RequestRecords, metric: str) -> Floats:
    """Per-request (or, for "itl", per-token) samples of a metric in seconds, completed requests only.

    TPOT leaves out outputs of one token, as `vllm bench serve` does (vllm/benchmarks/serve.py, 0.28).
    """
    done = np.array([status == "ok" for status in records.status], dtype=bool)
    if metric == "itl":
        owner = np.repeat(np.arange(len(records)), np.diff(records.itl_offsets))
        return records.itls[done[owner]] if len(owner) else records.itls
    ttft: Floats = records.first_token - records.sent
    e2el: Floats = records.last_token - records.sent
    if metric in ("ttft", "e2el"):
        chosen: Floats = (ttft if metric == "ttft" else e2el)[done]
        return chosen
    many = done & (records.output_len > 1)
    tpot: Floats = (e2el[many] - ttft[many]) / (records.output_len[many] - 1)
    return tpot


def figure(result: BenchResult, key: str) -> float | None:
    """One figure by its `vllm bench serve` key, computed from records where the key was not reported.

    `p50_x_ms` and `median_x_ms` are the same figure.
    """
    for name in (key, key.replace("median_", "p50_"), key.replace("p50_", "median_")):
        value = result.aggregates.get(name)
        if value is not None:
            return float(value)
    parts = re.fullmatch(r"(mean|median|std|p(\d+(?:\.\d+)?))_(ttft|tpot|itl|e2el)_ms", key)
    if result.records is None or parts is None:
        return None
    values = samples(result.records, parts[3])
    if not len(values):
        return None
    if parts[1] == "mean":
        return float(values.mean() * 1e3)
    if parts[1] == "std":
        return float(values.std() * 1e3)
    return float(np.percentile(values, float(parts[2] or 50)) * 1e3)


def work_differences(predicted: BenchResult, measured: BenchResult) -> list[str]:
    """Say where two results did not do the same work (requests, tokens); empty if they did."""
    out = []
    for key, slack in WORK.items():
        ours, theirs = predicted.aggregates.get(key), measured.aggregates.get(key)
        if ours is None or theirs is None:
            continue
        if abs(ours - theirs) > slack * abs(theirs):
            out.append(f"{key} is {ours:,} predicted but {theirs:,} measured")
    return out


def compare(predicted: BenchResult, measured: BenchResult, *, force: bool = False) -> Comparison:
    """Set a prediction beside a measured run.

    Rows are the figures that both sides can state. Raises NotComparable if the two did not do the same
    work or the measured run is INVALID, unless `force` is set: then it is a note.
    """
    problems = work_differences(predicted, measured)
    if measured.verdict.status == "INVALID":
        problems += [f"the measured run is INVALID ({reason.text})" for reason in measured.verdict.reasons]
    if problems and not force:
        raise NotComparable(f"{measured.tool}: not comparable: " + "; ".join(problems))
    notes = [Note("warning", "comparable", text) for text in problems]
    keys = ["duration", *THROUGHPUTS] + [f"{stat}_{metric}_ms" for metric in METRICS for stat in STATISTICS]
    rows = []
    for key in keys:
        theirs = measured.duration if key == "duration" else figure(measured, key)
        ours = predicted.duration if key == "duration" else figure(predicted, key)
        if ours is not None and theirs is not None:
            rows.append(MetricRow(key, ours, theirs))
    for key in ("num_preemptions", "kv_cache_tokens", "max_kv_usage"):
        ours, theirs = predicted.server.get(key), measured.server.get(key)
        if theirs is not None:
            rows.append(
                MetricRow(key, None if ours is None else float(ours), float(theirs)),
            )
    completed = measured.aggregates.get("completed")
    if completed is not None and completed < 100:
        notes.append(
            Note(
                "warning",
                "p99",
                f"P99 of {int(completed)} requests is close to the maximum; read it with care",
            )
        )
    return Comparison(predicted, measured, tuple(rows), tuple(notes))


def exceeds(comparisons: Sequence[Comparison], threshold: float) -> list[str]:
    """Names of the figures whose absolute error is above `threshold` (0.05 is 5 %)."""
    return [
        f"{row.key} {row.error:+.1%}"
        for comparison in comparisons
        for row in comparison.rows
        if row.error is not None and abs(row.error) > threshold
    ]
