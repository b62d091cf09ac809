"""A shared host is slower in one minute than in the next: a run foretold at the speed that its host had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.scenario import Scenario
from sim.simulate import simulate
from sim.steptime.base import StepShape, StepTimeModel
from sim.workload.generate import generate_load
from sim.workload.table import RequestTable

Floats = NDArray[np.float64]
WINDOW = 5.0  # s; long against a step, short against a run
LEAST_WORK = 0.2  # s of priced steps in a window, below which it tells nothing of its own


@dataclass(frozen=True)
class HostSpeed:
    """How many times the priced time steps took, window by window.

    With w(t) the integral of 1 / factor, an engine on such a host does at t what one on a steady host does at
    w(t): arrivals are moved to w(t), simulated with the priced steps, and what comes out is moved back.

    Attributes:
        edges: shape (n + 1,), seconds since the run began.
        factors: shape (n,).
        mean: over all steps; holds before and after, and in windows with hardly a step.
    """

    edges: Floats
    factors: Floats
    mean: float

    def work(self, times: Floats) -> Floats:
        """Where a steady host is when this one's clock shows `times` [s]."""
        return _along(times, self.edges, self._work, 1.0 / self.mean)

    def clock(self, work: Floats) -> Floats:
        """Inverse of `work` [s]."""
        return _along(work, self._work, self.edges, self.mean)

    @property
    def _work(self) -> Floats:
        return np.concatenate(([0.0], np.cumsum(np.diff(self.edges) / self.factors)))


def _along(at: Floats, x: Floats, y: Floats, slope: float) -> Floats:
    inside: Floats = np.interp(at, x, y)
    return inside + slope * np.maximum(at - x[-1], 0.0)


def host_speed(
    start: Floats, seconds: Floats, shapes: Sequence[StepShape], model: StepTimeModel, duration: float
) -> HostSpeed:
    """The speed of a host from the steps of a run.

    Args:
        start: of each step, seconds since the run began.
        seconds: that each step took.
        model: what they are priced by.
        duration: of the run [s].
    """
    priced = np.array([model.host_before(s) + model.gpu(s) + model.host_after(s) for s in shapes])
    mean = float(seconds.sum() / priced.sum())
    edges = np.arange(0.0, duration + WINDOW, WINDOW)
    window = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, len(edges) - 2)
    took, cost = (np.bincount(window, what, len(edges) - 1) for what in (seconds, priced))
    factors = np.where(cost >= LEAST_WORK, took / np.maximum(cost, LEAST_WORK), mean)
    return HostSpeed(edges, factors, mean)


def foretold_ttft(scenario: Scenario, model: StepTimeModel, speed: HostSpeed) -> Floats:
    """TTFT of every request of an open-loop scenario on such a host, from its schedule, shape (n,) [s]."""
    load = generate_load(scenario.workload, scenario.seed)
    table = load.requests
    moved = RequestTable(table.prompts, table.output_lens, speed.work(table.arrivals), stops=table.stops)
    records = simulate(scenario, step_time=model, load=replace(load, requests=moved)).result.records
    assert records is not None
    return speed.clock(records.first_token) - table.arrivals
