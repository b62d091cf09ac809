"""One engine from start to stop."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.driver import Progress
from bench.failures import EngineFailed, Failure
from bench.launch import Launch, LaunchOptions, prepare
from bench.metrics import CacheInfo, cache_info, parse
from bench.servers.ready import StartTimes, http_look, wait_ready
from bench.startup_log import StartupLog, parse_startup_log
from bench.sweep import Point
from bench.telemetry import Gpus, GpuSample, GpusSilent, HostState, wait_freed
from bench.watch import Watcher
from sim.build import ScenarioSource
from sim.interrupts import uninterrupted
from sim.provenance import Note
from sim.results import BenchResult
from sim.results_io.atomic import make_folder
from sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Subject:
    """One engine to be measured: the scenario resolved, and the commands it came from."""

    source: ScenarioSource
    scenario: Scenario
    stem: str  # of its files

    def identity(self) -> dict[str, Any]:
        """Engine, version, model, GPU and flags, for comparing like with like."""
        scenario = self.scenario
        return {
            "engine": scenario.engine.name,
            "engine_version": scenario.engine.asked_version or scenario.engine.version,
            "model": scenario.model.name,
            "gpu": scenario.gpu.name,
            "gpu_count": scenario.gpu_count,
            "flags": [list(flag) for flag in scenario.engine.given],
            "env": dict(scenario.engine.env),
        }


class Reporter:
    """Told what happens; the default says nothing."""

    def starting(self, subject: Subject, launch: Launch) -> None:
        """An engine is about to be launched."""

    def milestone(self, subject: Subject, name: str, seconds: float) -> None:
        """The start has come to `name`, that long after the launch."""

    def loading(self, subject: Subject, point: Point) -> None:
        """A point of load begins."""

    def progress(self, subject: Subject, point: Point, progress: Progress) -> None:
        """A point is under way; called from the event loop: must return quickly."""

    def result(self, subject: Subject, point: Point, result: BenchResult, path: Path, reused: bool) -> None:
        """A point is done, or was before."""

    def stopping(self, subject: Subject) -> None:
        """An engine is about to be stopped."""

    def stopped(self, subject: Subject, state: HostState | None) -> None:
        """It is gone; `state` is None where there are no GPUs to look at."""


@dataclass(slots=True)
class Live:
    """A server that is ready."""

    launch: Launch
    times: StartTimes
    log: StartupLog
    cache: CacheInfo
    gpus: Gpus | None


@contextmanager
def running(
    subject: Subject,
    options: LaunchOptions,
    folder: Path,
    gpus: Gpus | None,
    reporter: Reporter,
    keep_steps: bool = False,
) -> Iterator[Live]:
    """Start the engine, wait until it is ready, and stop it whatever happens.

    After a stop, the GPUs' memory must be back before this returns.

    Args:
        keep_steps: the step probe writes on behind the records of an earlier start.

    Raises:
        EngineFailed: it did not start, or left the host dirty, as far as can be told. Its log is kept.
        KeyboardInterrupt: during the start; then nothing of it is kept.
    """
    made = not folder.exists()
    launch = prepare(
        subject.source, subject.scenario, options, folder, subject.stem, has_gpus=gpus is not None
    )
    if launch.steps_path is not None:
        make_folder(launch.steps_path.parent, "--result-dir")
        keep_steps = keep_steps and launch.steps_path.exists()
        if keep_steps:
            _end_line(launch.steps_path)
        else:
            launch.steps_path.unlink(missing_ok=True)
    baseline: tuple[GpuSample, ...] = ()
    try:
        baseline = gpus.sample() if gpus is not None else ()
    except GpusSilent as error:
        text = f"not watched, and their memory not checked after the stop: {error}"
        launch, gpus = replace(launch, notes=(*launch.notes, Note("warning", "gpus", text))), None
    reporter.starting(subject, launch)
    is_ready = interrupted = False
    try:
        launch.server.start()
        times = wait_ready(
            launch.server,
            http_look(
                launch.server.base_url,
                launch.model_id,
                endpoint=subject.scenario.workload.endpoint,
                api_key_env=options.api_key_env,
            ),
            launch.model_id,
            stall_timeout=options.stall_timeout,
            on_progress=lambda name, seconds: reporter.milestone(subject, name, seconds),
        )
        is_ready = True
        block_size = subject.scenario.engine.values.get("block_size")
        log = parse_startup_log(launch.server.logs(), block_size=block_size.value if block_size else None)
        yield Live(launch, times, log, _cache_info(launch, options), gpus)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        with uninterrupted():
            reporter.stopping(subject)
            launch.server.stop()
            if interrupted and not is_ready:
                _forget(launch, folder, made, keep_steps)
    state = None
    if gpus is not None and launch.kind != "url":
        try:
            state = wait_freed(gpus, baseline, timeout=options.memory_timeout)
        except GpusSilent as error:
            fix = "whether GPU memory is free is not known: no engine is started before nvidia-smi answers"
            raise EngineFailed(Failure("gpus_silent", "stop", str(error), fix)) from error
        if not state.clean:
            raise EngineFailed(_dirty(state))
    reporter.stopped(subject, state)


def _dirty(state: HostState) -> Failure:
    pids = ", ".join(map(str, state.pids)) or "that the driver does not name"
    return Failure(
        "gpu_memory_not_freed",
        "stop",
        f"{state.leaked >> 20} MiB above the baseline after {state.waited:.0f} s",
        f"the host is dirty: no engine is started on it; processes {pids} hold GPU memory, end them yourself",
    )


def _end_line(path: Path) -> None:
    """Cut a record that a killed engine has left half written."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


def _forget(launch: Launch, folder: Path, made: bool, keep_steps: bool = False) -> None:
    """Take back what a start that came to nothing has written."""
    for path in (launch.log_path, None if keep_steps else launch.steps_path):
        if path is not None:
            path.unlink(missing_ok=True)
    if made and folder.is_dir() and not any(folder.iterdir()):
        shutil.rmtree(folder)


def _cache_info(launch: Launch, options: LaunchOptions) -> CacheInfo:
    watcher = Watcher(launch.server, api_key_env=options.api_key_env)
    text = watcher.scrape()
    return CacheInfo() if text is None else cache_info(parse(text))
