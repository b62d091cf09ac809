"""What any step-time model must satisfy before its predictions are worth anything."""

from __future__ import annotations

import math
from itertools import pairwise

from sim.engines.base import StepKind, StepShape
from sim.steptime.base import StepTimeModel

PREFILL_FACTOR = 1.5
TOKENS = (1, 2, 8, 64, 256, 512, 2048, 8192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1, 128, 1024, 8192, 65536)


def faults(model: StepTimeModel, kind: StepKind = "mixed") -> tuple[str, ...]:
    """What is wrong with a model; empty if nothing.

    An empty batch costs nothing; anything else costs a positive, finite time that does not fall as prompt
    tokens, decodes or context grow; and 2048 prompt tokens cost at least 1.5 times one token, for a model
    without a prefill term prices every prompt alike.
    """
    found = []
    if model.gpu(StepShape(kind, 0, 0, 0, 0, 0, 0, 0)) != 0.0:
        found.append("an empty batch costs time")
    prompts = [model.gpu(prefill(n, kind)) for n in TOKENS]
    decodes = [model.gpu(decodes_of(n, 1024, kind)) for n in SEQUENCES]
    contexts = [model.gpu(decodes_of(16, context, kind)) for context in CONTEXTS]
    for name, times in (("prompt tokens", prompts), ("decodes", decodes), ("context", contexts)):
        if not all(math.isfinite(t) and t > 0.0 for t in times):
            found.append(f"a step time that is not positive and finite as {name} grow")
        if any(later < earlier for earlier, later in pairwise(times)):
            found.append(f"a step gets shorter as {name} grow")
    if prompts[TOKENS.index(2048)] <= PREFILL_FACTOR * prompts[0]:
        found.append("no sensitivity to prefill tokens")
    return tuple(found)


def prefill(tokens: int, kind: StepKind = "mixed", start: int = 0) -> StepShape:
    """A batch of one prompt chunk that is sampled; one token counts as a decode."""
    if tokens == 1:
        return decodes_of(1, start + 1, kind)
    pairs = tokens * start + tokens * (tokens + 1) // 2
    return StepShape(kind, tokens, 1, 0, pairs, start + tokens, 0, 1)


def decodes_of(sequences: int, context: int, kind: StepKind = "mixed") -> StepShape:
    """A batch of decodes with `context` tokens each."""
    return StepShape(kind, 0, 0, sequences, 0, 0, sequences * context, sequences)
