"""Whether words of a user name a file: they may be anything, also longer than a name can be."""

from __future__ import annotations

from pathlib import Path


def is_file(name: str | Path) -> bool:
    """Whether there is such a file; False for what can be no name."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def exists(name: str | Path) -> bool:
    """Whether there is such a file or folder; False for what can be no name."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False
