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
    """As `run_here`, on worker processes; a few jobs stay here, where nothing has to start."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J]) -> list[R]:
        """Run them all."""
        if self._workers <= 1 or len(jobs) < 2:
            return run_here(function, jobs)
        from joblib import Parallel, delayed

        done: list[R] = Parallel(n_jobs=self._workers)(delayed(function)(job) for job in jobs)
        return done
