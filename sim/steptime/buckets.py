"""CUDA-graph buckets: what a batch is padded to, and whether its launches are replayed or made."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from sim.engines.base import StepShape

Launch = Literal["graph", "piecewise", "eager"]


@dataclass(frozen=True, slots=True)
class GraphBuckets:
    """Sizes for which an engine captured graphs, ascending. Empty: no such graphs.

    Attributes:
        decode: batch sizes for batches of decodes alone, captured whole.
        other: token counts for every other batch.
        other_launch: "graph" if those are captured whole, "piecewise" if attention stays outside.
        max_padding: a batch of `other` is padded to at most this multiple of its size, else it runs unpadded.
    """

    decode: tuple[int, ...] = ()
    other: tuple[int, ...] = ()
    other_launch: Launch = "piecewise"
    max_padding: float = float("inf")

    def pad(self, shape: StepShape) -> tuple[int, Launch]:
        """Tokens that the GEMMs really see, and how the step is launched."""
        tokens = shape.num_tokens
        # SGLang's prefill runs its own graphs, though each of its chunks be a single token.
        is_prefill = shape.num_prefill_seqs or shape.kind == "prefill"
        if not is_prefill and (found := _bucket(self.decode, tokens, math.inf)):
            return found, "graph"
        if shape.kind == "decode":
            return tokens, "eager"
        if found := _bucket(self.other, tokens, self.max_padding):
            return found, self.other_launch
        return tokens, "eager"


def _bucket(sizes: tuple[int, ...], tokens: int, most: float) -> int:
    """The next size, 0 if there is none or padding to it would exceed `most` times the tokens."""
    at = bisect_left(sizes, tokens)
    if at == len(sizes) or sizes[at] > most * tokens:
        return 0
    return sizes[at]


NO_GRAPHS = GraphBuckets()
