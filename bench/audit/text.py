"""Findings as people read them, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.audit.facts import Run
from bench.audit.finding import QUESTIONS, Finding, Level, VerdictName

WIDTH = 100
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "unknown": "unknown", "care": "CARE", "stop": "STOP"}


def render(runs: Sequence[Run], findings: Sequence[Finding], name: VerdictName) -> str:
    """The audit as text: verdict first, then the questions in order."""
    lines = [f"{name.upper()}", *(f"  {run.name}: {_about(run)}" for run in runs)]
    number = 0
    for key, question in QUESTIONS.items():
        own = [finding for finding in findings if finding.question == key]
        if not own:
            continue
        number += 1
        lines += ["", f"{number}. {question}"]
        for finding in own:
            lines += _block(finding)
    return "\n".join(lines)


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
