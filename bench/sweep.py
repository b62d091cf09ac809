"""The points of a sweep: which loads, with how many prompts, under which seed; and which are done already."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sim.errors import BadInput, ServecastError
from sim.results import BenchResult
from sim.results_io.files import read_result, workload_identity
from sim.workload.spec import WorkloadSpec
from sim.workload.sweep_prompts import prompts_of


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a sweep; `label` is part of its file names, e.g. "c16" or "r2.5"."""

    label: str
    spec: WorkloadSpec

    @property
    def seed(self) -> int:
        """Of lengths, arrivals and contents."""
        return self.spec.seed


def points_of(
    spec: WorkloadSpec,
    *,
    concurrencies: Sequence[int] = (),
    rates: Sequence[float] = (),
    num_prompts: int | None = None,
) -> list[Point]:
    """The points of a sweep over concurrency, rate, or both (every pair); one point if over neither.

    Each point has a seed of its own, counted on from the load's, so that no point finds the prompts of
    another in the prefix cache. Prompts scale with the concurrency (see `sim.workload.sweep_prompts`) unless
    `num_prompts` fixes them.

    Raises:
        BadInput: the same point twice.
    """
    pairs: list[tuple[int | None, float | None]] = [
        (concurrency, rate) for rate in rates or (None,) for concurrency in concurrencies or (None,)
    ]
    points: list[Point] = []
    for index, (concurrency, rate) in enumerate(pairs):
        changes: dict[str, Any] = {"seed": spec.seed + index}
        labels: list[str] = []
        if rate is not None:
            changes |= {"request_rate": rate, "ramp_up": None, "use_trace_arrivals": False}
            labels.append(f"r{rate:g}")
        if concurrency is not None:
            changes["max_concurrency"] = concurrency
            labels.append(f"c{concurrency}")
            changes["num_prompts"] = prompts_of(spec, concurrency)
        if num_prompts is not None:
            changes["num_prompts"] = num_prompts
        points.append(Point("-".join(labels) or label_of(spec), replace(spec, **changes)))
    if len({point.label for point in points}) < len(points):
        raise BadInput("--concurrency", None, "names the same point twice")
    return points


def label_of(spec: WorkloadSpec) -> str:
    """A short name for a single load."""
    words = []
    if math.isfinite(spec.request_rate):
        words.append(f"r{spec.request_rate:g}")
    if spec.max_concurrency is not None:
        words.append(f"c{spec.max_concurrency}")
    return "-".join(words) or "all"


def point_key(subject: Mapping[str, Any], point: Point) -> str:
    """What makes a finished point the same as a planned one: engine, flags, model, GPU, the load."""
    content = {"subject": dict(subject), "workload": workload_identity(point.spec), "label": point.label}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finished(path: Path, key: str) -> BenchResult | None:
    """The result of an earlier run of this very point, if it came to its end.

    A point that was interrupted, or whose engine died, is to be repeated; one that is INVALID for another
    reason would only be invalid again.
    """
    if not path.exists():
        return None
    try:
        result = read_result(path)
    except ServecastError:
        return None
    broken = {"interrupted", "engine_died", "engine_restarted"}
    if result.extra.get("point") != key or broken & {note.subject for note in result.verdict.reasons}:
        return None
    return result
