"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sim.errors import BadInput


def write_text(path: str | Path, text: str, field: str) -> None:
    """Write a text file under a temporary name beside it, then rename.

    Raises:
        BadInput: the place cannot be written to; `field` names the option that gave the path.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise BadInput(field, str(path), f"cannot be written: {error.strerror or error}") from None
