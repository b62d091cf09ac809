"""Where a command is to write: refused before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sim.errors import BadInput
from sim.paths import is_file

STDOUT = "-"


def check_outputs(places: Mapping[str, str | Path | None], reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse what could not be written once the simulation is done.

    Args:
        places: option -> what was given; None and `-` write no file. `--plot` must have a picture's suffix.
        reads: the files that the command reads; names that are no files, and None, read none.

    Raises:
        BadInput: no folder, a folder instead of a file, no right to write, one file for two options, or a
            file that the command reads, by whatever name or link.
    """
    read = [Path(name) for name in reads if name is not None and is_file(name)]
    taken: dict[Path, str] = {}
    for option, given in places.items():
        if given is None or str(given) == STDOUT:
            continue
        path = Path(given)
        if option == "--plot":
            from sim.output.plots import check_place

            check_place(path)
        _check_place(option, path)
        if path.exists() and not path.is_file():
            continue  # /dev/null takes everything
        if path.exists() and any(path.samefile(other) for other in read):
            raise BadInput(option, str(given), "would overwrite its own input")
        first = taken.setdefault(path.resolve(), option)
        if first != option:
            raise BadInput(option, str(given), f"is the file of {first} already")


def _check_place(option: str, path: Path) -> None:
    try:
        parent = path.absolute().parent
        if not parent.is_dir():
            raise BadInput(option, str(path), "its folder does not exist")
        if path.is_dir():
            raise BadInput(option, str(path), "is a folder")
        place = path if path.exists() and not path.is_file() else path.resolve().parent
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL in it
        raise BadInput(option, str(path), f"cannot be written: {error}") from None
    if not os.access(place, os.W_OK):
        raise BadInput(option, str(path), "cannot be written: no permission")
