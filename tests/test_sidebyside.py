"""Several predictions side by side: what the table says beside the figures, and pictures without an axis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.build import build_scenario
from sim.comparison.loads import sent_requests
from sim.output.plots import plot_curves
from sim.output.sidebyside import Curve, Point, labels, render_curves, sweep
from sim.provenance import Note
from sim.results import BenchResult
from sim.scenario import Scenario


def result(state: str, **figures: float) -> BenchResult:
    return BenchResult(
        origin="predicted",
        tool="servecast predict",
        identity={},
        duration=10.0,
        aggregates={"output_throughput": 100.0, "p99_ttft_ms": 50.0, **figures},
        notes=(Note("assumed", "step time", "assumed for Ampere"), Note("info", "--gpu", "quiet")),
        extra={"regime": {"state": state}},
    )


def test_the_table_says_units_saturation_and_what_is_assumed() -> None:
    text = render_curves([Curve("a", (Point(None, result("saturated")),))])
    assert "E2E in ms" in text
    assert "saturated: TTFT and E2E grow" in text
    assert "assumed: step time" in text
    assert "quiet" not in text
    assert "saturated" not in render_curves([Curve("a", (Point(None, result("stable")),))])


def test_loads_without_a_cap_are_drawn_as_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = [Curve("a", (Point(None, result("stable")),)), Curve("b", (Point(None, result("stable")),))]
    bars = []
    monkeypatch.setattr(
        "sim.output.plots.draw_bars", lambda axis, drawn, key, name: bars.append((key, len(drawn)))
    )
    plot_curves(curves, tmp_path / "two.svg")
    assert bars == [("p99_ttft_ms", 2), ("output_throughput", 2)]
    monkeypatch.undo()
    plot_curves(curves, tmp_path / "two.svg")
    assert "<svg" in (tmp_path / "two.svg").read_text()


def test_the_number_of_requests_is_what_a_report_counts() -> None:
    assert sent_requests(result("stable", completed=7, failed=2)) == 9
    assert sent_requests(result("stable", completed=7)) == 7
    assert sent_requests(result("stable")) is None


def test_scenarios_that_differ_are_told_apart_by_name() -> None:
    base = "vllm serve Qwen/Qwen3-32B -tp 2"
    flags = (
        "",
        "--quantization fp8",
        "--max-num-seqs 64",
        "--max-num-seqs 32 --no-enable-prefix-caching",
        "",
    )
    names = labels(
        [build_scenario(serve=f"{base} {more}", bench="vllm bench serve", gpu="H100") for more in flags]
    )
    assert len(set(names)) == len(flags)
    assert "Qwen3-32B fp8 · 2 x H100" in names[1]
    assert names[2].endswith("--max-num-seqs 64")
    assert "--no-enable-prefix-caching" in names[3]


def test_the_table_says_how_wide_the_intervals_are() -> None:
    intervals = {"level": 0.9, "figures": {"mean_tpot_ms": (18.0, 23.0)}}
    known = replace(result("stable", mean_tpot_ms=20.0), extra={"intervals": intervals})
    (row,) = [line for line in render_curves([Curve("a", (Point(8, known),))]).splitlines() if "±" in line]
    assert row.split() == ["90", "%", "±15%"]


def test_a_load_with_shared_prefixes_keeps_its_prompts_at_every_concurrency() -> None:
    bench = "python -m sglang.bench_serving --dataset-name generated-shared-prefix --gsp-num-groups 64"
    scenario = build_scenario(serve="vllm serve Qwen/Qwen3-8B", bench=bench, gpu="H100")
    asked: list[int] = []

    def predicted(one: Scenario) -> BenchResult:
        asked.append(one.workload.num_prompts)
        return result("stable")

    sweep(scenario, (1, 16), predicted)
    few = replace(scenario, workload=replace(scenario.workload, num_prompts=10))
    sweep(few, (1,), predicted)
    plain = build_scenario(serve="vllm serve Qwen/Qwen3-8B", bench="vllm bench serve", gpu="H100")
    sweep(plain, (1, 64), predicted)
    sweep(plain, (1, 64), predicted, scale_prompts=False)
    assert asked == [1024, 1024, 64, 20, 128, 1000, 1000]
