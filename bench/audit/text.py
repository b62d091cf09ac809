"""Findings as people read them, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.audit.facts import Run
from bench.audit.finding import QUESTIONS, Finding, Level, VerdictName

WIDTH = 100
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "unknown": "unknown", "care": "CARE", "stop": "STOP"}


def render(runs: Sequence[Run], findings: Sequence[Finding], name: VerdictName) -> str:
    """The audit as text: verdict first, then the questions in order, each with a number of its own.

    What is found of several runs is said once.
    """
    lines = [f"{name.upper()}", *(f"  {run.name}: {_about(run)}" for run in runs)]
    labels = {run.name: run.label for run in runs}
    open_ = []
    for number, (key, question) in enumerate(QUESTIONS.items(), 1):
        own = [finding for finding in findings if finding.question == key]
        if not own:
            open_.append(f"{number} ({question.rstrip('?')})")
            continue
        lines += ["", f"{number}. {question}"]
        for finding in said_once(own, labels):
            lines += _block(finding)
    if open_:
        lines += ["", *_wrap(f"nothing in these files answers {', '.join(open_)}", 2)]
    return "\n".join(lines)


def said_once(findings: Sequence[Finding], labels: Mapping[str, str]) -> list[Finding]:
    """Findings of the same level, title and advice as one, with what is each run's own beside its label.

    Args:
        labels: of the runs, by name; evidence of one run begins with it.
    """
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.title, finding.instead), []).append(finding)
    return [
        group[0]
        if len(group) == 1
        else replace(
            group[0],
            evidence=_joined([_parted(f, f.evidence, labels) for f in group]),
            effect=_joined([_parted(f, f.effect, labels) for f in group if f.effect], only_differing=True),
            runs=tuple(dict.fromkeys(name for f in group for name in f.runs)),
        )
        for group in groups.values()
    ]


def _parted(finding: Finding, text: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """(the run's label, or its name where others have that label too; what is said of it)."""
    if len(finding.runs) != 1 or finding.runs[0] not in labels:
        return "", text
    name, label = finding.runs[0], labels[finding.runs[0]]
    shared = list(labels.values()).count(label) > 1
    return name if shared else label, text.removeprefix(f"{label}: ")


def _joined(parts: Sequence[tuple[str, str]], *, only_differing: bool = False) -> str:
    """`a and b: same; c: other`; without labels where all are the same and `only_differing`."""
    by_text: dict[str, list[str]] = {}
    for label, text in parts:
        by_text.setdefault(text, []).append(label)
    if only_differing and len(by_text) == 1:
        return next(iter(by_text))
    told = []
    for text, labels in by_text.items():
        who = [label for label in labels if label]
        told.append(f"{_listed(who)}: {text}" if who else text)
    return "; ".join(told)


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _about(run: Run) -> str:
    parts = [run.label] if run.label != run.name else []
    if run.completed is not None:
        parts.append(f"{run.completed} requests")
    keys = ("engine", "engine_version", "model", "gpu")
    parts += [str(run.engine[key]) for key in keys if key in run.engine]
    if run.log is not None:
        parts.append("start-up log")
    if run.view is not None:
        parts.append("/metrics before and after" if run.paired else "/metrics since start-up")
    return ", ".join(parts) or "no figures"


def _block(finding: Finding) -> list[str]:
    lines = _wrap(f"   {_MARKS[finding.level]:<8}{finding.title}: {finding.evidence}", 11)
    for label, text in (("effect", finding.effect), ("instead", finding.instead)):
        if text:
            lines += _wrap(f"           {label}: {text}", 13)
    return lines


def _wrap(text: str, indent: int) -> list[str]:
    lead = len(text) - len(text.lstrip())
    return textwrap.wrap(
        text.strip(),
        WIDTH,
        initial_indent=" " * lead,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def document(
    runs: Sequence[Run], findings: Sequence[Finding], name: VerdictName, status: int
) -> dict[str, Any]:
    """The audit, JSON-ready."""
    return {
        "verdict": name,
        "exit_status": status,
        "runs": [
            {
                "name": run.name,
                "label": run.label,
                "completed": run.completed,
                "max_concurrency": run.concurrency,
                "kv_cache_tokens": run.kv_tokens,
                "fits": run.fits(),
                "in_flight": run.in_flight,
                "queue_share_of_ttft": run.queue_share(),
                "preemptions": run.preemptions,
            }
            for run in runs
        ],
        "findings": [asdict(finding) for finding in findings],
    }
