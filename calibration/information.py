"""What a run would tell about the coefficients, before it is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibration.align import align
from calibration.evidence import per_request
from calibration.parameters import Space
from calibration.regress import AlignedRun
from calibration.replay import account_of, replay
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.arrays import ShapeArrays
from sim.steptime.efficiencies import Efficiencies
from sim.workload.generate import generate

Floats = NDArray[np.float64]

# How far a measured interval lies from a perfect model: shares for first tokens and decodes, a floor [s].
NOISE = (0.04, 0.03)
FLOOR = 1.0e-3
# What all intervals of one run have in common: the run's own repeat noise.
COMMON = 0.01
RELATIVE_STEP = 1e-3  # of a prior deviation, for differences


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run that has not been measured.

    Attributes:
        matrix: shape (free, free): Fisher information about the fitted coefficients.
        seconds: from the first send to the last answer, as simulated.
    """

    matrix: Floats
    seconds: float


def forecast(scenario: Scenario, space: Space, efficiencies: Efficiencies) -> Forecast:
    """Simulate the scenario's load at `efficiencies` and see how its latencies depend on each coefficient.

    Errors are taken as independent between intervals, with a share that the whole run has in common
    (Sherman and Morrison's formula): a thousand requests of one run do not average its repeat noise away.

    Raises:
        BadInput, EngineStuck: as `sim.loop.run.run`.
    """
    requests = generate(scenario.workload)
    base = roofline(scenario)
    model = replace(base, efficiencies=efficiencies)
    run = replay(
        scenario,
        requests,
        model,
        account_of(scenario),
        max_concurrency=scenario.workload.max_concurrency,
    )
    rows = align(run, per_request(run.records, scenario.workload, "plan"), efficiencies.front_end)
    shapes = ShapeArrays.of(run.shapes, base.cost, base.buckets)
    aligned = AlignedRun(rows, shapes, base, np.zeros(len(run.shapes)))
    mean = aligned.predicted(efficiencies)
    share = np.array(NOISE)[np.minimum(rows.kind, 1)]
    sigma = np.hypot(share * mean, FLOOR)
    jacobian = _jacobian(aligned, space, efficiencies) / sigma[:, None]
    shared = COMMON * mean / sigma
    weighted = jacobian.T @ shared
    matrix = jacobian.T @ jacobian - np.outer(weighted, weighted) / (1.0 + float(shared @ shared))
    ends = run.records.last_token[~np.isnan(run.records.last_token)]
    return Forecast(matrix, float(ends.max() - run.records.sent.min()))


def _jacobian(run: AlignedRun, space: Space, efficiencies: Efficiencies) -> Floats:
    vector = space.pack(efficiencies)
    low, high = space.bounds()
    columns = []
    for j, width in enumerate(space.deviations()):
        ends = []
        for sign in (-1.0, 1.0):
            moved = vector.copy()
            moved[j] = np.clip(vector[j] + sign * RELATIVE_STEP * width, low[j], high[j])
            ends.append((moved[j], run.predicted(space.unpack(moved))))
        (a, before), (b, after) = ends
        columns.append((after - before) / (b - a) if b > a else np.zeros(len(before)))
    return np.stack(columns, axis=1)


def shares(space: Space, matrix: Floats) -> Floats:
    """Posterior over prior deviation of every coefficient, shape (free,): 1 is "nothing learnt"."""
    width = space.deviations()
    scaled = np.eye(len(width)) + matrix * np.outer(width, width)
    found: Floats = np.sqrt(np.diag(np.linalg.inv(scaled)))
    return found
