"""Fit the RTX 5090's efficiencies to the published reference run, and show how right the result is.

    python -m calibration.reference_fit

Two fits, each with as many unknowns as figures, solved by Newton's method on the simulator:

1. From the report at concurrency 1 alone: mean TTFT fixes the GEMM rate, mean TPOT fixes what a decode step
   costs beside its weights. Everything else is a prior; nothing measured at concurrency 128 is used.
2. The same, and the median ITL at concurrency 128, which fixes the rate at which decode-only batches read the
   KV cache. This one has seen a figure of the run that it is compared with (in-sample): its own target is
   marked "fitted". What mixed batches reach is left at its prior, because the median ITL is that of a
   decode-only step.

The coefficients of the second fit are the default of the RTX 5090 (sim/data/efficiencies.yaml). The last
table shows what the least certain prior, the front end's time per prompt token, does to the errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.reference import Reference, ReferenceRun, rtx5090_reference
from sim.scenario import EngineName
from sim.simulate import roofline, simulate
from sim.steptime.efficiencies import Efficiencies

Figures = Mapping[str, float | int | None]

LAYERS = "LLMServingSim layer timings (vLLM 0.19.0, RTX PRO 6000 Server, Llama-3.1-8B): "
PRIORS: Mapping[str, tuple[float, str]] = {
    "weight_bandwidth": (0.87, LAYERS + "GEMMs of one token; only the sum with step_overhead shows in TPOT"),
    "kv_bandwidth": (0.80, "decode attention at 80 % of peak; " + LAYERS + "0.92 of a lower peak"),
    "mixed_kv_reread": (
        0.15,
        LAYERS + "decode attention takes 1.45 times as long beside prefill, 4 heads/KV",
    ),
    "gemm_flops": (0.90, "start value, fitted"),
    "attention_flops": (0.75, "LLMServingSim layer timings, RTX 4090: prefill attention, 0.75 to 0.80"),
    "ridge": (2.0, LAYERS + "GEMM time between 1 and 2048 tokens"),
    "tile": (128.0, LAYERS + "steps every 128 tokens"),
    "tile_edge": (0.9, LAYERS + "height of those steps"),
    "step_overhead": (5.0e-4, "start value, fitted"),
    "layer_overhead": (1.3e-5, LAYERS + "shortest decode attention"),
    "sequence": (4.3e-7, LAYERS + "GEMM, attention, sampler and head per further sequence"),
    "eager_launch": (2.5e-4, "assumed; not in use here"),
    "piecewise_launch": (2.0e-5, "assumed; hidden behind the weights here"),
    "allreduce_latency": (1.2e-5, "assumed; not in use here"),
    "link_bandwidth": (0.7, "assumed; not in use here"),
    "host_schedule": (3.0e-4, "assumed; hidden by asynchronous scheduling but for idle starts"),
    "host_schedule_seq": (5.0e-6, "assumed; hidden"),
    "host_update": (2.0e-4, "assumed; hidden"),
    "host_update_seq": (5.0e-6, "assumed; hidden"),
    "front_request": (2.0e-4, "2 ms per prompt of 986 tokens on the H100 set of residency-vllm, split"),
    "front_prompt_token": (1.8e-6, "the same; tokenising is serial and grows with the prompt"),
    "output_delay": (1.0e-3, "assumed"),
}
BUDGETS = (2048, 4096, 16384)
FRONT_END_SWEEP = (1.0, 1.8, 3.0)
SKIPPED = ("total_input_tokens", "total_output_tokens")


@dataclass(frozen=True, slots=True)
class Target:
    """A published figure that a fit must meet: `key` of the run with `max_concurrency`."""

    max_concurrency: int
    key: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, and the residuals of their targets (log ratios)."""

    efficiencies: Efficiencies
    free: tuple[str, ...]
    targets: tuple[Target, ...]
    residuals: tuple[float, ...]


C1_TARGETS = (Target(1, "mean_ttft_ms"), Target(1, "mean_tpot_ms"))
C1_FREE = ("gemm_flops", "step_overhead")


def priors() -> Efficiencies:
    """The coefficients before any fit."""
    return Efficiencies.from_dict({name: value for name, (value, _) in PRIORS.items()})


def published(reference: Reference, max_concurrency: int, engine: str = "vllm") -> ReferenceRun:
    """The published run at one concurrency."""
    return next(r for r in reference.runs if (r.engine, r.max_concurrency) == (engine, max_concurrency))


def predict(
    efficiencies: Efficiencies,
    max_concurrency: int,
    num_prompts: int,
    settings: tuple[str, ...] = (),
    engine: EngineName = "vllm",
) -> dict[str, float | int | None]:
    """All figures of one simulated run of the reference, and its preemptions."""
    scenario = rtx5090_reference().scenario(engine, max_concurrency, num_prompts, settings)
    workload = replace(scenario.workload, percentiles=(90.0, 99.0))
    scenario = replace(scenario, workload=workload)
    outcome = simulate(scenario, step_time=roofline(scenario, efficiencies)).result
    return {
        **outcome.aggregates,
        "duration": outcome.duration,
        "num_preemptions": outcome.server["num_preemptions"],
    }


def fit_concurrency_1(start: Efficiencies | None = None) -> Fit:
    """GEMM rate and step overhead from the report at concurrency 1."""
    return _solve(start or priors(), C1_FREE, C1_TARGETS, lambda efficiencies: efficiencies)


def fit_with_median_itl(start: Fit) -> Fit:
    """As `start`, with the KV rate of decode-only batches from the median ITL at concurrency 128."""
    group = 7  # query heads per KV head of Qwen2.5-7B
    before = priors()
    mixed_rate = before.kv_bandwidth / (1.0 + before.mixed_kv_reread * (group - 1))

    def hold_mixed_rate(efficiencies: Efficiencies) -> Efficiencies:
        reread = max(0.0, (efficiencies.kv_bandwidth / mixed_rate - 1.0) / (group - 1))
        return replace(efficiencies, mixed_kv_reread=reread)

    targets = (*C1_TARGETS, Target(128, "median_itl_ms"))
    return _solve(start.efficiencies, (*C1_FREE, "kv_bandwidth"), targets, hold_mixed_rate)


def _solve(
    start: Efficiencies,
    free: tuple[str, ...],
    targets: tuple[Target, ...],
    tie: Callable[[Efficiencies], Efficiencies],
    rounds: int = 6,
) -> Fit:
    """Newton's method on the logarithms; the differences span 2 %, wider than the simulator's own jumps."""
    step = 0.02
    x = np.log([getattr(start, name) for name in free])
    residuals = np.array(_residuals(tie(_with(start, free, x)), targets))
    for _ in range(rounds):
        if np.abs(residuals).max() < 1e-4:
            break
        shifted = [_residuals(tie(_with(start, free, x + step * row)), targets) for row in np.eye(len(x))]
        jacobian = ((np.array(shifted) - residuals) / step).T
        x = x - np.clip(np.linalg.solve(jacobian, residuals), -0.5, 0.5)
        residuals = np.array(_residuals(tie(_with(start, free, x)), targets))
    return Fit(tie(_with(start, free, x)), free, targets, tuple(residuals.tolist()))


def _with(start: Efficiencies, free: Sequence[str], logs: np.ndarray) -> Efficiencies:
    return replace(start, **{name: float(np.exp(value)) for name, value in zip(free, logs, strict=True)})


def _residuals(efficiencies: Efficiencies, targets: Sequence[Target]) -> list[float]:
    reference = rtx5090_reference()
    figures: dict[int, Figures] = {}
    residuals = []
    for target in targets:
        run = published(reference, target.max_concurrency)
        if target.max_concurrency not in figures:
            # One request after the other, all alike: two say as much as twenty.
            prompts = 2 if target.max_concurrency == 1 else run.num_prompts
            figures[target.max_concurrency] = predict(efficiencies, target.max_concurrency, prompts)
        simulated = figures[target.max_concurrency][target.key]
        if simulated is None:
            raise RuntimeError(f"the simulator reports no {target.key}")
        residuals.append(math.log(simulated / run.figures[target.key]))
    return residuals


def errors(simulated: Figures, run: ReferenceRun) -> dict[str, float]:
    """Signed error of every published figure [%]."""
    found = {}
    for key, measured in run.figures.items():
        value = simulated[key]
        if value is not None and key not in SKIPPED:
            found[key] = 100.0 * (value / measured - 1.0)
    return found


def main() -> None:
    """Fit, and print coefficients and errors."""
    reference = rtx5090_reference()
    print(f"{reference.source}\n{reference.gpu}, {reference.model}\n")
    first = fit_concurrency_1()
    second = fit_with_median_itl(first)
    for title, fit in (("concurrency 1 alone", first), ("and the median ITL at 128 (in-sample)", second)):
        chosen = ", ".join(f"{name} {getattr(fit.efficiencies, name):.6g}" for name in fit.free)
        print(f"fit from {title}: {chosen}, mixed_kv_reread {fit.efficiencies.mixed_kv_reread:.4g}")
    for concurrency in (1, 128):
        run = published(reference, concurrency)
        print(f"\nconcurrency {concurrency}, {run.num_prompts} prompts: signed errors in %")
        columns = [
            (title, errors(predict(fit.efficiencies, concurrency, run.num_prompts, settings), run))
            for title, fit, settings in (
                ("c1 fit", first, ()),
                ("+ ITL", second, ()),
                *((f"budget {b}", second, (f"max-num-batched-tokens={b}",)) for b in BUDGETS),
            )
        ]
        print(f"{'':24}{'measured':>12}" + "".join(f"{title:>14}" for title, _ in columns))
        for key in columns[0][1]:
            cells = "".join(f"{column[key]:>+14.1f}" for _, column in columns)
            targeted = [t for t in second.targets if (t.max_concurrency, t.key) == (concurrency, key)]
            print(f"{key:24}{run.figures[key]:>12.2f}{cells}{'   fitted' if targeted else ''}")
    print("\nlargest error at concurrency 128 by the front end's time per prompt token [us]")
    for micros in FRONT_END_SWEEP:
        start = replace(priors(), front_prompt_token=micros * 1e-6)
        one = fit_concurrency_1(start)
        two = fit_with_median_itl(one)
        print(f"{micros:4.1f}: c1 fit {_worst(one)}; + ITL {_worst(two)}")


def _worst(fit: Fit) -> str:
    run = published(rtx5090_reference(), 128)
    found = errors(predict(fit.efficiencies, 128, run.num_prompts), run)
    bounded = {key: error for key, error in found.items() if key not in ("median_itl_ms", "num_preemptions")}
    key = max(bounded, key=lambda name: abs(bounded[name]))
    return f"{key} {bounded[key]:+.1f} %"


if __name__ == "__main__":
    main()
