from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import cli
from calibration.fit import fit
from calibration.profile_writing import Facts, profile_content
from calibration.validate.truth import STEP_COEFFICIENTS, measured_steps, prior, truth_near
from calibration.validate.truth import scenario as truth_scenario
from sim.build import read_source
from sim.cli.explain import explain
from sim.commands import bench as bench_commands
from sim.commands import serve as serve_commands
from sim.errors import BadInput
from sim.explain.changes import candidates
from sim.explain.knowledge import client_knobs, coefficients, concepts, knobs, log_phrases, metrics, movers
from sim.explain.lookup import ENGINES, find, known_names, nearest, plain
from sim.explain.numbers import numbers
from sim.explain.numbers import render as render_numbers
from sim.explain.outcome import evaluate
from sim.explain.page import WIDTH, default_version, engine_of, render
from sim.output.report import TTFT_PARTS
from sim.output.report import render as render_report
from sim.profile import write_profile
from sim.results import ServerSeries
from sim.steptime.efficiencies import BOUNDS
from tests.explain_scenarios import SGLANG_128, VLLM_128, options, reference_source
from tests.metric_names import SGLANG, VLLM
from tests.test_report import result as report_result


def page(name: str, engine=None, version=None) -> str:
    found = find(name, engine)
    own = engine_of(found, engine)
    return render(found, own, version or default_version(own))


@pytest.mark.parametrize("name", VLLM)
def test_every_series_of_vllm_has_a_page(name):
    text = page(name)
    assert "class " in text
    assert "What " in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("name", SGLANG)
def test_every_metric_of_sglang_has_a_page(name):
    found = find(f"sglang:{name}")
    assert found.engine == "sglang"
    assert found.metric is not None
    assert "class " in page(f"sglang:{name}")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_flag_of_an_engine_has_a_page_and_every_modelled_one_a_knob(engine):
    for flag in serve_commands.table(engine).flags:
        found = find(flag.name, engine)
        text = page(flag.name, engine)
        assert found.engine == engine, flag.name
        assert flag.name in text
        assert max(map(len, text.splitlines())) <= WIDTH, flag.name
        if flag.role == "modelled":
            assert found.knob is not None, flag.name
            assert " ".join(found.knob.says.split())[:60] in " ".join(text.split())
        elif flag.role == "not-modelled":
            assert " ".join(flag.effect.split())[:30] in " ".join(text.split())
    assert set(knobs(engine)) == {f.name for f in serve_commands.table(engine).flags if f.role == "modelled"}


@pytest.fixture(scope="module")
def own_report():
    """A report of ours in which every section shows."""
    full = report_result(
        server={
            "kv_cache_tokens": 1000,
            "num_preemptions": 3,
            "prefix_cache_queries": 9,
            "prefix_cache_hits": 3,
        },
        extra={
            "device_time": dict.fromkeys(("compute", "bandwidth", "overhead", "host", "idle"), 1.0),
            "waiting_time": dict.fromkeys(("budget", "slots", "kv"), 1.0),
            "ttft_parts_ms": dict.fromkeys(TTFT_PARTS, 5.0),
        },
        series=ServerSeries(*(np.arange(4.0) / 4 for _ in fields(ServerSeries))),
        wait=1.0,
    )
    return render_report(full)


def test_every_line_and_section_of_our_own_report_is_found(own_report):
    titles = [line.strip("-") for line in own_report.splitlines() if line.startswith("--")]
    labels = [line.split(":")[0] for line in own_report.splitlines() if re.match(r"[A-Za-z][^:.]*: ", line)]
    assert {"What Bound the Device", "What Requests Waited for", "Where Mean TTFT Goes"} <= set(titles)
    assert {"budget (% of the time)", "Front end (ms)", "Peak KV use (%)"} <= set(labels)
    for name in {*titles, *labels} - {"Notes", "predicted"}:
        found = find(name)
        # One label is also, word for word, a phrase of vLLM's log.
        assert found.concept is not None or (found.log is not None and plain(found.name) == plain(name)), name


@pytest.mark.parametrize(
    ("name", "concept"),
    [
        ("budget", "waited_for"),
        ("knee", "knee"),
        ("saturated", "saturation"),
        ("What Requests Waited for", "waited_for"),
        ("What Bound the Device", "device_bound"),
        ("KV use", "kv_usage"),
        ("KV cache", "kv_capacity"),
        ("Waiting over time", "waiting"),
        ("SUSPECT", "verdict"),
    ],
)
def test_words_of_our_own_report_mean_what_it_means(name, concept):
    assert find(name).name == concept


def test_flags_of_the_clients_have_pages():
    for client in ("vllm", "sglang"):
        for flag in bench_commands.table(client).flags:
            assert flag.name in page(flag.name)
    for name in client_knobs():
        assert find(name).table_flag is not None, name


def test_the_knowledge_hangs_together():
    known = set(concepts())
    for key, concept in concepts().items():
        assert set(concept.beside) <= known, key
        # What lies outside an engine names its tool; what has a knob has one.
        assert bool(concept.tool) == (concept.metric_class == "C"), key
        if concept.metric_class == "A":
            client = [name for name, knob in client_knobs().items() if key in knob.moves]
            assert movers(key, "vllm") or client, key
    for engine in ENGINES:
        assert {entry.concept for entry in metrics(engine).values()} <= known
        assert {entry.concept for entry in log_phrases(engine)} <= known
        for name, knob in knobs(engine).items():
            assert set(knob.moves) | set(knob.beside) <= known, name
            assert knob.costs, name


def test_latencies_name_knobs_with_direction_and_price():
    text = page("ttft", "vllm")
    line = next(line for line in text.splitlines() if line.startswith("  --gpu-memory-utilization"))
    assert "raise" in line
    assert "down" in line
    assert "costs" in line
    assert "--mem-fraction-static" in page("ttft", "sglang")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("TTFT", "ttft"),
        ("Mean TTFT (ms):            1429.67", "ttft"),
        ("p99_itl_ms", "itl"),
        ("mean_e2e_latency_ms", "e2el"),
        ("Output token throughput (tok/s):", "throughput"),
        ("request_goodput", "goodput"),
        ("max-num-seqs", "--max-num-seqs"),
        ("max_num_seqs", "--max-num-seqs"),
        ("--gpu_memory_utilization=0.9", "--gpu-memory-utilization"),
        ("mem-fraction-static", "--mem-fraction-static"),
        ("num-warmups", "--num-warmups"),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.4', "vllm:kv_cache_usage_perc"),
        ("vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds"),
        ("kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("GPU KV cache size", "GPU KV cache size"),
        ("INFO 1 [kv.py:1] GPU KV cache size: 1,024 tokens", "GPU KV cache size"),
        ("Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 12 reqs", "Avg prompt throughput"),
        ("[TP0] Decode batch, #running-req: 3, token usage: 0.10", "Decode batch"),
        ("nccl", "nccl"),
        ("DCGM_FI_PROF_SM_ACTIVE", "sm_occupancy"),
    ],
)
def test_whatever_is_pasted_is_found(text, name):
    assert find(text).name == name


def test_a_log_line_with_two_figures_names_both():
    found = find("GPU KV cache size: 1,000 tokens, Maximum concurrency for 100 tokens per request: 10.00x")
    assert found.name == "GPU KV cache size"
    assert "Maximum concurrency for" in found.note


def test_older_names_and_versions_are_told():
    assert "older name" in page("vllm:gpu_cache_usage_perc")
    assert "inter_token_latency" in find("vllm:time_per_output_token_seconds_sum").name
    assert "does not have" in page("vllm:request_num_preemptions", version="0.28.0")
    assert "does not have" not in page("vllm:request_num_preemptions", version="0.33.0")
    assert "--max-num-active-seqs" not in page("running", "vllm", "0.28.0")
    assert "--max-num-active-seqs" in page("running", "vllm", "0.33.0")


def test_the_gauge_of_one_batch_is_told_from_a_run_s_hit_rate():
    assert "LAST prefill batch" in page("sglang:cache_hit_rate")


def test_estimated_flop_is_no_occupancy():
    assert "no measured occupancy" in " ".join(page("mfu").split())
    assert "--enable-mfu-metrics" in page("vllm:estimated_flops_per_gpu_total")
    text = " ".join(page("tensor_core").split())
    assert "ncu" in text
    assert "--enable-mfu-metrics" in text


def test_a_misspelling_is_taken_for_the_word_and_nonsense_is_refused():
    found = find("max-num-seq")
    assert found.name == "--max-num-seqs"
    assert "nothing is called" in found.note
    with pytest.raises(BadInput) as refusal:
        find("kv_usagee_percent_of")
    assert "names no metric" in str(refusal.value)
    assert nearest("tfft")[0] == "ttft"
    with pytest.raises(BadInput, match="ttft"):
        find("tfft")


def test_a_flag_of_both_engines_says_so():
    assert "--engine sglang" in page("--kv-cache-dtype", "vllm")
    assert find("--kv-cache-dtype", "sglang").engine == "sglang"
    assert "no such flag" in find("--max-num-seqs", "sglang").note


# -- with a scenario


@pytest.fixture(scope="module")
def ttft_numbers():
    return numbers(reference_source("vllm", 128, 256), find("ttft"))


def test_numbers_of_the_reference(ttft_numbers):
    base = ttft_numbers.base
    assert (base.fits, base.demand, base.kv_cache_tokens) == (42, 128, 194_896)
    assert 0.88 < base.queue_share < 0.99
    text = render_numbers(ttft_numbers)
    assert (
        "42 requests of 4,608 tokens fit the KV cache of 194,896; 128 are in flight, so 86 wait"
        in " ".join(text.split())
    )
    assert max(map(len, text.splitlines())) <= WIDTH


def tried(found, flag, after=None):
    return next(t for t in found.tried if t.change.flag == flag and after in (None, t.change.after))


def test_each_change_is_simulated(ttft_numbers):
    base = ttft_numbers.base
    assert "does nothing" in next(
        line for line in render_numbers(ttft_numbers).splitlines() if "max-num-seqs 128 -> 256" in line
    )
    more = tried(ttft_numbers, "--gpu-memory-utilization", "0.92").outcome
    assert more.fits > base.fits
    assert more.figures["mean_ttft_ms"] < base.figures["mean_ttft_ms"]
    shorter = tried(ttft_numbers, "--random-input-len").outcome
    assert shorter.fits == 194_896 // (2048 + 512)
    same = tried(ttft_numbers, "--max-model-len").outcome
    assert same.figures == base.figures


def test_a_flag_s_own_page_varies_that_flag_alone():
    found = numbers(reference_source("vllm", 1, 4), find("max-num-batched-tokens"))
    assert {t.change.flag for t in found.tried} == {"--max-num-batched-tokens"}
    assert len(found.tried) >= 2


@pytest.mark.parametrize("engine", ENGINES)
def test_what_knobs_say_of_the_pool_is_what_the_account_says(engine):
    """The directions that the pages give for the KV cache's size, against the memory account."""
    from sim.carry import account_of
    from sim.explain.carry import changed

    source = reference_source(engine, 128, 256)
    scenario = source.build()
    before = account_of(scenario).kv_pool_bytes / account_of(scenario).kv_bytes_per_token
    checked = 0
    for change in candidates(scenario, 42):
        said = change.knob(engine).moves.get("kv_capacity")
        if said is None or change.direction not in (change.knob(engine).change, "to"):
            continue
        account = account_of(changed(source, change.settings).build())
        after = account.kv_pool_bytes / account.kv_bytes_per_token
        # SGLang's fraction was given here, so what chunks reserve does not show.
        if engine == "sglang" and change.flag == "--chunked-prefill-size":
            continue
        assert (after > before) == (said == "up"), change
        checked += 1
    assert checked >= 3


def test_the_command_takes_unquoted_words_and_writes_json():
    runner = CliRunner()
    text = runner.invoke(explain, ["GPU", "KV", "cache", "size"], catch_exceptions=False)
    assert text.output.startswith('"GPU KV cache size"')
    done = runner.invoke(explain, ["ttft", *options(VLLM_128), "--json"], catch_exceptions=False)
    document = json.loads(done.output)
    assert document["class"] == "B"
    assert document["scenario"]["fits"] == 42
    assert document["scenario"]["wait"] == 86
    assert document["moved_by"]["--gpu-memory-utilization"]["direction"] == "down"


def test_a_flag_may_be_named_with_its_dashes():
    done = CliRunner().invoke(explain, ["--max-num-seqs", "--engine", "vllm"], catch_exceptions=False)
    assert done.output.startswith("--max-num-seqs")


def test_a_version_must_be_one():
    with pytest.raises(BadInput, match="--engine-version"):
        CliRunner().invoke(explain, ["ttft", "--engine-version", "newest"], catch_exceptions=False)


def test_the_scenario_decides_the_engine():
    done = CliRunner().invoke(
        explain, ["kv-cache-dtype", *options(SGLANG_128), "--json"], catch_exceptions=False
    )
    document = json.loads(done.output)
    assert document["engine"] == "sglang"
    assert document["scenario"]["changes"][0]["to"] == "fp8_e4m3"


def test_every_coefficient_has_a_page_with_its_unit_and_stands_in_the_docs():
    assert set(coefficients()) == set(BOUNDS)
    docs = (Path(__file__).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")
    for name, bound in BOUNDS.items():
        for spelling in (name, name.replace("_", " "), f"efficiencies.{name}"):
            found = find(spelling)
            assert found.kind == "coefficient", spelling
            assert found.name == name
        page = render(found, "vllm", "0.28.0")
        assert bound.unit in page
        assert "Pinned by" in page
        assert f"`{name}`" in docs


def test_a_coefficient_of_a_scenario_tells_its_default():
    words = ["explain", "kv_bandwidth", "--serve", "vllm serve Qwen/Qwen3-14B", "--gpu", "H100"]
    done = CliRunner().invoke(cli.servecast, words, catch_exceptions=False)
    assert "of peak, assumed" in done.output
    assert "H100-SXM-80GB" in done.output
    content = json.loads(CliRunner().invoke(cli.servecast, ["explain", "ridge", "--json"]).output)
    assert (content["kind"], content["unit"], content["high"]) == ("coefficient", "exponent", None)


def test_everything_that_is_listed_is_known():
    done = CliRunner().invoke(cli.servecast, ["explain", "--list", "--json"], catch_exceptions=False)
    listed = json.loads(done.output)
    assert set(listed) == set(known_names())
    for engine in ("vllm", "sglang"):
        for heading, names in known_names(engine).items():
            for name in names:
                if "*" not in name:
                    assert find(name, engine), heading
    text = CliRunner().invoke(cli.servecast, ["explain", "--list", "--engine", "sglang"]).output
    assert "SGLang: log lines" in text
    assert "vLLM: flags" not in text
    with pytest.raises(BadInput, match="--list"):
        find("qqqqqq zzzz")
    with pytest.raises(BadInput, match="--list"):
        CliRunner().invoke(cli.servecast, ["explain"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--gpu", "H100"], "--gpu"),
        (["--bench", "vllm bench serve"], "--bench"),
        (["--set", "max-num-seqs=4"], "--set"),
        (["--profile", "p.json"], "--profile"),
        (["--seed", "0"], "--seed"),
        (["--kv-cache-tokens", "1,000"], "--kv-cache-tokens"),
    ],
)
def test_what_describes_a_scenario_is_refused_without_one(words, option):
    with pytest.raises(BadInput, match=f"{option}: .*give --serve"):
        CliRunner().invoke(cli.servecast, ["explain", "ttft", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-num-seqs", "--engin", "sglang"],
        ["vllm:kv_cache_usage_perc", "--jsn"],
        ["--max-num-seqs", "-jsn"],
    ],
)
def test_a_mistyped_option_is_named(words):
    with pytest.raises(BadInput, match=r"--engin|-jsn"):
        CliRunner().invoke(cli.servecast, ["explain", *words], catch_exceptions=False)


@pytest.mark.parametrize("words", [options(VLLM_128), ["--engine", "vllm", "--engine-version", "0.28.0"]])
def test_a_metric_of_the_other_engine_keeps_its_own_name_and_version(words):
    done = CliRunner().invoke(explain, ["sglang:token_usage", *words, "--json"], catch_exceptions=False)
    document = json.loads(done.output)
    assert (document["engine"], document["engine_version"]) == ("sglang", default_version("sglang"))
    assert document["note"] == "this is SGLang's; vLLM does not export it"
    text = page("sglang:token_usage", "vllm")
    assert f"SGLang {default_version('sglang')} /metrics" in text


def test_requests_fit_on_the_rank_whose_pool_it_is():
    bench = "vllm bench serve --random-input-len 1000 --random-output-len 24 --num-prompts 2"
    two = "--model-path Qwen/Qwen2.5-7B-Instruct --tp-size 2 --dp-size 2 --enable-dp-attention"
    for serve in (
        "vllm serve Qwen/Qwen2.5-7B-Instruct --pipeline-parallel-size 2",
        f"python -m sglang.launch_server {two}",
    ):
        found = evaluate(read_source(serve=serve, bench=bench, gpu="H100").build())
        assert found.fits == pytest.approx(found.kv_cache_tokens / 1024, abs=2), serve


def test_a_coefficient_of_a_profile_is_the_profile_s(tmp_path):
    evidence = measured_steps(truth_near(prior(), STEP_COEFFICIENTS, 0), 0)
    content = profile_content(
        fit([evidence], prior(), STEP_COEFFICIENTS),
        truth_scenario(),
        [evidence],
        facts=Facts(date="2026-01-01"),
    )
    write_profile(content, tmp_path / "p.json")
    scenario = ["--serve", "vllm serve Qwen/Qwen3-14B", "--gpu", content.subject.gpu]
    words = ["explain", "kv_bandwidth", *scenario, "--profile", str(tmp_path / "p.json")]
    told = json.loads(CliRunner().invoke(cli.servecast, [*words, "--json"], catch_exceptions=False).output)
    assert told["here"]["value"] == content.coefficients["kv_bandwidth"].value
    assert (told["here"]["origin"], told["here"]["of"]) == ("fitted", "p.json")
    text = CliRunner().invoke(cli.servecast, words, catch_exceptions=False).output
    assert "fitted: " in text
    assert "model Qwen/Qwen2.5-7B-Instruct measured, Qwen/Qwen3-14B asked" in " ".join(text.split())
    with pytest.raises(BadInput, match=r"--profile: .*cannot be read"):
        CliRunner().invoke(cli.servecast, [*words, "--profile", "none.json"], catch_exceptions=False)
