"""The files of one measured point, beside its result: what was seen, raw and as tables."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.telemetry import GpuSample
from bench.watch import Watched
from sim.errors import BadInput
from sim.results import BenchResult
from sim.results_io.atomic import make_folder, write_text
from sim.results_io.files import write_requests_csv, write_result

FIELD = "--result-dir"
PICTURE = ".png"
_SIDES = (".requests.csv", ".metrics_before.prom", ".metrics_after.prom", ".series.csv", ".gpu.csv", PICTURE)


def check_folder(folder: Path) -> None:
    """Say before anything is started that results cannot be written there; nothing is made.

    Raises:
        BadInput: what is there is no folder, or may not be written to.
    """
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        is_folder, is_free = existing.is_dir(), os.access(existing, os.W_OK | os.X_OK)
    except OSError as error:
        raise BadInput(FIELD, str(folder), f"cannot be looked at: {error.strerror or error}") from None
    if not is_folder:
        raise BadInput(FIELD, str(folder), f"{existing} is no folder: choose another")
    if not is_free:
        raise BadInput(FIELD, str(folder), f"{existing} cannot be written to: choose another")


def write_files(path: Path, result: BenchResult, seen: Watched, begun: float) -> None:
    """Write `path` (JSON) and, beside it under the same stem, what else there is; each whole or not at all.

    `.requests.csv`; `.metrics_before.prom` and `.metrics_after.prom` as scraped; `.series.csv` (seconds since
    the run's start, running, waiting, KV use 0..1, preemptions so far); `.gpu.csv`. What an earlier run of
    the same name left there goes, also its picture: all that stands beside a result belongs to it.

    Raises:
        BadInput: the folder cannot be written to.
    """
    make_folder(path.parent, FIELD)
    stem = path.with_suffix("")
    for side in _SIDES:
        _remove(Path(f"{stem}{side}"))
    write_result(result, path, field=FIELD)
    if result.records is not None:
        write_requests_csv(result.records, f"{stem}.requests.csv", field=FIELD)
    for name, text in (("before", seen.before), ("after", seen.after)):
        if text is not None:
            write_text(f"{stem}.metrics_{name}.prom", text, FIELD)
    if result.series is not None:
        series = result.series
        rows: list[Sequence[object]] = [
            [f"{time:.3f}", *(_cell(value) for value in values)]
            for time, *values in zip(
                series.time.tolist(),
                series.running.tolist(),
                series.waiting.tolist(),
                series.kv_usage.tolist(),
                seen.preemptions(),
                strict=True,
            )
        ]
        head = ("time_s", "running", "waiting", "kv_usage", "preemptions")
        write_text(f"{stem}.series.csv", _table(head, rows), FIELD)
    if seen.gpu:
        names = [field.name for field in fields(GpuSample)]
        rows = [
            [f"{time - begun:.3f}", *(_cell(getattr(sample, name)) for name in names)]
            for time, samples in seen.gpu
            for sample in samples
        ]
        write_text(f"{stem}.gpu.csv", _table(("time_s", *names), rows), FIELD)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(FIELD, str(path), f"cannot be replaced: {error.strerror}") from None


def _cell(value: float | int | None) -> float | int | str:
    return "" if value is None or value != value else value  # NaN differs from itself


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return buffer.getvalue()
