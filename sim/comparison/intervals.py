"""The interval of a signed error: what is uncertain of the prediction, of the sample, of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.comparison.figures import figure
from sim.comparison.noise import Noise, mean_error_share
from sim.figures.intervals import repeat_noise
from sim.results import BenchResult

Z90 = 1.645  # half-width of a normal 90 % interval in standard deviations


@dataclass(frozen=True, slots=True)
class ErrorInterval:
    """Where the true relative error lies with 90 % confidence, and what the width is made of.

    Attributes:
        parts: half-widths that were added in quadrature, relative: "prediction", "sampling", "repeats",
            "schedule".
    """

    low: float
    high: float
    parts: Mapping[str, float]

    @property
    def spread(self) -> float:
        """One standard deviation of the logarithm of predicted / measured."""
        return (math.log1p(self.high) - math.log1p(self.low)) / (2 * Z90)


def prediction_interval(predicted: BenchResult, key: str) -> tuple[float, float] | None:
    """The 90 % interval that the prediction gives itself, relative to the figure: (0.95, 1.1), say.

    None where it gives none. The interval (see `sim.forecast`) holds what is uncertain of the coefficients,
    what another seed of the load does, and repeat noise.
    """
    value, entry = figure(predicted, key), _told(predicted).get(key)
    if not value or value < 0 or not isinstance(entry, list | tuple) or len(entry) != 2 or None in entry:
        return None
    return float(entry[0]) / value, float(entry[1]) / value


def is_silent(predicted: BenchResult, key: str) -> bool:
    """Whether the prediction gives others of its figures an interval and this one none.

    What is uncertain of it is then unknown, and no less than what is of the others.
    """
    told = _told(predicted)
    return bool(told) and key not in told


def _told(predicted: BenchResult) -> Mapping[str, Any]:
    intervals = predicted.extra.get("intervals")
    figures = intervals.get("figures") if isinstance(intervals, Mapping) else None
    return figures if isinstance(figures, Mapping) else {}


def error_interval(
    key: str,
    error: float | None,
    prediction: tuple[float, float] | None,
    sampling: float | None,
    noise: Noise | None,
    runs: int,
    schedule: float = 0.0,
) -> ErrorInterval | None:
    """Join what is uncertain; independent causes add in quadrature on the log scale.

    Args:
        error: predicted / measured - 1.
        prediction: see `prediction_interval`.
        sampling: standard deviation of log(predicted / measured) over resampled requests; a prediction with
            an interval of its own has the choice of requests in it.
        runs: measured runs that the figure is the mean of.
        schedule: by how much the two sides' times of sending differ, for figures that follow them: no more
            is known of such a difference than that the draw made it.

    Returns:
        None if nothing is known to be uncertain: no error, or no cause.
    """
    if error is None or error <= -1.0:
        return None
    parts: dict[str, tuple[float, float]] = {}
    if prediction is not None and prediction[0] > 0:
        # What it holds of repeat noise is taken out, as that of the runs at hand comes in; seeds stay in.
        below, above = (_without_noise(abs(math.log(bound)), key) for bound in prediction)
        parts["prediction"] = (below, above)
    elif sampling is not None:
        parts["sampling"] = (Z90 * sampling, Z90 * sampling)
    if noise is not None:
        share = mean_error_share(noise, runs)
        parts["repeats"] = (share, share)
    if schedule:
        parts["schedule"] = (abs(math.log1p(schedule)), abs(math.log1p(schedule)))
    if not any(any(part) for part in parts.values()):
        return None
    low, high = (math.sqrt(sum(part[side] ** 2 for part in parts.values())) for side in (0, 1))
    return ErrorInterval(
        (1 + error) * math.exp(-low) - 1,
        (1 + error) * math.exp(high) - 1,
        {name: (part[0] + part[1]) / 2 for name, part in parts.items()},
    )


def _without_noise(half: float, key: str) -> float:
    return math.sqrt(max(0.0, half**2 - (Z90 * repeat_noise(key)) ** 2))
