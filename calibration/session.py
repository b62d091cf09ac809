"""From a scenario to a fit on a real engine: launch, run a plan, fit, check on a run that was held out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.run import BenchOptions, run_engine
from bench.session import Reporter, Subject
from bench.sweep import Point
from bench.telemetry import Gpus
from calibration.again import all_again
from calibration.design import Plan, PlannedRun, design, mixed_again
from calibration.evidence import Evidence, StepRun, client_run
from calibration.fit import fit
from calibration.parameters import Prior, default_prior
from calibration.result import FitResult
from calibration.steps import step_run
from calibration.told import observed
from sim.comparison.compare import Comparison, compare
from sim.errors import BadInput, NotComparable, ServecastError
from sim.provenance import Note
from sim.results import BenchResult
from sim.scenario import Scenario
from sim.simulate import roofline, simulate
from sim.steptime.scale import slowed

OVERSPENT = 1.25  # an isolated run that would take the time of the mixed ones by this factor is shortened
FEWEST = 2
PILOT = 4  # requests
OFF_PACE = 1.3  # a plan for an engine this much faster than the real one would not fit its time


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan's runs gave.

    Attributes:
        scenario: with the KV pool that the engine reported.
        runs: the plan's runs as they were sent, in order.
        results: by label.
        files: the result file of each, by label.
        steps: the probe's file, or None.
        notes: what of the plan came to nothing.
    """

    scenario: Scenario
    runs: tuple[PlannedRun, ...]
    results: Mapping[str, BenchResult]
    files: Mapping[str, Path]
    steps: Path | None = None
    notes: tuple[Note, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of load in all."""
        return sum(result.duration for result in self.results.values())


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit of everything, and how the fit without the held-out runs predicted them.

    Attributes:
        again: by run, errors of its means when the fit of everything predicts it.
    """

    measured: Measured
    evidence: tuple[Evidence, ...]
    fit: FitResult
    held_out: Mapping[str, Comparison] = field(default_factory=dict)
    again: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Director:
    """Decides, run by run, what is sent next.

    A few requests go first: an engine that is a good deal slower or faster than simulated gets a plan anew.
    Each isolated run is shortened if time runs out, and the mixed loads are set by what came before them.
    """

    def __init__(
        self, scenario: Scenario, plan: Plan, prior: Prior | None = None, steps: Path | None = None
    ) -> None:
        """`steps` is where the step probe writes, if there is one."""
        self.scenario = scenario
        self.sent: list[PlannedRun] = []
        self.notes: list[Note] = []
        self._plan = plan
        self._steps = steps
        self._prior = default_prior(scenario.gpu) if prior is None else prior
        self._isolated = [run for run in plan.runs if not _is_mixed(run)]
        self._mixed = [run for run in plan.runs if _is_mixed(run)]
        self._mixed_is_set = not self._isolated

    def more(self, results: Mapping[str, BenchResult]) -> list[Point]:
        """The next run, as a point of a sweep; none: all is measured."""
        if not self.sent and self._isolated:
            return [self._send(pilot(self._isolated[0], self.scenario.seed))]
        done = [run for run in self.sent if run.label in results]
        if done:
            self.scenario = observed(self.scenario, results[done[-1].label])
        used = sum(results[run.label].duration for run in done)
        pace = used / max(1e-9, sum(run.seconds for run in done)) if done else 1.0
        if len(self.sent) == 1 and abs(math.log(pace)) > math.log(OFF_PACE):
            self._plan_anew(pace, used)
            pace = 1.0
        while self._isolated:
            run = _shortened(self._isolated.pop(0), pace, self._plan, used)
            if run is not None:
                return [self._send(run)]
        if self._mixed and not self._mixed_is_set:
            self._mixed_is_set = True
            self._mixed = self._retimed(done, results, self._plan.budget - used)
        return [self._send(self._mixed.pop(0))] if self._mixed else []

    def _send(self, run: PlannedRun) -> Point:
        self.sent.append(run)
        return Point(run.label, run.spec)

    def _plan_anew(self, pace: float, used: float) -> None:
        """The same plan for an engine whose steps take `pace` times as long as believed."""
        left = self._plan.budget - used
        self.sent[0] = replace(self.sent[0], seconds=used)
        if left <= 0:
            self._isolated, self._mixed = [], []
            return
        believed = slowed(self._prior.efficiencies, pace)
        again = design(
            self.scenario, budget=left, lacking=self._plan.wanted, prior=self._prior, believed=believed
        )
        self._plan = replace(again, budget=self._plan.budget)
        self._isolated = [run for run in again.runs if not _is_mixed(run)]
        self._mixed = [run for run in again.runs if _is_mixed(run)]

    def _retimed(
        self, done: Sequence[PlannedRun], results: Mapping[str, BenchResult], left: float
    ) -> list[PlannedRun]:
        measured = Measured(
            self.scenario,
            tuple(done),
            {run.label: results[run.label] for run in done},
            {run.label: Path(run.label) for run in done},
            self._steps if self._steps is not None and self._steps.exists() else None,
        )
        try:
            found = fit(evidence_of(measured), self._prior)
        except BadInput:  # too little was measured in the time to know better
            return self._mixed
        runs, notes = mixed_again(self._plan, self.scenario, found.efficiencies, left)
        self.notes += notes
        return runs


def pilot(first: PlannedRun, seed: int) -> PlannedRun:
    """A few requests of a plan's first run, to see how fast the engine is."""
    count = min(PILOT, first.spec.num_prompts)
    spec = replace(first.spec, num_prompts=count, seed=seed + 999)
    seconds = first.seconds * count / first.spec.num_prompts
    return PlannedRun("pilot", "how fast the engine is", spec, seconds)


def measure(
    subject: Subject,
    plan: Plan,
    options: BenchOptions,
    gpus: Gpus | None,
    reporter: Reporter,
    prior: Prior | None = None,
) -> Measured:
    """Run a plan on one engine.

    Raises:
        EngineFailed: the engine did not start.
        NotComparable: a run came out INVALID: nothing may be fitted to it.
    """
    director = Director(subject.scenario, plan, prior, steps_file(subject, options))
    results = run_engine(subject, (), options, gpus, reporter, more=director.more)
    return gathered(subject, director, results, options)


def gathered(
    subject: Subject, director: Director, results: Sequence[BenchResult], options: BenchOptions
) -> Measured:
    """What was measured, with its files; checks that it may be fitted to.

    Raises:
        ServecastError: names a run that was not measured.
        NotComparable: names a run that is INVALID.
    """
    by_label = {run.label: result for run, result in zip(director.sent, results, strict=False)}
    files = {label: options.result_dir / f"{subject.stem}-{label}.json" for label in by_label}
    for run in director.sent:
        result = by_label.get(run.label)
        if result is None:
            raise ServecastError(f"calibration run {run.label} was not measured: the engine died before it")
        if result.verdict.status == "INVALID":
            reasons = "; ".join(note.text for note in result.verdict.reasons)
            raise NotComparable(f"{files[run.label]}: an INVALID run cannot calibrate ({reasons})")
    steps = steps_file(subject, options)
    return Measured(
        director.scenario,
        tuple(director.sent),
        by_label,
        files,
        steps if steps is not None and steps.exists() else None,
        tuple(director.notes),
    )


def steps_file(subject: Subject, options: BenchOptions) -> Path | None:
    """Where the step probe of this engine writes; None without the probe."""
    return options.result_dir / f"{subject.stem}.steps.jsonl" if options.launch.probe else None


def calibrate(measured: Measured, prior: Prior | None = None) -> Calibration:
    """Fit to all runs; before that, to all but each held-out run, to see how well it is predicted.

    Raises:
        BadInput: evidence that says less than there are coefficients.
    """
    held_out: dict[str, Comparison] = {}
    for run in measured.runs:
        if run.held_out:
            rest = evidence_of(measured, without=run.label)
            held_out[run.label] = predicted_beside(measured, run, fit(rest, prior))
    evidence = evidence_of(measured)
    found = fit(evidence, prior)
    return Calibration(measured, tuple(evidence), found, held_out, all_again(evidence, found.efficiencies))


def evidence_of(measured: Measured, without: str | None = None) -> list[Evidence]:
    """Every run as evidence, with the steps of the probe where there are any."""
    found: list[Evidence] = []
    spans = []
    for run in measured.runs:
        if run.label == without:
            continue
        result = measured.results[run.label]
        name = str(measured.files[run.label])
        found.append(client_run(result, name, under(measured.scenario, run)))
        begun = result.extra.get("probe", {}).get("begun_s")
        if begun is not None:
            spans.append((float(begun), float(begun) + result.duration))
    if measured.steps is not None and spans:
        found.append(steps_within(measured.steps, measured.scenario, spans))
    return found


def steps_within(path: Path, scenario: Scenario, spans: Sequence[tuple[float, float]]) -> StepRun:
    """The timed steps that began within any of the spans, on the step file's clock [s].

    Raises:
        BadInput: the file holds no such step.
    """
    whole = step_run(path, scenario)
    kept = np.zeros(len(whole.start), dtype=np.bool_)
    for begin, end in spans:
        kept |= (whole.start >= begin) & (whole.start <= end)
    if not kept.any():
        raise BadInput(str(path), None, "holds no step of these runs")
    shapes = tuple(shape for shape, keep in zip(whole.shapes, kept, strict=True) if keep)
    return replace(whole, shapes=shapes, seconds=whole.seconds[kept], start=whole.start[kept])


def predicted_beside(measured: Measured, run: PlannedRun, fitted: FitResult) -> Comparison:
    """A run's prediction from a fit that has not seen it, beside its measurement."""
    scenario = under(measured.scenario, run)
    model = replace(roofline(scenario), efficiencies=fitted.efficiencies)
    predicted = simulate(scenario, step_time=model).result
    return compare(predicted, measured.results[run.label], force=True)


def under(scenario: Scenario, run: PlannedRun) -> Scenario:
    """The scenario under one run's load, as the bench sends it.

    The bench warms up with prompts of its own, which leave nothing in the prefix cache to be found.
    """
    return replace(scenario, workload=replace(run.spec, num_warmups=0), seed=run.spec.seed)


def _is_mixed(run: PlannedRun) -> bool:
    return run.label.startswith("mixed-")


def _shortened(run: PlannedRun, pace: float, plan: Plan, used: float) -> PlannedRun | None:
    """The run with fewer requests if the engine is slower than simulated and time runs out; None: no time.

    The isolated runs together may take what the plan gives them, and a little of the mixed ones' time.
    """
    meant = sum(r.seconds for r in plan.runs if not _is_mixed(r))
    slack = max(plan.budget - plan.seconds, 0.0)
    left = OVERSPENT * meant + slack - used
    seconds = pace * run.seconds
    if seconds <= left:
        return run
    count = int(run.spec.num_prompts * left / seconds)
    cap = run.spec.max_concurrency or 1
    if count < max(FEWEST, cap):
        return None
    return replace(run, spec=replace(run.spec, num_prompts=count), seconds=seconds)
