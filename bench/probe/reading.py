"""What the step probe wrote, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
SCHEDULER = "servecast_step_probe.make_scheduler"
FILE_VARIABLE = "SERVECAST_STEPS"


@dataclass(frozen=True, slots=True)
class ProbeCost:
    """What noting the steps took, of the steps' own time.

    Attributes:
        steps: number of steps noted.
        median_ms, p99_ms: per step [ms].
        share: of the time within steps, 0..1.
    """

    steps: int
    median_ms: float
    p99_ms: float
    share: float


def read_steps(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a step file, in order; a line that was cut by a kill ends the reading.

    Records: `start` once per engine; `add` per request (t [s, monotonic], id, prompt_len, max_tokens);
    `step` per scheduling step (t start and end [s], dt_ms its own duration, scheduled and computed
    tokens by request, new, preempted, n_running, n_waiting, free_blocks, sched_ms, upd_ms, probe_ms).
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def probe_cost(path: Path) -> ProbeCost | None:
    """The cost over all steps; None if none were written."""
    steps = [record for record in read_steps(path) if record.get("ev") == "step"]
    if not steps:
        return None
    costs = np.array([step["probe_ms"] for step in steps])
    total = sum(step["dt_ms"] for step in steps)
    return ProbeCost(
        steps=len(steps),
        median_ms=float(np.median(costs)),
        p99_ms=float(np.percentile(costs, 99)),
        share=float(costs.sum() / total) if total > 0 else 0.0,
    )
