"""What either side of a comparison says against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.comparison.identity import load_of
from sim.provenance import Note
from sim.results import BenchResult


def caveats(predicted: BenchResult, repeats: Sequence[BenchResult], sides: tuple[str, str]) -> list[Note]:
    """What either side says against itself: the prediction's warnings, doubts about a run."""
    told = [note for note in predicted.notes if note.kind == "warning" or note.subject == "--replay"]
    told += predicted.verdict.reasons if predicted.verdict.status == "SUSPECT" else ()
    found = [
        note if note.subject == "--replay" else replace(note, text=f"{sides[0]}: {note.subject}: {note.text}")
        for note in told
    ]
    doubts: dict[str, list[str]] = {}
    for run in repeats:
        if run.verdict.status == "SUSPECT":
            for reason in run.verdict.reasons:
                doubts.setdefault(reason.subject, []).append(reason.text)
    for subject, texts in doubts.items():
        more = f" (and {len(texts) - 1} more of the runs)" if len(texts) > 1 else ""
        found.append(Note("warning", subject, f"{sides[1]}: {subject}: {texts[0]}{more}"))
    if (
        len(repeats) > 1
        and load_of(repeats[0].identity) == (None, None)
        and not repeats[0].identity.get("workload")
    ):
        text = "the runs do not say their load: they are taken for repeats of one"
        found.append(Note("warning", "repeats", text))
    return list(dict.fromkeys(found))
