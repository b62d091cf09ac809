"""A plan through the bench, on a program that answers as an engine does: to the fit and its check."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.launch import LaunchOptions
from bench.run import BenchOptions, run_engine
from bench.serial import subjects_of
from bench.session import Reporter, Subject
from bench.sweep import Point
from calibration.design import Plan, PlannedRun, design
from calibration.parameters import default_prior
from calibration.plan_run import summary
from calibration.session import Director, calibrate, evidence_of, measure, observed
from sim.build import read_source
from sim.errors import NotComparable
from sim.provenance import Note
from sim.results import BenchResult
from sim.workload.spec import RandomDataset, WorkloadSpec
from tests.made_results import records_of, result_of
from tests.real.dummy_model import write

FAKE = Path(__file__).parent / "fakes" / "fake_engine.py"


pytestmark = pytest.mark.usefixtures("any_machine")


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    model = write(tmp_path / "tiny")
    source = read_source(
        serve=f"vllm serve {model} --served-model-name m --load-format dummy --max-model-len 1024 "
        "--max-num-seqs 8 --num-gpu-blocks-override 100",
        bench="vllm bench serve --random-input-len 64 --random-output-len 8 --request-rate 5",
        gpu="cpu",
    )
    return subjects_of([source])[0]


def options(tmp_path: Path, **env: str) -> BenchOptions:
    launch = LaunchOptions(kind="process", program=(sys.executable, "-S", str(FAKE)), env=env)
    return BenchOptions(launch, tmp_path / "out")


def small(
    label: str, count: int, seconds: float, rate: float | None = None, held: bool = False
) -> PlannedRun:
    spec = WorkloadSpec(dataset=RandomDataset(32, 6, 0.5), num_prompts=count, percentiles=(50.0,))
    spec = replace(spec, max_concurrency=1) if rate is None else replace(spec, request_rate=rate)
    return PlannedRun(label, "a test", spec, seconds, held_out=held)


def plan_of(*runs: PlannedRun, budget: float = 30.0) -> Plan:
    return Plan(runs, budget, 10.0, {})


def test_a_plan_is_measured_fitted_and_checked_on_what_it_held_out(subject: Subject, tmp_path: Path) -> None:
    prior = default_prior(subject.scenario.gpu)
    plan = plan_of(
        small("idle-short", 12, 0.2), small("decode-1", 12, 0.2), small("mixed-45", 30, 1.0, 30.0, True)
    )
    measured = measure(subject, plan, options(tmp_path, FAKE_TOKEN_S="0.004"), None, Reporter(), prior)
    labels = [run.label for run in measured.runs]
    # The program is slower than believed: a few requests show it, and what follows is planned anew.
    assert labels[0] == "pilot"
    assert labels[-2:] == ["mixed-45", "mixed-70"]
    assert [run.label for run in measured.runs if run.held_out] == ["mixed-45"]
    assert all(path.exists() for path in measured.files.values())
    assert len({run.spec.seed for run in measured.runs}) == len(measured.runs)
    # The pool is the one that the engine reported.
    assert measured.scenario.observed.kv_cache_tokens == 1600
    done = calibrate(measured, prior)
    assert set(done.held_out) == {"mixed-45"}
    assert len(done.evidence) == len(measured.runs)
    figure = next(row for row in done.held_out["mixed-45"].rows if row.key == "mean_tpot_ms")
    # The program takes 4 ms per token at least, whatever the batch; the belief was 1 ms.
    assert figure.predicted is not None
    assert figure.predicted > 2.5


def test_evidence_can_leave_a_run_out(subject: Subject, tmp_path: Path) -> None:
    plan = plan_of(small("idle-short", 6, 0.1), small("decode-1", 6, 0.1))
    measured = measure(subject, plan, options(tmp_path), None, Reporter())
    whole = {Path(item.name).name for item in evidence_of(measured)}
    less = {Path(item.name).name for item in evidence_of(measured, without="pilot")}
    assert whole - less == {"vllm-pilot.json"}


def took(seconds: float, count: int = 10) -> BenchResult:
    sent = np.arange(count) * 0.1
    made = result_of(records_of(sent, np.full(count, 0.05), np.full(count, 0.01)), cap=1)
    return replace(made, duration=seconds)


def test_an_engine_slower_than_simulated_gets_fewer_requests(subject: Subject) -> None:
    runs = [small(label, 20, 5.0) for label in ("idle-short", "decode-1", "decode-4")]
    director = Director(subject.scenario, plan_of(*runs, budget=15.0))
    (first,) = director.more({})
    assert (first.label, first.spec.num_prompts) == ("pilot", 4)
    results = {"pilot": took(1.1)}
    (second,) = director.more(results)
    assert (second.label, second.spec.num_prompts) == ("idle-short", 20)
    # It took twice as long: of the time for isolated runs 8 s are left, and the next would take 9.
    results["idle-short"] = took(9.9)
    (third,) = director.more(results)
    assert third.label == "decode-1"
    assert 15 <= third.spec.num_prompts < 20
    results["decode-1"] = took(18.0)
    assert director.more(results) == []


def test_an_engine_far_from_what_was_believed_gets_a_plan_anew(subject: Subject) -> None:
    prior = default_prior(subject.scenario.gpu)
    plan = design(subject.scenario, budget=60.0, prior=prior)
    counts = {}
    for pace in (1.0, 8.0):
        director = Director(subject.scenario, plan, prior)
        (first,) = director.more({})
        results = {"pilot": took(pace * director.sent[0].seconds, first.spec.num_prompts)}
        (second,) = director.more(results)
        counts[pace] = second.spec.num_prompts
        expected = director.sent[1].seconds
        if pace == 8.0:
            # Times are those of the slow engine now.
            assert (
                expected
                > 3.0 * plan.runs[0].seconds * second.spec.num_prompts / plan.runs[0].spec.num_prompts
            )
    assert counts[8.0] <= counts[1.0]


def test_what_died_or_is_invalid_is_not_fitted(subject: Subject, tmp_path: Path) -> None:
    plan = plan_of(small("idle-short", 6, 0.1), small("decode-1", 6, 0.1))
    with pytest.raises(NotComparable, match="cannot calibrate"):
        measure(
            subject,
            plan,
            options(tmp_path, FAKE_MODE="exits_after", FAKE_REQUESTS="9"),
            None,
            Reporter(),
        )


def test_a_run_that_goes_on_keeps_the_steps_of_the_start_before(subject: Subject, tmp_path: Path) -> None:
    first = small("first", 3, 1.0)
    how = options(tmp_path)
    how = replace(how, launch=replace(how.launch, probe=True))
    steps = how.result_dir / "vllm.steps.jsonl"
    steps.parent.mkdir()
    whole = '{"ev": "step", "probe_ms": 0.1, "dt_ms": 2.0}\n'
    steps.write_text(whole + '{"ev": "st')
    run_engine(subject, [Point(first.label, first.spec)], replace(how, resume=True), None, Reporter())
    assert steps.read_text() == whole  # a record cut by a kill is none
    second = Point("second", first.spec)
    run_engine(subject, [second], how, None, Reporter())
    assert not steps.exists()  # without --resume all is measured anew


def test_what_came_to_nothing_is_told(subject: Subject, tmp_path: Path) -> None:
    plan = plan_of(small("idle-short", 6, 0.1), small("decode-1", 6, 0.1), budget=1.0)
    measured = measure(subject, plan, options(tmp_path), None, Reporter())
    runs = tuple(replace(run, held_out=False) for run in measured.runs)
    notes = (Note("warning", "mixed-45", "left out: too few requests"),)
    text = summary(calibrate(replace(measured, runs=runs, notes=notes)))
    assert "warning: mixed-45: left out: too few requests" in text
    assert "held out: nothing" in text
    assert "small_sample" not in text  # a fit needs no percentiles


def test_the_engine_s_own_pool_wins(subject: Subject) -> None:
    seen = observed(
        subject.scenario, replace(took(1.0), server={"kv_cache_tokens": 5000, "num_gpu_blocks": 40})
    )
    assert (seen.observed.kv_cache_tokens, seen.observed.num_gpu_blocks) == (5000, 40)
    again = observed(seen, took(1.0))
    assert again.observed == seen.observed


def test_the_bench_asks_for_more_on_the_same_engine(subject: Subject, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    asked: list[list[str]] = []

    def more(results: object) -> list[Point]:
        assert isinstance(results, dict)
        asked.append(list(results))
        run = small(f"round-{len(asked)}", 3, 1.0)
        return [Point(run.label, run.spec)] if len(asked) < 3 else []

    first = small("first", 3, 1.0)
    points = [Point(first.label, first.spec)]
    results = run_engine(subject, points, options(tmp_path, FAKE_PIDS=str(pids)), None, Reporter(), more=more)
    assert len(results) == 3
    assert asked == [["first"], ["first", "round-1"], ["first", "round-1", "round-2"]]
    assert len(pids.read_text().split()) == 1


def test_a_design_is_what_the_session_runs(subject: Subject) -> None:
    plan = design(subject.scenario, budget=20.0, prior=default_prior(subject.scenario.gpu))
    director = Director(subject.scenario, plan)
    director.more({})
    pilot = director.sent[0]
    (point,) = director.more({"pilot": took(pilot.seconds, pilot.spec.num_prompts)})
    assert point.spec == plan.runs[0].spec
