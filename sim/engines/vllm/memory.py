"""vLLM's memory account: from flags, model and GPU to KV blocks, as the engine's start-up log prints them.

Rules: `vllm/v1/worker/gpu_worker.py determine_available_memory`, `vllm/v1/worker/utils.py request_memory`,
`vllm/v1/core/kv_cache_utils.py` (0.28; where 0.19, 0.23 and 0.33 differ, `profiling` knows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sim.engines.values import version_key
from sim.engines.vllm import kv_layout as layouts
from sim.engines.vllm.kv_layout import KvLayout
from sim.engines.vllm.memory_checks import (
    MemorySetting,
    account_notes,
    checked_length,
    comparison,
    refuse_if_nothing_left,
)
from sim.engines.vllm.profiling import (
    GIB,
    Estimate,
    activation_peak,
    buffers,
    cuda_graphs,
    non_torch,
    profiler,
)
from sim.errors import BadInput
from sim.hardware.gpus import memory_bytes_under_wsl
from sim.hardware.spec import GpuSpec
from sim.memory import MemoryAccount, MemoryLine
from sim.models.model import ModelConfig
from sim.models.stages import largest_stage
from sim.models.weights import weight_bytes, with_quantization
from sim.provenance import Note, Origin
from sim.scenario import EngineConfig, Observed


def account(
    model: ModelConfig, gpu: GpuSpec, gpu_count: int, config: EngineConfig, observed: Observed
) -> MemoryAccount:
    """The account of one rank (all ranks of a TP group are alike; the pool is the smallest rank's).

    Figures that the user gave or read from a log win over the estimate, in this order: `observed`,
    `--num-gpu-blocks-override`, `--kv-cache-memory-bytes`. The estimate is made all the same and compared.

    Raises:
        BadInput: the engine would refuse to start, and which flag to change: the model does not fit, nothing
            is left for KV, or `--max-model-len` is longer than the pool holds.
    """
    setting = _read(config, gpu_count)
    model = with_quantization(model, config["quantization"], config["dtype"])
    rank_model = largest_stage(model, setting.pp)
    layout = layouts.kv_layout(
        rank_model,
        tp=setting.tp,
        kv_cache_dtype=setting.kv_cache_dtype,
        block_size=int(config["block_size"]),
        hybrid=not _value(config, "disable_hybrid_kv_cache_manager", 0),
    )
    if config["device"] == "cpu":
        lines = _cpu_lines(model, gpu, config, setting)
    else:
        lines = _gpu_lines(model, gpu, config, setting)
    budget = next(line.bytes for line in lines if line.name == "requested")
    spent = [line for line in lines if line.name not in {"total memory", "requested"}]
    available, low, high = _remainder(lines, spent)
    given = _given_blocks(layout, config, observed, setting)
    if given is None:
        refuse_if_nothing_left(model, gpu, setting, spent, budget, available)
    estimated = layouts.num_blocks(layout, available)
    blocks, origin, flag = (estimated, Origin.COMPUTED, "") if given is None else given
    notes = account_notes(model, gpu, setting, spent, low, available)
    if layout.num_groups > 1:
        text = (
            f"the engine keeps a block table for each of {layout.num_groups} groups of layers, here a "
            "request has one: of requests within the window fewer run at once than predicted"
        )
        notes.append(Note("not-modelled", "sliding window", text))
    length = checked_length(layout, blocks, setting, given is not None, notes)
    tokens, concurrency = layouts.logged_tokens(
        layout, blocks, length, setting.in_flight, by_concurrency=setting.by_concurrency
    )
    if observed.kv_cache_tokens is not None:
        if observed.num_gpu_blocks and abs(tokens - observed.kv_cache_tokens) > 2 * layout.block_size:
            told = f"{blocks:,} blocks are {tokens:,} tokens of this model, and "
            told += f"{observed.kv_cache_tokens:,} were told as well; the blocks decide"
            notes.append(Note("warning", "--num-gpu-blocks", told))
        tokens = observed.kv_cache_tokens
    estimates = [
        layouts.logged_tokens(
            layout,
            layouts.num_blocks(layout, size),
            length,
            setting.in_flight,
            by_concurrency=setting.by_concurrency,
        )[0]
        for size in (available, low, high)
    ]
    if given is not None:
        notes += comparison(flag, layout, blocks, tokens, estimates[0], setting, spent, budget, gpu)
    lines = (
        *lines,
        MemoryLine("left for KV", available, Origin.COMPUTED, "requested less the lines above", low, high),
        _pool_line(layout, blocks, origin),
    )
    return MemoryAccount(
        lines=lines,
        kv_pool_bytes=blocks * layout.block_bytes,
        kv_bytes_per_token=layout.bytes_per_token,
        block_size=layout.block_size,
        num_gpu_blocks=blocks,
        kv_cache_tokens=tokens,
        estimated_tokens=estimates[0],
        estimated_tokens_low=estimates[1],
        estimated_tokens_high=estimates[2],
        max_concurrency=concurrency,
        kv_origin=origin,
        notes=tuple(notes),
        longest=length if length < setting.max_model_len else None,
    )


def _read(config: EngineConfig, gpu_count: int) -> MemorySetting:
    tp, pp = int(config["tensor_parallel_size"]), _value(config, "pipeline_parallel_size", 1)
    if gpu_count < tp * pp:
        raise BadInput("--gpu-count", gpu_count, f"TP {tp} x PP {pp} needs {tp * pp} GPUs")
    tokens = int(config["max_num_batched_tokens"])
    length = config.values["max_model_len"]
    return MemorySetting(
        tp=tp,
        pp=pp,
        max_model_len=int(length.value),
        tokens=tokens,
        seqs=int(config["max_num_seqs"]),
        in_flight=tokens * (2 if config["async_scheduling"] else 1),
        kv_cache_dtype=str(config["kv_cache_dtype"]),
        fraction=float(config["gpu_memory_utilization"]),
        version=version_key(config.asked_version)[:2],
        eager=bool(config["enforce_eager"]) or config["optimization_level"] == 0,
        fit_length=length.origin is Origin.DERIVED and length.rule.startswith("-1"),
    )


def _value(config: EngineConfig, key: str, otherwise: int) -> int:
    return int(config[key]) if key in config.values else otherwise


def _gpu_lines(
    model: ModelConfig, gpu: GpuSpec, config: EngineConfig, setting: MemorySetting
) -> tuple[MemoryLine, ...]:
    rules = profiler(model, setting.version, config.env, eager=setting.eager)
    total = _total_line(gpu)
    requested = math.ceil(gpu.memory_bytes * setting.fraction)
    asked = config.values["gpu_memory_utilization"]
    spread = [math.ceil(bound * setting.fraction) for bound in (total.low, total.high)]
    weights = weight_bytes(model, None, None, setting.tp) // setting.pp
    captured = _captured_graphs(config, setting.seqs)
    estimates: list[tuple[str, Estimate]] = [
        ("buffers", buffers(model, seqs=setting.seqs, rules=rules)),
        (
            "activation peak",
            activation_peak(model, tokens=setting.tokens, seqs=setting.seqs, tp=setting.tp, rules=rules),
        ),
        ("CUDA graphs", cuda_graphs(model, captured=captured, rules=rules)),
        (
            "non-torch",
            non_torch(
                gpu,
                tp=setting.tp * setting.pp,
                rules=rules,
                eager=setting.eager,
                settled=setting.version >= (0, 33),
            ),
        ),
    ]
    return (
        total,
        MemoryLine(
            "requested", requested, asked.origin, f"total x {setting.fraction:g}", spread[0], spread[1]
        ),
        _weights_line(model, weights, setting),
        *(
            MemoryLine(name, item.bytes, Origin.COMPUTED, item.rule, item.low, item.high)
            for name, item in estimates
        ),
    )


def _cpu_lines(
    model: ModelConfig, gpu: GpuSpec, config: EngineConfig, setting: MemorySetting
) -> tuple[MemoryLine, ...]:
    """The CPU worker takes what the fraction leaves beside the process's resident memory
    (`vllm/v1/worker/cpu_worker.py`)."""
    requested = math.ceil(gpu.memory_bytes * setting.fraction)
    asked = config.values["gpu_memory_utilization"]
    weights = weight_bytes(model, None, None, setting.tp)
    rules = profiler(model, setting.version, config.env, eager=True)
    peak = activation_peak(model, tokens=setting.tokens, seqs=setting.seqs, tp=setting.tp, rules=rules)
    process = Estimate(GIB, GIB // 2, 2 * GIB, "interpreter and libraries")
    return (
        _total_line(gpu),
        MemoryLine(
            "requested", requested, asked.origin, f"total x {setting.fraction:g}", requested, requested
        ),
        _weights_line(model, weights, setting),
        MemoryLine("activation peak", peak.bytes, Origin.COMPUTED, peak.rule, peak.low, peak.high),
        MemoryLine("process", process.bytes, Origin.ASSUMED, process.rule, process.low, process.high),
    )


def _total_line(gpu: GpuSpec) -> MemoryLine:
    wsl = memory_bytes_under_wsl(gpu)
    high = max(wsl or 0, gpu.memory_bytes + GIB // 10)
    origin = Origin.ASSUMED if "memory_gib" in gpu.assumed else Origin.DEFAULT
    rule = f"as the driver reports {gpu.name} (table of GPUs)"
    if wsl is not None:
        rule += f"; {wsl / GIB:.2f} GiB under WSL 2"
    return MemoryLine("total memory", gpu.memory_bytes, origin, rule, gpu.memory_bytes - GIB // 10, high)


def _weights_line(model: ModelConfig, size: int, setting: MemorySetting) -> MemoryLine:
    kind = f"{model.quant.method} and {model.dtype}" if model.quant else model.dtype
    rule = f"{model.name}, {kind}" + (f", rank of TP {setting.tp}" if setting.tp > 1 else "")
    return MemoryLine("weights", size, Origin.COMPUTED, rule, size, int(size * 1.01))


def _captured_graphs(config: EngineConfig, seqs: int) -> int:
    mode = str(config["cudagraph_mode"])
    sizes = [int(size) for size in config["cudagraph_capture_sizes"]]
    decode = sum(size <= seqs for size in sizes)
    per_mode = {
        "FULL_AND_PIECEWISE": len(sizes) + decode,
        "PIECEWISE": len(sizes),
        "FULL": len(sizes),
        "FULL_DECODE_ONLY": decode,
    }
    return per_mode.get(mode, 0)


def _remainder(lines: Iterable[MemoryLine], spent: list[MemoryLine]) -> tuple[int, int, int]:
    """What is left of the requested memory, with bounds.

    The lines err independently, so their distances to the bounds add as squares.
    """
    requested = next(line for line in lines if line.name == "requested")
    central = requested.bytes - sum(line.bytes for line in spent)
    worst = math.hypot(requested.bytes - requested.low, *(line.high - line.bytes for line in spent))
    best = math.hypot(requested.high - requested.bytes, *(line.bytes - line.low for line in spent))
    return central, central - int(worst), central + int(best)


def _given_blocks(
    layout: KvLayout, config: EngineConfig, observed: Observed, setting: MemorySetting
) -> tuple[int, Origin, str] | None:
    """Blocks that the user named, with origin and flag."""
    if observed.num_gpu_blocks is not None:
        return observed.num_gpu_blocks, Origin.LOGGED, "--num-gpu-blocks"
    if observed.kv_cache_tokens is not None:
        blocks = layouts.blocks_from_tokens(
            layout,
            observed.kv_cache_tokens,
            setting.max_model_len,
            setting.in_flight,
            by_concurrency=setting.by_concurrency,
        )
        return blocks, Origin.GIVEN, "--kv-cache-tokens"
    override = config["num_gpu_blocks_override"]
    if override is not None:
        return int(override), Origin.GIVEN, "--num-gpu-blocks-override"
    size = config["kv_cache_memory_bytes"]
    if size is not None:
        return layouts.num_blocks(layout, int(size)), Origin.GIVEN, "--kv-cache-memory-bytes"
    return None


def _pool_line(layout: KvLayout, blocks: int, origin: Origin) -> MemoryLine:
    size = blocks * layout.block_bytes
    groups = f" in {layout.num_groups} groups" if layout.num_groups > 1 else ""
    rule = f"{blocks} blocks x {layout.page_bytes} B x {layout.group_size} layers{groups}"
    return MemoryLine("KV pool", size, origin, rule, size, size)
