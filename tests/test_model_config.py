"""Config.json of every kind of decoder, and what to do where fields are absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.errors import BadInput
from sim.models.config import parse_config
from sim.models.table import load_model
from sim.models.weights import count_parameters, kv_bytes_per_token, weight_bytes

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_head_dim_of_the_config_wins_over_the_quotient() -> None:
    given = parse_config({**DENSE, "head_dim": 160}, "m")
    derived = parse_config(DENSE, "m")
    assert (given.head_dim, derived.head_dim) == (160, 96)
    assert kv_bytes_per_token(given) == 10 * 4 * 160 * 2 * 2
    assert "head_dim" not in dict(given.defaulted)
    assert dict(derived.defaulted)["head_dim"] == "hidden_size / num_attention_heads"


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_null_is_absent(absent: dict[str, None]) -> None:
    assert parse_config({**DENSE, **absent}, "m").head_dim == 96


def test_a_quotient_with_rest_is_refused() -> None:
    with pytest.raises(BadInput, match="insufficient config: head_dim"):
        parse_config({**DENSE, "num_attention_heads": 10}, "m")


@pytest.mark.parametrize("section", ["text_config", "language_config", "llm_config"])
def test_the_nested_text_config_wins_over_the_top_level(section: str) -> None:
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "model_type": "x_vl"}
    model = parse_config({**vision, section: DENSE}, "m")
    assert (model.num_layers, model.hidden_size) == (10, 1536)
    assert kv_bytes_per_token(model) == kv_bytes_per_token(parse_config(DENSE, "m"))


def test_a_text_config_without_widths_still_gives_kv() -> None:
    text = {key: DENSE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    model = parse_config({"text_config": {**text, "num_key_value_heads": 2}}, "m")
    assert kv_bytes_per_token(model) == 10 * 2 * 96 * 2 * 2
    with pytest.raises(BadInput, match="intermediate_size and no vocab_size"):
        count_parameters(model)


def test_family_defaults_fill_what_real_checkpoints_leave_out() -> None:
    model = parse_config(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "num_hidden_layers": 13,
                "intermediate_size": 15360,
            },
        },
        "m",
    )
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 4, 256)
    assert dict(model.defaulted)["num_attention_heads"] == "family default of gemma3_text"
    # Five sliding layers to one full: the sixth and the twelfth.
    assert (model.num_full_attention_layers, model.num_sliding_layers) == (2, 11)
    assert model.tie_word_embeddings


def test_an_unknown_family_is_never_guessed() -> None:
    config = {"model_type": "novel", "text_config": {"hidden_size": 512, "num_hidden_layers": 2}}
    with pytest.raises(BadInput, match="insufficient config: num_attention_heads"):
        parse_config(config, "m")


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_needed_field_is_named(field: str) -> None:
    with pytest.raises(BadInput, match=field):
        parse_config({key: value for key, value in DENSE.items() if key != field}, "m")


@pytest.mark.parametrize("value", ["many", 0, -3, 2.5, [4], True])
def test_a_field_of_the_wrong_type_is_named(value: object) -> None:
    with pytest.raises(BadInput, match="num_hidden_layers"):
        parse_config({**DENSE, "num_hidden_layers": value}, "m")


def test_kv_heads_default_to_one_per_head() -> None:
    model = parse_config({**DENSE, "num_key_value_heads": None}, "m")
    assert model.num_key_value_heads == 16
    assert "num_key_value_heads" in dict(model.defaulted)


def test_tying_is_the_familys_own_default() -> None:
    config = {key: value for key, value in DENSE.items() if key != "tie_word_embeddings"}
    assert not parse_config(config, "m").tie_word_embeddings
    assert parse_config({**config, "model_type": "gemma2"}, "m").tie_word_embeddings
    assert parse_config({**config, "model_type": "unheard-of"}, "m").tie_word_embeddings


def test_layer_types_decide() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3 + ["full_attention"]
    model = parse_config({**DENSE, "layer_types": kinds, "sliding_window": 512}, "m")
    assert (model.num_full_attention_layers, model.num_sliding_layers, model.sliding_window) == (4, 6, 512)


def test_an_unknown_layer_type_is_named() -> None:
    with pytest.raises(BadInput, match="telepathy"):
        parse_config({**DENSE, "layer_types": ["telepathy"] * 10}, "m")


def test_a_window_without_use_is_no_window() -> None:
    qwen = {**DENSE, "model_type": "qwen2", "sliding_window": 4096}
    assert parse_config(qwen, "m").num_sliding_layers == 0
    used = parse_config({**qwen, "use_sliding_window": True, "max_window_layers": 7}, "m")
    assert (used.num_full_attention_layers, used.num_sliding_layers) == (7, 3)


def test_mistral_slides_everywhere_unless_null() -> None:
    mistral = {**DENSE, "model_type": "mistral"}
    assert parse_config({**mistral, "sliding_window": 4096}, "m").num_sliding_layers == 10
    assert parse_config({**mistral, "sliding_window": None}, "m").num_sliding_layers == 0


def test_mamba_layers_hold_state_and_no_kv() -> None:
    model = parse_config(
        {
            "model_type": "nemotron_h",
            "num_hidden_layers": 8,
            "hybrid_override_pattern": "M-MM*-M-",
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_num_heads": 32,
            "mamba_head_dim": 80,
            "n_groups": 4,
            "ssm_state_size": 64,
            "conv_kernel": 4,
            "mamba_ssm_cache_dtype": "float32",
            "torch_dtype": "bfloat16",
        },
        "m",
    )
    assert model.state is not None
    assert model.num_full_attention_layers == 1
    assert model.state.num_layers == 4
    assert model.state.conv_bytes_per_layer == (32 * 80 + 2 * 4 * 64) * 3 * 2
    assert model.state.recurrent_bytes_per_layer == 32 * 80 * 64 * 4
    assert kv_bytes_per_token(model) == 2 * 64 * 2 * 2


def test_gated_delta_nets_hold_a_matrix_per_head() -> None:
    model = parse_config(
        {
            "model_type": "qwen3_next",
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 1000,
            "intermediate_size": 100,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "torch_dtype": "bfloat16",
        },
        "m",
    )
    assert model.state is not None
    assert (model.num_full_attention_layers, model.state.num_layers) == (2, 6)
    assert model.state.conv_bytes_per_layer == (2 * 4 * 64 + 8 * 32) * 3 * 2
    assert model.state.recurrent_bytes_per_layer == 8 * 64 * 32 * 2


def test_experts_and_their_first_dense_layers() -> None:
    model = parse_config(
        {
            **DENSE,
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 2,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 512,
            "kv_lora_rank": 256,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
        "m",
    )
    assert model.moe is not None
    assert model.mla is not None
    assert (model.moe.moe_layers, model.moe.num_shared_experts) == (8, 1)
    assert model.mla.q_lora_rank is None
    assert kv_bytes_per_token(model) == 10 * (256 + 32) * 2


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.0 + 32 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_algo": "NVFP4"}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}},
            },
            4 + 16 / 64,
        ),
    ],
)
def test_bits_per_weight_with_scales(section: dict[str, Any], bits: float) -> None:
    model = parse_config({**DENSE, "quantization_config": section}, "m")
    assert model.quant is not None
    assert model.quant.weight_bits == pytest.approx(bits)
    assert weight_bytes(model) < weight_bytes(parse_config(DENSE, "m"))


def test_an_unknown_quantisation_is_refused() -> None:
    with pytest.raises(BadInput, match="crystal"):
        parse_config({**DENSE, "quantization_config": {"quant_method": "crystal"}}, "m")


def test_a_folder_a_file_and_modelopts_own_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert load_model(str(tmp_path)).num_layers == 10
    assert load_model(str(tmp_path / "config.json")).hidden_size == 1536
    assert load_model(str(tmp_path / "config.json")).name == load_model(str(tmp_path)).name == str(tmp_path)
    scheme = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(scheme))
    quantised = load_model(str(tmp_path)).quant
    assert quantised is not None
    assert quantised.weight_bits == 8.0


@pytest.mark.parametrize("content", ["{", "[1]", "null", '"text"', ""])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(BadInput):
        load_model(str(path))


@pytest.mark.parametrize("content", ["{", "[1]", "null", "{}", '{"quantization": "FP8"}', "\udcff"])
def test_a_broken_file_of_modelopt_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    broken = tmp_path / "hf_quant_config.json"
    broken.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=r"--model: .*hf_quant_config\.json"):
        load_model(str(tmp_path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("num_hidden_layers", 10**30, "at most 1,000,000,000"),
        ("hidden_size", float("nan"), "whole number"),
        ("hidden_size", float("inf"), "whole number"),
        ("num_key_value_heads", 3, r"must divide num_attention_heads \(16\)"),
        ("v_head_dim", "wide", "whole number"),
        ("quantization_config", "fp8", "must be an object"),
    ],
)
def test_impossible_values_are_named(field: str, value: Any, hint: str) -> None:
    with pytest.raises(BadInput, match=f"m: {field}: .*{hint}"):
        parse_config({**DENSE, field: value}, "m")


def test_no_token_goes_to_more_experts_than_there_are() -> None:
    moe = {**DENSE, "model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 512}
    with pytest.raises(BadInput, match=r"num_experts_per_tok: 99: must not exceed num_experts \(16\)"):
        parse_config({**moe, "num_experts_per_tok": 99}, "m")


def test_a_name_longer_than_a_path_can_be_is_only_unknown() -> None:
    with pytest.raises(BadInput, match="not in the table"):
        load_model("x" * 5000)
