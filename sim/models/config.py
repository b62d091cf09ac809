"""From a HF config.json to a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.errors import BadInput
from sim.models.config_reader import ConfigReader
from sim.models.layers import parse_layers, parse_moe, parse_state
from sim.models.model import MlaConfig, ModelConfig
from sim.models.quant import parse_quantization

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

# Families whose attention normalises q and k: per head, or over all heads at once.
_NORM_PER_HEAD = {
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "exaone4",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "lfm2",
}
_NORM_ALL_HEADS = {"minimax_m2", "olmo2", "olmo3", "olmoe"}

# Two matrices per MLP instead of three.
_UNGATED = {
    "gpt2",
    "opt",
    "gpt_neox",
    "falcon",
    "phi",
    "starcoder2",
    "nemotron",
    "nemotron_h",
    "bloom",
    "mpt",
}

_FOUR_NORMS = {"gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm4"}
_ONE_NORM = {"nemotron_h", "cohere", "cohere2", "phi", "falcon"}


@dataclass(frozen=True, slots=True)
class _Attention:
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    sliding_kv_heads: int | None = None
    sliding_head_dim: int | None = None
    sliding_v_head_dim: int | None = None


def parse_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The facts of a config.json that decide memory and step time.

    `config`: the parsed file; dense decoders, MoE, MLA, sliding-window and hybrid models, also as the text
    part of a multimodal one. `name`: how the user names the model. Fields left out take the family's class
    default where that is the shape of real checkpoints, and `defaulted` says so.

    Raises:
        BadInput: not an object, a value of the wrong type, or a field that attention needs and that
            cannot be known (named).
    """
    if not isinstance(config, Mapping):
        raise BadInput(name, None, "config.json must hold a JSON object")
    reader = ConfigReader(config, name)
    num_layers = reader.required("num_hidden_layers")
    hidden_size = reader.required("hidden_size")
    mla = _parse_mla(reader)
    attention = _parse_attention(reader, hidden_size, mla)
    layers = parse_layers(reader, num_layers)
    kinds = list(layers.kinds)
    sharing = reader.integer("num_kv_shared_layers", least=0) or 0
    kept = kinds[: num_layers - sharing]
    intermediate = _intermediate_size(reader)
    vocab_size = reader.wanted("vocab_size")
    dtype = _parse_dtype(reader)
    moe = parse_moe(reader, num_layers, intermediate)
    if moe is not None and moe.moe_layers == num_layers and "intermediate_size" in reader.missing:
        reader.missing.remove("intermediate_size")
    quantization = reader.shared("quantization_config") or reader.shared("compression_config")
    extra, tower = _extra_parameters(reader)
    return ModelConfig(
        name=name,
        architecture=_architecture(reader),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        v_head_dim=attention.v_head_dim,
        intermediate_size=_dense_width(reader, intermediate),
        vocab_size=vocab_size,
        tie_word_embeddings=_tied(reader),
        max_position_embeddings=_max_positions(reader),
        dtype=dtype,
        num_full_attention_layers=sum("full" in kind for kind in kept),
        num_sliding_layers=kept.count("sliding"),
        sliding_window=layers.window,
        attention_bias=_attention_bias(reader),
        gated_mlp=reader.family not in _UNGATED,
        moe=moe,
        mla=mla,
        state=parse_state(reader, layers, hidden_size, dtype),
        quant=parse_quantization(quantization, name),
        extra_parameters=extra,
        source=str(config.get("_source") or ""),
        model_type=reader.model_type,
        attention_output_bias=reader.family == "gpt_oss",
        attention_output_gate=_output_gate(reader),
        mlp_bias=reader.flag("mlp_bias", otherwise=reader.family in {"phi", "starcoder2", "opt", "gpt_neox"}),
        qk_norm_parameters=_qk_norm(reader, attention),
        norms_per_layer=4 if reader.family in _FOUR_NORMS else 1 if reader.family in _ONE_NORM else 2,
        num_mlp_layers=_mlp_layers(reader, kinds, num_layers),
        num_kv_sharing_layers=sharing,
        key_equals_value=bool(reader.raw("attention_k_eq_v")),
        sliding_num_key_value_heads=attention.sliding_kv_heads,
        sliding_head_dim=attention.sliding_head_dim,
        sliding_v_head_dim=attention.sliding_v_head_dim,
        defaulted=tuple(dict.fromkeys((*reader.defaulted, *tower))),
        missing=tuple(reader.missing),
    )


def _parse_mla(reader: ConfigReader) -> MlaConfig | None:
    if reader.raw("kv_lora_rank") is None and not reader.defaults.get("kv_lora_rank"):
        return None
    query = reader.raw("q_lora_rank")
    if query is None and "q_lora_rank" not in reader.text:
        query = reader.default("q_lora_rank")
    return MlaConfig(
        kv_lora_rank=reader.required("kv_lora_rank"),
        q_lora_rank=query,
        qk_nope_head_dim=reader.required("qk_nope_head_dim"),
        qk_rope_head_dim=reader.required("qk_rope_head_dim"),
        v_head_dim=reader.required("v_head_dim"),
        index_n_heads=reader.integer("index_n_heads", least=0) or 0,
        index_head_dim=reader.integer("index_head_dim", least=0) or 0,
    )


def _parse_attention(reader: ConfigReader, hidden_size: int, mla: MlaConfig | None) -> _Attention:
    heads = reader.required("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads")
    if kv_heads is None and reader.raw("multi_query"):
        kv_heads = reader.assume("num_key_value_heads", 1, "multi_query")
    if kv_heads is None:
        kv_heads = reader.assume("num_key_value_heads", heads, "one KV head per attention head")
    if mla is not None:
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        return _Attention(heads, kv_heads, width, mla.v_head_dim)
    head_dim = reader.integer("head_dim") or reader.integer("kv_channels")
    if head_dim is None:
        if hidden_size % heads:
            raise BadInput(
                reader.name,
                None,
                f"insufficient config: head_dim is missing, and hidden_size {hidden_size} is no multiple of "
                f"num_attention_heads {heads}",
            )
        head_dim = reader.assume("head_dim", hidden_size // heads, "hidden_size / num_attention_heads")
    if heads % kv_heads:
        hint = f"must divide num_attention_heads ({heads}): no engine serves other groups"
        raise BadInput(f"{reader.name}: num_key_value_heads", kv_heads, hint)
    v_head_dim = reader.stated("v_head_dim") or head_dim
    if reader.family in {"gemma4_text", "gemma4_unified_text"}:
        return _gemma4_attention(reader, heads, kv_heads, head_dim)
    swa_kv, swa_head, swa_v = (
        reader.stated(field) for field in ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    )
    return _Attention(heads, kv_heads, head_dim, v_head_dim, swa_kv, swa_head, swa_v)


def _gemma4_attention(reader: ConfigReader, heads: int, kv_heads: int, head_dim: int) -> _Attention:
    """Full layers have wider heads, and fewer of them where K doubles as V."""
    wide = int(reader.stated("global_head_dim") or reader.assume("global_head_dim", 512, "family default"))
    few = reader.stated("num_global_key_value_heads") if reader.raw("attention_k_eq_v") else None
    return _Attention(heads, few or kv_heads, wide, wide, kv_heads, head_dim, head_dim)


def _intermediate_size(reader: ConfigReader) -> int:
    value = reader.raw("intermediate_size")
    if isinstance(value, list):  # per layer; all alike in published checkpoints
        return int(value[0])
    return reader.wanted("intermediate_size")


def _dense_width(reader: ConfigReader, intermediate: int) -> int:
    """Width of a dense layer's MLP, where it differs from `intermediate_size`."""
    return reader.integer("intermediate_size_mlp") or reader.stated("dense_intermediate_size") or intermediate


def _mlp_layers(reader: ConfigReader, kinds: list[str], num_layers: int) -> int | None:
    letters = reader.raw("hybrid_override_pattern")
    if isinstance(letters, str):
        return letters[:num_layers].count("-")
    if reader.family == "nemotron_h":
        return kinds.count("none") if not reader.raw("n_routed_experts") else 0
    if reader.family in {"gemma4_text", "gemma4_unified_text"}:
        return num_layers  # the dense MLP runs beside the experts
    return None


def _parse_dtype(reader: ConfigReader) -> str:
    value = reader.shared("dtype")
    if value is None:
        return str(reader.assume("torch_dtype", "bf16", "most checkpoints"))
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES and name not in _DTYPES.values():
        raise BadInput(f"{reader.name}: torch_dtype", name, f"must be one of {', '.join(_DTYPES)}")
    return _DTYPES.get(name, name)


def _tied(reader: ConfigReader) -> bool:
    value = reader.shared("tie_word_embeddings")
    if value is None:
        value = reader.default("tie_word_embeddings")
    if value is None:
        value = reader.assume("tie_word_embeddings", True, "HF base class default")
    return bool(value)


def _max_positions(reader: ConfigReader) -> int:
    value = reader.integer("max_position_embeddings")
    if value is None:
        value = int(reader.assume("max_position_embeddings", 2048, "no length given; vLLM assumes 2048"))
    return value


def _attention_bias(reader: ConfigReader) -> bool:
    qkv = reader.family.startswith("qwen2")
    return reader.flag("attention_bias", otherwise=qkv or reader.family in {"phi", "gpt_neox", "opt"})


def _output_gate(reader: ConfigReader) -> bool:
    gated = reader.family.startswith(("qwen3_next", "qwen3_5"))
    return reader.flag("attn_output_gate", otherwise=gated)


def _qk_norm(reader: ConfigReader, attention: _Attention) -> int:
    head_dim = attention.sliding_head_dim or attention.head_dim
    if reader.family in _NORM_ALL_HEADS:
        return (attention.heads + attention.kv_heads) * head_dim
    if reader.family in _NORM_PER_HEAD or (reader.family == "glm4_moe" and reader.raw("use_qk_norm")):
        return 2 * head_dim
    return attention.heads if reader.family == "gpt_oss" else 0  # gpt-oss: one sink per head


def _extra_parameters(reader: ConfigReader) -> tuple[int, list[tuple[str, str]]]:
    """Parameters of towers beside the decoder: given as `_extra_parameters`, else from `vision_config`."""
    given = reader.top.get("_extra_parameters")
    if isinstance(given, int):
        return given, []
    vision = reader.top.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0, []
    layers = vision.get("num_hidden_layers") or vision.get("depth") or vision.get("vt_num_hidden_layers")
    hidden = vision.get("hidden_size") or vision.get("vt_hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int):
        return 0, [("vision_config", "no sizes: vision tower not counted")]
    wide = vision.get("intermediate_size") or vision.get("vt_intermediate_size") or 4 * hidden
    count = layers * (4 * hidden * hidden + 2 * hidden * int(wide))
    return count, [("vision_config", f"vision tower counted as {layers} plain encoder layers")]


def _architecture(reader: ConfigReader) -> str:
    for section in (reader.top, reader.text):
        listed = section.get("architectures")
        if isinstance(listed, list) and listed:
            return str(listed[0])
    return ""
