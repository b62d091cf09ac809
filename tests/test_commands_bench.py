from __future__ import annotations

import math

import pytest

from sim.commands.bench import parse_bench_command, table
from sim.errors import BadInput
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec


def spec(flags: str) -> WorkloadSpec:
    return parse_bench_command(f"vllm bench serve {flags}").spec


def test_a_full_command() -> None:
    command = parse_bench_command(
        """vllm bench serve --backend openai --model Qwen/Qwen2.5-7B-Instruct --dataset-name random \\
             --random-input-len 4096 --random-output-len 512 --ignore-eos --request-rate inf \\
             --max-concurrency 128 --num-prompts 256"""
    )
    assert command.client == "vllm"
    assert command.model == "Qwen/Qwen2.5-7B-Instruct"
    assert command.spec == WorkloadSpec(
        dataset=RandomDataset(4096, 512), num_prompts=256, max_concurrency=128, ignore_eos=True
    )
    assert command.notes == ()


def test_defaults_are_the_clients() -> None:
    assert spec("") == WorkloadSpec(dataset=RandomDataset(1024, 128), num_prompts=1000, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        "vllm bench serve --num-prompts 7",
        "$ vllm bench serve \\\n   --num_prompts=7 \\\n   # warm",
        "python benchmarks/benchmark_serving.py --num-prompts 7",
        "python3 -m vllm.benchmarks.serve --num-prompts 7",
        "docker exec -it llm vllm bench serve --num-prompts 7 | tee out.txt",
        "docker run --network host --entrypoint vllm vllm/vllm-openai:v0.28.0 bench serve --num-prompts 7",
    ],
)
def test_ways_to_start_the_client(text: str) -> None:
    command = parse_bench_command(text)
    assert (command.client, command.spec.num_prompts) == ("vllm", 7)


def test_general_lengths_win_over_the_data_sets_own() -> None:
    dataset = spec("--input-len 10 --output-len 20 --random-input-len 1 --random-output-len 2").dataset
    assert dataset == RandomDataset(10, 20)


def test_range_ratio_for_each_side() -> None:
    both = spec("--random-range-ratio 0.25").dataset
    assert isinstance(both, RandomDataset)
    assert (both.range_ratio, both.output_range_ratio) == (0.25, None)
    own = spec("""--random-range-ratio '{"input": 0.1, "output": 0.5}'""").dataset
    assert isinstance(own, RandomDataset)
    assert (own.range_ratio, own.output_range_ratio) == (0.1, 0.5)


def test_prefix_repetition_keeps_the_models_own_stops() -> None:
    command = parse_bench_command(
        "vllm bench serve --dataset-name prefix_repetition --prefix-repetition-prefix-len 2048 "
        "--prefix-repetition-suffix-len 128 --prefix-repetition-output-len 128 "
        "--num-prompts 60 --disable-shuffle"
    )
    assert command.spec.dataset == PrefixRepetitionDataset(2048, 128, 10, 128, shuffle=False)
    assert not command.spec.ignore_eos
    assert [(n.kind, n.subject) for n in command.notes] == [("assumed", "--ignore-eos")]


def test_arrivals_and_limits() -> None:
    made = spec(
        "--request-rate 4 --burstiness 0.5 --num-warmups 2 --goodput ttft:500 tpot:50 "
        "--metric-percentiles 50,99.9 --percentile-metrics ttft,e2el --seed 7"
    )
    assert (made.request_rate, made.burstiness, made.num_warmups, made.seed) == (4.0, 0.5, 2, 7)
    assert made.goodput == (("ttft", 500.0), ("tpot", 50.0))
    assert made.percentiles == (50.0, 99.9)
    assert made.percentile_metrics == ("ttft", "e2el")


def test_ramp_up() -> None:
    made = spec("--ramp-up-strategy exponential --ramp-up-start-rps 1 --ramp-up-end-rps 10")
    assert made.ramp_up == ("exponential", 1.0, 10.0)


def test_traces_bring_their_own_times() -> None:
    made = spec("--dataset-name mooncake --dataset-path trace.jsonl --rate-scale 2")
    assert made.dataset == FileDataset("mooncake", "trace.jsonl")
    assert made.use_trace_arrivals
    assert made.rate_scale == 2.0
    paced = spec("--dataset-name azure --dataset-path t.csv --request-rate 3")
    assert not paced.use_trace_arrivals


def test_timed_trace_of_mooncakes_form() -> None:
    made = spec(
        "--dataset-name timed_trace --dataset-path t.jsonl --timed-trace-chunk-hash-size 512 "
        "--timed-trace-sec-multiplier 0.001"
    )
    assert made.dataset == FileDataset("mooncake", "t.jsonl")


def test_base_url_from_host_and_port() -> None:
    assert parse_bench_command("vllm bench serve --port 9000").base_url == "http://127.0.0.1:9000"
    assert parse_bench_command("vllm bench serve --base-url http://a:1").base_url == "http://a:1"
    assert parse_bench_command("vllm bench serve").base_url is None


def test_flags_without_a_model_are_named() -> None:
    notes = parse_bench_command("vllm bench serve --logprobs 5 --lora-modules a b --save-result").notes
    assert [(n.kind, n.subject) for n in notes] == [
        ("not-modelled", "--logprobs"),
        ("not-modelled", "--lora-modules"),
    ]


def test_chat_endpoint_is_an_assumption() -> None:
    notes = parse_bench_command(
        "vllm bench serve --backend openai-chat --endpoint /v1/chat/completions"
    ).notes
    assert [(n.kind, n.subject) for n in notes] == [("assumed", "--backend")]


def test_headers_are_secret() -> None:
    command = parse_bench_command("vllm bench serve --header Authorization=hunter2")
    assert "hunter2" not in repr(command)


# -- sglang.bench_serving -----------------------------------------------------------------------------


def test_sglang_random_has_its_own_meaning() -> None:
    command = parse_bench_command(
        "python3 -m sglang.bench_serving --backend sglang-oai --dataset-name random --random-input-len 1000 "
        "--random-output-len 100 --random-range-ratio 1.0 --num-prompts 50 --request-rate 2"
    )
    assert command.client == "sglang"
    assert command.spec.dataset == RandomDataset(1000, 100, 1.0, style="sglang")
    assert (command.spec.seed, command.spec.num_warmups, command.spec.client) == (42, 1, "sglang")
    assert command.spec.ignore_eos
    assert command.notes == ()


def test_sglang_range_ratio_zero_means_anything_up_to_the_length() -> None:
    command = parse_bench_command("python -m sglang.bench_serving --dataset-name random")
    assert command.spec.dataset == RandomDataset(1024, 1024, 0.0, style="sglang")
    assert command.spec.num_prompts == 1000
    assert command.notes[0].subject == "--random-range-ratio"


def test_sglang_shared_prefixes() -> None:
    command = parse_bench_command(
        "python -m sglang.bench_serving --dataset-name generated-shared-prefix --gsp-num-groups 4 "
        "--gsp-prompts-per-group 8 --gsp-system-prompt-len 512 --gsp-question-len 64 --gsp-output-len 32"
    )
    assert command.spec.dataset == PrefixRepetitionDataset(512, 64, 4, 32)
    assert command.spec.num_prompts == 32


def test_sglang_default_data_set_needs_a_file() -> None:
    with pytest.raises(BadInput, match="dataset-path"):
        parse_bench_command("python -m sglang.bench_serving")
    command = parse_bench_command("python -m sglang.bench_serving --dataset-path s.json --disable-ignore-eos")
    assert command.spec.dataset == FileDataset("sharegpt", "s.json")
    assert not command.spec.ignore_eos


def test_burstiness_may_be_infinite_as_vllm_bench_serve_takes_it() -> None:
    command = parse_bench_command("vllm bench serve --request-rate 10 --burstiness inf")
    assert math.isinf(command.spec.burstiness)


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "field", "word"),
    [
        ("--num-promts 5", "--num-promts", "--num-prompts"),
        ("--burstiness 0", "--burstiness", "greater than 0"),
        ("--burstiness -1", "--burstiness", "greater than 0"),
        ("--burstiness nan", "--burstiness", "NaN"),
        ("--burstiness even", "--burstiness", "number"),
        ("--request-rate 0", "--request-rate", "greater than 0"),
        ("--request-rate -2", "--request-rate", "greater than 0"),
        ("--request-rate nan", "--request-rate", "NaN"),
        ("--num-prompts 0", "--num-prompts", "at least 1"),
        ("--num-prompts -3", "--num-prompts", "at least 1"),
        ("--num-prompts 1.5", "--num-prompts", "whole"),
        ("--max-concurrency 0", "--max-concurrency", "at least 1"),
        ("--random-input-len 0", "--random-input-len", "at least 1"),
        ("--random-output-len 0", "--random-output-len", "at least 1"),
        ("--random-range-ratio 1", "--random-range-ratio", "below 1"),
        ("--random-range-ratio -0.1", "--random-range-ratio", "at least 0"),
        ("--random-range-ratio '{\"input\": 0.1}'", "--random-range-ratio", "output"),
        ("--num-warmups -1", "--num-warmups", "at least 0"),
        ("--goodput ttft", "--goodput", "ttft"),
        ("--goodput itl:5", "--goodput", "ttft, tpot, e2el"),
        ("--goodput ttft:-5", "--goodput", "at least 0"),
        ("--metric-percentiles 101", "--metric-percentiles", "at most 100"),
        ("--percentile-metrics ttft,speed", "--percentile-metrics", "speed"),
        ("--dataset-name sonnet", "--dataset-name", "not modelled"),
        ("--dataset-name nonsense", "--dataset-name", "must be one of"),
        ("--dataset-name sharegpt", "--dataset-path", "local file"),
        ("--ramp-up-strategy linear", "--ramp-up-strategy", "--ramp-up-start-rps"),
        (
            "--ramp-up-strategy linear --ramp-up-start-rps 5 --ramp-up-end-rps 2",
            "--ramp-up-start-rps",
            "exceed",
        ),
        (
            "--ramp-up-strategy exponential --ramp-up-start-rps 0 --ramp-up-end-rps 2",
            "--ramp-up-start-rps",
            "exponential",
        ),
        (
            "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3",
            "--request-rate",
            "left out",
        ),
        ("--dataset-name timed_trace --dataset-path t.jsonl", "--timed-trace-chunk-hash-size", "512"),
        ("stray", "--bench", "stray"),
    ],
)
def test_bad_bench_commands_name_the_flag(flags: str, field: str, word: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bench_command(f"vllm bench serve {flags}")
    assert caught.value.field == field
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["vllm bench throughput", "vllm serve M", "curl localhost", ""])
def test_other_commands_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_bench_command(text)


def test_infinite_rate_is_the_default() -> None:
    assert math.isinf(spec("--request-rate inf").request_rate)


@pytest.mark.parametrize("client", ["vllm", "sglang"])
def test_client_tables_say_what_is_not_modelled(client: str) -> None:
    rows = table("vllm" if client == "vllm" else "sglang").flags
    assert len(rows) > 80
    assert all(row.effect for row in rows if row.role == "not-modelled")


def test_a_ready_check_is_one_warm_up_more():
    def warmups(text):
        return parse_bench_command(f"vllm bench serve {text}").spec.num_warmups

    assert warmups("--ready-check-timeout-sec 0") == 0
    assert warmups("--ready-check-timeout-sec 600") == 1
    assert warmups("--ready-check-timeout-sec 60 --num-warmups 2") == 3
    notes = parse_bench_command("vllm bench serve --ready-check-timeout-sec 60").notes
    assert any("one warm-up more" in note.text for note in notes)
