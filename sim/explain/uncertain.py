"""How far to trust the difference of two simulations: the same difference under other assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sim.build import ScenarioSource
from sim.explain.carry import changed
from sim.explain.outcome import Outcome, evaluate
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.base import StepTimeModel
from sim.steptime.defaults import default_efficiencies
from sim.steptime.efficiencies import BOUNDS
from sim.steptime.roofline import RooflineModel
from sim.workload.spec import FileDataset, RandomDataset

# The step-time model of a scenario, or None for the GPU's defaults.
StepTimes = Callable[[Scenario], StepTimeModel | None]
# How wrong a coefficient may be, by where it comes from; a fit to the very card is a few per cent off.
SPREAD: Mapping[str, float] = {"measured": 0.05, "fitted": 0.05, "assumed": 0.2}
_COMPUTE = ("gemm_flops", "attention_flops")
_BANDWIDTH = ("weight_bandwidth", "kv_bandwidth")


def defaults(scenario: Scenario) -> StepTimeModel | None:
    """No calibration: the GPU's defaults."""
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which a prediction may be wrong: factors on the card's rates, the pool's bound, a seed."""

    compute: float = 1.0
    bandwidth: float = 1.0
    pool: float = 0.0
    seed: int | None = None


OTHER_FORMAT = (Variant(1 - SPREAD["assumed"], 1 - SPREAD["assumed"]), Variant(1 + SPREAD["assumed"]))


def variants(source: ScenarioSource, scenario: Scenario, *, profile: bool) -> list[Variant]:
    """The corners of what is uncertain: the card's rates, the pool where no log told it, the load's seed.

    Args:
        profile: a calibrated step-time model is used; its rates are not varied.
    """
    out: list[Variant] = []
    if not profile:
        compute, bandwidth = spread(scenario, _COMPUTE), spread(scenario, _BANDWIDTH)
        out += [Variant(1 + c * compute, 1 + b * bandwidth) for c in (-1, 1) for b in (-1, 1)]
    if source.observed.kv_cache_tokens is None and source.observed.num_gpu_blocks is None:
        out += [Variant(pool=-1.0), Variant(pool=1.0)]
    if depends_on_seed(scenario):
        out += [Variant(seed=scenario.seed + step) for step in (1, 2)]
    return out


def spread(scenario: Scenario, names: Sequence[str]) -> float:
    """Relative error to expect of the worst-known of these coefficients."""
    sources = default_efficiencies(scenario.gpu).sources
    return max(SPREAD[str(sources[name].origin)] for name in names)


def depends_on_seed(scenario: Scenario) -> bool:
    """Whether another seed means another load: random lengths, or random arrivals."""
    spec = scenario.workload
    dataset = spec.dataset
    if not spec.closed_loop and math.isfinite(spec.burstiness) and not spec.use_trace_arrivals:
        return True
    if isinstance(dataset, RandomDataset):
        return bool(dataset.range_ratio or dataset.output_range_ratio) or dataset.style == "sglang"
    return not (isinstance(dataset, FileDataset) and dataset.kind not in ("sharegpt",))


def run_variant(
    source: ScenarioSource, settings: tuple[str, ...], variant: Variant, step_times: StepTimes
) -> Outcome:
    """Simulate a change under a variant; `settings` () is the scenario as it is.

    Raises:
        BadInput: the engine would refuse it.
        EngineStuck: the engine would hang or die.
    """
    after = changed(source, settings, variant.pool)
    if variant.seed is not None:
        after = replace(after, seed=variant.seed)
    scenario = after.build()
    return evaluate(scenario, _step_time(scenario, variant, step_times))


def _step_time(scenario: Scenario, variant: Variant, step_times: StepTimes) -> StepTimeModel | None:
    model = step_times(scenario)
    if variant.compute == 1.0 and variant.bandwidth == 1.0:
        return model
    if model is not None and not isinstance(model, RooflineModel):
        return model
    known = default_efficiencies(scenario.gpu).efficiencies
    efficiencies = known if model is None else model.efficiencies
    factors = dict.fromkeys(_COMPUTE, variant.compute) | dict.fromkeys(_BANDWIDTH, variant.bandwidth)
    scaled = {
        name: min(max(getattr(efficiencies, name) * factor, BOUNDS[name].low), BOUNDS[name].high)
        for name, factor in factors.items()
    }
    return roofline(scenario, replace(efficiencies, **scaled))
