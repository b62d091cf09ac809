"""Cores of a host on which an engine computes: nobody else's while it is measured.

vLLM on a CPU binds its worker's threads to cores of their own, but not the rest: the engine core, which polls
for the worker's answer without rest (vllm/distributed/device_communicators/shm_broadcast.py, 0.28.0), and the
API server wander over all cores. Where one of them meets the worker, steps take up to twice their time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def leave_workers_alone(root: int | None = None, proc: Path = Path("/proc")) -> set[int]:
    """Move a process and its descendants off the cores that some of them are bound to.

    Args:
        root: whose family; None: this process.

    Returns:
        The cores that the bound ones have to themselves now; empty if none is bound, or all cores are theirs.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    root = os.getpid() if root is None else root
    everywhere = os.sched_getaffinity(root)
    free: list[int] = []
    taken: set[int] = set()
    for pid in family(root, proc):
        with suppress(OSError):  # it has ended
            cores = os.sched_getaffinity(pid)
            if cores < everywhere:
                taken |= cores
            else:
                free.append(pid)
    left = everywhere - taken
    if not taken or not left:
        return set()
    for pid in free:
        for thread in _threads(pid, proc):
            with suppress(OSError):
                os.sched_setaffinity(thread, left)
    return taken


@contextmanager
def own_cores_back(proc: Path = Path("/proc")) -> Iterator[None]:
    """Give this process its cores back: the next engine that it starts would inherit what is left."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        for thread in _threads(os.getpid(), proc):
            with suppress(OSError):
                os.sched_setaffinity(thread, before)


def family(root: int, proc: Path = Path("/proc")) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _parent(folder: Path) -> int | None:
    try:
        # "pid (name) state ppid …"; the name may hold spaces and brackets.
        return int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _threads(pid: int, proc: Path) -> list[int]:
    try:
        return [int(task.name) for task in (proc / str(pid) / "task").iterdir()]
    except OSError:
        return []
