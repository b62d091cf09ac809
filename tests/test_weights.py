"""Weights, FLOP, KV and state of a model, whole and per rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import build_scenario
from sim.carry import account_of
from sim.commands.serve import table
from sim.errors import BadInput
from sim.models.model import MlaConfig, ModelConfig, MoeConfig, StateConfig
from sim.models.table import load_model
from sim.models.weights import (
    active_parameters,
    bytes_per_weight,
    count_parameters,
    expected_distinct_experts,
    gemm_flops_per_token,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    lm_head_flops_per_token,
    state_bytes_per_sequence,
    step_weight_bytes,
    weight_bytes,
    with_quantization,
)

SMALL = ModelConfig(
    name="small",
    architecture="LlamaForCausalLM",
    num_layers=3,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    v_head_dim=16,
    intermediate_size=96,
    vocab_size=640,
    tie_word_embeddings=False,
    max_position_embeddings=512,
    dtype="bf16",
    num_full_attention_layers=3,
    num_sliding_layers=0,
    sliding_window=None,
)


def test_parameters_by_part_by_hand() -> None:
    parts = count_parameters(SMALL)
    assert parts.embed == parts.lm_head == 640 * 64
    assert parts.attention == 3 * (64 * 8 * 16 * 2 + 64 * 2 * 16 * 2)
    assert parts.mlp == 3 * 3 * 64 * 96
    assert parts.norms == 64 * (2 * 3 + 1)
    assert parts.total == 2 * parts.embed + parts.attention + parts.mlp + parts.norms


def test_biases_count_on_their_own_side() -> None:
    biased = replace(SMALL, attention_bias=True)
    extra = count_parameters(biased).total - count_parameters(SMALL).total
    assert extra == 3 * (8 + 2 + 2) * 16


def test_tied_weights_once_and_their_flop_always() -> None:
    tied = replace(SMALL, tie_word_embeddings=True)
    assert count_parameters(SMALL).total - count_parameters(tied).total == 640 * 64
    assert lm_head_flops_per_token(tied) == lm_head_flops_per_token(SMALL) == 2 * 64 * 640
    assert step_weight_bytes(tied, 8) == step_weight_bytes(SMALL, 8)


def test_gemm_flop_leaves_embeddings_and_lm_head_out() -> None:
    parts = count_parameters(SMALL)
    assert gemm_flops_per_token(SMALL) == 2 * (parts.attention + parts.mlp)


MOE = replace(
    SMALL,
    moe=MoeConfig(
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_shared_experts=1,
        shared_expert_intermediate_size=48,
        moe_layers=2,
    ),
)


def test_memory_holds_every_expert_and_a_token_meets_few() -> None:
    parts = count_parameters(MOE)
    expert = 3 * 64 * 32
    assert parts.experts == 2 * 16 * expert
    assert parts.shared_experts == 2 * 3 * 64 * 48
    assert parts.mlp == 3 * 64 * 96  # the one dense layer
    assert active_parameters(MOE) == parts.total - 2 * 14 * expert
    dense = 2 * (parts.attention + parts.mlp + parts.shared_experts + parts.router)
    assert gemm_flops_per_token(MOE) == dense + 2 * 2 * 2 * expert
    assert weight_bytes(MOE) == pytest.approx(2 * parts.total)


def test_distinct_experts_match_a_draw() -> None:
    generator = random.Random(7)
    draws = [
        len({expert for _ in range(20) for expert in generator.sample(range(64), 6)}) for _ in range(400)
    ]
    assert expected_distinct_experts(64, 6, 20) == pytest.approx(sum(draws) / len(draws), rel=0.02)


@given(st.integers(1, 256), st.data())
@settings(max_examples=40, deadline=None)
def test_distinct_experts_are_bounded_and_grow(experts: int, data: st.DataObject) -> None:
    per_token = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(1, 500))
    met = expected_distinct_experts(experts, per_token, tokens)
    assert per_token - 1e-6 <= met <= experts + 1e-6
    assert met <= expected_distinct_experts(experts, per_token, tokens + 1) + 1e-9


def test_a_step_reads_the_experts_it_meets() -> None:
    one, many = step_weight_bytes(MOE, 1), step_weight_bytes(MOE, 10_000)
    expert = 3 * 64 * 32 * 2
    assert many - one == pytest.approx(2 * 14 * expert, rel=1e-6)


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_kv_heads_are_replicated_beyond_their_number(tp: int, heads: int) -> None:
    model = replace(SMALL, num_key_value_heads=4)
    assert kv_bytes_per_token(model, tp) == 3 * heads * (16 + 16) * 2


def test_ranks_must_divide_the_heads() -> None:
    with pytest.raises(BadInput, match="8 attention heads not divisible by 3"):
        kv_bytes_per_token(SMALL, 3)
    with pytest.raises(BadInput, match="12 attention heads not divisible by 8"):
        weight_bytes(replace(SMALL, num_attention_heads=12), tp=8)
    with pytest.raises(BadInput, match="KV heads neither divide"):
        kv_bytes_per_token(replace(SMALL, num_attention_heads=12, num_key_value_heads=4), 6)
    with pytest.raises(BadInput, match="at least 1"):
        weight_bytes(SMALL, tp=0)


def test_shares_add_up_to_the_whole_where_nothing_is_replicated() -> None:
    whole = weight_bytes(SMALL)
    replicated = count_parameters(SMALL).norms * 2
    assert 2 * weight_bytes(SMALL, tp=2) == whole + replicated
    # Two KV heads on four ranks are held twice.
    kv = 3 * 64 * 2 * 16 * 2 * 2
    assert 4 * weight_bytes(SMALL, tp=4) == whole + 3 * replicated + kv


MLA = replace(SMALL, num_key_value_heads=8, mla=MlaConfig(128, 96, 32, 16, 24))


def test_mla_keeps_one_latent_on_every_rank() -> None:
    latent = 3 * (128 + 16) * 2
    assert [kv_bytes_per_token(MLA, tp) for tp in (1, 2, 8)] == [latent] * 3
    assert kv_bytes_per_token(MLA, kv_cache_dtype="fp8") == latent // 2
    assert kv_bytes_per_token(MLA, kv_cache_dtype="fp8_ds_mla") == 3 * 656


def test_mla_parameters_by_hand() -> None:
    query = 64 * 96 + 96 + 96 * 8 * (32 + 16)
    latent = 64 * (128 + 16) + 128 + 128 * 8 * (32 + 24)
    assert count_parameters(MLA).attention == 3 * (query + latent + 8 * 24 * 64)


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("bfloat16", 2), ("fp8", 1), ("fp8_e4m3", 1)])
def test_kv_dtype(dtype: str, size: int) -> None:
    assert kv_bytes_per_token(SMALL, kv_cache_dtype=dtype) == 3 * 2 * 32 * size


def test_a_window_caps_what_a_sequence_holds() -> None:
    mixed = replace(SMALL, num_full_attention_layers=1, num_sliding_layers=2, sliding_window=100)
    per_layer = 2 * 32 * 2
    assert kv_bytes_per_sequence(mixed, 50) == 3 * 50 * per_layer
    assert kv_bytes_per_sequence(mixed, 1000) == (1000 + 2 * 100) * per_layer


def test_state_is_paid_per_sequence_whatever_its_length() -> None:
    hybrid = replace(SMALL, num_full_attention_layers=1, state=StateConfig(2, 4096))
    assert state_bytes_per_sequence(hybrid) == 4096
    assert state_bytes_per_sequence(hybrid, 2) == 2048
    assert kv_bytes_per_sequence(hybrid, 10) == 4096 + 10 * 128
    assert kv_bytes_per_sequence(hybrid, 20) - kv_bytes_per_sequence(hybrid, 10) == 10 * 128
    assert state_bytes_per_sequence(SMALL) == 0


def test_fp8_at_load_leaves_embeddings_alone() -> None:
    fp8 = with_quantization(SMALL, "fp8")
    parts = count_parameters(SMALL)
    linear = parts.attention + parts.mlp
    assert weight_bytes(SMALL, "fp8") == 2 * parts.total - linear
    assert bytes_per_weight(fp8, "lm_head") == 2


def test_a_scheme_that_needs_its_own_checkpoint() -> None:
    with pytest.raises(BadInput, match="awq checkpoint"):
        with_quantization(SMALL, "awq")


def test_mxfp4_is_for_experts_only() -> None:
    model = load_model("openai/gpt-oss-20b")
    parts = count_parameters(model)
    experts = parts.experts * 4.25 / 8
    assert weight_bytes(model) == pytest.approx(experts + 2 * (parts.total - parts.experts), rel=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "fp32"])
def test_fp32_is_loaded_in_half_precision_unless_asked(dtype: str) -> None:
    single = replace(SMALL, dtype="fp32")
    assert weight_bytes(single) == weight_bytes(SMALL)
    assert weight_bytes(single, dtype=dtype) == 2 * weight_bytes(SMALL)


def test_the_vision_tower_takes_memory_and_no_time() -> None:
    seeing = replace(SMALL, extra_parameters=1000)
    assert weight_bytes(seeing) - weight_bytes(SMALL) == 2000
    assert gemm_flops_per_token(seeing) == gemm_flops_per_token(SMALL)
    assert step_weight_bytes(seeing, 4) == step_weight_bytes(SMALL, 4)
    assert active_parameters(seeing) == active_parameters(SMALL)


@pytest.mark.parametrize(
    ("dtype", "per_head"),
    [
        ("int8_per_token_head", 32 + 8),  # an fp32 scale for the key and one for the value
        ("fp8_per_token_head", 32 + 8),
        ("int4_per_token_head", 16 + 8),
        ("mxfp8", 32 + 1),  # a byte of scale per 32 elements
        ("nvfp4", 16 + 2),
        ("float32", 128),
    ],
)
def test_scales_of_a_kv_dtype_count(dtype: str, per_head: int) -> None:
    assert kv_bytes_per_token(SMALL, kv_cache_dtype=dtype) == 3 * 2 * per_head


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        ("turboquant_k8v4", 16 + 8 + 4),
        ("turboquant_4bit_nc", (8 + 2) + (8 + 4)),
        ("turboquant_k3v4_nc", (6 + 2) + (8 + 4)),
        ("turboquant_3bit_nc", (6 + 2) + (6 + 4)),
    ],
)
def test_turboquant_packs_heads_and_spares_the_ends(dtype: str, packed: int) -> None:
    long = replace(SMALL, num_layers=10, num_full_attention_layers=10)
    per_layer = (4 * 64 + 6 * packed) / 10
    assert kv_bytes_per_token(long, kv_cache_dtype=dtype) == 10 * int(2 * per_layer)
    with pytest.raises(BadInput, match=f"--kv-cache-dtype: '{dtype}'"):
        kv_bytes_per_token(MLA, kv_cache_dtype=dtype)


def test_a_model_in_float32_keeps_its_kv_in_it() -> None:
    bench = "vllm bench serve --random-input-len 8 --random-output-len 8"
    for serve in ("vllm serve {}", "python -m sglang.launch_server --model-path {}"):
        command = serve.format("Qwen/Qwen2.5-0.5B-Instruct")
        single = build_scenario(serve=f"{command} --dtype float32", bench=bench, gpu="H100")
        half = build_scenario(serve=command, bench=bench, gpu="H100")
        assert kv_bytes_per_token(single.model) == 2 * kv_bytes_per_token(half.model)
        assert account_of(single).kv_bytes_per_token == 2 * account_of(half).kv_bytes_per_token


def test_every_kv_dtype_that_an_engine_takes_has_a_size() -> None:
    tables = {engine: table(engine).find("--kv-cache-dtype") for engine in ("vllm", "sglang")}
    for flag in tables.values():
        assert flag is not None
        for dtype in flag.choices:
            assert kv_bytes_per_token(SMALL, kv_cache_dtype=dtype) > 0
