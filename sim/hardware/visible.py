"""Which GPUs a command's own environment lets an engine see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

from sim.provenance import Note

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_notes(env: Mapping[str, str], needed: int) -> tuple[Note, ...]:
    """A warning where the environment shows fewer GPUs than the engine takes on one host.

    A list of devices ends at the first that is not there, "" or -1 being none (CUDA C++ Programming Guide,
    environment variables).
    """
    for name in VARIABLES:
        if name not in env:
            continue
        words = re.split(r"\s*,\s*", env[name].strip())
        shown = len(list(takewhile(lambda word: word not in ("", "-1"), words)))
        if shown < needed:
            text = (
                f"shows the engine {shown} of the {needed} GPUs that it takes: on one host it cannot start; "
                f"list {needed}, or lower the tensor-parallel size"
            )
            return (Note("warning", name, text),)
    return ()
