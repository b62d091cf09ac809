from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from bench.audit.audit import audit
from bench.audit.cli import audit as audit_command
from bench.audit.combine import combine
from bench.audit.facts import Run
from bench.audit.finding import QUESTIONS, Finding, exit_status, in_order, verdict
from bench.audit.quality import cold_from_aggregates, warmup
from bench.audit.reading import _of_result, read_material
from bench.audit.text import WIDTH, render
from cli import main
from sim.errors import BadInput
from sim.explain.outcome import evaluate
from sim.results import BenchResult
from sim.results_io.files import write_result
from tests.explain_scenarios import printed, reference_source, run_of
from tests.test_report import result


def files(tmp_path, **texts: str) -> list[str]:
    paths = []
    for name, text in texts.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        paths.append(str(path))
    return paths


def read(paths: list[str], pool: int | None = None) -> tuple[Run, ...]:
    runs = combine([read_material(path) for path in paths])
    return tuple(run.with_(kv_given=pool) if pool else run for run in runs)


def about(findings: list[Finding], question: str, run: str = "") -> str:
    """All that is said to one question, as one text."""
    own = [f for f in findings if f.question == question and (not run or not f.runs or run in f.runs)]
    return " | ".join(f"{f.level} {f.title}: {f.evidence}. {f.effect}. {f.instead}" for f in own)


# -- the published reports


@pytest.fixture
def pair(tmp_path):
    return files(tmp_path, c1=printed(run_of("vllm", 1)), c128=printed(run_of("vllm", 128)))


def test_the_published_pair(pair):
    runs = read(pair, 194_896)
    findings = audit(runs)
    assert [f.question for f in findings] == [f.question for f in in_order(findings)]
    assert "concurrency 1 to 128; prompts 20 to 256" in about(findings, "dimensions")
    assert "mean TTFT x 134" in about(findings, "dimensions")
    capacity = about(findings, "capacity", "c128.txt")
    assert "42 of 128 fit in the KV cache" in capacity
    assert "so 86 wait" in capacity
    low, high = runs[1].queue_share()
    assert 0.85 < low < 0.92 < high < 0.97
    assert f"{low:.0%} to {high:.0%} of the 43.8 s mean TTFT is queue" in capacity
    told = about(findings, "percentiles", "c128.txt")
    assert "mean ITL 48.37 ms = mean TPOT 48.37 ms" in told
    assert "P50 25.31, P99 625.08" in told
    assert "interruptions" in told
    assert "no warm-up" in about(findings, "warmup")
    assert "P99 of 20 samples is not to be trusted" in about(findings, "samples", "c1.txt")
    assert verdict(findings) == "comparable with care"
    text = render(runs, findings, verdict(findings))
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_longest_gap_tells_the_token_budget(pair):
    told = about(audit(read(pair)), "percentiles", "c128.txt")
    assert "7,817 prompt tokens" in told


def test_without_the_pool_little_s_law_tells_who_was_served(pair):
    findings = audit(read(pair))
    text = about(findings, "capacity", "c128.txt")
    assert "unknown" in text
    assert "of 109 requests in flight 39 were past their first token" in text


def test_the_cold_start_of_the_other_engine(tmp_path):
    runs = read(files(tmp_path, c1=printed(run_of("sglang", 1))))
    (run,) = runs
    cold = cold_from_aggregates(run)
    assert cold is not None
    assert cold.requests == 1
    assert cold.slowest_ms == pytest.approx(310.47 + 20 * (523.85 - 310.47))
    text = about(audit(runs), "warmup")
    assert "523.85" in text
    assert "310.47" in text
    assert "3796.43" in text
    assert "+69% too high" in text


@pytest.mark.parametrize(
    ("n", "mean", "median", "p99", "concurrency"),
    [
        (20, 327.54, 326.75, 343.80, 1),  # nothing slow at all
        (200, 900.0, 400.0, 4000.0, 1),  # a long tail, not one request
        (64, 5000.0, 3000.0, 9000.0, 32),  # a queue
        (20, 523.85, None, 3796.43, 1),
    ],
)
def test_a_tail_is_no_cold_start(n, mean, median, p99, concurrency):
    figures = {"completed": float(n), "mean_ttft_ms": mean, "p99_ttft_ms": p99}
    if median is not None:
        figures["median_ttft_ms"] = median
    assert cold_from_aggregates(Run("r", figures=figures, settings={"max_concurrency": concurrency})) is None


def test_one_slow_request_is_found_from_any_sample():
    rng = np.random.default_rng(4)
    for n in (10, 20, 50, 80):
        values = rng.normal(300.0, 5.0, n)
        values[0] = 6000.0
        figures = {
            "completed": float(n),
            "mean_ttft_ms": float(values.mean()),
            "median_ttft_ms": float(np.median(values)),
            "p99_ttft_ms": float(np.percentile(values, 99)),
        }
        cold = cold_from_aggregates(Run("r", figures=figures, settings={"max_concurrency": 1}))
        assert cold is not None
        assert cold.slowest_ms == pytest.approx(6000.0, rel=0.05)


# -- each question by itself


def report(**changes: object) -> Run:
    """A plain run: 500 requests of 1000 + 100 tokens at concurrency 8, nothing wrong with it."""
    figures: dict[str, float] = {
        "completed": 500.0,
        "failed": 0.0,
        "duration": 500.0,
        "total_input_tokens": 500_000.0,
        "total_output_tokens": 50_000.0,
        "output_throughput": 100.0,
        "mean_ttft_ms": 400.0,
        "median_ttft_ms": 390.0,
        "p99_ttft_ms": 520.0,
        "mean_tpot_ms": 76.0,
        "mean_itl_ms": 76.0,
        "median_itl_ms": 70.0,
        "p99_itl_ms": 120.0,
        "mean_e2el_ms": 7900.0,
    }
    settings = {"tool": "vllm bench serve", "max_concurrency": 8, "num_warmups": 5, "seed": 1}
    settings |= {"dataset_name": "random"}
    for key, value in changes.items():
        if key in ("name", "engine", "kv_given", "view", "paired"):
            continue
        target = figures if isinstance(value, float) and key != "request_rate" else settings
        target[key] = value
    name, engine, pool = changes.get("name", "r"), changes.get("engine", {}), changes.get("kv_given", 100_000)
    return Run(str(name), figures=figures, settings=settings, engine=engine, kv_given=pool)


def test_a_clean_pair_is_comparable():
    findings = audit((report(name="a", seed=1), report(name="b", seed=2, engine={})))
    assert verdict(findings) == "comparable", [f for f in findings if f.level in ("care", "stop")]


@pytest.mark.parametrize(
    ("change", "question", "level", "words"),
    [
        ({"total_input_tokens": 520_000.0}, "input", "stop", "another input length"),
        ({"total_output_tokens": 51_000.0}, "input", "stop", "another output length"),
        ({"dataset_name": "sharegpt"}, "input", "care", "dataset_name"),
        ({"tool": "sglang.bench_serving"}, "client", "care", "two clients"),
        ({"endpoint": "/v1/chat/completions"}, "client", "care", "chat template"),
        ({"failed": 20.0}, "failures", "stop", "20 requests failed"),
        ({"failed": 2.0}, "failures", "care", "2 requests failed"),
        ({"engine": {"max_num_seqs": 8, "gpu": "A"}}, "dimensions", "stop", "2 things changed"),
        ({"request_rate": 3.0, "max_concurrency": None}, "saturated", "stop", "3 requests/s offered"),
        ({"kv_given": 6_600}, "capacity", "care", "5 of 8 fit"),
        ({"seed": 1}, "cache", "care", "one seed"),
    ],
)
def test_what_spoils_a_comparison_is_found(change, question, level, words):
    base = {"endpoint": "/v1/completions", "engine": {"max_num_seqs": 4, "gpu": "B"}}
    first = report(name="a", **base)
    second = report(name="b", **{"seed": 2, **base, **change})
    findings = audit((first, second))
    assert any(f.question == question and f.level == level for f in findings), about(findings, question)
    assert words in about(findings, question)


def test_a_sweep_that_also_sends_more_prompts_is_a_matter_of_care():
    first = report(name="a")
    alone = report(name="b", seed=2, max_concurrency=16)
    (one,) = [f for f in audit((first, alone)) if f.question == "dimensions"]
    assert (one.level, one.evidence.startswith("concurrency 8 to 16")) == ("ok", True)
    more = report(name="b", seed=2, max_concurrency=16, completed=1000.0, total_input_tokens=1_000_000.0)
    (both,) = [f for f in audit((first, more)) if f.question == "dimensions"]
    assert both.level == "care"
    assert "prompts 500 to 1000" in both.evidence


def test_one_flag_that_changed_is_what_one_wants():
    findings = audit(
        (
            report(name="a", engine={"engine": "vllm", "max_num_seqs": 64}),
            report(name="b", seed=2, engine={"engine": "vllm", "max_num_seqs": 128}),
        )
    )
    (one,) = [f for f in findings if f.question == "dimensions"]
    assert one.level == "ok"
    assert "max_num_seqs 64 to 128" in one.evidence


def test_a_client_that_never_filled_its_cap():
    text = about(audit((report(max_concurrency=32),)), "client_limited")
    assert "care the client never filled its cap" in text
    assert "7.9 of 32" in text


def test_preemptions_are_told_with_their_price():
    findings = audit((report(name="b", num_preemptions=60.0), report(name="a", max_concurrency=1)))
    text = about(findings, "percentiles", "b")
    assert "60 preemptions in 500 requests" in text
    assert "about 24 s of prefill or 5% of the run" in text


def test_a_verdict_is_the_worst_of_its_findings():
    def one(level):
        return Finding("input", level, "", "")

    assert verdict([one("ok"), one("note"), one("unknown")]) == "comparable"
    assert verdict([one("ok"), one("care")]) == "comparable with care"
    assert verdict([one("care"), one("stop")]) == "not comparable"
    assert exit_status("not comparable", strict=False) == 3
    assert exit_status("comparable with care", strict=False) == 0
    assert exit_status("comparable with care", strict=True) == 1
    assert exit_status("comparable", strict=True) == 0
    assert set(QUESTIONS) >= {"input", "client", "dimensions", "samples", "capacity"}


# -- /metrics and logs

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


# -- results with requests


def test_a_predicted_run_carries_all_that_is_needed(tmp_path):
    outcome = evaluate(reference_source("vllm", 64, 128).build())
    path = tmp_path / "result.json"
    write_result(outcome.result, path)
    (run,) = read([str(path)])
    assert run.kv_tokens == 194_896
    assert run.preemptions == outcome.preemptions
    findings = audit((run,))
    assert "42 of 64 fit" in about(findings, "capacity")


def test_little_s_law_agrees_with_the_simulator_s_own_queue():
    outcome = evaluate(reference_source("vllm", 128, 256).build())
    figures = {k: float(v) for k, v in outcome.result.aggregates.items() if isinstance(v, int | float)}
    run = Run("r", figures=figures, settings={"max_concurrency": 128}, kv_given=194_896)
    low, high = run.queue_share()
    assert low - 0.03 <= outcome.queue_share <= high + 0.03


# -- figures that no run can have


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mean_ttft_ms": NaN, "completed": 5}', "mean_ttft_ms: nan: must be finite"),
        ('{"runs": [{"mean_ttft_ms": 5}, {"p99_itl_ms": 1e99}]}', r"run 2 p99_itl_ms: 1e\+99: is beyond"),
        ("Mean TTFT (ms): 99999999999999999999\nMean TPOT (ms): 5", "mean_ttft_ms: 1e\\+20: is beyond"),
        ("Mean TTFT (ms): 1.2.3\n", "'1.2.3': is no number"),
        ('{"servecast": {"format": 1, "origin": "measured"}, "mean_ttft_ms": 1.0}', "lacks the field"),
    ],
)
def test_figures_that_no_run_can_have_are_refused(tmp_path, text, words):
    with pytest.raises(BadInput, match=words):
        read_material(files(tmp_path, made=text)[0])


# -- the command


def test_exit_statuses(pair, tmp_path):
    runner = CliRunner()
    assert runner.invoke(audit_command, pair, catch_exceptions=False).exit_code == 0
    assert runner.invoke(audit_command, [*pair, "--strict"], catch_exceptions=False).exit_code == 1
    short = printed(run_of("vllm", 128)).replace("1048576", "524288")
    other = files(tmp_path, short=short)
    done = runner.invoke(audit_command, [pair[1], *other, "--json"], catch_exceptions=False)
    assert done.exit_code == 3
    content = json.loads(done.output)
    assert content["verdict"] == "not comparable"
    assert content["exit_status"] == 3
    assert {f["question"] for f in content["findings"]} <= set(QUESTIONS)


def test_with_the_launch_command_the_queue_is_simulated_too(pair):
    arguments = [*pair, "--kv-cache-tokens", "194,896", "--gpu", "RTX-5090"]
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.85 --max-num-batched-tokens 8192"
    done = CliRunner().invoke(
        audit_command, [*arguments, "--serve", f"{serve} --max-num-seqs 128"], catch_exceptions=False
    )
    assert "96% in a simulation of this run" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing of use\n", "holds no benchmark report"),
        ("", "is empty"),
        ("{}", "no known format"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, text, words):
    (path,) = files(tmp_path, x=text)
    with pytest.raises(BadInput, match=words):
        read_material(path)


def test_bad_options_end_with_status_2(pair, capsys):
    for extra in (["--kv-cache-tokens", "many"], ["--serve", "vllm serve m"]):
        with pytest.raises(SystemExit) as end:
            main(["audit", *pair, *extra])
        assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_resolved_flag_that_differs_is_a_second_dimension():
    def predicted(rate: float, share: float) -> BenchResult:
        return BenchResult(
            origin="predicted",
            tool="servecast predict",
            identity={
                "engine_args": {"gpu_memory_utilization": share},
                "request_rate": rate,
                "num_prompts": 100,
            },
            duration=50.0,
            aggregates={"completed": 100, "failed": 0, "mean_ttft_ms": 300.0},
        )

    runs = (_of_result(predicted(2.0, 0.92), "a"), _of_result(predicted(4.0, 0.8), "b"))
    (found,) = [f for f in audit(runs) if f.question == "dimensions"]
    assert found.level == "stop"
    assert "gpu_memory_utilization 0.92 to 0.8" in found.evidence
