"""What a reader of figures must know of the run behind them: its verdict, what was assumed, what left out."""

from __future__ import annotations

from typing import Any

from sim.explain.page import row
from sim.provenance import Note
from sim.results import BenchResult

KINDS = ("warning", "not-modelled", "assumed")


def cautions(result: BenchResult) -> list[Note]:
    """The notes of a run that qualify its figures, the gravest kind first."""
    notes = dict.fromkeys(note for note in result.notes if note.kind in KINDS)
    return sorted(notes, key=lambda note: KINDS.index(note.kind))


def caution_lines(result: BenchResult) -> list[str]:
    """The same as labelled paragraphs, after the verdict if it is not VALID."""
    lines = []
    if result.verdict.status != "VALID":
        reasons = "; ".join(f"{note.subject}: {note.text}" for note in result.verdict.reasons)
        lines += row("Verdict", f"{result.verdict.status}: {reasons}")
    for note in cautions(result):
        lines += row("Mind", f"{note.kind}: {note.subject}: {note.text}")
    return lines


def caution_document(result: BenchResult) -> dict[str, Any]:
    """The same for JSON: `verdict` and `notes`."""
    return {
        "verdict": result.verdict.status,
        "notes": [
            {"kind": note.kind, "subject": note.subject, "text": note.text} for note in cautions(result)
        ],
    }
