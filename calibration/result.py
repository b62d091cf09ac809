"""What a fit found out, and what it could not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.parameters import Space
from sim.steptime.efficiencies import BOUNDS, Efficiencies
from sim.steptime.roofline import ValidRange
from sim.steptime.scale import from_scale

Floats = NDArray[np.float64]

PINNED = 0.5  # posterior deviation over prior deviation: below it the data decided
SILENT = 0.9  # above it they said nothing, and the coefficient stays where it was believed to be
STRUCTURE_FLOOR = 0.01  # no formula of this kind is known to better than this share of a step


@dataclass(frozen=True, slots=True)
class FitResult:
    """Coefficients that explain the evidence.

    Attributes:
        efficiencies: all coefficients, fitted or not.
        space: the free ones and what was believed of them.
        vector, covariance: of the free ones, on the fitted scale.
        status: of each free one: "fitted", "weak" (data and prior both count), "prior" (the data say
            nothing), "at bound" (it would leave what physics allows).
        structure: relative deviation of step times that no coefficient explains.
        first_token: relative deviation of times to first token beside that, whatever slows or speeds them
            (waves of a closed loop, front ends that the model does not know).
        residuals: by run, signed relative error of its own figures: in-sample, "mean_ttft" and so on.
        rows: how many measured intervals (figures, where there was nothing else) were used.
        rounds: replays until the alignment held still.
        valid: what shapes of steps the evidence contained.
    """

    efficiencies: Efficiencies
    space: Space
    vector: Floats
    covariance: Floats
    status: Mapping[str, str]
    structure: float
    residuals: Mapping[str, Mapping[str, float]]
    rows: int
    rounds: int
    valid: ValidRange
    first_token: float = 0.0

    def value(self, name: str) -> float:
        """A coefficient in its own unit."""
        return float(getattr(self.efficiencies, name))

    def interval(self, name: str, z: float = 1.645) -> tuple[float, float]:
        """Lower and upper end of a coefficient's interval, in its own unit; 90 % unless told."""
        at = self.space.names.index(name)
        half = z * float(np.sqrt(self.covariance[at, at]))
        low, high = BOUNDS[name].low, BOUNDS[name].high
        ends = sorted(from_scale(name, float(self.vector[at]) + sign * half) for sign in (-1.0, 1.0))
        return max(low, ends[0]), min(high, ends[1])


def unexplained(misses: Sequence[float], coefficients: int) -> float:
    """Standard deviation of relative misses in figures that a fit has seen.

    A fit meets what it has seen better than the rest: n misses left by k coefficients stand for n - k, but
    for no less than half of themselves, since a prior takes its share of the k.
    """
    if not misses:
        return 0.0
    free = max(len(misses) - coefficients, len(misses) / 2)
    return float(np.sqrt(np.sum(np.square(misses)) / free))


def statuses(space: Space, vector: Floats, covariance: Floats) -> dict[str, str]:
    """What the data had to say on each free coefficient; see `FitResult.status`."""
    low, high = space.bounds()
    share = np.sqrt(np.diag(covariance)) / space.deviations()
    found = {}
    for i, name in enumerate(space.names):
        margin = 0.02 * space.deviations()[i]
        if share[i] > SILENT:
            found[name] = "prior"
        elif vector[i] < low[i] + margin or vector[i] > high[i] - margin:
            found[name] = "at bound"
        else:
            found[name] = "fitted" if share[i] < PINNED else "weak"
    return found
