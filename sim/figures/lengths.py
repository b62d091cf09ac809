"""Whether the tokens that were counted are the tokens that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.provenance import Note

MAX_MEAN_DRIFT = 1.0  # percent
MAX_SINGLE_DRIFT = 5.0  # percent
MAX_RETOKENISE_DRIFT = 2.0  # percent


@dataclass(frozen=True, slots=True)
class LengthDrift:
    """How far prompt lengths counted by the server lie from those asked for [percent]."""

    mean_requested: float
    mean_actual: float
    mean_drift_pct: float
    max_drift_pct: float
    notes: tuple[Note, ...]


def length_drift(requested: Sequence[int], actual: Sequence[int]) -> LengthDrift | None:
    """Compare lengths request by request; None without requests. A prediction belongs to the actual ones."""
    asked, got = np.asarray(requested, dtype=np.float64), np.asarray(actual, dtype=np.float64)
    if not len(asked):
        return None
    mean = float((got.mean() / asked.mean() - 1.0) * 100.0)
    largest = float(np.max(np.abs(got / asked - 1.0)) * 100.0)
    notes = []
    if abs(mean) > MAX_MEAN_DRIFT:
        notes.append(
            Note("warning", "prompt length", f"mean drift {mean:+.1f} % (limit {MAX_MEAN_DRIFT:g} %)")
        )
    if largest > MAX_SINGLE_DRIFT:
        text = f"largest drift {largest:.1f} % (limit {MAX_SINGLE_DRIFT:g} %)"
        notes.append(Note("warning", "prompt length", text))
    return LengthDrift(float(asked.mean()), float(got.mean()), mean, largest, tuple(notes))


@dataclass(frozen=True, slots=True)
class OutputCount:
    """Output tokens of a request and who counted them: "server_usage" or "estimated"."""

    tokens: int
    source: str
    notes: tuple[Note, ...]


def output_count(usage: int | None, retokenised: int | None) -> OutputCount | None:
    """The server's count where there is one; a client's re-tokenised text is an estimate; None: neither."""
    if usage is None:
        return None if retokenised is None else OutputCount(retokenised, "estimated", ())
    notes: tuple[Note, ...] = ()
    if retokenised is not None and abs(retokenised - usage) * 100.0 > MAX_RETOKENISE_DRIFT * max(usage, 1):
        text = f"the server counted {usage} tokens, re-tokenising the text gives {retokenised}"
        notes = (Note("warning", "output length", text),)
    return OutputCount(usage, "server_usage", notes)
