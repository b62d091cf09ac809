"""The scale on which the roofline's coefficients are fitted, drawn and carried over.

Rates (shares of a data-sheet peak) as logarithms, the ridge's exponent as its inverse (0 is a plain maximum),
everything else as it is: an overhead may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sim.steptime.efficiencies import BOUNDS, Efficiencies

Floats = NDArray[np.float64]

RATES = ("weight_bandwidth", "kv_bandwidth", "gemm_flops", "attention_flops", "link_bandwidth")
TRIES = 4096
SHARP = 100.0  # a ridge's exponent that is as good as infinite, and that JSON can hold
# Seconds per something: what grows with a step that is slower as a whole.
TIMES = (
    "step_overhead",
    "layer_overhead",
    "sequence",
    "eager_launch",
    "piecewise_launch",
    "allreduce_latency",
)


def scale_name(name: str) -> str:
    """How a coefficient's scale is called in files."""
    if name == "ridge":
        return "inverse"
    return "log" if name in RATES else "linear"


def to_scale(name: str, value: float) -> float:
    """A coefficient on its scale."""
    if name == "ridge":
        return 1.0 / value
    return math.log(value) if name in RATES else value


def from_scale(name: str, value: float) -> float:
    """Inverse of `to_scale`."""
    if name == "ridge":
        return 1.0 / max(value, 1.0 / SHARP)
    return math.exp(value) if name in RATES else value


def clipped(name: str, value: float) -> float:
    """The nearest value that physics allows."""
    return min(max(value, BOUNDS[name].low), BOUNDS[name].high)


def with_vector(base: Efficiencies, names: Sequence[str], vector: Sequence[float] | Floats) -> Efficiencies:
    """`base` with `names` at `vector` (on their scales), within physical bounds."""
    values = {
        name: clipped(name, from_scale(name, float(value))) for name, value in zip(names, vector, strict=True)
    }
    return replace(base, **values)


def slowed(base: Efficiencies, factor: float) -> Efficiencies:
    """Coefficients under which every step on the device takes `factor` times as long, within bounds."""
    values: dict[str, float] = {name: clipped(name, getattr(base, name) / factor) for name in RATES}
    values.update({name: clipped(name, getattr(base, name) * factor) for name in TIMES})
    return replace(base, **values)


def draw(
    base: Efficiencies,
    names: Sequence[str],
    covariance: Floats,
    structure: float,
    count: int,
    seed: int,
) -> list[Efficiencies]:
    """`count` sets of coefficients that the evidence allows.

    Args:
        base: the most likely ones.
        names, covariance: of the uncertain ones, on their scales.
        structure: relative deviation of whole steps that no coefficient explains.
        seed: of the one random stream.
    """
    rng = np.random.default_rng(seed)
    centre = np.array([to_scale(name, getattr(base, name)) for name in names])
    values, vectors = np.linalg.eigh(covariance) if len(names) else (np.empty(0), np.empty((0, 0)))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    factors = np.exp(structure * rng.standard_normal(count))
    vectors = _within(names, centre + rng.standard_normal((TRIES, len(names))) @ root.T)[:count]
    return [
        slowed(with_vector(base, names, vector), float(factor))
        for vector, factor in zip(vectors, factors, strict=True)
    ]


def _within(names: Sequence[str], vectors: Floats) -> Floats:
    """The vectors, those within physical bounds first.

    A vector cut off at a bound would lose what the others had made up for it, and would err to one side.
    """
    ends = np.array([[to_scale(name, end) for end in BOUNDS[name][1:]] for name in names]).reshape(-1, 2)
    inside = np.all((vectors >= ends.min(axis=1)) & (vectors <= ends.max(axis=1)), axis=1)
    return np.concatenate((vectors[inside], vectors[~inside]))


def widened(
    names: Sequence[str], covariance: Floats, rates: float, times: Mapping[str, float], share: float
) -> Floats:
    """A covariance for another subject: more variance of rates [log] and, relative to size, of times."""
    more = [
        rates**2 if name in RATES else (share * abs(times[name])) ** 2 if name in times else 0.0
        for name in names
    ]
    return np.asarray(covariance + np.diag(more), dtype=np.float64)
