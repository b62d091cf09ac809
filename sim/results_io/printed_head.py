"""What stands above a report of ours (`sim.output.report`): what ran, and whether its figures may be used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sim.provenance import Note
from sim.results import Verdict

Status = Literal["VALID", "SUSPECT", "INVALID"]

# A report that is quoted, in a mail say, has its mark in front of every line.
_WHAT = re.compile(r"(?P<quote>[^\w\n]{0,8})(?P<origin>predicted|measured): (?P<what>.*)")
_VERDICT = re.compile(r"verdict: (VALID|SUSPECT|INVALID)\b")
_REASON = re.compile(r"  (?P<subject>\S[^:]*):(?: (?P<text>.*))?")
_VERSION = re.compile(r"v?\d[\w.+-]*")
_GPUS = re.compile(r"(?P<count>\d+) x (?P<gpu>.+)")
_ENGINES = ("vllm", "sglang")
_STATUSES: tuple[Status, ...] = ("VALID", "SUSPECT", "INVALID")


@dataclass(frozen=True, slots=True)
class Head:
    """The lines above a report of ours.

    Attributes:
        identity: engine, version, model and GPU, as far as they are told.
        verdict: with its reasons; None where a prediction was pasted without that line.
    """

    origin: Literal["predicted", "measured"]
    identity: Mapping[str, Any]
    verdict: Verdict | None


def read_head(preamble: str) -> Head | None:
    """The last head in what stands above a report; None where the report is of another client."""
    lines = preamble.splitlines()
    starts = [(i, match) for i, line in enumerate(lines) if (match := _WHAT.match(line))]
    if not starts:
        return None
    at, match = starts[-1]
    lines = [match["what"], *(line.removeprefix(match["quote"]) for line in lines[at + 1 :])]
    stop = next((i for i, line in enumerate(lines) if i and not line.startswith("  ")), len(lines))
    said = _VERDICT.match(lines[stop]) if stop < len(lines) else None
    verdict = None
    if said is not None:
        status = next(status for status in _STATUSES if status == said[1])
        verdict = Verdict(status, tuple(_reasons(lines[stop + 1 :])))
    if match["origin"] == "predicted":
        return Head("predicted", _subject(_joined(lines[:stop])), verdict)
    # Logs say "measured: " as well.
    return None if verdict is None else Head("measured", _subject(_joined(lines[:stop])), verdict)


def worse(one: Verdict, other: Verdict | None) -> Verdict:
    """The worse of two verdicts; the second if they are alike."""
    if other is None or _STATUSES.index(one.status) > _STATUSES.index(other.status):
        return one
    return other


def _subject(what: str) -> dict[str, Any]:
    """Engine, version, model and GPU; what may stand between the last two is the quantisation."""
    parts = [part.strip() for part in what.split(" · ")]
    if parts[0] not in _ENGINES:  # a tool, or a model of which no more is known
        return {}
    found: dict[str, Any] = {"engine": parts.pop(0)}
    if parts and _VERSION.fullmatch(parts[0]):
        found["engine_version"] = parts.pop(0)
    if parts:
        found["model"] = parts.pop(0)
    if parts:
        several = _GPUS.fullmatch(parts[-1])
        found["gpu"] = several["gpu"] if several else parts[-1]
        if several:
            found["gpu_count"] = int(several["count"])
    return found


def _reasons(lines: Iterable[str]) -> list[Note]:
    """`  subject: text`, what was wrapped four deep, up to the first other line."""
    wrapped: list[list[str]] = []
    for line in lines:
        if line.startswith("    ") and wrapped:
            wrapped[-1].append(line)
        elif _REASON.match(line):
            wrapped.append([line])
        else:
            break
    matches = (_REASON.match("  " + _joined(texts)) for texts in wrapped)
    return [Note("warning", match["subject"], match["text"] or "") for match in matches if match]


def _joined(lines: Sequence[str]) -> str:
    """Wrapped lines as one; a line that breaks at a hyphen goes on without a space."""
    text = ""
    for line in lines:
        text += ("" if not text or re.search(r"\w-$", text) else " ") + line.strip()
    return text
