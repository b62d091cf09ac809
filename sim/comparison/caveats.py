"""What either side of a comparison says against itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sim.comparison.facts import tells_load
from sim.comparison.work import sent_of
from sim.provenance import Note
from sim.results import BenchResult


def caveats(predicted: BenchResult, repeats: Sequence[BenchResult], sides: tuple[str, str]) -> list[Note]:
    """What either side says against itself: warnings, doubts about a run, failures that are allowed.

    Why a measured run is INVALID is not among it: that forbids a comparison.
    """
    told = [note for note in predicted.notes if note.kind == "warning" or note.subject == "--replay"]
    reasons = predicted.verdict.reasons
    if predicted.verdict.status == "INVALID":
        told += [replace(reason, subject=f"INVALID: {reason.subject}") for reason in reasons]
    elif predicted.verdict.status == "SUSPECT":
        told += reasons
    found = [
        note if note.subject == "--replay" else replace(note, text=f"{sides[0]}: {note.subject}: {note.text}")
        for note in [*told, *_failures(predicted)]
    ]
    doubts: dict[tuple[str, int], list[str]] = {}
    for run in repeats:
        seen: Counter[str] = Counter()
        for note in dict.fromkeys(_against(run)):
            doubts.setdefault((note.subject, seen[note.subject]), []).append(note.text)
            seen[note.subject] += 1
    for (subject, _), texts in doubts.items():
        more = f" (and {len(texts) - 1} more of the runs)" if len(texts) > 1 else ""
        found.append(Note("warning", subject, f"{sides[1]}: {subject}: {texts[0]}{more}"))
    if len(repeats) > 1 and not tells_load(repeats[0].identity) and not repeats[0].identity.get("workload"):
        text = "the runs do not say their load: they are taken for repeats of one"
        found.append(Note("warning", "repeats", text))
    return list(dict.fromkeys(found))


def _against(run: BenchResult) -> list[Note]:
    """A measured run's doubts and warnings."""
    reasons = run.verdict.reasons if run.verdict.status == "SUSPECT" else ()
    return [*reasons, *(note for note in run.notes if note.kind == "warning"), *_failures(run)]


def _failures(run: BenchResult) -> list[Note]:
    """That requests failed, fewer than make a run INVALID."""
    failed, sent = run.aggregates.get("failed"), sent_of(run.aggregates)
    if not failed or not sent or any(reason.subject == "failures" for reason in run.verdict.reasons):
        return []
    text = f"{failed:,.0f} of {sent:,.0f} requests failed; the figures are those of the others"
    return [Note("warning", "failures", text)]
