from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import build_scenario, read_source
from sim.errors import BadInput
from sim.scenario_file import (
    parse_scenario_mapping,
    read_scenario_file,
    workload_from_input,
    workload_to_input,
    write_scenario_file,
)
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

SERVE = (
    "vllm serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.85 --max-model-len 32768 "
    "--max-num-seqs 128 --max-num-batched-tokens 8192"
)
BENCH = (
    "vllm bench serve --backend openai --model Qwen/Qwen2.5-7B-Instruct --dataset-name random "
    "--random-input-len 4096 --random-output-len 512 --ignore-eos --request-rate inf --max-concurrency 128 "
    "--num-prompts 256"
)


def test_reference_commands() -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="RTX 5090", kv_cache_tokens=194896)
    assert scenario.engine["max_num_batched_tokens"] == 8192
    assert scenario.model.name == "Qwen/Qwen2.5-7B-Instruct"
    assert scenario.gpu.name == "RTX-5090"
    assert scenario.gpu_count == 1
    assert scenario.workload.max_concurrency == 128
    assert scenario.observed.kv_cache_tokens == 194896


def test_file_and_commands_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "reference.yaml"
    path.write_text(yaml.safe_dump({"serve": SERVE, "bench": BENCH, "gpu": "RTX 5090", "seed": 3}))
    from_file = build_scenario(file=path)
    from_text = build_scenario(serve=SERVE, bench=BENCH, gpu="RTX 5090", seed=3)
    assert from_file.name == "reference"
    assert from_file.engine == from_text.engine
    assert from_file.workload == from_text.workload
    assert from_file.seed == from_text.seed == 3


def test_engine_and_workload_as_mappings() -> None:
    scenario = build_scenario(
        file={
            "engine": {
                "name": "vllm",
                "model": "Qwen/Qwen2.5-7B-Instruct",
                "version": "0.33.0",
                "args": {
                    "max_num_seqs": 64,
                    "max-num-batched-tokens": "4K",
                    "enable_prefix_caching": False,
                    "enforce-eager": True,
                    "compilation-config": {"cudagraph_mode": "NONE"},
                    "cudagraph_capture_sizes": [1, 2],
                },
                "env": {"VLLM_USE_V2_MODEL_RUNNER": 0},
            },
            "workload": {
                "dataset": {"kind": "prefix_repetition", "prefix_len": 2048, "suffix_len": 128},
                "num_prompts": 60,
                "request_rate": 2,
                "goodput": {"ttft": 500},
                "ramp_up": None,
                "ignore_eos": True,
            },
            "gpu": "H100",
            "observed": {"num_gpu_blocks": 1000},
        }
    )
    assert scenario.engine.version == "0.33.0"
    assert scenario.engine["max_num_seqs"] == 64
    assert scenario.engine["max_num_batched_tokens"] == 4096
    assert scenario.engine["enable_prefix_caching"] is False
    assert scenario.engine["enforce_eager"] is True
    assert scenario.engine.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert scenario.workload.dataset == PrefixRepetitionDataset(2048, 128)
    assert scenario.workload.goodput == (("ttft", 500.0),)
    assert scenario.observed.num_gpu_blocks == 1000


def test_workload_overrides_the_bench_command_of_the_same_file() -> None:
    scenario = build_scenario(
        file={
            "serve": SERVE,
            "bench": BENCH,
            "gpu": "H100",
            "workload": {"num_prompts": 8, "burstiness": math.inf},
        }
    )
    assert scenario.workload.num_prompts == 8
    assert scenario.workload.max_concurrency == 128
    assert math.isinf(scenario.workload.burstiness)


def test_options_win_over_the_file() -> None:
    file = {"serve": SERVE, "bench": BENCH, "gpu": "H100", "seed": 1, "observed": {"kv_cache_tokens": 5000}}
    scenario = build_scenario(
        file=file, gpu="H200", seed=2, kv_cache_tokens=6000, engine_version="0.33.0", sets=["max-num-seqs=7"]
    )
    assert scenario.gpu.name.startswith("H200")
    assert scenario.seed == scenario.workload.seed == 2
    assert scenario.observed.kv_cache_tokens == 6000
    assert scenario.engine.version == "0.33.0"
    assert scenario.engine["max_num_seqs"] == 7


def test_a_pool_given_by_option_leaves_the_files_behind() -> None:
    file = {"serve": SERVE, "bench": BENCH, "gpu": "H100", "observed": {"num_gpu_blocks": 500}}
    observed = build_scenario(file=file, kv_cache_tokens=6000).observed
    assert (observed.kv_cache_tokens, observed.num_gpu_blocks) == (6000, None)
    assert build_scenario(file=file).observed.num_gpu_blocks == 500


def test_what_gives_way_to_an_option_is_told() -> None:
    file = {"serve": SERVE, "bench": BENCH, "gpu": "H100"}
    told = [n.subject for n in build_scenario(file=file, serve=SERVE).notes if "scenario file" in n.text]
    assert told == ["--serve"]
    assert not [n for n in build_scenario(file=file).notes if "scenario file" in n.text]


def test_the_beginning_of_a_flag_is_read_as_the_programs_do_and_told() -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="H100", sets=["max-num-seq=7", "num-prompt=9"])
    assert scenario.engine["max_num_seqs"] == 7
    assert scenario.workload.num_prompts == 9
    read = [n.text for n in scenario.notes if "is read as" in n.text]
    assert [text.split(",")[0] for text in read] == [
        "is read as --max-num-seqs",
        "is read as --num-prompts",
    ]


def test_another_engine_leaves_the_files_version_and_observations_behind() -> None:
    file = {"serve": SERVE, "bench": BENCH, "gpu": "H100", "engine_version": "0.33.0", "name": "a"}
    file["observed"] = {"kv_cache_tokens": 5000}
    other = build_scenario(file=file, serve="sglang serve Qwen/Qwen2.5-7B-Instruct")
    assert other.engine.asked_version == "0.5.21"
    assert other.observed.kv_cache_tokens is None
    same = build_scenario(file=file, serve="vllm serve Qwen/Qwen2.5-7B-Instruct")
    assert same.engine.version == "0.33.0"
    assert same.observed.kv_cache_tokens == 5000


def test_seed_defaults_to_the_clients() -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH + " --seed 9", gpu="H100")
    assert scenario.seed == scenario.workload.seed == 9


def test_gpu_count_is_what_the_parallel_sizes_need() -> None:
    def count(serve: str) -> int:
        return build_scenario(serve=serve, bench=BENCH, gpu="H200").gpu_count

    assert count("vllm serve Qwen/Qwen2.5-7B-Instruct -tp 2 -dp 2") == 4
    assert count("sglang serve Qwen/Qwen2.5-7B-Instruct --tp 2 --dp 2") == 4
    assert count("sglang serve Qwen/Qwen2.5-7B-Instruct --tp 2 --dp 2 --enable-dp-attention") == 2


def test_online_quantisation_changes_the_model() -> None:
    scenario = build_scenario(serve="vllm serve Qwen/Qwen2.5-7B-Instruct -q fp8", bench=BENCH, gpu="H100")
    assert scenario.model.quant is not None
    assert scenario.model.quant.method == "fp8"


def test_model_names_that_differ_are_noted() -> None:
    scenario = build_scenario(serve=SERVE, bench="vllm bench serve --model other", gpu="H100")
    assert any(n.subject == "--model" and "other" in n.text for n in scenario.notes)
    served = build_scenario(
        serve=SERVE + " --served-model-name m", bench="vllm bench serve --model m", gpu="H100"
    )
    assert not any(n.subject == "--model" for n in served.notes)


# -- settings on top ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("max-num-seqs=64", "max_num_seqs", 64),
        ("max_num_batched_tokens=4K", "max_num_batched_tokens", 4096),
        ("--max-num-seqs=64", "max_num_seqs", 64),
        ("enforce-eager=true", "enforce_eager", True),
        ("enable-prefix-caching=false", "enable_prefix_caching", False),
        ("cudagraph-capture-sizes=1,2,4", "cudagraph_capture_sizes", (1, 2, 4)),
        ("serve.max-num-seqs=64", "max_num_seqs", 64),
        ("compilation-config.cudagraph_mode=NONE", "cudagraph_mode", "NONE"),
    ],
)
def test_engine_settings(setting: str, key: str, value: object) -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="H100", sets=[setting])
    assert scenario.engine[key] == value


def test_client_settings() -> None:
    sets = ["max-concurrency=16", "random-input-len=100", "request-rate=2", "bench.seed=4", "duration=5"]
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="H100", sets=sets)
    workload = scenario.workload
    assert workload.dataset == RandomDataset(100, 512)
    assert (workload.max_concurrency, workload.request_rate, workload.seed) == (16, 2.0, 4)
    assert workload.duration == 5.0
    assert workload.num_prompts == 256


def test_client_settings_on_top_of_a_mapping() -> None:
    file = {"serve": SERVE, "gpu": "H100", "workload": {"dataset": {"input_len": 50}, "rate_scale": 3}}
    workload = build_scenario(file=file, sets=["random-output-len=7"]).workload
    assert workload.dataset == RandomDataset(50, 7)
    assert workload.rate_scale == 3


def test_a_switch_set_to_false_is_gone() -> None:
    source = read_source(
        serve="sglang serve Qwen/Qwen2.5-7B-Instruct --disable-radix-cache --disable-cuda-graph",
        bench=BENCH,
        gpu="H100",
        sets=["disable-radix-cache=false", "bench.ignore-eos=false"],
    )
    assert source.serve.flags == (("--disable-cuda-graph", None),)
    assert "--ignore-eos" not in dict(source.bench.flags)
    assert source.build().engine["disable_radix_cache"] is False


def test_settings_leave_the_rest_of_the_command_alone() -> None:
    source = read_source(serve=SERVE, bench=BENCH, gpu="H100").with_settings(["max-num-seqs=7"])
    assert dict(source.serve.flags) == {
        "--gpu-memory-utilization": "0.85",
        "--max-model-len": "32768",
        "--max-num-seqs": "7",
        "--max-num-batched-tokens": "8192",
    }


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max-num-sqes=1", ["max-num-seqs"]),
        ("max-concurency=1", ["max-concurrency"]),
        ("seed=1", ["serve.seed", "bench.seed"]),
        ("max-num-seqs", ["KEY=VALUE"]),
        ("=4", ["KEY=VALUE"]),
        ("max-num-seqs=many", ["whole"]),
        ("max-num-seqs=0", ["at least 1"]),
        ("burstiness=0", ["greater than 0"]),
    ],
)
def test_bad_settings(setting: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        build_scenario(serve=SERVE, bench=BENCH, gpu="H100", sets=[setting])
    for word in words:
        assert word in str(caught.value)


# -- lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serve", "bench", "field", "flag"),
    [
        (
            "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 2048",
            BENCH,
            "--random-input-len",
            "--max-model-len",
        ),
        (
            "sglang serve Qwen/Qwen2.5-7B-Instruct --context-length 2048",
            BENCH,
            "--random-input-len",
            "--context-length",
        ),
        (
            "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 4200",
            BENCH,
            "--random-output-len",
            "--max-model-len",
        ),
        (
            "vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 1024",
            "vllm bench serve --dataset-name prefix_repetition --prefix-repetition-prefix-len 1000",
            "--prefix-repetition-prefix-len",
            "--max-model-len",
        ),
    ],
)
def test_requests_that_the_server_would_refuse(serve: str, bench: str, field: str, flag: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_scenario(serve=serve, bench=bench, gpu="H100")
    assert caught.value.field == field
    assert flag in str(caught.value)


def test_only_the_longest_requests_too_long_is_a_warning() -> None:
    bench = "vllm bench serve --random-input-len 1000 --random-output-len 1000 --random-range-ratio 0.5"
    scenario = build_scenario(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct --max-model-len 2048", bench=bench, gpu="H100"
    )
    assert any(n.subject == "--random-range-ratio" and "3000" not in n.subject for n in scenario.notes)


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "field", "word"),
    [
        ({"serv": SERVE}, "serv", "serve"),
        ({"serve": SERVE, "engine": {"name": "vllm"}}, "scenario", "both"),
        ({"engine": {"name": "trtllm"}}, "engine.name", "vllm"),
        ({"engine": {"name": "vllm", "args": {"max_num_sqes": 1}}}, "--max-num-sqes", "--max-num-seqs"),
        ({"serve": SERVE, "workload": {"num_promts": 1}}, "workload.num_promts", "num_prompts"),
        ({"serve": SERVE, "workload": {"num_prompts": 0}}, "workload.num_prompts", "1"),
        ({"serve": SERVE, "workload": {"burstiness": 0}}, "workload.burstiness", "0"),
        ({"serve": SERVE, "workload": {"burstiness": math.nan}}, "workload.burstiness", "nan"),
        ({"serve": SERVE, "workload": {"request_rate": -1}}, "workload.request_rate", "0"),
        ({"serve": SERVE, "workload": {"goodput": {"ttft": -1}}}, "workload.goodput", "at least 0"),
        ({"serve": SERVE, "workload": {"percentiles": [0]}}, "workload.percentiles", "100"),
        (
            {"serve": SERVE, "workload": {"dataset": {"kind": "azure"}}, "gpu": "H100"},
            "workload.dataset.path",
            "azure",
        ),
        (
            {"serve": SERVE, "workload": {"dataset": {"kind": "random", "suffix_len": 4}}, "gpu": "H100"},
            "workload.dataset.suffix_len",
            "random",
        ),
        (
            {"serve": SERVE, "workload": {"ramp_up": {"strategy": "linear", "start": 5, "end": 1}}},
            "workload.ramp_up",
            "rise",
        ),
        ({"serve": SERVE, "gpu_count": 0}, "gpu_count", "1"),
        ({"serve": SERVE, "gpu_count": "two"}, "gpu_count", "integer"),
        ({"serve": SERVE, "observed": {"kv_cache_tokens": -1}}, "observed.kv_cache_tokens", "1"),
        ({"serve": SERVE}, "--gpu", "H100"),
        ({"gpu": "H100"}, "--serve", "launch"),
        ({"serve": "vllm serve", "gpu": "H100"}, "--model", "model"),
        ({"serve": SERVE, "gpu": "H1000X"}, "--gpu", "H1000X"),
        ({"serve": "vllm serve no/such-model-1B", "gpu": "H100"}, "--model", "no/such-model-1B"),
    ],
)
def test_bad_scenarios_name_the_key(content: dict[str, object], field: str, word: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_scenario(file=content)
    assert caught.value.field == field
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a", "serve: [", "", "!!python/object/apply:os.system ['true']"])
def test_files_that_are_no_scenario(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(BadInput):
        read_scenario_file(path)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_scenario_file(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="text"):
        read_scenario_file(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("argument", "value", "flag"),
    [
        ("gpu_count", 0, "--gpu-count"),
        ("kv_cache_tokens", -1, "--kv-cache-tokens"),
        ("num_gpu_blocks", 0, "--num-gpu-blocks"),
        ("seed", -1, "--seed"),
        ("engine_version", "new", "--engine-version"),
    ],
)
def test_bad_arguments(argument: str, value: object, flag: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_scenario(serve=SERVE, bench=BENCH, gpu="H100", **{argument: value})
    assert caught.value.field == flag


# -- writing ------------------------------------------------------------------------------------------


def test_a_file_survives_writing_and_reading(tmp_path: Path) -> None:
    content = parse_scenario_mapping(
        {"name": "x", "serve": SERVE, "workload": {"num_prompts": 5}, "gpu": "H100", "gpu_count": 2}, "test"
    )
    path = tmp_path / "out.yaml"
    write_scenario_file(content, path)
    assert read_scenario_file(path) == content
    assert [p.name for p in tmp_path.iterdir()] == ["out.yaml"]
    with pytest.raises(BadInput, match=r"--save.*cannot be written"):
        write_scenario_file(content, tmp_path / "no" / "out.yaml", "--save")
    # What is no plain file is written to, never replaced.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_scenario_file(content, pipe)
    assert os.read(reader, 100_000) == path.read_bytes()
    os.close(reader)
    assert pipe.is_fifo()


_DATASETS = st.one_of(
    st.builds(
        RandomDataset,
        input_len=st.integers(1, 9999),
        output_len=st.integers(1, 9999),
        range_ratio=st.floats(0, 0.99),
        prefix_len=st.integers(0, 99),
    ),
    st.builds(PrefixRepetitionDataset, prefix_len=st.integers(0, 99), shuffle=st.booleans()),
    st.builds(FileDataset, kind=st.sampled_from(["sharegpt", "azure", "mooncake"]), path=st.just("f")),
)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        WorkloadSpec,
        dataset=_DATASETS,
        num_prompts=st.integers(1, 9999),
        request_rate=st.floats(0.01, 100) | st.just(math.inf),
        burstiness=st.floats(0.01, 100),
        max_concurrency=st.none() | st.integers(1, 999),
        ramp_up=st.none() | st.just(("linear", 1.0, 2.0)),
        use_trace_arrivals=st.booleans(),
        ignore_eos=st.booleans(),
        goodput=st.sampled_from([(), (("ttft", 500.0),)]),
        seed=st.integers(0, 9),
        client=st.sampled_from(["vllm", "sglang"]),
    )
)
def test_a_workload_survives_its_mapping(spec: WorkloadSpec) -> None:
    text = yaml.safe_dump(workload_to_input(spec).model_dump(exclude_none=True))
    content = parse_scenario_mapping({"workload": yaml.safe_load(text)}, "test")
    assert content.workload is not None
    assert workload_from_input(content.workload, WorkloadSpec()) == spec


@pytest.mark.parametrize(
    "text", ["engine_version: 0.30", "engine: {name: vllm, version: 0.30}", "engine_version: 1"]
)
def test_an_unquoted_version_is_refused_rather_than_shortened(tmp_path: Path, text: str) -> None:
    path = tmp_path / "v.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"version.*quote it"):
        read_scenario_file(path)


def test_a_quoted_version_keeps_its_closing_zero(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text('engine_version: "0.30"')
    assert read_scenario_file(path).engine_version == "0.30"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu: H100\nseed: 1\ngpu: L4\n", r"gpu is there twice \(line 3\)"),
        ("gpu: H100\nworkload: {seed: 1, num_prompts: 3, seed: 2}\n", r"seed is there twice \(line 2\)"),
        ("gpu: [\n", r"is not YAML \(line 2\)"),
    ],
)
def test_a_key_given_twice_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_scenario_file(path)


def test_truth_values_and_lists_are_no_numbers() -> None:
    with pytest.raises(BadInput, match="true or false"):
        parse_scenario_mapping({"serve": SERVE, "seed": True}, "here")
    engine = {"name": "vllm", "model": "Qwen/Qwen3-14B", "args": {"max_num_seqs": [1, 2]}}
    with pytest.raises(BadInput, match=r"--max-num-seqs.*one value"):
        build_scenario(file={"engine": engine, "gpu": "H100"})
