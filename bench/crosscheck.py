"""The same run seen from both ends: where client and server disagree, one of them is not to be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.histogram import Histogram, Trust, check_against_client
from bench.metrics import ServerView
from sim.figures.metrics import latencies
from sim.provenance import Note
from sim.results import RequestRecords

_SHARE = 0.01
QUANTILES = (0.5, 0.9, 0.99)


def cross_check(records: RequestRecords, view: ServerView, *, probes: int = 0) -> tuple[Note, ...]:
    """Compare counts and latencies; a note "invalid" would invalidate, "warning" makes a run suspect.

    Args:
        records: of the client.
        view: the server's growth over the same time.
        probes: requests that the client sent beside the recorded ones (one for a chat template).
    """
    notes: list[Note] = []
    ok = np.array([status == "ok" for status in records.status], dtype=bool)
    finished = view.counters.get("finished")
    clean = bool(ok.all())
    if finished is not None:
        seen = len(records) + probes
        if finished > seen + max(2, _SHARE * seen):
            notes.append(
                Note(
                    "warning",
                    "other_load",
                    f"the server finished {finished:.0f} requests, {seen} of them ours: it had other clients",
                )
            )
        elif clean and finished < seen:
            notes.append(
                Note(
                    "warning",
                    "finished",
                    f"the client got {seen} good answers, the server counts {finished:.0f} finished requests",
                )
            )
    generated = view.counters.get("generation_tokens")
    counted = records.output_len[ok]
    if clean and generated is not None and (counted >= 0).all():
        client = int(counted.sum())
        if abs(generated - client) > max(probes, _SHARE * client):
            notes.append(
                Note(
                    "warning",
                    "output_tokens",
                    f"the client counts {client} output tokens, the server {generated:.0f}",
                )
            )
    for figure, trust in trust_histograms(records, view).items():
        if not trust.trusted:
            shown = "unknown" if trust.server_mean is None else f"{trust.server_mean * 1e3:.3g} ms"
            reasons = ", ".join(trust.reasons)
            notes.append(Note("info", f"server_{figure}", f"not to be trusted (mean {shown}: {reasons})"))
    if view.imbalance is not None and view.imbalance > 1.2:
        notes.append(
            Note(
                "warning",
                "imbalance",
                f"the busiest of {view.engines} engines made {view.imbalance:.2f} times its share of tokens",
            )
        )
    return tuple(notes)


def trust_histograms(records: RequestRecords, view: ServerView) -> dict[str, Trust]:
    """Whether the server's TTFT and E2E histograms agree with the client's own figures."""
    own = latencies(records)
    trusts: dict[str, Trust] = {}
    for figure, seconds in (("ttft", own.ttft), ("e2e", own.e2el)):
        histogram = view.histograms.get(figure)
        if histogram is not None and histogram.count > 0:
            trusts[figure] = check_against_client(
                histogram,
                client_mean=float(np.mean(seconds)) if len(seconds) else None,
                client_count=len(seconds),
            )
    return trusts


def describe(view: ServerView, trusts: Mapping[str, Trust]) -> dict[str, Any]:
    """The server's figures, JSON-ready: means exact, quantiles as the interval that the buckets allow [s].

    Quantiles are percentiles as clients define them, so that they may stand beside a client's.
    """
    figures: dict[str, Any] = {}
    for figure, histogram in view.histograms.items():
        trust = trusts.get(figure)
        figures[figure] = {
            "count": histogram.count,
            "mean_s": histogram.mean,
            "trusted": None if trust is None else trust.trusted,
            "reasons": [] if trust is None else list(trust.reasons),
            # A refused histogram keeps its count and mean, as evidence; its quantiles would be quoted.
            "quantiles": _quantiles(histogram) if trust is None or trust.trusted else None,
        }
    return {
        "engines": view.engines,
        "restarted": view.restarted,
        "counters": dict(view.counters),
        "prefix_hit_rate": view.prefix_hit_rate,
        "histograms": figures,
        "per_engine": {engine: dict(values) for engine, values in view.per_engine.items()},
        "missing": list(view.missing),
    }


def _quantiles(histogram: Histogram) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for q in QUANTILES:
        interval = histogram.percentile(q)
        if interval is not None:
            censored = interval.censored_at_least
            found[f"p{100 * q:g}"] = {
                "low_s": interval.low,
                "high_s": None if censored is not None else interval.high,
                "estimate_s": interval.estimate,
                "at_least_s": censored,
            }
    return found
