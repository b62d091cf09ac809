"""Bytes of a number: in the weights, and in the KV cache under each of the engines' `--kv-cache-dtype`."""

from __future__ import annotations

from sim.errors import BadInput
from sim.models.model import ModelConfig

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# One MLA token in vLLM's fp8_ds_mla layout: 512 fp8 values, 4 fp32 scales, 64 bf16 rope values.
FP8_DS_MLA_BYTES = 656

# "mxfp8" (SGLang): one scale byte per 32 elements (mem_cache/kv_cache_configurator.py).
_KV_BYTES = {
    **{"bfloat16": 2, "bf16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4},
    **{"int4_per_token_head": 0.5, "mxfp8": 1 + 1 / 32},
}

# The `..._per_token_head` dtypes: an fp32 scale each for key and value
# (v1/attention/backends/triton_attn.py).
KV_SCALES = 8

# TurboQuant: bits of an element of key and value; 8 is FP8 without a scale, else a key has an fp16 norm,
# and a value an fp16 scale and zero. So many layers at either end of a model without state layers stay in the
# model's dtype (model_executor/layers/quantization/turboquant/config.py, 0.28).
TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
TURBOQUANT_SPARED = 2


def kv_element_bytes(model: ModelConfig, kv_cache_dtype: str = "auto") -> float:
    """Bytes of one element of the KV cache under `--kv-cache-dtype`.

    Scales per block of elements are in it, those per token and head are not. `model` is as
    `sim.models.weights.with_quantization` returns it.

    Raises:
        BadInput: a dtype of unknown size, or one that packs whole heads (TurboQuant).
    """
    if kv_cache_dtype == "auto":
        return DTYPE_BYTES[model.dtype]
    if kv_cache_dtype.startswith(("fp8", "int8")):
        return 1
    if kv_cache_dtype.startswith(("fp4", "nvfp4")):
        return 0.5 + 1 / 16
    size = _KV_BYTES.get(kv_cache_dtype)
    if size is None:
        raise BadInput("--kv-cache-dtype", kv_cache_dtype, f"its size is not known for {model.name}; use fp8")
    return size


def kv_head_bytes(model: ModelConfig, kv_cache_dtype: str, key: int, value: int) -> float:
    """KV bytes of one token in one head, scales included."""
    if kv_cache_dtype not in TURBOQUANT_BITS:
        scales = KV_SCALES if kv_cache_dtype.endswith("_per_token_head") else 0
        return (key + value) * kv_element_bytes(model, kv_cache_dtype) + scales
    key_bits, value_bits = TURBOQUANT_BITS[kv_cache_dtype]
    slot = key if key_bits == 8 else -(-key * key_bits // 8) + 2
    slot += -(-value * value_bits // 8) + 4
    packed = slot + slot % 2
    if model.state is not None:
        return packed
    whole = 2 * min(TURBOQUANT_SPARED, model.num_layers // 2)
    plain = (key + value) * kv_element_bytes(model)
    return (whole * plain + (model.num_layers - whole) * packed) / model.num_layers
