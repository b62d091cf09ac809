"""The roofline step-time model: a batch's bytes and FLOP over what the card is known to reach."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sim.engines.base import StepKind, StepShape
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec
from sim.steptime.base import DecodeLine, FrontEnd
from sim.steptime.buckets import NO_GRAPHS, GraphBuckets, Launch
from sim.steptime.cost import ModelCost
from sim.steptime.efficiencies import Efficiencies

Resource = Literal["compute", "bandwidth", "overhead"]


class StepParts(NamedTuple):
    """Where the device time of one step goes [s]; `total` is their sum.

    `gemm` is the larger side of the weights-against-FLOP roofline with its rounded ridge, and what launches
    take longer than all terms that no context enters.
    """

    overhead: float
    gemm: float
    sequences: float
    kv_read: float
    prefill_attention: float
    communication: float

    @property
    def total(self) -> float:
        """Device time of the step [s]."""
        return sum(self)


class ValidRange(NamedTuple):
    """The largest steps that a calibration has seen; None where there was none.

    Attributes:
        tokens: of one step.
        prefill_tokens: of one step, in chunks of more than one token.
        decode_seqs: chunks of one token in one step.
        context: mean tokens of context per decode.
    """

    tokens: int | None = None
    prefill_tokens: int | None = None
    decode_seqs: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, shapes: Iterable[StepShape]) -> ValidRange:
        """The range that `shapes` span."""
        tokens = prefill = decodes = context = 0
        for shape in shapes:
            tokens = max(tokens, shape.num_tokens)
            prefill = max(prefill, shape.num_prefill_tokens)
            decodes = max(decodes, shape.num_decode_seqs)
            if shape.num_decode_seqs:
                context = max(context, shape.decode_context // shape.num_decode_seqs)
        return cls(tokens, prefill, decodes, context)

    def beyond(self, shape: StepShape) -> str | None:
        """Where a shape lies outside, and by how much (to the next power of two); None within a tenth.

        The text ends in `TOO_FAR` where that is more than `FAR` times (`FAR_DECODES` for decodes).
        """
        for what, limit, value in (
            ("tokens per step", self.tokens, shape.num_tokens),
            ("prompt tokens per step", self.prefill_tokens, shape.num_prefill_tokens),
            (DECODES, self.decode_seqs, shape.num_decode_seqs),
        ):
            if limit is not None and value > RANGE_SLACK * limit:
                return _beyond(what, limit, value)
        decodes = shape.num_decode_seqs
        if (
            self.context is not None
            and decodes
            and shape.decode_context > RANGE_SLACK * self.context * decodes
        ):
            return _beyond("tokens of context per decode", self.context, shape.decode_context // decodes)
        return None


DECODES = "decodes per step"
RANGE_SLACK = 1.1  # what a calibration says of a step carries this much further
# How many times beyond what was measured steps may be priced: assumed, round figures. A published report at
# batch 1 foretold batch 128 within 12 % (calibration/reference_fit.py), so that far is no ground to refuse.
FAR = 64
FAR_DECODES = 128
TOO_FAR = "too far to predict"


def _beyond(what: str, limit: int, value: int) -> str:
    times = 2 ** max(1, math.ceil(math.log2(value / limit))) if limit else 0
    far = f"by up to {times} times" if times else "none was measured"
    text = f"more {what} than the calibration's {limit} ({far})"
    return f"{text}: {TOO_FAR}" if times > (FAR_DECODES if what == DECODES else FAR) else text


MEMO_LIMIT = 10_000
_Split = tuple[float, float, float, bool]
"""Seconds of compute, bandwidth and overhead, and whether the FLOP outlast the weights."""
NOTHING = StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Data-sheet peaks of one card for one model: bytes/s and FLOP/s."""

    bandwidth: float
    gemm_flops: float
    attention_flops: float
    link_bandwidth: float

    @classmethod
    def of(cls, gpu: GpuSpec, cost: ModelCost) -> Peaks:
        """Peaks of `gpu` in the dtypes that `cost` runs in.

        Quantised weights without units of their own are widened in the kernel and multiplied in the model's
        dtype (Marlin: vllm/model_executor/layers/quantization/utils/marlin_utils_fp8.py).

        Raises:
            BadInput: the card has no rate for the model's dtype.
        """
        if cost.attention_dtype not in gpu.dense_flops:
            raise BadInput("--gpu", gpu.name, f"has no {cost.attention_dtype} units in the GPU table")
        return cls(
            gpu.memory_bandwidth,
            gpu.dense_flops.get(cost.gemm_dtype, gpu.dense_flops[cost.attention_dtype]),
            gpu.dense_flops[cost.attention_dtype],
            gpu.link_bandwidth,
        )


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """Prices a step from first principles and a few efficiencies.

        t = overhead + ridge(W / BW, T_tiled * F / FL) + sequences + KV read + prefill attention + all-reduces

    W are the weight bytes that the batch touches, F the GEMM FLOP per token, T_tiled the tokens padded to the
    graph bucket and partly rounded up to a GEMM tile. This form fitted measured runs of vLLM on H100 and
    RTX cards; the rounded ridge (exponent 2) and the tile edges are those of the layer timings that
    LLMServingSim publishes for RTX PRO 6000 and RTX 4090 (profiler/perf, vLLM 0.19.0).

    All terms but `kv_read` are independent of `decode_context`, and `kv_read` is linear in it (piecewise with
    one kink for sliding-window layers: where the mean context passes the window).
    """

    efficiencies: Efficiencies
    cost: ModelCost
    peaks: Peaks
    buckets: GraphBuckets = NO_GRAPHS
    tensor_parallel_size: int = 1
    source: str = ""
    valid: ValidRange | None = None
    front_end: FrontEnd = field(init=False)
    _split_memo: dict[tuple[StepKind, int, int, int, int], _Split] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _attention_memo: dict[tuple[int, int, int, int], float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _kv_rate: float = field(init=False, repr=False, compare=False)
    _attention_rate: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        eff, peaks = self.efficiencies, self.peaks
        object.__setattr__(self, "front_end", eff.front_end)
        object.__setattr__(self, "_kv_rate", peaks.bandwidth * eff.kv_bandwidth)
        object.__setattr__(self, "_attention_rate", peaks.attention_flops * eff.attention_flops)

    @property
    def throttle(self) -> tuple[float, float]:
        """Share by which a warm card is slower, and how fast it warms and cools [s]."""
        return self.efficiencies.throttle, self.efficiencies.throttle_relax

    def heats(self, shape: StepShape) -> bool:
        """Whether a step draws the most power: it processes prompts, and its FLOP outlast its weights."""
        return shape.num_prefill_seqs > 0 and self._split_without_attention(shape)[3]

    def parts(self, shape: StepShape) -> StepParts:
        """The device time of a step, term by term."""
        eff, cost = self.efficiencies, self.cost
        if not shape.num_tokens:
            return NOTHING
        padded, launch = self.buckets.pad(shape)
        gemm = self._ridge(self._weights(shape), self._compute(padded, shape.num_sampled))
        overhead = eff.fixed(cost.num_layers, cost.moe_layers)
        sequences = eff.sequence * cost.num_layers * (shape.num_decode_seqs + shape.num_prefill_seqs)
        communication = self._communication(padded)
        launches = self._launch_time(launch) * cost.num_layers
        return StepParts(
            overhead=overhead,
            gemm=max(gemm, launches - overhead - sequences - communication),
            sequences=sequences,
            kv_read=self._decode_kv_read(shape),
            prefill_attention=self._prefill_attention(shape),
            communication=communication,
        )

    def gpu(self, shape: StepShape) -> float:
        """Seconds that the device is busy with the step."""
        return self.assess(shape)[0]

    def assess(self, shape: StepShape) -> tuple[float, Resource]:
        """Seconds that the device is busy with the step, and what most of them go to."""
        compute, bandwidth, overhead, _ = self._split_without_attention(shape)
        bandwidth += self._decode_kv_read(shape)
        if shape.num_prefill_seqs:
            compute += self._prefill_attention(shape)
        seconds = compute + bandwidth + overhead
        if overhead >= compute and overhead >= bandwidth:
            return seconds, "overhead"
        return seconds, "compute" if compute > bandwidth else "bandwidth"

    def host_before(self, shape: StepShape) -> float:
        """Seconds of host work before the launch."""
        eff = self.efficiencies
        return eff.host_schedule + eff.host_schedule_seq * (shape.num_decode_seqs + shape.num_prefill_seqs)

    def host_after(self, shape: StepShape) -> float:
        """Seconds of host work after the result."""
        eff = self.efficiencies
        return eff.host_update + eff.host_update_seq * (shape.num_decode_seqs + shape.num_prefill_seqs)

    def out_of_range(self, shape: StepShape) -> str | None:
        """Why this shape lies outside what was calibrated; never without a calibration."""
        return None if self.valid is None else self.valid.beyond(shape)

    def decode_line(self, shape: StepShape) -> DecodeLine:
        """How the price of a batch of decodes alone goes on as its context grows or shrinks."""
        compute, bandwidth, overhead, _ = self._split_without_attention(shape)
        cost, context = self.cost, shape.decode_context
        rate = self._kv_rate
        window = shape.num_decode_seqs * cost.sliding_window
        slope, since, reach = cost.kv_bytes_per_token / rate, 0.0, math.inf
        if context < window:
            slope, reach = slope + cost.sliding_kv_bytes_per_token / rate, float(window)
        else:
            bandwidth, since = bandwidth + window * cost.sliding_kv_bytes_per_token / rate, float(window)
        resource: Resource = "compute" if compute > overhead else "overhead"
        turn = (max(compute, overhead) - bandwidth) / slope if slope else math.inf
        if turn < context:
            resource, since = "bandwidth", max(since, turn + 1.0)
        else:
            reach = min(reach, turn - 1.0)
        return DecodeLine(compute + bandwidth + overhead, slope, since, reach, resource)

    def _split_without_attention(self, shape: StepShape) -> _Split:
        """All terms that no context length enters, remembered by batch."""
        kind, prefill_tokens, prefill_seqs, decode_seqs, _, _, _, sampled = shape
        key = (kind, prefill_tokens, prefill_seqs, decode_seqs, sampled)
        known = self._split_memo.get(key)
        if known is not None:
            return known
        if not shape.num_tokens:
            return 0.0, 0.0, 0.0, False
        padded, launch = self.buckets.pad(shape)
        weights, flops = self._weights(shape), self._compute(padded, shape.num_sampled)
        gemm = self._ridge(weights, flops)
        overhead = self._fixed(shape) + self._communication(padded)
        launches = self.cost.num_layers * self._launch_time(launch)
        if launches > gemm + overhead:
            split = (0.0, 0.0, launches, flops > weights)
        elif flops > weights:
            split = (gemm, 0.0, overhead, True)
        else:
            split = (0.0, gemm, overhead, False)
        if len(self._split_memo) >= MEMO_LIMIT:
            self._split_memo.clear()
        self._split_memo[key] = split
        return split

    def _fixed(self, shape: StepShape) -> float:
        eff, cost = self.efficiencies, self.cost
        sequences = shape.num_decode_seqs + shape.num_prefill_seqs
        return eff.fixed(cost.num_layers, cost.moe_layers) + eff.sequence * sequences * cost.num_layers

    def _launch_time(self, launch: Launch) -> float:
        """Host time per layer that the step cannot be shorter than."""
        if launch == "eager":
            return self.efficiencies.eager_launch
        return self.efficiencies.piecewise_launch if launch == "piecewise" else 0.0

    def _weights(self, shape: StepShape) -> float:
        rate = self.peaks.bandwidth * self.efficiencies.weight_bandwidth
        return self.cost.weight_bytes(shape.num_tokens, shape.num_sampled) / rate

    def _compute(self, tokens: int, sampled: int) -> float:
        eff = self.efficiencies
        tiled = tokens + 0.0
        if tokens > eff.tile and eff.tile_edge:
            tiled += eff.tile_edge * (math.ceil(tokens / eff.tile) * eff.tile - tokens)
        flops = (tiled + eff.gemm_ramp) * self.cost.flops_per_token + sampled * self.cost.lm_head_flops
        return flops / (self.peaks.gemm_flops * eff.gemm_flops)

    def _ridge(self, weights: float, compute: float) -> float:
        low, high = min(weights, compute), max(weights, compute)
        exponent = self.efficiencies.ridge
        if not high or math.isinf(exponent):
            return high
        return high * math.pow(1.0 + math.pow(low / high, exponent), 1.0 / exponent)

    def _decode_kv_read(self, shape: StepShape) -> float:
        once = self._kv_read(shape.decode_context, shape.num_decode_seqs * self.cost.sliding_window)
        if not shape.num_prefill_seqs:
            return once
        return once * (1.0 + self.efficiencies.mixed_kv_reread * (self.cost.kv_group - 1))

    def _kv_read(self, context: int, sliding_limit: int) -> float:
        cost = self.cost
        read = (
            context * cost.kv_bytes_per_token + min(context, sliding_limit) * cost.sliding_kv_bytes_per_token
        )
        return read / self._kv_rate

    def _prefill_attention(self, shape: StepShape) -> float:
        """Attention of the prompts in a batch, remembered: a benchmark's are often equally long."""
        _, tokens, sequences, _, pairs, context, _, _ = shape
        key = (tokens, sequences, pairs, context)
        known = self._attention_memo.get(key)
        if known is None:
            if len(self._attention_memo) >= MEMO_LIMIT:
                self._attention_memo.clear()
            known = self._attention_memo[key] = self._attention_of_prompts(shape)
        return known

    def _attention_of_prompts(self, shape: StepShape) -> float:
        cost = self.cost
        sliding_pairs = min(shape.prefill_pairs, shape.num_prefill_tokens * cost.sliding_window)
        flops = shape.prefill_pairs * cost.pair_flops + sliding_pairs * cost.sliding_pair_flops
        compute = flops / self._attention_rate
        in_window = shape.num_prefill_tokens + shape.num_prefill_seqs * cost.sliding_window
        return max(compute, self._kv_read(shape.prefill_context, in_window))

    def _communication(self, tokens: int) -> float:
        ranks = self.tensor_parallel_size
        if ranks == 1:
            return 0.0
        eff, cost = self.efficiencies, self.cost
        moved = 2 * (ranks - 1) / ranks * tokens * cost.allreduce_bytes_per_token
        wire = moved / (self.peaks.link_bandwidth * eff.link_bandwidth)
        return 2 * cost.num_layers * (eff.allreduce_latency + wire)
