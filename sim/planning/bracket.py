"""Finding the load at which objectives begin to be missed: brackets over replications, not one lucky seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sim.planning.stats import jackknife

COARSE = 1.25  # a bracket as wide as this is worth the full number of replications
UNSTABLE = 1.1  # stands for the ratio of a level that keeps its objectives but cannot be sustained
LOWEST, HIGHEST = 1e-3, 1e3
NEAR = 1.2  # levels within this factor of the crossing tell how steep it is
FLATTEST = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """What one level showed.

    Attributes:
        ratio: of all replications pooled; the objectives are kept up to 1.
        left_out: the same with each replication left out in turn; empty for a single one.
        stable: whether the load can be sustained, objectives aside.
    """

    ratio: float
    left_out: tuple[float, ...] = ()
    stable: bool = True

    @property
    def kept(self) -> bool:
        """Whether load and objectives are both kept."""
        return self.stable and self.ratio <= 1.0


Read = Callable[[float, int], Reading]  # level, replications


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the objectives begin to be missed.

    Attributes:
        value: None if they are missed at the lowest level already.
        low, high: 95 % interval, over replications and the width of the bracket; None of one replication.
        kept, missed: the two levels that enclose it, with full replications; None where there is none.
        left_out: the value with each replication left out in turn, as a share of the value; empty where the
            bracket rather than the replications sets the interval.
    """

    value: float | None
    low: float | None
    high: float | None
    kept: float | None
    missed: float | None
    left_out: tuple[float, ...] = ()


def find_crossing(
    read: Read,
    low: float,
    high: float,
    *,
    replications: int = 5,
    resolution: float = 0.03,
    whole: bool = False,
) -> Crossing:
    """The level between `low` and `high` at which `ratio` passes 1.

    One replication narrows the bracket to a fifth, all of them to `resolution`; between the last two levels
    the logarithm of the ratio is interpolated. The interval is that of the jackknife over replications, with
    common random numbers at all levels (what leaving one out does to the ratio at the crossing, over the
    slope there), and never narrower than what the last bracket leaves open.

    Args:
        read: pooled ratio of a level from so many replications.
        low, high: where to begin, above 0; both move outwards (down to a thousandth, up to a thousandfold)
            where they do not enclose the crossing.
        whole: levels are whole numbers of at least 1.
    """
    grid: Callable[[float], float] = (lambda v: float(max(1, round(v)))) if whole else _three_digits
    floor, ceiling = grid(low * LOWEST), grid(high * HIGHEST)
    low, high = grid(low), grid(high)
    first = _outwards(lambda v: read(v, 1).kept, low, high, floor, ceiling, grid, step=2.0)
    low, high = first
    while high / low > COARSE and grid(math.sqrt(low * high)) not in (low, high):
        middle = grid(math.sqrt(low * high))
        low, high = (middle, high) if read(middle, 1).kept else (low, middle)
    seen: dict[float, Reading] = {}

    def kept(value: float) -> bool:
        seen[value] = read(value, replications)
        return seen[value].kept

    low, high = _outwards(kept, low, high, floor, ceiling, grid, step=1.15)
    if not seen[low].kept:
        return Crossing(None, None, None, None, low)
    if seen[high].kept:
        return Crossing(high, high, None, high, None)
    while high / low > 1.0 + resolution and grid(math.sqrt(low * high)) not in (low, high):
        middle = grid(math.sqrt(low * high))
        low, high = (middle, high) if kept(middle) else (low, middle)
    found = _interval(seen, low, high, whole=whole)
    return found if replications > 1 else replace(found, low=None, high=None)


def _outwards(
    kept: Callable[[float], bool],
    low: float,
    high: float,
    floor: float,
    ceiling: float,
    grid: Callable[[float], float],
    step: float,
) -> tuple[float, float]:
    """Move the ends until `low` is kept and `high` is not, or the limits are reached."""
    low_kept = kept(low)
    while not low_kept and low > floor:
        high, low = low, max(floor, min(grid(low / step), low - (1 if floor >= 1 else 0)))
        low_kept = kept(low)
    if not low_kept:
        return low, low
    high_kept = kept(high)
    while high_kept and high < ceiling:
        low, high = high, min(ceiling, max(grid(high * step), high + (1 if floor >= 1 else 0)))
        high_kept = kept(high)
    return low, high


def _interval(seen: dict[float, Reading], low: float, high: float, *, whole: bool) -> Crossing:
    levels = sorted(seen)
    pooled = _cross(levels, [_usable(seen[v]) for v in levels], low, high)
    counts = {len(seen[v].left_out) for v in levels}
    n = min(counts)
    half, out = 0.0, []
    # Interpolation knows no better than half of the last bracket where the ratio may jump.
    steady = all(_smooth(seen[v]) for v in (low, high))
    if n >= 2:
        slope = _slope({v: seen[v].ratio for v in levels if _smooth(seen[v])}, pooled) if steady else None
        out = [
            _cross(levels, [_usable(seen[v], j) for v in levels], low, high)
            if slope is None
            else pooled * math.exp(-_shift([seen[low], seen[high]], j) / slope)
            for j in range(n)
        ]
        half = jackknife(pooled, out).half or 0.0
    half = max(half, 0.0 if steady else high - pooled)
    bottom, top = min(pooled - half, low if not steady else pooled), max(pooled + half, pooled)
    shares = tuple(v / pooled for v in out) if steady else ()
    if whole:
        return Crossing(low, float(max(0, math.floor(bottom))), float(math.ceil(top)), low, high, shares)
    return Crossing(pooled, max(0.0, bottom), top, low, high, shares)


def _smooth(reading: Reading) -> bool:
    """Whether the ratio is one that moves with the load."""
    return reading.stable and all(math.isfinite(r) and r > 0 for r in (reading.ratio, *reading.left_out))


def _slope(ratios: Mapping[float, float], value: float) -> float | None:
    """d log(ratio) / d log(level) around `value`: of all near levels together, as that between two of them is
    mostly noise. None where it is too flat to tell a crossing by."""
    near = [(math.log(v), math.log(r)) for v, r in ratios.items() if 1 / NEAR <= v / value <= NEAR]
    if len(near) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(near) for column in zip(*near, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in near)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in near) / spread
    return slope if slope > FLATTEST else None


def _shift(readings: Sequence[Reading], left_out: int) -> float:
    """How much higher log(ratio) is without one replication, on average over levels."""
    return sum(math.log(r.left_out[left_out] / r.ratio) for r in readings) / len(readings)


def _usable(reading: Reading, left_out: int | None = None) -> float:
    ratio = reading.ratio if left_out is None or not reading.left_out else reading.left_out[left_out]
    return ratio if reading.stable else max(ratio, UNSTABLE)


def _cross(levels: Sequence[float], ratios: Sequence[float], low: float, high: float) -> float:
    """Where a ratio along ascending levels passes 1: log-linear between the two that enclose it.

    Of several crossings the one nearest to the bracket counts; without any, the curve goes on as it does
    around the bracket, by a third at most.
    """
    found = [
        _between(a, b, ra, rb)
        for (a, ra), (b, rb) in pairwise(zip(levels, ratios, strict=True))
        if ra <= 1.0 < rb
    ]
    middle = math.sqrt(low * high)
    if found:
        return min(found, key=lambda v: abs(math.log(v / middle)))
    by_level = dict(zip(levels, ratios, strict=True))
    guess = _between(low, high, by_level[low], by_level[high])
    return min(max(guess, low / 1.33), high * 1.33)


def _between(a: float, b: float, ra: float, rb: float) -> float:
    if not math.isfinite(rb) or rb <= 0 or ra <= 0 or ra == rb:
        return math.sqrt(a * b)
    share = (0.0 - math.log(ra)) / (math.log(rb) - math.log(ra))
    return a + (b - a) * share


def _three_digits(value: float) -> float:
    """Levels that people can read and type."""
    return float(f"{value:.3g}")
