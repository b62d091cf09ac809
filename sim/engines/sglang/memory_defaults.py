"""Defaults that SGLang takes from the GPU's memory (sglang/srt/arg_groups/memory_hook.py, 0.5.21)."""

from __future__ import annotations

from sim.engines.values import Values
from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig
from sim.provenance import Note

MIB = 2**20

# SGLang reads `nvidia-smi --query-gpu=memory.total` [MiB], which is more than cudaMemGetInfo's total. Figures
# as nvidia-smi prints them on such cards; a card that is not here uses the driver's total.
_SMI_MIB: dict[str, int] = {
    "T4": 15360,
    "V100-SXM2-16GB": 16384,
    "V100-SXM2-32GB": 32768,
    "A10": 23028,
    "A10G": 23028,
    "L4": 23034,
    "L40": 46068,
    "L40S": 46068,
    "A100-SXM-40GB": 40960,
    "A100-SXM-80GB": 81920,
    "A100-PCIe-80GB": 81920,
    "H100-SXM-80GB": 81559,
    "H100-PCIe-80GB": 81559,
    "H100-NVL-94GB": 95830,
    "H20-96GB": 97871,
    "H200-SXM-141GB": 143771,
    "GH200-96GB": 97871,
    "B200-SXM-180GB": 183359,
    "RTX-3090": 24576,
    "RTX-4090": 24564,
    "RTX-5090": 32607,
    "RTX-A6000": 49140,
    "RTX-6000-Ada": 49140,
    "RTX-PRO-6000": 97887,
    "RTX-PRO-6000-Server": 97887,
}

# Below this much memory [MiB]: chunked_prefill_size, largest decode graph for TP < 4, and for TP >= 4.
_TIERS: tuple[tuple[float, int, int, int], ...] = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


def device_memory_mib(gpu: GpuSpec) -> float:
    """Total memory as SGLang sees it [MiB]."""
    return _SMI_MIB.get(gpu.name, gpu.memory_bytes / MIB)


def default_chunked_prefill_size(memory_mib: float) -> tuple[int, str]:
    """Chunk size and its rule."""
    limit, chunk, _, _ = _tier(memory_mib)
    return chunk, _tier_rule(limit)


def default_decode_graph_max_bs(memory_mib: float, tensor_parallel_size: int) -> tuple[int, str]:
    """Largest batch of the decode graphs and its rule."""
    limit, _, small, large = _tier(memory_mib)
    return (small if tensor_parallel_size < 4 else large), _tier_rule(limit)


def default_mem_fraction(values: Values, model: ModelConfig, gpu: GpuSpec) -> tuple[float, str]:
    """mem_fraction_static: what is left after a reserve for activations and graphs, rounded to 0.001.

    `values` must hold chunk size, parallel sizes and graph settings. A multimodal model's fraction is then
    multiplied by about 0.95 (exactly: by the size of its vision tower, which is not read here).
    """
    memory = device_memory_mib(gpu)
    chunk = values["chunked_prefill_size"]
    tokens = max(chunk if chunk > 0 else values["max_prefill_tokens"], 2048)
    reserve = 512 + tokens * 1.5
    reserve += values["tensor_parallel_size"] * values["pipeline_parallel_size"] / 8 * 1024
    reserve += _graph_reserve(values, model)
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((memory - reserve) / memory, 3)
    rule = f"1 - {reserve:g} MiB reserve / {memory:g} MiB"
    if model.extra_parameters:
        values.notes.append(
            Note(
                "assumed",
                "--mem-fraction-static",
                "lowered to 0.95 times for the vision tower; the engine's factor depends on its size",
            )
        )
        return fraction * 0.95, rule + ", times 0.95 (vision tower)"
    return fraction, rule


def _graph_reserve(values: Values, model: ModelConfig) -> float:
    reserve = 0.0
    max_bs = values["cuda_graph_max_bs_decode"]
    if values["cuda_graph_backend_decode"] != "disabled":
        reserve += max_bs * 2
    if values["enable_dp_attention"]:
        reserve += max_bs * values["data_parallel_size"] * (4.5 if max_bs > 300 else 3)
    if values["cuda_graph_backend_prefill"] != "disabled":
        reserve += 1536 if model.mla is not None else len(values["cuda_graph_bs_prefill"]) * 8
    return reserve


def _tier(memory_mib: float) -> tuple[float, int, int, int]:
    return next(tier for tier in _TIERS if memory_mib < tier[0])


def _tier_rule(limit: float) -> str:
    if limit == float("inf"):
        return "a GPU with at least 160 GiB"
    return f"a GPU below {limit / 1024:g} GiB"
