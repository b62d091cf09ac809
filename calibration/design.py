"""The shortest list of runs that pins what a profile lacks.

Fits to measured engines have shown what runs must hold: loads of one kind leave coefficients that only their
sum shows. Wanted are idle requests at many prompt lengths, decodes alone at several batch sizes, long
contexts, a nearly full KV cache, and two mixed loads below saturation. Which of them are worth their time
is computed: each candidate is simulated, and taken while it narrows a coefficient that is still open.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibration.candidates import Candidate, capacity, isolated, mixed
from calibration.fit import default_free
from calibration.information import Forecast, forecast, shares
from calibration.parameters import Prior, Space, default_prior, space_of
from calibration.result import PINNED
from sim.command_text import load_line
from sim.errors import BadInput, ServecastError
from sim.provenance import Note
from sim.scenario import Scenario
from sim.simulate import roofline, simulate
from sim.steptime.efficiencies import Efficiencies
from sim.workload.spec import RandomDataset, WorkloadSpec

Floats = NDArray[np.float64]

BUDGET = 300.0  # seconds of load
MIXED_SHARE = 0.45  # of the budget goes to the mixed loads
MIXED_LOADS = (0.45, 0.70)  # of the capacity
HELD_OUT = 0.45  # the mixed load that checks the fit before it joins it
DRAIN = 0.9  # of the time for a mixed load is sending; the rest is for its last answers
LARGEST = 0.4  # of the isolated runs' time that one of them may take
FEWEST = 2  # requests of an isolated run
FEWEST_DECODES = 16  # output tokens that a batch of decodes is not cut below
NARROWER = 0.9  # times as wide as before, and a run is said to narrow a coefficient: each must narrow one
WORTH = 0.01  # mean narrowing of the open coefficients (natural logarithm) below which a run is left out


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a plan.

    Attributes:
        seconds: of load, warm-ups included, as simulated.
        narrows: coefficients that it narrows by a tenth or more, given the runs before it.
        held_out: it checks the fit of the others first.
    """

    label: str
    purpose: str
    spec: WorkloadSpec
    seconds: float
    narrows: tuple[str, ...] = ()
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        runs: in the order in which they should run.
        budget: seconds of load that were allowed.
        capacity: requests/s that the mixed loads are shares of, as simulated; None: no telling.
        expected: by coefficient, the deviation to expect after the fit as a share of the one before.
        wanted: the coefficients that it is to pin.
        notes: what did not fit, and why.
    """

    runs: tuple[PlannedRun, ...]
    budget: float
    capacity: float | None
    expected: dict[str, float]
    wanted: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of load in all."""
        return sum(run.seconds for run in self.runs)

    @property
    def open(self) -> tuple[str, ...]:
        """Wanted coefficients that will rest on belief more than on the runs."""
        return tuple(n for n, share in self.expected.items() if share >= PINNED and n in self.wanted)


def design(
    scenario: Scenario,
    *,
    budget: float = BUDGET,
    lacking: Collection[str] | None = None,
    prior: Prior | None = None,
    believed: Efficiencies | None = None,
) -> Plan:
    """Choose the runs.

    Args:
        scenario: engine, model, GPU, and the load that the mixed runs are made of.
        budget: seconds of load that all runs together may take.
        lacking: coefficients that a profile does not pin; None: all that runs of this scenario can show.
        prior: what is believed before; None takes the shipped table.
        believed: the best coefficients so far, for expected times; None takes the prior's.

    Raises:
        BadInput: a budget in which nothing can be measured, or coefficients that cannot be fitted.
    """
    if not (math.isfinite(budget) and budget > 0):
        raise BadInput("--budget", budget, "must be a number of seconds above 0")
    prior = default_prior(scenario.gpu) if prior is None else prior
    space = space_of(prior, default_free(scenario))
    efficiencies = prior.efficiencies if believed is None else believed
    wanted = tuple(space.names if lacking is None else lacking)
    unknown = [name for name in wanted if name not in space.names]
    if unknown:
        raise BadInput("coefficient", unknown[0], "cannot be seen in runs of this scenario")
    designer = _Designer(scenario, space, efficiencies, wanted)
    reserved, rate, notes = _mixed_loads(scenario, efficiencies, budget)
    time_for_mixed = sum(run.seconds for run in reserved)
    chosen = designer.choose(budget - time_for_mixed, notes)
    runs = [*chosen, *reserved]
    if not runs:
        raise BadInput("--budget", budget, "is too short for any run; the shortest takes longer")
    seeds = [replace(r, spec=replace(r.spec, seed=scenario.seed + 1000 + i)) for i, r in enumerate(runs)]
    expected = shares(space, designer.learnt(reserved))
    return Plan(
        tuple(seeds),
        budget,
        rate,
        {name: float(share) for name, share in zip(space.names, expected, strict=True)},
        wanted,
        tuple(notes),
    )


class _Designer:
    """Takes the candidate that narrows most per second, until nothing open is worth its time."""

    def __init__(
        self, scenario: Scenario, space: Space, efficiencies: Efficiencies, wanted: Sequence[str]
    ) -> None:
        self._scenario = scenario
        self._space = space
        self._efficiencies = efficiencies
        self._wanted = np.array([name in wanted for name in space.names])
        self._matrix = np.zeros((len(space.names), len(space.names)))

    def choose(self, seconds: float, notes: list[Note]) -> list[PlannedRun]:
        """Isolated runs within so many seconds, in their natural order."""
        limit = LARGEST * seconds
        open_runs: list[tuple[Candidate, Forecast]] = []
        order: dict[str, int] = {}
        for index, candidate in enumerate(isolated(self._scenario)):
            order[candidate.label] = index
            sized = self._sized(candidate, limit)
            if sized is None:
                text = (
                    f"left out: the least of it takes longer than {max(0.0, limit):.0f} s, all that one run "
                    f"may take ({LARGEST:.0%} of the time for runs of one kind of work each)"
                )
                notes.append(Note("warning", candidate.label, text))
            else:
                open_runs.append(sized)
        chosen: list[PlannedRun] = []
        while open_runs:
            before = shares(self._space, self._matrix)
            scored = []
            for candidate, told in open_runs:
                after = shares(self._space, self._matrix + told.matrix)
                gain = self._gain(before, after)
                shows = self._wanted & (before >= PINNED) & (after < NARROWER * before)
                if told.seconds <= seconds and gain > WORTH and shows.any():
                    scored.append((gain / told.seconds, candidate, told, after))
            if not scored:
                break
            _, candidate, told, after = max(scored, key=lambda entry: entry[0])
            narrows = tuple(
                n for n, a, b in zip(self._space.names, before, after, strict=True) if b < NARROWER * a
            )
            chosen.append(
                PlannedRun(candidate.label, candidate.purpose, candidate.spec, told.seconds, narrows)
            )
            self._matrix = self._matrix + told.matrix
            seconds -= told.seconds
            open_runs = [entry for entry in open_runs if entry[0].label != candidate.label]
        return sorted(chosen, key=lambda run: order[run.label])

    def learnt(self, more: Sequence[PlannedRun]) -> Floats:
        """Information of the chosen runs and of `more`."""
        total = self._matrix
        for run in more:
            total = total + self._forecast(run.spec).matrix
        return total

    def _gain(self, before: Floats, after: Floats) -> float:
        """Mean narrowing of what is wanted and still open, in natural logarithms."""
        counted = self._wanted & (before >= PINNED)
        if not counted.any():
            return 0.0
        return float(np.mean(np.log(before[counted] / after[counted])))

    def _forecast(self, spec: WorkloadSpec) -> Forecast:
        return forecast(replace(self._scenario, workload=spec), self._space, self._efficiencies)

    def _sized(self, candidate: Candidate, limit: float) -> tuple[Candidate, Forecast] | None:
        """The candidate with as many requests as fit into `limit` seconds, warm-ups counted."""
        spec = candidate.spec
        for _ in range(4):
            told = self._forecast(spec)
            cap = spec.max_concurrency or 1
            seconds = told.seconds * (1.0 + spec.num_warmups / spec.num_prompts * cap)
            if seconds <= limit:
                return replace(candidate, spec=spec), Forecast(told.matrix, seconds)
            count = int(spec.num_prompts * limit / seconds)
            dataset = spec.dataset
            if count >= max(FEWEST, cap):
                spec = replace(spec, num_prompts=count)
            elif isinstance(dataset, RandomDataset) and dataset.output_len >= 2 * FEWEST_DECODES:
                # A batch needs all of its requests; they may be shorter.
                shorter = max(FEWEST_DECODES, int(0.9 * dataset.output_len * limit / seconds))
                spec = replace(spec, dataset=replace(dataset, output_len=shorter))
            else:
                return None
        return None


def _mixed_loads(
    scenario: Scenario, efficiencies: Efficiencies, budget: float
) -> tuple[list[PlannedRun], float | None, list[Note]]:
    model = replace(roofline(scenario), efficiencies=efficiencies)
    notes: list[Note] = []
    try:
        rate = capacity(scenario, model)
    except ServecastError as error:
        return [], None, [Note("warning", "mixed loads", f"left out: {error}")]
    if rate is None:
        return [], None, [Note("warning", "mixed loads", "left out: the capacity cannot be told")]
    runs = []
    # A lower rate needs more time for as many requests.
    weights = np.array([1.0 / share for share in MIXED_LOADS])
    for share, part in zip(MIXED_LOADS, weights / weights.sum(), strict=True):
        seconds = MIXED_SHARE * budget * float(part)
        candidate = mixed(scenario, rate, share, seconds)
        if candidate is None:
            text = f"left out: {seconds:.0f} s at {share * rate:.3g} requests/s are too few requests"
            notes.append(Note("warning", f"mixed-{round(100 * share)}", text))
            continue
        outcome = simulate(replace(scenario, workload=candidate.spec), step_time=model)
        lone = float(outcome.result.aggregates.get("median_e2el_ms") or 0.0) / 1e3
        runs.append(
            PlannedRun(
                candidate.label,
                candidate.purpose,
                candidate.spec,
                outcome.result.duration + lone,
                held_out=share == HELD_OUT,
            )
        )
    return runs, rate, notes


def mixed_again(
    plan: Plan, scenario: Scenario, efficiencies: Efficiencies, seconds: float
) -> tuple[list[PlannedRun], list[Note]]:
    """The mixed loads of a plan at coefficients that its other runs have shown, within so many seconds.

    Shares of a capacity that was off by a third would come out saturated, or idle.

    Returns:
        The runs, and what is left out of them.
    """
    runs, _, notes = _mixed_loads(scenario, efficiencies, DRAIN * seconds / MIXED_SHARE)
    first = len(plan.runs)
    seeds = [
        replace(r, spec=replace(r.spec, seed=scenario.seed + 1000 + first + i)) for i, r in enumerate(runs)
    ]
    return seeds, notes


def plan_text(plan: Plan, command: str, stem: str = "calibration") -> str:
    """The plan as a table, with the command of every run.

    Args:
        command: what stands in front of a run's `--bench`, e.g. "servecast bench SCENARIO.yaml".
        stem: of the folders that the runs' results go to.
    """
    lines = [f"{'run':<14}{'requests':>9}{'seconds':>9}  what it holds apart"]
    for run in plan.runs:
        held = " (checks the fit first)" if run.held_out else ""
        lines.append(f"{run.label:<14}{run.spec.num_prompts:>9}{run.seconds:>9.1f}  {run.purpose}{held}")
        if run.narrows:
            lines.append(f"{'':<34}narrows {', '.join(run.narrows)}")
    lines.append(
        f"{'in all':<14}{sum(r.spec.num_prompts for r in plan.runs):>9}{plan.seconds:>9.1f}  "
        f"= {plan.seconds / 60:.1f} of {plan.budget / 60:.1f} GPU minutes, as simulated beforehand"
    )
    if plan.capacity is not None:
        lines.append(
            f"capacity by simulation {plan.capacity:.3g} requests/s; `calibrate SCENARIO.yaml` takes the "
            "rates of the mixed loads from the runs before them"
        )
    if plan.open:
        lines.append(f"will still rest on belief more than on these runs: {', '.join(plan.open)}")
    lines += [f"{note.kind}: {note.subject}: {note.text}" for note in plan.notes]
    lines.append("")
    for run in plan.runs:
        bench = shlex.quote(load_line(run.spec))
        lines.append(f"{command} --result-dir {shlex.quote(f'{stem}-{run.label}')} --bench {bench}")
    return "\n".join(lines)
