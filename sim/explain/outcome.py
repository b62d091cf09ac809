"""What one simulation says of the questions that people tune by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sim.comparison.compare import figure
from sim.memory import request_bytes
from sim.planning.mechanism import queue_cause
from sim.planning.outcome import boil_down
from sim.results import BenchResult, RequestRecords
from sim.scenario import Scenario
from sim.simulate import SimResult, simulate
from sim.steptime.base import StepTimeModel

Goal = Literal["ttft", "tpot", "p99-ttft", "p99-tpot", "p99-itl", "throughput", "cost"]
# key in `Outcome.figures`, whether less is better, unit
GOALS: Mapping[Goal, tuple[str, bool, str]] = {
    "ttft": ("mean_ttft_ms", True, "ms"),
    "tpot": ("mean_tpot_ms", True, "ms"),
    "p99-ttft": ("p99_ttft_ms", True, "ms"),
    "p99-tpot": ("p99_tpot_ms", True, "ms"),
    "p99-itl": ("p99_itl_ms", True, "ms"),
    "throughput": ("output_throughput", False, "tok/s"),
    "cost": ("gpu_hours_per_1m_output", True, "GPU h per 1M output tokens"),
}
SHOWN = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run.

    Attributes:
        figures: `SHOWN`, `request_throughput`, and GPU hours per million output tokens; absent is unknown.
        kv_cache_tokens: the pool, as the engine would log it.
        request_tokens: prompt and output of the largest request [tokens].
        fits: how many such requests the pool holds to their end.
        peak_running, peak_waiting: in the engine, over the run.
        demand: requests in flight that the load asks for at its height.
        preemptions: over the run.
        queue_share: part of mean TTFT (as a client measures it) that is queue, 0..1; None if unknown.
        parts: mean parts of TTFT [ms].
        cause: what kept requests waiting, in words.
        gpus: of the deployment.
        state: of `sim.figures.regime.Regime`.
        result: the whole prediction.
    """

    figures: Mapping[str, float]
    kv_cache_tokens: int
    request_tokens: int
    fits: int
    peak_running: int
    peak_waiting: int
    demand: int
    preemptions: int
    queue_share: float | None
    parts: Mapping[str, float]
    cause: str
    gpus: int
    state: str
    result: BenchResult

    def value(self, goal: Goal) -> float | None:
        """The figure of a goal."""
        return self.figures.get(GOALS[goal][0])


def evaluate(scenario: Scenario, step_time: StepTimeModel | None = None) -> Outcome:
    """Simulate a scenario.

    Raises:
        BadInput: the engine would refuse it.
        EngineStuck: the engine would hang or die.
    """
    outcome = simulate(scenario, step_time=step_time)
    result = outcome.result
    assert result.records is not None
    figures = {key: float(v) for key in SHOWN if (v := figure(result, key)) is not None}
    for key in ("request_throughput", "total_token_throughput"):
        if (v := result.aggregates.get(key)) is not None:
            figures[key] = float(v)
    rate = figures.get("output_throughput")
    if rate:
        figures["gpu_hours_per_1m_output"] = scenario.gpu_count * 1e6 / rate / 3600.0
    tokens = _largest_request(result.records)
    running, waiting = _peaks(result)
    return Outcome(
        figures=figures,
        kv_cache_tokens=outcome.account.kv_cache_tokens,
        request_tokens=tokens,
        fits=_fits(scenario, outcome, tokens),
        peak_running=running,
        peak_waiting=waiting,
        demand=_demand(scenario, result),
        preemptions=int(result.server.get("num_preemptions") or 0),
        queue_share=_queue_share(result),
        parts=_parts(result),
        cause=queue_cause(boil_down(scenario, outcome)).text,
        gpus=scenario.gpu_count,
        state=str(result.extra["regime"]["state"]),
        result=result,
    )


def _largest_request(records: RequestRecords) -> int:
    ok = np.array([status == "ok" for status in records.status], dtype=bool)
    if not ok.any():
        return 0
    return int((records.prompt_len[ok] + records.output_len[ok]).max())


def _fits(scenario: Scenario, outcome: SimResult, tokens: int) -> int:
    """Requests of `tokens` that the pool holds side by side, in whole blocks."""
    if tokens <= 0:
        return 0
    account = outcome.account
    size = request_bytes(scenario, -(-tokens // account.block_size) * account.block_size)
    return account.kv_pool_bytes // size if size else 0


def _peaks(result: BenchResult) -> tuple[int, int]:
    series = result.series
    if series is None or not len(series.time):
        return 0, 0
    return int(series.running.max()), int(series.waiting.max())


def _demand(scenario: Scenario, result: BenchResult) -> int:
    spec = scenario.workload
    total = len(result.records) if result.records is not None else 0
    if spec.closed_loop:
        return min(spec.max_concurrency or total, total)
    return int(result.aggregates.get("max_concurrent_requests") or 0)


def _parts(result: BenchResult) -> Mapping[str, float]:
    """Mean parts of TTFT as the client measures it [ms]; a wait in the client is none of them."""
    parts = result.extra.get("ttft_parts_ms", {})
    return {name: float(v) for name, v in parts.items() if name != "client_wait" and v is not None}


def _queue_share(result: BenchResult) -> float | None:
    parts = _parts(result)
    total = sum(parts.values())
    return parts.get("queue", 0.0) / total if total > 0 else None
