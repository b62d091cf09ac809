"""Pure functions of a model's shape: parameters, weight bytes, FLOP, KV and state bytes.

Counts follow the tensors of the HF checkpoints; shares per rank follow vLLM's parallel layers
(`vllm/model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, vLLM 0.28).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.errors import BadInput
from sim.models.dtypes import DTYPE_BYTES, FP8_DS_MLA_BYTES, kv_element_bytes, kv_head_bytes
from sim.models.model import ModelConfig, QuantConfig

# vLLM pads the vocabulary to a multiple of this before sharding it (vocab_parallel_embedding.py).
VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a whole model by kind of module, unsharded."""

    embed: int
    lm_head: int  # 0 when tied
    attention: int
    mlp: int
    experts: int
    shared_experts: int
    router: int
    state: int
    norms: int
    extra: int

    @property
    def total(self) -> int:
        """All parameters."""
        return (
            self.embed
            + self.lm_head
            + self.attention
            + self.mlp
            + self.experts
            + self.shared_experts
            + self.router
            + self.state
            + self.norms
            + self.extra
        )


def require_complete(model: ModelConfig) -> None:
    """Raise BadInput naming the fields that weights need and the config lacks."""
    if model.missing:
        raise BadInput(
            "config.json", model.name, f"has no {' and no '.join(model.missing)}: weights cannot be counted"
        )


def count_parameters(model: ModelConfig) -> Parameters:
    """Parameters by kind of module.

    Raises:
        BadInput: the config lacks a field that weights need.
    """
    require_complete(model)
    layers = _attention_layers(model)
    vocabulary = model.vocab_size * model.hidden_size
    experts = shared = router = 0
    if model.moe is not None:
        moe = model.moe
        per_expert = _mlp_parameters(model, moe.moe_intermediate_size, bias=moe.bias)
        experts = moe.moe_layers * moe.num_experts * per_expert
        shared = (
            moe.moe_layers
            * moe.num_shared_experts
            * _mlp_parameters(model, moe.shared_expert_intermediate_size, bias=False)
        )
        router = moe.moe_layers * moe.num_experts * (model.hidden_size + (1 if moe.bias else 0))
    return Parameters(
        embed=vocabulary,
        lm_head=0 if model.tie_word_embeddings else vocabulary,
        attention=sum(count * sum(_attention_parameters(model, sliding)) for sliding, count in layers),
        mlp=_dense_layers(model) * _mlp_parameters(model, model.intermediate_size, bias=model.mlp_bias),
        experts=experts,
        shared_experts=shared,
        router=router,
        state=model.state.num_layers * model.state.parameters_per_layer if model.state else 0,
        norms=_norm_parameters(model),
        extra=model.extra_parameters,
    )


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token touches: all but the experts it is not routed to (embeddings included)."""
    parts = count_parameters(model)
    if model.moe is None:
        return parts.total - parts.extra
    unused = parts.experts * (model.moe.num_experts - model.moe.num_experts_per_tok) // model.moe.num_experts
    return parts.total - parts.extra - unused


def with_quantization(model: ModelConfig, quantization: str | None, dtype: str | None = None) -> ModelConfig:
    """The model as the engine loads it: `--dtype` and `--quantization` over the checkpoint's own.

    A quantised checkpoint keeps its own scheme. Online schemes known here: "fp8" (vLLM quantises linear
    layers and experts at load time, 8 bits a weight).

    Raises:
        BadInput: a scheme that needs a checkpoint prepared for it.
    """
    if dtype is not None and dtype != "auto":
        short = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32"}
        model = replace(model, dtype=short.get(dtype, dtype))
    elif model.dtype == "fp32":
        # vLLM and SGLang load fp32 checkpoints in half precision unless told otherwise.
        model = replace(model, dtype="bf16")
    if quantization is None or model.quant is not None:
        return model
    if quantization in {"fp8", "fp8_per_tensor", "fp8_per_block", "w8a8_fp8"}:
        kept = ("embed", "lm_head", "router", "norms", "state", "extra")
        return replace(model, quant=QuantConfig("fp8", 8.0, "fp8", kept))
    raise BadInput(
        "--quantization",
        quantization,
        f"{model.name} is no {quantization} checkpoint; name a quantised one, or use fp8",
    )


def weight_bytes(
    model: ModelConfig, quantization: str | None = None, dtype: str | None = None, tp: int = 1
) -> int:
    """Bytes of weights on one rank.

    Sharded: vocabulary (padded), q and kv heads (kv replicated when fewer than ranks), MLP and expert
    columns, state layers. Replicated: norms, router, MLA's down-projections, the vision tower. MLA adds the
    absorbed copies of kv_b_proj that vLLM keeps in the model dtype for decode
    (`vllm/model_executor/layers/attention/mla_attention.py process_weights_after_loading`).

    Raises:
        BadInput: `tp` does not divide the model; a field is missing; an impossible quantisation.
    """
    check_tensor_parallel(model, tp)
    model = with_quantization(model, quantization, dtype)
    parts = count_parameters(model)
    padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    vocabulary = -(-padded // tp) * model.hidden_size
    sharded, replicated = 0, 0
    for sliding, count in _attention_layers(model):
        query, kv, whole = _attention_parameters(model, sliding)
        sharded += count * (query // tp + kv * _kv_heads_per_rank(model, tp, sliding) // _kv(model, sliding))
        replicated += count * whole
    total = 0.0
    for kind, size in (
        ("embed", vocabulary),
        ("lm_head", 0 if model.tie_word_embeddings else vocabulary),
        ("attention", sharded + replicated),
        ("mlp", parts.mlp // tp),
        ("experts", parts.experts // tp),
        ("shared_experts", parts.shared_experts // tp),
        ("router", parts.router),
        ("state", parts.state // tp),
        ("norms", parts.norms),
        ("extra", parts.extra),
    ):
        total += size * bytes_per_weight(model, kind)
    if model.mla is not None:
        heads = model.num_attention_heads // tp
        absorbed = heads * model.mla.kv_lora_rank * (model.mla.qk_nope_head_dim + model.mla.v_head_dim)
        total += model.num_layers * absorbed * DTYPE_BYTES[model.dtype]
    return int(total)


def bytes_per_weight(model: ModelConfig, kind: str) -> float:
    """Bytes of one weight of a kind of module, scales included. `kind`: a field name of `Parameters`."""
    if model.quant is None or kind in {"norms", "router"} or kind in model.quant.unquantised:
        return DTYPE_BYTES[model.dtype]
    return model.quant.weight_bits / 8


def gemm_flops_per_token(model: ModelConfig) -> float:
    """Multiply-add work [FLOP] of all matrix products for one token, unsharded.

    Attention over the context and lm_head are not in it: see `lm_head_flops_per_token`. MoE counts the
    experts that a token is routed to, shared experts and the router.
    """
    parts = count_parameters(model)
    active = parts.attention + parts.mlp + parts.shared_experts + parts.router + parts.state
    if model.moe is not None:
        active += parts.experts * model.moe.num_experts_per_tok // model.moe.num_experts
    return 2.0 * active


def lm_head_flops_per_token(model: ModelConfig) -> float:
    """Work of the output projection [FLOP] for one *sampled* token, tied or not, unsharded."""
    require_complete(model)
    return 2.0 * model.hidden_size * model.vocab_size


def expected_distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """Experts that at least one of `tokens` tokens is routed to, if routing is uniform and independent.

    E * (1 - (1 - k/E)^T). Real routers are skewed, so this is an upper estimate.
    """
    if num_experts == 0 or tokens <= 0:
        return 0.0
    return float(num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** tokens))


def step_weight_bytes(model: ModelConfig, tokens: float, tp: int = 1, *, lm_head: bool = True) -> float:
    """Weight bytes that a forward over `tokens` tokens reads on one rank.

    Everything once, except: the embedding table (a look-up), the vision tower, MLA's second copy of
    kv_b_proj, and experts that no token is routed to. lm_head is read also when tied, if any token is
    sampled (`lm_head`). `model` as `with_quantization` returns it.
    """
    parts = count_parameters(model)
    total = 0.0
    for kind, size in (
        ("attention", parts.attention),
        ("mlp", parts.mlp),
        ("shared_experts", parts.shared_experts),
        ("state", parts.state),
    ):
        total += size * bytes_per_weight(model, kind) / tp
    total += (parts.router + parts.norms) * DTYPE_BYTES[model.dtype]
    if model.moe is not None:
        moe = model.moe
        touched = expected_distinct_experts(moe.num_experts, moe.num_experts_per_tok, tokens)
        total += parts.experts * bytes_per_weight(model, "experts") / tp * touched / moe.num_experts
    if lm_head:
        total += model.vocab_size * model.hidden_size * bytes_per_weight(model, "lm_head") / tp
    return total


def check_tensor_parallel(model: ModelConfig, tp: int) -> None:
    """Raise BadInput if the model cannot be split over `tp` ranks.

    Rules: attention heads divide; KV heads divide, or are replicated if ranks are a multiple of them
    (`vllm/config/model.py verify_with_parallel_config`, `linear.py QKVParallelLinear`).
    """
    if tp < 1:
        raise BadInput("--tensor-parallel-size", tp, "must be at least 1")
    if model.num_attention_heads % tp:
        raise BadInput(
            "--tensor-parallel-size", tp, f"{model.num_attention_heads} attention heads not divisible by {tp}"
        )
    for kv in () if model.mla else {_kv(model, False), _kv(model, True)}:
        if kv % tp and tp % kv:
            raise BadInput(
                "--tensor-parallel-size", tp, f"{kv} KV heads neither divide by {tp} nor divide {tp}"
            )


def kv_bytes_per_token_per_layer(
    model: ModelConfig, tp: int = 1, kv_cache_dtype: str = "auto", *, sliding: bool = False
) -> int:
    """KV bytes of one token in one layer on one rank (the mean of all layers under TurboQuant).

    MLA: one latent of kv_lora_rank + qk_rope_head_dim elements, no factor 2, the same on every rank
    (`vllm/v1/kv_cache_interface.py MLAAttentionSpec`).
    """
    check_tensor_parallel(model, tp)
    if model.mla is not None:
        if kv_cache_dtype == "fp8_ds_mla":
            return FP8_DS_MLA_BYTES
        elements = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        return int(elements * kv_element_bytes(model, kv_cache_dtype))
    key, value = model.head_dim, model.v_head_dim
    if sliding:
        key, value = model.sliding_head_dim or key, model.sliding_v_head_dim or value
    heads = _kv_heads_per_rank(model, tp, sliding)
    return int(heads * kv_head_bytes(model, kv_cache_dtype, key, value))


def kv_bytes_per_token(model: ModelConfig, tp: int = 1, kv_cache_dtype: str = "auto") -> int:
    """KV bytes of one token on one rank over all layers that keep KV, sliding ones counted in full.

    What a sequence shorter than the window costs; `kv_bytes_per_sequence` knows the window.
    """
    full = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype)
    sliding = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype, sliding=True)
    return model.num_full_attention_layers * full + model.num_sliding_layers * sliding


def kv_bytes_per_sequence(model: ModelConfig, length: int, tp: int = 1, kv_cache_dtype: str = "auto") -> int:
    """Bytes that a sequence of `length` tokens holds on one rank: KV, capped by the window, plus state."""
    window = length if model.sliding_window is None else min(length, model.sliding_window)
    full = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype) * model.num_full_attention_layers
    sliding = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype, sliding=True) * model.num_sliding_layers
    return full * length + sliding * window + state_bytes_per_sequence(model, tp)


def state_bytes_per_sequence(model: ModelConfig, tp: int = 1) -> int:
    """Bytes of recurrent and convolution state of one sequence on one rank; 0 without such layers."""
    return model.state.bytes_per_sequence // tp if model.state else 0


def _kv(model: ModelConfig, sliding: bool) -> int:
    if sliding and model.sliding_num_key_value_heads is not None:
        return model.sliding_num_key_value_heads
    return model.num_key_value_heads


def _kv_heads_per_rank(model: ModelConfig, tp: int, sliding: bool) -> int:
    return max(1, _kv(model, sliding) // tp)


def _attention_layers(model: ModelConfig) -> tuple[tuple[bool, int], ...]:
    """(sliding, count) of the layers that have attention weights.

    Layers that reuse another's KV have q and o only in principle; checkpoints carry k and v all the same.
    """
    return (
        (False, model.num_full_attention_layers),
        (True, model.num_sliding_layers + model.num_kv_sharing_layers),
    )


def _attention_parameters(model: ModelConfig, sliding: bool) -> tuple[int, int, int]:
    """(split by query heads, split by KV heads, replicated) parameters of one attention layer."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.mla is not None:
        return _mla_parameters(model)
    key, value = model.head_dim, model.v_head_dim
    if sliding:
        key, value = model.sliding_head_dim or key, model.sliding_v_head_dim or value
    kv_heads = _kv(model, sliding)
    query = hidden * heads * key * (2 if model.attention_output_gate else 1) + heads * value * hidden
    own_value = 0 if model.key_equals_value and not sliding else value
    kv = hidden * kv_heads * (key + own_value)
    whole = model.qk_norm_parameters
    if model.attention_bias:
        query += heads * key
        kv += kv_heads * (key + own_value)
    if model.attention_output_bias:
        whole += hidden
    return query, kv, whole


def _mla_parameters(model: ModelConfig) -> tuple[int, int, int]:
    mla = model.mla
    if mla is None:
        raise ValueError("not an MLA model")
    hidden, heads = model.hidden_size, model.num_attention_heads
    query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    split = heads * (mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.v_head_dim * hidden)
    whole = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    if mla.q_lora_rank is None:
        split += hidden * heads * query_dim
    else:
        split += mla.q_lora_rank * heads * query_dim
        whole += hidden * mla.q_lora_rank + mla.q_lora_rank
    if mla.index_n_heads:
        width = mla.index_n_heads * mla.index_head_dim
        whole += (mla.q_lora_rank or hidden) * width
        whole += hidden * (mla.index_head_dim + mla.index_n_heads) + 2 * mla.index_head_dim
    return split, 0, whole


def _mlp_parameters(model: ModelConfig, intermediate: int, *, bias: bool) -> int:
    matrices = 3 if model.gated_mlp else 2
    size = matrices * model.hidden_size * intermediate
    if bias:
        size += (matrices - 1) * intermediate + model.hidden_size
    return size


def _dense_layers(model: ModelConfig) -> int:
    if model.num_mlp_layers is not None:
        return model.num_mlp_layers
    return model.num_layers - (model.moe.moe_layers if model.moe else 0)


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (model.norms_per_layer * model.num_layers + 1)
