"""Whether a measured run may be used: VALID, SUSPECT or INVALID, with the reasons.

INVALID: the figures do not describe the planned load on a healthy server, and must not enter a fit.
SUSPECT: they may, but something limits what they are good for. One check, one function; each returns notes
and whether they invalidate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from bench.overhead import ClientLimit
from sim.figures.quantiles import percentile_word, supported
from sim.figures.regime import regime
from sim.provenance import Note
from sim.request import Request, SegmentKey
from sim.results import BenchResult, RequestRecords, Verdict
from sim.secrets import without_secrets
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset, WorkloadSpec

MIN_SUCCESS = 0.99
MEAN_DRIFT = 0.01  # of lengths, asked for against counted
MAX_DRIFT = 0.05
WARM_HITS = 0.01  # of prompt tokens, where no prompt shares a beginning with another
COLD_FACTOR = 3.0
COLD_FLOOR = 0.5  # s
SHOWN = 200  # characters of a server's own words
SEVERITY: tuple[Literal["INVALID", "SUSPECT", "VALID"], ...] = ("INVALID", "SUSPECT", "VALID")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known beyond the records; None is unknown.

    Attributes:
        min_success: share of good answers below which the run is INVALID.
        client_limit: whether the load generator kept its plan.
        interrupted: the run was cut short from outside.
        warmup_failures: what went wrong with warm-ups.
        prefix_queries, prefix_hits: growth of the server's prefix-cache counters over the run [tokens].
        engine_restarted: the engine's process or its counters began anew during the run.
        engine_died: it was gone at the end; in a few words how.
        server_notes: findings of whoever watched the server; kind "invalid" invalidates.
    """

    min_success: float = MIN_SUCCESS
    client_limit: ClientLimit | None = None
    interrupted: bool = False
    warmup_failures: tuple[str, ...] = ()
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    engine_restarted: bool | None = None
    engine_died: str = ""
    server_notes: tuple[Note, ...] = field(default=())


Grade = Literal["SUSPECT", "INVALID"]
Finding = tuple[Grade, Note]
# What followed a beginning: segment key -> its length -> what followed that.
_Node = dict[SegmentKey, dict[int, "_Node"]]
Check = Callable[[BenchResult, RequestRecords, WorkloadSpec, Evidence], list[Finding]]


def judge(result: BenchResult, spec: WorkloadSpec, evidence: Evidence) -> BenchResult:
    """`result` with the verdict that its records and the evidence allow.

    Verdicts only get worse: judging again, with evidence that came later, adds to what was found before.
    Records are read for what the run planned in `result.extra`: `requests.asked_prompt` and
    `requests.asked_output`, `template_overhead`, `intended_prefix_hits`. A result without records is SUSPECT.
    """
    records = result.records
    findings: list[Finding]
    if records is None:
        findings = [_finding("SUSPECT", "records", "no figures per request: nothing could be checked")]
    else:
        findings = [finding for check in CHECKS for finding in check(result, records, spec, evidence)]
    before = result.verdict
    grades = {before.status, *(grade for grade, _ in findings)}
    findings.sort(key=lambda finding: finding[0] != "INVALID")
    reasons = tuple(note for _, note in findings)
    reasons += tuple(note for note in before.reasons if note not in reasons)
    for status in SEVERITY:
        if status in grades:
            return replace(result, verdict=Verdict(status, reasons))
    raise AssertionError("a verdict has one of three grades")


def _finding(grade: Grade, subject: str, text: str) -> Finding:
    return grade, Note("warning", subject, text)


def failures(result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence) -> list[Finding]:
    """Requests without a good answer, by class."""
    counts = Counter(records.status)
    failed = len(records) - counts["ok"]
    if not failed:
        return []
    classes = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok")
    rate = counts["ok"] / len(records)
    text = f"{failed} of {len(records)} requests failed ({classes}){_in_words(result, records)}"
    if counts["timeout"]:
        text += (
            "; those that timed out were at least as slow as their limit, and are missing from the figures"
        )
    return [_finding("INVALID" if rate < ev.min_success else "SUSPECT", "failures", text)]


def _in_words(result: BenchResult, records: RequestRecords) -> str:
    """What went wrong in the words of server or client: the commonest of each class, and how often."""
    details = result.extra.get("requests", {}).get("detail") or ()
    if len(details) != len(records):
        return ""
    told = Counter(
        (status, " ".join(detail.split()))
        for status, detail in zip(records.status, details, strict=True)
        if status != "ok" and detail
    )
    first: dict[str, str] = {}
    for (status, detail), count in told.most_common():
        first.setdefault(status, f'{status}: "{without_secrets(detail)[:SHOWN]}" ({count} times)')
    return "".join(f"; {text}" for _, text in sorted(first.items()))


def lengths(result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence) -> list[Finding]:
    """Prompt and output lengths: asked for against counted by the server."""
    asked = result.extra.get("requests", {})
    ok = np.array([status == "ok" for status in records.status], dtype=bool)
    findings: list[Finding] = []
    if not ok.any():
        return findings
    if "asked_prompt" in asked:
        planned = np.asarray(asked["asked_prompt"])[ok] + (result.extra.get("template_overhead") or 0)
        findings += _drift("prompt", planned, records.prompt_len[ok])
    if "asked_output" in asked and spec.ignore_eos:
        findings += _drift("output", np.asarray(asked["asked_output"])[ok], records.output_len[ok])
    return findings


def _drift(what: str, asked: np.ndarray, counted: np.ndarray) -> list[Finding]:
    known = counted >= 0
    if not known.any():
        return []
    drift = counted[known] / np.maximum(asked[known], 1) - 1.0
    mean, most = float(drift.mean()), float(np.abs(drift).max())
    if abs(mean) <= MEAN_DRIFT + 1e-9 and most <= MAX_DRIFT + 1e-9:
        return []
    text = f"{what} lengths differ from those asked for by {mean:+.1%} on average, {most:.1%} at most"
    return [_finding("SUSPECT", f"{what}_lengths", text + ": compare with the counted lengths")]


def warm_cache(
    result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence
) -> list[Finding]:
    """More prefix-cache hits than prompts of this load have in common."""
    queries, hits, source = ev.prefix_queries, ev.prefix_hits, "the server's counters"
    if queries is None or hits is None:
        told = records.cached_tokens >= 0
        queries, hits = int(records.prompt_len[told].sum()), int(records.cached_tokens[told].sum())
        source = "the answers"
    intended = result.extra.get("intended_prefix_hits")
    if intended is None:
        if shares_prefixes(spec):
            return []
        intended = 0
    intended += (result.extra.get("template_overhead") or 0) * len(records)
    if queries <= 0 or hits - intended < WARM_HITS * queries:
        return []
    text = (
        f"{hits / queries:.1%} of prompt tokens came from the prefix cache ({hits} of {queries}, by "
        f"{source}), {intended} of them meant to: use another seed, or reset the cache"
    )
    return [_finding("INVALID", "warm_cache", text)]


def shares_prefixes(spec: WorkloadSpec) -> bool:
    """Whether prompts of this load begin alike on purpose."""
    if isinstance(spec.dataset, RandomDataset):
        return spec.dataset.prefix_len > 0
    return isinstance(spec.dataset, PrefixRepetitionDataset) or spec.dataset.kind != "sharegpt"


def intended_prefix_hits(requests: Sequence[Request]) -> int:
    """Prompt tokens that a cache of all earlier prompts of this load could hold [tokens].

    An upper bound: engines cache whole blocks, compute at least the last token, and evict.
    """
    root: _Node = {}
    total = 0
    for request in requests:
        node: _Node | None = root
        for key, length in request.prompt:
            if node is None:
                break
            known = node.get(key)
            if known is None:
                break
            total += min(length, max(known))
            node = known.get(length)
        node = root
        for key, length in request.prompt:
            node = node.setdefault(key, {}).setdefault(length, {})
    return total


def client_limited(
    result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence
) -> list[Finding]:
    """The load generator too slow (INVALID), or holding back requests under its cap (SUSPECT)."""
    if ev.client_limit is None or ev.client_limit.cause is None:
        return []
    grade: Grade = "INVALID" if ev.client_limit.cause == "client" else "SUSPECT"
    return [(grade, note) for note in ev.client_limit.notes]


def cold_start(
    result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence
) -> list[Finding]:
    """A server that was silent at first for far longer than its later answers took.

    Later requests queue behind others, so their typical wait should be longer than the first of all, unless
    something was loaded, compiled or captured first. A first burst is prefilled in one step, and that takes
    at most as long as its requests would one by one: those whose first tokens come together count as one.
    """
    first, sent = records.first_token, records.sent
    known = ~(np.isnan(first) | np.isnan(sent))
    if int(known.sum()) < 4:
        return []
    begin = float(sent[known].min())
    silence = float(first[known].min()) - begin
    later = known & (sent > begin + silence)
    if not later.any():
        return []
    typical = float(np.median(first[later] - sent[later]))
    together = int((first[known] <= begin + silence + typical / 4).sum())
    if silence <= max(COLD_FACTOR, 1.5 * together) * typical or silence - typical <= COLD_FLOOR:
        return []
    text = (
        f"the first token took {silence:.2f} s, later ones {typical:.2f} s: the server warmed up within the "
        "run; use --num-warmups"
    )
    return [_finding("SUSPECT", "cold_start", text)]


def engine(result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence) -> list[Finding]:
    """What happened to the engine, and to the run, from outside."""
    findings = []
    if ev.engine_died:
        findings.append(_finding("INVALID", "engine_died", ev.engine_died))
    if ev.engine_restarted:
        findings.append(_finding("INVALID", "engine_restarted", "the engine began anew during the run"))
    if ev.interrupted:
        findings.append(
            _finding("INVALID", "interrupted", "the run was stopped before all was sent and answered")
        )
    if ev.warmup_failures:
        text = f"{len(ev.warmup_failures)} warm-ups failed, the first with {ev.warmup_failures[0]}"
        findings.append(_finding("SUSPECT", "warmups", text))
    return findings + [("INVALID" if note.kind == "invalid" else "SUSPECT", note) for note in ev.server_notes]


def small_sample(
    result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence
) -> list[Finding]:
    """Percentiles asked for that lie beyond the sample: fewer than one request on their far side."""
    n = records.status.count("ok")
    beyond = [q for q in spec.percentiles if not supported(n, q)]
    if not beyond or not n:
        return []
    names = ", ".join(f"P{percentile_word(q)}" for q in beyond)
    needed = math.ceil(100.0 / min(min(q, 100.0 - q) or 1.0 for q in beyond))
    text = f"{names} of {n} requests is little more than the slowest one: use at least {needed}"
    return [_finding("SUSPECT", "small_sample", text)]


def steadiness(
    result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence
) -> list[Finding]:
    """An open-loop load that outran the server: latencies then measure the length of the test."""
    state = regime(records, result.series, spec)
    return [
        ("SUSPECT", note) for note in state.notes if note.kind == "warning" and state.state == "saturated"
    ]


def peak(result: BenchResult, records: RequestRecords, spec: WorkloadSpec, ev: Evidence) -> list[Finding]:
    """A peak throughput below the average is impossible: somebody counted messages for tokens."""
    top, average = (result.aggregates.get(k) for k in ("max_output_tokens_per_s", "output_throughput"))
    if top is None or average is None or result.duration < 1.0 or top >= average * (1 - 1e-9):
        return []
    return [
        _finding(
            "SUSPECT", "peak", f"peak output {top:.4g} tok/s is below the average {average:.4g}: not shown"
        )
    ]


CHECKS: tuple[Check, ...] = (
    engine,
    failures,
    warm_cache,
    client_limited,
    lengths,
    cold_start,
    steadiness,
    small_sample,
    peak,
)
