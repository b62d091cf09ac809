"""Engines one after the other on one host: start, load, stop, memory free, next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from bench.alignment import align
from bench.run import BenchOptions, run_engine
from bench.session import Reporter, Subject
from bench.sweep import Point, points_of
from bench.telemetry import Gpus
from sim.build import ScenarioSource
from sim.errors import BadInput
from sim.results import BenchResult
from sim.results_io.atomic import write_text
from sim.results_io.writing import plain


def subjects_of(sources: Sequence[ScenarioSource]) -> list[Subject]:
    """Resolve every source, and give each a stem of its own for its files.

    Raises:
        BadInput: a scenario that cannot be built.
    """
    subjects: list[Subject] = []
    for source in sources:
        scenario = source.build()
        stem = _stem(source.name or scenario.engine.name)
        taken = {subject.stem for subject in subjects}
        number = 2
        unique = stem
        while unique in taken:
            unique = f"{stem}-{number}"
            number += 1
        subjects.append(Subject(source, scenario, unique))
    return subjects


def points_for(
    subject: Subject,
    *,
    concurrencies: Sequence[int] = (),
    rates: Sequence[float] = (),
    num_prompts: int | None = None,
) -> list[Point]:
    """The points of one engine; engines with the same load get the same points, hence the same prompts.

    A number of prompts that the load's own command names holds for every point.
    """
    scenario = subject.scenario
    spec = replace(scenario.workload, seed=scenario.seed)
    if num_prompts is None and subject.source.bench.names("--num-prompts"):
        num_prompts = spec.num_prompts
    return points_of(spec, concurrencies=concurrencies, rates=rates, num_prompts=num_prompts)


def run_serial(
    plans: Sequence[tuple[Subject, Sequence[Point]]],
    options: BenchOptions,
    gpus: Gpus | None,
    reporter: Reporter,
) -> list[list[BenchResult]]:
    """Measure each engine in turn; the next starts only when the last is gone and its memory is free.

    Raises:
        EngineFailed: an engine did not start, or left the host dirty: those after it are not started.
        KeyboardInterrupt: what was measured is written.
    """
    return [run_engine(subject, points, options, gpus, reporter) for subject, points in plans]


def write_alignment(subjects: Sequence[Subject], folder: Path) -> None:
    """Write `alignment.json`: for each pair of neighbours, every knob with both values.

    Raises:
        BadInput: the folder cannot be written to.
    """
    pairs = [
        {
            "engines": [first.stem, second.stem],
            "knobs": [asdict(line) for line in align(first.scenario, second.scenario)],
        }
        for first, second in pairwise(subjects)
    ]
    if pairs:
        text = json.dumps(plain(pairs), indent=1, allow_nan=False) + "\n"
        write_text(folder / "alignment.json", text, "--result-dir")


def refuse_overwrite(plans: Sequence[tuple[Subject, Sequence[Point]]], folder: Path) -> None:
    """Protect results that are there.

    Raises:
        BadInput: one of the planned files exists.
    """
    for subject, points in plans:
        for point in points:
            path = folder / f"{subject.stem}-{point.label}.json"
            if path.exists():
                hint = f"{path.name} is there: --resume keeps finished points, --force measures all again"
                raise BadInput("--result-dir", str(folder), hint)


def _stem(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "_.-" else "-" for char in name)
    return kept.strip("-.") or "run"
