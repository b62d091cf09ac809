"""vLLM's memory account: against logged pools, by hand, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.build import build_scenario
from sim.engines.vllm import kv_layout as layouts
from sim.engines.vllm.kv_layout import KvLayout
from sim.engines.vllm.memory import account
from sim.errors import BadInput
from sim.memory import MemoryAccount, MemoryLine
from sim.models.model import StateConfig
from sim.models.table import load_model
from sim.models.weights import kv_bytes_per_token_per_layer
from sim.provenance import Origin

GIB = 2**30
NO_LOAD = "vllm bench serve --random-input-len 1 --random-output-len 1"


def account_of(serve: str, gpu: str, version: str = "0.28.0", **options: Any) -> MemoryAccount:
    scenario = build_scenario(
        serve=f"vllm serve {serve}", bench=NO_LOAD, gpu=gpu, engine_version=version, **options
    )
    return account(scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed)


def line(result: MemoryAccount, name: str) -> MemoryLine:
    return next(entry for entry in result.lines if entry.name == name)


# Pools that engines logged [GiB of KV or tokens], with the flags that are known; docs/memory.md has sources.
LOGGED_TOKENS = [
    (
        "Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.85 --max-model-len 32768 --max-num-seqs 128 "
        "--max-num-batched-tokens 8192",
        "RTX 5090",
        "0.28.0",
        194_896,
    ),
    ("Qwen/Qwen3-14B --max-num-seqs 256 --max-num-batched-tokens 8192", "H100", "0.23.0", 288_608),
]
LOGGED_GIB = [
    ("meta-llama/Llama-3.1-8B-Instruct", "A100", "0.31.0", 56.21),
    ("Qwen/Qwen3-8B --max-model-len 8192", "A10G", "0.30.0", 3.16),
    (
        "Qwen/Qwen2.5-7B-Instruct --dtype float16 --enforce-eager --max-num-batched-tokens 8192",
        "V100",
        "0.18.0",
        13.1,
    ),
    (
        "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 --tensor-parallel-size 4 --gpu-memory-utilization 0.9 "
        "--max-model-len 32768 --max-num-seqs 32",
        "RTX PRO 6000",
        "0.27.1",
        27.85,
    ),
]


@pytest.mark.parametrize(("serve", "gpu", "version", "tokens"), LOGGED_TOKENS)
def test_estimates_are_near_logged_tokens(serve: str, gpu: str, version: str, tokens: int) -> None:
    result = account_of(serve, gpu, version)
    assert result.estimated_tokens == pytest.approx(tokens, rel=0.05)
    assert result.estimated_tokens_low < tokens < result.estimated_tokens_high


@pytest.mark.parametrize(("serve", "gpu", "version", "gib"), LOGGED_GIB)
def test_estimates_are_near_logged_memory(serve: str, gpu: str, version: str, gib: float) -> None:
    left = line(account_of(serve, gpu, version), "left for KV")
    assert left.bytes / GIB == pytest.approx(gib, rel=0.06)
    assert left.low / GIB < gib < left.high / GIB


SMALL = "Qwen/Qwen3-8B --max-model-len 4096"


def test_lines_add_up() -> None:
    result = account_of(SMALL, "L40S")
    spent = sum(
        entry.bytes
        for entry in result.lines
        if entry.name not in {"total memory", "requested", "left for KV", "KV pool"}
    )
    assert line(result, "left for KV").bytes == line(result, "requested").bytes - spent
    pool = line(result, "KV pool").bytes
    assert 0 <= line(result, "left for KV").bytes - pool < 36 * 65536
    assert result.kv_bytes_per_token == 36 * 8 * 128 * 2 * 2
    assert pool == result.num_gpu_blocks * 16 * result.kv_bytes_per_token
    assert result.kv_origin is Origin.COMPUTED
    for entry in result.lines:
        assert entry.low <= entry.bytes <= entry.high


def test_a_fraction_is_of_the_total() -> None:
    low = account_of(f"{SMALL} --gpu-memory-utilization 0.6", "L40S")
    high = account_of(f"{SMALL} --gpu-memory-utilization 0.7", "L40S")
    gained = line(high, "left for KV").bytes - line(low, "left for KV").bytes
    assert gained == pytest.approx(0.1 * line(low, "total memory").bytes, abs=2)


def test_a_larger_budget_costs_activations() -> None:
    small = account_of(f"{SMALL} --max-num-batched-tokens 2048 --max-num-seqs 8", "L40S")
    large = account_of(f"{SMALL} --max-num-batched-tokens 16384 --max-num-seqs 8", "L40S")
    assert line(large, "activation peak").bytes > 4 * line(small, "activation peak").bytes
    assert large.estimated_tokens < small.estimated_tokens


def test_many_sequences_cost_logits() -> None:
    few = account_of(f"{SMALL} --max-num-seqs 64 --enforce-eager", "L40S")
    many = account_of(f"{SMALL} --max-num-seqs 1024 --enforce-eager", "L40S")
    assert "logits" in line(many, "activation peak").rule
    assert many.estimated_tokens < few.estimated_tokens


def test_graphs_are_subtracted_where_the_version_does() -> None:
    moe = "Qwen/Qwen3-30B-A3B --max-model-len 4096"
    assert line(account_of(moe, "H100"), "CUDA graphs").bytes > 0
    assert line(account_of(f"{moe} --enforce-eager", "H100"), "CUDA graphs").bytes == 0
    assert line(account_of(moe, "H100", "0.19.0"), "CUDA graphs").bytes == 0


def test_tensor_parallel_ranks_hold_their_share() -> None:
    one, two = account_of(SMALL, "H100"), account_of(f"{SMALL} --tensor-parallel-size 2", "H100")
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert line(two, "weights").bytes == pytest.approx(line(one, "weights").bytes / 2, rel=0.01)
    assert "all-reduce" in line(two, "non-torch").rule


def test_log_line_rounds_to_the_length() -> None:
    result = account_of("Qwen/Qwen3-8B --max-model-len 5000", "L40S")
    per_request = -(-5000 // 16)
    assert result.max_concurrency == pytest.approx(result.num_gpu_blocks / per_request)
    assert result.kv_cache_tokens == int(result.max_concurrency * 5000)


def test_a_given_pool_wins_and_is_compared() -> None:
    estimate = account_of(SMALL, "L40S").estimated_tokens
    close = account_of(SMALL, "L40S", kv_cache_tokens=estimate + 16)
    assert close.kv_cache_tokens == estimate + 16
    assert close.kv_origin is Origin.GIVEN
    assert close.estimated_tokens == estimate
    assert [note.kind for note in close.notes if note.subject == "--kv-cache-tokens"] == ["info"]
    far = account_of(SMALL, "L40S", kv_cache_tokens=estimate // 2)
    assert [note.kind for note in far.notes if note.subject == "--kv-cache-tokens"] == ["warning"]
    assert far.num_gpu_blocks * 16 >= estimate // 2


def test_blocks_and_tokens_that_are_not_of_one_pool_are_said_to_be():
    alone = account_of(SMALL, "L40S", num_gpu_blocks=3000)
    both = account_of(SMALL, "L40S", num_gpu_blocks=3000, kv_cache_tokens=alone.kv_cache_tokens)
    assert both.kv_cache_tokens == alone.kv_cache_tokens
    other = account_of(SMALL, "L40S", num_gpu_blocks=3000, kv_cache_tokens=100_000)
    said = "3,000 blocks are 48,000 tokens of this model, and 100,000 were told as well"
    assert any(said in note.text for note in other.notes)
    assert not any("were told as well" in note.text for note in both.notes)
    assert other.num_gpu_blocks == 3000


def test_a_logged_block_count_wins() -> None:
    result = account_of(SMALL, "L40S", num_gpu_blocks=3000)
    assert (result.num_gpu_blocks, result.kv_cache_tokens) == (3000, 48000)
    assert result.kv_origin is Origin.LOGGED


def test_flags_that_set_the_pool() -> None:
    blocks = account_of(f"{SMALL} --num-gpu-blocks-override 2000", "L40S")
    assert blocks.num_gpu_blocks == 2000
    page = 36 * 16 * 4096
    size = account_of(f"{SMALL} --kv-cache-memory-bytes {1000 * page + 5}", "L40S")
    assert size.num_gpu_blocks == 1000
    assert not any(note.kind == "warning" for note in size.notes)
    much = account_of(f"{SMALL} --kv-cache-memory-bytes 40G", "L40S")
    assert any(note.kind == "warning" and "out of memory" in note.text for note in much.notes)


def test_a_pool_of_another_fraction_names_the_fraction() -> None:
    logged = account_of(f"{SMALL} --gpu-memory-utilization 0.7", "H100").kv_cache_tokens
    result = account_of(f"{SMALL} --gpu-memory-utilization 0.9", "H100", kv_cache_tokens=logged)
    (note,) = [note for note in result.notes if note.subject == "--kv-cache-tokens"]
    assert note.kind == "warning"
    assert "--gpu-memory-utilization (about 0.70 would give this pool)" in note.text


def test_a_pool_larger_than_the_card_names_no_fraction() -> None:
    tokens = 2 * account_of(f"{SMALL} --gpu-memory-utilization 0.9", "H100").kv_cache_tokens
    result = account_of(f"{SMALL} --gpu-memory-utilization 0.9", "H100", kv_cache_tokens=tokens)
    (note,) = [note for note in result.notes if note.subject == "--kv-cache-tokens"]
    assert "would give" not in note.text


def test_a_pool_that_leaves_no_room_says_so() -> None:
    # Logged at a higher fraction than the one given.
    tokens = account_of(f"{SMALL} --gpu-memory-utilization 0.92", "H100").kv_cache_tokens
    result = account_of(f"{SMALL} --gpu-memory-utilization 0.88", "H100", kv_cache_tokens=tokens)
    notes = [note.text for note in result.notes if note.subject == "--gpu-memory-utilization"]
    assert len(notes) == 1
    assert "nothing for activations" in notes[0]
    assert "ran with about 0.92" in notes[0]


@pytest.mark.parametrize(
    ("serve", "gpu", "flag", "text"),
    [
        ("Qwen/Qwen2.5-32B-Instruct", "RTX 4090", "--tensor-parallel-size", "does not fit"),
        (
            "Qwen/Qwen2.5-14B-Instruct --gpu-memory-utilization 0.6",
            "L40S",
            "--gpu-memory-utilization",
            "no memory is left for KV",
        ),
        ("Qwen/Qwen3-8B --max-model-len 40960", "L4", "--max-model-len", "refuses to start"),
        (
            f"{SMALL} --num-gpu-blocks-override 100",
            "H100",
            "--max-model-len",
            "lower it to at most 1600",
        ),
    ],
)
def test_what_the_engine_refuses(serve: str, gpu: str, flag: str, text: str) -> None:
    with pytest.raises(BadInput, match=text) as refused:
        account_of(serve, gpu)
    assert refused.value.field == flag


def test_the_longest_length_named_is_one_that_fits() -> None:
    with pytest.raises(BadInput, match="lower it to at most") as refused:
        account_of("Qwen/Qwen3-8B --max-model-len 40960", "L4")
    longest = int(str(refused.value).split("at most ")[1].split()[0])
    account_of(f"Qwen/Qwen3-8B --max-model-len {longest}", "L4")
    with pytest.raises(BadInput):
        account_of(f"Qwen/Qwen3-8B --max-model-len {longest + 16}", "L4")


def test_minus_one_lets_the_engine_choose_the_length() -> None:
    result = account_of("Qwen/Qwen3-8B --max-model-len -1", "L4")
    assert any("shrinks the length" in note.text for note in result.notes)
    assert result.max_concurrency >= 1


def layout_of(name: str, **options: Any) -> KvLayout:
    arguments = {"tp": 1, "kv_cache_dtype": "auto", "block_size": 16, **options}
    return layouts.kv_layout(load_model(name), **arguments)


def test_alternating_layers_share_one_pool_in_two_groups() -> None:
    layout = layout_of("openai/gpt-oss-20b")
    assert (layout.num_groups, layout.group_size) == (2, 12)
    assert layout.page_bytes == 16 * 8 * 64 * 2 * 2
    # The sliding group keeps window - 1 tokens and those in flight, and one block more.
    assert layouts.blocks_per_request(layout, 4096, 0) == 256 + (-(-127 // 16) + 1)


def test_uneven_counts_are_padded_to_the_smaller() -> None:
    layout = layout_of("google/gemma-3-27b-it")  # 10 full layers, 52 sliding ones
    assert (layout.group_size, layout.num_groups) == (10, 1 + 6)


def test_without_the_hybrid_manager_every_layer_is_full() -> None:
    layout = layout_of("openai/gpt-oss-20b", hybrid=False)
    assert (layout.num_groups, layout.group_size) == (1, 24)
    assert layouts.blocks_per_request(layout, 4096, 0) == 256


def test_tokens_of_a_hybrid_depend_on_the_length() -> None:
    layout = layout_of("openai/gpt-oss-20b")
    short, short_runs = layouts.logged_tokens(layout, 10_000, 1024, 0)
    long, long_runs = layouts.logged_tokens(layout, 10_000, 65_536, 0)
    assert short < long
    assert short_runs == pytest.approx(10_000 / (64 + 9))
    assert long == int(long_runs * 65_536)
    assert layouts.blocks_from_tokens(layout, long, 65_536, 0) <= 10_000


def test_before_020_the_log_counted_blocks_per_group() -> None:
    layout = layout_of("openai/gpt-oss-20b")
    assert layouts.logged_tokens(layout, 10_000, 65_536, 0, by_concurrency=False)[0] == 5_000 * 16


def test_a_state_model_sizes_its_blocks_by_the_state() -> None:
    model = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert model.state is not None
    layout = layout_of(model.name)
    per_token = kv_bytes_per_token_per_layer(model)
    state = model.state.bytes_per_sequence // model.state.num_layers
    assert layout.page_bytes >= state
    assert layout.page_bytes - 16 * per_token < state
    assert layout.group_size == 12  # 12 attention layers, 36 with state
    assert layout.num_groups == 4


def test_static_and_growing_cost_of_a_state_model() -> None:
    model = replace(load_model("Qwen/Qwen3-8B"), num_full_attention_layers=4, state=StateConfig(8, 8 * 65536))
    layout = layouts.kv_layout(model, tp=1, kv_cache_dtype="auto", block_size=16)
    costs = [layouts.blocks_per_request(layout, length, 0) for length in (16, 1600, 3200)]
    assert costs[2] - costs[1] == 1600 // layout.block_size
    assert costs[0] > 1


def test_mla_is_one_latent_per_token_at_any_tp() -> None:
    layouts_by_tp = [layout_of("deepseek-ai/DeepSeek-V3", tp=tp) for tp in (1, 8)]
    assert layouts_by_tp[0] == layouts_by_tp[1]
    assert layouts_by_tp[0].bytes_per_token == 61 * 576 * 2


def test_fp8_kv_doubles_the_tokens() -> None:
    half, whole = account_of(f"{SMALL} --kv-cache-dtype fp8", "H100"), account_of(SMALL, "H100")
    assert half.kv_cache_tokens == pytest.approx(2 * whole.kv_cache_tokens, rel=0.001)


def test_a_model_of_ones_own_says_what_was_assumed(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = account_of(str(tmp_path), "L4")
    assert any("head_dim" in note.subject for note in result.notes if note.kind == "assumed")


def test_a_cpu_is_a_device_too() -> None:
    result = account_of("Qwen/Qwen2.5-0.5B-Instruct --max-model-len 2048", "cpu")
    assert result.kv_cache_tokens > 2048
    assert not any(entry.name == "CUDA graphs" for entry in result.lines)
