"""Invariants of whole simulations, on both engines, and what a prediction reports."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import build_scenario
from sim.errors import BadInput
from sim.loop.run import run
from sim.request import Request
from sim.results_io.files import result_text
from sim.simulate import ENGINES, roofline, simulate
from sim.steptime.base import FrontEnd
from sim.steptime.gate import prefill
from sim.workload.generate import generate
from tests.engines_for_tests import FixedSteps, sglang, vllm

SERVE = {
    "vllm": "vllm serve Qwen/Qwen2.5-7B-Instruct",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct",
}
BENCH = (
    "vllm bench serve --model Qwen/Qwen2.5-7B-Instruct --dataset-name random --random-input-len 200 "
    "--random-output-len 20 --num-prompts 60 --request-rate 20"
)


def scenario(engine="vllm", bench=BENCH, **more):
    return build_scenario(serve=SERVE[engine], bench=bench, gpu="H100", **more)


loads = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(1, 30), st.floats(0, 20), st.booleans()),
    min_size=1,
    max_size=25,
)
variants = st.sampled_from(
    [
        lambda: vllm(num_gpu_blocks=40),
        lambda: vllm(num_gpu_blocks=40, async_scheduling=True),
        lambda: vllm(num_gpu_blocks=30, async_scheduling=True, enable_prefix_caching=False, max_num_seqs=3),
        lambda: sglang(max_total_tokens=600),
        lambda: sglang(max_total_tokens=600, disable_overlap_schedule=False, page_size=16),
        lambda: sglang(max_total_tokens=900, disable_overlap_schedule=False, disable_radix_cache=True),
    ]
)
models = st.builds(
    FixedSteps,
    step=st.floats(0.001, 2.0),
    before=st.floats(0.0, 0.5),
    after=st.floats(0.0, 0.5),
    per_token=st.floats(0.0, 0.01),
    front_end=st.builds(
        FrontEnd, st.floats(0, 0.1), st.floats(0, 0.001), st.floats(0, 0.1), st.floats(0, 0.01)
    ),
)


@settings(max_examples=60, deadline=None)
@given(loads, variants, models, st.one_of(st.none(), st.integers(1, 6)))
def test_nothing_is_lost_and_no_effect_precedes_its_cause(load, variant, model, cap):
    requests = [
        Request(
            str(i), ((f"shared{key}", 20), (f"own{i}", prompt)), output, arrival, output if stops else None
        )
        for i, (key, prompt, output, arrival, stops) in enumerate(load)
    ]
    scheduler = variant()
    steps = []
    outcome = run(scheduler, requests, model, max_concurrency=cap, steps=steps.append)
    records, parts = outcome.records, outcome.ttft_parts
    asked = {r.request_id: r for r in requests}

    assert sorted(records.request_id) == sorted(asked)
    assert set(records.status) == {"ok"}
    assert records.output_len.tolist() == [asked[rid].max_tokens for rid in records.request_id]
    assert np.all(np.diff(records.scheduled) >= 0)
    for part in (parts.client_wait, parts.front_end, parts.queue, parts.prefill, parts.stream):
        assert np.all(part >= -1e-9)
    ttft = parts.front_end + parts.queue + parts.prefill + parts.stream
    assert records.first_token - records.sent == pytest.approx(ttft, abs=1e-9)
    assert records.sent - records.scheduled == pytest.approx(parts.client_wait, abs=1e-9)
    assert np.all(records.itls >= -1e-9)
    sums = [
        records.itls[records.itl_offsets[i] : records.itl_offsets[i + 1]].sum() for i in range(len(records))
    ]
    assert records.last_token - records.first_token == pytest.approx(np.array(sums), abs=1e-6)
    assert outcome.duration == pytest.approx(records.last_token.max())

    in_flight = [(t, 1) for t in records.sent] + [(t - 1e-9, -1) for t in records.last_token]
    level = np.cumsum([change for _, change in sorted(in_flight)])
    assert cap is None or level.max() <= cap

    launched = [s["start"] for s in steps]
    ends = [s["start"] + s["duration"] for s in steps]
    assert all(start >= end - 1e-9 for start, end in zip(launched[1:], ends, strict=False))
    told = [token for s in steps for token in s["new_tokens"]]
    assert len(told) == records.output_len.sum()
    assert sum(s["duration"] for s in steps) <= outcome.duration + model.step + model.per_token * 5000


@settings(max_examples=20, deadline=None)
@given(loads, variants)
def test_the_pool_is_empty_when_all_is_done(load, variant):
    requests = [
        Request(str(i), ((f"own{i}", prompt),), output, arrival)
        for i, (_, prompt, output, arrival, _) in enumerate(load)
    ]
    requests.append(Request("late", (("late", 8),), 1, 1e6))
    scheduler = variant()
    found = {}
    take_in = scheduler.add_request

    def look_then_take_in(request):
        found[request.request_id] = scheduler.queue_state()
        take_in(request)

    scheduler.add_request = look_then_take_in
    run(scheduler, requests, FixedSteps(), leap=False)
    late = found["late"]
    assert (late.num_running, late.num_waiting, late.kv_used_tokens) == (0, 0, 0)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_seed_gives_identical_bytes(engine):
    first, second = (result_text(simulate(scenario(engine)).result) for _ in range(2))
    other = result_text(simulate(scenario(engine, seed=7)).result)
    assert first == second
    assert first != other


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prediction_reports_what_a_bench_would_and_more(engine):
    outcome = simulate(scenario(engine))
    result = outcome.result
    assert result.origin == "predicted"
    assert result.aggregates["completed"] == 60
    assert result.aggregates["total_output_tokens"] == 1200
    assert result.verdict.status == "VALID"
    assert result.identity["engine"] == engine
    shares = result.extra["device_time"]
    assert sum(shares.values()) == pytest.approx(result.duration, rel=0.02)
    parts = result.extra["ttft_parts_ms"]
    total = sum(parts[name] for name in ("front_end", "queue", "prefill", "stream"))
    assert total == pytest.approx(result.aggregates["mean_ttft_ms"])
    assert 0 < result.server["max_kv_usage"] < 1
    assert json.loads(result_text(result))["servecast"]["identity"]["model_sha"]


def test_equal_inputs_have_equal_hashes_and_others_do_not():
    base = simulate(scenario()).result.identity
    again = simulate(scenario()).result.identity
    other_model = scenario()
    other_model = replace(other_model, model=replace(other_model.model, vocab_size=151936))
    changed = simulate(other_model).result.identity
    assert base["model_sha"] == again["model_sha"]
    assert base["step_time_sha"] == again["step_time_sha"]
    assert base["model_sha"] != changed["model_sha"]


def test_a_model_under_two_names_is_one_model():
    named = scenario()
    moved = replace(named, model=replace(named.model, name="/models/copy"))
    first, second = (simulate(s).result.identity for s in (named, moved))
    assert first["model"] != second["model"]
    assert first["model_sha"] == second["model_sha"]


def test_steps_can_be_written_down():
    lines = []
    outcome = simulate(scenario(), steps=lines.append)
    assert len(lines) == outcome.usage.steps
    text = "\n".join(json.dumps(line) for line in lines)
    assert json.loads(text.splitlines()[0])["scheduled"][0][1] == 0
    computed = sum(n for line in lines for _, _, n in line["scheduled"])
    assert computed == 60 * 200 + 60 * 19


@pytest.mark.parametrize(
    ("flag", "slower"),
    [("enforce-eager=true", True), ("kv-cache-dtype=fp8", False), ("quantization=fp8", False)],
)
def test_flags_change_the_price(flag, slower):
    base = simulate(scenario()).result.aggregates["mean_tpot_ms"]
    changed = simulate(scenario(sets=[flag])).result.aggregates["mean_tpot_ms"]
    assert (changed > base) if slower else (changed < base)


def test_tensor_parallelism_speeds_a_step_up_by_less_than_its_size():
    base = simulate(scenario()).result.aggregates["mean_tpot_ms"]
    two = simulate(scenario(sets=["tensor-parallel-size=2"])).result.aggregates["mean_tpot_ms"]
    assert base / 2 < two < base


def test_what_ran_before_leaves_the_cache_warm():
    cold = scenario()
    warm = simulate(cold, before=generate(cold.workload))
    assert warm.result.server["prefix_cache_hits"] == 60 * 192
    assert simulate(cold).result.server["prefix_cache_hits"] == 0


def test_warm_ups_are_simulated_before_the_clock_starts():
    outcome = simulate(scenario(bench=f"{BENCH} --num-warmups 1"))
    assert outcome.result.aggregates["completed"] == 60
    assert outcome.result.server["prefix_cache_hits"] == 192


def test_a_step_outside_the_model_s_range_makes_the_result_suspect():
    class Narrow(FixedSteps):
        def out_of_range(self, shape):
            return "more than 2 decodes" if shape.num_decode_seqs > 2 else None

    result = simulate(scenario(), step_time=Narrow(step=0.05)).result
    assert result.verdict.status == "SUSPECT"
    assert "more than 2 decodes" in result.verdict.reasons[-1].text


def test_a_refused_request_is_bad_input_and_not_a_traceback():
    with pytest.raises(BadInput, match="prompt of 40000 tokens"):
        simulate(scenario(), requests=[Request("r", ((1, 40000),), 5)])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_engine_builds_its_parts(engine):
    made = scenario(engine)
    glue = ENGINES[engine]
    account = glue.account(made.model, made.gpu, made.gpu_count, made.engine, made.observed)
    scheduler = glue.make_scheduler(made.engine, account, [], 0)
    assert scheduler.pipeline_depth == 2
    assert glue.graph_buckets(made.engine).decode[0] == 1
    assert glue.limits(made.engine, account).max_num_seqs
    assert roofline(made).buckets == glue.graph_buckets(made.engine)


@pytest.mark.parametrize(
    ("flag", "launch"),
    [("", "piecewise"), ("enforce-eager=true", "eager"), ("optimization-level=1", "piecewise")],
)
def test_graph_modes_decide_how_a_mixed_step_is_launched(flag, launch):
    made = scenario(sets=[flag] if flag else [])
    buckets = ENGINES["vllm"].graph_buckets(made.engine)
    assert buckets.pad(prefill(100))[1] == launch


def long_and_short(tmp_path, arrival):
    path = tmp_path / "lengths.jsonl"
    lengths = [(100, 10), (5000, 10), (4090, 10), (100, 10), (3000, 2000), (100, 10), (100, 9000)]
    path.write_text(
        "\n".join(
            json.dumps({"arrival": i * arrival, "input_len": a, "output_len": b})
            for i, (a, b) in enumerate(lengths)
        )
    )
    return path


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("arrival", [0.0, 1.0])
@pytest.mark.parametrize("cap", ["", "--max-concurrency 1"])
@pytest.mark.parametrize("engine", ["vllm serve", "python -m sglang.launch_server --model-path"])
def test_what_the_server_refuses_counts_as_failed(tmp_path, engine, cap, arrival, leap):
    limit = "--max-model-len" if engine.startswith("vllm") else "--context-length"
    bench = (
        f"vllm bench serve --dataset-name lengths --dataset-path {long_and_short(tmp_path, arrival)} {cap}"
    )
    scenario = build_scenario(
        serve=f"{engine} Qwen/Qwen2.5-7B-Instruct {limit} 4096", bench=bench, gpu="H100"
    )
    result = simulate(scenario, leap=leap).result
    assert (result.aggregates["completed"], result.aggregates["failed"]) == (3, 4)
    assert result.aggregates["failed_refused"] == 4
    statuses = ["ok", "refused", "refused", "ok", "refused", "ok", "refused"]
    assert list(result.records.status) == statuses
    assert result.aggregates["total_output_tokens"] == 30
    assert np.all(np.isnan(result.records.first_token) == [status != "ok" for status in statuses])
    (told,) = [note for note in result.notes if note.subject == limit]
    assert told.text.startswith("4 of 7 requests ask for more than 4,096 tokens")
    assert result.verdict.status == "INVALID"
    if arrival:
        assert result.records.sent.tolist() == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        assert result.duration == pytest.approx(6.0)


def test_figures_do_not_know_of_refused_requests():
    bench = "vllm bench serve --random-input-len 3000 --random-output-len 400 --random-range-ratio 0.3"
    serve = "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 4096"
    scenario = build_scenario(serve=serve, bench=f"{bench} --num-prompts 60 --request-rate 2", gpu="H100")
    assert any(note.subject == "--random-range-ratio" for note in scenario.notes)
    result = simulate(scenario).result
    fit = [r for r in generate(scenario.workload) if r.prompt_len + r.max_tokens <= 4096]
    assert 0 < len(fit) < 60
    assert result.aggregates["completed"] == len(fit)
    alone = simulate(scenario, requests=fit).result
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "total_input_tokens"):
        assert result.aggregates[figure] == pytest.approx(alone.aggregates[figure])
