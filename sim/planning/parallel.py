"""Many simulations at once: on cores or clusters, streamed to a file, resumable, none lost and none twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from sim.errors import BadInput
from sim.planning.backends import backend
from sim.planning.jobs import Job, run_job
from sim.planning.outcome import WORKER_DIED, Outcome
from sim.planning.results_file import ResultsFile

MAX_BREAKS = 2  # pools in a row that break without one result, before jobs are run one by one
CHUNK = 8  # jobs per worker between results, for backends that cannot hand them over one by one

RunJob = Callable[[Job], Outcome]
Progress = Callable[[int, int, float | None], None]  # done, total, seconds left if enough is known
ENOUGH = 0.1  # of the work, done by runs of all sizes, from which the pace says something


class Sweep:
    """Runs jobs in parallel; a runner for `what_if`.

    Results come back in the order of the jobs whatever ran where; with `out` each is appended to that file
    as it arrives, and jobs that the file already has are not run again. A worker that is killed costs no
    result: its jobs go to a new pool. A job that kills every worker that touches it fails alone.

    Args:
        workers: processes; None is one per core.
        progress: called after every result.
        run: what a job is handed to (it must be importable by the workers).
    """

    def __init__(
        self,
        *,
        backend: str = "loky",
        address: str | None = None,
        workers: int | None = None,
        out: str | Path | None = None,
        progress: Progress | None = None,
        run: RunJob = run_job,
    ) -> None:
        self._backend = backend
        self._address = address
        self._workers = workers
        self._file = None if out is None else ResultsFile(out)
        self._progress = progress
        self._run = run

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run what is not done yet.

        Raises:
            BadInput: see `backend` and `ResultsFile`; or two jobs of one name.
        """
        if len({job.key for job in jobs}) < len(jobs):
            raise BadInput("jobs", None, "two of them have the same name")
        results = {} if self._file is None else self._file.done(jobs)
        left = [job for job in jobs if job.key not in results]
        workers = self._workers or os.cpu_count() or 1
        clock = _Clock(jobs, results, workers, self._progress)
        for job, outcome in self._results(left):
            if job.key in results:
                continue
            results[job.key] = outcome
            if self._file is not None:
                self._file.append(job, outcome)
            clock.tick(job)
        if self._file is not None:
            self._file.finish(jobs)
        return [results[job.key] for job in jobs]

    def _results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        if not jobs:
            return
        if self._backend == "loky" and (self._workers == 1 or len(jobs) == 1):
            for job in jobs:
                yield job, self._run(job)
            return
        left = {job.key: job for job in jobs}
        breaks = 0
        while left and breaks < MAX_BREAKS:
            before = len(left)
            # A pool that broke may have taken its local cluster along: each try begins with a new one.
            with (
                self._up() as arguments,
                suppress(*broken_pool_errors(), *dead_cluster_errors(self._backend)),
            ):
                for key, outcome in _stream(self._run, list(left.values()), arguments):
                    yield left.pop(key), outcome
            breaks = breaks + 1 if len(left) == before else 0
        if left:
            with self._up() as arguments:
                for job in list(left.values()):
                    yield job, _alone(self._run, job, arguments)

    def _up(self) -> AbstractContextManager[dict[str, Any]]:
        return backend(self._backend, self._address, self._workers)


def broken_pool_errors() -> tuple[type[BaseException], ...]:
    """What the pools raise when a worker dies under them; more kinds where a cluster's library is loaded."""
    import sys

    from joblib.externals.loky.process_executor import BrokenProcessPool

    errors: list[type[BaseException]] = [BrokenProcessPool, ConnectionError, EOFError]
    if (distributed := sys.modules.get("distributed")) is not None:
        errors += [distributed.KilledWorker, distributed.CancelledError]
    if (ray := sys.modules.get("ray")) is not None:
        errors.append(ray.exceptions.RayError)
    return tuple(errors)


def dead_cluster_errors(name: str) -> tuple[type[BaseException], ...]:
    """What a cluster's library raises when it is asked for a cluster that has gone."""
    return (KeyError,) if name == "ray" else ()  # ray.util.multiprocessing looks up the cluster's CPUs


def _stream(run: RunJob, jobs: Sequence[Job], arguments: dict[str, Any]) -> Iterator[tuple[str, Outcome]]:
    """Results as they come; in chunks where the backend cannot do so."""
    from joblib import Parallel, delayed

    try:
        parallel = Parallel(return_as="generator_unordered", **arguments)
    except ValueError:  # joblib: this backend cannot return a generator
        size = CHUNK * (os.cpu_count() or 1)
        with Parallel(**arguments) as kept:  # one pool for all chunks
            for i in range(0, len(jobs), size):
                yield from kept(delayed(_keyed)(run, job) for job in jobs[i : i + size])
        return
    yield from parallel(delayed(_keyed)(run, job) for job in jobs)


def _keyed(run: RunJob, job: Job) -> tuple[str, Outcome]:
    if multiprocessing.current_process().name.startswith("LokyProcess"):
        # A terminal's Ctrl-C reaches workers, too: only the process that gives them work is to speak of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return job.key, run(job)


def _alone(run: RunJob, job: Job, arguments: dict[str, Any]) -> Outcome:
    """A job that may be the one that kills its worker, with nothing else in the pool."""
    from joblib import Parallel, delayed

    try:
        ((_, outcome),) = Parallel(**arguments)([delayed(_keyed)(run, job)])
    except broken_pool_errors() as error:
        return Outcome(failure=f"{WORKER_DIED} ({type(error).__name__}); perhaps it ran out of memory")
    kept: Outcome = outcome
    return kept


class _Clock:
    """Tells progress and the time that is left: from the pace so far, runs weighed by what they send."""

    def __init__(
        self, jobs: Sequence[Job], had: Collection[str], workers: int, progress: Progress | None
    ) -> None:
        self._jobs, self._done, self._progress = len(jobs), len(had), progress
        self._had = len(had)
        self._left = float(sum(weight(job) for job in jobs if job.key not in had))
        self._worked = 0.0
        self._first = 2 * workers  # the first result of every worker includes its start
        self._start = time.monotonic()

    def tick(self, job: Job) -> None:
        self._done += 1
        self._worked += weight(job)
        self._left -= weight(job)
        if self._progress is None:
            return
        share = self._worked / (self._worked + self._left)
        known = self._done == self._jobs or (share >= ENOUGH and self._done - self._had >= self._first)
        pace = (time.monotonic() - self._start) / self._worked
        self._progress(self._done, self._jobs, pace * self._left if known else None)


def weight(job: Job) -> float:
    """About how long a run takes, in any unit: the requests that it sends."""
    return float(max(1, job.scenario.workload.num_prompts if job.requests is None else len(job.requests)))
