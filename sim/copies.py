"""Several pieces of work at once, on cores that would idle: copies of this process have all it has loaded."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

Plain = TypeVar("Plain")  # JSON must be able to hold it without loss


@contextmanager
def begun(tasks: Sequence[Callable[[], Plain]], allowed: bool = True) -> Iterator[Callable[[], list[Plain]]]:
    """Let copies of this process do tasks while the block runs; yields a call that returns what came of them.

    What a copy does not bring to an end is done here when it is asked for, so that an error is raised as if
    there were no copies. So is everything where copies are not allowed, cannot be made, or would only take
    turns with this process.
    """
    number = min(len(tasks), cores()) if allowed and can_copy() else 0
    shares = [_Copy(tasks[first::number]) for first in range(number)]

    def results() -> list[Plain]:
        if not shares:
            return [task() for task in tasks]
        found = [share.results() for share in shares]
        return [found[i % number][i // number] for i in range(len(tasks))]

    try:
        yield results
    finally:
        for share in shares:
            share.end()


def can_copy() -> bool:
    """Whether a fork is safe (this process has one thread) and another core could take it."""
    if sys.platform != "linux" or cores() < 2:
        return False
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _Copy(Generic[Plain]):
    """A copy of this process that does tasks, one after the other."""

    def __init__(self, tasks: Sequence[Callable[[], Plain]]) -> None:
        self._tasks = tasks
        self._pid = 0
        self._pipe, into = os.pipe()
        try:
            self._pid = os.fork()
            if not self._pid:
                _work(tasks, into)
        except OSError:  # no room for another process
            pass
        finally:
            os.close(into)

    def results(self) -> list[Plain]:
        """What came of the tasks."""
        with os.fdopen(os.dup(self._pipe), "rb") as pipe:
            text = pipe.read()
        try:
            found: list[Plain] = json.loads(text)
        except ValueError:
            return [task() for task in self._tasks]
        return found

    def end(self) -> None:
        """End the copy if it has not ended."""
        os.close(self._pipe)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _work(tasks: Sequence[Callable[[], object]], into: int) -> NoReturn:
    try:
        text = json.dumps([task() for task in tasks])
        with os.fdopen(into, "w") as pipe:
            pipe.write(text)
    finally:
        os._exit(0)  # whatever happened: only the first process goes on from here
