import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.crosscheck import cross_check, describe
from bench.histogram import check_against_client, from_buckets, merge
from bench.metrics import cache_info, difference, histogram_by_name, parse, prefix_lookups, view
from bench.watch import Watched, any_restart, worth_keeping
from sim.results import RequestRecords


def histogram(name, buckets, count, total, labels='model_name="m"'):
    lines = [f'{name}_bucket{{le="{edge}",{labels}}} {n}' for edge, n in buckets]
    return "\n".join([*lines, f"{name}_count{{{labels}}} {count}", f"{name}_sum{{{labels}}} {total}", ""])


E2E_NAME = "vllm:e2e_request_latency_seconds"
E2E = histogram(
    E2E_NAME,
    [("1.0", 20), ("2.0", 100), ("10.0", 180), ("20.0", 190), ("+Inf", 200)],
    200,
    900.0,
)


def test_a_quantile_is_interpolated_within_its_bucket():
    p50 = view(parse(E2E)).histograms["e2e"].quantile(0.5)
    assert (p50.low, p50.high, p50.estimate) == (1.0, 2.0, 2.0)
    p80 = view(parse(E2E)).histograms["e2e"].quantile(0.8)
    assert (p80.low, p80.high, p80.estimate) == (2.0, 10.0, 8.0)


def test_a_quantile_in_the_last_bucket_is_only_bounded_from_below():
    p99 = view(parse(E2E)).histograms["e2e"].quantile(0.99)
    assert p99.estimate is None
    assert p99.censored_at_least == 20.0
    assert str(p99) == ">= 20"


def test_the_mean_is_exact_whatever_the_grid():
    assert view(parse(E2E)).mean("e2e") == 4.5


def test_two_grids_over_the_same_samples_do_not_differ():
    samples = np.linspace(0.22, 0.38, 100)

    def on(edges):
        return from_buckets({edge: int((samples <= edge).sum()) for edge in edges}, 100, samples.sum())

    coarse, other = on([0.1, 0.2, 0.4, 0.6]).quantile(0.5), on([0.25, 0.5, 1.0]).quantile(0.5)
    assert coarse.estimate != pytest.approx(other.estimate)
    assert not coarse.distinguishable(other)
    assert coarse.low <= float(np.median(samples)) <= coarse.high


def test_intervals_apart_are_different():
    low = from_buckets({1.0: 10.0, 2.0: 10.0}, 10, 5.0).quantile(0.5)
    high = from_buckets({1.0: 0.0, 2.0: 0.0, 4.0: 10.0}, 10, 30.0).quantile(0.5)
    assert low.distinguishable(high)
    assert high.distinguishable(low)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 100, allow_nan=False), min_size=1, max_size=60),
    st.lists(st.floats(0.001, 90), min_size=1, max_size=8, unique=True),
    st.floats(0.01, 1.0),
)
@example([2.0, 18.0], [1.0119322630614658, 17.974312442337432], 0.5)
def test_the_interval_holds_the_true_quantile(samples, edges, q):
    values = np.array(samples)
    grid = from_buckets({edge: int((values <= edge).sum()) for edge in edges}, len(values), values.sum())
    interval = grid.quantile(q)
    # The smallest sample with at least q of all at or below it: what a cumulative count can see.
    true = np.sort(values)[max(0, math.ceil(q * len(values) - 1e-9) - 1)]
    assert interval.low <= true <= interval.high
    if interval.estimate is not None:
        assert interval.low <= interval.estimate <= interval.high


def test_the_interval_of_the_buckets_holds_the_clients_percentile_in_1000_cases():
    rng = np.random.default_rng(20)
    censored = 0
    for _ in range(1000):
        n = int(rng.integers(1, 400))
        samples = rng.lognormal(0.0, rng.uniform(0.1, 2.5), n)
        grid = np.unique(rng.lognormal(0.0, 1.5, int(rng.integers(1, 12))))
        counts = {float(edge): float((samples <= edge).sum()) for edge in grid}
        q = float(rng.choice([0.5, 0.9, 0.95, 0.99, rng.uniform(0.01, 1.0)]))
        interval = from_buckets(counts, n, float(samples.sum())).percentile(q)
        exact = float(np.percentile(samples, 100.0 * q))
        assert interval.low <= exact <= interval.high
        if math.isinf(interval.high):
            censored += 1
            assert interval.estimate is None
            assert interval.censored_at_least == interval.low
            assert exact >= interval.low
        else:
            assert interval.low <= interval.estimate <= interval.high
    assert censored > 100


def test_what_stands_beside_a_clients_percentile_is_interpolated_as_the_client_does():
    # Of two samples, 1 and 9, numpy's median is 5: in neither sample's bucket.
    samples = np.array([1.0, 9.0])
    grid = from_buckets({2.0: 1.0, 8.0: 1.0, 10.0: 2.0}, 2, 10.0)
    assert grid.quantile(0.5).high == 2.0
    assert grid.percentile(0.5).low <= np.median(samples) <= grid.percentile(0.5).high
    told = describe(view(parse(histogram(E2E_NAME, [("2.0", 1), ("8.0", 1), ("10.0", 2)], 2, 10.0))), {})
    p50 = told["histograms"]["e2e"]["quantiles"]["p50"]
    assert (p50["low_s"], p50["high_s"]) == (0.0, 10.0)


def test_a_histogram_without_observations_has_no_quantile():
    empty = from_buckets({1.0: 0.0}, 0, 0.0)
    assert empty.quantile(0.5) is None
    assert empty.percentile(0.5) is None
    assert from_buckets({}, 5, 1.0).percentile(0.5) is None
    assert empty.mean is None


def test_engines_on_one_grid_add_up_and_on_two_only_their_sums():
    a, b = from_buckets({1.0: 5.0}, 10, 20.0), from_buckets({1.0: 1.0}, 2, 3.0)
    assert merge([a, b]).cumulative == (6.0, 12.0)
    mixed = merge([a, from_buckets({2.0: 1.0}, 2, 3.0)])
    assert (mixed.edges, mixed.count, mixed.total) == ((), 12, 23.0)


OLD = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:time_per_output_token_seconds_sum{model_name="m"} 12.0
vllm:time_per_output_token_seconds_count{model_name="m"} 400.0
vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.4
vllm:num_requests_running{model_name="m"} 2.0
"""
NEW = """\
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 12.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 400.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 1.5
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 50.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 200.0
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e9
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


@pytest.mark.parametrize("text", [OLD, NEW])
def test_names_of_either_version(text):
    seen = view(parse(text))
    assert (seen.kv_usage_max, seen.mean("itl"), seen.prefix_hit_rate, seen.running) == (0.5, 0.03, 0.4, 2.0)


def test_what_a_version_lacks_is_missing_and_not_zero():
    old, new = view(parse(OLD)), view(parse(NEW))
    assert old.mean("tpot") is None
    assert "tpot" in old.missing
    assert new.mean("tpot") == 0.03
    assert new.waiting is None
    assert "waiting" in new.missing
    assert "generation_tokens" in new.missing


DP = "".join(
    f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {running}\n'
    f'vllm:num_requests_waiting{{engine="{engine}",model_name="m"}} {waiting}\n'
    f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} {usage}\n'
    f'vllm:generation_tokens_total{{engine="{engine}",model_name="m"}} {tokens}\n'
    f'vllm:time_to_first_token_seconds_sum{{engine="{engine}",model_name="m"}} {total}\n'
    f'vllm:time_to_first_token_seconds_count{{engine="{engine}",model_name="m"}} {count}\n'
    for engine, running, waiting, usage, tokens, total, count in [
        (0, 1, 0, 0.1, 100, 1.0, 10),
        (1, 2, 3, 0.3, 300, 2.0, 10),
        (2, 4, 0, 0.8, 600, 9.0, 20),
    ]
)


def test_engines_are_summed_and_kept_apart():
    seen = view(parse(DP))
    assert (seen.engines, seen.running, seen.waiting) == (3, 7, 3)
    assert (seen.kv_usage_mean, seen.kv_usage_max) == (pytest.approx(0.4), 0.8)
    assert seen.counters["generation_tokens"] == 1000
    assert seen.mean("ttft") == 0.3
    assert seen.per_engine["2"]["generation_tokens"] == 600
    assert seen.imbalance == pytest.approx(1.8)


def test_sums_beside_ranks_are_no_engine_of_their_own():
    text = "".join(f'sglang:num_running_reqs{{dp_rank="{rank}",model_name="m"}} 5\n' for rank in range(2))
    text += 'sglang:generation_tokens_total{model_name="m"} 900\n'
    seen = view(parse(text))
    assert (seen.engines, seen.running, seen.imbalance) == (2, 10, None)
    assert seen.counters["generation_tokens"] == 900
    assert view(parse('sglang:generation_tokens_total{model_name="m"} 900\n')).engines == 1
    assert view(parse("")).engines == 0


def test_lookups_of_an_engine_that_counts_none_are_its_prompt_tokens():
    assert prefix_lookups({"prefix_cache_hits": 5, "prompt_tokens": 10}) == (5, 10)
    assert prefix_lookups({"prefix_cache_hits": 5, "prefix_cache_queries": 8, "prompt_tokens": 10}) == (5, 8)
    assert prefix_lookups({"prompt_tokens": 10}) is None
    assert prefix_lookups({"prefix_cache_hits": 5}) is None


def test_tensor_parallel_ranks_are_one_engine():
    text = "".join(
        f'sglang:num_running_reqs{{model_name="m",tp_rank="{rank}"}} 5\n'
        f'sglang:token_usage{{model_name="m",tp_rank="{rank}"}} 0.5\n'
        f'sglang:prompt_tokens_total{{model_name="m",tp_rank="{rank}",is_streaming="x"}} 100\n'
        f'sglang:cached_tokens_total{{model_name="m",tp_rank="{rank}",cache_source="device"}} 25\n'
        for rank in range(4)
    )
    seen = view(parse(text))
    assert (seen.engines, seen.running) == (1, 5)
    assert seen.counters["prompt_tokens"] == 100
    assert seen.prefix_hit_rate == 0.25


def test_a_sglang_histogram_under_any_name():
    text = histogram("sgl_router_ttft_seconds", [("0.25", 19), ("0.5", 100)], 100, 29.92, 'x="y"')
    assert histogram_by_name(parse(text), "sgl_router_ttft_seconds")[""].mean == pytest.approx(0.2992)


def counters(started=1000.0, **values):
    names = {"generated": "vllm:generation_tokens_total", "finished": "vllm:request_success_total"}
    lines = [f'{names[key]}{{engine="0"}} {value}' for key, value in values.items()]
    return parse("\n".join([f"process_start_time_seconds {started}", *lines, ""]))


def test_growth_between_two_scrapes():
    seen = difference(counters(generated=100, finished=5), counters(generated=350, finished=9))
    assert seen.counters == {"generation_tokens": 250, "finished": 4}
    assert not seen.restarted


def test_a_counter_that_fell_is_a_restart_and_counts_from_there():
    seen = difference(counters(generated=100), counters(generated=30))
    assert seen.restarted
    assert seen.counters["generation_tokens"] == 30


def test_a_process_that_started_anew_is_a_restart_though_no_counter_fell():
    seen = difference(counters(generated=100), counters(started=2000.0, generated=150))
    assert seen.restarted
    assert seen.counters["generation_tokens"] == 150


def test_histograms_grow_too():
    before = parse(E2E)
    after = parse(
        histogram(
            "vllm:e2e_request_latency_seconds",
            [("1.0", 20), ("2.0", 150), ("10.0", 230), ("20.0", 240), ("+Inf", 250)],
            250,
            975.0,
        )
    )
    grown = difference(before, after).histograms["e2e"]
    assert (grown.count, grown.mean) == (50, 1.5)
    assert grown.quantile(0.99).high == 2.0


def test_a_restart_that_caught_up_is_seen_between_scrapes():
    first, second, third = counters(generated=100), counters(generated=20), counters(generated=200)
    assert any_restart([first, second, third])
    assert not any_restart([first, third])


def test_cache_configuration():
    text = (
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="64",kv_cache_size_tokens="2048",'
        'enable_prefix_caching="False"} 1.0\n'
    )
    info = cache_info(parse(text))
    assert (info.num_gpu_blocks, info.block_size, info.kv_cache_tokens) == (64, 32, 2048)
    assert info.enable_prefix_caching is False
    assert cache_info(parse("")).num_gpu_blocks is None


def test_degenerate_histograms_are_refused():
    zeros = from_buckets({0.001: 5000.0, 0.1: 5000.0}, 5000, 0.2)
    trust = check_against_client(zeros, client_mean=0.3, client_count=500)
    assert not trust.trusted
    assert trust.server_mean == pytest.approx(4e-5)
    assert trust.reasons == (
        "all samples in first bucket",
        "mean disagrees with client",
        "count mismatch",
    )


def test_a_fast_server_is_no_degenerate_one():
    fast = from_buckets({0.01: 100.0, 0.1: 100.0}, 100, 0.4)
    assert check_against_client(fast, client_mean=0.005, client_count=100).trusted


def test_a_count_alone_does_not_refuse():
    trust = check_against_client(from_buckets({1.0: 50.0}, 50, 25.0), client_mean=0.5, client_count=40)
    assert trust.trusted
    assert trust.reasons == ("count mismatch",)


def records(n=10, output=8, ttft=0.1, status="ok"):
    sent = np.arange(n, dtype=np.float64)
    offsets = np.arange(n + 1) * (output - 1)
    return RequestRecords(
        request_id=tuple(map(str, range(n))),
        scheduled=sent,
        sent=sent,
        first_token=sent + ttft,
        last_token=sent + 0.5,
        prompt_len=np.full(n, 20),
        output_len=np.full(n, output),
        cached_tokens=np.zeros(n, dtype=np.int64),
        status=(status,) * n,
        itls=np.full(n * (output - 1), 0.01),
        itl_offsets=offsets,
        queue=np.full(n, np.nan),
        prefill=np.full(n, np.nan),
        preemptions=np.full(n, -1),
    )


def server(finished=10, generated=80, ttft_sum=1.0, ttft_count=10):
    text = (
        f'vllm:request_success_total{{engine="0",finished_reason="length"}} {finished}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
    )
    text += histogram(
        "vllm:time_to_first_token_seconds",
        [("0.05", 0), ("0.25", ttft_count)],
        ttft_count,
        ttft_sum,
        'engine="0"',
    )
    return view(parse(text))


def subjects(notes):
    return {note.subject for note in notes}


def test_both_ends_agree():
    assert cross_check(records(), server()) == ()


def test_other_clients_are_noticed():
    assert "other_load" in subjects(cross_check(records(), server(finished=25, generated=200)))


def test_token_counts_that_differ_are_noticed():
    assert subjects(cross_check(records(), server(generated=60))) == {"output_tokens"}


def test_a_template_probe_is_no_other_client():
    assert cross_check(records(), server(finished=11, generated=81, ttft_count=11), probes=1) == ()


def test_a_refused_histogram_shows_no_quantiles():
    seen = server(ttft_sum=0.0001)
    notes = cross_check(records(), seen)
    assert subjects(notes) == {"server_ttft"}
    from bench.crosscheck import trust_histograms

    told = describe(seen, trust_histograms(records(), seen))
    assert told["histograms"]["ttft"]["quantiles"] is None
    assert describe(server(), {})["histograms"]["ttft"]["quantiles"]["p50"]["high_s"] == 0.25


def test_a_series_keeps_what_it_needs_and_sums_engines():
    seen = Watched(before=DP, scrapes=[(11.0, worth_keeping(DP)), (12.0, worth_keeping(DP))])
    series = seen.series(10.0)
    assert series.time.tolist() == [1.0, 2.0]
    assert series.running.tolist() == [7.0, 7.0]
    assert series.kv_usage.tolist() == [0.8, 0.8]
    assert "time_to_first_token" not in worth_keeping(DP)
    assert seen.preemptions() == [None, None]
