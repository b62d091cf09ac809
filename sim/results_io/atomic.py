"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from sim.errors import BadInput


def write_text(path: str | Path, text: str, field: str) -> None:
    """Write a text file under a temporary name beside it, then rename.

    Raises:
        BadInput: the place cannot be written to; `field` names the option that gave the path.
    """
    with whole_file(path, field) as file:
        file.write(text)


def make_folder(folder: Path, field: str) -> None:
    """Make a folder, and those above it, if it is not there.

    Raises:
        BadInput: it cannot be made; `field` names the option that gave the path.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(field, str(folder), f"cannot be made: {error.strerror or error}") from None


@contextmanager
def whole_file(path: str | Path, field: str) -> Iterator[TextIO]:
    """A text file to write to; it appears, or replaces an older one, only if the block ends without error.

    A link is followed. A device or a pipe is written to directly. Bytes of a path that are no text come out
    as escapes (in JSON, the same path again).

    Raises:
        BadInput: the place cannot be written to; `field` names the option that gave the path.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            # A rename would put a file in the place of /dev/null or of a named pipe.
            with target.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                yield file
            return
        target = target.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
                yield file
            temporary.replace(target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(field, str(path), f"cannot be written: {error.strerror or error}") from None
