"""Clock of a card at its power limit: sustained prompt processing runs slower than a short burst of it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sim.engines.base import StepShape
from sim.steptime.base import StepTimeModel

Floats = NDArray[np.float64]


class Throttle:
    """How warm a card is, and what that adds to its steps.

    Compute-bound prefill draws the most power; a card at its power limit answers with a lower clock, within
    tens of milliseconds, and recovers as fast while it decodes or idles. Warmth w goes towards 1 during such
    steps and towards 0 otherwise, with the time constant `relax`, and work takes 1 + drop * w times as long:

        extra = drop * (seconds - (1 - w) * relax * (1 - exp(-seconds / relax)))

    Token times of residency-vllm (H100 at 700 W, Qwen3-14B, vLLM 0.23, 2 requests/s) show it: a prompt of 986
    tokens took 39.8 ms a second after the one before, 40.8 after 80 ms, 42.5 after a single decode step, 44.3
    at once.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._heats = getattr(model, "heats", None)
        drop, relax = getattr(model, "throttle", (0.0, 1.0))
        self._drop: float = drop if self._heats is not None else 0.0
        self._relax: float = relax
        self._warm = 0.0
        self._until = 0.0

    def seconds(self, shape: StepShape, start: float, seconds: float) -> float:
        """Device time of a step that begins at `start` and would take `seconds` on a cool card [s]."""
        if not self._drop or not shape.num_prefill_seqs or self._heats is None or not self._heats(shape):
            return seconds
        warm = self._warm * math.exp((self._until - start) / self._relax)
        cools = math.exp(-seconds / self._relax)
        longer = seconds + self._drop * (seconds - (1.0 - warm) * self._relax * (1.0 - cools))
        self._warm = 1.0 - (1.0 - warm) * cools
        self._until = start + longer
        return longer


def warmth(hot: NDArray[np.bool_], start: Floats, cool: Floats, drop: float, relax: float) -> Floats:
    """How warm the card was when each of consecutive steps began, 0 to 1; 0 for those that do not heat.

    Args:
        hot: which steps heat, shape (steps,).
        start: when each began [s].
        cool: how long each would take on a cool card [s].
        drop, relax: see `Throttle`.
    """
    found = np.zeros(len(start))
    warm, until = 0.0, -math.inf
    for i in np.flatnonzero(hot).tolist():
        warm = warm * math.exp((until - float(start[i])) / relax) if until > -math.inf else 0.0
        found[i] = min(1.0, warm)
        cools = math.exp(-float(cool[i]) / relax)
        until = float(start[i]) + float(cool[i]) * (1.0 + drop)
        warm = 1.0 - (1.0 - found[i]) * cools
    return found


def throttled(cool: Floats, hot: NDArray[np.bool_], warm: Floats, drop: float, relax: float) -> Floats:
    """`Throttle.seconds` of many steps whose warmth is known."""
    extra = cool - (1.0 - warm) * relax * (1.0 - np.exp(-cool / relax))
    return np.where(hot, cool + drop * extra, cool)
