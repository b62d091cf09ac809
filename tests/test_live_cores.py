from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from calibration.live.cores import family, leave_workers_alone, own_cores_back

SLEEPER = "import time; time.sleep(60)"
PARENT = f"""
import os, subprocess, sys, time
own = os.sched_getaffinity(0)
bound = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
os.sched_setaffinity(bound.pid, {{min(own)}})
free = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
print(bound.pid, free.pid, flush=True)
time.sleep(60)
"""

needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)


@needs_cores
def test_everybody_else_leaves_the_cores_of_a_bound_process() -> None:
    before = os.sched_getaffinity(0)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert set(family(parent.pid)) == {parent.pid, *pids}
        taken = leave_workers_alone(parent.pid)
        assert taken == {min(before)}
        assert os.sched_getaffinity(pids[0]) == taken
        assert os.sched_getaffinity(pids[1]) == os.sched_getaffinity(parent.pid) == before - taken
        assert os.sched_getaffinity(0) == before
    finally:
        for pid in (*pids, parent.pid):
            os.kill(pid, 9)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


@needs_cores
def test_nobody_moves_where_nobody_is_bound() -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        time.sleep(0.05)
        assert leave_workers_alone(child.pid) == set()
        assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)
    finally:
        child.kill()
        child.wait()


@needs_cores
def test_the_next_engine_starts_with_all_cores() -> None:
    before = os.sched_getaffinity(0)
    with own_cores_back():
        os.sched_setaffinity(0, {max(before)})
    assert os.sched_getaffinity(0) == before
