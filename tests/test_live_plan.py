"""The validation on a real CPU engine, without the engine: its loads, and how it judges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from bench.serial import subjects_of
from calibration.design import PlannedRun, design
from calibration.evidence import StepRun
from calibration.live.plan import (
    CALIBRATION_SECONDS,
    CONCURRENCIES,
    Load,
    first_pass_seconds,
    in_turn,
    loads,
    next_prior,
    settings,
)
from calibration.live.report import (
    Outcome,
    Pair,
    Row,
    SettingOutcome,
    Steps,
    pooled_noise,
    preemptions_of,
    report_json,
    report_text,
    step_errors,
)
from calibration.live.run import SettingRun, Validation, main, source_of
from calibration.parameters import default_prior, space_of
from calibration.result import FitResult
from calibration.session import Calibration
from sim.engines.base import StepShape
from sim.errors import ServecastError
from sim.hardware.gpus import find_gpu
from sim.results import BenchResult
from sim.simulate import roofline, simulate
from sim.steptime.roofline import ValidRange
from sim.workload.generate import generate
from sim.workload.spec import RandomDataset, WorkloadSpec
from tests.made_results import poisson_load, records_of, result_of
from tests.real.dummy_model import HALF_B, write


def test_both_cache_states_and_a_starved_pool() -> None:
    flags = {setting.name: " ".join(setting.flags) for setting in settings()}
    assert flags["prefix-off"] == "--no-enable-prefix-caching"
    assert flags["prefix-on"] == "--enable-prefix-caching"
    assert "--num-gpu-blocks-override" in flags["kv-starved"]
    assert sum(setting.share for setting in settings()) == pytest.approx(1.0)
    assert CALIBRATION_SECONDS <= 300.0


def test_the_first_setting_has_every_load() -> None:
    found = loads(settings()[0], capacity=2.0, mixed_capacity=1.0, repeats=3)
    specs = {load.label: load.spec for load in found}
    assert [specs[f"c{n}"].max_concurrency for n in CONCURRENCIES] == [1, 2, 4, 8, 16]
    assert specs["poisson-50"].request_rate == pytest.approx(1.0)
    assert specs["poisson-85"].request_rate == pytest.approx(1.7)
    assert all(spec.num_prompts >= 8 for spec in specs.values())
    mixed = specs["mixed-lengths"].dataset
    assert isinstance(mixed, RandomDataset)
    assert mixed.range_ratio >= 0.8
    assert len({load.name for load in found}) == len(found) == 3 * len(specs)
    # Repeats come round after round, so that a change of the host's speed does not look like a load's.
    assert [load.repeat for load in found] == sorted(load.repeat for load in found)


def test_repeats_send_the_same_requests_unless_the_cache_would_know_them() -> None:
    for setting in settings():
        seeds = [load.spec.seed for load in loads(setting, 2.0, 1.0, 3) if load.label == "poisson-50"]
        assert len(set(seeds)) == (3 if setting.name == "prefix-on" else 1)


def test_a_calibration_is_spread_over_the_loads() -> None:
    found = loads(settings()[2], 2.0, 1.0, 3)
    spec = WorkloadSpec(num_prompts=4, seed=1000)
    first = [
        PlannedRun(label, "", replace(spec, seed=seed), 2.0)
        for label, seed in (("pilot", 1), ("a", 2), ("b", 3))
    ]
    order = in_turn(first, found, 11.0, price)
    assert [run for run in order if isinstance(run, Load)] == found
    again = [run for run in order if isinstance(run, PlannedRun)]
    assert [run.label for run in again] == ["a-2", "b-2", "a-3", "b-3", "a-4"]  # 11 s are enough for five
    assert len({run.spec.seed for run in [*first, *again]}) == 8
    # Twelve loads, five runs among them: the host of the last ones is seen, too.
    assert [found.index(order[order.index(run) + 1]) for run in again] == [0, 2, 4, 7, 9]
    assert in_turn(first, found, 1.0, price) == found


def price(spec: WorkloadSpec) -> float:
    return 0.5 * (spec.max_concurrency or 1)


def test_decodes_come_again_with_long_contexts_and_in_other_batches() -> None:
    found = loads(settings()[0], 2.0, 1.0, 1)
    spec = WorkloadSpec(dataset=RandomDataset(64, 64, 0.0), num_prompts=16, max_concurrency=16, seed=1)
    first = [PlannedRun("decode-16", "", spec, 10.0), PlannedRun("idle-short", "", WorkloadSpec(), 1.0)]
    order = [run for run in in_turn(first, found, 1e3, price) if isinstance(run, PlannedRun)]
    decodes = [run for run in order if run.label.startswith("decode")]
    assert [run.label for run in decodes] == [
        "decode-16-by-4long-2",
        "decode-16-by-8-3",
        "decode-16-by-16-4",
        "decode-16-by-4long-5",
    ]
    assert [run.spec.max_concurrency for run in decodes] == [4, 8, 16, 4]
    assert [run.spec.num_prompts for run in decodes] == [4, 8, 16, 4]
    assert [getattr(run.spec.dataset, "input_len", 0) for run in decodes] == [512, 64, 64, 512]
    assert [run.seconds for run in decodes] == [2.0, 4.0, 8.0, 2.0]
    assert len({run.label for run in order}) == len(order)


def test_the_first_pass_leaves_time_for_more_but_is_not_too_short() -> None:
    assert first_pass_seconds(150.0) == pytest.approx(50.0)
    assert first_pass_seconds(40.0) == pytest.approx(20.0)
    assert first_pass_seconds(10.0) == pytest.approx(10.0)


def test_no_two_loads_share_prompts() -> None:
    for setting in settings():
        found = loads(setting, 2.0, 1.0, 1)
        assert len({load.spec.seed for load in found}) == len(found)
        assert max(load.spec.seed for load in found) < 1000  # the calibration's begin there


def test_the_starved_pool_preempts(tmp_path: Path) -> None:
    model = write(tmp_path / "half", HALF_B)
    starved = settings()[2]
    scenario = source_of(starved, model).build()
    load = next(load for load in loads(starved, 1.0, 1.0, 1) if load.label == "c16")
    outcome = simulate(replace(scenario, workload=load.spec))
    assert outcome.usage.preemptions > 0
    roomy = source_of(settings()[0], model).build()
    assert simulate(replace(roomy, workload=load.spec)).usage.preemptions == 0


def test_a_quick_validation_is_a_part_of_the_whole() -> None:
    for long, short in zip(settings(), settings(quick=True), strict=True):
        assert set(short.concurrencies) <= set(long.concurrencies)
        requests = [
            sum(len(generate(load.spec)) for load in loads(setting, 2.0, 1.0, 1, quick=quick))
            for setting, quick in ((long, False), (short, True))
        ]
        assert requests[1] < 0.7 * requests[0]


def test_what_one_start_taught_is_believed_of_the_next() -> None:
    prior = default_prior(find_gpu("cpu")[0])
    space = space_of(prior, ("weight_bandwidth", "gemm_flops"))
    fitted = FitResult(
        efficiencies=replace(prior.efficiencies, weight_bandwidth=0.3),
        space=space,
        vector=space.start(),
        covariance=np.diag([0.01**2, 0.4**2]),
        status={},
        structure=0.01,
        residuals={},
        rows=1,
        rounds=1,
        valid=ValidRange(),
    )
    found = next_prior(fitted)
    assert found.efficiencies.weight_bandwidth == 0.3
    # What was pinned may change by a tenth between starts; the rest is known no better than before.
    assert found.deviations["weight_bandwidth"] == pytest.approx(0.1, abs=0.01)
    assert found.deviations["gemm_flops"] == pytest.approx(0.41, abs=0.02)
    assert found.deviations["gemm_flops"] < prior.deviations["gemm_flops"]


def runs(scales: list[float], label: str = "c4", truth: float = 1.0) -> list[Pair]:
    sent = poisson_load(40, 2.0, 1)
    base = records_of(sent, np.full(40, 0.5), np.full(40, 0.1))
    predicted = result_of(base, "predicted", rate=2.0)
    out = []
    for i, scale in enumerate(scales):
        measured = records_of(sent, np.full(40, 0.5 * scale * truth), np.full(40, 0.1 * scale * truth))
        out.append((Load(label, WorkloadSpec(), i), predicted, result_of(measured, rate=2.0)))
    return out


def test_repeat_noise_is_pooled_over_loads_and_free_of_bias() -> None:
    pairs = runs([0.98, 1.02]) + runs([0.95, 1.05], "c8", truth=1.3)
    expected = np.sqrt((np.var(np.log([0.98, 1.02]), ddof=1) + np.var(np.log([0.95, 1.05]), ddof=1)) / 2)
    assert pooled_noise("mean_tpot_ms", pairs) == pytest.approx(expected)
    assert pooled_noise("mean_tpot_ms", runs([1.0])) is None


def row(error: float, noise: float | None = None, bound: float | None = 0.05) -> Row:
    return Row("s", "c4", "mean_tpot_ms", 100.0 * (1 + error), 100.0, 60, 3, noise, bound)


@pytest.mark.parametrize(
    ("error", "noise", "verdict"),
    [
        (0.04, None, "ok"),
        (-0.049, 0.0, "ok"),
        (0.06, None, "MISSED"),
        (0.06, 0.02, "MISSED"),
        (0.06, 0.031, "ok (noise)"),
        (-0.09, 0.04, "MISSED"),
    ],
)
def test_the_bound_or_twice_the_noise(error: float, noise: float | None, verdict: str) -> None:
    assert row(error, noise).verdict == verdict


def outcome(rows: list[Row], mape: float) -> Outcome:
    steps = Steps(100, mape, 10, mape, mape)
    return Outcome(
        (SettingOutcome("s", 120.0, 5, {}, {}, tuple(rows), steps, {"c16": (3.0, 4.0)}, ("c4-1: slow",)),)
    )


def test_a_host_that_drifts_is_told_from_a_model_that_errs(tmp_path: Path) -> None:
    (setting, *_) = settings()
    scenario = source_of(setting, write(tmp_path / "half", HALF_B)).build()
    model = roofline(scenario)
    shapes = tuple(StepShape("mixed", 0, 0, n, 0, 0, 200 * n, n) for n in (1, 2, 4, 8) for _ in range(25))
    priced = np.array([model.host_before(s) + model.gpu(s) + model.host_after(s) for s in shapes])
    start = np.arange(100.0)
    slower = np.where(start < 50, 1.0, 1.3)
    steps = StepRun("steps", scenario, shapes, priced * slower, start)
    fitted = SimpleNamespace(fit=SimpleNamespace(efficiencies=model.efficiencies))
    found = step_errors(cast(Calibration, fitted), steps, [(0.0, 49.5), (50.0, 99.5)])
    assert found.mape == pytest.approx(0.5 * (1 - 1 / 1.3))
    assert found.drift == pytest.approx((1.0, 1.3))
    assert found.steady_mape == pytest.approx(0.0, abs=1e-12)
    # All steps of one size ran at one speed here: the host's change shows between sizes alone.
    assert found.alike_mape == pytest.approx(0.0, abs=1e-12)
    by_turns = np.where(np.arange(100) % 5 < 3, 1.0, 1.3)
    found = step_errors(cast(Calibration, fitted), replace(steps, seconds=priced * by_turns))
    assert found.alike_mape == pytest.approx(0.4 * (1 - 1 / 1.3))


def test_one_missed_bound_fails_the_whole() -> None:
    assert outcome([row(0.01)], 0.04).passed
    assert not outcome([row(0.01), row(0.2)], 0.04).passed
    assert not outcome([row(0.01)], 0.06).passed
    assert outcome([row(0.01), row(0.5, bound=None)], 0.04).passed


def test_the_report_has_errors_noise_and_counts() -> None:
    text = report_text(outcome([row(0.01, 0.02), row(0.2, 0.01)], 0.04))
    assert "| c4 | 60 | 3 | mean_tpot_ms | 101.0 | 100.0 | +1.0% | ±2.0% | 5.0% | ok |" in text
    assert "MISSED" in text
    assert "1 of 2 figures within their bounds" in text
    assert "3.0 predicted, 4.0 measured" in text
    assert "said of the measurement: c4-1: slow" in text
    told = report_json(outcome([row(0.2)], 0.04))
    assert told["passed"] is False
    assert told["settings"][0]["rows"][0]["verdict"] == "MISSED"


def test_step_times_that_lack_are_a_miss_and_are_counted() -> None:
    whole = outcome([row(0.01)], 0.04)
    (setting,) = whole.settings
    lacking = Outcome((setting, replace(setting, steps=None)))
    assert whole.passed
    assert not lacking.passed
    text = report_text(lacking)
    assert "step times of these loads: none were recorded, bound 5%: MISSED" in text
    assert "2 of 2 figures within their bounds, and the step times of 1 of 2 settings" in text
    assert "the step times of 0 of 1 settings" in report_text(outcome([row(0.01)], 0.06))


def test_preemptions_that_nobody_counted_are_not_shown_as_none() -> None:
    ((load, predicted, measured),) = runs([1.0])
    counted = replace(predicted, server={"num_preemptions": 3})
    uncounted = [(load, counted, replace(measured, server={"num_preemptions": n})) for n in (None, None)]
    some = [*uncounted, (load, counted, replace(measured, server={"num_preemptions": 4}))]
    assert preemptions_of(uncounted) == {"c4": (3.0, None)}
    assert preemptions_of(some) == {"c4": (3.0, 4.0)}
    (setting,) = outcome([row(0.01)], 0.04).settings
    text = report_text(Outcome((replace(setting, preemptions=preemptions_of(uncounted)),)))
    assert "preemptions per run of c4: 3.0 predicted, unknown measured" in text


def test_a_host_that_behaves_like_the_model_keeps_every_bound(tmp_path: Path) -> None:
    """The whole way, with a simulated host in the place of the engine: two thirds of the speed believed."""
    (setting, *_) = settings(quick=True)
    (subject,) = subjects_of([source_of(setting, write(tmp_path / "half", HALF_B))])
    prior = default_prior(subject.scenario.gpu)
    truth = replace(
        prior.efficiencies,
        weight_bandwidth=0.33,
        gemm_flops=0.4,
        kv_bandwidth=0.3,
        attention_flops=0.15,
        front_request=0.001,
        output_delay=0.012,
    )
    how = Validation(("vllm",), tmp_path / "half", tmp_path / "out", repeats=2, quick=True)
    seconds = setting.share * CALIBRATION_SECONDS
    plan = design(subject.scenario, budget=first_pass_seconds(seconds), prior=prior)
    run = SettingRun(setting, subject, plan, prior, how, seconds)
    results: dict[str, BenchResult] = {}
    while points := run.more(results):
        for point in points:
            spec = replace(point.spec, num_warmups=0)
            scenario = replace(subject.scenario, workload=spec, seed=spec.seed)
            made = simulate(scenario, step_time=replace(roofline(scenario), efficiencies=truth)).result
            results[point.label] = replace(made, origin="measured", tool="servecast bench", extra={})
    found, _ = run.outcome(results)
    # No probe timed the steps of this host: that alone is missing.
    assert not found.passed
    assert replace(found, steps=Steps(100, 0.04, 10, 0.04, 0.04)).passed
    assert {row.load for row in found.rows} == {
        "c1",
        "c4",
        "c16",
        "poisson-50",
        "poisson-85",
        "mixed-lengths",
    }
    assert max(abs(row.error) for row in found.rows if row.key == "mean_tpot_ms") < 0.03
    # No load that is judged was in the fit.
    assert not {load.name for load in run.loads} & {r.label for r in run.director.sent}
    assert found.calibration_seconds <= seconds
    # The calibration is repeated between the loads, with other requests.
    assert run.sent.index("c1-1") < run.sent.index("idle-short-3") < run.sent.index(run.loads[-1].name)
    seeds = [r.spec.seed for r in run.director.sent if r.label.startswith("idle-short")]
    assert len(set(seeds)) == len(seeds) > 1


@pytest.mark.parametrize(
    ("waiting", "results", "says"),
    [
        (None, {}, "calibration did not come to its end"),
        (["one more"], {"c4-1": "OK"}, "before all loads were sent"),
        ([], {}, "before all loads were sent"),
        ([], {"c4-1": "INVALID"}, "c4-1 is INVALID"),
    ],
)
def test_a_setting_of_which_something_is_missing_has_no_outcome(
    waiting: list[str] | None, results: dict[str, str], says: str
) -> None:
    ((load, _, measured),) = runs([1.0])
    setting_run = object.__new__(SettingRun)  # no engine behind it
    setting_run.setting, setting_run.loads = settings()[0], [load]
    vars(setting_run)["_waiting"] = waiting
    seen = {
        name: replace(measured, verdict=replace(measured.verdict, status=status))
        for name, status in results.items()
    }
    with pytest.raises(ServecastError, match=says):
        setting_run.outcome(seen)


def test_no_repeats_measure_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--program", "vllm", "--model", "m", "--repeats", "0"])
    assert ended.value.code == 2
    assert "--repeats: 0: must be at least 1" in capsys.readouterr().err
