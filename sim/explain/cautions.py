"""What a reader of figures must know of the run behind them: its verdict, what was assumed, what left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sim.explain.page import row
from sim.provenance import Note
from sim.results import BenchResult

KINDS = ("warning", "not-modelled", "assumed")


def cautions(result: BenchResult, more: Iterable[Note] = ()) -> list[Note]:
    """The notes of a run that qualify its figures, the gravest kind first.

    Args:
        more: notes that are not the run's own: of the profile that its step times come from.
    """
    notes = dict.fromkeys(note for note in (*more, *result.notes) if note.kind in KINDS)
    return sorted(notes, key=lambda note: KINDS.index(note.kind))


def caution_lines(result: BenchResult, more: Iterable[Note] = ()) -> list[str]:
    """The same as labelled paragraphs, after the verdict if it is not VALID."""
    lines = []
    if result.verdict.status != "VALID":
        reasons = "; ".join(f"{note.subject}: {note.text}" for note in result.verdict.reasons)
        lines += row("Verdict", f"{result.verdict.status}: {reasons}")
    for note in cautions(result, more):
        lines += row("Mind", f"{note.kind}: {note.subject}: {note.text}")
    return lines


def caution_document(result: BenchResult, more: Iterable[Note] = ()) -> dict[str, Any]:
    """The same for JSON: `verdict`, its reasons, and `notes`."""
    return {
        "verdict": result.verdict.status,
        "verdict_reasons": [asdict(note) for note in result.verdict.reasons],
        "notes": [asdict(note) for note in cautions(result, more)],
    }
