"""The regression's own uncertainty, on rows that need no engine."""

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from calibration.align import Rows, step_rows
from calibration.parameters import Prior, default_prior, space_of
from calibration.regress import AlignedRun, regress
from calibration.validate.truth import scenario
from sim.steptime.efficiencies import Efficiencies

ROWS = 400
DRAWS = 120


@dataclass(frozen=True, slots=True)
class Line:
    """Intervals in proportion to the inverse of one coefficient."""

    rows: Rows
    work: NDArray[np.float64]

    def predicted(self, efficiencies: Efficiencies) -> NDArray[np.float64]:
        return self.work / efficiencies.gemm_flops


def decodes(seconds: NDArray[np.float64]) -> Rows:
    """Rows of the kind whose outliers are thrown out, a second apart."""
    rows = step_rows(seconds, np.zeros(len(seconds)))
    return replace(rows, kind=np.full(len(seconds), 1), time=np.arange(len(seconds), dtype=np.float64))


@pytest.fixture(scope="module")
def wide() -> Prior:
    prior = default_prior(scenario().gpu)
    return replace(prior, deviations={**prior.deviations, "gemm_flops": 1.0})


@pytest.mark.parametrize("larger", [1.0, 2.5])
def test_intervals_are_as_wide_as_estimates_scatter(wide: Prior, larger: float) -> None:
    # Long rows are the noisiest: they tell most, and bend the loss most.
    space = space_of(wide, ["gemm_flops"])
    work = np.where(np.arange(ROWS) % 2, 0.02, 0.06)
    noise = np.where(np.arange(ROWS) % 2, 0.001, 0.001 * larger)
    rng = np.random.default_rng(5)
    off, told = [], []
    for _ in range(DRAWS):
        seconds = work / wide.efficiencies.gemm_flops + noise * rng.standard_normal(ROWS)
        run = cast(AlignedRun, Line(decodes(seconds), work))
        found = regress([run], space, space.start())
        off.append(float(found.vector[0] - space.start()[0]))
        told.append(float(np.sqrt(found.covariance[0, 0])))
    assert np.std(off) == pytest.approx(np.mean(told), rel=0.15)
