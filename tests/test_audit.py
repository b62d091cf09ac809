from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from bench.audit.audit import audit
from bench.audit.cli import audit as audit_command
from bench.audit.combine import distinct_names
from bench.audit.facts import Run
from bench.audit.finding import QUESTIONS, Finding, exit_status, in_order, verdict
from bench.audit.quality import cold_from_aggregates
from bench.audit.reading import _of_result, read_material
from bench.audit.text import WIDTH, render, said_once
from cli import main
from sim.errors import BadInput, EngineStuck
from sim.explain.outcome import evaluate
from sim.results import BenchResult
from sim.results_io.files import write_result
from tests.audit_runs import about, files, read, report
from tests.explain_scenarios import printed, reference_source, run_of
from tests.test_report import result

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


def test_what_is_found_of_several_runs_is_said_once():
    def found(name, text, effect=""):
        return Finding("warmup", "note", "no warm-up", text, effect, "--num-warmups 5", (name,))

    both = [found("a.json", "rate 1: none", "cold"), found("b.json", "rate 2: none", "cold")]
    labels = {"a.json": "rate 1", "b.json": "rate 2"}
    (one,) = said_once(both, labels)
    assert one.evidence == "rate 1 and rate 2: none"
    assert one.effect == "cold"
    assert one.runs == ("a.json", "b.json")
    (one,) = said_once([both[0], found("b.json", "rate 2: two", "hot")], labels)
    assert one.evidence == "rate 1: none; rate 2: two"
    assert one.effect == "rate 1: cold; rate 2: hot"
    same = {"a.json": "rate 1", "b.json": "rate 1"}
    (one,) = said_once([both[0], found("b.json", "rate 1: none", "cold")], same)
    assert one.evidence == "a.json and b.json: none"
    graver = [replace(both[1], level="care"), both[0]]
    assert said_once(graver, labels) == graver


def test_questions_keep_their_numbers_whichever_are_open(pair):
    findings = audit(read(pair))
    few = [f for f in findings if f.question in ("warmup", "capacity")]
    for some in (findings, few):
        text = render(read(pair), some, verdict(some))
        assert "6. Warm-ups" in text
        assert "11. More concurrency" in text
        assert text.count("no warm-up:") == 1


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


def test_an_effect_is_told_of_tails_as_well(pair):
    one = read(pair[:1])[0]
    two = replace(one, name="other", figures={**one.figures, "p99_ttft_ms": 4 * one.figures["p99_ttft_ms"]})
    (found,) = [f for f in audit((one, two)) if f.question == "dimensions"]
    assert "mean TTFT x 1, P99 TTFT x 4," in found.effect


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ttfts": [0.1, -0.1]}, "ttfts|first_token"),
        ({"ttfts": [100.0, 100.0]}, "wrong unit"),
        ({"output_lens": [4, -1]}, "output_lens"),
        ({"mean_ttft_ms": "29"}, "mean_ttft_ms: must be a number"),
        ({"duration": 0.0}, "duration"),
        ({"completed": 99}, "completed"),
    ],
)
def test_an_audit_believes_no_more_than_a_comparison(tmp_path, change, words):
    document = {
        "duration": 2.0,
        "completed": 2,
        "failed": 0,
        "request_throughput": 1.0,
        "total_token_throughput": 14.0,
        "request_rate": 2.0,
        "start_times": [0.0, 0.5],
        "ttfts": [0.1, 0.1],
        "itls": [[0.1, 0.1, 0.1], [0.1]],
        "input_lens": [10, 15],
        "output_lens": [4, 2],
        "mean_ttft_ms": 100.0,
    }
    (good,) = files(tmp_path, good=json.dumps(document))
    assert read_material(good).runs[0].result.records is not None
    (bad,) = files(tmp_path, bad=json.dumps({**document, **change}))
    with pytest.raises(BadInput, match=words):
        read_material(bad)


def test_an_audit_of_times_of_zero_is_no_crash(tmp_path):
    zeros = {f"{s}_{m}_ms": 0.0 for s in ("mean", "median", "p99") for m in ("ttft", "tpot", "itl", "e2el")}
    (path,) = files(tmp_path, zeros=json.dumps({"duration": 10.0, "completed": 20, **zeros}))
    assert CliRunner().invoke(audit_command, [path], catch_exceptions=False).exit_code == 0


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


def test_a_report_is_given_once(tmp_path):
    path = tmp_path / "r.txt"
    path.write_text("Mean TTFT (ms): 5\n", encoding="utf-8")
    done = CliRunner().invoke(audit_command, [str(path), str(path)])
    assert isinstance(done.exception, BadInput)
    assert "given twice" in str(done.exception)


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


# -- several files


def rated(rate: float, ttft: float) -> str:
    """Figures of an open loop whose answers came at about 2 requests/s, whatever was offered."""
    figures = {
        "request_rate": rate,
        "completed": 400,
        "failed": 0,
        "duration": 202.0,
        "total_input_tokens": 400_000,
        "total_output_tokens": 40_000,
        "mean_ttft_ms": ttft,
        "mean_tpot_ms": 20.0,
        "mean_e2el_ms": ttft + 99 * 20.0,
    }
    return json.dumps(figures)


def test_files_of_one_name_are_told_apart(tmp_path):
    paths = []
    for folder, rate, ttft in (("rate20", 20.0, 58_000.0), ("rate2", 2.0, 100.0)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "result.json"
        path.write_text(rated(rate, ttft))
        paths.append(str(path))
    for order in (paths, paths[::-1]):
        done = CliRunner().invoke(audit_command, [*order, "--json"], catch_exceptions=False)
        assert done.exit_code == 3
        content = json.loads(done.output)
        assert {run["name"] for run in content["runs"]} == {"rate20/result.json", "rate2/result.json"}
        (stop,) = [f for f in content["findings"] if f["level"] == "stop"]
        assert stop["runs"] == ["rate20/result.json"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.json", "y/b.json"], ["a.json", "b.json"]),
        (["x/a.json", "y/a.json", "b"], ["x/a.json", "y/a.json", "b"]),
        (["a.json", "x/a.json"], ["a.json", "x/a.json"]),
        (["1/x/a", "2/x/a", "2/y/a"], ["1/x/a", "2/x/a", "y/a"]),
        (["/x/a", "x/a"], ["/x/a", "x/a"]),
    ],
)
def test_names_are_as_short_as_they_can_be(paths, names):
    assert distinct_names(paths) == names


def test_a_file_is_given_once_under_whatever_path(tmp_path):
    (path,) = files(tmp_path, r="Mean TTFT (ms): 5\n")
    done = CliRunner().invoke(audit_command, [path, f"{tmp_path}/../{tmp_path.name}/r.txt"])
    assert isinstance(done.exception, BadInput)
    assert "given twice" in str(done.exception)


# -- what is not known is no zero


def without(run: Run, *keys: str) -> Run:
    return replace(run, figures={key: value for key, value in run.figures.items() if key not in keys})


def test_an_unknown_length_is_no_other_length():
    whole = report(name="a")
    part = without(report(name="b", seed=2), "total_output_tokens")
    for runs in ((part, replace(part, name="c")), (whole, part), (part, whole)):
        (found,) = [f for f in audit(runs) if f.question == "input"]
        assert found.level == "unknown"
        assert found.evidence.endswith("tokens were generated")
    other = report(name="c", seed=3, total_output_tokens=90_000.0)
    assert {f.level for f in audit((whole, part, other)) if f.question == "input"} == {"stop", "unknown"}
    none = report(name="d", seed=4, total_output_tokens=0.0)
    assert "one had no output at all" in about(audit((whole, none)), "input")


def test_reports_of_which_one_is_cut_are_not_made_one_run(tmp_path):
    whole, other = printed(run_of("vllm", 1)), printed(run_of("vllm", 128))
    cut = "\n".join(line for line in other.splitlines() if "Successful" not in line)
    (path,) = files(tmp_path, paste=f"{whole}\n{cut}\n")
    with pytest.raises(BadInput, match="is it truncated"):
        read_material(path)
    (alone,) = read(files(tmp_path, alone=cut))
    assert alone.settings["tool"] == "part of a report"
    (path,) = files(tmp_path, loose="Mean TTFT (ms): 5\nMean TPOT (ms): 2\n\nMean TTFT (ms): 9\n")
    with pytest.raises(BadInput, match="mean_ttft_ms as 5 and as 9: give each run a file of its own"):
        read_material(path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_concurrency": [1, 128]}, "run 1 max_concurrency: must be a whole number"),
        ({"max_concurrency": "auto"}, "run 1 max_concurrency: 'auto'"),
        ({"num_prompts": "many"}, "run 1 num_prompts"),
        ({"request_rate": [1, 2]}, "run 1 request_rate"),
        ({"random_prefix_len": "long"}, "run 1 random_prefix_len"),
        ({"seed": [1]}, "run 1 seed"),
        ({"kv_cache_tokens": float("nan")}, "run 1 kv_cache_tokens"),
        ({"num_preemptions": float("inf")}, "run 1 num_preemptions"),
    ],
)
def test_settings_that_no_client_has_are_refused(tmp_path, more, words):
    (path,) = files(tmp_path, made=json.dumps({"mean_ttft_ms": 500, **more}))
    with pytest.raises(BadInput, match=words):
        read_material(path)


def test_settings_that_a_client_prints_are_held_to_the_same(tmp_path):
    text = "Namespace(max_concurrency={})\nMean TTFT (ms): 500\n"
    with pytest.raises(BadInput, match="max_concurrency"):
        read_material(files(tmp_path, odd=text.format("'auto'"))[0])
    trace = "Namespace(request_rate=trace, num_prompts=5)\nMean TTFT (ms): 500\n"
    (run,) = read(files(tmp_path, trace=trace))
    assert run.rate is None
    odd = json.dumps({"mean_ttft_ms": 500, "request_rate": "4", "stamp": 10**400})
    (run,) = read(files(tmp_path, odd=odd))
    assert run.label == "rate 4"


def test_figures_of_the_server_in_a_result_of_ours_are_numbers(tmp_path):
    path = tmp_path / "own.json"
    write_result(result(server={"kv_cache_tokens": 1000}), path)
    assert read([str(path)])[0].kv_tokens == 1000
    document = json.loads(path.read_text())
    document["servecast"]["server"]["kv_cache_tokens"] = "many"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput, match="server kv_cache_tokens"):
        read_material(str(path))


# -- runs that are simulated

SERVE = "vllm serve Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("idle", [["--gpu", "nonsense"], ["--engine-version", "nonsense"]])
def test_options_of_the_simulation_do_not_stand_idle(pair, idle):
    done = CliRunner().invoke(audit_command, [*pair, *idle])
    assert isinstance(done.exception, BadInput)
    assert done.exception.field == idle[0]
    assert "--serve" in done.exception.hint


def test_a_launch_is_checked_even_where_no_run_can_be_simulated(tmp_path):
    paths = files(tmp_path, part="Mean TTFT (ms): 5\n")
    for gpu, serve, field in (("H100", "vllm serve", "--model"), ("no-such-gpu", SERVE, "--gpu")):
        done = CliRunner().invoke(audit_command, [*paths, "--serve", serve, "--gpu", gpu])
        assert isinstance(done.exception, BadInput), done.output
        assert done.exception.field == field


def test_a_launch_from_standard_input_is_read_once_for_all_runs(pair, monkeypatch):
    simulated = []

    def note(scenario):
        simulated.append(scenario.workload.max_concurrency)
        return SimpleNamespace(queue_share=0.5)

    monkeypatch.setattr("bench.audit.simulation.evaluate", note)
    arguments = [*pair, "--serve", "-", "--gpu", "H100"]
    CliRunner().invoke(audit_command, arguments, input=SERVE, catch_exceptions=False)
    assert simulated == [1, 128]


def test_a_run_that_was_not_simulated_is_told(pair, tmp_path):
    paths = [pair[0], *files(tmp_path, part="Successful requests: 20\nMean TTFT (ms): 5\n")]
    arguments = [*paths, "--gpu", "H100", "--serve", f"{SERVE} --max-model-len 4096"]
    done = CliRunner().invoke(audit_command, arguments, catch_exceptions=False)
    told = " ".join(done.output.split())
    assert "concurrency 1: this launch refuses its requests" in told
    assert "part.txt: the report does not tell prompt length, output length, rate or concurrency" in told


def test_an_engine_that_gets_stuck_is_no_silence(pair, monkeypatch):
    def stuck(scenario):
        raise EngineStuck("request 7: can never be scheduled")

    monkeypatch.setattr("bench.audit.simulation.evaluate", stuck)
    arguments = [pair[1], "--gpu", "H100", "--serve", SERVE, "--json"]
    done = CliRunner().invoke(audit_command, arguments, catch_exceptions=False)
    (found,) = [f for f in json.loads(done.output)["findings"] if "stuck" in f["title"]]
    assert found["level"] == "care"
    assert "request 7" in found["evidence"]
