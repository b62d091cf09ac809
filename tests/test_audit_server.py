"""What the audit reads from /metrics, logs and commands beside a report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.audit.audit import audit
from bench.audit.finding import verdict
from bench.audit.quality import warmup
from bench.audit.reading import _of_result
from sim.results import BenchResult
from sim.results_io.files import write_result
from tests.audit_runs import about, files, read, report
from tests.explain_scenarios import printed, run_of
from tests.test_report import result

METRICS = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:prompt_tokens_total{{engine="0"}} {queries}
vllm:generation_tokens_total{{engine="0"}} {generated}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:request_success_total{{engine="0",finished_reason="length"}} {finished}
"""
ZERO = METRICS.format(queries=0, hits=0, generated=0, preemptions=0, finished=0)


def test_a_warm_cache_contaminates_a_random_load(tmp_path):
    after = METRICS.format(queries=50_000, hits=40_000, generated=5_000, preemptions=3, finished=50)
    report_text = (
        "Namespace(dataset_name='random', seed=7, num_prompts=50, max_concurrency=4, num_warmups=2)\n"
        + "============ Serving Benchmark Result ============\nSuccessful requests: 50\nFailed requests: 0\n"
        + "Benchmark duration (s): 50.0\nTotal input tokens: 50000\nTotal generated tokens: 5000\n"
        + "Mean TTFT (ms): 90.0\nMean TPOT (ms): 20.0\n"
    )
    # The dumps come in the wrong order on purpose.
    (run,) = read(files(tmp_path, after=after, before=ZERO, report=report_text))
    assert run.hit_rate == (40_000.0, 50_000.0)
    assert run.preemptions == 3
    assert run.settings["num_warmups"] == 2
    findings = audit((run,))
    assert "CONTAMINATED" in about(findings, "cache")
    assert verdict(findings) == "not comparable"
    assert "2 warm-ups" in about(findings, "warmup")


@pytest.mark.parametrize(
    ("intended", "hits", "warm"), [(300, 290, False), (300, 900, True), (None, 290, True)]
)
def test_hits_that_the_load_means_to_have_are_no_contamination(intended, hits, warm):
    measured = BenchResult(
        origin="measured",
        tool="servecast bench",
        identity={"workload": {"dataset_name": "mooncake"}},
        duration=10.0,
        aggregates={"completed": 10, "failed": 0, "mean_ttft_ms": 300.0},
        server={"prefix_cache_hits": hits, "prefix_cache_queries": 1000},
        extra={} if intended is None else {"intended_prefix_hits": intended},
    )
    told = about(audit((_of_result(measured, "a"),)), "cache")
    assert ("CONTAMINATED" in told) == warm
    assert ("prompts begin alike" in told) == (intended is not None)


def test_dumps_of_another_run_are_not_taken_for_this_one(tmp_path):
    after = METRICS.format(queries=900_000, hits=800_000, generated=70_000, preemptions=0, finished=900)
    paths = files(tmp_path, c1=printed(run_of("vllm", 1)), before=ZERO, after=after)
    findings = audit(read(paths))
    assert "not of one run" in about(findings, "client")
    assert "care CONTAMINATED" in about(findings, "cache")


def test_one_dump_alone_tells_nothing_of_a_run(tmp_path):
    after = METRICS.format(queries=50_000, hits=40_000, generated=5_000, preemptions=3, finished=50)
    (run,) = read(files(tmp_path, after=after))
    assert run.hit_rate is None
    assert "before and one after" in about(audit((run,)), "cache")


def test_a_percentile_in_the_last_bucket_is_only_a_bound(tmp_path):
    text = "# TYPE vllm:e2e_request_latency_seconds histogram\n"
    for edge, count in (("1.0", 10), ("30.0", 80), ("60.0", 96), ("+Inf", 100)):
        text += f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{edge}"}} {count}\n'
    text += 'vllm:e2e_request_latency_seconds_count{engine="0"} 100\n'
    text += 'vllm:e2e_request_latency_seconds_sum{engine="0"} 1800.0\n'
    (run,) = read(files(tmp_path, dump=text))
    assert run.server_quantile("e2e", 0.99).censored_at_least == 60.0
    assert run.view.mean("e2e") == 18.0
    told = about(audit((run,)), "percentiles")
    assert "care P99 E2E lies in the +Inf bucket" in told
    assert "at least 60 s, no upper bound" in told


def ttft_dump(edges: dict[str, int], total: float, count: int) -> str:
    text = "# TYPE sglang:time_to_first_token_seconds histogram\n"
    for edge, below in edges.items():
        text += f'sglang:time_to_first_token_seconds_bucket{{le="{edge}"}} {below}\n'
    text += f"sglang:time_to_first_token_seconds_count{{}} {count}\n"
    return text + f"sglang:time_to_first_token_seconds_sum{{}} {total}\n"


def test_server_medians_differ_only_if_their_buckets_do(tmp_path):
    one = ttft_dump({"0.2": 0, "0.4": 50, "+Inf": 50}, 15.0, 50)
    other = ttft_dump({"0.25": 10, "0.5": 50, "+Inf": 50}, 15.0, 50)
    far = ttft_dump({"0.6": 0, "0.8": 50, "+Inf": 50}, 35.0, 50)
    same = tuple(read(files(tmp_path, a=one))) + tuple(read(files(tmp_path, b=other)))
    assert "not told apart" in about(audit(same), "percentiles")
    apart = (same[0], *read(files(tmp_path, c=far)))
    assert "differ for certain" in about(audit(apart), "percentiles")


def test_a_degenerate_histogram_is_distrusted(tmp_path):
    after = "# TYPE vllm:time_to_first_token_seconds histogram\n"
    before = after
    for edge in ("0.001", "0.1", "1.0", "+Inf"):
        before += f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{edge}"}} 0\n'
        after += f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{edge}"}} 900\n'
    for name, value in (("count", 900), ("sum", 0.09)):
        before += f'vllm:time_to_first_token_seconds_{name}{{engine="0"}} 0\n'
        after += f'vllm:time_to_first_token_seconds_{name}{{engine="0"}} {value}\n'
    paths = files(tmp_path, c1=printed(run_of("vllm", 1)), before=before, after=after)
    told = about(audit(read(paths)), "percentiles")
    assert "the server's TTFT is not to be trusted" in told
    assert "all samples in first bucket" in told
    assert "count mismatch" in told


def test_data_parallel_engines_are_summed_and_their_imbalance_told(tmp_path):
    def dump(first: int, second: int) -> str:
        return "".join(
            f'vllm:generation_tokens_total{{engine="{engine}"}} {tokens}\n'
            f'vllm:request_success_total{{engine="{engine}"}} {tokens // 100}\n'
            for engine, tokens in enumerate((first, second))
        )

    (run,) = read(files(tmp_path, before=dump(0, 0), after=dump(1000, 3000)))
    assert run.completed == 40
    assert "1.50 times its share" in about(audit((run,)), "percentiles")


def test_waiting_requests_beside_a_half_empty_pool_are_no_headroom(tmp_path):
    def dump(waiting: int, usage: float) -> str:
        return (
            f'vllm:num_requests_running{{engine="0"}} 12\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\n'
        )

    told = about(audit(read(files(tmp_path, dump=dump(30, 0.2)))), "percentiles")
    assert "30 waited and 12 ran at the scrape, KV use 20%" in told
    assert "no headroom" in told
    assert "waiting for KV cache" in about(audit(read(files(tmp_path, full=dump(30, 0.99)))), "percentiles")
    assert "waiting" not in about(audit(read(files(tmp_path, idle=dump(0, 0.2)))), "percentiles")


def test_more_concurrency_than_the_pool_admits_is_counted_in_whole_blocks():
    run = report(
        completed=768.0,
        total_input_tokens=768 * 8000.0,
        total_output_tokens=768 * 1000.0,
        max_concurrency=300,
        kv_given=300_000,
    )
    assert run.fits() == 300_000 // 9008
    assert run.fits(of_output=0.5) == 300_000 // 8512
    assert "33 of 300 fit in the KV cache" in about(audit((run,)), "capacity")


def test_other_coefficients_are_another_prediction():
    first = report(name="a", engine={"engine_version": "0.28.0", "model_sha": "aa"})
    second = report(name="b", seed=2, engine={"engine_version": "0.33.0", "model_sha": "bb"})
    (one,) = [f for f in audit((first, second)) if f.question == "dimensions"]
    assert one.level == "stop"
    assert "model_sha aa to bb" in one.evidence
    assert "engine version 0.28.0 to 0.33.0" in one.evidence


LOG = (
    "(EngineCore_DP0 pid=9) INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v0.28.0) with "
    "config: model='m', max_seq_len=8192, quantization=None\n"
    "INFO 01-02 03:04:05 [kv_cache_utils.py:1] GPU KV cache size: {tokens} tokens\n"
    "INFO 01-02 03:04:05 [kv_cache_utils.py:2] Maximum concurrency for 8,192 tokens per request: {times}x\n"
)


def test_the_log_s_pool_is_what_the_report_is_held_against(tmp_path):
    paths = files(
        tmp_path, c128=printed(run_of("vllm", 128)), log=LOG.format(tokens="194,896", times="23.79")
    )
    (run,) = read(paths)
    assert run.kv_tokens == 194_896
    assert "42 of 128 fit" in about(audit((run,)), "capacity")


def test_a_hybrid_model_s_token_count_is_not_its_pool(tmp_path):
    (run,) = read(files(tmp_path, log=LOG.format(tokens="50,000", times="20.00")))
    assert run.kv_tokens == 20 * 8192
    assert "the printed token count is not the pool" in about(audit((run,)), "capacity")


def test_two_logs_are_compared_flag_by_flag(tmp_path):
    one = LOG.format(tokens="100,000", times="12.21")
    two = one.replace("quantization=None", "quantization=fp8").replace("max_seq_len=8192", "max_seq_len=4096")
    findings = audit(read(files(tmp_path, one=one, two=two)))
    assert "max_model_len 8192 to 4096" in about(findings, "dimensions")


def test_commands_pasted_along_tell_the_settings(tmp_path):
    text = (
        "$ vllm serve Qwen/Qwen3-14B --max-num-seqs 64 \\\n    --kv-cache-dtype fp8\n"
        "$ vllm bench serve --num-warmups 3 --num-prompts 20 --seed 9 --max-concurrency 1\n"
        + printed(run_of("vllm", 1))
    )
    (run,) = read(files(tmp_path, paste=text))
    assert run.engine["max_num_seqs"] == "64"
    assert run.engine["kv_cache_dtype"] == "fp8"
    assert (run.settings["seed"], run.settings["num_warmups"]) == (9, 3)


def test_two_reports_in_one_paste_are_two_runs(tmp_path):
    text = printed(run_of("vllm", 1)) + "\nand then\n" + printed(run_of("vllm", 128))
    runs = read(files(tmp_path, paste=text))
    assert [run.concurrency for run in runs] == [1, 128]


def test_figures_without_a_report_are_read(tmp_path):
    path = tmp_path / "figures.json"
    run = {"completed": 20, "mean_ttft_ms": 523.85, "p50_ttft_ms": 310.47, "p99_ttft_ms": 3796.43}
    path.write_text(json.dumps({"setting": {"max_model_len": 9}, "runs": [run, {**run, "seed": 4}]}))
    runs = read([str(path)])
    assert len(runs) == 2
    assert "a cold start is in the window" in about(audit(runs), "warmup")


def test_a_simulation_needs_no_warm_up(tmp_path):
    made = result()  # one TTFT of 20 is nine times the others
    for origin, findings in (("predicted", 0), ("measured", 1)):
        path = tmp_path / f"{origin}.json"
        write_result(replace(made, origin=origin), path)
        runs = read([str(path)])
        assert runs[0].result.origin == origin
        assert len(warmup(runs)) == findings


def test_preemptions_since_start_up_are_not_the_run_s(tmp_path):
    after = METRICS.format(queries=50_000, hits=40_000, generated=5_000, preemptions=3, finished=50)
    (run,) = read(files(tmp_path, after=after))
    assert run.preemptions is None
    (run,) = read(files(tmp_path, before=ZERO, after=after))
    assert run.preemptions == 3


REPLICA = "(EngineCore_DP{rank} pid=9) INFO 01-02 03:04:05 [utils.py:1] GPU KV cache size: {n} tokens\n"


def test_the_pools_of_data_parallel_replicas_add_up(tmp_path):
    log = REPLICA.format(rank=0, n="100,000") + REPLICA.format(rank=1, n="94,000")
    (run,) = read(files(tmp_path, c128=printed(run_of("vllm", 128)), log=log))
    assert run.kv_tokens == 194_000
    assert run.fits() == 100_000 // 4608 + 94_000 // 4608
    told = about(audit((run,)), "capacity")
    assert "194,000 tokens in 2 replicas hold 41 requests" in told
    told = about(audit(read(files(tmp_path, log=log))), "capacity")
    assert "KV cache of 194,000 tokens in 2 replicas" in told
    dump = "".join(
        f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="1000"}} 1.0\n'
        f'vllm:num_requests_running{{engine="{rank}"}} 0\n'
        for rank in (0, 1)
    )
    (run,) = read(files(tmp_path, dump=dump))
    assert run.kv_pools == (16_000, 16_000)


def test_a_server_that_was_restarted_between_the_dumps_is_told(tmp_path):
    after = METRICS.format(queries=50_000, hits=0, generated=5_000, preemptions=3, finished=50)
    started = "process_start_time_seconds {}\n"
    for second, told in ((1000, False), (2000, True)):
        dumps = {"before": ZERO + started.format(1000), "after": after + started.format(second)}
        (run,) = read(files(tmp_path, **dumps))
        assert ("care the server was restarted" in about(audit((run,)), "percentiles")) == told
