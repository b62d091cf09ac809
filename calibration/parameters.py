"""What is free in a fit, what is believed of it before, and what physics allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.provenance import Origin, Sourced
from sim.steptime.defaults import default_efficiencies
from sim.steptime.efficiencies import BOUNDS, Efficiencies
from sim.steptime.scale import to_scale, with_vector

Floats = NDArray[np.float64]

# How far a belief may be off: one standard deviation, on the scale of the fit.
BELIEF: Mapping[str, float] = {
    "weight_bandwidth": 0.12,
    "kv_bandwidth": 0.30,
    "gemm_flops": 0.20,
    "attention_flops": 0.35,
    "link_bandwidth": 0.35,
    "mixed_kv_reread": 0.2,
    "gemm_ramp": 64.0,
    "ridge": 0.3,
    "tile_edge": 0.25,
    "throttle": 0.10,
    "step_overhead": 8.0e-4,
    "layer_overhead": 6.0e-6,
    "moe_layer_overhead": 2.0e-5,
    "sequence": 1.0e-6,
    "eager_launch": 1.0e-4,
    "piecewise_launch": 1.0e-5,
    "allreduce_latency": 8.0e-6,
    "host_schedule": 2.0e-4,
    "host_schedule_seq": 4.0e-6,
    "host_update": 1.5e-4,
    "host_update_seq": 4.0e-6,
    "front_request": 1.0e-3,
    "front_prompt_token": 1.5e-6,
    "output_delay": 4.0e-3,
    "output_token": 2.0e-5,
}
# The row of a CPU stands for no particular machine: the one at hand may be several times faster or slower,
# and nothing that was measured on another one narrows that.
ANY_CPU: Mapping[str, float] = {
    "weight_bandwidth": 0.5,
    "gemm_flops": 0.5,
    "kv_bandwidth": 0.8,  # 1.2 us per token of KV with AMX, some 3 us on a machine without
    "attention_flops": 0.5,
    "step_overhead": 0.01,
    "front_request": 5.0e-4,
    "output_delay": 0.01,
}
MEASURED_SHARE = 0.5  # a prior that was measured on the same kind of card is believed this much closer


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of the coefficients before any evidence.

    Attributes:
        efficiencies: the expected values.
        deviations: one standard deviation of each free coefficient on its own scale.
        sources: where each value comes from.
    """

    efficiencies: Efficiencies
    deviations: Mapping[str, float]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Space:
    """The free coefficients as a vector; the others stay at the prior's values."""

    names: tuple[str, ...]
    prior: Prior

    def start(self) -> Floats:
        """The prior's expectation, shape (free,)."""
        return self.pack(self.prior.efficiencies)

    def deviations(self) -> Floats:
        """The prior's standard deviations, shape (free,)."""
        return np.array([self.prior.deviations[name] for name in self.names])

    def pack(self, efficiencies: Efficiencies) -> Floats:
        """Coefficients as a vector on the fitted scale."""
        return np.array([to_scale(name, getattr(efficiencies, name)) for name in self.names])

    def unpack(self, vector: Sequence[float] | Floats) -> Efficiencies:
        """Inverse of `pack`; values outside the physical bounds are set to the bound."""
        return with_vector(self.prior.efficiencies, self.names, vector)

    def bounds(self) -> tuple[Floats, Floats]:
        """Lowest and highest vector that physics allows."""
        ends = [[to_scale(name, end) for end in BOUNDS[name][1:]] for name in self.names]
        return np.min(ends, axis=1), np.max(ends, axis=1)


def default_prior(gpu: GpuSpec, without: Iterable[str] = ()) -> Prior:
    """The shipped table's coefficients as a belief.

    Args:
        gpu: the card.
        without: texts that name a source; a coefficient whose source contains one of them falls back to a
            guess, so that a fit that is judged on those very data does not know them before.
    """
    defaults = default_efficiencies(gpu)
    unsaid = Sourced(0.0, Origin.ASSUMED, "the model's default")
    values = {
        name: defaults.sources.get(name, replace(unsaid, value=value))
        for name, value in defaults.efficiencies.to_dict().items()
    }
    for name, source in values.items():
        if any(text in source.rule for text in without):
            values[name] = Sourced(GUESSES[name], Origin.ASSUMED, "a round figure in the usual range")
    efficiencies = Efficiencies.from_dict({name: source.value for name, source in values.items()})
    deviations = {name: _deviation(name, source.origin) for name, source in values.items() if name in BELIEF}
    if gpu.name == "cpu":
        deviations |= ANY_CPU
    sources = {name: f"{source.origin}: {source.rule}" for name, source in values.items()}
    return Prior(efficiencies, deviations, sources)


GUESSES: Mapping[str, float] = {
    "throttle_relax": 0.025,
    "allreduce_latency": 1.2e-5,
    "link_bandwidth": 0.7,
    "weight_bandwidth": 0.80,
    "kv_bandwidth": 0.75,
    "mixed_kv_reread": 0.1,
    "gemm_flops": 0.65,
    "attention_flops": 0.5,
    "throttle": 0.10,
    "step_overhead": 0.0012,
    "layer_overhead": 1.3e-5,
    "moe_layer_overhead": 5.0e-5,
    "sequence": 4.3e-7,
    "front_request": 1.0e-3,
    "front_prompt_token": 1.0e-6,
    "tile": 128.0,
    "tile_edge": 0.9,
    "output_delay": 0.001,
}


def _deviation(name: str, origin: Origin) -> float:
    known = origin in (Origin.MEASURED, Origin.FITTED)
    return BELIEF[name] * (MEASURED_SHARE if known else 1.0)


def space_of(prior: Prior, names: Sequence[str]) -> Space:
    """The space of `names`.

    Raises:
        BadInput: an unknown coefficient, or one that no belief allows to move.
    """
    for name in names:
        if name not in prior.deviations:
            raise BadInput("coefficient", name, "cannot be fitted")
    return Space(tuple(names), prior)
