import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.figures.metrics import client_limited, latencies, run_duration, select, success_verdict, summarise
from sim.figures.quantiles import (
    Runs,
    interval_ranks,
    percentile,
    percentile_interval,
    percentiles,
    supported,
    weighted_percentile,
)
from sim.figures.regime import comparability, regime, steady_window
from sim.results import RequestRecords, ServerSeries
from sim.workload.spec import WorkloadSpec


def records(rows, itls=None):
    """Rows are (scheduled, sent, first, last, prompt_len, output_len, status); gaps are even if not given."""
    columns = list(zip(*rows, strict=True))
    scheduled, sent, first, last = (np.array(c, dtype=float) for c in columns[:4])
    output = np.array(columns[5])
    if itls is None:
        itls = [
            [(z - f) / (n - 1)] * (n - 1) if n > 1 else []
            for f, z, n in zip(first, last, output, strict=True)
        ]
    n = len(rows)
    return RequestRecords(
        request_id=tuple(str(i) for i in range(n)),
        scheduled=scheduled,
        sent=sent,
        first_token=first,
        last_token=last,
        prompt_len=np.array(columns[4]),
        output_len=output,
        cached_tokens=np.full(n, -1),
        status=tuple(columns[6]),
        itls=np.array([gap for row in itls for gap in row], dtype=float),
        itl_offsets=np.cumsum([0, *map(len, itls)]),
        queue=np.full(n, np.nan),
        prefill=np.full(n, np.nan),
        preemptions=np.full(n, -1),
    )


def open_loop(**more):
    return WorkloadSpec(request_rate=1.0, **more)


NAN = math.nan


# -- percentiles


def test_percentiles_are_linear_and_say_what_twenty_samples_cannot():
    sample = np.array([50.0] * 18 + [150.0, 600.0])
    assert percentile(sample, 50) == 50.0
    assert percentile(sample, 95) == pytest.approx(172.5)  # nearest rank would say 150
    assert percentile(sample, 99) == pytest.approx(514.5)  # nearest rank would say 600
    assert not supported(20, 99)
    assert supported(100, 99)
    assert supported(1000, 99.9)
    bounds = percentile_interval(sample, 99)
    assert (bounds.low, bounds.high) == (150.0, None)  # from above, twenty samples bound no P99
    assert percentile(np.array([]), 99) is None


@given(
    st.lists(st.floats(-1e3, 1e9), min_size=1, max_size=60),
    st.lists(st.floats(0.0, 100.0), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_percentiles_of_ordered_values_are_numpy_s_to_the_last_bit(values, others):
    ordered, levels = np.sort(np.array(values)), [0.0, 50.0, 99.0, 99.9, 100.0, *others]
    assert percentiles(ordered, levels) == np.percentile(ordered, levels).tolist()


def test_percentiles_of_values_that_are_not_known_are_not_known():
    assert all(map(math.isnan, percentiles(np.sort(np.array([1.0, NAN, 2.0])), (50.0, 99.0))))


@pytest.mark.parametrize(
    ("n", "q"), [(20, 50.0), (50, 90.0), (368, 99.0), (1000, 99.0), (40, 5.0), (5000, 99.9)]
)
def test_interval_ranks_cover_by_the_binomial(n, q):
    from scipy.stats import binom

    low, high = interval_ranks(n, q)
    p = q / 100
    below = binom.cdf(low - 1, n, p) if low else 0.0
    above = 1.0 - binom.cdf(high - 1, n, p) if high else 0.0
    assert below <= 0.025
    assert above <= 0.025
    assert low is None or binom.cdf(low, n, p) > 0.025  # no narrower rank would do
    assert high is None or 1.0 - binom.cdf(high - 2, n, p) > 0.025


def test_a_p99_needs_368_samples_for_an_upper_bound():
    assert interval_ranks(367, 99)[1] is None
    assert interval_ranks(368, 99)[1] == 368
    assert interval_ranks(0, 99) == (None, None)


def test_intervals_hold_the_true_percentile_as_often_as_they_say():
    rng = np.random.default_rng(1)
    true = -math.log(0.1)
    hits = 0
    for _ in range(400):
        bounds = percentile_interval(rng.exponential(size=200), 90)
        hits += bounds.low <= true <= bounds.high
    assert 0.93 <= hits / 400 <= 0.99


runs = st.lists(
    st.tuples(st.floats(0.001, 0.5), st.one_of(st.just(0.0), st.floats(-1e-6, 1e-4)), st.integers(0, 60)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(runs, st.sampled_from([0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_runs_have_the_statistics_of_their_values(rows, q):
    start, slope, count = (np.array(c) for c in zip(*rows, strict=True))
    held = Runs(start, slope, count)
    values = held.expand()
    assert len(values) == len(held)
    if not len(held):
        assert held.percentile(q) is None
        assert held.mean() is None
        return
    assert held.percentile(q) == pytest.approx(np.percentile(values, q), rel=1e-9)
    assert held.mean() == pytest.approx(values.mean(), rel=1e-9)
    assert held.std() == pytest.approx(values.std(), rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=20),
    st.floats(0.0, 100.0),
)
def test_weights_are_repetitions(rows, q):
    values, counts = (np.array(c) for c in zip(*rows, strict=True))
    repeated = np.repeat(values, counts)
    got = weighted_percentile(values, counts, q)
    assert got is None if not len(repeated) else got == pytest.approx(np.percentile(repeated, q), abs=1e-9)


# -- definitions


def test_tpot_exists_from_two_tokens_on():
    run = records([(0, 0, 0.2, 0.2, 8, 1, "ok"), (0, 0, 0.2, 0.8, 8, 13, "ok")])
    spec = open_loop(goodput=(("ttft", 300.0), ("tpot", 60.0)))
    got = summarise(run, spec, 1.0)
    assert (got["n_tpot"], got["n_ttft"]) == (1, 2)
    assert got["mean_tpot_ms"] == pytest.approx(50.0)
    assert got["goodput_good"] == 2  # no TPOT breaks no limit
    assert got["goodput_na_tpot"] == 1
    alone = summarise(records([(0, 0, 0.2, 0.2, 8, 1, "ok")]), None, 1.0)
    assert alone["mean_tpot_ms"] is alone["p99_tpot_ms"] is alone["mean_itl_ms"] is None


def test_failures_count_as_failures_and_as_nothing_else():
    run = records(
        [
            (0, 0, 0.2, 0.9, 8, 11, "ok"),
            (0, 0, NAN, NAN, 8, -1, "server_error"),
            (0, 0, 0.4, 1.1, 8, 11, "ok"),
            (0, 0, NAN, NAN, 8, -1, "timeout"),
            (0, 0, 0.1, NAN, 8, -1, "timeout"),
        ],
        itls=[[0.07] * 10, [], [0.07] * 10, [], [5.0]],
    )
    got = summarise(run, None, 2.0)
    assert (got["completed"], got["failed"], got["failed_timeout"], got["failed_server_error"]) == (
        2,
        3,
        2,
        1,
    )
    assert got["mean_ttft_ms"] == pytest.approx(300.0)
    assert got["median_e2el_ms"] == pytest.approx(1000.0)
    assert got["p99_itl_ms"] == pytest.approx(70.0)
    assert got["total_output_tokens"] == 22
    assert got["success_rate"] == 0.4
    verdict = success_verdict(got)
    assert verdict.status == "INVALID"
    assert "3 of 5 requests failed (1 server_error, 2 timeout)" in verdict.reasons[0].text


def test_nothing_completed_is_unknown_not_zero():
    got = summarise(records([(0, 0, NAN, NAN, 8, -1, "refused")]), None, 2.0)
    assert got["mean_ttft_ms"] is got["p99_e2el_ms"] is got["max_concurrent_requests"] is None
    assert (got["completed"], got["request_throughput"]) == (0, 0.0)
    assert success_verdict(got).status == "INVALID"


@pytest.mark.parametrize(
    ("failed", "status"), [(0, "VALID"), (1, "VALID"), (2, "INVALID"), (None, "SUSPECT")]
)
def test_a_run_is_valid_from_99_percent(failed, status):
    assert success_verdict({"completed": 100, "failed": failed}).status == status


def test_goodput_needs_every_limit_of_a_request_and_counts_failures_as_misses():
    def request(ttft, tpot, status="ok"):
        return (0, 0, ttft, ttft + 10 * tpot, 8, 11, status)

    run = records(
        [
            request(0.25, 0.02),
            request(0.75, 0.02),  # TTFT misses
            request(0.25, 0.04),  # TPOT misses
            (0, 0, NAN, NAN, 8, -1, "server_error"),
            request(0.5, 0.03125),  # exactly at both limits
        ]
    )
    got = summarise(run, open_loop(goodput=(("ttft", 500.0), ("tpot", 31.25))), 8.0)
    assert got["goodput_good"] == 2
    assert got["goodput_attainment"] == 0.4
    assert got["request_goodput"] == 0.25
    assert (got["goodput_attainment_ttft"], got["goodput_attainment_tpot"]) == (0.6, 0.6)
    assert summarise(run, open_loop(), 8.0)["request_goodput"] is None
    e2e = summarise(run, open_loop(goodput=(("e2e", 1000.0),)), 8.0)
    assert (
        e2e["goodput_good"]
        == summarise(run, open_loop(goodput=(("e2el", 1000.0),)), 8.0)["goodput_good"]
        == 4
    )


def test_peak_throughput_weighs_messages_by_their_tokens():
    # One request, 50 messages of 3 tokens, 0.2 s apart: 15 tokens in every full second.
    run = records([(0, 0, 0.1, 0.1 + 49 * 0.2, 8, 150, "ok")], itls=[[0.2] * 49])
    got = summarise(run, None, 10.0)
    assert got["output_throughput"] == 15.0
    assert got["max_output_tokens_per_s"] == pytest.approx(15.0)


def test_a_peak_below_the_average_is_not_stated():
    run = records([(0, 0, 0.1, 0.4, 8, 4, "ok")])
    assert summarise(run, None, 0.4)["max_output_tokens_per_s"] is None


def test_itls_leave_the_first_token_out():
    run = records([(0, 0, 0.3, 0.42, 8, 4, "ok")])
    lat = latencies(run)
    assert lat.itl.tolist() == pytest.approx([0.04, 0.04, 0.04])
    assert lat.itl.sum() == pytest.approx(run.last_token[0] - run.first_token[0])
    assert len(lat.itl) == run.output_len[0] - 1


def test_concurrency_is_the_true_peak():
    run = records(
        [(0, 0, 0.5, 1.0, 8, 2, "ok"), (0, 1.0, 1.5, 2.0, 8, 2, "ok"), (0, 1.9, 2.5, 3.0, 8, 2, "ok")]
    )
    assert summarise(run, None, 3.0)["max_concurrent_requests"] == 2


def test_a_client_that_holds_requests_back_does_not_hide_it():
    # Ten per second due, one in flight at a time, 0.4 s each.
    rows = [(0.1 * i, 0.4 * i, 0.4 * i + 0.3, 0.4 * i + 0.4, 8, 2, "ok") for i in range(10)]
    got = summarise(records(rows), WorkloadSpec(request_rate=10.0, max_concurrency=1), 4.0)
    assert got["mean_e2el_ms"] == pytest.approx(400.0)
    assert got["mean_dispatch_delay_ms"] == pytest.approx(1350.0)
    assert got["mean_e2el_from_schedule_ms"] == pytest.approx(1750.0)
    assert got["max_dispatch_delay_ms"] == pytest.approx(2700.0)
    assert got["offered_rate"] == pytest.approx(10.0)
    assert got["dispatch_rate"] == pytest.approx(2.5)
    assert got["offered_cv"] == pytest.approx(0.0, abs=1e-9)
    assert client_limited(got)
    slo = summarise(records(rows), WorkloadSpec(request_rate=10.0, goodput=(("e2el", 500.0),)), 4.0)
    assert (slo["goodput_attainment"], slo["goodput_attainment_from_schedule"]) == (1.0, 0.1)


def test_a_closed_loop_has_no_schedule():
    rows = [(0.0, 0.4 * i, 0.4 * i + 0.3, 0.4 * i + 0.4, 8, 2, "ok") for i in range(10)]
    got = summarise(records(rows), WorkloadSpec(max_concurrency=1, goodput=(("ttft", 500.0),)), 4.0)
    assert got["mean_dispatch_delay_ms"] is got["mean_ttft_from_schedule_ms"] is got["offered_rate"] is None
    assert got["goodput_attainment_from_schedule"] is None
    assert not client_limited(got)


def test_small_samples_come_with_bounds_and_itl_bounds_only_below_100_gaps():
    few = summarise(records([(0, 0, 0.1 * i, 0.1 * i + 1, 8, 3, "ok") for i in range(1, 9)]), None, 9.0)
    assert few["p99_ttft_ms_high"] is None
    assert few["p50_ttft_ms_low"] <= few["p50_ttft_ms"] <= few["p50_ttft_ms_high"]
    assert "p99_itl_ms_low" in few
    many = summarise(records([(0, 0, 0.1, 1, 8, 60, "ok")] * 3), None, 9.0)
    assert "p99_itl_ms_low" not in many
    assert many["n_itl"] == 177


def test_percentiles_and_metrics_are_those_asked_for():
    got = summarise(
        records([(0, 0, 0.1, 1, 8, 3, "ok")]),
        open_loop(percentiles=(50.0, 99.9), percentile_metrics=("ttft",)),
        1.0,
    )
    assert got["p99.9_ttft_ms"] == pytest.approx(100.0)
    assert got["p50_ttft_ms"] == pytest.approx(100.0)
    assert "mean_e2el_ms" not in got


def test_selected_rows_keep_their_gaps():
    run = records([(float(i), float(i), i + 0.5, i + 1.5, 8, 2 + i, "ok") for i in range(4)])
    part = select(run, run.scheduled >= 2)
    assert part.request_id == ("2", "3")
    assert part.itl_offsets.tolist() == [0, 3, 7]
    assert part.itls.tolist() == run.itls[3:].tolist()
    assert run_duration(run) == pytest.approx(4.5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 100), st.floats(0, 2), st.floats(0.001, 5), st.floats(0.001, 9), st.integers(1, 40)
        ),
        min_size=1,
        max_size=30,
    )
)
def test_figures_of_any_run_are_consistent(rows):
    run = records([(s, s + d, s + d + f, s + d + f + z, 8, n, "ok") for s, d, f, z, n in rows])
    got = summarise(run, open_loop(), max(run_duration(run), 1e-3))
    assert got["mean_e2el_ms"] >= got["mean_ttft_ms"]
    assert got["mean_ttft_from_schedule_ms"] >= got["mean_ttft_ms"]
    assert 1 <= got["max_concurrent_requests"] <= len(rows)
    peak = got["max_output_tokens_per_s"]
    assert peak is None or peak >= got["output_throughput"]
    assert got["total_token_throughput"] >= got["output_throughput"]


# -- regimes


def queue(n, rho, seed, servers=8):
    """A queue of exponential service at rate 1/s offered."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(size=n))
    due *= n / due[-1]
    free = np.zeros(servers)
    rows = []
    for arrival, need in zip(due.tolist(), rng.exponential(rho * servers, n).tolist(), strict=True):
        k = int(free.argmin())
        start = max(arrival, float(free[k]))
        free[k] = start + need
        rows.append((arrival, arrival, start + 0.05 * need, start + need, 8, 2, "ok"))
    return records(rows)


def test_overload_is_saturated_with_its_rate_whatever_the_length_of_the_run():
    for n in (40, 80):
        due = 0.25 * np.arange(n)
        start = np.arange(n) * (1 / 3)
        run = records([(d, d, s + 0.01, s + 1 / 3, 8, 2, "ok") for d, s in zip(due, start, strict=True)])
        got = regime(run, None, WorkloadSpec(request_rate=4.0))
        assert got.state == "saturated"
        assert got.rho == pytest.approx(4 / 3, rel=0.02)
        assert got.sustainable_rate == pytest.approx(3.0, rel=0.02)
        assert got.backlog_growth == pytest.approx(1.0, rel=0.05)
        assert got.backlog_end_over_mean == pytest.approx(2.0, abs=0.3)
        assert got.wait_trend == 1.0


def test_the_waits_of_an_overloaded_queue_measure_the_test():
    # 4/s offered, 3/s served: the mean wait doubles with the run, so it is no property of the server.
    means = []
    for seconds in (60, 120):
        i = np.arange(4 * seconds)
        means.append(float((i / 3 - i / 4).mean()))
    assert means == pytest.approx([9.9583, 19.9583], abs=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_stable_and_saturated_queues_are_told_apart(seed):
    assert regime(queue(600, 0.7, seed), None, open_loop()).state == "stable"
    over = regime(queue(600, 1.4, seed), None, open_loop())
    assert over.state == "saturated"
    assert over.sustainable_rate == pytest.approx(1 / 1.4, rel=0.12)
    assert "latencies measure the length of the test" in over.notes[0].text


def test_the_servers_own_queue_is_quoted():
    series = ServerSeries(np.array([0.0, 500.0]), np.zeros(2), np.array([0.0, 123.0]), np.zeros(2))
    notes = regime(queue(600, 1.4, 0), series, open_loop()).notes
    assert any("123" in note.text for note in notes)


def test_closed_loops_and_short_runs_are_called_what_they_are():
    run = queue(60, 1.5, 0)
    closed = regime(run, None, WorkloadSpec(max_concurrency=8))
    assert closed.state == "closed-loop"
    assert closed.sustainable_rate > 0
    assert regime(select(run, run.scheduled < 10), None, open_loop()).state == "unknown"


@pytest.mark.parametrize(
    ("rate", "predicted", "measured", "verdict"),
    [
        (2.0, 8.0, 5.0, "comparable"),
        (4.8, 8.0, 5.0, "near saturation"),
        (6.0, 8.0, 5.0, "regime mismatch"),
        (9.0, 8.0, 5.0, "overloaded"),
    ],
)
def test_what_may_be_compared_depends_on_both_loads(rate, predicted, measured, verdict):
    assert comparability(rate, predicted, measured) == verdict


def test_the_steady_window_leaves_the_cold_start_out():
    rows = [(i * 1.0, i * 1.0, i + (9.0 if i < 20 else 0.5), i + 12.0, 8, 2, "ok") for i in range(200)]
    begin, end = steady_window(records(rows))
    assert begin == 20.0
    assert end == 199.0
    assert steady_window(records(rows[:5])) is None
