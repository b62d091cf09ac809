"""Compiled simulations of simple workloads (the extra `fast`): the same records, a hundred times sooner.

Numba keeps compiled functions on disk, but looks only at a function's own file to tell whether they are still
good. Here they depend on constants of other modules, so the folder is named by a digest of all sources
involved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

import numba

from sim.engines.sglang import new_token_ratio, prefill_adder
from sim.steptime import roofline


def _sources() -> list[Path]:
    own = sorted(Path(__file__).parent.glob("*.py"))
    return own + [Path(str(module.__file__)) for module in (new_token_ratio, prefill_adder, roofline)]


def _cache_folder() -> Path:
    """A folder for compiled functions: in numba's own setting, or the user's cache, or a temporary one.

    Whoever can write there can run code as this user, so a folder of somebody else's is never taken.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for source in _sources():
        digest.update(source.read_bytes())
    name = f"numba-{digest.hexdigest()[:16]}"
    places = [numba.config.CACHE_DIR, os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~/.cache")]  # noqa: PTH111
    for place in filter(None, places):
        chosen = Path(place) / "servecast" / name
        try:
            chosen.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if _is_mine(chosen):
            return chosen
    return Path(tempfile.mkdtemp(prefix="servecast-"))


def _is_mine(folder: Path) -> bool:
    found = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return os.access(folder, os.W_OK) and found.st_uid == os.getuid() and not found.st_mode & others


_folder = _cache_folder()
if not any(_folder.rglob("*.nbi")):
    logging.getLogger("servecast").warning(
        "compiling the simulation kernels, once for this version: about half a minute (kept in %s)", _folder
    )
_before = numba.config.CACHE_DIR
numba.config.CACHE_DIR = str(_folder)
try:
    from sim.fast import glue as glue  # every compiled function picks its folder when it is defined
finally:
    numba.config.CACHE_DIR = _before
