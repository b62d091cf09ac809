"""Step times along runs of decode steps whose batch does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.engines.base import StepShape, decodes
from sim.steptime.base import StepTimeModel

TOLERANCE = 1e-12
POINTS = (0.25, 0.5, 0.75)


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


class DecodePrices:
    """Prices decode batches by lines that are found once and remembered.

    A step-time model promises to be affine in the context of a given batch between edges. Where its edges
    are is found by asking it: a stretch counts as affine if points within it lie on the line through its
    ends.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._assess: Callable[[StepShape], tuple[float, str]] | None = getattr(model, "assess", None)
        self._lines: dict[tuple[str, int], list[Line]] = {}

    def line(self, shape: StepShape) -> Line | None:
        """The line of this batch (decodes alone, all sampled) around its context.

        Returns:
            None if the model bends or changes its mind right there.
        """
        context = shape.decode_context
        lines = self._lines.get((shape.kind, shape.num_decode_seqs))
        if lines is None:
            lines = self._lines[shape.kind, shape.num_decode_seqs] = []
        for line in lines:
            if line.low <= context < line.high:
                return line
        found = self._find(shape)
        if found is not None:
            lines.append(found)
        return found

    def _find(self, shape: StepShape) -> Line | None:
        context, per_call = shape.decode_context, shape.num_decode_seqs
        reach = context + 64 * per_call
        while reach >= per_call:
            line = self._between(shape, context, context + reach)
            if line is not None:
                return self._between(shape, max(per_call, context // 2), context + reach) or line
            reach //= 2
        return None

    def _between(self, shape: StepShape, low: int, high: int) -> Line | None:
        ends = [_at(shape, low), _at(shape, high)]
        model = self._model
        (first, resource), (last, other) = self._price(ends[0]), self._price(ends[1])
        before, after = model.host_before(ends[0]), model.host_after(ends[0])
        reason = model.out_of_range(ends[0])
        same = (resource, reason, before, after)
        if same != (
            other,
            model.out_of_range(ends[1]),
            model.host_before(ends[1]),
            model.host_after(ends[1]),
        ):
            return None
        slope = (last - first) / (high - low)
        for point in POINTS:
            context = low + int((high - low) * point)
            seconds, resource_there = self._price(_at(shape, context))
            expected = first + slope * (context - low)
            if resource_there != resource or abs(seconds - expected) > TOLERANCE * seconds:
                return None
        return Line(first - slope * low, slope, low, high, resource, reason, before, after)

    def _price(self, shape: StepShape) -> tuple[float, str | None]:
        if self._assess is None:
            return self._model.gpu(shape), None
        return self._assess(shape)


def _at(shape: StepShape, context: int) -> StepShape:
    return decodes(shape.kind, shape.num_decode_seqs, context)
