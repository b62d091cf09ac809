"""Step times along runs of decode steps whose batch does not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sim.engines.base import StepShape, decodes
from sim.steptime.base import DecodeLine, StepTimeModel

TOLERANCE = 1e-12
POINTS = (0.25, 0.5, 0.75)
MOST_PREFILLS = 4096  # shapes
FAR = 4096  # tokens per sequence; further than most outputs reach


class Line(NamedTuple):
    """Device time of a decode batch: intercept + slope * context for contexts low .. high [s, tokens].

    `resource` is what bounds such a step (None: the model does not say), `reason` why such a step is out of
    the model's range (None: it is not), `host_before` and `host_after` are as the model has them.
    """

    intercept: float
    slope: float
    low: int
    high: int
    resource: str | None
    reason: str | None
    host_before: float
    host_after: float


Price = tuple[float, str | None, str | None, float, float]
"""Device time of a step [s]; then as of `Line`: resource, reason, host_before, host_after."""


class DecodePrices:
    """Prices decode batches by lines that are found once and remembered.

    A step-time model promises to be affine in the context of a given batch between edges. A model with a
    `decode_line` says where; of another one it is found by asking: a stretch counts as affine if points
    within it lie on the line through its ends.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._assess: Callable[[StepShape], tuple[float, str]] | None = getattr(model, "assess", None)
        self._told: Callable[[StepShape], DecodeLine] | None = getattr(model, "decode_line", None)
        self._prefills: dict[StepShape, Price] = {}
        self._lines: dict[tuple[str, int], list[Line]] = {}

    def price(self, shape: StepShape) -> Price:
        """What any step costs."""
        kind, _, prefill_seqs, size, _, _, context, sampled = shape
        if size and size == sampled and not prefill_seqs:
            for intercept, slope, low, high, resource, reason, before, after in self._lines.get(
                (kind, size), ()
            ):
                if low <= context <= high:
                    return intercept + slope * context, resource, reason, before, after
            intercept, slope, _, _, resource, reason, before, after = self.line(shape)
            return intercept + slope * context, resource, reason, before, after
        if size:
            return self._ask(shape)
        price = self._prefills.get(shape)
        if price is None:
            if len(self._prefills) >= MOST_PREFILLS:
                self._prefills.clear()
            price = self._prefills[shape] = self._ask(shape)
        return price

    def _ask(self, shape: StepShape) -> Price:
        model = self._model
        seconds, resource = self._price(shape)
        return seconds, resource, model.out_of_range(shape), model.host_before(shape), model.host_after(shape)

    def line(self, shape: StepShape) -> Line:
        """The line of this batch (decodes alone, all sampled); it holds for the batch's context at least."""
        kind, _, _, size, _, _, context, _ = shape
        lines = self._lines.get((kind, size))
        if lines is None:
            lines = self._lines[kind, size] = []
        for line in lines:
            if line[2] <= context <= line[3]:  # low, high
                return line
        line = self._find(shape)
        if line.high > line.low:
            lines.append(line)
        return line

    def _find(self, shape: StepShape) -> Line:
        """The longest stretch around this context, of those tried, on which nothing bends or changes."""
        told = self._told(shape) if self._told is not None else None
        constant = self._constants(shape)
        kind, _, _, size, _, _, context, _ = shape
        below, above = context // 2, context + FAR * size
        if told is not None:
            below, above = max(size, math.ceil(told.since)), int(min(above, told.reach))
        while above > context:
            high, low = decodes(kind, size, above), decodes(kind, size, min(below, context))
            if told is not None and (line := self._between(low, high, told, constant)) is not None:
                return line  # holds from `shape` on, then, too
            line = self._between(shape, high, told, constant)
            if line is not None:
                return self._between(low, high, told, constant) or line
            above = context + (above - context) // 4
        seconds, resource = self._price(shape)
        return Line(seconds, 0.0, context, context, resource, *constant)

    def _between(
        self,
        low: StepShape,
        high: StepShape,
        told: DecodeLine | None,
        constant: tuple[str | None, float, float],
    ) -> Line | None:
        if constant != self._constants(high) or constant != self._constants(low):
            return None
        begin, end = low.decode_context, high.decode_context
        if told is not None:
            return Line(told.intercept, told.slope, begin, end, told.resource, *constant)
        (first, resource), (last, other) = self._price(low), self._price(high)
        if resource != other:
            return None
        slope = (last - first) / (end - begin)
        for point in POINTS:
            context = begin + int((end - begin) * point)
            seconds, resource_there = self._price(low._replace(decode_context=context))
            expected = first + slope * (context - begin)
            if resource_there != resource or abs(seconds - expected) > TOLERANCE * seconds:
                return None
        return Line(first - slope * begin, slope, begin, end, resource, *constant)

    def _constants(self, shape: StepShape) -> tuple[str | None, float, float]:
        model = self._model
        return model.out_of_range(shape), model.host_before(shape), model.host_after(shape)

    def _price(self, shape: StepShape) -> tuple[float, str | None]:
        if self._assess is None:
            return self._model.gpu(shape), None
        return self._assess(shape)
