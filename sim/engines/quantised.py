"""Which GPUs an engine's quantisation methods take."""

from __future__ import annotations

from collections.abc import Mapping

from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig

Capability = tuple[int, int]


def check_capability(
    method: str | None, model: ModelConfig, gpu: GpuSpec, needs: Mapping[str, Capability]
) -> None:
    """Refuse a method whose kernels the GPU is too old for.

    Args:
        method: given by a flag, else the checkpoint's own; None is no quantisation.
        needs: method -> the least compute capability; a method that is not listed takes any GPU, as does an
            AMD one here.

    Raises:
        BadInput: the engine refuses to start.
    """
    if method is None or gpu.compute_capability is None:
        return
    key = method.lower().replace("-", "_")
    if key == "compressed_tensors" and model.quant is not None and model.quant.activation_dtype == "fp8":
        key = "compressed_tensors_fp8"
    least = needs.get(key)
    if least is None or gpu.compute_capability >= least:
        return
    have = ".".join(map(str, gpu.compute_capability))
    raise BadInput(
        "--quantization",
        method,
        f"needs a GPU of compute capability {least[0]}.{least[1]}, {gpu.name} has {have}; the engine refuses "
        "to start",
    )
