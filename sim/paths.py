"""Files that a user names: the words may be anything, also longer than a name can be, or name a device."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def file_bytes(path: str | Path) -> bytes:
    """All of a file or pipe.

    Raises:
        OSError: it cannot be read, or is a device: some of these never end.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "is a device, not a file")
    return Path(path).read_bytes()


def file_text(path: str | Path) -> str:
    """All of a UTF-8 file or pipe.

    Raises:
        OSError: as `file_bytes`.
        UnicodeDecodeError: it is not text.
    """
    return file_bytes(path).decode("utf-8").replace("\r\n", "\n")


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
