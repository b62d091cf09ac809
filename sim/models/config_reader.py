"""Reads fields of a HF config.json: nested text configs, other spellings, null values, family defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sim.data import shipped
from sim.errors import BadInput
from sim.yamltext import entries, load_yaml

# Sections that hold the language model of a multimodal or composite config, outermost first.
TEXT_SECTIONS = ("thinker_config", "text_config", "language_config", "llm_config", "language_model_config")

ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "multi_query_group_num", "n_head_kv"),
    "intermediate_size": ("ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("seq_length", "n_positions", "max_sequence_length", "model_max_length"),
    "tie_word_embeddings": (),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "top_k_experts", "moe_k", "num_experts_per_token", "moe_top_k"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "attention_bias": ("use_qkv_bias", "qkv_bias"),
    "dtype": ("torch_dtype",),
}

MOST = 10**9  # of any size in a config.json

# Other names under which a family is known.
FAMILY_ALIASES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


@cache
def family_defaults(model_type: str) -> Mapping[str, Any]:
    """What a family's HF config class assumes for absent fields; nothing of an unknown one."""
    for row in entries(shipped("model_families.yaml")):
        if row.partition(":")[0] == model_type:
            defaults: dict[str, Any] = load_yaml(row)[model_type]
            return defaults
    return {}


class ConfigReader:
    """One config.json, read field by field; remembers which fields it had to assume.

    The nested text config always wins over the top level, which may hold the vision tower's sizes; only
    fields that belong to the whole checkpoint (`shared`) are looked up there too.
    """

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.top = config
        self.text = _text_section(config)
        self.model_type = str(self.text.get("model_type") or config.get("model_type") or "")
        self.family = FAMILY_ALIASES.get(self.model_type, self.model_type)
        self.defaults = family_defaults(self.family)
        self.defaulted: list[tuple[str, str]] = []
        self.missing: list[str] = []

    def raw(self, field: str) -> Any:
        """The field's value in the text config under any of its spellings; None if absent or null."""
        for key in (field, *ALIASES.get(field, ())):
            if self.text.get(key) is not None:
                return self.text[key]
        return None

    def shared(self, field: str) -> Any:
        """Like `raw`, then the top level: for facts of the checkpoint as a whole (dtype, tying)."""
        value = self.raw(field)
        if value is not None:
            return value
        for key in (field, *ALIASES.get(field, ())):
            if self.top.get(key) is not None:
                return self.top[key]
        return None

    def assume(self, field: str, value: Any, rule: str) -> Any:
        """Record that `field` was absent and `value` was taken by `rule`; returns `value`."""
        self.defaulted.append((field, rule))
        return value

    def default(self, field: str) -> Any:
        """The family's default of a field, recorded; None if it has none."""
        for key in (field, *ALIASES.get(field, ())):
            if self.defaults.get(key) is not None:
                return self.assume(field, self.defaults[key], f"family default of {self.family}")
        return None

    def integer(self, field: str, *, least: int = 1) -> int | None:
        """A whole number >= `least`, from the config or the family; None if neither has it.

        Raises:
            BadInput: the value is not a whole number, or too small.
        """
        value = self.raw(field)
        if value is None:
            value = self.default(field)
        if value is None:
            return None
        return self._whole(field, value, least)

    def stated(self, field: str) -> int | None:
        """As `integer`, of the config alone; None and 0 both mean that it has none."""
        value = self.raw(field)
        return None if value is None else self._whole(field, value, 0) or None

    def _whole(self, field: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise BadInput(f"{self.name}: {field}", repr(value)[:40], "must be a whole number")
        if value < least:
            raise BadInput(f"{self.name}: {field}", value, f"must be at least {least}")
        if value > MOST:
            raise BadInput(f"{self.name}: {field}", f"{value:.3g}", f"must be at most {MOST:,}")
        return int(value)

    def required(self, field: str) -> int:
        """As `integer`, but absence is an error that names the field."""
        value = self.integer(field)
        if value is None:
            family = f" and family {self.model_type!r} has no default" if self.model_type else ""
            raise BadInput(
                self.name, None, f"insufficient config: {field} is missing{family}; add it to config.json"
            )
        return value

    def wanted(self, field: str) -> int:
        """As `integer`, but absence is noted in `missing` and gives 0: KV can be counted without it."""
        value = self.integer(field)
        if value is None:
            self.missing.append(field)
            return 0
        return value

    def flag(self, field: str, *, otherwise: bool) -> bool:
        """A boolean from the config, else the family, else `otherwise`."""
        value = self.raw(field)
        if value is None:
            value = self.default(field)
        return otherwise if value is None else bool(value)


def _text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for section in TEXT_SECTIONS:
        inner = config.get(section)
        if isinstance(inner, Mapping):
            return _text_section(inner)
    return config
