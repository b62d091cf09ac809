from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import read_source
from sim.carry import account_of
from sim.cli.advise import advise as advise_command
from sim.cli.options import ScenarioOptions
from sim.cli.predict import predict
from sim.cli.report_source import source_of
from sim.command_text import bench_text, predict_text, serve_text, spec_words
from sim.commands.bench import bench_from_words
from sim.errors import BadInput
from sim.explain.advice_text import document, render
from sim.explain.advise import _costs, advise, relative
from sim.explain.carry import changed
from sim.explain.changes import candidates
from sim.explain.outcome import evaluate
from sim.explain.uncertain import Variant, depends_on_seed, run_variant, variants
from sim.provenance import Note
from sim.results import Verdict
from sim.results_io.files import write_result
from sim.scenario import Observed
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset, WorkloadSpec
from tests.explain_scenarios import REFERENCE, VLLM_128, options, printed, reference_source, run_of


@pytest.fixture(scope="module")
def source():
    return reference_source("vllm", 128, 256)


@pytest.fixture(scope="module")
def for_ttft(source):
    return advise(source, "ttft", top=2)


def test_the_first_two_halve_ttft_at_concurrency_128(for_ttft):
    first = for_ttft.ranked[:2]
    assert min(advice.effect.mean for advice in first) <= -0.5
    for advice in first:
        assert advice.effect.low <= advice.effect.mean <= advice.effect.high < 0
        assert advice.throughput > -0.1


def test_applying_the_first_and_predicting_again_gives_the_figure(for_ttft):
    first = for_ttft.ranked[0]
    words = shlex.split(first.predict)
    assert words[:2] == ["servecast", "predict"]
    done = CliRunner().invoke(predict, [*words[2:], "--json", "-"], catch_exceptions=False)
    again = json.loads(done.output)
    assert again["mean_ttft_ms"] == pytest.approx(first.outcome.figures["mean_ttft_ms"], rel=1e-9)
    assert again["output_throughput"] == pytest.approx(first.outcome.figures["output_throughput"], rel=1e-9)


def test_formats_that_change_answers_ask_for_quality_scores(for_ttft):
    for advice in (*for_ttft.ranked, *for_ttft.more_gpus):
        asks = any("quality scores" in warning for warning in advice.warnings)
        assert asks == (advice.change.name in ("quantization", "kv-cache-dtype"))


def test_more_gpus_are_apart_and_say_so(for_ttft):
    (tp,) = for_ttft.more_gpus
    assert tp.change.flag == "--tensor-parallel-size"
    assert "needs 2 GPUs instead of 1" in tp.warnings
    assert all(advice.outcome.gpus == 1 for advice in for_ttft.ranked)


def test_what_does_nothing_is_named(for_ttft):
    assert ("--max-num-seqs", "256") in {(change.flag, change.after) for change in for_ttft.useless}


def test_costs_claim_no_loss_that_the_simulation_contradicts(source, for_ttft):
    budget = next(a for a in for_ttft.ranked if a.change.name == "max-num-batched-tokens")
    assert int(budget.change.after) < int(budget.change.before)
    assert budget.effect.mean < 0 < budget.throughput
    assert "ttft" not in budget.costs
    assert "throughput" not in budget.costs
    # The same change, had the runs gone the other way, has its price named.
    worse = replace(budget.outcome, result=for_ttft.base.result)
    told = _costs(budget.change, "vllm", budget.outcome, worse)
    assert told == "may be ttft up, throughput down"


@pytest.mark.parametrize("goal", ["p99-ttft", "p99-tpot", "p99-itl"])
def test_a_tail_can_be_the_goal(goal):
    found = advise(reference_source("vllm", 32, 64), goal, top=0)
    key = f"p99_{goal[4:]}_ms"
    now = found.base.value(goal)
    assert now == found.base.figures[key] == pytest.approx(found.base.result.aggregates[key])
    for advice in found.ranked:
        assert advice.outcome.figures[key] == pytest.approx(now * (1 + advice.effect.mean))
        assert advice.effect.mean < 0
    assert f"Goal: lower {key}" in render(found)


@pytest.mark.parametrize("goal", ["tpot", "throughput", "cost"])
def test_no_change_loses_throughput_in_silence(goal):
    found = advise(reference_source("vllm", 32, 64), goal, top=0)
    for advice in (*found.ranked, *found.more_gpus):
        said = any("lowers throughput" in warning for warning in advice.warnings)
        assert said == (advice.throughput < -0.1)
    signs = [advice.effect.mean for advice in found.ranked]
    assert signs == sorted(signs, reverse=goal == "throughput")


def test_a_change_that_loses_throughput_says_how_much():
    # A sequence cap of half what runs: each stream is faster, the whole slower.
    source = reference_source("vllm", 32, 64).with_settings(["max-num-seqs=32"])
    found = advise(source, "tpot", top=0)
    advice = next(a for a in found.ranked if a.change.flag == "--max-num-seqs")
    assert advice.throughput < -0.1
    assert f"lowers throughput by {-advice.throughput:.0%}" in advice.warnings


def test_the_text_and_the_json_say_the_same(for_ttft):
    text, content = render(for_ttft, measured=43765.43), document(for_ttft, 43765.43)
    assert "43.77 s measured (+1.6%)" in text
    assert content["changes"][0]["flag"] in text
    assert content["changes"][0]["serve"] in text
    assert json.loads(json.dumps(content))["now"] == content["now"]


def test_an_open_loop_below_capacity_has_no_throughput_to_gain():
    served = read_source(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct",
        bench="vllm bench serve --random-output-len 32 --request-rate 2 --num-prompts 30",
        gpu="H100",
    )
    assert "request-rate=inf" in advise(served, "throughput", top=0).goal_note


# -- the pool under other flags


def test_an_observed_pool_moves_by_the_difference_of_the_estimates(source):
    blank = replace(source, observed=Observed())
    old = account_of(blank.build())
    for settings_ in (("gpu-memory-utilization=0.92",), ("max-num-batched-tokens=2048",)):
        new = account_of(blank.with_settings(settings_).build())
        gained = (new.kv_pool_bytes - old.kv_pool_bytes) / new.kv_bytes_per_token
        carried = changed(source, settings_).observed.kv_cache_tokens
        assert carried == pytest.approx(194_896 + gained, abs=64)


def test_halving_the_bytes_of_a_token_doubles_the_tokens(source):
    carried = changed(source, ("kv-cache-dtype=fp8",)).observed.kv_cache_tokens
    assert carried == pytest.approx(2 * 194_896, abs=32)


def test_a_setting_that_leaves_the_engine_alone_leaves_the_pool_alone(source):
    assert changed(source, ("bench.num-prompts=3",)).observed == source.observed
    assert changed(source, ("num-gpu-blocks-override=1000",)).observed == Observed()


def test_observed_blocks_stay_blocks(source):
    blocks = replace(source, observed=Observed(num_gpu_blocks=12_181))
    after = changed(blocks, ("gpu-memory-utilization=0.92",)).observed
    assert after.kv_cache_tokens is None
    assert after.num_gpu_blocks == pytest.approx(236_000 / 16, abs=2)


@settings(max_examples=12, deadline=None)
@given(st.floats(0.6, 0.95), st.floats(0.6, 0.95))
def test_more_memory_never_means_fewer_tokens(a, b):
    source = reference_source("vllm", 8, 8)
    low, high = sorted((round(a, 3), round(b, 3)))
    tokens = [
        changed(source, (f"gpu-memory-utilization={share}",)).observed.kv_cache_tokens or 194_896
        for share in (low, high)
    ]
    assert tokens[0] <= tokens[1]


# -- ranges


def test_ranges_cover_the_card_the_pool_and_the_seed(source):
    scenario = source.build()
    assert len(variants(source, scenario, profile=False)) == 4  # the pool was observed, the load is fixed
    loose = replace(source, observed=Observed())
    assert Variant(pool=-1.0) in variants(loose, scenario, profile=False)
    varied = source.with_settings(["random-range-ratio=0.5"])
    assert depends_on_seed(varied.build())
    assert any(case.seed is not None for case in variants(varied, varied.build(), profile=True))
    assert variants(source, scenario, profile=True) == []


def test_a_slower_card_is_slower():
    source = reference_source("vllm", 4, 8)
    base = evaluate(source.build())
    slow = run_variant(source, (), Variant(compute=0.8, bandwidth=0.8), lambda scenario: None)
    assert slow.figures["mean_ttft_ms"] > base.figures["mean_ttft_ms"]
    assert slow.figures["mean_tpot_ms"] > base.figures["mean_tpot_ms"]


def test_a_change_of_nothing_is_none():
    assert relative(None, 1.0) is None
    assert relative(0.0, 1.0) is None
    assert relative(2.0, 1.0) == -0.5


# -- commands


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.builds(
            RandomDataset,
            input_len=st.integers(1, 5000),
            output_len=st.integers(1, 2000),
            range_ratio=st.sampled_from([0.0, 0.25, 0.5]),
            prefix_len=st.sampled_from([0, 64]),
        ),
        st.builds(
            PrefixRepetitionDataset,
            prefix_len=st.integers(1, 500),
            num_prefixes=st.integers(1, 20),
            shuffle=st.booleans(),
        ),
    ),
    st.integers(1, 5000),
    st.sampled_from([math.inf, 2.0, 3.25]),
    st.sampled_from([None, 1, 64]),
    st.integers(0, 99),
)
def test_a_load_written_as_flags_reads_back(dataset, prompts, rate, cap, seed):
    ignore = isinstance(dataset, RandomDataset)
    spec = WorkloadSpec(dataset, prompts, rate, max_concurrency=cap, seed=seed, ignore_eos=ignore)
    back = bench_from_words("vllm", spec_words(spec)).spec
    assert (back.dataset, back.num_prompts, back.request_rate) == (dataset, prompts, rate)
    assert (back.max_concurrency, back.seed) == (cap, seed)


@pytest.mark.parametrize("shuffle", [True, False])
def test_shared_prefixes_are_written_as_sglangs_client_reads_them(shuffle):
    dataset = PrefixRepetitionDataset(512, 64, 8, 32, shuffle)
    spec = WorkloadSpec(dataset, 48, 3.0, seed=2, ignore_eos=True, client="sglang")
    back = bench_from_words("sglang", spec_words(spec)).spec
    assert (back.dataset, back.num_prompts, back.request_rate) == (dataset, 48, 3.0)


def test_commands_read_back_as_the_source(source):
    words = shlex.split(predict_text(source))
    again = read_source(
        serve=words[words.index("--serve") + 1],
        bench=words[words.index("--bench") + 1],
        gpu=words[words.index("--gpu") + 1],
        engine_version=words[words.index("--engine-version") + 1],
        kv_cache_tokens=int(words[words.index("--kv-cache-tokens") + 1]),
    )
    assert again.build().engine.values == source.build().engine.values
    assert again.build().workload == source.build().workload
    assert serve_text(again) == serve_text(source)
    assert bench_text(again) == bench_text(source)


def test_a_workload_of_a_scenario_file_is_written_out():
    source = read_source(
        file={
            "serve": "vllm serve Qwen/Qwen2.5-7B-Instruct",
            "gpu": "H100",
            "workload": {"num_prompts": 7, "dataset": {"kind": "random", "input_len": 33}},
        }
    )
    assert "--num-prompts 7" in bench_text(source)
    assert "--random-input-len 33" in bench_text(source)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_candidates_differ_from_what_is_set_and_resolve(engine):
    source = reference_source(engine, 8, 8)
    scenario = source.build()
    found = candidates(scenario, 42)
    assert len({change.settings for change in found}) == len(found)
    for change in found:
        assert change.before != change.after
        assert changed(source, change.settings).build().engine.values != scenario.engine.values


# -- results as scenarios


def test_our_own_result_is_a_scenario_again(tmp_path, source):
    small = reference_source("vllm", 4, 8)
    outcome = evaluate(small.build())
    path = tmp_path / "result.json"
    write_result(outcome.result, path)
    again, result = source_of(ScenarioOptions(files=(str(path),)))
    assert result is not None
    assert again.observed.kv_cache_tokens == 194_896
    assert evaluate(again.build()).figures == pytest.approx(outcome.figures)


def test_figures_of_another_setup_are_not_shown_beside_a_result(tmp_path):
    path = tmp_path / "result.json"
    write_result(evaluate(reference_source("vllm", 4, 8).build()).result, path)

    def beside(**options):
        return source_of(ScenarioOptions(files=(str(path),), **options))[1]

    assert beside(gpu="RTX-5090", seed=3) is not None
    assert beside(gpu="H200") is None
    assert beside(sets=("max-num-seqs=2",)) is None
    assert beside(bench="vllm bench serve --num-prompts 5") is None
    assert beside(engine_version="0.33") is None
    with pytest.raises(BadInput, match="takes one command"):
        beside(serve=("vllm serve a", "vllm serve b"))
    with pytest.raises(BadInput, match="--kv-cache-tokens"):
        beside(kv_cache_tokens=0)


def test_what_is_not_modelled_is_told_with_advice():
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct --attention-backend FLASHINFER"
    bench = "vllm bench serve --random-output-len 8 --num-prompts 4"
    words = ["--serve", serve, "--bench", bench, "--gpu", "H100"]
    shown = CliRunner().invoke(advise_command, words, catch_exceptions=False).output
    assert "not-modelled: --attention-backend: " in shown
    told = json.loads(CliRunner().invoke(advise_command, [*words, "--json"], catch_exceptions=False).output)
    assert told["verdict"] == "VALID"
    assert "--attention-backend" in [note["subject"] for note in told["notes"]]


def test_a_run_that_fails_says_so_and_why(for_ttft):
    reason = Note("warning", "completed", "3 of 4 requests failed")
    warned = Note("warning", "--profile", "model A measured, B asked")
    broken = replace(for_ttft.base.result, verdict=Verdict("INVALID", (reason,)))
    found = replace(for_ttft, base=replace(for_ttft.base, result=broken))
    text, content = render(found, notes=[warned]), document(found, notes=[warned])
    assert "INVALID: completed: 3 of 4 requests failed" in text
    assert "warning: --profile: model A measured, B asked" in text
    assert (content["verdict"], content["verdict_reasons"][0]["text"]) == ("INVALID", reason.text)
    assert content["notes"][0]["subject"] == "--profile"


def test_a_price_is_in_the_json_too():
    found = advise(reference_source("vllm", 32, 64), "cost", top=0)
    content = document(found, price=2.5)
    assert content["price_per_gpu_hour"] == 2.5
    assert content["now_usd"] == pytest.approx(2.5 * content["now"])
    first = content["changes"][0]
    assert first["predicted_usd"] == pytest.approx(2.5 * first["predicted"])
    assert "now_usd" not in document(found)


def test_a_result_with_a_duration_is_advised_on_that_much(tmp_path):
    path = tmp_path / "result.json"
    source = reference_source("vllm", 4, 8).with_settings(["bench.duration=3"])
    write_result(evaluate(source.build()).result, path)
    again, _ = source_of(ScenarioOptions(files=(str(path),)))
    assert again.build().workload.duration == 3.0
    assert again.build().workload.endpoint == source.build().workload.endpoint


def test_limits_that_count_goodput_stay_with_a_result(tmp_path):
    path = tmp_path / "result.json"
    source = reference_source("vllm", 4, 8).with_settings(["bench.goodput=ttft:500"])
    assert source.build().workload.goodput == (("ttft", 500.0),)
    write_result(evaluate(source.build()).result, path)
    again, _ = source_of(ScenarioOptions(files=(str(path),)))
    assert again.build().workload.goodput == (("ttft", 500.0),)


def test_another_client_s_report_needs_the_launch_command(tmp_path):
    path = tmp_path / "report.txt"
    path.write_text(printed(run_of("vllm", 128)))
    with pytest.raises(BadInput, match="--serve"):
        source_of(ScenarioOptions(files=(str(path),), gpu="RTX-5090"))
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 128"
    with pytest.raises(BadInput, match="--gpu"):
        source_of(ScenarioOptions(files=(str(path),), serve=(serve,)))
    found, measured = source_of(ScenarioOptions(files=(str(path),), serve=(serve,), gpu="RTX-5090"))
    assert measured is not None
    spec = found.build().workload
    assert (spec.max_concurrency, spec.num_prompts) == (128, 256)
    given = ScenarioOptions(files=(str(path),), serve=(serve,), gpu="RTX-5090")
    own, other = (f"{REFERENCE.bench} --max-concurrency {n} --num-prompts 256" for n in (128, 64))
    assert source_of(replace(given, bench=own))[1] is not None
    assert source_of(replace(given, bench=other))[1] is None
    assert isinstance(spec.dataset, RandomDataset)
    assert (spec.dataset.input_len, spec.dataset.output_len) == (4096, 512)


def test_the_command_advises_from_a_report_and_shows_the_measurement(tmp_path):
    path = tmp_path / "report.txt"
    path.write_text(printed(run_of("vllm", 1)))
    arguments = options(VLLM_128)
    without_bench = arguments[:2] + arguments[4:]
    done = CliRunner().invoke(
        advise_command, [str(path), *without_bench, "--goal", "tpot", "--json"], catch_exceptions=False
    )
    content = json.loads(done.output)
    assert content["measured"] == 11.34
    assert content["now"] == pytest.approx(11.34, rel=0.05)


@pytest.mark.parametrize("text", ["free", "0", "-1", "nan"])
def test_a_price_must_be_a_price(text):
    with pytest.raises(BadInput, match="--price"):
        CliRunner().invoke(advise_command, [*options(VLLM_128), "--price", text], catch_exceptions=False)


@pytest.mark.parametrize("goal", [[], ["--goal", "ttft"]])
def test_a_price_belongs_to_the_goal_cost(goal):
    with pytest.raises(BadInput, match=r"--price: .2\.5.: .*--goal cost"):
        CliRunner().invoke(
            advise_command, [*options(VLLM_128), *goal, "--price", "2.5"], catch_exceptions=False
        )


def pool_of(path, **given):
    return source_of(ScenarioOptions(files=(str(path),), **given))[0].observed.kv_cache_tokens


def test_only_a_pool_that_an_engine_logged_is_taken_for_one(tmp_path):
    small = reference_source("vllm", 4, 8)
    computed = evaluate(replace(small, observed=Observed()).build()).result
    told = evaluate(small.build()).result
    path = tmp_path / "result.json"
    write_result(computed, path)
    assert pool_of(path) is None
    write_result(told, path)
    assert pool_of(path) == 194_896
    write_result(replace(computed, origin="measured"), path)
    pool = computed.server["kv_cache_tokens"]
    assert pool_of(path) == pool_of(path, gpu="rtx 5090") == pool
    assert pool_of(path, gpu="H100") is None
    assert pool_of(path, model="Qwen/Qwen3-14B") is None
    assert pool_of(path, serve=("vllm serve Qwen/Qwen2.5-7B-Instruct",)) is None
    assert pool_of(path, num_gpu_blocks=100) is None
    assert pool_of(path, kv_cache_tokens=5000) == 5000


def test_a_result_of_sglangs_client_is_a_scenario_again(tmp_path):
    bench = "python -m sglang.bench_serving --dataset-name random --random-input-len 64 --random-output-len 4"
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct"
    small = read_source(serve=serve, bench=f"{bench} --random-range-ratio 1 --num-prompts 4", gpu="RTX 5090")
    path = tmp_path / "result.json"
    write_result(evaluate(small.build()).result, path)
    again, _ = source_of(ScenarioOptions(files=(str(path),)))
    assert again.bench.spec == small.bench.spec


def test_one_cap_above_what_fits_says_and_two_say(for_ttft):
    # 42 requests fit; the sequence cap and the client's are both 128.
    assert "whatever max_num_seqs 128 and max_concurrency 128 say" in for_ttft.base.cause
    open_loop = (
        "vllm bench serve --random-input-len 4096 --random-output-len 512 --request-rate 20 --num-prompts 80"
    )
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.85 --max-num-seqs 128"
    one = read_source(serve=serve, bench=open_loop, gpu="RTX 5090", kv_cache_tokens=194_896)
    assert "whatever max_num_seqs 128 says" in evaluate(one.build()).cause
