import json
import math

import pytest

from sim.comparison.identity import followed_times, load_of
from sim.errors import BadInput
from sim.results_io.files import read_result, read_results


def reading(tmp_path, document, name="r.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_result(path)


# -- printed reports

REPORT = """INFO 12-01 18:26:29 starting
Namespace(backend='vllm', seed=14, num_prompts=8, dataset_name='random', model='m', api_key=None)
Traffic request rate: inf
Burstiness factor: 1.0 (Poisson process)
Maximum request concurrency: 4
100%|##########| 8/8 [00:13<00:00,  1.71s/it]
============ Serving Benchmark Result ============
Successful requests:                     8
Failed requests:                         0
Maximum request concurrency:             4
Benchmark duration (s):                  13.67
Total input tokens:                      4096
Total generated tokens:                  512
Request throughput (req/s):              0.59
Output token throughput (tok/s):         37.45
Peak output token throughput (tok/s):    52.00
Peak concurrent requests:                6.00
Total Token throughput (tok/s):          337.07
---------------Time to First Token----------------
Mean TTFT (ms):                          1429.67
Median TTFT (ms):                        1403.06
P99 TTFT (ms):                           1947.64
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          85.50
P99.9 TPOT (ms):                         94.80
----------------End-to-end Latency----------------
Mean E2EL (s):                           6.81591
==================================================
"""


def test_a_pasted_report_is_read_with_its_settings(tmp_path):
    result = reading(tmp_path, REPORT, "paste.txt")
    figures = result.aggregates
    assert figures["completed"] == 8
    assert figures["duration"] == result.duration == 13.67
    assert figures["max_output_tokens_per_s"] == 52.0
    assert figures["total_token_throughput"] == 337.07
    assert figures["mean_ttft_ms"] == 1429.67
    assert figures["p99.9_tpot_ms"] == 94.8
    assert figures["mean_e2el_ms"] == pytest.approx(6815.91)  # printed in seconds here
    assert result.identity["max_concurrency"] == 4
    assert result.identity["seed"] == 14
    assert result.identity["model"] == "m"
    assert "api_key" not in result.identity
    assert result.tool == "vllm bench serve"


def test_a_pasted_prediction_is_no_measurement_and_its_intervals_are_passed_over(tmp_path):
    text = REPORT.replace("13.67\n", "13.67      90%: 12 to 15.5\n").replace(
        "1947.64\n", "1947.64    90%: 1700 to 2300  n = 8, 95 %: 1500.00 to no upper bound\n"
    )
    result = reading(tmp_path, "predicted: vllm · 0.28 · m · L4\n" + text, "paste.txt")
    assert (result.origin, result.tool) == ("predicted", "servecast predict")
    assert result.duration == 13.67
    assert result.aggregates["p99_ttft_ms"] == 1947.64
    assert reading(tmp_path, REPORT, "paste2.txt").origin == "measured"


def test_reports_survive_quoting_and_several_can_follow_each_other(tmp_path):
    quoted = "\n".join("# " + line for line in REPORT.splitlines())
    path = tmp_path / "two.txt"
    path.write_text(quoted + "\n" + REPORT.replace("13.67", "27.34"))
    assert [r.duration for r in read_results(path)] == [13.67, 27.34]


def test_sglangs_printed_report_is_told_apart(tmp_path):
    text = REPORT.replace("Mean E2EL (s):", "Mean E2E Latency (s):").replace(
        "Successful requests:", "Backend:                                 sglang\nSuccessful requests:"
    )
    text = text.replace("Failed requests:                         0\n", "")
    result = reading(tmp_path, text, "sglang.txt")
    assert result.tool == "sglang.bench_serving"
    assert result.aggregates["mean_e2el_ms"] == pytest.approx(6815.91)
    assert result.verdict.status == "SUSPECT"  # it does not print how many failed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Benchmark duration (s):                  13.67\n", "", 'lacks the line "Benchmark duration'),
        ("1429.67", "fast", "line 20 Mean TTFT: 'fast': must be a number"),
        ("1429.67", "nan", "must be a number, finite"),
        ("Mean TTFT (ms)", "Mean TTFT (furlongs)", "not a unit of time"),
        ("1429.67", "1429670000", "longer than the run"),
    ],
)
def test_bad_reports_name_the_line(tmp_path, old, new, message):
    with pytest.raises(BadInput, match=message):
        reading(tmp_path, REPORT.replace(old, new), "bad.txt")


def test_a_truncated_report_is_called_so(tmp_path):
    with pytest.raises(BadInput, match="truncated"):
        reading(tmp_path, REPORT[: REPORT.index("------Time to")], "cut.txt")


# -- other clients


def sglang_line(**change):
    line = {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": 4.0,
        "max_concurrency": 16,
        "duration": 10.0,
        "completed": 20,
        "total_input_tokens": 2000,
        "total_output_tokens": 400,
        "request_throughput": 2.0,
        "output_throughput": 40.0,
        "total_throughput": 240.0,
        "concurrency": 3.5,
        "max_output_tokens_per_s": 60.0,
        "max_concurrent_requests": 7,
    }
    for metric, value in (("ttft", 100.0), ("tpot", 20.0), ("itl", 20.0), ("e2e_latency", 480.0)):
        line |= {f"{s}_{metric}_ms": value for s in ("mean", "median", "std", "p90", "p95", "p99")}
    return {**line, **change}


def test_sglang_lines_are_read_one_by_one(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(json.dumps(sglang_line(errors=e)) for e in ([], ["boom", ""])))
    first, second = read_results(path)
    assert first.tool == "sglang.bench_serving"
    assert first.aggregates["mean_e2el_ms"] == 480.0
    assert first.aggregates["p95_itl_ms"] == 20.0
    assert first.aggregates["total_token_throughput"] == 240.0
    assert (first.aggregates["failed"], second.aggregates["failed"]) == (0, 1)
    assert second.verdict.status == "INVALID"
    unknown = reading(tmp_path, sglang_line(), "one.jsonl")
    assert unknown.aggregates["failed"] is None
    assert unknown.verdict.status == "SUSPECT"
    with pytest.raises(BadInput, match=r"line 2.*truncated"):
        reading(tmp_path, json.dumps(sglang_line()) + '\n{"backend": "sgl', "cut.jsonl")


def distribution(mean, scale=1.0, **more):
    names = {"mean": 1.0, "median": 0.9, "std_dev": 0.1, "count": 4 / mean / scale}
    spread = {"p001": 0.5, "p50": 0.9, "p90": 1.3, "p95": 1.4, "p99": 1.5, "p999": 1.6}
    block = {k: mean * v * scale for k, v in names.items()} | more
    return {"successful": {**block, "percentiles": {k: mean * v * scale for k, v in spread.items()}}}


def guidellm_report(**metrics):
    return {
        "args": {"model": "m", "target": "http://localhost:8000"},
        "benchmarks": [
            {
                "duration": 30.0,
                "config": {"strategy": {"type_": "concurrent", "streams": 8}},
                "metrics": {
                    "request_totals": {"successful": 4, "incomplete": 0, "errored": 0, "total": 4},
                    "requests_per_second": distribution(2.0),
                    "output_tokens_per_second": distribution(40.0),
                    "tokens_per_second": distribution(240.0),
                    "prompt_token_count": distribution(100.0, total_sum=400.0),
                    "output_token_count": distribution(21.0, total_sum=84.0),
                    "time_to_first_token_ms": distribution(100.0),
                    "inter_token_latency_ms": distribution(20.0),
                    "time_per_output_token_ms": distribution(23.8),
                    "request_latency": distribution(0.5),
                    **metrics,
                },
            }
        ],
    }


def test_guidellm_latencies_come_in_two_units_and_its_itl_is_a_tpot(tmp_path):
    result = reading(tmp_path, guidellm_report())
    figures = result.aggregates
    assert figures["mean_e2el_ms"] == 500.0
    assert figures["p99_e2el_ms"] == 750.0
    assert figures["p99.9_ttft_ms"] == pytest.approx(160.0)
    assert figures["mean_tpot_ms"] == figures["mean_itl_ms"] == 20.0
    assert "p99_itl_ms" not in figures
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (4, 0, 84)
    assert figures["request_throughput"] == 2.0
    assert result.identity["max_concurrency"] == 8
    assert result.tool == "guidellm"
    cut = reading(tmp_path, guidellm_report(request_totals={"successful": 4, "incomplete": 2, "errored": 1}))
    assert (cut.aggregates["failed"], cut.verdict.status) == (3, "INVALID")
    with pytest.raises(BadInput, match=r"benchmarks\[0\].*mean_e2el_ms"):
        reading(tmp_path, guidellm_report(request_latency=distribution(500.0)))
    with pytest.raises(BadInput, match="holds no benchmark"):
        reading(tmp_path, {"benchmarks": []})


def aiperf_summary(unit="ms", scale=1.0, **change):
    def block(mean, **more):
        return {"unit": unit, **dict.fromkeys(("avg", "p50", "p90", "p99", "std"), mean * scale), **more}

    return {
        "schema_version": "1.5",
        "time_to_first_token": block(100.0, count=20),
        "inter_token_latency": block(20.0),
        "inter_chunk_latency": block(19.0),
        "request_latency": block(480.0),
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 40.0},
        "input_sequence_length": {"unit": "tokens", "avg": 100.0, "sum": 2000},
        "output_sequence_length": {"unit": "tokens", "avg": 20.0},
        "request_count": {"unit": "requests", "avg": 20.0},
        "error_summary": [],
        **change,
    }


@pytest.mark.parametrize(("unit", "scale"), [("ms", 1.0), ("s", 1e-3), ("us", 1e3), ("ns", 1e6)])
def test_aiperf_units_are_obeyed(tmp_path, unit, scale):
    figures = reading(tmp_path, aiperf_summary(unit, scale)).aggregates
    assert figures["mean_ttft_ms"] == pytest.approx(100.0)
    assert figures["p99_e2el_ms"] == pytest.approx(480.0)
    assert figures["mean_tpot_ms"] == pytest.approx(20.0)
    assert figures["mean_itl_ms"] == pytest.approx(19.0)
    assert (figures["completed"], figures["failed"]) == (20, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (2000, 400)
    assert figures["duration"] == pytest.approx(10.0)  # 20 requests at 2 per second
    assert figures["total_token_throughput"] == pytest.approx(240.0)


def test_aiperf_without_usable_units_is_refused(tmp_path):
    with pytest.raises(BadInput, match="time_to_first_token unit: 'fortnights'"):
        reading(tmp_path, aiperf_summary("fortnights"))
    with pytest.raises(BadInput, match="request_throughput unit: 'requests/min'"):
        reading(tmp_path, aiperf_summary(request_throughput={"unit": "requests/min", "avg": 120.0}))
    with pytest.raises(BadInput, match="benchmark_duration"):
        reading(tmp_path, aiperf_summary(request_throughput={}))


def test_aiperf_tables_say_the_same(tmp_path):
    text = """Metric,avg,min,max,p50,p90,p99,std
Inter Token Latency (ms),20.00,19,21,20.00,20.50,20.90,0.40
Output Sequence Length (tokens),20.00,20,20,20.00,20.00,20.00,0.00
Input Sequence Length (tokens),100.00,100,100,100.00,100.00,100.00,0.00
Request Latency (ms),480.00,470,490,480.00,486.00,489.00,5.00
Time to First Token (ms),"1,100.00",90,110,100.00,105.00,109.00,5.00

Metric,Value
Request Count,20
Request Throughput (requests/sec),2.00
Error Request Count,1
Benchmark Duration (sec),10.00

Endpoint,GPU_Index,GPU_Name
localhost,0,NVIDIA H100
"""
    result = reading(tmp_path, text.replace('"1,100.00"', "100.00"), "aiperf.csv")
    assert result.tool == "aiperf"
    assert result.aggregates["p90_ttft_ms"] == 105.0
    assert (result.aggregates["failed"], result.duration) == (1, 10.0)
    assert reading(tmp_path, text, "comma.csv").aggregates["mean_ttft_ms"] == 1100.0
    with pytest.raises(BadInput, match="line 5 p99: '48x'"):
        reading(tmp_path, text.replace("489.00", "48x"), "bad.csv")
    with pytest.raises(BadInput, match=r"line 2.*columns"):
        reading(tmp_path, text.replace("20.90,0.40", "20.90,0.40,7"), "wide.csv")


@pytest.mark.parametrize(
    ("strategy", "load", "burstiness"),
    [
        ({"type_": "synchronous"}, (math.inf, 1), None),
        ({"type_": "concurrent", "streams": 16}, (math.inf, 16), None),
        ({"type_": "throughput"}, (math.inf, None), None),
        ({"type_": "throughput", "max_concurrency": 64}, (math.inf, 64), None),
        ({"type_": "constant", "rate": 4.0}, (4.0, None), math.inf),
        ({"type_": "poisson", "rate": 4.0, "max_concurrency": 8}, (4.0, 8), None),
    ],
)
def test_guidellm_strategies_say_their_load(tmp_path, strategy, load, burstiness):
    document = guidellm_report()
    document["benchmarks"][0]["config"] = {"strategy": strategy}
    identity = reading(tmp_path, document).identity
    assert load_of(identity) == load
    assert identity.get("burstiness") == burstiness


@pytest.mark.parametrize(
    ("config", "load", "model"),
    [
        ({"loadgen": {"concurrency": 8}, "endpoint": {"model_names": ["m"]}}, (math.inf, 8), "m"),
        ({"loadgen": {"concurrency": None, "request_rate": 3.5}}, (3.5, None), None),
        ({"models": {"items": [{"name": "m"}]}, "loadgen": []}, (None, None), None),
        (None, (None, None), None),
    ],
)
def test_aiperf_says_its_load_as_far_as_its_form_is_known(tmp_path, config, load, model):
    identity = reading(tmp_path, aiperf_summary(input_config=config)).identity
    assert load_of(identity) == load
    assert identity.get("model") == model


def test_a_rate_called_trace_is_that_of_its_times(tmp_path):
    for identity in (
        reading(tmp_path, json.dumps(sglang_line(request_rate="trace")), "s.jsonl").identity,
        reading(tmp_path, REPORT.replace("request rate: inf", "request rate: trace"), "p.txt").identity,
    ):
        assert load_of(identity)[0] is None
        assert followed_times(identity)
