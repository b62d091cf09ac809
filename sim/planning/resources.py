"""How near each resource is to its limit, and which one binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.engines.base import StepShape
from sim.planning.admission import admission
from sim.planning.outcome import Outcome
from sim.steptime.base import StepTimeModel

NEAR = 0.9  # a resource used beyond this leaves no headroom to speak of
WORDS = {
    "prefill": "prefill throughput",
    "decode": "decode throughput",
    "kv": "KV pool",
    "slots": "sequence slots",
    "rate": "request rate",
}


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of what each resource could give (0..1); only known ones are listed.

    Attributes:
        shares: by resource, of `WORDS`.
        binding: the fullest one.
        headroom: whether more load would fit: nothing is near its limit and nobody waits. A low KV use says
            nothing while prefill is exhausted.
    """

    shares: Mapping[str, float]
    binding: str
    headroom: bool

    def __str__(self) -> str:
        told = ", ".join(f"{WORDS[name]} {share:.0%}" for name, share in self.shares.items())
        return f"{told}; {WORDS[self.binding]} binds"


def utilisation(shares: Mapping[str, float], waiting: float) -> Utilisation:
    """Judge shares in use; `waiting` is the mean number of requests that wait for the engine."""
    binding = max(shares, key=lambda name: shares[name])
    return Utilisation(dict(shares), binding, waiting < 0.5 and shares[binding] < NEAR)


def shares_of(outcome: Outcome, step_time: StepTimeModel, prompt: float, output: float) -> dict[str, float]:
    """What a run used of prefill and decode throughput, KV and slots.

    The most prefill could do is full budgets of prompts back to back; the most decode could do is the
    largest batch that slots and KV pool admit, at mean context. Both share one device, so their sum
    matters too.
    """
    shares: dict[str, float] = {}
    caps, duration = outcome.caps, outcome.duration
    slots, pool = caps.get("max_num_seqs"), caps.get("kv_cache_tokens")
    if duration > 0:
        chunk = int(min(caps.get("max_num_tokens") or prompt, 65536) or 1)
        hits = (outcome.server.get("prefix_cache_hits") or 0) / duration
        inputs = max(0.0, (outcome.get("total_input_tokens") or 0.0) / duration - hits)
        shares["prefill"] = inputs / prefill_rate(step_time, chunk, prompt)
        fits = (
            admission(int(pool), prompt, output, block_size=int(caps.get("block_size") or 1))
            if pool
            else None
        )
        batch = max(1, min(slots or 1024, fits.on_average if fits else 1024))
        outputs = (outcome.get("total_output_tokens") or 0.0) / duration
        shares["decode"] = outputs / decode_rate(step_time, int(batch), prompt + output / 2)
    if (kv := outcome.queues.get("mean_kv_usage")) is not None:
        shares["kv"] = float(kv)
    if slots and (running := outcome.queues.get("mean_running")) is not None:
        shares["slots"] = float(running) / float(slots)
    return shares


def prefill_rate(step_time: StepTimeModel, chunk: int, prompt: float) -> float:
    """Prompt tokens/s of steps that hold nothing but `chunk` tokens of prompts of mean length `prompt`."""
    pieces = max(1, round(chunk / max(prompt, 1.0)))
    n = max(2, chunk // pieces)
    shape = StepShape("mixed", n * pieces, pieces, 0, pieces * n * (n + 1) // 2, n * pieces, 0, pieces)
    return n * pieces / _step(step_time, shape)


def decode_rate(step_time: StepTimeModel, batch: int, context: float) -> float:
    """Output tokens/s of steps that hold nothing but `batch` decodes at `context` tokens each."""
    shape = StepShape("mixed", 0, 0, batch, 0, 0, int(batch * context), batch)
    return batch / _step(step_time, shape)


def _step(step_time: StepTimeModel, shape: StepShape) -> float:
    """Device time, or host time where that is what bounds a step."""
    host = step_time.host_before(shape) + step_time.host_after(shape)
    return max(step_time.gpu(shape), host)
