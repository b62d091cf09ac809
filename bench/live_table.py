"""What a person sees while it runs: phases of the start, then a table with running figures, on stderr."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table

from bench.driver import Progress
from bench.launch import Launch
from bench.session import Reporter, Subject
from bench.sweep import Point
from bench.telemetry import HostState
from sim.results import BenchResult

# Latencies are in ms; short heads, so that all of it fits into 80 columns.
_COLUMNS = ("engine", "load", "done", "fail", "open", "req/s", "tok/s", "TTFT", "TPOT", "verdict")
_STYLES = {"VALID": "green", "SUSPECT": "yellow", "INVALID": "red"}


@dataclass(slots=True)
class _Row:
    cells: tuple[str, ...]
    style: str | None = None


class LiveTable(Reporter):
    """A table that refreshes twice a second on a terminal; plain lines where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._rows: dict[tuple[str, str], _Row] = {}
        self._caption = ""
        self._live: RichLive | None = None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = RichLive(
                get_renderable=self.render, console=self._console, refresh_per_second=2, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            if self._rows and error is not None:  # else a summary follows
                self._console.print(self.render())

    def render(self) -> Table:
        """The table as it stands."""
        table = Table(caption=self._caption or None, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(_COLUMNS):
            table.add_column(name, justify="left" if index in (0, 1, 9) else "right", no_wrap=True)
        for row in self._rows.values():
            table.add_row(*row.cells, style=row.style)
        return table

    def _say(self, text: str) -> None:
        self._caption = text
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def starting(self, subject: Subject, launch: Launch) -> None:
        """Say what is launched."""
        log = f", log in {launch.log_path}" if launch.log_path else ""
        self._say(f"{subject.stem}: starting ({launch.kind}{log})")

    def milestone(self, subject: Subject, name: str, seconds: float) -> None:
        """Say how far the start is."""
        self._say(f"{subject.stem}: {name} after {seconds:.1f} s")

    def loading(self, subject: Subject, point: Point) -> None:
        """Open the point's row."""
        cells = (subject.stem, point.label, f"0/{point.spec.num_prompts}", *[""] * 6, "warming up")
        self._rows[subject.stem, point.label] = _Row(cells)
        self._say(f"{subject.stem} {point.label}: loading, {point.spec.num_prompts} prompts")

    def progress(self, subject: Subject, point: Point, progress: Progress) -> None:
        """Fill the point's row with running figures."""
        elapsed = max(progress.elapsed, 1e-9)
        ttft = "" if progress.mean_ttft is None else f"{progress.mean_ttft * 1e3:.1f}"
        self._rows[subject.stem, point.label] = _Row(
            (
                subject.stem,
                point.label,
                f"{progress.done}/{progress.planned}",
                str(progress.failed),
                str(progress.in_flight),
                f"{(progress.done - progress.failed) / elapsed:.2f}",
                f"{progress.output_tokens / elapsed:.1f}",
                ttft,
                "",
                f"{progress.elapsed:.0f} s",
            )
        )
        now = time.monotonic()
        if self._live is None and now - self._last_line > 10:
            self._last_line = now
            self._say(
                f"{subject.stem} {point.label}: {progress.done}/{progress.planned} done, "
                f"{progress.failed} failed, {progress.elapsed:.0f} s"
            )

    def result(self, subject: Subject, point: Point, result: BenchResult, path: Path, reused: bool) -> None:
        """Close the point's row."""
        row = _Row(summary_cells(subject.stem, point.label, result), _STYLES[result.verdict.status])
        self._rows[subject.stem, point.label] = row
        where = f"kept from {path}" if reused else f"written to {path}"
        self._say(f"{subject.stem} {point.label}: {result.verdict.status}, {where}")

    def stopping(self, subject: Subject) -> None:
        """Say so."""
        self._say(f"{subject.stem}: stopping")

    def stopped(self, subject: Subject, state: HostState | None) -> None:
        """Say that it is gone."""
        waited = f", GPU memory free after {state.waited:.1f} s" if state is not None else ""
        self._say(f"{subject.stem}: stopped{waited}")


def summary_cells(stem: str, label: str, result: BenchResult) -> tuple[str, ...]:
    """One line of figures for a finished point."""
    figures = result.aggregates

    def figure(key: str, form: str) -> str:
        value = figures.get(key)
        return "unknown" if value is None else format(value, form)

    records = result.records
    total = "" if records is None else f"/{len(records)}"
    return (
        stem,
        label,
        figure("completed", "d") + total,
        figure("failed", "d"),
        "",
        figure("request_throughput", ".2f"),
        figure("output_throughput", ".1f"),
        figure("median_ttft_ms", ".1f"),
        figure("median_tpot_ms", ".2f"),
        result.verdict.status,
    )
