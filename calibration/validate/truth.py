"""Simulated truth: measurements with known coefficients and noise, and how often a fit's intervals hold them.

python -m calibration.validate.truth [seeds [first]]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibration.evidence import ClientRun, Evidence, PerRequest, StepRun
from calibration.fit import fit
from calibration.parameters import Prior, default_prior
from calibration.replay import run_once
from sim.build import build_scenario
from sim.engines.base import StepShape
from sim.request import Request
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.scale import RATES

STEP_COEFFICIENTS = ("weight_bandwidth", "kv_bandwidth", "gemm_flops", "step_overhead", "sequence")
CLIENT_COEFFICIENTS = ("kv_bandwidth", "gemm_flops", "step_overhead", "output_delay")


def scenario() -> Scenario:
    """One model on one card."""
    return build_scenario(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 64 --max-num-batched-tokens 4096",
        bench="vllm bench serve --num-prompts 100",
        gpu="L40S",
        engine_version="0.28.0",
        kv_cache_tokens=200_000,
    )


def requests(rng: np.random.Generator, count: int, rate: float) -> tuple[Request, ...]:
    """A Poisson load of mixed lengths."""
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    prompts = rng.integers(64, 1800, count).tolist()
    outputs = rng.integers(8, 96, count).tolist()
    return tuple(
        Request(str(i), ((i, prompts[i]),), outputs[i], float(arrivals[i] - arrivals[0]))
        for i in range(count)
    )


def measured_run(
    truth: Efficiencies,
    seed: int,
    *,
    count: int = 120,
    rate: float = 3.0,
    noise: float = 0.01,
    token_times: bool = False,
    subject: Scenario | None = None,
    name: str = "",
) -> ClientRun:
    """What a client would have seen of an engine with these coefficients."""
    rng = np.random.default_rng(seed)
    subject = subject or scenario()
    sent = requests(rng, count, rate)
    model = replace(roofline(subject), efficiencies=truth)
    records = run_once(subject, sent, model).records
    ttft = (records.first_token - records.sent) * np.exp(noise * rng.standard_normal(count))
    decode = (records.last_token - records.first_token) * np.exp(noise * rng.standard_normal(count))
    times = tuple(np.empty(0) for _ in sent)
    if token_times:
        ends = records.itl_offsets
        times = tuple(
            ttft[i] + np.concatenate(([0.0], np.cumsum(records.itls[ends[i] : ends[i + 1]])))
            for i in range(count)
        )
        decode = np.array([t[-1] - t[0] for t in times])
    return ClientRun(
        name or f"run-{seed}.json",
        subject,
        {},
        PerRequest(sent, ttft, decode, records.output_len.copy(), times),
    )


def shapes(rng: np.random.Generator, count: int) -> tuple[StepShape, ...]:
    """Decode batches, prompts alone, and mixtures."""
    found = []
    for _ in range(count):
        decodes = int(rng.integers(0, 60))
        prompts = int(rng.integers(0, 3)) if decodes else int(rng.integers(1, 3))
        tokens = prompts * int(rng.integers(100, 1500))
        context = decodes * int(rng.integers(200, 3000))
        found.append(
            StepShape(
                kind="mixed",
                num_prefill_tokens=tokens,
                num_prefill_seqs=prompts,
                num_decode_seqs=decodes,
                prefill_pairs=tokens * (tokens // max(1, prompts)) // 2,
                prefill_context=tokens,
                decode_context=context,
                num_sampled=decodes + prompts,
            )
        )
    return tuple(found)


def measured_steps(truth: Efficiencies, seed: int, count: int = 200, noise: float = 0.01) -> StepRun:
    """What the probe would have timed; the card has time to cool between steps."""
    rng = np.random.default_rng(seed)
    subject, batches = scenario(), shapes(rng, count)
    model = replace(roofline(subject), efficiencies=replace(truth, throttle=0.0))
    seconds = np.array([model.gpu(shape) for shape in batches]) * np.exp(noise * rng.standard_normal(count))
    return StepRun(f"steps-{seed}.jsonl", subject, batches, seconds, np.arange(count, dtype=np.float64))


def truth_near(believed: Prior, names: tuple[str, ...], seed: int) -> Efficiencies:
    """A truth that the prior thinks possible: rates up to a deviation away, times by half of themselves."""
    rng = np.random.default_rng(seed + 10_000)
    values = {}
    for name in names:
        value, away = getattr(believed.efficiencies, name), float(rng.uniform(-1.0, 1.0))
        if name in RATES:
            values[name] = min(0.98, value * float(np.exp(believed.deviations[name] * away)))
        else:
            values[name] = value * (1.0 + 0.5 * away)
    return replace(believed.efficiencies, **values)


def prior() -> Prior:
    """What is believed before any fit."""
    return default_prior(scenario().gpu)


def evidence_of(kind: str, truth: Efficiencies, seed: int) -> list[Evidence]:
    """Steps of the probe, or two client runs at a low and a fair load."""
    if kind == "steps":
        return [measured_steps(truth, seed)]
    return [measured_run(truth, seed, rate=1.0), measured_run(truth, seed + 5000, rate=4.0)]


def recovered(kind: str, names: tuple[str, ...], seeds: Sequence[int]) -> dict[str, tuple[int, int]]:
    """By coefficient: how often its own 90 % interval held the truth, of how often it was identified."""
    believed = prior()
    found = dict.fromkeys(names, (0, 0))
    for seed in seeds:
        truth = truth_near(believed, names, seed)
        result = fit(evidence_of(kind, truth, seed), believed, names)
        for name in names:
            if result.status[name] == "fitted":
                low, high = result.interval(name)
                inside, count = found[name]
                found[name] = (inside + (low <= getattr(truth, name) <= high), count + 1)
    return found


def main() -> None:
    """Print the shares for both kinds of evidence."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seeds = range(first, first + count)
    for kind, names in (("steps", STEP_COEFFICIENTS), ("client", CLIENT_COEFFICIENTS)):
        found = recovered(kind, names, seeds)
        for name, (inside, count) in found.items():
            print(f"{kind:<7} {name:<18} {inside} of {count} intervals hold the truth")
        inside, count = (sum(pair[i] for pair in found.values()) for i in (0, 1))
        print(f"{kind:<7} {'all':<18} {inside} of {count} ({100 * inside / max(1, count):.0f} %)")


if __name__ == "__main__":
    main()
