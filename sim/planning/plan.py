"""One planning question from objectives to costs: what `servecast plan` answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sim.build import ScenarioSource
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.planning.capacity import Capacity, capacity
from sim.planning.daily import DailyProfile, DayOfReplicas, day_of_replicas
from sim.planning.hardware import Candidate, OperatingPoint, candidates, operating_points, requests_per_load
from sim.planning.load_curve import Effort
from sim.planning.mix import Traffic
from sim.planning.pool import Pool, run_here
from sim.planning.prices import Cost, Prices, cost
from sim.planning.sizing import Sizing, size
from sim.planning.slo import Slos
from sim.profile import Profile


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        kind: "rate" or "concurrency".
        rate: the load wanted in all [requests/s], or None for "how much does one replica carry".
        peak_factor: peak over mean of the wanted load.
        gpus, tps: hardware to compare; empty for the scenario's own.
        daily: how the wanted load goes over the day; its busiest hour is the peak.
        traffic: tenants and sessions instead of the scenario's load.
        utilisation: the share of the capacity that is really used, for costs without a wanted rate.
    """

    slos: Slos
    kind: str = "rate"
    rate: float | None = None
    peak_factor: float = 1.0
    gpus: tuple[str, ...] = ()
    tps: tuple[int, ...] = ()
    prices: Prices | None = None
    daily: DailyProfile | None = None
    traffic: Traffic | None = None
    utilisation: float = 1.0
    effort: Effort = field(default_factory=Effort)
    with_error: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What came out; `candidates` and `points` are empty unless hardware was compared or priced.

    `billed`: whose costs `bill` tells; of several candidates the cheapest one's.
    """

    question: Question
    source: ScenarioSource
    found: Capacity | None
    sizing: Sizing | None
    bill: Cost | None
    candidates: tuple[Candidate, ...] = ()
    points: tuple[OperatingPoint, ...] = ()
    day: DayOfReplicas | None = None
    billed: Candidate | None = None


def make_plan(
    source: ScenarioSource,
    question: Question,
    *,
    pool: Pool = run_here,
    profile: Profile | None = None,
) -> Plan:
    """Answer the question.

    Raises:
        BadInput: a scenario that cannot run, an unknown GPU, a GPU without a price, or options that ask for
            different things.
    """
    compares = bool(question.gpus or question.tps)
    if question.kind == "concurrency":
        if question.rate is not None:
            raise BadInput("--rate", question.rate, "asks for replicas by rate; leave out --load concurrency")
        if question.traffic is not None:
            raise BadInput("--load", "concurrency", "is of a client's load; leave out --traffic")
        if compares:
            raise BadInput("--load", "concurrency", "hardware is compared by rate; leave out --gpus and --tp")
    if question.daily is not None and compares:
        raise BadInput("--daily", None, "is sized for one kind of replica; leave out --gpus and --tp")
    if question.daily is not None and question.rate is None:
        raise BadInput("--daily", None, "shapes a wanted load; give its mean with --rate")
    if compares:
        return _compare(source, question, pool, profile)
    scenario = source.build()
    if question.prices is not None:
        question.prices.of(scenario.gpu.name)
    found = capacity(
        scenario,
        question.slos,
        kind=question.kind,
        effort=question.effort,
        pool=pool,
        profile=profile,
        traffic=question.traffic,
        with_error=question.with_error,
    )
    sizing = None if question.rate is None else size(found, question.rate, question.peak_factor)
    points: list[OperatingPoint] = []
    only = Candidate(scenario.gpu.name, scenario.gpu.name, scenario.gpu_count, found, None, sizing)
    if question.prices is not None and question.kind == "rate":
        points = operating_points([only], question.prices, question.rate)
    day = None
    if question.daily is not None and question.rate is not None and sizing is not None:
        day = day_of_replicas(sizing.per_replica, question.rate, question.daily)
    bill = _bill(question, found, sizing)
    return Plan(question, source, found, sizing, bill, (), tuple(points), day, only)


def _compare(source: ScenarioSource, question: Question, pool: Pool, profile: Profile | None) -> Plan:
    names: list[str] = []
    for gpu in question.gpus or (source.gpu,):  # what is misspelt or unpriced is said before all the work
        name = find_gpu(gpu)[0].name
        if name in names:
            raise BadInput("--gpus", gpu, f"is {name}, which is named already")
        names.append(name)
        if question.prices is not None:
            question.prices.of(name)
    found = candidates(
        source,
        question.gpus,
        question.tps,
        question.slos,
        effort=question.effort,
        pool=pool,
        profile=profile,
        rate=question.rate,
        peak_factor=question.peak_factor,
        traffic=question.traffic,
        with_error=question.with_error,
    )
    points = operating_points(found, question.prices, question.rate) if question.prices is not None else []
    billed, bill = _cheapest(question, found)
    return Plan(question, source, None, None, bill, tuple(found), tuple(points), None, billed)


def _cheapest(question: Question, found: Sequence[Candidate]) -> tuple[Candidate | None, Cost | None]:
    """The candidate with the lowest bill: an hour of the replicas for the wanted rate, else a token."""
    bills = [(c, bill) for c in found if c.found and (bill := _bill(question, c.found, c.sizing))]
    by_hour = question.rate is not None

    def price(entry: tuple[Candidate, Cost]) -> float:
        bill = entry[1]
        return bill.per_hour if by_hour else bill.per_1m_output or math.inf

    return min(bills, key=price, default=(None, None))


def _bill(question: Question, found: Capacity, sizing: Sizing | None) -> Cost | None:
    """The bill of the recommended replicas at the wanted rate, or of one replica at the given share."""
    if question.prices is None or found.level is None or found.request_rate <= 0:
        return None
    if question.rate is not None and sizing is None:
        return None
    scenario = found.scenario
    replicas, share = 1, question.utilisation
    if sizing is not None:
        replicas = sizing.recommended
        share = sizing.rate / (replicas * found.level.value)
    requests = found.request_rate
    if question.kind == "rate":  # as planned: what a run of few requests really sent differs a little
        requests = found.level.value * requests_per_load(found)
    scale = replicas * requests / found.request_rate
    return cost(
        question.prices.of(scenario.gpu.name),
        scenario.gpu_count * replicas,
        input_rate=found.input_rate * scale,
        output_rate=found.output_rate * scale,
        request_rate=found.request_rate * scale,
        utilisation=share,
        currency=question.prices.currency,
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan, JSON-ready."""
    return {
        "question": {
            "objectives": str(plan.question.slos),
            "load": plan.question.kind,
            "rate": plan.question.rate,
            "peak_factor": plan.question.peak_factor,
            "prompts": plan.question.effort.prompts,
            "replications": plan.question.effort.replications,
        },
        "capacity": None if plan.found is None else capacity_to_dict(plan.found),
        "sizing": None
        if plan.sizing is None
        else {**asdict(plan.sizing), "uncertain": plan.sizing.uncertain},
        "cost": None if plan.bill is None else asdict(plan.bill),
        "cost_of": None if plan.bill is None or plan.billed is None else plan.billed.name,
        "candidates": [
            {
                "name": c.name,
                "gpu": c.gpu,
                "gpus_per_replica": c.gpus_per_replica,
                "failure": c.failure,
                "capacity": None if c.found is None else capacity_to_dict(c.found),
                "sizing": None if c.sizing is None else asdict(c.sizing),
            }
            for c in plan.candidates
        ],
        "day": None if plan.day is None else asdict(plan.day),
        "operating_points": [asdict(p) for p in plan.points],
    }


def capacity_to_dict(found: Capacity) -> dict[str, Any]:
    """One capacity, JSON-ready."""
    use = found.use
    return {
        "value": None if found.level is None else found.level.value,
        "low": found.low,
        "high": found.high,
        "model_low": found.model_low,
        "model_high": found.model_high,
        "model_error": asdict(found.error),
        "saturation_rate": found.saturation,
        "binding": found.binding,
        "cause": asdict(found.cause),
        "read_at": found.kept.value,
        "promises": [asdict(p) for p in found.promises],
        "missed_at": None if found.missed is None else found.missed.value,
        "beyond": [asdict(p) for p in found.beyond],
        "use": None
        if use is None
        else {"shares": dict(use.shares), "binding": use.binding, "headroom": use.headroom},
        "request_rate": found.request_rate,
        "input_token_rate": found.input_rate,
        "output_token_rate": found.output_rate,
        "readings": [r._asdict() for r in found.readings],
        "notes": [asdict(n) for n in found.notes],
    }
