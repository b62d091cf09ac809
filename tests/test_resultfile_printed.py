"""Printed reports: what stands above and within them, ours read back, and rates of two digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from sim.comparison.facts import RATE_WITHIN, load_of, pace_of
from sim.output.report import render
from sim.provenance import Note
from sim.results import BenchResult, Verdict
from sim.results_io.files import read_results
from tests.made_results import aggregates_of, pair

RUNS = {
    "engine": "vllm",
    "engine_version": "0.28.0",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "gpu": "H100-SXM-80GB",
    "gpu_count": 2,
}
LONG = "the load generator's event loop was 40 ms late at P99 (median TTFT 100 ms): the host was too-busy"
REASONS = (
    Note("warning", "client_lag", f"{LONG}, and its latencies contain that"),
    Note("warning", "failures", "7 of 200 requests failed (7 timeout)"),
)

REPORT = """Namespace(backend='vllm', seed=14, request_rate={exact}, max_concurrency=None, model='m')
============ Serving Benchmark Result ============
Successful requests:                     8
Failed requests:                         0
Request rate configured (RPS):           {printed}
Benchmark duration (s):                  13.67
Request throughput (req/s):              0.59
Mean TTFT (ms):                          1429.67
==================================================
"""


def reading(tmp_path: Path, text: str) -> BenchResult:
    path = tmp_path / "report.txt"
    path.write_text(text, encoding="utf-8")
    (found,) = read_results(path)
    return found


def measured(status: Literal["VALID", "INVALID"] = "INVALID") -> BenchResult:
    run = pair()[1]
    figures = {**run.aggregates, "completed": 193, "failed": 7, "failed_timeout": 7, "request_goodput": 4.5}
    return replace(
        run,
        tool="servecast bench",
        identity={**run.identity, **RUNS},
        aggregates={**figures, "goodput_attainment": 0.9},
        verdict=Verdict(status, REASONS),
    )


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("quote", ["", "> ", "# "])
def test_our_report_of_a_run_is_read_back(tmp_path: Path, quote: str, colour: bool) -> None:
    run = measured()
    text = "\n".join((quote + line).rstrip() for line in render(run, colour=colour).splitlines())
    back = reading(tmp_path, f"some log\n{text}\n")
    assert (back.origin, back.tool) == ("measured", "servecast bench")
    assert {key: back.identity[key] for key in RUNS} == RUNS
    assert back.verdict == run.verdict
    assert (back.aggregates["completed"], back.aggregates["failed"]) == (193, 7)
    assert back.aggregates["request_goodput"] == 4.5
    for key in ("mean_ttft_ms", "p99_tpot_ms", "output_throughput"):
        assert back.aggregates[key] == pytest.approx(run.aggregates[key], abs=0.006)
    assert load_of(back.identity) == (5.0, None)


def test_our_report_of_a_prediction_is_read_back(tmp_path: Path) -> None:
    far = Verdict("SUSPECT", (Note("warning", "step time", "9 of 10 steps: beyond the calibration"),))
    identity = {**RUNS, "gpu_count": 1, "engine_args": {"quantization": "fp8"}}
    ours = replace(pair()[0], identity=identity, verdict=far)
    back = reading(tmp_path, render(ours))
    assert (back.origin, back.tool, back.verdict) == ("predicted", "servecast predict", far)
    assert (back.identity["model"], back.identity["gpu"]) == (RUNS["model"], RUNS["gpu"])
    assert "gpu_count" not in back.identity


def test_a_verdict_that_the_figures_contradict_is_the_worse_one(tmp_path: Path) -> None:
    back = reading(tmp_path, render(measured("VALID")))
    assert back.verdict.status == "INVALID"
    assert "7 of 200" in back.verdict.reasons[0].text
    valid = replace(pair()[1], identity=RUNS)
    assert reading(tmp_path, render(valid)).verdict == Verdict("VALID")


def test_what_we_call_unknown_is_unknown(tmp_path: Path) -> None:
    partial = aggregates_of({"completed": 4, "duration": 3.0, "mean_ttft_ms": 50.0}, identity=RUNS)
    back = reading(tmp_path, render(partial))
    assert "failed" not in back.aggregates
    assert back.verdict.status == "SUSPECT"


def test_a_log_that_says_measured_makes_no_report_ours(tmp_path: Path) -> None:
    back = reading(tmp_path, "measured: 5 GB/s\n" + REPORT.format(exact="4.0", printed="4.00"))
    assert back.tool == "vllm bench serve"


@pytest.mark.parametrize(
    ("exact", "printed", "rate", "within"),
    [
        ("0.3333", "0.33", 0.3333, None),  # the printed one says no more
        ("None", "0.33", 0.33, 0.005),
        ("7.0", "0.33", 0.33, 0.005),  # of another run
        ("None", "4", 4.0, None),
        ("0.003", "0.00", 0.003, None),
        ("None", "0.00", None, 0.005),
    ],
)
def test_a_rate_of_two_digits_gives_way_to_an_exact_one(
    tmp_path: Path, exact: str, printed: str, rate: float | None, within: float | None
) -> None:
    identity = reading(tmp_path, REPORT.format(exact=exact, printed=printed)).identity
    assert load_of(identity) == (rate, None)
    assert identity.get(RATE_WITHIN) == within


def test_a_ramp_of_the_client_s_arguments_is_one(tmp_path: Path) -> None:
    text = REPORT.format(exact="inf", printed="").replace("Request rate configured (RPS):           \n", "")
    ramp = "ramp_up_strategy='linear', ramp_up_start_rps=1, ramp_up_end_rps=9, model="
    identity = reading(tmp_path, text.replace("model=", ramp)).identity
    assert pace_of(identity).ramp == ("linear", 1.0, 9.0)
    assert load_of(identity) == (None, None)


def test_the_settings_of_the_next_run_are_not_those_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    one, two = (REPORT.format(exact=rate, printed=f"{rate}.00") for rate in (4, 8))
    path.write_text(one + "Maximum request concurrency: 16\n" + two)
    assert [load_of(run.identity) for run in read_results(path)] == [(4.0, None), (8.0, 16)]
