"""Runs that could be measured: one kind of step at a time, and mixed loads at a share of the capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from calibration.replay import account_of
from sim.flood import at_once, flood_size
from sim.scenario import Scenario
from sim.simulate import ENGINES, simulate
from sim.steptime.base import StepTimeModel
from sim.workload.generate import generate
from sim.workload.spec import RandomDataset, WorkloadSpec

BATCHES = (1, 4, 16, 64, 256)
DECODES = 64  # output tokens of a decode-only request: enough to average over its steps
SHORTEST = 16  # prompt tokens
KV_FILL = 0.85  # of the KV pool, for the run at high occupancy; more would preempt
CAPACITY_PROMPTS = 128  # at least
MIXED_LEAST, MIXED_MOST = 12, 200


@dataclass(frozen=True, slots=True)
class Candidate:
    """One load that may enter a plan.

    Attributes:
        label: part of its file names.
        purpose: what it holds apart, for people.
        mixed: prefill and decode at once, at a share of the capacity.
    """

    label: str
    purpose: str
    spec: WorkloadSpec
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine's flags and its KV pool leave for requests [tokens, requests]."""

    length: int
    step_tokens: int
    seqs: int
    kv_tokens: int

    @classmethod
    def of(cls, scenario: Scenario) -> Room:
        """The limits of a scenario's engine."""
        account = account_of(scenario)
        limits = ENGINES[scenario.engine.name].limits(scenario.engine, account)
        key = "max_model_len" if scenario.engine.name == "vllm" else "context_length"
        length = int(scenario.engine[key])
        pool = account.kv_cache_tokens
        return cls(
            length=min(length, pool),
            step_tokens=min(limits.max_num_tokens or length, length),
            seqs=limits.max_num_seqs or max(BATCHES),
            kv_tokens=pool,
        )


def isolated(scenario: Scenario) -> Iterator[Candidate]:
    """Loads of one kind each, in the order in which they should run: from idle to a full pool."""
    room = Room.of(scenario)
    endpoint = scenario.workload.endpoint
    base = WorkloadSpec(endpoint=endpoint, max_concurrency=1, num_warmups=1)

    def load(lengths: tuple[int, int], out: int, count: int, cap: int) -> WorkloadSpec:
        low, high = lengths
        middle = (low + high) / 2
        ratio = (high - low) / 2 / middle
        dataset = RandomDataset(round(middle), out, round(ratio, 3))
        return replace(base, dataset=dataset, num_prompts=count, max_concurrency=cap)

    short = min(528, room.step_tokens, room.length - 16)
    yield Candidate(
        "idle-short",
        f"idle requests of {SHORTEST} to {short} tokens: front end, first tiles",
        load((SHORTEST, short), 4, 20, 1),
    )
    whole = min(room.step_tokens, room.length) - 16
    if whole > 1.5 * short:
        text = f"idle requests of {short} to {whole} tokens: GEMM rate across tile edges"
        yield Candidate("idle-long", text, load((short, whole), 4, 12, 1))
    longest = min(room.length - DECODES, 8 * room.step_tokens)
    if longest > 1.5 * whole or longest > 8192:
        text = f"prompts of {longest} tokens: attention over long contexts, in chunks"
        yield Candidate("idle-context", text, load((longest, longest), DECODES, 2, 1))
    prompt = min(64, room.length // 4)
    out = min(DECODES, room.length - prompt)
    for batch in BATCHES:
        if batch > room.seqs or batch * (prompt + out) > room.kv_tokens:
            break
        text = f"{batch} decode{'s' if batch > 1 else ''} at a time: weights, and what a sequence costs"
        yield Candidate(f"decode-{batch}", text, load((prompt, prompt), out, max(2, batch), batch))
    yield from _full_pool(room, load)


def _full_pool(room: Room, load: object) -> Iterator[Candidate]:
    assert callable(load)
    out = min(DECODES, room.length // 4)
    count = min(room.seqs, max(1, int(KV_FILL * room.kv_tokens / 2048)))
    context = min(int(KV_FILL * room.kv_tokens / count), room.length) - out
    if context < 4 * out:
        return
    fill = count * (context + out) / room.kv_tokens
    text = f"{count} decodes of {context} tokens, {fill:.0%} of the KV pool: KV bandwidth"
    yield Candidate("kv-full", text, load((context, context), out, count, count))


def capacity(scenario: Scenario, model: StepTimeModel) -> float | None:
    """Requests/s of the scenario's own load that the engine can sustain, as simulated; None: no telling."""
    spec = replace(
        scenario.workload,
        num_prompts=max(CAPACITY_PROMPTS, flood_size(scenario)),
        request_rate=1.0,
        ramp_up=None,
        num_warmups=0,
    )
    flood = at_once(spec)
    if flood is None:
        return None
    outcome = simulate(replace(scenario, workload=flood), step_time=model)
    rate: float | None = outcome.result.extra["regime"]["sustainable_rate"]
    return rate


def mixed(scenario: Scenario, rate: float, share: float, seconds: float) -> Candidate | None:
    """The scenario's own requests at a share of the capacity, for about so many seconds.

    Returns:
        None if the time is too short for a load that means anything.
    """
    offered = share * rate
    count = min(MIXED_MOST, int(seconds * offered))
    if count < MIXED_LEAST:
        return None
    spec = replace(
        scenario.workload,
        num_prompts=count,
        request_rate=float(f"{offered:.3g}"),
        burstiness=1.0,
        max_concurrency=None,
        ramp_up=None,
        use_trace_arrivals=False,
        duration=None,
        num_warmups=1,
    )
    # Without a capacity of its own, a trace of fewer requests than asked for sends what it has.
    count = len(generate(spec))
    text = f"your load at {share:.0%} of the capacity: prefill beside decodes, queueing"
    return Candidate(f"mixed-{round(100 * share)}", text, replace(spec, num_prompts=count), mixed=True)
