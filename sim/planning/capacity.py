"""The highest load that a scenario sustains under objectives, with intervals, and what stands in the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from sim.errors import BadInput
from sim.figures.metrics import GOODPUT_NAMES
from sim.flood import flood_size
from sim.planning.bracket import Crossing, find_crossing
from sim.planning.daily import DailyProfile
from sim.planning.load_curve import Effort, LevelReading, LoadCurve
from sim.planning.margin import ModelError, model_error, other_models
from sim.planning.mechanism import QueueCause, pace_cause, queue_cause
from sim.planning.mix import Traffic
from sim.planning.pool import Pool, run_here
from sim.planning.probe import Level, Probe, ProbeJob, at_level, load_ratio, run_probe
from sim.planning.promises import Promise, binding, blocked_by, promises
from sim.planning.resources import Utilisation, shares_of, utilisation
from sim.planning.slo import Slos
from sim.planning.stats import estimate
from sim.profile import Profile
from sim.provenance import Note
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.base import StepTimeModel

LIGHT_PROMPTS = 200
SATURATING_PROMPTS = 600
SELDOM = 1e-3  # arrivals/s of traffic of which hardly anybody meets another


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer.

    Attributes:
        level: highest load that keeps everything; None if no load does.
        low, high: its 95 % interval over seeds.
        model_low, model_high: the same level if step times are longer or shorter by the model's error.
        saturation: load beyond which no queue is ever emptied, whatever the objectives [requests/s].
        promises: objectives just below the answer (or, if there is none, at the lightest load: the best that
            can be reached).
        binding: what is missed first; "stability" if the load itself.
        cause: what requests wait for there.
        traffic: whether the load was a traffic file's rather than the scenario's.
        pace: what sets the time between tokens there.
        use: resources in use there.
        input_rate, output_rate, request_rate: tokens/s and requests/s there.
        kept: the level that `promises` and `use` were read at.
        beyond: objectives just above the answer, at `missed`; empty where nothing gives way.
        missed: the level that `beyond` was read at.
        readings: what every level simulated showed, ascending.
        left_out: as in `Crossing`: what each seed does to the answer.
    """

    scenario: Scenario
    slos: Slos
    level: Level | None
    low: float | None
    high: float | None
    model_low: float | None
    model_high: float | None
    error: ModelError
    saturation: float | None
    promises: tuple[Promise, ...]
    binding: str
    cause: QueueCause
    use: Utilisation | None
    request_rate: float
    input_rate: float
    output_rate: float
    kept: Level
    replications: int
    notes: tuple[Note, ...]
    readings: tuple[LevelReading, ...] = ()
    pace: str = ""
    traffic: bool = False
    beyond: tuple[Promise, ...] = ()
    missed: Level | None = None
    left_out: tuple[float, ...] = ()

    def used_at(self, load: float) -> float | None:
        """Share of the worst objective used at a load, between the simulated levels; None outside them."""
        for (a, ra, _), (b, rb, _) in pairwise(self.readings):
            if a <= load <= b and ra > 0 and math.isfinite(rb) and rb > 0:
                share = (load - a) / (b - a)
                return math.exp(math.log(ra) + share * (math.log(rb) - math.log(ra)))
        if self.readings and load < self.readings[0][0]:
            return self.readings[0].used  # no worse than at the lightest level that was simulated
        return None

    @property
    def certain(self) -> tuple[float, float] | None:
        """Ends of seeds' and model's intervals together."""
        if self.level is None:
            return None
        ends = [v for v in (self.low, self.high, self.model_low, self.model_high) if v is not None]
        return (min(ends), max(ends)) if ends else (self.level.value, self.level.value)

    @property
    def covers(self) -> str:
        """What `certain` covers, in words."""
        return "seeds" if self.model_low is None and self.model_high is None else "seeds and model"


def capacity(
    scenario: Scenario,
    slos: Slos,
    *,
    kind: str = "rate",
    effort: Effort | None = None,
    pool: Pool = run_here,
    step_time: StepTimeModel | None = None,
    profile: Profile | None = None,
    traffic: Traffic | None = None,
    error: ModelError | None = None,
    with_error: bool = True,
) -> Capacity:
    """Find it: stability first, then objectives.

    Args:
        kind: "rate" [requests/s] or "concurrency".
        step_time: instead of the profile's or the default model.
        profile: of the scenario's GPU; without one the default efficiencies count.
        traffic: tenants and sessions instead of the scenario's load; the rate is that of their arrivals.
        error: instead of what `model_error` says of the model.
        with_error: also find the level with step times longer and shorter by the model's error.

    Raises:
        BadInput: the scenario itself cannot run.
    """
    effort = effort or Effort()
    notes = list(slos.notes)
    model = step_time
    if model is None and profile is not None:
        model, told = profile.step_time(scenario)
        notes += told
    if model is None:
        model = roofline(scenario)
    error = error or model_error(scenario, profile)
    if traffic is not None and traffic.profile != DailyProfile():
        peak = traffic.profile.peak_factor
        traffic = replace(traffic, profile=DailyProfile())
        text = (
            f"one rate is held all the time; the hours of the file peak at {peak:.3g} times their mean: size "
            "for that with --daily or --peak-factor"
        )
        notes.append(Note("info", "--traffic daily", text))
    light = _alone(scenario, model, effort, slos, traffic)
    turnaround = (light.outcome.get("mean_e2el_ms") or 0.0) / 1000.0
    if traffic is not None:
        turnaround = traffic.stay(turnaround)
        notes += traffic.notes
        notes.append(Note("info", "--traffic", "rates are arrivals of sessions and single requests together"))
    curve = LoadCurve(scenario, slos, kind, effort, pool, model, turnaround, traffic)
    # Users who think between turns never flood a server; the search finds where it gives way.
    most = None if traffic is not None else saturation_rate(scenario, model, effort)
    if kind == "rate" and scenario.workload.max_concurrency is not None:
        cap = scenario.workload.max_concurrency
        text = f"the client's cap of {cap} is dropped: users do not wait for each other"
        notes.append(Note("info", "--max-concurrency", text))
    if load_ratio(slos, [light]) > 1.0:
        return _unreachable(scenario, slos, light, model, error, most, kind, notes)
    low, high = _first_bracket(kind, most, turnaround)
    found = _find(curve, low, high, effort.replications, kind)
    if found.value is None:
        return _unreachable(scenario, slos, light, model, error, most, kind, notes)
    slow = fast = None
    if with_error and error.share > 0:
        others = other_models(scenario, model, error, profile)
        slow, fast = _with_error(curve, found.value, error, others, profile is not None)
    return _answer(curve, found, slow, fast, error, most, effort, notes)


def _first_bracket(kind: str, most: float | None, turnaround: float) -> tuple[float, float]:
    if kind == "concurrency":
        return 1.0, max(4.0, 2.0 * (most or 1.0) * max(turnaround, 1e-3))
    return (0.25 * most, 1.2 * most) if most else (0.5, 2.0)


def _find(curve: LoadCurve, low: float, high: float, replications: int, kind: str) -> Crossing:
    return find_crossing(curve.read, low, high, replications=replications, whole=kind == "concurrency")


def _with_error(
    curve: LoadCurve, value: float, error: ModelError, others: Sequence[StepTimeModel], drawn: bool
) -> tuple[float | None, float | None]:
    """The answer's range over other step times that are possible.

    Each crossing is set beside that of the same few replications with the likely step times; the ratio is
    what the step times do. Of draws it is the 95 % range of a lognormal, else the lowest and the highest.
    """
    few = 1 if drawn else min(2, curve.effort.replications)
    whole = curve.kind == "concurrency"
    span = 1.0 + 1.5 * error.share
    base = find_crossing(curve.read, value / 1.04, value * 1.04, replications=few, whole=whole).value
    ratios = []
    for model in others:
        moved = curve.with_step_time(model)
        found = find_crossing(moved.read, value / span, value * span, replications=few, whole=whole).value
        ratios.append((found or 0.0) / base if base else 1.0)
    if drawn and min(ratios) > 0:
        spread = estimate([math.log(r) for r in ratios])
        half = (spread.half or 0.0) * math.sqrt(len(ratios))
        return value * math.exp(spread.mean - half), value * math.exp(spread.mean + half)
    return value * min(ratios), value * max(ratios)


def _alone(
    scenario: Scenario, model: StepTimeModel, effort: Effort, slos: Slos, traffic: Traffic | None
) -> Probe:
    """Requests one at a time: the best latencies that this configuration can show.

    Raises:
        BadInput: not even that can run.
    """
    prompts = min(LIGHT_PROMPTS, effort.prompts)
    lonely = at_level(scenario, Level("concurrency", 1), prompts)
    if traffic is not None:
        lonely = at_level(scenario, Level("rate", SELDOM), prompts)
    itl = any(slo.metric == "itl" for slo in slos.statistics)
    probe = run_probe(ProbeJob(lonely, scenario.seed, step_time=model, itl=itl, traffic=traffic))
    if probe.outcome.failure is not None:
        raise BadInput("SCENARIO", scenario.name or None, f"cannot run: {probe.outcome.failure}")
    return probe


def saturation_rate(scenario: Scenario, model: StepTimeModel, effort: Effort) -> float | None:
    """Requests/s completed while everything waits at once: more cannot be sustained for long."""
    prompts = max(min(SATURATING_PROMPTS, effort.prompts), flood_size(scenario))
    flood = at_level(scenario, Level("concurrency", prompts), prompts)
    outcome = run_probe(ProbeJob(flood, scenario.seed, step_time=model)).outcome
    rate = outcome.regime.get("sustainable_rate") or outcome.get("request_throughput")
    return float(rate) if rate else None


def _answer(
    curve: LoadCurve,
    found: Crossing,
    slow: float | None,
    fast: float | None,
    error: ModelError,
    most: float | None,
    effort: Effort,
    notes: list[Note],
) -> Capacity:
    assert found.value is not None
    assert found.kept is not None
    probes = curve.probes(found.kept, effort.replications)
    beyond = curve.probes(found.missed, effort.replications) if found.missed is not None else probes
    turns = None if curve.traffic is None else curve.traffic.mean_turns
    rates = _rates(probes, None if turns is None else found.kept * turns)
    return Capacity(
        scenario=curve.scenario,
        slos=curve.slos,
        level=Level(curve.kind, found.value),
        low=found.low,
        high=found.high,
        model_low=slow,
        model_high=fast,
        error=error,
        saturation=most,
        promises=promises(curve.slos, probes),
        binding=binding(curve.slos, beyond) if found.missed is not None else "nothing",
        cause=queue_cause(beyond[0].outcome),
        use=_use(curve, probes),
        request_rate=rates[0],
        input_rate=rates[1],
        output_rate=rates[2],
        kept=Level(curve.kind, found.kept),
        replications=effort.replications,
        notes=tuple(notes),
        readings=curve.readings(),
        pace=pace_cause(beyond[0].outcome),
        traffic=curve.traffic is not None,
        beyond=promises(curve.slos, beyond) if found.missed is not None else (),
        missed=None if found.missed is None else Level(curve.kind, found.missed),
        left_out=found.left_out,
    )


def _unreachable(
    scenario: Scenario,
    slos: Slos,
    light: Probe,
    model: StepTimeModel,
    error: ModelError,
    most: float | None,
    kind: str,
    notes: list[Note],
) -> Capacity:
    """No load keeps the objectives: the best that can be reached, and what blocks it."""
    told = promises(slos, [light])
    worst = max(told, key=lambda p: p.used or 0.0)
    rates = _rates([light])
    why = blocked_by(_metric_missed(slos, worst.what, light), light)
    return Capacity(
        scenario, slos, None, None, None, None, None, error, most, told, worst.what,
        QueueCause("none", why), None, *rates, Level(kind, 0.0), 1, tuple(notes),
    )  # fmt: skip


def _metric_missed(slos: Slos, what: str, light: Probe) -> str:
    """Of a missed goodput, the latency that is furthest beyond its limit."""
    if what != "goodput":
        return what
    worst = max(slos.limits, key=lambda slo: float(np.nanmean(light.samples[slo.metric])) / slo.limit)
    return worst.statistic


def _use(curve: LoadCurve, probes: Sequence[Probe]) -> Utilisation:
    """Mean shares over the replications."""
    model = curve.step_time
    found: dict[str, list[float]] = {}
    waiting = 0.0
    for probe in probes:
        outcome = probe.outcome
        n = max(1.0, outcome.get("completed") or 1.0)
        prompt = (outcome.get("total_input_tokens") or 0.0) / n
        output = (outcome.get("total_output_tokens") or 0.0) / n
        for name, share in shares_of(outcome, model, prompt, output).items():
            found.setdefault(name, []).append(share)
        waiting += (outcome.queues.get("mean_waiting") or 0.0) / len(probes)
    return utilisation({name: sum(v) / len(v) for name, v in found.items()}, waiting)


def _rates(probes: Sequence[Probe], offered: float | None = None) -> tuple[float, float, float]:
    """Requests/s, input and output tokens/s over all probes; of the offered load where there is one."""
    seconds = sum(p.outcome.duration for p in probes)
    keys = ("completed", "total_input_tokens", "total_output_tokens")
    totals = [sum(p.outcome.get(key) or 0.0 for p in probes) for key in keys]
    done, inputs, outputs = (total / seconds if seconds > 0 else 0.0 for total in totals)
    seen = [r for p in probes if (r := p.outcome.regime.get("offered_rate"))]
    if offered is None and seen:
        offered = sum(seen) / len(seen)
    if offered and done > 0:
        factor = offered / done
        return done * factor, inputs * factor, outputs * factor
    return done, inputs, outputs


def from_workload(scenario: Scenario) -> list[str]:
    """Objectives that the client's own `--goodput` names, as texts for `parse_slos`."""
    shown = {metric: name for name, metric in GOODPUT_NAMES.items() if name != "e2el"}
    return [f"{shown[GOODPUT_NAMES[name]]} <= {limit:g}ms" for name, limit in scenario.workload.goodput]


def flips(found: Capacity, wanted: float) -> bool:
    """Whether the verdict on a wanted load turns within the answer's intervals."""
    ends = found.certain
    return ends is not None and ends[0] <= wanted <= ends[1]
