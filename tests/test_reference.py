"""The published RTX 5090 run: what the fits reach, and that the shipped default is the second of them."""

import pytest

from calibration.reference_fit import (
    errors,
    fit_concurrency_1,
    fit_with_median_itl,
    predict,
    published,
)
from calibration.reference_sglang import changes, series
from sim.hardware.gpus import find_gpu
from sim.reference import rtx5090_reference
from sim.simulate import roofline
from sim.steptime.defaults import default_efficiencies
from sim.steptime.roofline import RooflineModel

REPORTED_ONLY = {"median_itl_ms", "num_preemptions"}


@pytest.fixture(scope="module")
def first():
    return fit_concurrency_1()


@pytest.fixture(scope="module")
def default():
    return default_efficiencies(find_gpu("RTX-5090")[0]).efficiencies


def errors_at_128(efficiencies, *settings):
    run = published(rtx5090_reference(), 128)
    return errors(predict(efficiencies, 128, run.num_prompts, settings), run)


def test_the_figures_that_ship_are_consistent():
    for run in rtx5090_reference().runs:
        figures = run.figures
        if "duration" in figures:
            tokens = figures["total_output_tokens"]
            assert tokens / figures["duration"] == pytest.approx(figures["output_throughput"], rel=1e-3)
            assert tokens == 512 * run.num_prompts


def test_concurrency_1_alone_predicts_concurrency_128(first):
    found = errors_at_128(first.efficiencies)
    assert len(found) >= 15
    assert {key: e for key, e in found.items() if key not in REPORTED_ONLY and abs(e) > 12.0} == {}


def test_the_median_itl_brings_everything_else_into_line(default):
    found = errors_at_128(default)
    assert abs(found["p99_itl_ms"]) < 5.0
    bounded = {key: e for key, e in found.items() if key not in {*REPORTED_ONLY, "p99_itl_ms"}}
    assert {key: e for key, e in bounded.items() if abs(e) > 3.0} == {}


def test_the_default_is_the_second_fit(first, default):
    second = fit_with_median_itl(first)
    assert max(abs(r) for r in second.residuals) < 2e-3
    for name in second.free:
        assert getattr(default, name) == pytest.approx(getattr(second.efficiencies, name), rel=5e-3)
    assert default.mixed_kv_reread == pytest.approx(second.efficiencies.mixed_kv_reread, abs=5e-3)


def test_concurrency_1_is_met(default):
    run = published(rtx5090_reference(), 1)
    found = errors(predict(default, 1, run.num_prompts), run)
    for key in ("duration", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert abs(found[key]) < 0.5


def test_other_budgets_miss_the_itl_p99_by_far(default):
    p99 = {
        budget: errors_at_128(default, f"max-num-batched-tokens={budget}")["p99_itl_ms"]
        for budget in (2048, 4096, 16384)
    }
    assert p99[2048] < -60
    assert -60 < p99[4096] < -35
    assert p99[16384] > 80


def test_sglang_at_concurrency_1_follows_from_the_same_gpu(first):
    run = published(rtx5090_reference(), 1, "sglang")
    simulated = predict(first.efficiencies, 1, run.num_prompts, engine="sglang")["median_ttft_ms"]
    assert simulated == pytest.approx(run.figures["median_ttft_ms"], rel=0.08)


def test_a_cache_left_warm_explains_why_throughput_falls_from_64_to_128(first):
    cold = changes(series(first.efficiencies, "sglang", (), warm=False))
    warm = changes(series(first.efficiencies, "sglang", (), warm=True))
    told = rtx5090_reference().sglang_throughput_change_percent
    assert abs(warm[2] - told["64 to 128"]) < 6.0
    assert cold[2] - told["64 to 128"] > 6.0


def test_the_plain_command_uses_the_fit(default):
    model = roofline(rtx5090_reference().scenario("vllm", 1, 20))
    assert isinstance(model, RooflineModel)
    assert model.efficiencies == default
    assert model.source == "defaults of RTX 5090"
