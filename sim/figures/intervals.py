"""How far a reported figure may lie from what would be measured: parameters, seeds, and repeat noise.

A figure's interval combines, as relative standard deviations:

* parameters and structure: the figure simulated again with other coefficients that the evidence allows,
* seeds: the same with another seed of the load,
* repeat noise: how much the same load on the same server differs from run to run.

Where a run keeps the cycle that its start led to, `reaching` adds the figures of other starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim.figures.metrics import Figures, median

LEVEL = 0.90
# Repeat noise, one standard deviation of one run [relative]. Two runs of the same arrivals on an H100
# (residency-vllm, eight pairs) differed by 1.7 % in TPOT and E2E means, 1.8 % in mean TTFT, 2.9 % in its P90,
# 4.8 % in its P99; a single run has that over the root of two.
REPEAT: Mapping[str, float] = {"mean": 0.012, "median": 0.012, "p90": 0.021, "p95": 0.027, "p99": 0.034}
REPEAT_THROUGHPUT = 0.005
_T90 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 10: 1.81, 15: 1.75, 20: 1.72}
_NEVER = ("completed", "failed", "n_", "std_", "success_rate", "num_prompts", "goodput_good")


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 90 % interval, in the figure's own unit."""

    centre: float
    low: float
    high: float


def repeat_noise(key: str) -> float:
    """Relative repeat noise of a figure, one standard deviation."""
    if key.endswith("_throughput") or key == "duration":
        return REPEAT_THROUGHPUT
    return REPEAT.get(key.split("_")[0], REPEAT["p99"])


def has_interval(key: str) -> bool:
    """Whether a figure is a measurement that an interval makes sense for."""
    return (key.endswith(("_ms", "_throughput")) or key == "duration") and not key.startswith(_NEVER)


def intervals(
    nominal: Figures,
    draws: Sequence[Figures],
    noise: float = 1.0,
    beside: Sequence[Figures] = (),
    first_token: float = 0.0,
) -> dict[str, Interval]:
    """Intervals of all figures that every draw has. Deviations are taken on logarithms.

    Args:
        nominal: figures of the most likely coefficients.
        draws: figures of other coefficients and seeds.
        noise: multiplies the repeat noise; 0 leaves it out.
        beside: figures of coefficients a hair beside the most likely ones: one simulation alone jumps where
            requests just catch or miss a step, the median of several does less.
        first_token: further standard deviation of times to first token [relative].
    """
    found: dict[str, Interval] = {}
    count = len(draws)
    for key, value in nominal.items():
        if not has_interval(key) or value is None or value <= 0:
            continue
        others = [other for d in draws if (other := d.get(key)) is not None and other > 0]
        near = [other for d in beside if (other := d.get(key)) is not None and other > 0]
        if len(others) < count:
            continue
        centre = median(np.log([value, *near]))
        spread = float(np.sqrt(np.mean((np.log(others) - centre) ** 2))) if count else 0.0
        further = first_token if "_ttft_" in key else 0.0
        half = math.hypot(_t90(count) * spread, 1.645 * noise * repeat_noise(key), 1.645 * further)
        found[key] = Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))
    return found


def reaching(
    found: Mapping[str, Interval], nominal: Figures, others: Sequence[Figures]
) -> dict[str, Interval]:
    """Intervals made to reach the lowest and the highest of other possible runs, in quadrature.

    Such runs need not lie around the nominal one, so either end moves by its own side alone.

    Args:
        found: intervals of what else is uncertain.
        nominal: figures of the run that the others differ from.
        others: their figures; a figure that one of them lacks keeps its interval.
    """
    wider = dict(found)
    for key, own in found.items():
        usual = nominal.get(key)
        values = [value for figures in others if (value := figures.get(key)) is not None and value > 0]
        if not usual or not values or len(values) < len(others):
            continue
        below = math.log(own.centre / own.low), math.log(usual / min(usual, *values))
        above = math.log(own.high / own.centre), math.log(max(usual, *values) / usual)
        low, high = math.exp(-math.hypot(*below)), math.exp(math.hypot(*above))
        wider[key] = Interval(own.centre, own.centre * low, own.centre * high)
    return wider


def _t90(count: int) -> float:
    """Student's factor of a two-sided 90 % interval from `count` draws around a known centre."""
    known = [n for n in _T90 if n <= count]
    return 1.645 if not known or count > 20 else _T90[max(known)]
