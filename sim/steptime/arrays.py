"""Many step shapes priced at once: a fit prices the same steps with one set of coefficients after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.engines.base import StepShape
from sim.steptime.buckets import GraphBuckets
from sim.steptime.cost import ModelCost
from sim.steptime.roofline import RooflineModel

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ShapeArrays:
    """Step shapes as columns; every array has shape (steps,).

    Attributes:
        tokens, padded: tokens of the step, and what the GEMMs see of it after padding to a graph bucket.
        eager, piecewise: how the step is launched; both False for a whole graph.
        weight_bytes: read by the step.
        The others are `StepShape`'s.
    """

    tokens: Floats
    padded: Floats
    eager: Flags
    piecewise: Flags
    weight_bytes: Floats
    prefill_tokens: Floats
    prefill_seqs: Floats
    decode_seqs: Floats
    prefill_pairs: Floats
    prefill_context: Floats
    decode_context: Floats
    sampled: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, shapes: Sequence[StepShape], cost: ModelCost, buckets: GraphBuckets) -> ShapeArrays:
        """The columns of `shapes`, padded by `buckets`."""
        launches = [buckets.pad(shape) for shape in shapes]
        weights = {(s.num_tokens, s.num_sampled) for s in shapes}
        bytes_of = {key: cost.weight_bytes(*key) for key in weights}

        def column(values: Sequence[float]) -> Floats:
            return np.array(values, dtype=np.float64)

        return cls(
            tokens=column([s.num_tokens for s in shapes]),
            padded=column([padded for padded, _ in launches]),
            eager=np.array([launch == "eager" for _, launch in launches], dtype=np.bool_),
            piecewise=np.array([launch == "piecewise" for _, launch in launches], dtype=np.bool_),
            weight_bytes=column([bytes_of[s.num_tokens, s.num_sampled] for s in shapes]),
            prefill_tokens=column([s.num_prefill_tokens for s in shapes]),
            prefill_seqs=column([s.num_prefill_seqs for s in shapes]),
            decode_seqs=column([s.num_decode_seqs for s in shapes]),
            prefill_pairs=column([s.prefill_pairs for s in shapes]),
            prefill_context=column([s.prefill_context for s in shapes]),
            decode_context=column([s.decode_context for s in shapes]),
            sampled=column([s.num_sampled for s in shapes]),
        )


def device_seconds(model: RooflineModel, shapes: ShapeArrays) -> Floats:
    """`model.gpu` of every shape [s]; shapes without tokens cost nothing.

    The model's own graph buckets are not looked at: `shapes` holds what they did.
    """
    eff, cost = model.efficiencies, model.cost
    weights, compute = _roofline(model, shapes)
    low, high = np.minimum(weights, compute), np.maximum(weights, compute)
    gemm = high
    if np.isfinite(eff.ridge):
        share = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
        gemm = high * np.power(1.0 + np.power(share, eff.ridge), 1.0 / eff.ridge)
    launch = np.where(shapes.eager, eff.eager_launch, np.where(shapes.piecewise, eff.piecewise_launch, 0.0))
    sequences = eff.sequence * cost.num_layers * (shapes.decode_seqs + shapes.prefill_seqs)
    overhead = eff.fixed(cost.num_layers, cost.moe_layers)
    device = np.maximum(overhead + gemm + sequences + _communication(model, shapes), launch * cost.num_layers)
    total = device + _decode_read(model, shapes) + _prefill_attention(model, shapes)
    return np.where(shapes.tokens > 0, total, 0.0)


def heating(model: RooflineModel, shapes: ShapeArrays) -> Flags:
    """`model.heats` of every shape."""
    weights, compute = _roofline(model, shapes)
    return (shapes.prefill_seqs > 0) & (compute > weights)


def _roofline(model: RooflineModel, shapes: ShapeArrays) -> tuple[Floats, Floats]:
    """Seconds that the weights and the FLOP of every step take."""
    eff, cost, peaks = model.efficiencies, model.cost, model.peaks
    weights = shapes.weight_bytes / (peaks.bandwidth * eff.weight_bandwidth)
    tiled = shapes.padded.copy()
    if eff.tile_edge:
        tile_up = np.ceil(shapes.padded / eff.tile) * eff.tile
        tiled += np.where(shapes.padded > eff.tile, eff.tile_edge * (tile_up - shapes.padded), 0.0)
    flops = (tiled + eff.gemm_ramp) * cost.flops_per_token + shapes.sampled * cost.lm_head_flops
    return weights, flops / (peaks.gemm_flops * eff.gemm_flops)


def _kv_read(model: RooflineModel, context: Floats, sliding_limit: Floats) -> Floats:
    cost = model.cost
    read = context * cost.kv_bytes_per_token
    if cost.sliding_kv_bytes_per_token:
        read = read + np.minimum(context, sliding_limit) * cost.sliding_kv_bytes_per_token
    return read / (model.peaks.bandwidth * model.efficiencies.kv_bandwidth)


def _decode_read(model: RooflineModel, shapes: ShapeArrays) -> Floats:
    once = _kv_read(model, shapes.decode_context, shapes.decode_seqs * model.cost.sliding_window)
    again = 1.0 + model.efficiencies.mixed_kv_reread * (model.cost.kv_group - 1)
    return np.where(shapes.prefill_seqs > 0, once * again, once)


def _prefill_attention(model: RooflineModel, shapes: ShapeArrays) -> Floats:
    cost = model.cost
    sliding = np.minimum(shapes.prefill_pairs, shapes.prefill_tokens * cost.sliding_window)
    flops = shapes.prefill_pairs * cost.pair_flops + sliding * cost.sliding_pair_flops
    compute = flops / (model.peaks.attention_flops * model.efficiencies.attention_flops)
    in_window = shapes.prefill_tokens + shapes.prefill_seqs * cost.sliding_window
    return np.maximum(compute, _kv_read(model, shapes.prefill_context, in_window))


def _communication(model: RooflineModel, shapes: ShapeArrays) -> Floats:
    ranks, eff, cost = model.tensor_parallel_size, model.efficiencies, model.cost
    if ranks == 1:
        return np.zeros(len(shapes))
    moved = 2 * (ranks - 1) / ranks * shapes.padded * cost.allreduce_bytes_per_token
    wire = moved / (model.peaks.link_bandwidth * eff.link_bandwidth)
    return 2 * cost.num_layers * (eff.allreduce_latency + wire)
