"""What a model costs per step: bytes and FLOP, independent of the GPU that pays for them."""

from __future__ import annotations

from dataclasses import dataclass

from sim.models.dtypes import DTYPE_BYTES
from sim.models.model import ModelConfig
from sim.models.weights import (
    bytes_per_weight,
    count_parameters,
    expected_distinct_experts,
    gemm_flops_per_token,
    kv_bytes_per_token_per_layer,
    lm_head_flops_per_token,
    step_weight_bytes,
)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes read, FLOP done and bytes exchanged by one tensor-parallel rank in one forward.

    Sizes are those of one rank: already divided by the tensor-parallel size, with KV heads replicated
    where there are fewer of them than ranks. One multiply-add counts as two FLOP.

    Attributes:
        dense_bytes: weights that every step reads, output projection apart (attention, dense MLP, router,
            shared experts, norms).
        lm_head_bytes: weights of the output projection, read once whenever a sequence is sampled.
        expert_bytes: one routed expert of one layer; 0 for a dense model.
        moe_layers, num_experts, experts_per_token: routed experts; 0 for a dense model.
        dense_flops_per_token: of the weights in `dense_bytes`.
        expert_flops_per_token: of the routed experts, over all layers.
        lm_head_flops: per sampled sequence.
        pair_flops: per query-key pair, over all full-attention layers.
        sliding_pair_flops: the same over all sliding-window layers.
        kv_bytes_per_token: KV read per token of context, over all full-attention layers.
        sliding_kv_bytes_per_token: the same over all sliding-window layers.
        sliding_window: tokens, or 0 if no layer slides.
        kv_group: query heads that share a KV head; 1 for MLA, whose kernels read the latent once.
        num_layers: for what is paid per layer (launches, all-reduces).
        allreduce_bytes_per_token: payload of one all-reduce; two happen per layer.
        gemm_dtype, attention_dtype: keys of `GpuSpec.dense_flops`.
    """

    dense_bytes: float
    lm_head_bytes: float
    dense_flops_per_token: float
    lm_head_flops: float
    pair_flops: float
    kv_bytes_per_token: float
    num_layers: int
    allreduce_bytes_per_token: float
    expert_bytes: float = 0.0
    moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_flops_per_token: float = 0.0
    sliding_pair_flops: float = 0.0
    sliding_kv_bytes_per_token: float = 0.0
    sliding_window: int = 0
    kv_group: float = 1.0
    gemm_dtype: str = "bf16"
    attention_dtype: str = "bf16"

    def weight_bytes(self, num_tokens: int, num_sampled: int) -> float:
        """Weights read by a step of `num_tokens` tokens [bytes]."""
        touched = expected_distinct_experts(self.num_experts, self.experts_per_token, num_tokens)
        routed = self.moe_layers * self.expert_bytes * touched
        return self.dense_bytes + routed + (self.lm_head_bytes if num_sampled else 0.0)

    @property
    def flops_per_token(self) -> float:
        """GEMM FLOP per token, output projection and attention apart."""
        return self.dense_flops_per_token + self.expert_flops_per_token


def model_cost(model: ModelConfig, tp: int = 1, kv_cache_dtype: str = "auto") -> ModelCost:
    """What one of `tp` ranks pays per step for `model`, quantised as `with_quantization` returns it.

    Attention counts 2 FLOP per multiply-add for scores and values; MLA prefill runs on decompressed heads
    (vllm/model_executor/layers/attention/mla_attention.py).

    Raises:
        BadInput: `tp` does not divide the model, or the config lacks a field that weights need.
    """
    moe = model.moe
    expert_bytes = 0.0
    expert_flops = 0.0
    if moe is not None and moe.moe_layers and moe.num_experts:
        experts = count_parameters(model).experts
        expert_bytes = experts * bytes_per_weight(model, "experts") / tp / (moe.moe_layers * moe.num_experts)
        expert_flops = 2.0 * experts * moe.num_experts_per_tok / moe.num_experts / tp
    per_pair = 2.0 * (model.num_attention_heads / tp) * (model.head_dim + model.v_head_dim)
    if model.mla is not None:
        mla = model.mla
        widths = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        per_pair = 2.0 * (model.num_attention_heads / tp) * widths
    full = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype)
    sliding = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype, sliding=True)
    return ModelCost(
        dense_bytes=step_weight_bytes(model, 0, tp, lm_head=False),
        lm_head_bytes=model.vocab_size * model.hidden_size * bytes_per_weight(model, "lm_head") / tp,
        dense_flops_per_token=gemm_flops_per_token(model) / tp - expert_flops,
        lm_head_flops=lm_head_flops_per_token(model) / tp,
        pair_flops=per_pair * model.num_full_attention_layers,
        kv_bytes_per_token=full * model.num_full_attention_layers,
        num_layers=model.num_layers,
        allreduce_bytes_per_token=model.hidden_size * DTYPE_BYTES[model.dtype],
        expert_bytes=expert_bytes,
        moe_layers=moe.moe_layers if moe else 0,
        num_experts=moe.num_experts if moe else 0,
        experts_per_token=moe.num_experts_per_tok if moe else 0,
        expert_flops_per_token=expert_flops,
        sliding_pair_flops=per_pair * model.num_sliding_layers,
        sliding_kv_bytes_per_token=sliding * model.num_sliding_layers,
        sliding_window=model.sliding_window or 0,
        kv_group=1.0 if model.mla else model.num_attention_heads / model.num_key_value_heads,
        gemm_dtype=model.quant.activation_dtype if model.quant else model.dtype,
        attention_dtype=model.dtype,
    )
