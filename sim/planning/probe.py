"""One simulation of a load level, boiled down to what objectives are judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput, EngineStuck
from sim.figures.metrics import latencies
from sim.planning.cluster import Member, run_cluster
from sim.planning.mix import Traffic
from sim.planning.outcome import Outcome, boil_down, of_node
from sim.planning.router import RoundRobin
from sim.planning.slo import Slo, Slos
from sim.planning.traffic import requests_at
from sim.results import RequestRecords
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.steptime.base import StepTimeModel

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WARM_UP = 0.1  # share of a run's requests that meet an engine which is still filling up


@dataclass(frozen=True, slots=True)
class Level:
    """How much load: requests/s, or requests in flight."""

    kind: str  # "rate" or "concurrency"
    value: float

    def __str__(self) -> str:
        return f"{self.value:.3g} requests/s" if self.kind == "rate" else f"concurrency {self.value:.0f}"


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """A scenario at one load level under one seed; `part` of `parts` places windows of a trace.

    With `traffic`, its sessions are sent at the workload's rate until about `num_prompts` requests went out.
    """

    scenario: Scenario
    seed: int
    part: int = 0
    parts: int = 1
    step_time: StepTimeModel | None = None
    itl: bool = False
    skip: int = 0
    traffic: Traffic | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """What came of it: latencies [s] of the counted requests; a failed one has NaN.

    Latencies count from the schedule, as users wait, unless the load is a closed loop.

    Attributes:
        samples: "ttft", "tpot", "e2el": shape (counted requests,), NaN where there is none; "itl": pooled,
            present only if asked for.
        ok: shape (counted requests,).
    """

    outcome: Outcome
    samples: Mapping[str, Floats] = field(default_factory=dict)
    ok: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))


def at_level(scenario: Scenario, level: Level, num_prompts: int) -> Scenario:
    """The scenario under another load. An offered rate drops the client's cap: users do not wait for it."""
    spec = scenario.workload
    if level.kind == "rate":
        spec = replace(
            spec,
            request_rate=level.value,
            ramp_up=None,
            max_concurrency=None,
            num_prompts=num_prompts,
            duration=None,
        )
    else:
        spec = replace(
            spec,
            request_rate=float("inf"),
            ramp_up=None,
            use_trace_arrivals=False,
            max_concurrency=max(1, int(level.value)),
            num_prompts=num_prompts,
            duration=None,
        )
    return replace(scenario, workload=spec)


def run_probe(job: ProbeJob) -> Probe:
    """Simulate one load level."""
    scenario = replace(
        job.scenario, seed=job.seed, workload=replace(job.scenario.workload, seed=job.seed, goodput=())
    )
    if job.traffic is not None:
        return _run_traffic(job, scenario, job.traffic)
    try:
        requests = requests_at(scenario.workload, job.seed, job.part, job.parts)
        result = simulate(scenario, step_time=job.step_time, requests=requests)
    except (BadInput, EngineStuck) as error:
        return Probe(Outcome(failure=str(error)))
    records = result.result.records
    assert records is not None
    return _counted(boil_down(scenario, result), records, job, closed=scenario.workload.closed_loop)


def _run_traffic(job: ProbeJob, scenario: Scenario, traffic: Traffic) -> Probe:
    """Sessions on one replica: turns are sent when the simulation gets to them, so they cannot be listed."""
    spec = scenario.workload
    try:
        sessions = traffic.generate(job.seed, spec.request_rate, prompts=spec.num_prompts)
        member = Member(scenario, step_time=job.step_time)
        outcome = run_cluster([member], sessions, RoundRobin())
    except (BadInput, EngineStuck) as error:
        return Probe(Outcome(failure=str(error)))
    node = outcome.nodes[0]
    kept = of_node(scenario, outcome.records, node, outcome.duration)
    # After the last arrival only the tails of conversations are left, under an ever lighter load.
    until = sessions[-1].turns[0].arrival
    return _counted(kept, outcome.records, job, closed=False, until=until)


def _counted(
    outcome: Outcome,
    records: RequestRecords,
    job: ProbeJob,
    *,
    closed: bool,
    until: float = math.inf,
) -> Probe:
    """Leave out what met a filling engine (the first tenth, or the first wave), or came after `until`."""
    n = len(records)
    order = np.argsort(records.sent, kind="stable")
    skip = max(int(WARM_UP * n), min(job.skip, n // 2))
    keep = np.zeros(n, dtype=np.bool_)
    keep[order[skip:]] = True
    if (keep & (records.scheduled <= until)).any():
        keep &= records.scheduled <= until
    found = latencies(records)
    shift = 0.0 if closed else found.delay
    columns = {"ttft": found.ttft + shift, "tpot": found.tpot, "e2el": found.e2el + shift}
    samples: dict[str, Floats] = {}
    for name, values in columns.items():
        column = np.full(n, np.nan)
        column[found.ok] = values
        samples[name] = column[keep]
    if job.itl:
        owner = np.repeat(np.flatnonzero(found.ok), np.diff(records.itl_offsets)[found.ok])
        samples["itl"] = np.asarray(found.itl)[keep[owner]]
    return Probe(outcome, samples, found.ok[keep])


def value_of(slo: Slo, probes: Sequence[Probe]) -> float | None:
    """The statistic of an objective over the pooled requests of all probes [s]; None if there is no sample.

    A failed request is a miss: it counts as endless in a percentile (not in TPOT and ITL, which it lacks).
    """
    parts = []
    for probe in probes:
        column = probe.samples.get(slo.metric)
        if column is None:
            return None
        if slo.metric in ("ttft", "e2el") and not slo.mean:
            column = np.where(probe.ok, column, np.inf)
        parts.append(column[~np.isnan(column)])
    pooled = np.concatenate(parts) if parts else np.empty(0)
    if not len(pooled):
        return None
    if slo.mean:
        return float(pooled.mean())
    return _percentile(pooled, slo.percentile or 0.0)


def _percentile(values: Floats, q: float) -> float:
    """Linear percentile of values of which some may be inf."""
    position = (len(values) - 1) * q / 100.0
    k = math.floor(position)
    ordered = np.partition(values, [k, min(k + 1, len(values) - 1)])
    low, high = float(ordered[k]), float(ordered[min(k + 1, len(values) - 1)])
    return low if position == k or low == high else low + (high - low) * (position - k)


def attainment(slos: Slos, probes: Sequence[Probe]) -> float | None:
    """Share of all counted requests that keep every limit; failures are misses, a missing TPOT keeps its.

    As `vllm bench serve` counts goodput (limits included), over all requests that were sent.
    """
    good = total = 0
    for probe in probes:
        kept = probe.ok.copy()
        for slo in slos.limits:
            column = probe.samples[slo.metric]
            late = column >= slo.limit if slo.strict else column > slo.limit
            kept &= ~late
        good += int(kept.sum())
        total += len(kept)
    return good / total if total else None


def load_ratio(slos: Slos, probes: Sequence[Probe]) -> float:
    """How far the worst objective is used up: above 1 it is missed. inf if anything failed to run.

    For goodput, the ratio is that of the latency at the wanted share to its limit, so that it moves
    smoothly with load.
    """
    if any(p.outcome.failure is not None for p in probes):
        return float("inf")
    worst = 0.0
    for slo in slos.statistics:
        value = value_of(slo, probes)
        if value is not None:
            worst = max(worst, value / slo.limit)
    if slos.goodput is not None:
        worst = max(worst, _goodput_ratio(slos, probes))
    return worst


def _goodput_ratio(slos: Slos, probes: Sequence[Probe]) -> float:
    """The wanted quantile of each request's worst latency over its limit."""
    parts = []
    for probe in probes:
        worst = np.zeros(len(probe.ok))
        for slo in slos.limits:
            used = probe.samples[slo.metric] / slo.limit
            worst = np.maximum(worst, np.nan_to_num(used, nan=0.0))
        parts.append(np.where(probe.ok, worst, np.inf))
    pooled = np.sort(np.concatenate(parts)) if parts else np.empty(0)
    if not len(pooled) or slos.goodput is None:
        return 0.0
    # The smallest value that at least the wanted share of requests keep.
    rank = max(0, int(np.ceil(slos.goodput * len(pooled) - 1e-9)) - 1)
    return float(pooled[rank])
