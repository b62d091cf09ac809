"""Objectives at one level of load: their values, what is missed first, and what blocks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.planning.probe import Probe, attainment, value_of
from sim.planning.slo import Slos

_PART_WORDS = {
    "front_end": "the front end",
    "queue": "the queue",
    "prefill": "its prefill",
    "stream": "delivery of the first token",
}
_DEVICE_WORDS = {
    "bandwidth": "memory bandwidth (weights and KV are read for every token)",
    "compute": "compute",
    "overhead": "per-step overhead",
    "host": "host work between steps",
}


@dataclass(frozen=True, slots=True)
class Promise:
    """One objective at one level: its value, its limit, and how much of it is used (1 is all)."""

    what: str
    value: float | None
    limit: float
    used: float | None


def promises(slos: Slos, probes: Sequence[Probe]) -> tuple[Promise, ...]:
    """Every objective's value over pooled probes."""
    told = []
    for slo in slos.statistics:
        value = value_of(slo, probes)
        told.append(Promise(slo.statistic, value, slo.limit, None if value is None else value / slo.limit))
    if slos.goodput is not None:
        share = attainment(slos, probes)
        missed = None if share is None else (1.0 - share) / max(1.0 - slos.goodput, 1e-9)
        told.append(Promise("goodput", share, slos.goodput, missed))
    return tuple(told)


def binding(slos: Slos, probes: Sequence[Probe]) -> str:
    """What is missed most; "stability" if no objective is."""
    told = [p for p in promises(slos, probes) if p.used is not None]
    worst = max(told, key=lambda p: p.used or 0.0, default=None)
    if worst is None or (worst.used or 0.0) <= 1.0:
        return "stability"
    return worst.what


def blocked_by(what: str, light: Probe) -> str:
    """Why one request alone already misses an objective."""
    parts, device = light.outcome.parts_ms, light.outcome.device
    if "TTFT" in what:
        known = {k: v for k, v in parts.items() if v is not None and k != "client_wait"}
        largest = max(known, key=lambda k: known[k])
        return f"a request alone spends {known[largest]:.3g} ms of its TTFT in {_PART_WORDS[largest]}"
    busy = {k: v for k, v in device.items() if k != "idle"}
    largest = max(busy, key=lambda k: busy[k]) if busy else "overhead"
    tpot = light.outcome.get("mean_tpot_ms")
    pace = "" if tpot is None else f"a request alone gets one token per {tpot:.3g} ms, "
    return f"{pace}bound by {_DEVICE_WORDS.get(largest, largest)}"
