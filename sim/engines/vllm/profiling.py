"""What vLLM measures when it starts and we can only estimate: activations, buffers, graphs, non-torch memory.

The structure is the engine's: `vllm/v1/worker/gpu_worker.py determine_available_memory`,
`vllm/utils/mem_utils.py memory_profiling`, and the two model runners (`v1/worker/gpu_model_runner.py`, V1;
`v1/worker/gpu/model_runner.py`, V2), versions 0.19, 0.23, 0.28 and 0.33. The magnitudes come from start-up
logs of others; docs/memory.md lists them beside these estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.hardware.spec import GpuSpec
from sim.models.dtypes import DTYPE_BYTES
from sim.models.model import ModelConfig

GIB = 2**30
MIB = 2**20

# Architectures that the V2 runner took first, dense and unquantised only (config/vllm.py, 0.23).
_FIRST_V2 = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}
# MoE architectures that it takes by default in 0.28.
_V2_MOE = {"DeepseekV2ForCausalLM", "DeepseekV4ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes with bounds, and the rule in one phrase."""

    bytes: int
    low: int
    high: int
    rule: str


@dataclass(frozen=True, slots=True)
class Profiler:
    """Which of the engine's measuring rules apply.

    Attributes:
        runner: 1 or 2, the model runner.
        counts_buffers: persistent buffers count as consumed (free memory is compared; 0.27 and later)
            rather than only what torch holds for weights and the profile run's peak.
        graphs: the estimate of CUDA-graph memory is subtracted (0.21 and later; the V2 runner from 0.29).
        sampler_bytes: transient bytes per logit of the sampler's dry run.
    """

    runner: int
    counts_buffers: bool
    graphs: bool
    sampler_bytes: int


def profiler(
    model: ModelConfig, version: tuple[int, int], env: Mapping[str, str], *, eager: bool
) -> Profiler:
    """The rules of one version for one model.

    Sampler dry run, bytes per logit: V1 sorts before 0.17 (16-bit and fp32 logits, sorted values with 64-bit
    indices, masks, probabilities: 38), later 14 (2 + fp32 logits, probabilities, noise); V2 copies to fp32
    only (6) until 0.32 adds a pass with every sampling parameter (16, assumed).
    """
    runner = _runner(model, version, env)
    estimate_graphs = env.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1" if version >= (0, 21) else "0")
    has_estimate = runner == 1 or version >= (0, 29)
    v1_sampler, v2_sampler = 14 if version >= (0, 17) else 38, 16 if version >= (0, 32) else 6
    return Profiler(
        runner=runner,
        counts_buffers=version >= (0, 27),
        graphs=not eager and has_estimate and estimate_graphs != "0",
        sampler_bytes=v1_sampler if runner == 1 else v2_sampler,
    )


def _runner(model: ModelConfig, version: tuple[int, int], env: Mapping[str, str]) -> int:
    asked = env.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked in {"0", "1"}:
        return 2 if asked == "1" else 1
    if version >= (0, 29):
        return 1 if model.state is not None else 2
    if version >= (0, 26):
        dense = model.moe is None and model.state is None
        return 2 if dense or model.architecture in _V2_MOE else 1
    if version >= (0, 22):
        plain = model.moe is None and model.quant is None
        return 2 if plain and model.architecture in _FIRST_V2 else 1
    return 1


def activation_peak(model: ModelConfig, *, tokens: int, seqs: int, tp: int, rules: Profiler) -> Estimate:
    """Peak of tensors that live only during the profile run on one rank.

    Two peaks that do not overlap; the larger counts. (1) The forward over `tokens` dummy tokens at its widest
    layer: residual and normed input, the gate and up projections and their product; or q, k, v and the
    attention output; or a MoE layer's two intermediate caches for every (token, expert) pair. (2) The
    sampler on `seqs` rows of logits over the whole vocabulary, hidden states still held.
    """
    width = DTYPE_BYTES[model.dtype]
    forward = tokens * (2 * model.hidden_size + _widest(model, tp)) * width
    rows = min(seqs, tokens)
    sampler = rows * model.vocab_size * rules.sampler_bytes + tokens * model.hidden_size * width
    larger = max(forward, sampler)
    extra = 64 * MIB  # cuBLAS workspace (32 MiB on Hopper), index and position buffers
    which = "forward" if forward >= sampler else "sampler"
    rule = (
        f"{which} of the profile run: {tokens} tokens"
        if which == "forward"
        else f"{which} of the profile run: {rows} rows x {model.vocab_size} logits x {rules.sampler_bytes} B"
    )
    # Cold compilation benchmarks kernels inside the profile run: 0.45 GiB more in a documented pair of logs.
    return Estimate(int(larger) + extra, int(larger * 0.9), int(larger * 1.15) + extra + 450 * MIB, rule)


def _widest(model: ModelConfig, tp: int) -> float:
    """Elements per token of the widest intermediate on one rank, besides two hidden vectors."""
    heads = model.num_attention_heads / tp
    if model.mla is not None:
        attention = heads * (
            3 * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim) + 2 * model.v_head_dim
        )
    else:
        kv = max(1, model.num_key_value_heads // tp)
        attention = heads * (2 * model.head_dim) + kv * (model.head_dim + model.v_head_dim)
    widths = [attention, (3 if model.gated_mlp else 2) * model.intermediate_size / tp]
    if model.moe is not None:
        moe = model.moe
        inner = moe.moe_intermediate_size / tp
        widths.append(moe.num_experts_per_tok * (max(2 * inner, model.hidden_size) + inner))
        if moe.moe_layers == model.num_layers:
            widths.pop(1)
    return max(widths)


def buffers(model: ModelConfig, *, seqs: int, rules: Profiler) -> Estimate:
    """Persistent buffers beside the weights: the rotary table, and the V2 sampler's token counts.

    Rotary: max_position_embeddings x rotary dimension, 16-bit. Counts (penalties): one int32 per sequence
    slot and vocabulary entry, plus a bit mask (`v1/worker/gpu/sample/penalties.py`).
    """
    rotary_dim = model.mla.qk_rope_head_dim if model.mla else model.head_dim
    size = model.max_position_embeddings * rotary_dim * 2
    rule = "rotary table"
    if rules.runner == 2 and rules.counts_buffers:
        size += seqs * model.vocab_size * 4 + seqs * model.vocab_size // 8
        rule += f", token counts of {seqs} x {model.vocab_size}"
    return Estimate(size, int(size * 0.5), int(size * 1.2), rule)


def cuda_graphs(model: ModelConfig, *, captured: int, rules: Profiler) -> Estimate:
    """The engine's own estimate of CUDA-graph memory, which it subtracts (not what capture really takes).

    It captures two graphs per mode and multiplies. Seen: 0.22 to 0.29 MiB per graph and layer with the V1
    runner, 0.36 to 0.45 with V2; capture itself then took a fifth to a half of that. `captured`: graphs over
    all modes.
    """
    if not rules.graphs or captured == 0:
        reason = "not subtracted by this version" if captured else "no graphs captured"
        return Estimate(0, 0, 0, reason)
    per_layer = 0.25 if rules.runner == 1 else 0.45
    size = captured * max(1.0, per_layer * model.num_layers) * MIB
    return Estimate(
        int(size),
        int(size * 0.5),
        int(size * 1.6),
        f"{captured} graphs x {model.num_layers} layers, measured twice",
    )


# Kernel images, cuBLAS handles and the like, beyond the context that exists before measuring begins [GiB]:
# (central, low, high) by the major compute capability, from the logs in docs/memory.md.
_NON_TORCH = {
    7: (0.12, 0.02, 0.4),
    8: (0.12, 0.02, 0.4),
    9: (0.20, 0.05, 0.6),
    10: (0.35, 0.10, 1.0),
    12: (0.55, 0.10, 1.8),
}
_NON_TORCH_OTHER = (0.30, 0.05, 0.8)


def non_torch(gpu: GpuSpec, *, tp: int, rules: Profiler, eager: bool, settled: bool) -> Estimate:
    """Memory of one rank that no tensor accounts for.

    With TP > 1: all-reduce and NCCL buffers, most of which exist before measuring begins; 0.1 GiB seen on
    A100s with NVLink, 1 GiB on PCIe cards. Since 0.27, what compilation leaves in torch's allocator counts
    as well: nothing with a warm compile cache, 0.5 to 1.4 GiB in documented cold starts; 0.33 keeps it
    releasable (`settled`).
    """
    major = gpu.compute_capability[0] if gpu.compute_capability else 0
    central, low, high = _NON_TORCH.get(major, _NON_TORCH_OTHER)
    parts = [f"kernel images on compute capability {major}.x" if major else "kernel images"]
    if tp > 1:
        shared = (0.4, 0.0, 1.5) if rules.counts_buffers else (0.2, 0.0, 1.5)
        central, low, high = central + shared[0], low + shared[1], high + shared[2]
        parts.append("all-reduce buffers")
    if rules.counts_buffers and not eager:
        left = (0.05, 0.0, 0.3) if settled else (0.10, 0.0, 1.4)
        central, low, high = central + left[0], low + left[1], high + left[2]
        parts.append("what compilation leaves behind (more on a cold start)")
    return Estimate(int(central * GIB), int(low * GIB), int(high * GIB), ", ".join(parts))
