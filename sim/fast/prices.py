"""The roofline of `sim.steptime.roofline`, compiled.

It restates `RooflineModel.assess` and `Throttle.seconds`; `flatten` checks on shapes of every sort that both
give the same, and refuses a model for which they do not.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engines.base import StepKind, StepShape
from sim.fast.jit import kernel
from sim.steptime.base import StepTimeModel
from sim.steptime.roofline import RANGE_SLACK, RooflineModel
from sim.steptime.throttle import Throttle

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
RESOURCES = ("compute", "bandwidth", "overhead")
PIECEWISE, EAGER = 1, 2
TOLERANCE = 1e-12
SLACK = RANGE_SLACK


# What an engine calls a batch; vLLM makes no difference.
ANY_BATCH, PREFILL_BATCH, DECODE_BATCH = 0, 1, 2
KIND_CODES: dict[StepKind, int] = {"mixed": ANY_BATCH, "prefill": PREFILL_BATCH, "decode": DECODE_BATCH}


class FlatModel(NamedTuple):
    """A roofline's coefficients as arrays; `values` in the order in which `price` unpacks them."""

    values: Floats
    decode_sizes: Ints
    other_sizes: Ints
    valid: Floats


def flatten(model: StepTimeModel, kinds: tuple[StepKind, ...]) -> FlatModel | None:
    """The coefficients of a model, or None if it is not one that this module prices exactly."""
    if type(model) is not RooflineModel:
        return None
    eff, cost, peaks, buckets = model.efficiencies, model.cost, model.peaks, model.buckets
    ranks, layers = model.tensor_parallel_size, cost.num_layers
    drop, relax = model.throttle
    values = np.array(
        [
            eff.fixed(layers, cost.moe_layers),
            eff.sequence * layers,
            cost.dense_bytes,
            cost.lm_head_bytes,
            cost.moe_layers * cost.expert_bytes * cost.num_experts,
            1.0 - cost.experts_per_token / cost.num_experts if cost.num_experts else 0.0,
            peaks.bandwidth * eff.weight_bandwidth,
            eff.tile if eff.tile_edge else math.inf,
            eff.tile_edge,
            eff.gemm_ramp,
            cost.flops_per_token,
            cost.lm_head_flops,
            peaks.gemm_flops * eff.gemm_flops,
            eff.ridge,
            eff.piecewise_launch * layers,
            eff.eager_launch * layers,
            PIECEWISE if buckets.other_launch == "piecewise" else 0.0,
            buckets.max_padding,
            2.0 * layers * eff.allreduce_latency if ranks > 1 else 0.0,
            4.0 * layers * (ranks - 1) / ranks * cost.allreduce_bytes_per_token
            / (peaks.link_bandwidth * eff.link_bandwidth),
            cost.kv_bytes_per_token,
            cost.sliding_kv_bytes_per_token,
            cost.sliding_window,
            peaks.bandwidth * eff.kv_bandwidth,
            1.0 + eff.mixed_kv_reread * (cost.kv_group - 1),
            cost.pair_flops,
            cost.sliding_pair_flops,
            peaks.attention_flops * eff.attention_flops,
            drop,
            relax,
        ],
        dtype=np.float64,
    )  # fmt: skip
    limits = (None,) * 4 if model.valid is None else model.valid
    flat = FlatModel(
        values,
        np.array(buckets.decode, dtype=np.int64),
        np.array(buckets.other, dtype=np.int64),
        np.array([-1.0 if limit is None else limit for limit in limits]),
    )
    return flat if all(_agrees(flat, model, kind) for kind in kinds) else None


def _agrees(flat: FlatModel, model: RooflineModel, kind: StepKind) -> bool:
    """Whether the compiled prices are the model's own on small, large, pure and mixed batches."""
    throttle, state = Throttle(model), np.array([0.0, 0.0])
    beyond = Beyond.none()
    now = 0.0
    for tokens, chunks, decodes in product((0, 37, 2048), (1, 3), (0, 5, 180)):
        if not tokens + decodes:
            continue
        prompts = chunks if tokens else 0
        shape = StepShape(
            kind, tokens, prompts, decodes, tokens * (tokens + 900) // 2, tokens + 450 * prompts,
            decodes * 1200, decodes + prompts,
        )  # fmt: skip
        seconds, resource = model.assess(shape)
        seconds = throttle.seconds(shape, now, seconds)
        ours, code = price(*flat[:3], KIND_CODES[kind], *shape[1:], now, state)
        if abs(ours - seconds) > TOLERANCE * seconds or RESOURCES[code] != resource:
            return False
        now += 1.01 * seconds
        beyond.counts[:] = 0
        note_range(flat.valid, beyond, *shape[1:4], shape.decode_context)
        if beyond.reasons(model, kind) != {reason: 1 for reason in [model.out_of_range(shape)] if reason}:
            return False
    return True


class Beyond(NamedTuple):
    """Steps beyond the range of a calibration, by which limit they pass and how far (power of two).

    Attributes:
        counts: shape (4, 64).
        example: one step of each sort: tokens in prompts, prompts, decodes, context; shape (4, 64, 4).
    """

    counts: Ints
    example: Ints

    @classmethod
    def none(cls) -> Beyond:
        """No such step yet."""
        return cls(np.zeros((4, 64), np.int64), np.zeros((4, 64, 4), np.int64))

    def reasons(self, model: RooflineModel, kind: StepKind) -> dict[str, int]:
        """How many steps there were, by the reason that the model gives."""
        found: dict[str, int] = {}
        for which, far in zip(*np.nonzero(self.counts), strict=True):
            tokens, prompts, decodes, context = self.example[which, far].tolist()
            reason = model.out_of_range(StepShape(kind, tokens, prompts, decodes, 0, 0, context, 0))
            if reason is not None:
                found[reason] = found.get(reason, 0) + int(self.counts[which, far])
        return found


@kernel
def note_range(valid, beyond, prefill_tokens, prompts, decodes, context):
    """`ValidRange.beyond`: count a step that lies outside."""
    which, limit, value = -1, 0.0, 0
    if valid[0] >= 0 and prefill_tokens + decodes > SLACK * valid[0]:
        which, limit, value = 0, valid[0], prefill_tokens + decodes
    elif valid[1] >= 0 and prefill_tokens > SLACK * valid[1]:
        which, limit, value = 1, valid[1], prefill_tokens
    elif valid[2] >= 0 and decodes > SLACK * valid[2]:
        which, limit, value = 2, valid[2], decodes
    elif valid[3] >= 0 and decodes and context > SLACK * valid[3] * decodes:
        which, limit, value = 3, valid[3], context // decodes
    if which < 0:
        return
    far = 0
    if limit:
        far = max(1, math.ceil(math.log2(value / limit)))
    beyond.counts[which, far] += 1
    example = beyond.example[which, far]
    example[0], example[1], example[2], example[3] = prefill_tokens, prompts, decodes, context


@kernel
def _bucket(sizes, tokens, most):
    at = np.searchsorted(sizes, tokens)
    if at == len(sizes) or sizes[at] > most * tokens:
        return 0
    return sizes[at]


@kernel
def price(
    values, decode_sizes, other_sizes, kind,
    prefill_tokens, prompts, decodes, pairs, prefill_context, context, sampled, start, warm,
):  # fmt: skip
    """Device seconds of a step that starts at `start`, and what they go to (index into `RESOURCES`).

    `kind` is `ANY_BATCH`, `PREFILL_BATCH` or `DECODE_BATCH`, as the engine calls the batch.
    `warm` holds the card's warmth and the moment up to which that is known; it is brought up to date.
    """
    (
        fixed, per_sequence, dense, lm_head, experts, miss, weight_rate, tile, tile_edge, ramp,
        flops_per_token, lm_head_flops, gemm_rate, ridge, piecewise, eager, other_launch, most, latency, wire,
        kv, sliding_kv, window, kv_rate, reread, pair_flops, sliding_pair_flops, attention_rate, drop, relax,
    ) = values  # fmt: skip
    tokens = prefill_tokens + decodes
    if tokens == 0:
        return 0.0, 2
    padded, launch = tokens, EAGER
    found = 0
    if prompts == 0 and kind != PREFILL_BATCH:
        found = _bucket(decode_sizes, tokens, math.inf)
        if found:
            padded, launch = found, 0
    if not found and kind != DECODE_BATCH:
        found = _bucket(other_sizes, tokens, most)
        if found:
            padded, launch = found, int(other_launch)
    touched = experts * (1.0 - miss**tokens) if experts else 0.0
    weights = (dense + touched + (lm_head if sampled else 0.0)) / weight_rate
    tiled = padded + 0.0
    if padded > tile:
        tiled += tile_edge * (math.ceil(padded / tile) * tile - padded)
    flops = ((tiled + ramp) * flops_per_token + sampled * lm_head_flops) / gemm_rate
    low, high = min(weights, flops), max(weights, flops)
    gemm = high
    if high and not math.isinf(ridge):
        gemm = high * math.pow(1.0 + math.pow(low / high, ridge), 1.0 / ridge)
    overhead = fixed + per_sequence * (prompts + decodes)
    if latency or wire:
        overhead += latency + wire * padded
    launches = piecewise if launch == PIECEWISE else eager if launch == EAGER else 0.0
    compute = bandwidth = 0.0
    if launches > gemm + overhead:
        overhead = launches
    elif flops > weights:
        compute = gemm
    else:
        bandwidth = gemm
    read = (context * kv + min(float(context), decodes * window) * sliding_kv) / kv_rate
    bandwidth += read * reread if prompts else read
    if prompts:
        sliding_pairs = min(float(pairs), prefill_tokens * window)
        attention = (pairs * pair_flops + sliding_pairs * sliding_pair_flops) / attention_rate
        in_window = min(float(prefill_context), prefill_tokens + prompts * window)
        compute += max(attention, (prefill_context * kv + in_window * sliding_kv) / kv_rate)
    seconds = compute + bandwidth + overhead
    resource = 1
    if overhead >= compute and overhead >= bandwidth:
        resource = 2
    elif compute > bandwidth:
        resource = 0
    if drop and prompts and flops > weights:
        warmth = warm[0] * math.exp((warm[1] - start) / relax)
        cools = math.exp(-seconds / relax)
        seconds += drop * (seconds - (1.0 - warmth) * relax * (1.0 - cools))
        warm[0] = 1.0 - (1.0 - warmth) * cools
        warm[1] = start + seconds
    return seconds, resource
