"""An engine's log on disk: read while it grows, and left without secrets."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sim.secrets import without_secrets


def read_log(path: Path) -> str:
    """A log file as text; "" if it is not there."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def log_size(path: Path) -> int:
    """A log file's size [bytes]; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def mask_log(path: Path) -> None:
    """Mask the keys in a log that nobody writes to any more: engines print the flags that they were given.

    A log without any stays as it is; so does one that cannot be written.
    """
    with contextlib.suppress(OSError):
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        # Line by line: a quote that a cut line left open must not hide the next ones.
        shown = "".join(map(without_secrets, text.splitlines(keepends=True)))
        if shown != text:
            part = path.with_name(path.name + ".part")
            part.write_bytes(shown.encode("utf-8", "surrogateescape"))
            part.replace(path)
