"""All data sets of a folder: which there are, what they say, and whether every bound holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from joblib import Parallel, delayed

from calibration.validate.table import Outcome
from sim.errors import BadInput

MODULES = ("residency", "llmservingsim", "mlenergy", "minimax", "inferencex")


@dataclass(frozen=True, slots=True)
class Validation:
    """What a folder of measured runs says.

    Attributes:
        outcomes: by data set, in the order of `MODULES`.
        skipped: subfolders that no module knows.
        whole: every data set that is known here was looked at.
    """

    outcomes: Mapping[str, Outcome]
    skipped: tuple[str, ...]
    whole: bool = True


def validate_folder(folder: Path, jobs: int = 2, only: tuple[str, ...] = ()) -> Validation:
    """Run every known data set below `folder`.

    Args:
        folder: with one subfolder per data set.
        jobs: data sets at a time.
        only: names of subfolders; none means all.

    Raises:
        BadInput: no such folder, nothing known in it, or a file in it that cannot be used.
    """
    if not folder.is_dir():
        raise BadInput("--data", str(folder), "is no folder")
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    known = {import_module(f"calibration.validate.{name}").FOLDER: name for name in MODULES}
    chosen = [name for name in known if name in present and (not only or name in only)]
    absent = [name for name in only if name not in known or name not in present]
    if absent:
        raise BadInput("--only", absent[0], f"is not there; known are {', '.join(known)}")
    if not chosen:
        raise BadInput("--data", str(folder), f"holds none of {', '.join(known)}")
    work = [delayed(_one)(known[name], folder / name) for name in chosen]
    outcomes = Parallel(n_jobs=min(jobs, len(work)))(work)
    return Validation(
        dict(zip(chosen, outcomes, strict=True)),
        tuple(name for name in present if name not in known),
        len(chosen) == len(known),
    )


def _one(module: str, folder: Path) -> Outcome:
    function: Callable[[Path], Outcome] = import_module(f"calibration.validate.{module}").validate
    return function(folder)
