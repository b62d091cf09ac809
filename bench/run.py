"""Measure every point of load on one engine, and write what was measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.driver import OnProgress, Outcome, Plan, Progress, drive
from bench.enrich import Context, complete
from bench.files import PICTURE, write_files
from bench.launch import LaunchOptions, choose_kind
from bench.loadgen import run_load, shapes
from bench.payload import Target, Timeouts
from bench.plots import plot_run
from bench.session import Live, Reporter, Subject, running
from bench.sweep import Point, finished, point_key
from bench.telemetry import Gpus
from bench.watch import Watcher
from bench.wire import clock
from sim.interrupts import uninterrupted
from sim.results import BenchResult
from sim.workload.generate import generate

More = Callable[[Mapping[str, BenchResult]], Sequence[Point]]


# The step probe writes up to 0.2 s after a step; an engine that is stopped sooner takes the last with it [s].
STEPS_WRITTEN = 1.0


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How to measure.

    Attributes:
        result_dir: where files go.
        resume: take finished points from `result_dir` instead of measuring them again.
        scrape_interval: between looks at /metrics and the GPUs [s].
        timeouts: of each request.
        plots: draw a picture of every point.
    """

    launch: LaunchOptions
    result_dir: Path
    resume: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    scrape_interval: float = 0.5
    plots: bool = False


def run_engine(
    subject: Subject,
    points: Sequence[Point],
    options: BenchOptions,
    gpus: Gpus | None,
    reporter: Reporter,
    more: More | None = None,
) -> list[BenchResult]:
    """Measure all points on one engine; results are written as they come.

    Points that are done need no engine; if all are, none is started.

    Args:
        more: asked for further points whenever all are done, with the results so far by label; the engine
            stays up until it has none.

    Raises:
        EngineFailed: the engine did not start, or the host is dirty after it.
        KeyboardInterrupt: after what was measured is written and the engine is gone.
    """
    results: dict[str, BenchResult] = {}
    asked: list[Point] = []

    def missing(points: Sequence[Point]) -> list[Point]:
        """Those that no earlier run has finished; the others' results are taken."""
        out = []
        asked.extend(points)
        for point in points:
            path, key = _path(subject, options, point), _key(subject, options, point)
            earlier = finished(path, key) if options.resume else None
            if earlier is None:
                out.append(point)
            else:
                results[point.label] = earlier
                reporter.result(subject, point, earlier, path, True)
        return out

    def next_round() -> list[Point]:
        while more is not None and (points := more(results)):
            if todo := missing(points):
                return todo
        return []

    todo = missing(points) or next_round()
    if todo:
        with running(
            subject, options.launch, options.result_dir, gpus, reporter, keep_steps=options.resume
        ) as live:
            while todo:
                for point in todo:
                    path, key = _path(subject, options, point), _key(subject, options, point)
                    result = _run_point(subject, point, options, live, reporter, path, key)
                    results[point.label] = result
                    if _subjects(result) & {"engine_died"}:
                        return _in_order(asked, results)
                todo = next_round()
    return _in_order(asked, results)


def _in_order(asked: Sequence[Point], results: Mapping[str, BenchResult]) -> list[BenchResult]:
    return [results[point.label] for point in asked if point.label in results]


def _path(subject: Subject, options: BenchOptions, point: Point) -> Path:
    return options.result_dir / f"{subject.stem}-{point.label}.json"


def _key(subject: Subject, options: BenchOptions, point: Point) -> str:
    launch = options.launch
    where = {
        "kind": choose_kind(subject.source, launch),
        "program": launch.program,
        "image": launch.image,
        "base_url": launch.base_url,
        "launch_env": dict(launch.env),
        "probe": launch.probe,
        "gpus": launch.gpus,
        "mounts": [(str(folder), target) for folder, target in launch.mounts],
        "network": launch.network,
        "shm_bytes": launch.shm_bytes,
    }
    return point_key({**subject.identity(), **where}, point)


def _subjects(result: BenchResult) -> set[str]:
    return {note.subject for note in result.verdict.reasons}


def _run_point(
    subject: Subject,
    point: Point,
    options: BenchOptions,
    live: Live,
    reporter: Reporter,
    path: Path,
    key: str,
) -> BenchResult:
    """Warm up, load, watch, judge, write.

    Raises:
        KeyboardInterrupt: the load was interrupted; what was measured is written.
    """
    target = Target(
        base_url=live.launch.server.base_url,
        model=live.launch.model_id,
        endpoint=point.spec.endpoint,
        api_key_env=options.launch.api_key_env,
        vocab_size=subject.scenario.model.vocab_size,
        timeouts=options.timeouts,
    )
    reporter.loading(subject, point)
    warmup_failures = _warm_up(target, point)
    watcher = Watcher(
        live.launch.server,
        gpus=live.gpus,
        interval=options.scrape_interval,
        api_key_env=options.launch.api_key_env,
    )
    watcher.begin()
    outcome, loaded = Outcome(), clock()

    def on_progress(progress: Progress) -> None:
        reporter.progress(subject, point, progress)

    try:
        result = _load(target, point, on_progress, watcher, outcome)
    finally:
        seen = watcher.finish()
    with uninterrupted():
        begun = loaded if outcome.start is None else outcome.start
        context = Context(subject, point, live, seen, begun, warmup_failures, key)
        if options.launch.probe:
            time.sleep(STEPS_WRITTEN)
        result = complete(result, context)
        write_files(path, result, seen, begun)
        if options.plots:
            plot_run(result, path.with_suffix(PICTURE))
        reporter.result(subject, point, result, path, False)
    if result.extra.get("interrupted") and seen.died is None:
        raise KeyboardInterrupt
    return result


def _load(
    target: Target, point: Point, on_progress: OnProgress, watcher: Watcher, outcome: Outcome
) -> BenchResult:
    # Warm-ups are over: the counters were read after them.
    spec = replace(point.spec, num_warmups=0)
    return run_load(
        target, spec, seed=point.seed, on_progress=on_progress, stop=watcher.engine_gone, outcome=outcome
    )


def _warm_up(target: Target, point: Point) -> tuple[str, ...]:
    """Send the point's warm-ups, and wait for them; returns what went wrong."""
    warmups = shapes(generate(point.spec, point.seed), point.spec.num_warmups)
    if not warmups:
        return ()
    outcome = Outcome()
    plan = Plan((), warmups=warmups, seed=point.seed, max_concurrency=point.spec.max_concurrency)
    asyncio.run(drive(target, plan, outcome))
    return tuple(outcome.warmup_failures)
