"""What the choice of requests explains: resampling, distances, equivalence; and where an error comes from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sim.comparison.intervals import error_interval
from sim.comparison.noise import Noise, mean_error_share
from sim.comparison.sampling import block_length, distance, equivalence, log_ratio_spread, resampled
from sim.comparison.sources import error_sources
from sim.figures.intervals import repeat_noise
from sim.results import Floats
from tests.made_results import aggregates_of, poisson_load, records_of, result_of

KEYS = ("mean_ttft_ms", "p90_ttft_ms", "mean_itl_ms", "p99_itl_ms")


def draw(n: int, seed: int, spread: float = 0.3) -> Floats:
    values: Floats = 0.1 * np.random.default_rng(seed).lognormal(0.0, spread, n)
    return values


def autocorrelated(n: int, seed: int, keep: float) -> Floats:
    rng = np.random.default_rng(seed)
    values = np.zeros(n)
    for i in range(1, n):
        values[i] = keep * values[i - 1] + rng.normal()
    return 1.0 + 0.05 * values


def test_unpaired_resampling_finds_the_standard_error() -> None:
    n = 400
    a, b = draw(n, 1), draw(n, 2)
    sent = np.arange(n) * 1.0
    sides = [records_of(sent, ttft, np.full(n, 0.01)) for ttft in (a, b)]
    other = records_of(sent, b, np.full(n, 0.01), output_len=12)  # other requests: nothing to pair
    expected = math.sqrt(a.var() / n / a.mean() ** 2 + b.var() / n / b.mean() ** 2)
    found = log_ratio_spread(sides[0], other, KEYS)
    assert found["mean_ttft_ms"] == pytest.approx(expected, rel=0.2)
    assert set(found) == set(KEYS)


def test_what_the_same_requests_have_in_common_cancels() -> None:
    n = 400
    ttft = draw(n, 1)
    sent = np.arange(n) * 1.0
    ours = records_of(sent, 1.1 * ttft, np.full(n, 0.01))
    theirs = records_of(sent, ttft, np.full(n, 0.01))
    assert log_ratio_spread(ours, theirs, KEYS)["mean_ttft_ms"] < 1e-12


def test_correlated_latencies_are_less_certain_than_independent_ones() -> None:
    n = 600
    sent = np.arange(n) * 1.0
    tied, free = autocorrelated(n, 3, 0.95), autocorrelated(n, 4, 0.0)
    assert block_length(tied) > 10 * block_length(free)
    flat = records_of(sent, np.full(n, 1.0), np.full(n, 0.01), output_len=12)
    wide, narrow = (
        log_ratio_spread(records_of(sent, values / values.std(), np.full(n, 0.01)), flat, KEYS)[
            "mean_ttft_ms"
        ]
        * (values / values.std()).mean()
        for values in (tied, free)
    )
    # A process that keeps 0.95 of its deviation has a mean that varies about sqrt(39) times as much.
    assert 3.0 < wide / narrow < 7.0


def test_too_few_requests_say_nothing() -> None:
    few = records_of(np.arange(5) * 1.0, draw(5, 1), np.full(5, 0.01))
    assert log_ratio_spread(few, few, KEYS) == {}


@given(n=st.integers(1, 300), block=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_resample_is_as_long_as_the_sample(n: int, block: int, seed: int) -> None:
    picks = resampled(n, min(block, n), np.random.default_rng(seed))
    assert len(picks) == n
    assert picks.min() >= 0
    assert picks.max() < n


def test_the_distance_is_the_kolmogorov_smirnov_one() -> None:
    a, b = draw(150, 1), draw(230, 2, 0.5)
    ours = records_of(np.arange(150) * 1.0, a, np.full(150, 0.01))
    theirs = records_of(np.arange(230) * 1.0, b, np.full(230, 0.01))
    found = distance(ours, theirs, "ttft")
    assert found is not None
    expected = stats.ks_2samp(ours.first_token - ours.sent, theirs.first_token - theirs.sent).statistic
    assert found.value == pytest.approx(expected, abs=1e-12)


def test_samples_of_one_distribution_rarely_exceed_chance() -> None:
    over = 0
    for seed in range(60):
        sides = [records_of(np.arange(100) * 1.0, draw(100, seed + k), np.full(100, 0.01)) for k in (0, 1000)]
        found = distance(sides[0], sides[1], "ttft")
        assert found is not None
        over += found.value > found.chance
    assert over <= 7


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict"),
    [
        (1.02, 0.02, "equivalent"),
        (1.3, 0.02, "different"),
        (1.09, 0.05, "undecided"),
        (1.02, 0.5, "undecided"),
    ],
)
def test_equivalence(ratio: float, spread: float, verdict: str) -> None:
    found = equivalence(ratio, spread, 0.1)
    assert found is not None
    assert found.verdict == verdict


def test_equivalence_errs_in_one_case_of_twenty() -> None:
    rng = np.random.default_rng(7)
    # The truth lies on the edge of the margin: calling it equivalent is wrong.
    wrong = sum(
        found is not None and found.verdict == "equivalent"
        for found in (equivalence(1.1 * math.exp(rng.normal(0, 0.02)), 0.02, 0.1) for _ in range(2000))
    )
    assert 60 < wrong < 140


def test_no_spread_is_no_test() -> None:
    assert equivalence(1.0, 0.0, 0.1) is None
    assert equivalence(0.0, 0.1, 0.1) is None


def test_independent_causes_add_in_quadrature() -> None:
    noise = Noise(0.03, 0, "assumed")
    alone = error_interval("mean_ttft_ms", 0.0, None, None, noise, 1)
    both = error_interval("mean_ttft_ms", 0.0, None, 0.04, noise, 1)
    assert alone is not None
    assert both is not None
    assert alone.spread == pytest.approx(0.03, rel=0.01)
    assert both.spread == pytest.approx(0.05, rel=0.01)
    assert error_interval("mean_ttft_ms", None, None, 0.1, noise, 1) is None
    assert error_interval("mean_ttft_ms", 0.1, None, None, None, 1) is None


def test_measured_noise_takes_the_place_of_what_a_prediction_assumed() -> None:
    assumed = math.exp(1.645 * repeat_noise("mean_ttft_ms"))
    found = error_interval("mean_ttft_ms", 0.0, (1 / assumed, assumed), None, Noise(0.05, 40, ""), 1)
    assert found is not None
    assert found.parts["prediction"] == pytest.approx(0.0, abs=1e-6)
    assert found.high == pytest.approx(math.exp(found.parts["repeats"]) - 1)


def test_noise_from_few_repeats_is_wider() -> None:
    two, many = (mean_error_share(Noise(0.02, n, ""), 1) for n in (2, 50))
    assert two > 3 * many
    assert mean_error_share(Noise(0.02, 50, ""), 4) == pytest.approx(many / 2)


def test_known_parts_of_ttft_name_the_part_that_is_wrong() -> None:
    n = 50
    sent = poisson_load(n, 5.0, 1)
    sides = []
    for prefill in (0.15, 0.1):
        parts = {"queue": np.full(n, 0.2), "prefill": np.full(n, prefill)}
        sides.append(
            result_of(records_of(sent, np.full(n, 0.21 + prefill), np.full(n, 0.01), **parts), rate=5.0)
        )
    found = error_sources(sides[0], sides[1])
    assert found is not None
    assert found.largest is not None
    assert found.largest.name == "prefill"
    # 50 ms of a whole of 410 ms.
    assert found.largest.share == pytest.approx(0.05 / 0.41)
    assert sum(part.share for part in found.parts) == pytest.approx(0.05 / 0.41)


@pytest.mark.parametrize(("name", "service", "base"), [("queue", 0.26, 0.1), ("prefill", 0.22, 0.15)])
def test_lone_requests_tell_prefill_from_queue(name: str, service: float, base: float) -> None:
    """A single server with service times of 0.22 s; the first token comes `base` after the service began."""

    def served(service: float, base: float) -> Floats:
        free, out = 0.0, []
        for t in sent:
            begin = max(t, free)
            free = begin + service
            out.append(begin + base - t)
        return np.array(out)

    sent = poisson_load(300, 3.0, 2)
    truth = result_of(records_of(sent, served(0.22, 0.1), np.full(300, 0.01)), rate=3.0)
    wrong = result_of(records_of(sent, served(service, base), np.full(300, 0.01)), "predicted", rate=3.0)
    found = error_sources(wrong, truth)
    assert found is not None
    assert "nobody waiting" in found.how
    assert found.largest is not None
    assert found.largest.name == name


def test_a_client_that_holds_requests_back_is_a_part_of_its_own() -> None:
    n = 50
    plan = poisson_load(n, 5.0, 1)
    on_time = records_of(plan, np.full(n, 0.1), np.full(n, 0.01))
    late = records_of(plan + 0.3, np.full(n, 0.1), np.full(n, 0.01), scheduled=plan)
    found = error_sources(result_of(on_time, "predicted", rate=5.0), result_of(late, rate=5.0))
    assert found is not None
    assert found.largest is not None
    assert found.largest.name == "client"
    assert found.largest.share == pytest.approx(-0.3 / 0.5)


def test_aggregates_tell_ttft_from_decode() -> None:
    ours = aggregates_of({"mean_ttft_ms": 100.0, "mean_e2el_ms": 400.0}, "predicted")
    theirs = aggregates_of({"mean_ttft_ms": 100.0, "mean_e2el_ms": 500.0})
    found = error_sources(ours, theirs)
    assert found is not None
    assert [(part.name, round(part.share, 3)) for part in found.parts] == [("TTFT", 0.0), ("decode", -0.2)]
    assert error_sources(ours, aggregates_of({"mean_tpot_ms": 1.0})) is None
