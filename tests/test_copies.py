"""Work in copies of the process gives what it gives without them, errors included."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: this one may have threads, which rule copies out.
SCRIPT = """
import os, signal
from functools import partial
from sim import copies

first = os.getpid()
copies.cores = lambda: 2

def pid(): return os.getpid()
def third(of): return {"a": of / 3, "unknown": None, "whole": of, "nan": float("nan"), "all": float("inf")}
def killed_in_a_copy(): return 7 if os.getpid() == first else os.kill(os.getpid(), signal.SIGKILL)
def not_json(): return {1, 2}
def wrong(): raise KeyError("as it is")

with copies.begun([pid] * 5) as results:
    where = results()
    print(len(where), len(set(where)), first in where)
with copies.begun([pid, pid], allowed=False) as results:
    print(set(results()) == {first})
tasks = [partial(third, 10.0**-k) for k in range(7)]
with copies.begun(tasks) as results:
    print(repr(results()) == repr([task() for task in tasks]))
with copies.begun([killed_in_a_copy, not_json, killed_in_a_copy]) as results:
    print(results())
try:
    with copies.begun([wrong, pid]) as results:
        results()
except KeyError as error:
    print("raised", error)
try:
    with copies.begun([signal.pause]):
        raise ValueError("and the copy is not waited for")
except ValueError as error:
    print("raised", error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("nobody left")
with copies.begun([]) as results:
    print(results())
copies.cores = lambda: 1
with copies.begun([pid, pid]) as results:
    print(set(results()) == {first})
"""


def test_copies_give_what_this_process_gives() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    copied = "5 2 False" if sys.platform == "linux" else "5 1 True"
    assert done.stdout.splitlines() == [
        copied,
        "True",
        "True",
        "[7, {1, 2}, 7]",
        "raised 'as it is'",
        "raised and the copy is not waited for",
        "nobody left",
        "[]",
        "True",
    ]
    assert done.stderr == ""
