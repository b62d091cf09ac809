"""The file that a sweep's results stream into: one JSON line each, safe to interrupt, resumable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from sim.errors import BadInput
from sim.planning.jobs import Job
from sim.planning.outcome import Outcome, worker_died
from sim.results_io.atomic import write_text
from sim.workload.files import place
from sim.workload.spec import FileDataset

FIELD = "--out"
BEGIN = b'{"key":'  # of every line


def fingerprint(job: Job) -> str:
    """Changes with anything that could change the job's result (other than servecast itself)."""
    specs = [job.scenario.workload, *job.before]
    files = [spec.dataset.path for spec in specs if isinstance(spec.dataset, FileDataset)]
    content = {
        "scenario": asdict(replace(job.scenario, gpu=replace(job.scenario.gpu, file=""))),
        "step_time": repr(job.step_time),
        "requests": None if job.requests is None else [asdict(r) for r in job.requests],
        "before": [asdict(spec) for spec in job.before],
        "files": [_digest(path) for path in files],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(path: str) -> str | None:
    """Of a data file's content; None if there is none to read, which the run itself will say."""
    try:
        stat = Path(path).stat()
        return _content_digest(path, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _content_digest(path: str, mtime_ns: int, size: int) -> str:
    """Read anew when the file's time or size has changed."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ResultsFile:
    """Results by job, appended as they come; `finish` puts them into the order of the jobs.

    A crash may leave half a line at the end; it is dropped, and its job runs again.

    Raises:
        BadInput: the file cannot be read or written, or holds something else than results.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lines: dict[str, str] = {}
        self._prints: dict[str, str] = {}
        self._died: dict[str, bool] = {}
        self._order: list[str] = []
        if not self._path.absolute().parent.is_dir():
            raise BadInput(FIELD, str(path), "its folder does not exist")
        if self._path.exists() and not self._path.is_file():
            raise BadInput(FIELD, str(path), "is no plain file: finished runs could not be read again")
        self._load()

    def done(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        """What the file already has of these jobs; one whose worker died is tried again.

        Raises:
            BadInput: it has a job of the same name, but of other settings.
        """
        found: dict[str, Outcome] = {}
        for job in jobs:
            line = self._lines.get(job.key)
            if line is None:
                continue
            if self._prints[job.key] != fingerprint(job):
                hint = f"its result {job.key!r} is of other settings; name another file"
                raise BadInput(FIELD, str(self._path), hint)
            outcome = Outcome.from_dict(json.loads(line)["outcome"])
            if worker_died(outcome):
                del self._lines[job.key]
            else:
                found[job.key] = outcome
        return found

    def append(self, job: Job, outcome: Outcome) -> None:
        """Add one result; it is on disk when this returns. A job that is there already is left alone."""
        if job.key in self._lines:
            return
        mark = fingerprint(job)
        content = {"key": job.key, "job": mark, "outcome": outcome.to_dict()}
        line = json.dumps(content, separators=(",", ":"))
        self._lines[job.key], self._prints[job.key] = line, mark
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(FIELD, str(self._path), f"cannot be written: {error.strerror or error}") from None

    def finish(self, jobs: Sequence[Job]) -> None:
        """Rewrite the file in the order of the jobs: the same jobs give the same file, whoever ran them."""
        self._order = list(dict.fromkeys([*self._order, *(job.key for job in jobs)]))
        keys = dict.fromkeys([*self._order, *self._lines])
        text = "".join(self._lines[key] + "\n" for key in keys if key in self._lines)
        write_text(self._path, text, FIELD)

    def _load(self) -> None:
        if not self._path.exists():
            return
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise BadInput(FIELD, str(self._path), f"cannot be read: {error.strerror or error}") from None
        whole, _, half = data.rpartition(b"\n")
        for number, raw in enumerate(whole.splitlines(), start=1):
            self._take(raw, number)
        if half:
            if not (half.startswith(BEGIN) or BEGIN.startswith(half)):
                raise _no_result(place(self._path, len(whole.splitlines()) + 1))
            try:
                with self._path.open("r+b") as file:
                    file.truncate(len(data) - len(half))
            except OSError as error:
                text = f"cannot be written: {error.strerror or error}"
                raise BadInput(FIELD, str(self._path), text) from None

    def _take(self, raw: bytes, number: int) -> None:
        try:
            entry = json.loads(raw)
            key, mark = str(entry["key"]), str(entry["job"])
            outcome = Outcome.from_dict(entry["outcome"])
        except (ValueError, KeyError, TypeError):
            raise _no_result(place(self._path, number)) from None
        if key in self._lines and not self._died.get(key):
            return
        self._died[key] = worker_died(outcome)
        self._lines[key], self._prints[key] = raw.decode("utf-8"), mark


def _no_result(where: str) -> BadInput:
    return BadInput(where, None, "is not a result of a sweep; name another file for --out")
