"""Does a sweep lose a point? Each backend runs one, a worker is killed, the sweep is interrupted and resumed.

    .venv/bin/python benchmarks/sweeps.py [--points 1000] [--backend loky --backend dask --backend ray]

Dask and Ray are the extras of these names; each starts a cluster of two workers on this machine. Status 1: a
point is missing or there twice, or the backends' files differ.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.build import read_source  # noqa: E402 - a script beside the package
from sim.planning.backends import BACKENDS  # noqa: E402
from sim.planning.jobs import Job  # noqa: E402
from sim.planning.parallel import Sweep  # noqa: E402

# What a worker's command line says; only descendants of the sweep are looked at.
WORKERS = {"loky": "popen_loky", "dask": "spawn_main", "ray": "ray::"}
TIMEOUT = 600.0


def jobs(points: int) -> list[Job]:
    """Short simulations that differ in their seed."""
    base = read_source(
        serve="vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024 --max-num-seqs 8",
        bench="vllm bench serve --dataset-name random --random-input-len 100 --random-output-len 8 "
        "--random-range-ratio 0.5 --request-rate 20 --num-prompts 20",
        gpu="L4",
    ).build()
    seeded = (replace(base, seed=i, workload=replace(base.workload, seed=i)) for i in range(points))
    return [Job(f"seed {scenario.seed}", scenario) for scenario in seeded]


def lines(out: Path) -> int:
    """Results in a file so far."""
    return out.read_bytes().count(b"\n") if out.exists() else 0


def descendants(pid: int) -> dict[int, str]:
    """Command lines of a process's children, theirs, and so on (Linux)."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = (parent, words)
    found: dict[int, str] = {}
    below = {pid}
    while below:
        below = {child for child, (parent, _) in parents.items() if parent in below}
        found |= {child: parents[child][1] for child in below}
    return found


def kill_a_worker(pid: int, backend: str) -> bool:
    """Kill the sweep's first worker; False if none runs (yet)."""
    for child, words in sorted(descendants(pid).items()):
        if WORKERS[backend] in words:
            subprocess.run(["/bin/kill", "-KILL", str(child)], check=False)
            return True
    return False


def wait_for(out: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Until the file has so many results, or the sweep has ended."""
    end = time.monotonic() + TIMEOUT
    while lines(out) < count and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def disturbed(backend: str, points: int, out: Path) -> tuple[bool, int]:
    """Run a sweep with a worker killed at 20 %, an interrupt at 50 %, and a second run to its end.

    Returns whether a worker was killed, and the results in the file after the interrupt.
    """
    words = [sys.executable, __file__, "--points", str(points), "--backend", backend, "--sweep-to", str(out)]
    process = subprocess.Popen(words)
    wait_for(out, points // 5, process)
    killed = kill_a_worker(process.pid, backend)
    wait_for(out, points // 2, process)
    process.send_signal(signal.SIGINT)
    process.wait(TIMEOUT)
    left = lines(out)
    subprocess.run(words, check=True)
    return killed, left


def main() -> int:
    """Disturb a sweep on each backend and compare the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="repeatable; all by default")
    parser.add_argument("--sweep-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sweep_to is not None:
        try:
            Sweep(backend=args.backend[0], workers=2, out=args.sweep_to)(jobs(args.points))
        except KeyboardInterrupt:
            return 130
        return 0
    digests, good = set(), True
    with TemporaryDirectory() as folder:
        for backend in args.backend or BACKENDS:
            out, begun = Path(folder) / f"{backend}.jsonl", time.monotonic()
            killed, left = disturbed(backend, args.points, out)
            keys = [json.loads(line)["key"] for line in out.read_text(encoding="utf-8").splitlines()]
            digests.add(digest := sha256(out.read_bytes()).hexdigest()[:16])
            good &= killed and left < args.points and sorted(keys) == sorted(set(keys))
            good &= len(keys) == args.points
            twice, took = len(keys) - len(set(keys)), time.monotonic() - begun
            print(
                f"{backend}: worker killed: {killed}; {left} results when interrupted; {len(keys)} in the "
                f"end, {twice} of them twice; {digest}; {took:.0f} s",
                flush=True,
            )
    return 0 if good and len(digests) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
