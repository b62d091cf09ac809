"""The flags a search may change, within bounds, and which combinations it begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, product

import numpy as np

from sim.errors import BadInput
from sim.planning.vary import Dimension, plain

FIELD = "--over"
STEPS = 6  # values of a range

Settings = tuple[tuple[str, str], ...]


def parse_space(texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Read `KEY=LOW..HIGH` and `KEY=V1,V2,…`.

    A range of whole numbers that spans a factor of 4 or more goes by powers of two, others in equal steps.

    Raises:
        BadInput: nothing to search, an empty or reversed range, or a key twice.
    """
    if not texts:
        raise BadInput(FIELD, None, "nothing to search; give e.g. --over max-num-seqs=16..256")
    found: list[Dimension] = []
    for text in texts:
        key, equals, listed = text.partition("=")
        if not equals or not key.strip() or not listed.strip():
            raise BadInput(FIELD, text, "must be KEY=LOW..HIGH or KEY=VALUE,VALUE,…")
        if plain(key) in {d.name for d in found}:
            raise BadInput(FIELD, text, f"{plain(key)} is given twice")
        low, dots, high = listed.partition("..")
        if dots:
            values = _range(text, low.strip(), high.strip())
        else:
            values = tuple(word.strip() for word in listed.split(","))
        if not all(values) or len(set(values)) < len(values):
            raise BadInput(FIELD, text, "has an empty value, or one twice")
        found.append(Dimension(key.strip(), values))
    return tuple(found)


def _range(text: str, low: str, high: str) -> tuple[str, ...]:
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise BadInput(FIELD, text, "a range needs numbers on both sides of ..") from None
    if not (math.isfinite(first) and math.isfinite(last) and first < last):
        raise BadInput(FIELD, text, "the range is empty; give the lower number first")
    whole = "." not in low + high and "e" not in (low + high).lower()
    if not whole:
        return tuple(f"{v:.4g}" for v in np.linspace(first, last, STEPS))
    a, b = int(first), int(last)
    if a >= 1 and b >= 4 * a:
        powers = [2**k for k in range(math.ceil(math.log2(a)), math.floor(math.log2(b)) + 1)]
        return tuple(str(v) for v in sorted({a, b, *powers}))
    return tuple(str(v) for v in sorted({round(v) for v in np.linspace(a, b, STEPS)}))


def draw_candidates(space: Sequence[Dimension], count: int, seed: int) -> list[Settings]:
    """Up to `count` combinations: all of them if there are no more, else a spread-out sample.

    Every value of every dimension appears equally often (a Latin hypercube over the lists).
    """
    size = math.prod(len(d.values) for d in space)
    if size <= count:
        return [_settings(space, values) for values in product(*(d.values for d in space))]
    rng = np.random.default_rng(seed)
    found: dict[Settings, None] = {}
    for _ in range(50):
        columns = [[d.values[i] for i in rng.permutation(np.arange(count) % len(d.values))] for d in space]
        found.update(dict.fromkeys(_settings(space, values) for values in zip(*columns, strict=True)))
        if len(found) >= count:
            break
    return list(islice(found, count))


def _settings(space: Sequence[Dimension], values: Sequence[str]) -> Settings:
    return tuple((d.key, value) for d, value in zip(space, values, strict=True))
