import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.workload.arrivals import arrival_stats, check_arrivals, ramp_rates, vllm_arrivals
from sim.workload.generate import generate
from sim.workload.spec import RandomDataset, WorkloadSpec

INF = math.inf


def times(seed: int = 0, n: int = 200, **settings_: object) -> np.ndarray:
    spec = WorkloadSpec(
        dataset=RandomDataset(input_len=100, output_len=37, range_ratio=0.3), num_prompts=n, seed=seed
    )
    return np.array([r.arrival for r in generate(replace(spec, **settings_))])


# Send times that vllm bench serve 0.28.0 plans (its get_request under a fake clock, numpy's global seed).
@pytest.mark.parametrize(
    ("seed", "burstiness", "expected"),
    [
        (7, 1.0, [0.011376874175600795, 0.22833974255266815, 0.31103696659033203]),
        (0, 0.25, [0.040808522131286794, 0.10018837787905462, 0.11467944052738435]),
    ],
)
def test_the_send_times_are_those_of_the_real_client(seed, burstiness, expected):
    got = times(seed, request_rate=7.5, burstiness=burstiness)
    assert got[:3].tolist() == expected
    assert got[-1] == pytest.approx(200 / 7.5, rel=1e-15)


def test_ramp_ups_are_those_of_the_real_client_and_are_not_stretched():
    linear = times(7, n=500, ramp_up=("linear", 2, 17))
    assert linear[:2].tolist() == [0.039688454760722254, 0.7853602993854356]
    assert linear[-1] == 70.34090745160124
    exponential = times(7, n=500, ramp_up=("exponential", 2, 17), burstiness=0.5)
    assert exponential[:2].tolist() == [0.005822955027179585, 0.19720307291387576]
    assert exponential[-1] == 105.73842812929897


def test_sglang_sends_the_first_at_once_and_does_not_stretch():
    spec = WorkloadSpec(
        dataset=RandomDataset(input_len=100, output_len=30, style="sglang", vocab_size=5000),
        num_prompts=200,
        seed=42,
        request_rate=5.0,
        client="sglang",
    )
    got = [r.arrival for r in generate(spec)]
    assert got[:3] == [0.0, 0.09487588137878677, 0.24773040633622634]
    assert got[-1] == 40.9858473622211


@pytest.mark.parametrize(
    ("rate", "burstiness", "mean_gap", "cv"),
    [(10.0, 1.0, 0.1, 1.0), (10.0, 0.25, 0.1, 2.0), (10.0, 4.0, 0.1, 0.5), (10.0, INF, 0.1, 0.0)],
)
def test_burstiness_is_the_shape_of_gamma_gaps(rate, burstiness, mean_gap, cv):
    sent = times(1, n=20_000, request_rate=rate, burstiness=burstiness)
    stats = arrival_stats(sent)
    assert 1.0 / stats.rate == pytest.approx(mean_gap, rel=2e-3)
    assert stats.cv == pytest.approx(cv, abs=0.03 * max(cv, 1e-6) + 1e-9)


def test_infinite_rate_sends_all_at_once():
    assert times(request_rate=INF).tolist() == [0.0] * 200
    assert arrival_stats(times(request_rate=INF)).rate is None


def test_infinite_burstiness_is_a_constant_gap_and_the_first_request_waits_its_own():
    assert times(n=5, request_rate=2.0, burstiness=INF).tolist() == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_impossible_burstiness_is_refused(burstiness):
    with pytest.raises(BadInput, match="--burstiness"):
        times(request_rate=10.0, burstiness=burstiness)


@pytest.mark.parametrize("rate", [0.0, -2.0, math.nan])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(BadInput, match="--request-rate"):
        times(request_rate=rate)


@pytest.mark.parametrize(
    ("flag", "settings_"),
    [
        ("--num-prompts", {"num_prompts": 0}),
        ("--max-concurrency", {"max_concurrency": 0}),
        ("--num-warmups", {"num_warmups": -1}),
        ("--seed", {"seed": -1}),
        ("--rate-scale", {"rate_scale": 0.0}),
        ("--duration", {"duration": math.nan}),
        ("--request-rate", {"request_rate": 3.0, "ramp_up": ("linear", 1.0, 2.0)}),
        ("--ramp-up-start-rps", {"ramp_up": ("linear", 0.0, 2.0)}),
        ("--ramp-up-end-rps", {"ramp_up": ("linear", 1.0, INF)}),
        ("--ramp-up-start-rps", {"ramp_up": ("exponential", 3.0, 2.0)}),
        ("--burstiness", {"client": "sglang", "request_rate": 3.0, "burstiness": 2.0}),
        ("--ramp-up-strategy", {"client": "sglang", "ramp_up": ("linear", 1.0, 2.0)}),
    ],
)
def test_bad_settings_name_their_flag(flag, settings_):
    with pytest.raises(BadInput, match=flag):
        generate(WorkloadSpec(**settings_))


def test_sending_stops_after_the_duration():
    sent = times(n=100, request_rate=10.0, duration=4.0)
    assert 20 < len(sent) < 60
    assert sent[-1] <= 4.0
    with pytest.raises(BadInput, match="--duration"):
        times(n=100, request_rate=10.0, duration=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    rate=st.floats(0.01, 1e4),
    burstiness=st.one_of(st.floats(0.05, 50.0), st.just(INF)),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_schedule_ascends_and_ends_at_n_over_rate(n, rate, burstiness, seed):
    check_arrivals(rate, burstiness, None, "vllm")
    got = vllm_arrivals(n, rate, burstiness, None, np.random.RandomState(seed))
    assert len(got) == n
    assert np.all(np.diff(got) >= 0)
    assert got[0] >= 0
    assert got[-1] == pytest.approx(n / rate, rel=1e-9) or got[-1] == 0


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["linear", "exponential"]), st.integers(2, 200), st.floats(0.1, 10), st.floats(1, 20))
def test_a_ramp_goes_from_its_start_to_its_end(kind, n, start, factor):
    rates = ramp_rates(n, (kind, start, start * factor))
    assert rates[0] == pytest.approx(start)
    assert rates[-1] == pytest.approx(start * factor)
    assert np.all(np.diff(rates) >= -1e-9)


def test_one_seed_is_one_load():
    spec = WorkloadSpec(num_prompts=50, request_rate=5.0, seed=3)
    assert generate(spec) == generate(spec)
    assert generate(spec) == generate(WorkloadSpec(num_prompts=50, request_rate=5.0), seed=3)
    assert generate(spec) != generate(spec, seed=4)


@pytest.mark.parametrize(
    ("flag", "settings_"),
    [
        ("--request-rate", {"request_rate": 1e-308}),
        ("--request-rate", {"request_rate": 1e-6}),
        ("--burstiness", {"request_rate": 1e-4, "burstiness": 1e-308}),
        ("--ramp-up-start-rps", {"ramp_up": ("linear", 1e-9, 1e-9)}),
    ],
)
def test_loads_that_last_for_years_are_refused(flag, settings_):
    with pytest.raises(BadInput, match=flag):
        times(**settings_)


@pytest.mark.parametrize("field", ["num_prompts", "num_warmups"])
def test_more_requests_than_memory_holds_are_refused(field):
    with pytest.raises(BadInput, match=f"--{field.replace('_', '-')}: .* at most 10,000,000"):
        generate(WorkloadSpec(**{field: 10**12}))
