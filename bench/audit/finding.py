"""Questions that an audit answers in order, its findings, and the verdict that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "unknown", "care", "stop"]
VerdictName = Literal["comparable", "comparable with care", "not comparable"]

QUESTIONS: Mapping[str, str] = {
    "failures": "Did every request get an answer?",
    "input": "Same input distribution?",
    "client": "Same client and endpoint?",
    "dimensions": "One dimension changed, or several?",
    "percentiles": "Percentiles, KV use and preemptions read together?",
    "warmup": "Warm-ups, or a cold start in the window?",
    "cache": "Prefix cache warm from an earlier run?",
    "samples": "Enough samples?",
    "client_limited": "Did the client hold the load back?",
    "saturated": "Saturated, so that TTFT measures the length of the test?",
    "capacity": "More concurrency than the KV cache admits?",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer.

    Attributes:
        question: key of `QUESTIONS`.
        level: "ok"; "note" and "unknown" leave the verdict alone; "care" and "stop" do not.
        title: the answer in a few words.
        evidence: the figures behind it.
        effect: how much it changes, in numbers.
        instead: what to run instead, or what to add.
        runs: names of the runs it is about; empty for all.
    """

    question: str
    level: Level
    title: str
    evidence: str
    effect: str = ""
    instead: str = ""
    runs: tuple[str, ...] = ()


def verdict(findings: Iterable[Finding]) -> VerdictName:
    """What the findings add up to: the worst of them decides."""
    levels = {finding.level for finding in findings}
    if "stop" in levels:
        return "not comparable"
    return "comparable with care" if "care" in levels else "comparable"


def exit_status(name: VerdictName, *, strict: bool) -> int:
    """0; 3 if not comparable; with `strict` 1 if comparable only with care."""
    if name == "not comparable":
        return 3
    return 1 if strict and name == "comparable with care" else 0


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of the questions; within one, the gravest first."""
    keys = list(QUESTIONS)
    grades: list[Level] = ["stop", "care", "note", "unknown", "ok"]
    return sorted(findings, key=lambda f: (keys.index(f.question), grades.index(f.level)))
