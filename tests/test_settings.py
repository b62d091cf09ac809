"""Single settings on top of commands and scenario files: what wins, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.build import ScenarioSource, build_scenario, read_source
from sim.commands.bench import parse_bench_command
from sim.commands.serve import parse_serve_command
from sim.errors import BadInput
from sim.output.report import render
from sim.scenario_file import dump_scenario, parse_scenario_mapping, workload_to_input
from sim.simulate import simulate
from sim.workload.spec import FileDataset, RandomDataset, WorkloadSpec

MODEL = "Qwen/Qwen2.5-7B-Instruct"
SERVE = f"vllm serve {MODEL}"
BENCH = "vllm bench serve --dataset-name random --num-prompts 20"
GSP = (
    "python -m sglang.bench_serving --dataset-name generated-shared-prefix --gsp-num-groups 64 "
    "--gsp-prompts-per-group 16"
)


def source(bench: str = BENCH, sets: tuple[str, ...] = (), serve: str = SERVE) -> ScenarioSource:
    return read_source(serve=serve, bench=bench, gpu="H100", sets=sets)


def spec_of(bench: str, *sets: str) -> WorkloadSpec:
    return source(bench, sets).bench.spec


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": i * 3.0, "input_len": 50, "output_len": 5} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


# -- the `--no-` form with a value ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "on"),
    [
        ("enable-prefix-caching=true", True),
        ("enable-prefix-caching=false", False),
        ("no-enable-prefix-caching=true", False),
        ("no-enable-prefix-caching=false", True),
        ("no_enable_prefix_caching=1", False),
    ],
)
def test_a_value_and_the_no_form_are_both_read(setting: str, on: bool) -> None:
    built = source(sets=(setting,)).build()
    assert built.engine["enable_prefix_caching"] is on
    told = [n.text for n in built.notes if n.subject == "--enable-prefix-caching"]
    assert bool(told) == setting.startswith("no")  # that a switch has a value goes without saying here
    assert all("read as --" + ("" if on else "no-") + "enable-prefix-caching" in text for text in told)


def test_the_no_form_with_a_value_in_a_pasted_command() -> None:
    command = parse_serve_command(f"{SERVE} --no-enable-prefix-caching=true")
    assert command.flags == (("--no-enable-prefix-caching", None),)
    assert "read as --no-enable-prefix-caching" in command.notes[0].text


@pytest.mark.parametrize(("value", "on"), [(True, False), (False, True)])
def test_the_no_form_as_a_key_of_a_file(value: bool, on: bool) -> None:
    engine = {"name": "vllm", "model": MODEL, "args": {"no-enable-prefix-caching": value}}
    assert build_scenario(file={"engine": engine, "gpu": "H100"}).engine["enable_prefix_caching"] is on


# -- a rate on top of a trace --------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["vllm bench serve", "python -m sglang.bench_serving"])
def test_a_rate_on_top_replaces_the_times_of_a_trace(client: str, trace: str) -> None:
    bench = f"{client} --dataset-name lengths --dataset-path {trace}"
    assert spec_of(bench).use_trace_arrivals
    assert spec_of(bench, "num-prompts=3").use_trace_arrivals
    assert not spec_of(bench, "request-rate=4").use_trace_arrivals
    assert not spec_of(bench, "request-rate=inf").use_trace_arrivals
    asked = spec_of(bench, "request-rate=4", "use-trace-arrivals=true")
    assert asked.use_trace_arrivals
    assert asked.request_rate == 4


def test_a_ramp_replaces_the_times_of_a_trace_and_a_rate_the_ramp(trace: str) -> None:
    ramp = "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2"
    bench = f"vllm bench serve --dataset-name lengths --dataset-path {trace} {ramp}"
    assert not spec_of(bench).use_trace_arrivals
    assert spec_of(bench, "request-rate=3").ramp_up is None


def test_a_rate_beside_a_trace_in_one_file(trace: str) -> None:
    timed = f"vllm bench serve --dataset-name lengths --dataset-path {trace}"
    data = {"kind": "lengths", "path": trace}

    def made(bench: str, workload: dict[str, object]) -> WorkloadSpec:
        return read_source(
            file={"serve": SERVE, "gpu": "H100", "bench": bench, "workload": workload}
        ).bench.spec

    assert not made(timed, {"request_rate": 4}).use_trace_arrivals
    assert made(timed, {"num_prompts": 4}).use_trace_arrivals
    assert made(timed, {"request_rate": 4, "use_trace_arrivals": True}).use_trace_arrivals
    assert not made("vllm bench serve --request-rate 4", {"dataset": data}).use_trace_arrivals
    assert made("vllm bench serve", {"dataset": data}).use_trace_arrivals
    assert not made(timed, {"dataset": {"kind": "random"}}).use_trace_arrivals


def test_a_rate_that_is_not_sent_is_not_reported(trace: str) -> None:
    bench = f"vllm bench serve --dataset-name lengths --dataset-path {trace} --ignore-eos"
    timed = simulate(source(bench, ("request-rate=4", "use-trace-arrivals=true")).build()).result
    paced = simulate(source(bench, ("request-rate=4",)).build()).result
    assert timed.records is not None
    assert timed.records.sent.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert paced.records is not None
    assert paced.records.sent[-1] == pytest.approx(1.0)
    assert "Request rate configured (RPS)" not in render(timed)
    assert "Request rate configured (RPS)" in render(paced)


# -- what a file says gives way to options -------------------------------------------------------------------


def test_a_files_seed_gives_way_to_another_load() -> None:
    file = {"serve": SERVE, "gpu": "H100", "bench": BENCH, "seed": 5}
    assert build_scenario(file=file).workload.seed == 5
    replaced = build_scenario(file=file, bench=f"{BENCH} --seed 9")
    assert (replaced.workload.seed, replaced.seed) == (9, 9)
    on_top = build_scenario(file=file, sets=["bench.seed=7"])
    assert (on_top.workload.seed, on_top.seed) == (7, 7)
    assert build_scenario(file=file, seed=3).workload.seed == 3
    assert build_scenario(file=file, sets=["serve.seed=7"]).workload.seed == 5


def test_a_files_model_and_version_give_way_to_a_command_that_names_them() -> None:
    pool = {"kv_cache_tokens": 5000}
    file = {"serve": SERVE, "model": MODEL, "gpu": "H100", "engine_version": "0.28.0", "observed": pool}
    other = build_scenario(file=file, serve="docker run vllm/vllm-openai:v0.33.0 --model Qwen/Qwen3-14B")
    assert other.model.name == "Qwen/Qwen3-14B"
    assert other.engine.asked_version == "0.33.0"
    assert other.observed.kv_cache_tokens is None  # the pool was the other model's
    same = build_scenario(file=file, serve=f"{SERVE} --max-num-seqs 7")
    assert (same.model.name, same.engine.asked_version) == (MODEL, "0.28.0")
    assert same.observed.kv_cache_tokens == 5000
    assert build_scenario(file=file, sets=["serve.model=Qwen/Qwen3-14B"]).model.name == "Qwen/Qwen3-14B"


# -- the client's settings -----------------------------------------------------------------------------------


def test_other_settings_leave_the_order_of_a_file_alone(trace: str) -> None:
    bench = f"vllm bench serve --dataset-name sharegpt --dataset-path {trace} --disable-shuffle"
    for setting, shuffles in (("num-prompts=3", False), ("disable-shuffle=false", True)):
        dataset = spec_of(bench, setting).dataset
        assert isinstance(dataset, FileDataset)
        assert dataset.shuffle == shuffles


def test_groups_and_their_size_make_the_number_of_prompts() -> None:
    assert spec_of(GSP).num_prompts == 1024
    assert spec_of(GSP, "gsp-prompts-per-group=4").num_prompts == 256
    assert spec_of(GSP, "gsp-num-groups=8").num_prompts == 128
    assert spec_of(GSP, "gsp-question-len=9").num_prompts == 1024
    assert spec_of(GSP, "num-prompts=640", "gsp-num-groups=32").num_prompts == 320


@pytest.mark.parametrize("setting", ["logprobs=5", "use-beam-search=true"])
def test_a_setting_that_is_not_modelled_says_so_once(setting: str) -> None:
    flag = "--" + setting.partition("=")[0]
    notes = source(sets=(setting, "num-prompts=9", setting)).build().notes
    assert [n.kind for n in notes if n.subject == flag] == ["not-modelled"]


def test_notes_on_a_value_go_with_it(trace: str) -> None:
    bench = f"vllm bench serve --dataset-name sharegpt --dataset-path {trace}"
    assert [n.subject for n in source(bench).bench.notes] == ["--ignore-eos"]
    assert source(bench, ("ignore-eos=true",)).bench.notes == ()
    assert source(sets=("use-beam-search=false",)).bench.notes == ()


# -- sglang's client in a scenario file ----------------------------------------------------------------------


def test_sglangs_client_needs_no_command_in_a_file() -> None:
    file = {"serve": SERVE, "gpu": "H100", "workload": {"client": "sglang", "num_prompts": 7}}
    built = read_source(file=file)
    assert built.bench.client == built.bench.spec.client == "sglang"
    assert built.bench.spec.dataset == RandomDataset(1024, 1024, style="sglang")
    assert (built.bench.spec.seed, built.bench.spec.num_prompts) == (42, 7)


def test_a_load_of_sglangs_client_is_saved_and_read_again(tmp_path: Path) -> None:
    chats = tmp_path / "chats.json"
    chats.write_text("[]")
    flags = "--sharegpt-context-len 4096 --num-prompts 5 --request-rate 2"
    spec = parse_bench_command(f"python -m sglang.bench_serving --dataset-path {chats} {flags}").spec
    content = parse_scenario_mapping({"serve": SERVE, "gpu": "H100"}, "made")
    text = dump_scenario(content.model_copy(update={"workload": workload_to_input(spec)}))
    path = tmp_path / "saved.yaml"
    path.write_text(text)
    assert read_source(file=path).bench.spec == spec


# -- blocks are vLLM's ---------------------------------------------------------------------------------------


def test_a_count_of_blocks_is_refused_for_sglang() -> None:
    serve = f"python -m sglang.launch_server --model-path {MODEL}"
    with pytest.raises(BadInput, match=r"--num-gpu-blocks: 500: .*--kv-cache-tokens"):
        read_source(serve=serve, bench=BENCH, gpu="H100", num_gpu_blocks=500)
    file = {"serve": serve, "bench": BENCH, "gpu": "H100", "observed": {"num_gpu_blocks": 500}}
    with pytest.raises(BadInput, match=r"observed\.num_gpu_blocks: 500: .*observed\.kv_cache_tokens"):
        read_source(file=file)
    assert read_source(file=file, kv_cache_tokens=9000).observed.kv_cache_tokens == 9000
    assert read_source(file=file, serve=SERVE).observed.num_gpu_blocks is None
