"""Running the same function over many jobs: here, or on other cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

J = TypeVar("J")
R = TypeVar("R")


class Pool(Protocol):
    """Runs a function over jobs and returns the results in their order."""

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J], /) -> list[R]:
        """Run them all."""


def run_here(function: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
    """One after the other in this process."""
    return [function(job) for job in jobs]


class Cores:
    """As `run_here`, on worker processes; a few jobs stay here, where nothing has to start.

    Args:
        on_done: called as each job is done.
    """

    def __init__(self, workers: int, on_done: Callable[[], None] | None = None) -> None:
        self._workers = workers
        self._on_done = on_done

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
        """Run them all."""
        if self._workers <= 1 or len(jobs) < 2:
            return [self._told(function(job)) for job in jobs]
        from joblib import Parallel, delayed

        running = Parallel(n_jobs=self._workers, return_as="generator")(delayed(function)(j) for j in jobs)
        return [self._told(result) for result in running]

    def _told(self, result: R) -> R:
        if self._on_done is not None:
            self._on_done()
        return result
