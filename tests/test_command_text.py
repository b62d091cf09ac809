"""Commands that are written out say what was read."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import build_scenario
from sim.cli.options import ScenarioOptions
from sim.command_text import load_line
from sim.commands.bench import parse_bench_command
from sim.planning.capacity import capacity
from sim.planning.load_curve import Effort
from sim.planning.plan_report import bench_line, confirming_commands, confirming_load
from sim.planning.slo import parse_slos
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

ratios = st.sampled_from([0.0, 0.25, 0.9])
datasets = st.one_of(
    st.builds(
        RandomDataset,
        input_len=st.integers(1, 9999),
        output_len=st.integers(1, 999),
        range_ratio=ratios,
        output_range_ratio=st.none() | ratios,
        prefix_len=st.integers(0, 500),
    ),
    st.builds(PrefixRepetitionDataset, prefix_len=st.integers(1, 500), shuffle=st.booleans()),
    st.builds(
        FileDataset,
        kind=st.sampled_from(["sharegpt", "lengths"]),
        path=st.just("chats with space.json"),
        output_len=st.none() | st.integers(1, 999),
        shuffle=st.booleans(),
    ),
)
loads = st.builds(
    WorkloadSpec,
    dataset=datasets,
    num_prompts=st.integers(1, 5000),
    request_rate=st.sampled_from([0.5, 3.0, float("inf")]),
    burstiness=st.sampled_from([1.0, 0.5]),
    max_concurrency=st.none() | st.integers(1, 512),
    num_warmups=st.integers(0, 3),
    goodput=st.sampled_from([(), (("ttft", 500.0), ("e2el", 2500.5))]),
    percentiles=st.sampled_from([(99.0,), (50.0, 99.9)]),
    seed=st.integers(0, 99),
    endpoint=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)


@settings(max_examples=60, deadline=None)
@given(loads)
def test_a_written_load_reads_back(spec: WorkloadSpec) -> None:
    assert parse_bench_command(load_line(spec)).spec == spec


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm-chat"])
def test_the_other_clients_endpoint_reads_back(backend: str) -> None:
    spec = parse_bench_command(
        f"python -m sglang.bench_serving --dataset-name random --backend {backend}"
    ).spec
    assert spec.endpoint.endswith("chat/completions") == backend.endswith("chat")
    assert parse_bench_command(load_line(spec)).spec.endpoint == spec.endpoint


def test_a_load_that_may_stop_early_says_so() -> None:
    text = "python -m sglang.bench_serving --dataset-name random --disable-ignore-eos"
    assert "--disable-ignore-eos" in load_line(parse_bench_command(text).spec)


@pytest.mark.parametrize("kind", ["rate", "concurrency"])
def test_confirming_commands_are_complete(kind: str) -> None:
    serve = (
        "vllm serve Qwen/Qwen3-14B --max-num-seqs 32 --cudagraph-capture-sizes 1 2 4 --tensor-parallel-size 2"
    )
    bench = "vllm bench serve --dataset-name random --random-input-len 200 --random-output-len 20"
    scenario = build_scenario(serve=serve, bench=bench, gpu="H100", engine_version="0.28.0")
    found = capacity(
        scenario, parse_slos(["p90 ttft <= 2s"]), kind=kind, effort=Effort(100, 1), with_error=False
    )
    assert found.level is not None
    for line, share in zip(confirming_commands(found)[1:], (0.85, 1.15), strict=True):
        assert line == bench_line(confirming_load(found, share))
        words = shlex.split(line)
        assert words[:2] == ["servecast", "bench"]
        options = dict(zip(words[2::2], words[3::2], strict=True))
        again = ScenarioOptions(
            serve=(options["--serve"],),
            bench=options["--bench"],
            gpu=options["--gpu"],
            gpu_count=int(options["--gpu-count"]),
            engine_version=options["--engine-version"],
        ).scenario()
        assert again.engine == scenario.engine
        assert again.gpu_count == 2
        spec = again.workload
        load = spec.request_rate if kind == "rate" else spec.max_concurrency
        assert load == pytest.approx(share * found.level.value, rel=0.05, abs=1)
