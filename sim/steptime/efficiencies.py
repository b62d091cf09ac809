"""The coefficients of the roofline model: how much of a card's peak an engine really gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from sim.errors import BadInput
from sim.steptime.base import FrontEnd


class Bound(NamedTuple):
    """Unit and physically possible range of one coefficient."""

    unit: str
    low: float
    high: float


BOUNDS: Mapping[str, Bound] = {
    "weight_bandwidth": Bound("of peak", 0.05, 1.0),
    "kv_bandwidth": Bound("of peak", 0.02, 1.0),
    "mixed_kv_reread": Bound("0 to 1", 0.0, 1.0),
    "gemm_flops": Bound("of peak", 0.02, 1.0),
    "gemm_ramp": Bound("tokens", 0.0, 4096.0),
    "ridge": Bound("exponent", 1.0, math.inf),
    "tile": Bound("tokens", 1.0, 512.0),
    "tile_edge": Bound("0 to 1", 0.0, 1.0),
    "attention_flops": Bound("of peak", 0.02, 1.0),
    "throttle": Bound("share", 0.0, 0.5),
    "throttle_relax": Bound("s", 0.001, 10.0),
    "step_overhead": Bound("s", 0.0, 0.1),
    "layer_overhead": Bound("s/layer", 0.0, 0.001),
    "moe_layer_overhead": Bound("s/layer", 0.0, 0.001),
    "sequence": Bound("s/sequence/layer", 0.0, 0.0001),
    "eager_launch": Bound("s/layer", 0.0, 0.01),
    "piecewise_launch": Bound("s/layer", 0.0, 0.01),
    "allreduce_latency": Bound("s", 0.0, 0.001),
    "link_bandwidth": Bound("of peak", 0.02, 1.0),
    "host_schedule": Bound("s", 0.0, 0.1),
    "host_schedule_seq": Bound("s/sequence", 0.0, 0.001),
    "host_update": Bound("s", 0.0, 0.1),
    "host_update_seq": Bound("s/sequence", 0.0, 0.001),
    "front_request": Bound("s/request", 0.0, 1.0),
    "front_prompt_token": Bound("s/token", 0.0, 0.001),
    "output_delay": Bound("s", 0.0, 1.0),
    "output_token": Bound("s/chunk", 0.0, 0.01),
}


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Coefficients with their units in `BOUNDS`; fractions are of the data sheet's peak.

    Attributes:
        weight_bandwidth: memory bandwidth reached while weights stream.
        kv_bandwidth: the same while decode attention reads the KV cache.
        mixed_kv_reread: in a batch that also holds prefill chunks, kernels that do not pack the query heads
            of a KV head read it more than once: 1 + mixed_kv_reread * (query heads per KV head - 1) times.
        gemm_flops: FLOP rate of large GEMMs.
        gemm_ramp: tokens' worth of extra GEMM time per step, so that small batches reach less of the rate:
            rate(T) = gemm_flops * T / (T + gemm_ramp).
        ridge: how sharply a step turns from weight-bound to compute-bound; the two times are combined as
            (a^r + b^r)^(1/r), infinity being a plain maximum.
        tile, tile_edge: above `tile` tokens the GEMM work is that of T + tile_edge * (T rounded up - T).
        attention_flops: FLOP rate of prefill attention.
        throttle, throttle_relax: see `sim.steptime.throttle.Throttle`.
        step_overhead: device time per step that no token explains (sampling, input copies, gaps).
        layer_overhead: device time per layer that no token explains (shortest duration of its kernels).
        moe_layer_overhead: on top of it in layers with routed experts (router, permutation, small kernels).
        sequence: device time per sequence in the batch and layer.
        eager_launch, piecewise_launch: host time to launch one layer without a graph, or with attention
            outside the graph; they overlap what the device does, and a step cannot be shorter than them.
        allreduce_latency, link_bandwidth: one tensor-parallel all-reduce.
        host_schedule, host_schedule_seq: host work before the launch.
        host_update, host_update_seq: host work after the result.
        front_request, front_prompt_token, output_delay, output_token: see `FrontEnd`.

    Raises:
        BadInput: a coefficient lies outside what physics allows.
    """

    weight_bandwidth: float
    kv_bandwidth: float
    gemm_flops: float
    attention_flops: float
    mixed_kv_reread: float = 0.0
    gemm_ramp: float = 0.0
    ridge: float = 2.0
    tile: float = 128.0
    tile_edge: float = 0.0
    throttle: float = 0.0
    throttle_relax: float = 0.025
    step_overhead: float = 0.0
    layer_overhead: float = 0.0
    moe_layer_overhead: float = 0.0
    sequence: float = 0.0
    eager_launch: float = 0.0
    piecewise_launch: float = 0.0
    allreduce_latency: float = 0.0
    link_bandwidth: float = 1.0
    host_schedule: float = 0.0
    host_schedule_seq: float = 0.0
    host_update: float = 0.0
    host_update_seq: float = 0.0
    front_request: float = 0.0
    front_prompt_token: float = 0.0
    output_delay: float = 0.0
    output_token: float = 0.0

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if not bound.low <= value <= bound.high:
                raise BadInput(
                    f"efficiencies.{name}",
                    value,
                    f"must lie between {bound.low:g} and {bound.high:g} [{bound.unit}]",
                )

    @property
    def front_end(self) -> FrontEnd:
        """The terms outside the engine's loop."""
        return FrontEnd(self.front_request, self.front_prompt_token, self.output_delay, self.output_token)

    def fixed(self, num_layers: int, moe_layers: int) -> float:
        """Device time of a step that neither tokens nor sequences explain [s]."""
        return self.step_overhead + self.layer_overhead * num_layers + self.moe_layer_overhead * moe_layers

    def to_dict(self) -> dict[str, float]:
        """All coefficients by name, in a fixed order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Efficiencies:
        """Inverse of `to_dict`; absent coefficients take their defaults.

        Raises:
            BadInput: an unknown name, a missing required one, or a value out of bounds.
        """
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise BadInput(f"efficiencies.{name}", None, "no such coefficient")
        for name in ("weight_bandwidth", "kv_bandwidth", "gemm_flops", "attention_flops"):
            if name not in values:
                raise BadInput(f"efficiencies.{name}", None, "is missing")
        return cls(**{name: float(value) for name, value in values.items()})
