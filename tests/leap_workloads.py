"""Random workloads, engines and step-time models for which leaping must change nothing, and how to tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sim.engines.base import Scheduler, StepShape
from sim.engines.glue import Limits
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.vllm.scheduler import VllmScheduler
from sim.errors import ServecastError
from sim.loop.run import RunOutcome, run
from sim.request import Request, can_share_prefixes
from sim.steptime.base import FrontEnd
from tests.engines_for_tests import SGLANG, VLLM

COLUMNS = (
    "scheduled",
    "sent",
    "first_token",
    "last_token",
    "prompt_len",
    "output_len",
    "cached_tokens",
    "itls",
    "itl_offsets",
    "queue",
    "prefill",
    "preemptions",
)
COUNTS = (
    "steps",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "max_kv_used_tokens",
    "kv_total_tokens",
    "out_of_range",
)


@dataclass(frozen=True)
class BentSteps:
    """Device time with every term that matters to a leap, a bend in the context, and a range that ends."""

    step: float = 1e-2
    before: float = 0.0
    after: float = 0.0
    before_seq: float = 0.0
    seq: float = 1e-4
    context: float = 1e-7
    token: float = 1e-5
    bend: float = math.inf
    range_end: float = 3000.0
    front_end: FrontEnd = field(default_factory=FrontEnd)

    def assess(self, shape: StepShape) -> tuple[float, str]:
        if not shape.num_tokens:
            return 0.0, "overhead"
        beyond = max(0.0, shape.decode_context - self.bend)
        read = self.context * (shape.decode_context - 0.7 * beyond if beyond else shape.decode_context)
        compute = self.token * shape.num_prefill_tokens
        overhead = self.step + self.seq * (shape.num_decode_seqs + shape.num_prefill_seqs)
        seconds = overhead + compute + read
        if overhead >= compute and overhead >= read:
            return seconds, "overhead"
        return seconds, "compute" if compute > read else "bandwidth"

    def gpu(self, shape: StepShape) -> float:
        return self.assess(shape)[0]

    def host_before(self, shape: StepShape) -> float:
        return self.before + self.before_seq * shape.num_decode_seqs

    def host_after(self, shape: StepShape) -> float:
        return self.after

    def out_of_range(self, shape: StepShape) -> str | None:
        return "long" if shape.decode_context > self.range_end else None


@dataclass(frozen=True)
class Case:
    """One run, to be made with and without leaps."""

    scheduler: Callable[[], Scheduler]
    requests: Sequence[Request]
    model: BentSteps
    options: dict[str, Any]

    def outcome(self, leap: bool) -> RunOutcome | str:
        """What came of it, or in which words the engine got stuck."""
        try:
            return run(self.scheduler(), self.requests, self.model, leap=leap, **self.options)
        except ServecastError as error:
            return f"{type(error).__name__}: {error}"


def draw(engine: str, seed: int, most_requests: int = 60) -> Case:
    """Workload number `seed`.

    Few or many requests, slow or all at once, with or without shared prefixes, early stops, caps, warm-ups
    and streaming intervals, in anything from a roomy to a starved KV pool.
    """
    rng = random.Random(f"{engine}/{seed}")
    block = rng.choice((4, 16, 16))
    requests = _requests(rng, block, rng.randint(3, most_requests))
    model = BentSteps(
        step=rng.uniform(1e-3, 3e-2),
        before=rng.choice((0.0, rng.uniform(0.0, 2e-2))),
        after=rng.choice((0.0, rng.uniform(0.0, 1e-2))),
        before_seq=rng.choice((0.0, 1e-4)),
        context=rng.choice((0.0, 1e-7, 1e-5)),
        bend=rng.choice((math.inf, 500.0, 2000.0)),
        front_end=FrontEnd(
            rng.choice((0.0, 0.01)),
            rng.choice((0.0, 1e-5)),
            rng.choice((0.0, 0.003)),
            rng.choice((0.0, 0.0, 1e-4, 2e-3)),
        ),
    )
    warm = [replace(requests[0], request_id="w", arrival=0.0)] if rng.random() < 0.2 else []
    options = {
        "max_concurrency": rng.choice((None, None, rng.randint(1, 20))),
        "warmups": warm,
        "stream_interval": rng.choice((1, 1, 1, 3)),
        "idle_poll": rng.choice((0.0, 1e-3)),
        "limits": Limits(8, 64),
    }
    make = _vllm(rng, requests, warm, block) if engine == "vllm" else _sglang(rng, requests, block)
    return Case(make, requests, model, options)


def _requests(rng: random.Random, block: int, count: int) -> list[Request]:
    rate, hot = rng.choice((0.5, 5.0, 50.0, math.inf)), rng.choice((0.0, 0.0, 0.5, 0.9))
    stopping = rng.choice((0.0, 0.0, 0.5))
    longest_prompt, longest_output = rng.choice((20, 200, 800)), rng.choice((3, 60, 300))
    arrival = 0.0
    requests = []
    for number in range(count):
        if rate < math.inf:
            arrival += rng.expovariate(rate)
        prompt: list[tuple[int | str, int]] = []
        if rng.random() < hot:
            prompt.append((f"family{rng.randrange(3)}", rng.choice((block * 2, block * 5 + 1, 37))))
        prompt.append((f"own{number}", rng.randint(1, longest_prompt)))
        output = rng.randint(1, longest_output)
        stop = rng.randint(1, output) if rng.random() < stopping else None
        requests.append(Request(str(number), tuple(prompt), output, arrival, stop))
    return requests


def _vllm(
    rng: random.Random, requests: list[Request], warm: list[Request], block: int
) -> Callable[[], Scheduler]:
    needs = [-(-(r.prompt_len + r.max_tokens) // block) for r in requests]
    slots = rng.choice((2, 8, 64))
    config = replace(
        VLLM,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, rng.choice((64, 256, 2048))),
        block_size=block,
        num_gpu_blocks=max(max(needs), int(sum(needs) * rng.choice((0.1, 0.3, 1.2)))) + 1,
        enable_prefix_caching=rng.random() < 0.8,
        async_scheduling=rng.random() < 0.6,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice((0.0, 0.05)),
        max_model_len=max(r.prompt_len for r in requests) + rng.choice((1, 30, 4000)),
        version=rng.choice(("0.28.0", "0.33.0")),
    )
    shares = can_share_prefixes([*warm, *requests])
    return lambda: VllmScheduler(config, shares_prefixes=shares)


def _sglang(rng: random.Random, requests: list[Request], block: int) -> Callable[[], Scheduler]:
    page = rng.choice((1, 1, 16))
    longest = max(r.prompt_len for r in requests) + max(r.max_tokens for r in requests) + 20
    total = sum(r.prompt_len + r.max_tokens for r in requests)
    tokens = max(longest, int(total * rng.choice((0.15, 0.4, 1.3)))) + 2 * page
    config = replace(
        SGLANG,
        max_running_requests=rng.choice((2, 8, 64)),
        chunked_prefill_size=rng.choice((64, 256, 2048, -1)),
        max_total_tokens=-(-tokens // page) * page,
        page_size=page,
        disable_radix_cache=rng.random() < 0.2,
        enable_mixed_chunk=rng.random() < 0.25,
        disable_overlap_schedule=rng.random() < 0.5,
        schedule_policy=rng.choice(("fcfs", "fcfs", "lpm")),
        schedule_conservativeness=rng.choice((0.05, 0.3, 1.0)),
        context_length=8192,
    )
    return lambda: SglangScheduler(config)


def differences(one: RunOutcome | str, other: RunOutcome | str) -> list[str]:
    """In what two outcomes differ; times count as equal within 1e-9 relative (or a nanosecond)."""
    if isinstance(one, str) or isinstance(other, str):
        return [] if one == other else [f"{one} / {other}"]
    found = [name for name in COLUMNS if not _close(getattr(one.records, name), getattr(other.records, name))]
    found += [
        name
        for name in ("status", "request_id")
        if getattr(one.records, name) != getattr(other.records, name)
    ]
    for part in ("series", "ttft_parts"):
        a, b = getattr(one, part), getattr(other, part)
        found += [f"{part}.{name}" for name in a.__slots__ if not _close(getattr(a, name), getattr(b, name))]
    if not _close(one.duration, other.duration):
        found.append("duration")
    found += [f"usage.{name}" for name in COUNTS if getattr(one.usage, name) != getattr(other.usage, name)]
    for name in ("device", "waiting"):
        a, b = getattr(one.usage, name), getattr(other.usage, name)
        found += [
            f"usage.{name}.{k}" for k in a.keys() | b.keys() if abs(a.get(k, 0.0) - b.get(k, 0.0)) > 1e-7
        ]
    return found


def _close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
