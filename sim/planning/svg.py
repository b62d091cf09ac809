"""Charts as plain geometry, to be written as inline SVG: no library, no network."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH, HEIGHT = 400.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 22.0, 40.0
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


@dataclass(frozen=True, slots=True)
class Mark:
    """One point: data coordinates, an optional interval in y, and what hovering says."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour; `line` joins them in their order."""

    name: str
    marks: tuple[Mark, ...]
    line: bool = True


@dataclass(frozen=True, slots=True)
class Band:
    """A vertical band between two x, or a vertical line if both are equal."""

    low: float
    high: float
    name: str
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture. `names` label x = 0, 1, 2 … instead of numbers; `level` is a horizontal line."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bands: tuple[Band, ...] = ()
    level: float | None = None
    level_name: str = ""
    names: tuple[str, ...] = ()
    y_max: float | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """The same in the coordinates of a 400 x 260 box, ready for a template."""

    title: str
    x_label: str
    y_label: str
    width: float
    height: float
    frame: tuple[float, float, float, float]  # left, top, right, bottom
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    level: tuple[float, str] | None
    bands: tuple[tuple[float, float, str, bool], ...]  # x, width, name, faint
    series: tuple[tuple[str, str, str, tuple[tuple[float, float, float, float, str, bool], ...]], ...]


def draw(chart: Chart) -> Drawn:
    """Lay a chart out; what lies above `y_max` is drawn at the upper edge."""
    xs = [m.x for s in chart.series for m in s.marks]
    xs += [v for band in chart.bands for v in (band.low, band.high)]
    ys = [v for s in chart.series for m in s.marks for v in (m.y, m.high, m.low) if v is not None]
    if chart.level is not None:
        ys.append(chart.level)
    x_ticks = list(range(len(chart.names))) if chart.names else nice_ticks(min([0.0, *xs]), max([*xs, 1e-9]))
    top = chart.y_max if chart.y_max is not None else max([*ys, 1e-9])
    y_ticks = nice_ticks(min([0.0, *ys]), top)
    x0, x1 = (-0.4, len(chart.names) - 0.6) if chart.names else (x_ticks[0], max(x_ticks[-1], *xs, 1e-9))
    y0, y1 = y_ticks[0], max(y_ticks[-1], top)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at_x(value: float) -> float:
        return round(LEFT + (value - x0) / ((x1 - x0) or 1.0) * (right - LEFT), 2)

    def at_y(value: float) -> float:
        share = (min(max(value, y0), y1) - y0) / ((y1 - y0) or 1.0)
        return round(bottom - share * (bottom - TOP), 2)

    series = []
    for i, one in enumerate(chart.series):
        marks = tuple(
            (
                at_x(m.x),
                at_y(m.y),
                at_y(m.low if m.low is not None else m.y),
                at_y(m.high if m.high is not None else m.y),
                m.tip,
                m.strong,
            )
            for m in one.marks
        )
        path = " ".join(f"{x},{y}" for x, y, *_ in marks) if one.line else ""
        series.append((one.name, COLOURS[i % len(COLOURS)], path, marks))
    return Drawn(
        chart.title,
        chart.x_label,
        chart.y_label,
        WIDTH,
        HEIGHT,
        (LEFT, TOP, right, bottom),
        tuple((at_x(v), chart.names[int(v)] if chart.names else short(v)) for v in x_ticks),
        tuple((at_y(v), short(v)) for v in y_ticks),
        None if chart.level is None else (at_y(chart.level), chart.level_name),
        tuple((at_x(b.low), round(at_x(b.high) - at_x(b.low), 2), b.name, b.faint) for b in chart.bands),
        tuple(series),
    )


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values from `low` down to a round one up to at least `high`."""
    if not high > low:
        high = low + 1.0
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's label: `12k` rather than `12000`."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
