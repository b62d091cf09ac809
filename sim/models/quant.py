"""Quantised checkpoints: from `quantization_config` to bits per weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import BadInput
from sim.models.model import QuantConfig

# Modules that these schemes leave in the model dtype unless they say otherwise.
_UNQUANTISED = ("embed", "lm_head", "router", "norms", "state", "extra")


def parse_quantization(section: Mapping[str, Any] | None, name: str) -> QuantConfig | None:
    """Bits per weight, scales and zero points included.

    FP8: one fp32 scale per block (`weight_block_size`) or per tensor. AWQ, GPTQ: 4 bits, an fp16 scale and a
    4-bit zero per group. MXFP4: 4 bits and one 8-bit scale per 32 weights (OCP MX specification), experts
    only in gpt-oss. NVFP4: an fp8 scale per 16. Compressed-tensors: as its config groups say.

    Raises:
        BadInput: a scheme whose size is not known here.
    """
    if not section:
        return None
    if not isinstance(section, Mapping):
        hint = 'must be an object such as {"quant_method": "fp8"}'
        raise BadInput(f"{name}: quantization_config", str(section)[:40], hint)
    method = str(section.get("quant_method") or section.get("quant_algo") or "").lower()
    kept = _kept_modules(section)
    if method in {"fp8", "fbgemm_fp8"}:
        return QuantConfig(method, 8.0 + _block_scale_bits(section), "fp8", kept)
    if method in {"awq", "gptq", "gptq_marlin", "awq_marlin", "auto-round", "autoround"}:
        bits = float(section.get("bits") or section.get("w_bit") or 4)
        group = int(section.get("group_size") or section.get("q_group_size") or 128)
        return QuantConfig(method, bits + _group_bits(group, 16 + bits), "bf16", kept)
    if method == "mxfp4":
        return QuantConfig(
            method, 4.25, "bf16", tuple(dict.fromkeys((*kept, "attention", "mlp", "shared_experts")))
        )
    if method in {"compressed-tensors", "compressed_tensors"}:
        return _compressed_tensors(section, kept)
    if method in {"modelopt", "modelopt_fp4", "nvfp4", "fp8_static"} or "quant_algo" in section:
        algorithm = str(section.get("quant_algo") or method).lower()
        if "fp4" in algorithm:
            return QuantConfig("nvfp4", 4.5, "fp4", kept)
        if "fp8" in algorithm:
            return QuantConfig("fp8", 8.0, "fp8", kept)
    if method in {"bitsandbytes", "bnb"}:
        four = bool(section.get("load_in_4bit") or section.get("_load_in_4bit"))
        return QuantConfig("bitsandbytes", 4.5 if four else 8.0, "bf16", kept)
    raise BadInput(
        f"{name}: quantization_config",
        method or "(no quant_method)",
        "not known; known: fp8, awq, gptq, mxfp4, compressed-tensors, modelopt, bitsandbytes",
    )


def _block_scale_bits(section: Mapping[str, Any]) -> float:
    block = section.get("weight_block_size")
    if isinstance(block, list | tuple) and len(block) == 2 and all(block):
        return 32.0 / (int(block[0]) * int(block[1]))
    return 0.0


def _group_bits(group: int, bits_per_group: float) -> float:
    return bits_per_group / group if group > 0 else 0.0


def _compressed_tensors(section: Mapping[str, Any], kept: tuple[str, ...]) -> QuantConfig:
    groups = section.get("config_groups") or {}
    bits, extra, activation = 16.0, 0.0, "bf16"
    targets: list[str] = []
    for group in groups.values():
        weights = group.get("weights") or {}
        bits = min(bits, float(weights.get("num_bits") or 8))
        size = int(weights.get("group_size") or 0)
        scale = 8 if weights.get("type") == "float" and bits == 4 else 16
        extra = _group_bits(size, scale)
        inputs = group.get("input_activations")
        if inputs:
            kind = "fp" if inputs.get("type") == "float" else "int"
            activation = f"{kind}{int(inputs.get('num_bits') or 8)}"
        targets.extend(str(target) for target in group.get("targets") or ())
    if targets and all("expert" in target for target in targets):
        kept = tuple(dict.fromkeys((*kept, "attention", "mlp", "shared_experts")))
    return QuantConfig("compressed-tensors", bits + extra, activation, kept)


def _kept_modules(section: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of module that the scheme's ignore list leaves alone, judged by the names in it."""
    ignored: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        ignored.extend(str(entry) for entry in section.get(key) or ())
    kept = list(_UNQUANTISED)
    for kind, marks in (
        ("attention", ("self_attn", "attention", "q_proj", "kv_b_proj")),
        ("shared_experts", ("shared_expert",)),
    ):
        covered = [entry for entry in ignored if any(mark in entry for mark in marks)]
        # A pattern covers every layer; a few plain names cover a few layers only.
        if any("re:" in entry or "*" in entry for entry in covered) or len(covered) >= 16:
            kept.append(kind)
    dense = [entry for entry in ignored if "mlp." in entry and "expert" not in entry and "gate" not in entry]
    if any("re:" in entry or "*" in entry for entry in dense):
        kept.append("mlp")
    return tuple(kept)
