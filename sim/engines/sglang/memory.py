"""SGLang's memory account: static fraction, pool tokens, `max_total_num_tokens` as its log prints it.

Rules: `sglang/srt/mem_cache/kv_cache_configurator.py _profile_available_bytes`,
`sglang/srt/model_executor/pool_configurator.py` (0.5.21). The fraction is of the memory that is free before
the weights load, and what stays outside it (activations, graphs) is not measured but trusted to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.errors import BadInput
from sim.hardware.gpus import memory_bytes_under_wsl
from sim.hardware.spec import GpuSpec
from sim.memory import MemoryAccount, MemoryLine, config_notes
from sim.models.model import ModelConfig
from sim.models.stages import largest_stage
from sim.models.weights import (
    kv_bytes_per_token_per_layer,
    state_bytes_per_sequence,
    weight_bytes,
    with_quantization,
)
from sim.provenance import Note, Origin
from sim.scenario import EngineConfig, Observed

GIB = 2**30

# Before weights load, the process holds its CUDA context, NCCL and libraries [GiB]: central, low, high. Seen:
# 0.38 to 0.76 on one H100 or RTX 5090; 1.2 and more with NCCL over several GPUs; a desktop takes its own.
_CONTEXT_ONE_GPU = (0.68, 0.35, 1.8)
_CONTEXT_SEVERAL = (1.30, 0.6, 2.5)

# Beyond the parameters: rotary table, allocator rounding, buffers of quantised kernels [GiB].
_LOAD_OVERHEAD = (0.10, 0.03, 0.4)

# --mamba-full-memory-ratio by default: state memory against KV memory.
_STATE_RATIO = 0.9

# Above this difference an estimate contradicts the figure.
_TELLING_DIFFERENCE = 0.10


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Tokens of the pool. `swa_tokens`: of the sliding layers' own pool, None without one."""

    tokens: int
    swa_tokens: int | None


def account(
    model: ModelConfig, gpu: GpuSpec, gpu_count: int, config: EngineConfig, observed: Observed
) -> MemoryAccount:
    """The account of one rank.

    `observed.kv_cache_tokens` (max_total_num_tokens) wins over the estimate; `--max-total-tokens` can only
    lower it.

    Raises:
        BadInput: the engine would refuse to start, and which flag to change.
    """
    tp, pp = int(config["tensor_parallel_size"]), int(config["pipeline_parallel_size"])
    if gpu_count < tp * pp:
        raise BadInput("--gpu-count", gpu_count, f"TP {tp} x PP {pp} needs {tp * pp} GPUs")
    model = with_quantization(model, config["quantization"], config["dtype"])
    page = int(config["page_size"])
    length = int(config["context_length"])
    fraction = float(config["mem_fraction_static"])
    lines = _lines(model, gpu, config, (tp, pp), fraction)
    available, low, high = (_left(lines, bound) for bound in ("bytes", "low", "high"))
    stage = largest_stage(model, pp)
    state_bytes = _state_pool(stage, config, tp, available)
    cell = cell_bytes(stage, config)
    estimate, *bounds = (_pool(stage, config, size - state_bytes, cell) for size in (available, low, high))
    notes = _notes(model, config, state_bytes)
    if observed.kv_cache_tokens is not None:
        tokens, origin = observed.kv_cache_tokens, Origin.GIVEN
        giving = _fraction_for(tokens, config, lines, cell, state_bytes)
        notes.append(_comparison(tokens, estimate.tokens, giving))
    else:
        tokens, origin = estimate.tokens, Origin.COMPUTED
        if tokens <= 0:
            raise _refusal(model, gpu, (tp, pp), fraction, lines)
    if length > tokens:
        notes.append(
            Note(
                "warning",
                "--context-length",
                f"a request of {length} tokens can never fit: the pool holds {tokens}; the engine starts all "
                "the same and cuts or aborts such requests",
            )
        )
    size = int(tokens * cell)
    rule = f"{tokens} tokens x {cell:.0f} B"
    if estimate.swa_tokens is not None:
        share = float(config["swa_full_tokens_ratio"])
        rule += f" (full layers {tokens}, sliding layers {int(tokens * share) // page * page} tokens)"
    lines = (
        *lines,
        MemoryLine("left for KV", available, Origin.COMPUTED, "fraction less weights", low, high),
        *(
            (
                MemoryLine(
                    "state pool", state_bytes, Origin.ASSUMED, "0.9 : 1 of KV", state_bytes, state_bytes
                ),
            )
            if state_bytes
            else ()
        ),
        MemoryLine("KV pool", size, origin, rule, size, size),
    )
    return MemoryAccount(
        lines=lines,
        kv_pool_bytes=size,
        kv_bytes_per_token=_per_token(stage, config),
        block_size=page,
        num_gpu_blocks=tokens // page,
        kv_cache_tokens=tokens,
        estimated_tokens=estimate.tokens,
        estimated_tokens_low=bounds[0].tokens,
        estimated_tokens_high=bounds[1].tokens,
        max_concurrency=tokens / length,
        kv_origin=origin,
        notes=tuple(notes),
        longest=tokens // page * page if tokens < length else None,
    )


def cell_bytes(model: ModelConfig, config: EngineConfig) -> float:
    """Pool bytes per token of `max_total_num_tokens` on one rank.

    With sliding layers the full layers count whole and the sliding ones by `swa_full_tokens_ratio`.
    """
    full, sliding = _layer_bytes(model, config)
    if not _is_split(model, config):
        return model.num_full_attention_layers * full + model.num_sliding_layers * sliding
    if model.num_full_attention_layers == 0:
        return model.num_sliding_layers * sliding
    ratio = float(config["swa_full_tokens_ratio"])
    return model.num_full_attention_layers * full + ratio * model.num_sliding_layers * sliding


def _layer_bytes(model: ModelConfig, config: EngineConfig) -> tuple[int, int]:
    attention_tp = int(config["tensor_parallel_size"])
    if config["enable_dp_attention"]:
        attention_tp //= int(config["data_parallel_size"])
    dtype = str(config["kv_cache_dtype"])
    full = kv_bytes_per_token_per_layer(model, attention_tp, dtype)
    if model.mla is not None and model.mla.index_head_dim:
        full += model.mla.index_head_dim + model.mla.index_head_dim // 128 * 4
    return full, kv_bytes_per_token_per_layer(model, attention_tp, dtype, sliding=True)


def _per_token(model: ModelConfig, config: EngineConfig) -> int:
    full, sliding = _layer_bytes(model, config)
    return model.num_full_attention_layers * full + model.num_sliding_layers * sliding


def _is_split(model: ModelConfig, config: EngineConfig) -> bool:
    return (
        model.num_sliding_layers > 0
        and model.sliding_window is not None
        and not config["disable_hybrid_swa_memory"]
    )


def _pool(model: ModelConfig, config: EngineConfig, available: int, cell: float) -> PoolSizes:
    page = int(config["page_size"])
    tokens = max(0, int(available // cell))
    limit = config["max_total_tokens"]
    if limit is not None:
        tokens = min(tokens, int(limit))
    tokens = tokens // page * page
    if not _is_split(model, config) or model.num_full_attention_layers == 0:
        return PoolSizes(tokens, None)
    return PoolSizes(tokens, int(tokens * float(config["swa_full_tokens_ratio"])) // page * page)


def _state_pool(model: ModelConfig, config: EngineConfig, tp: int, available: int) -> int:
    """Memory of Mamba-like states: the default ratio to KV, or one slot per running request."""
    if model.state is None or available <= 0:
        return 0
    slot = state_bytes_per_sequence(model, tp)
    running = config["max_running_requests"]
    if config["disable_radix_cache"] and running is not None:
        return (int(running) + 1) * slot
    slots = int(available * _STATE_RATIO / (1 + _STATE_RATIO) // slot)
    return slots * slot


def _lines(
    model: ModelConfig, gpu: GpuSpec, config: EngineConfig, parallel: tuple[int, int], fraction: float
) -> tuple[MemoryLine, ...]:
    wsl = memory_bytes_under_wsl(gpu)
    total = gpu.memory_bytes
    origin = Origin.ASSUMED if "memory_gib" in gpu.assumed else Origin.DEFAULT
    rule = f"as the driver reports {gpu.name} (table of GPUs)"
    if wsl is not None:
        rule += f"; {wsl / GIB:.2f} GiB under WSL 2, less what the desktop holds"
    tp, pp = parallel
    context = _CONTEXT_ONE_GPU if tp * pp == 1 else _CONTEXT_SEVERAL
    central, least, most = (round(size * GIB) for size in context)
    before, before_low, before_high = total - central, total - most, (wsl or total) - least
    static, static_low, static_high = (int(size * fraction) for size in (before, before_low, before_high))
    weights = weight_bytes(model, None, None, tp) // pp
    load = [round(size * GIB) for size in _LOAD_OVERHEAD]
    kind = f"{model.quant.method} and {model.dtype}" if model.quant else model.dtype
    return (
        MemoryLine("total memory", total, origin, rule, total, wsl or total),
        MemoryLine("context", central, Origin.ASSUMED, "CUDA context, NCCL, other processes", least, most),
        MemoryLine(
            "before load",
            before,
            Origin.COMPUTED,
            'as in "Load weight begin. avail mem"',
            before_low,
            before_high,
        ),
        MemoryLine(
            "static",
            static,
            config.values["mem_fraction_static"].origin,
            f"before load x {fraction:g}",
            static_low,
            static_high,
        ),
        MemoryLine(
            "weights", weights, Origin.COMPUTED, f"{model.name}, {kind}", weights, int(weights * 1.01)
        ),
        MemoryLine("load overhead", load[0], Origin.ASSUMED, "buffers and rounding", load[1], load[2]),
    )


def _left(lines: tuple[MemoryLine, ...], bound: str) -> int:
    """Static memory less weights: `bytes`, or its `low` or `high` bound (independent errors)."""
    static = next(line for line in lines if line.name == "static")
    spent = [line for line in lines if line.name in {"weights", "load overhead"}]
    central = static.bytes - sum(line.bytes for line in spent)
    if bound == "low":
        return central - int(math.hypot(static.bytes - static.low, *(x.high - x.bytes for x in spent)))
    if bound == "high":
        return central + int(math.hypot(static.high - static.bytes, *(x.bytes - x.low for x in spent)))
    return central


def _refusal(
    model: ModelConfig,
    gpu: GpuSpec,
    parallel: tuple[int, int],
    fraction: float,
    lines: tuple[MemoryLine, ...],
) -> BadInput:
    sizes = {line.name: line.bytes for line in lines}
    weights = sizes["weights"] + sizes["load overhead"]
    before = sizes["before load"]
    if weights >= before * 0.98:
        return BadInput(
            "--tp-size",
            parallel[0],
            f"the model does not fit: {weights / GIB:.2f} GiB of weights per GPU, {gpu.name} has "
            f"{before / GIB:.2f} GiB free; use more GPUs or a quantised checkpoint",
        )
    return BadInput(
        "--mem-fraction-static",
        fraction,
        f"{model.name}'s weights ({weights / GIB:.2f} GiB) leave nothing for KV; raise it above "
        f"{math.ceil(1000 * weights / before) / 1000:.3f} or use more GPUs",
    )


def _notes(model: ModelConfig, config: EngineConfig, state_bytes: int) -> list[Note]:
    notes = config_notes(model)
    if config["enable_dp_attention"] and int(config["data_parallel_size"]) > 1:
        notes.append(
            Note(
                "not-modelled",
                "--enable-dp-attention",
                "attention weights are replicated over DP ranks: weights are somewhat larger than shown",
            )
        )
    if _is_split(model, config) and model.num_full_attention_layers:
        text = "the sliding layers' own pool limits nobody here; --swa-full-tokens-ratio sizes it"
        notes.append(Note("not-modelled", "sliding window", text))
    if state_bytes:
        notes.append(
            Note(
                "not-modelled",
                model.name,
                "state-space layers: memory only, their scheduling is not modelled",
            )
        )
    if int(config["pipeline_parallel_size"]) > 1:
        notes.append(Note("not-modelled", "--pp-size", "stages are taken as equal shares of the model"))
    return notes


def _fraction_for(
    tokens: int, config: EngineConfig, lines: tuple[MemoryLine, ...], cell: float, state_bytes: int
) -> float | None:
    """The --mem-fraction-static that gives a pool of `tokens`; None if none does or states share the pool."""
    limit = config["max_total_tokens"]
    if state_bytes or (limit is not None and tokens >= int(limit)):
        return None
    sizes = {line.name: line.bytes for line in lines}
    fraction = (tokens * cell + sizes["weights"] + sizes["load overhead"]) / sizes["before load"]
    return fraction if fraction < 1 else None


def _comparison(tokens: int, estimated: int, giving: float | None) -> Note:
    difference = (estimated - tokens) / tokens
    text = f"given {tokens:,} tokens, estimated {estimated:,} ({difference:+.1%})"
    if abs(difference) <= _TELLING_DIFFERENCE:
        return Note("info", "--kv-cache-tokens", text)
    fitting = "" if giving is None else f" (about {giving:.3f} would give this pool)"
    return Note(
        "warning",
        "--kv-cache-tokens",
        f"{text}: the pool decides how many requests run at once, so flags, GPU or version are probably not "
        f"those of the log: other processes on the GPU, or a different --mem-fraction-static{fitting}",
    )
