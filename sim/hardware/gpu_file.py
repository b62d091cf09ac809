"""A GPU in a file of the user's own, checked field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sim.errors import BadInput

_Amount = Annotated[float, Field(gt=0, le=1e9, strict=True)]
_Version = Annotated[int, Field(ge=0, strict=True)]


class _GpuFields(BaseModel):
    """The fields of `sim.hardware.gpus.GpuRow`."""

    model_config = ConfigDict(extra="forbid")

    memory_gib: _Amount
    bandwidth: _Amount
    tflops: dict[str, _Amount]
    compute_capability: tuple[_Version, _Version] | None = None
    link: _Amount = 32.0
    source: str = "user file"
    device_name: str = ""
    aliases: list[str] = []
    assumed: dict[str, str | float] = {}
    memory_gib_wsl: _Amount | None = None


def checked_fields(fields: Any, path: Path) -> dict[str, Any]:
    """The fields of a `sim.hardware.gpus.GpuRow`, of the right types.

    Raises:
        BadInput: one is missing, unknown or impossible.
    """
    try:
        return _GpuFields.model_validate(fields).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(step) for step in first["loc"]) or "row"
        raise BadInput(f"--gpu {path}: {field}", str(first.get("input"))[:40], first["msg"]) from None
