"""How much a real run differs from its own repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.comparison.figures import figure
from sim.figures.intervals import has_interval
from sim.figures.intervals import repeat_noise as assumed_noise
from sim.results import BenchResult

_SOURCE = "assumed: the same arrivals sent twice to an H100 differed by as much"


@dataclass(frozen=True, slots=True)
class Noise:
    """What a figure varies by between runs of one load.

    Attributes:
        share: one standard deviation of a single run, relative to the figure.
        repeats: runs that it was measured from; 0: assumed.
        source: where it comes from.
    """

    share: float
    repeats: int
    source: str


def repeat_noise(key: str, repeats: Sequence[BenchResult]) -> Noise | None:
    """Noise of a figure from runs of the same load; from one run, the assumed one.

    None for figures that no assumption exists for.
    """
    values = [value for result in repeats if (value := figure(result, key)) is not None]
    if len(values) >= 2 and np.mean(values) > 0:
        share = float(np.std(values, ddof=1) / np.mean(values))
        return Noise(share, len(values), f"measured over {len(values)} runs")
    if not has_interval(key):
        return None
    return Noise(assumed_noise(key), 0, _SOURCE)


def mean_error_share(noise: Noise, runs: int) -> float:
    """Half-width of the 90 % interval that noise alone gives to the mean of `runs` runs, relative.

    A standard deviation that was itself taken from few runs is widened by Student's t.
    """
    from scipy.special import stdtrit

    factor = float(stdtrit(noise.repeats - 1, 0.95)) if noise.repeats >= 2 else 1.645
    return factor * noise.share / math.sqrt(max(1, runs))
