"""Stable, saturated, capped, or too short to tell: by requests, and by figures alone."""

from __future__ import annotations

import pytest

from sim.build import build_scenario
from sim.comparison.regimes import regime_of_figures
from sim.simulate import simulate

SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 1000 --random-output-len 200 "
    "--request-rate {rate} --num-prompts {prompts} {more}"
)


def state(rate: float, prompts: int, more: str = "") -> str:
    bench = BENCH.format(rate=rate, prompts=prompts, more=more)
    found = simulate(build_scenario(serve=SERVE, bench=bench, gpu="L40S")).result.extra["regime"]
    return str(found["state"])


@pytest.mark.parametrize(
    ("rate", "prompts", "expected"),
    [(3.0, 300, "stable"), (15.0, 100, "unknown"), (15.0, 400, "saturated")],
)
def test_a_load_is_stable_only_once_its_requests_have_turned_over(
    rate: float, prompts: int, expected: str
) -> None:
    assert state(rate, prompts) == expected


def test_behind_a_cap_the_client_waits_and_not_the_server() -> None:
    assert state(6.0, 200, "--max-concurrency 16") == "capped"
    assert state(1.0, 100, "--max-concurrency 64") == "stable"


def figures(
    completed: int, duration: float, ttft: float = 100.0, tpot: float = 25.0
) -> dict[str, float | int | None]:
    return {
        "completed": completed,
        "duration": duration,
        "total_output_tokens": 200 * completed,
        "mean_ttft_ms": ttft,
        "mean_tpot_ms": tpot,
    }


def test_the_last_request_s_own_time_is_no_lack_of_capacity() -> None:
    # 3 requests/s for 100 s or 33 s, and 5 s for the last answer.
    assert regime_of_figures(3.0, figures(300, 104.9)).state == "stable"
    assert regime_of_figures(3.0, figures(100, 38.2)).state == "stable"
    assert regime_of_figures(3.0, figures(300, 150.0, ttft=20_000.0)).state == "saturated"


def test_figures_of_a_batch_that_was_still_filling_tell_nothing() -> None:
    assert regime_of_figures(15.0, figures(100, 16.0, tpot=50.0)).state == "unknown"
    assert regime_of_figures(3.0, {"completed": 300}).state == "unknown"
