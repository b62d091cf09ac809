"""Models: the facts of a HF `config.json` that decide memory and step time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture-of-experts layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_shared_experts: int
    shared_expert_intermediate_size: int  # of one shared expert
    moe_layers: int  # number of layers with experts; the others are dense
    bias: bool = False  # on the expert matrices and the router (gpt-oss)


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek, Kimi, GLM-5 ...)."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int = 0  # sparse attention's indexer (DeepSeek-V3.2, GLM-5); 0: none
    index_head_dim: int = 0


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Fixed-size per-sequence state of linear-attention or state-space layers (Mamba, gated delta net)."""

    num_layers: int
    bytes_per_sequence: int  # over all such layers, unsharded
    conv_bytes_per_layer: int = 0
    recurrent_bytes_per_layer: int = 0
    parameters_per_layer: int = 0


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Quantised weights."""

    method: str  # "fp8", "awq", "gptq", "mxfp4", "compressed-tensors", ...
    weight_bits: float  # per weight of a quantised module, scales included
    activation_dtype: str  # dtype in which GEMMs run: "fp8" for W8A8, "bf16" for weight-only schemes
    unquantised: tuple[
        str, ...
    ]  # kinds of module kept in the model dtype: "embed", "lm_head", "attention", ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Sizes are unsharded.

    Attributes:
        name: HF repository id, or the path it was read from.
        architecture: first entry of `architectures`, e.g. "Qwen2ForCausalLM".
        dtype: "bf16", "fp16" or "fp32": the model's own dtype (`torch_dtype`).
        num_full_attention_layers / num_sliding_layers: layers that keep KV; the rest of `num_layers` hold
            state (`state`), reuse another layer's KV (`num_kv_sharing_layers`) or keep nothing.
        num_key_value_heads, head_dim, v_head_dim: of the full-attention layers; the `sliding_*` fields are
            set where sliding layers differ.
        gated_mlp: three matrices per MLP (SwiGLU) rather than two.
        num_mlp_layers: layers with a dense MLP; None: all without experts.
        key_equals_value: full-attention layers have no V projection of their own (Gemma 4).
        qk_norm_parameters: per attention layer.
        defaulted: (field, rule) of every field that the config left out.
        missing: fields without which weights cannot be counted, though KV can.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    num_full_attention_layers: int
    num_sliding_layers: int
    sliding_window: int | None
    attention_bias: bool = False
    gated_mlp: bool = True
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    state: StateConfig | None = None
    quant: QuantConfig | None = None
    extra_parameters: int = 0  # vision tower and the like: weight memory, no decoder time
    source: str = ""
    model_type: str = ""
    attention_output_bias: bool = False
    attention_output_gate: bool = False
    mlp_bias: bool = False
    qk_norm_parameters: int = 0
    norms_per_layer: int = 2
    num_mlp_layers: int | None = None
    num_kv_sharing_layers: int = 0
    key_equals_value: bool = False
    sliding_num_key_value_heads: int | None = None
    sliding_head_dim: int | None = None
    sliding_v_head_dim: int | None = None
    defaulted: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
