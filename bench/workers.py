"""More than one process for a load that one event loop cannot carry.

Every process takes each n-th request, with its own connections and its share of the concurrency cap, and
all start at the same instant of the machine's monotonic clock. Jobs and results cross as JSON; nothing is
pickled.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.driver import OnProgress, Outcome, Plan, Progress, drive
from bench.overhead import Overhead
from bench.payload import Target, Timeouts
from bench.rows import read_rows, write_rows
from bench.wire import clock
from sim.errors import ServecastError
from sim.request import Request

STREAMS_PER_PROCESS = 300  # that one process follows at 50 tokens/s each with a delay of about a millisecond
_LEAD_S = 0.1  # from "all are ready" to the start of the run


class WorkerLost(ServecastError):
    """A load-generating process ended without its results."""


def processes_for(concurrency: float, cpus: int | None = None) -> int:
    """How many processes a load of that many streams at once is worth; one CPU is left to the rest."""
    cpus = (os.cpu_count() or 1) if cpus is None else cpus
    return max(1, min(int(concurrency // STREAMS_PER_PROCESS) + 1, cpus - 1))


def split(plan: Plan, processes: int) -> list[Plan]:
    """`plan` in `processes` parts that together are the whole; parts without a request are left out.

    The cap is shared out, so a process may hold a request back while another has a free place: with n
    processes up to n - 1 places of the cap can stand empty for a moment.
    """
    processes = max(1, min(processes, len(plan.requests), plan.max_concurrency or len(plan.requests)))
    caps: list[int | None] = [None] * processes
    if plan.max_concurrency is not None:
        base, rest = divmod(plan.max_concurrency, processes)
        caps = [base + (i < rest) for i in range(processes)]
    return [
        replace(
            plan,
            requests=plan.requests[i::processes],
            warmups=plan.warmups[i::processes],
            max_concurrency=caps[i],
        )
        for i in range(processes)
    ]


def run_workers(
    target: Target,
    plan: Plan,
    outcome: Outcome,
    processes: int,
    *,
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
    keep_text: bool = False,
) -> None:
    """Like `bench.driver.drive`, from several processes; blocks.

    On Ctrl-C the processes stop sending, and what they measured is collected before the interrupt goes on.

    Raises:
        WorkerLost: a process died; what the others measured is in `outcome`.
    """
    parts = split(plan, processes)
    with tempfile.TemporaryDirectory(prefix="servecast-load-") as name:
        folder = Path(name)
        workers = [_Worker(folder, i, target, part, keep_text) for i, part in enumerate(parts)]
        try:
            for worker in workers:
                worker.wait_ready()
            outcome.start = clock() + _LEAD_S
            for worker in workers:
                worker.say(f"{outcome.start!r}")
            _follow(workers, plan, outcome, on_progress, stop)
        except KeyboardInterrupt:
            outcome.interrupted = True
            raise
        finally:
            for worker in workers:
                worker.finish()
            lost = _collect(workers, outcome)
    if lost and not outcome.interrupted:
        raise WorkerLost(f"{len(lost)} of {len(workers)} load processes died: {lost[0].last_words}")


def _follow(
    workers: list[_Worker],
    plan: Plan,
    outcome: Outcome,
    on_progress: OnProgress | None,
    stop: threading.Event | None,
) -> None:
    while any(worker.is_alive for worker in workers):
        for worker in workers:
            worker.wait(0.5 / len(workers))
        if stop is not None and stop.is_set() and not outcome.interrupted:
            outcome.interrupted = True
            for worker in workers:
                worker.say("stop")
        if on_progress is not None:
            on_progress(_sum([worker.progress for worker in workers], len(plan.requests)))


def _sum(parts: list[Progress], planned: int) -> Progress:
    good = sum(p.done - p.failed for p in parts)
    ttft = sum((p.mean_ttft or 0.0) * (p.done - p.failed) for p in parts)
    return Progress(
        elapsed=max(p.elapsed for p in parts),
        planned=planned,
        sent=sum(p.sent for p in parts),
        done=sum(p.done for p in parts),
        failed=sum(p.failed for p in parts),
        output_tokens=sum(p.output_tokens for p in parts),
        mean_ttft=ttft / good if good else None,
    )


def _collect(workers: list[_Worker], outcome: Outcome) -> list[_Worker]:
    """Take over what the processes measured; those that left nothing."""
    lost = []
    for worker in workers:
        if not worker.delivered:
            lost.append(worker)
            continue
        outcome.rows.extend(read_rows(worker.rows_file))
        summary = json.loads(worker.summary_file.read_text())
        outcome.warmup_failures.extend(summary["warmup_failures"])
        outcome.interrupted = outcome.interrupted or summary["interrupted"]
        part = Overhead(**{**summary["overhead"], "slips": tuple(summary["overhead"]["slips"])})
        outcome.overhead = part if outcome.overhead is None else outcome.overhead.merged(part)
    return lost


class _Worker:
    """The parent's side of one process; lines on its stdin and stdout are the protocol."""

    def __init__(self, folder: Path, index: int, target: Target, plan: Plan, keep_text: bool) -> None:
        job = folder / f"job-{index}.json"
        self.rows_file = folder / f"rows-{index}.jsonl"
        self.summary_file = folder / f"summary-{index}.json"
        job.write_text(json.dumps(_job(target, plan, keep_text, self.rows_file, self.summary_file)))
        self.progress = Progress(0.0, len(plan.requests), 0, 0, 0, 0)
        self.last_words = "no message"
        self._ready = threading.Event()
        # A session of its own: Ctrl-C reaches the parent alone, which then says when to stop.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "bench.workers", str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._listeners = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._listen_errors, daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                self._ready.set()
            elif line.startswith("{"):
                self.progress = Progress(**json.loads(line))
        self._ready.set()

    def _listen_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self.last_words = line.strip()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def delivered(self) -> bool:
        """Whether its results are complete."""
        return self.summary_file.exists()

    def wait_ready(self) -> None:
        """Block until it has prepared and warmed up."""
        self._ready.wait()
        if not self.is_alive:
            raise WorkerLost(f"a load process died before the run: {self.last_words}")

    def say(self, line: str) -> None:
        """Send it a line, if it still listens."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def wait(self, seconds: float) -> None:
        """Wait for its end, but no longer than `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def finish(self) -> None:
        """Have it stop if it still runs, and take leave; it is gone afterwards."""
        if self.is_alive:
            self.say("stop")
            self.wait(10.0)
        if self.is_alive:
            self._process.kill()
        self._process.wait()
        for listener in self._listeners:
            listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _job(target: Target, plan: Plan, keep_text: bool, rows: Path, summary: Path) -> dict[str, Any]:
    return {
        "target": asdict(target),
        "plan": {
            "requests": [_plain(r) for r in plan.requests],
            "warmups": [_plain(r) for r in plan.warmups],
            "seed": plan.seed,
            "max_concurrency": plan.max_concurrency,
            "duration": plan.duration,
            "tokens_per_word": plan.tokens_per_word,
        },
        "keep_text": keep_text,
        "rows": str(rows),
        "summary": str(summary),
    }


def _plain(request: Request) -> dict[str, Any]:
    values = asdict(request)
    del values["prompt_len"]
    return values


def _request(values: dict[str, Any]) -> Request:
    return Request(**{**values, "prompt": tuple((key, length) for key, length in values["prompt"])})


def _read_job(path: Path) -> tuple[Target, Plan, dict[str, Any]]:
    job = json.loads(path.read_text())
    raw = job["target"]
    target = Target(
        **{
            **raw,
            "timeouts": Timeouts(**raw["timeouts"]),
            "model_aliases": tuple(raw["model_aliases"]),
        }
    )
    plan = job["plan"]
    for name in ("requests", "warmups"):
        plan[name] = [_request(values) for values in plan[name]]
    return target, Plan(**plan), job


def _work(path: Path) -> None:
    target, plan, job = _read_job(path)
    stop = threading.Event()
    outcome = Outcome()

    def start_at() -> float:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        line = sys.stdin.readline().strip()
        threading.Thread(target=listen, daemon=True).start()
        if line in ("", "stop"):
            stop.set()
            return clock()
        return float(line)

    def listen() -> None:
        sys.stdin.readline()  # "stop", or the end of the parent
        stop.set()

    def tell(progress: Progress) -> None:
        sys.stdout.write(json.dumps(asdict(progress)) + "\n")
        sys.stdout.flush()

    asyncio.run(
        drive(
            target, plan, outcome, start_at=start_at, on_progress=tell, stop=stop, keep_text=job["keep_text"]
        )
    )
    write_rows(Path(job["rows"]), outcome.all_rows())
    assert outcome.overhead is not None
    summary = {
        "overhead": asdict(outcome.overhead),
        "interrupted": outcome.interrupted,
        "warmup_failures": outcome.warmup_failures,
    }
    unfinished = Path(job["summary"]).with_suffix(".part")
    unfinished.write_text(json.dumps(summary))
    unfinished.rename(job["summary"])


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
