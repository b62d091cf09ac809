"""Coefficients from aggregates alone: simulate, compare figures, search.

A simulated figure jumps where a request just catches or misses a step, so the objective is jagged. Wide
differences see past the jumps (Gauss-Newton with steps of a fifth of the prior's deviation, each accepted
only if it helps); what is left is searched without derivatives (CMA-ES, Hansen 2016, arXiv:1604.00772).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.descent import bounded_step
from calibration.evidence import ClientRun
from calibration.parameters import Prior, Space
from calibration.replay import account_of, run_once
from calibration.result import FitResult, statuses, unexplained
from sim.figures.metrics import Figures, summarise
from sim.loop.replica import StepSink
from sim.loop.run import RunOutcome
from sim.request import Request
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.roofline import RooflineModel, ValidRange

Floats = NDArray[np.float64]

# How well a figure can be met: repeat noise and what no coefficient explains [relative].
NOISE: Mapping[str, float] = {
    "mean_ttft_ms": 0.04,
    "median_ttft_ms": 0.04,
    "p99_ttft_ms": 0.10,
    "mean_tpot_ms": 0.015,
    "median_tpot_ms": 0.015,
    "p99_tpot_ms": 0.05,
    "mean_itl_ms": 0.015,
    "median_itl_ms": 0.015,
    "p99_itl_ms": 0.10,
    "output_throughput": 0.015,
}
# Several requests of a closed loop come in waves, whose TTFT moves by a tenth for nothing.
WAVES = 0.10
# A few figures are met too easily to tell how wrong the formula is; steps of the two published MoE sets that
# were not fitted were off by 2 to 4 %.
FIGURES_FLOOR = 0.02
HEADS = ("mean_ttft_ms", "median_ttft_ms")
STEP = 0.2  # of the prior's deviation: the width of a difference


def targets(run: ClientRun) -> dict[str, float]:
    """The figures of a run that a search tries to meet."""
    found = {}
    for key in NOISE:
        value = run.figures.get(key)
        if value is not None and value > 0:
            found[key] = float(value)
    return found


@dataclass(frozen=True, slots=True)
class Objective:
    """Standardised misses of figures and beliefs at a vector of coefficients; counts its simulations.

    Attributes:
        precision: shape (free, free): turns a distance from what is believed into independent misses of unit
            deviation; None: by the deviations of the space.
    """

    runs: Sequence[ClientRun]
    space: Space
    simulate: Callable[[ClientRun, RooflineModel], Mapping[str, float | int | None]]
    precision: Floats | None = None

    def misses(self, vector: Floats) -> Floats:
        """Shape (figures + free,): log ratio / noise of figures, then distance from belief / deviation."""
        efficiencies = self.space.unpack(vector)
        found: list[float] = []
        for run in self.runs:
            model = replace(roofline(run.scenario), efficiencies=efficiencies)
            figures = self.simulate(run, model)
            for key, measured in targets(run).items():
                value = figures.get(key)
                found.append(math.log(value / measured) / _noise(key, run) if value else 10.0)
        away = vector - self.space.start()
        belief = away / self.space.deviations() if self.precision is None else self.precision @ away
        return np.concatenate((_soft(np.array(found)), belief))


def precision_of(covariance: Floats) -> Floats:
    """A matrix P with P'P the inverse of a covariance, both of shape (free, free)."""
    deviations = np.sqrt(np.diag(covariance))  # brings all to one size: seconds beside logarithms
    inverse = np.linalg.inv(covariance / np.outer(deviations, deviations))
    root = np.linalg.cholesky(0.5 * (inverse + inverse.T))
    return np.asarray(root.T / deviations, dtype=np.float64)


def _noise(key: str, run: ClientRun) -> float:
    return max(NOISE[key], WAVES) if "_ttft_" in key and _in_waves(run) else NOISE[key]


def _in_waves(run: ClientRun) -> bool:
    spec = run.scenario.workload
    return spec.closed_loop and (spec.max_concurrency or 1) > 1


def _soft(z: Floats) -> Floats:
    """Signed roots of Huber's loss beyond 3: a figure that no coefficient explains must not rule the fit."""
    size = np.abs(z)
    return np.sign(z) * np.where(size <= 3.0, size, np.sqrt(np.maximum(6.0 * size - 9.0, 0.0)))


def simulated_figures(run: ClientRun, model: RooflineModel) -> Figures:
    """The figures of the run's own load, simulated: all usual ones, whatever its client was to print."""
    return _figures(_sent(run.scenario, run.sent(), model))


def _figures(outcome: RunOutcome) -> Figures:
    return summarise(outcome.records, None, outcome.duration)


def simulated_range(run: ClientRun, model: RooflineModel) -> ValidRange:
    """The largest steps that the run's own load takes, simulated step by step."""
    sizes = [1, 0, 0, 0]

    def look(step: Mapping[str, Any]) -> None:
        chunks = [count for _, _, count in step["scheduled"]]
        prompts = [count for count in chunks if count > 1]
        contexts = [start + 1 for _, start, count in step["scheduled"] if count == 1]
        context = sum(contexts) // len(contexts) if contexts else 0
        for place, size in enumerate((sum(chunks), sum(prompts), len(contexts), context)):
            sizes[place] = max(sizes[place], size)

    _sent(run.scenario, run.sent(), model, look)
    return ValidRange(*sizes)


def _sent(
    scenario: Scenario, requests: Sequence[Request], model: RooflineModel, steps: StepSink | None = None
) -> RunOutcome:
    cap = scenario.workload.max_concurrency
    return run_once(scenario, requests, model, account_of(scenario), max_concurrency=cap, steps=steps)


def _least(run: ClientRun, model: RooflineModel, figures: Figures) -> dict[str, float]:
    """Relative misses of the run's figures that no start of its loop explains: 0 between their extremes."""
    found = {}
    starts = run.other_starts(figures.get("request_throughput"))
    sides = [figures, *(_figures(_sent(run.scenario, requests, model)) for requests in starts)]
    for key, measured in targets(run).items():
        misses = [float(value) / measured - 1.0 for side in sides if (value := side.get(key)) is not None]
        if not misses:
            continue
        low, high = min(misses), max(misses)
        found[key] = low if low > 0 else high if high < 0 else 0.0
    return found


def minimise(
    objective: Objective, start: Floats, rounds: int = 8, generations: int = 0
) -> tuple[Floats, Floats]:
    """The best vector found, and the Jacobian of the misses there (wide differences)."""
    space = objective.space
    low, high = space.bounds()
    width = STEP * space.deviations()
    best = np.clip(start, low, high)
    misses = objective.misses(best)
    damping = 1e-2
    jacobian = _wide_jacobian(objective, best, misses, width, low, high)
    for _ in range(rounds):
        improved = False
        reach = 2 * space.deviations()
        for _ in range(5):
            room = (np.maximum(low - best, -reach), np.minimum(high - best, reach))
            trial = np.clip(best + bounded_step(jacobian, misses, room, damping), low, high)
            found = objective.misses(trial)
            if found @ found < misses @ misses:
                improved = True
                break
            damping *= 6.0
        if not improved:
            break
        gain = float(misses @ misses - found @ found)
        best, misses = trial, found
        damping = max(1e-4, damping / 4.0)
        if gain < 0.02:
            break
        jacobian = _wide_jacobian(objective, best, misses, width, low, high)
    if generations:
        best = cma(lambda v: float(np.sum(objective.misses(v) ** 2)), best, width, (low, high), generations)
        jacobian = _wide_jacobian(objective, best, objective.misses(best), width, low, high)
    return best, jacobian


def _wide_jacobian(
    objective: Objective, vector: Floats, misses: Floats, width: Floats, low: Floats, high: Floats
) -> Floats:
    columns = []
    for j in range(len(vector)):
        step = width[j] if vector[j] + width[j] <= high[j] else -width[j]
        moved = vector.copy()
        moved[j] = np.clip(vector[j] + step, low[j], high[j])
        columns.append((objective.misses(moved) - misses) / (moved[j] - vector[j]))
    return np.stack(columns, axis=1)


def cma(
    function: Callable[[Floats], float],
    start: Floats,
    deviations: Floats,
    bounds: tuple[Floats, Floats],
    generations: int,
    seed: int = 0,
) -> Floats:
    """The best point that CMA-ES finds (Hansen 2016, arXiv:1604.00772, with its default settings).

    Args:
        function: to be minimised; may jump.
        start: also the first candidate.
        deviations: first standard deviations.
        bounds: candidates are clipped to them.
        generations: each costs 4 + 3 ln(n) evaluations.
    """
    rng = np.random.default_rng(seed)
    size = len(start)
    count = 4 + int(3 * math.log(size)) if size > 1 else 5
    parents = count // 2
    weights = math.log(parents + 0.5) - np.log(np.arange(1, parents + 1))
    weights /= weights.sum()
    effective = 1.0 / float(np.sum(weights**2))
    c_sigma = (effective + 2) / (size + effective + 5)
    d_sigma = 1 + 2 * max(0.0, math.sqrt((effective - 1) / (size + 1)) - 1) + c_sigma
    c_path = (4 + effective / size) / (size + 4 + 2 * effective / size)
    c_one = 2 / ((size + 1.3) ** 2 + effective)
    c_mu = min(1 - c_one, 2 * (effective - 2 + 1 / effective) / ((size + 2) ** 2 + effective))
    expected = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))
    mean, sigma = np.zeros(size), 1.0
    covariance, path, path_sigma = np.eye(size), np.zeros(size), np.zeros(size)
    best, best_value = start, function(start)
    for generation in range(generations):
        values, vectors = np.linalg.eigh(covariance)
        root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-20))) @ vectors.T
        inverse = vectors @ np.diag(1 / np.sqrt(np.maximum(values, 1e-20))) @ vectors.T
        drawn = rng.standard_normal((count, size)) @ root
        points = [np.clip(start + deviations * (mean + sigma * y), *bounds) for y in drawn]
        scores = [function(point) for point in points]
        order = np.argsort(scores)
        if scores[order[0]] < best_value:
            best, best_value = points[order[0]], scores[order[0]]
        chosen = drawn[order[:parents]]
        step = weights @ chosen
        mean = mean + sigma * step
        path_sigma = (1 - c_sigma) * path_sigma + math.sqrt(
            c_sigma * (2 - c_sigma) * effective
        ) * inverse @ step
        shrunk = 1 - (1 - c_sigma) ** (2 * (generation + 1))
        steady = float(np.linalg.norm(path_sigma)) / math.sqrt(shrunk) < (1.4 + 2 / (size + 1)) * expected
        path = (1 - c_path) * path + steady * math.sqrt(c_path * (2 - c_path) * effective) * step
        covariance = (
            (1 - c_one - c_mu) * covariance
            + c_one * (np.outer(path, path) + (1 - steady) * c_path * (2 - c_path) * covariance)
            + c_mu * (chosen.T * weights) @ chosen
        )
        sigma *= math.exp((c_sigma / d_sigma) * (float(np.linalg.norm(path_sigma)) / expected - 1))
    return best


def search(
    runs: Sequence[ClientRun],
    space: Space,
    before: FitResult | None = None,
    on_simulation: Callable[[], None] = lambda: None,
) -> FitResult:
    """Fit to figures alone; `before` (from evidence with more detail) takes the place of the prior."""

    def simulated(run: ClientRun, model: RooflineModel) -> Figures:
        figures = simulated_figures(run, model)
        on_simulation()
        return figures

    belief, precision = space, None
    if before is not None:
        deviations = dict(space.prior.deviations)
        deviations.update(zip(space.names, np.sqrt(np.diag(before.covariance)).tolist(), strict=True))
        belief = Space(space.names, Prior(before.efficiencies, deviations, space.prior.sources))
        precision = precision_of(before.covariance)
    objective = Objective(runs, belief, simulated, precision)
    vector, jacobian = minimise(objective, belief.start())
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=np.float64)
    efficiencies = belief.unpack(vector)
    residuals = dict(before.residuals) if before is not None else {}
    decodes: list[float] = []
    heads: list[float] = []
    seen = [] if before is None else [before.valid]
    for run in runs:
        model = replace(roofline(run.scenario), efficiencies=efficiencies)
        figures, valid = simulated_figures(run, model), simulated_range(run, model)
        pairs = [(key, figures.get(key), measured) for key, measured in targets(run).items()]
        found = {key: float(value) / measured - 1.0 for key, value, measured in pairs if value is not None}
        residuals[run.name] = found
        decodes += [found[k] for k in ("mean_tpot_ms", "median_itl_ms") if k in found]
        heads += [miss for k, miss in _least(run, model, figures).items() if k in HEADS]
        seen.append(valid)
    free = len(space.names) * len(decodes) // max(1, sum(len(targets(run)) for run in runs))
    return FitResult(
        efficiencies=efficiencies,
        space=space,
        vector=vector,
        covariance=covariance,
        status=statuses(space, vector, covariance),
        structure=max(FIGURES_FLOOR, unexplained(decodes, free), before.structure if before else 0.0),
        residuals=residuals,
        rows=sum(len(targets(run)) for run in runs) + (before.rows if before else 0),
        rounds=1 + (before.rounds if before else 0),
        valid=_widest(seen),
        first_token=max(
            unexplained(heads, free),
            WAVES if any(_in_waves(run) for run in runs) else 0.0,
            before.first_token if before else 0.0,
        ),
    )


def _widest(ranges: Sequence[ValidRange]) -> ValidRange:
    """What any of the ranges contains."""
    return ValidRange(*(max(limit or 0 for limit in limits) for limits in zip(*ranges, strict=True)))
