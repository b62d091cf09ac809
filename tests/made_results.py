"""Results made up for tests: requests with known latencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sim.figures.metrics import run_duration, success_verdict, summarise
from sim.results import BenchResult, Floats, RequestRecords
from sim.workload.spec import WorkloadSpec


def records_of(
    sent: Floats,
    ttft: Floats,
    tpot: Floats,
    output_len: int = 11,
    queue: Floats | None = None,
    prefill: Floats | None = None,
    scheduled: Floats | None = None,
) -> RequestRecords:
    """Requests with even gaps between their tokens; all arrays of shape (n,), in seconds."""
    n = len(sent)
    unknown = np.full(n, np.nan)
    first = sent + ttft
    return RequestRecords(
        request_id=tuple(str(i) for i in range(n)),
        scheduled=sent if scheduled is None else scheduled,
        sent=sent,
        first_token=first,
        last_token=first + tpot * (output_len - 1),
        prompt_len=np.full(n, 100),
        output_len=np.full(n, output_len),
        cached_tokens=np.full(n, -1),
        status=("ok",) * n,
        itls=np.repeat(tpot, output_len - 1),
        itl_offsets=np.arange(n + 1) * (output_len - 1),
        queue=unknown if queue is None else queue,
        prefill=unknown if prefill is None else prefill,
        preemptions=np.full(n, -1),
    )


def result_of(
    records: RequestRecords,
    origin: Literal["predicted", "measured"] = "measured",
    rate: float = math.inf,
    cap: int | None = None,
    identity: Mapping[str, Any] | None = None,
) -> BenchResult:
    """A result with these records."""
    spec = WorkloadSpec(request_rate=rate, max_concurrency=cap)
    duration = run_duration(records)
    figures = summarise(records, spec, duration)
    load = {"request_rate": "inf" if math.isinf(rate) else rate, "max_concurrency": cap}
    return BenchResult(
        origin=origin,
        tool="a test",
        identity={**load, **(identity or {})},
        duration=duration,
        aggregates=figures,
        records=records,
        verdict=success_verdict(figures),
    )


def aggregates_of(
    figures: Mapping[str, float],
    origin: Literal["predicted", "measured"] = "measured",
    identity: Mapping[str, Any] | None = None,
) -> BenchResult:
    """A result of which only figures are known."""
    return BenchResult(origin, "a test", dict(identity or {}), figures.get("duration", 100.0), dict(figures))


def poisson_load(n: int, rate: float, seed: int) -> Floats:
    """Send times of a Poisson process."""
    times: Floats = np.random.default_rng(seed).exponential(1.0 / rate, n).cumsum()
    return times - times[0]


SMALL_SCENARIO = """
serve: vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 4096
bench: vllm bench serve --random-input-len 128 --random-output-len 8 --max-concurrency 2 --num-prompts 20
gpu: H100
"""

SUBJECT = {"engine": "vllm", "model": "Qwen/Qwen3-14B", "gpu": "H100-SXM-80GB", "engine_version": "0.28.0"}


def noisy(base: float, n: int, seed: int, share: float = 0.1) -> Floats:
    """Times about `base` that differ by a share."""
    values: Floats = base * np.random.default_rng(seed).lognormal(0.0, share, n)
    return values


def pair(
    ttft: float = 1.0, tpot: float = 1.0, n: int = 200, rate: float = 5.0
) -> tuple[BenchResult, BenchResult]:
    """A measured open-loop run, and a prediction that is off by these factors."""
    sent = poisson_load(n, rate, 1)
    first, gap = noisy(0.1, n, 2), noisy(0.02, n, 3)
    measured = result_of(records_of(sent, first, gap), rate=rate)
    predicted = result_of(records_of(sent, first * ttft, gap * tpot), "predicted", rate=rate)
    return predicted, measured
