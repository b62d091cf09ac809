"""Records what the scheduler classes of an installed SGLang decide.

    python -m tests.real.sglang_recorder SEED COUNT OUT_DIR
    python -m tests.real.sglang_recorder SEED NUMBER,NUMBER,... OUT_DIR

The first form writes `sglang.policies.scenarios.jsonl.gz` and `sglang.policies.traces.jsonl.gz` with the
first COUNT scenarios of stream SEED that use a policy or an option beyond the usual ones, take at most
`MAX_CALLS` calls, and in which the engine neither dies nor hangs; in half of them it retracts or preempts.
The second form writes `sglang.rules.*` with the named scenarios of the stream.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.sglang_scenarios import draw

MAX_CALLS = 150
USUAL = {
    "schedule_policy": ("fcfs", "lpm"),
    "enable_priority_scheduling": (False,),
    "prefill_max_requests": (None,),
    "prefill_decode_interval": (0,),
}
_LIBRARIES: list[Any] = []


def load() -> ModuleType:
    """The driver. It imports SGLang, which imports torchvision, which needs operators that a CPU has not."""
    if not _LIBRARIES:
        vision = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            vision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(vision)
    return importlib.import_module("tests.real.sglang_driver")


def _write(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in objects)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def find(seed: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Scenario and trace of `count` scenarios worth keeping."""
    driver = load()
    room = {True: count // 2, False: count - count // 2}
    number = 0
    while any(room.values()):
        scenario = draw(seed, number)
        number += 1
        if all(scenario["args"][name] in values for name, values in USUAL.items()):
            continue
        try:
            trace = driver.record(scenario)
        except driver.Stuck as stuck:
            print(f"{scenario['id']}: the engine {stuck}")
            continue
        has_victims = any(line["retracted"] for line in trace[1:])
        if trace[0]["steps"] <= MAX_CALLS and room[has_victims]:
            room[has_victims] -= 1
            yield [scenario, *trace]


def main(seed: str, which: str, folder: Path) -> None:
    """Draw and record scenarios."""
    if "," in which:
        name = "sglang.rules"
        drawn = [draw(seed, int(number)) for number in which.split(",")]
        recorded = [[scenario, *load().record(scenario)] for scenario in drawn]
    else:
        name = "sglang.policies"
        recorded = list(find(seed, int(which)))
    _write(folder / f"{name}.scenarios.jsonl.gz", (scenario for scenario, *_ in recorded))
    _write(folder / f"{name}.traces.jsonl.gz", (line for _, *trace in recorded for line in trace))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
