"""GPUs: what the data sheets and the driver say of a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        name: the table's name, e.g. "H100-SXM-80GB".
        memory_bytes: total memory as the driver reports it to the engine (cudaMemGetInfo) [bytes].
        memory_bandwidth: peak [bytes/s].
        dense_flops: peak dense (not sparse) FLOP/s by dtype: "bf16", "fp16", "fp8", "int8", "fp4"; absent
            if the card has no such units.
        compute_capability: e.g. (9, 0); None for AMD.
        link_bandwidth: GPU-to-GPU, one direction [bytes/s] (NVLink, or PCIe where there is none).
        source: where the row's figures come from.
        assumed: names of fields that are assumed rather than cited, with the reason.
        device_name: as torch prints it, e.g. "NVIDIA H100 80GB HBM3".
        file: `--gpu`'s value where it is a file of the user's own; no part of what the card is.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    dense_flops: Mapping[str, float]
    compute_capability: tuple[int, int] | None
    link_bandwidth: float
    source: str
    assumed: Mapping[str, str]
    device_name: str = ""
    file: str = field(default="", compare=False)

    @property
    def spelling(self) -> str:
        """What `--gpu` finds this card by."""
        return self.file or self.name
