"""Which CUDA graphs SGLang captures (sglang/srt/arg_groups/cuda_graph_hook.py, memory_hook.py, 0.5.21)."""

from __future__ import annotations

from sim.commands.given import Given
from sim.engines.sglang.memory_defaults import default_decode_graph_max_bs, device_memory_mib
from sim.engines.values import Values
from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig


def resolve_graphs(given: Given, values: Values, model: ModelConfig, gpu: GpuSpec) -> None:
    """Set the graph backends, the decode batch sizes and the prefill token buckets.

    `values` must hold device, parallel sizes, chunk size and max_total_tokens.

    Raises:
        BadInput: a size that is no whole number of at least 1.
    """
    _resolve_backends(given, values, model)
    _resolve_decode(given, values, gpu)
    _resolve_prefill(given, values, model)


def decode_batch_sizes(max_bs: int, padding: bool = True) -> tuple[int, ...]:
    """Batch sizes of the decode graphs up to `max_bs`, which is always among them."""
    if not padding:
        return tuple(range(1, max_bs + 1))
    sizes = {1, 2, 4, 8, 12} | set(range(16, 257, 8)) | set(range(272, 512, 16))
    sizes |= set(range(512, max_bs + 1, 32))
    return tuple(sorted({s for s in sizes if s <= max_bs} | {max_bs}))


def prefill_token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts of the prefill graphs up to `max_tokens`."""
    steps = (
        range(4, 33, 4),
        range(48, 257, 16),
        range(288, 513, 32),
        range(576, 1025, 64),
        range(1280, 4097, 256),
        range(4608, max_tokens + 1, 512),
    )
    return tuple(size for step in steps for size in step if size <= max_tokens)


def _resolve_backends(given: Given, values: Values, model: ModelConfig) -> None:
    cpu = values["device"] == "cpu"
    for phase, default in (("decode", "full"), ("prefill", "breakable")):
        key = f"cuda_graph_backend_{phase}"
        asked = given.word(f"--cuda-graph-backend-{phase}")
        if asked is not None:
            values.choose(key, asked, None, "")
        elif given.has(f"--disable-{phase}-cuda-graph") or given.has("--disable-cuda-graph"):
            values.derive(key, "disabled", "switched off by flag")
        elif cpu:
            values.derive(key, "disabled", "no CUDA graphs on a CPU")
        elif phase == "prefill" and values["pipeline_parallel_size"] > 1:
            values.derive(key, "disabled", "off by default under pipeline parallelism")
        elif phase == "prefill" and values["device"] == "rocm":
            values.derive(key, "disabled", "CUDA only")
        elif phase == "prefill" and model.extra_parameters:
            values.derive(key, "disabled", "off for multimodal models, but for a short list")
        else:
            values.choose(key, None, default, "by default")


def _resolve_decode(given: Given, values: Values, gpu: GpuSpec) -> None:
    sizes = given.integers("--cuda-graph-bs-decode")
    padding = not given.has("--disable-cuda-graph-padding")
    default, rule = default_decode_graph_max_bs(device_memory_mib(gpu), values["tensor_parallel_size"])
    if sizes is not None:
        values.derive("cuda_graph_max_bs_decode", max(sizes), "the largest of --cuda-graph-bs-decode")
        values.choose("cuda_graph_bs_decode", tuple(sorted(set(sizes))), None, "")
    else:
        max_bs = values.choose(
            "cuda_graph_max_bs_decode", given.integer("--cuda-graph-max-bs-decode"), default, rule
        )
        values.derive("cuda_graph_bs_decode", decode_batch_sizes(max_bs, padding), f"up to {max_bs}")
    if values["cuda_graph_backend_decode"] == "disabled":
        values.derive("cuda_graph_bs_decode", (), "no decode graphs")


def _resolve_prefill(given: Given, values: Values, model: ModelConfig) -> None:
    sizes = given.integers("--cuda-graph-bs-prefill")
    asked = given.integer("--cuda-graph-max-bs-prefill")
    if values["cuda_graph_backend_prefill"] == "disabled":
        values.derive("cuda_graph_bs_prefill", (), "no prefill graphs")
    elif sizes is not None:
        values.choose("cuda_graph_bs_prefill", tuple(sorted(set(sizes))), None, "")
    else:
        largest = 2048 if model.mla is not None else max(values["chunked_prefill_size"], 0)
        if values["max_total_tokens"] is not None:
            largest = min(largest, values["max_total_tokens"])
        if "llama-2" in model.name.lower():
            largest = min(largest, 4096)
        largest = largest if asked is None else asked
        values.derive("cuda_graph_bs_prefill", prefill_token_buckets(largest), f"up to {largest} tokens")
