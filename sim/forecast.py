"""A prediction with its intervals: the most likely simulation, and those that are also possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.carry import account_of
from sim.copies import begun
from sim.figures.intervals import LEVEL, Interval, intervals, repeat_noise
from sim.figures.metrics import Figures
from sim.loop.replica import StepSink
from sim.provenance import Note
from sim.request import Request
from sim.results import BenchResult
from sim.scenario import Scenario
from sim.simulate import SimResult, roofline, simulate
from sim.steptime.base import StepTimeModel
from sim.steptime.defaults import Z90, default_efficiencies
from sim.steptime.scale import slowed
from sim.workload.generate import generate_load

if TYPE_CHECKING:
    from sim.profile import Profile

DRAWS = 8


@dataclass(frozen=True, slots=True)
class Basis:
    """What a prediction's intervals rest on, in words, and the step times that are also possible."""

    text: str
    models: tuple[StepTimeModel, ...]
    envelope: bool


def forecast(
    scenario: Scenario,
    profile: Profile | None = None,
    *,
    draws: int | None = None,
    requests: Sequence[Request] | None = None,
    steps: StepSink | None = None,
    leap: bool = True,
    fast: bool | None = None,
    copies: bool = False,
) -> SimResult:
    """`simulate`, with 90 % intervals under `extra["intervals"]` of the result.

    With a profile, coefficients are drawn from what its evidence allows, each with another seed of the load.
    Without one, the load is simulated with all steps slower and faster by what is assumed of the card.

    Args:
        draws: further simulations with a profile; 0 leaves intervals out altogether.
        requests, steps, leap, fast: see `simulate`; `steps` sees the most likely simulation only.
        copies: whether the further simulations may run beside it, in copies of this process.

    Raises:
        BadInput, EngineStuck: as `simulate`; the profile is of another GPU.
    """
    notes: tuple[Note, ...] = ()
    step_time: StepTimeModel | None = None
    if profile is not None:
        step_time, notes = profile.step_time(scenario)
    account = account_of(scenario)
    load = generate_load(scenario.workload) if requests is None else None
    count = DRAWS if draws is None else draws
    basis = _basis(scenario, profile, count) if count else None

    def other(index: int, model: StepTimeModel) -> Figures:
        one_load = basis is None or basis.envelope
        run = simulate(
            scenario if one_load else _reseeded(scenario, index + 1),
            step_time=model,
            requests=requests,
            load=load if one_load else None,
            account=account,
            leap=leap,
            fast=fast,
        )
        return _figures(run.result)

    tasks = [partial(other, *numbered) for numbered in enumerate(basis.models if basis else ())]
    with begun(tasks, copies) as results:
        nominal = simulate(
            replace(scenario, notes=(*scenario.notes, *notes)),
            step_time=step_time,
            requests=requests,
            load=load,
            account=account,
            steps=steps,
            leap=leap,
            fast=fast,
        )
        others = results()
    if basis is None:
        return nominal
    centre = _figures(nominal.result)
    first_token = 0.0 if profile is None else profile.content.first_token
    found = (
        _envelope(centre, others) if basis.envelope else intervals(centre, others, first_token=first_token)
    )
    return replace(nominal, result=_with_intervals(nominal.result, found, basis.text))


def _figures(result: BenchResult) -> Figures:
    return {**result.aggregates, "duration": result.duration}


def _reseeded(scenario: Scenario, by: int) -> Scenario:
    workload = replace(scenario.workload, seed=scenario.workload.seed + by)
    return replace(scenario, workload=workload, seed=scenario.seed + by)


def _basis(scenario: Scenario, profile: Profile | None, draws: int) -> Basis:
    if profile is not None:
        text = f"{draws} draws of the profile's coefficients and of the load's seed, and repeat noise"
        return Basis(text, tuple(profile.draws(scenario, draws, scenario.seed)), envelope=False)
    defaults = default_efficiencies(scenario.gpu)
    factor = 1.0 + defaults.step_error
    models = tuple(roofline(scenario, slowed(defaults.efficiencies, f)) for f in (1.0 / factor, factor))
    why = "assumed efficiencies" if defaults.assumed else "efficiencies not measured on this very card"
    steps = f"steps up to {100 * (factor - 1):.0f} % slower or faster ({why})"
    text = f"{steps}, which makes batches larger or smaller as well, and repeat noise"
    return Basis(text, models, envelope=True)


def _envelope(nominal: Figures, ends: Sequence[Figures]) -> dict[str, Interval]:
    """Lowest and highest of all simulations, with repeat noise on top."""
    plain = intervals(nominal, (), noise=0.0)
    found = {}
    for key, own in plain.items():
        values = [own.centre, *(v for e in ends if (v := e.get(key)) is not None and v > 0)]
        if len(values) <= len(ends):
            continue
        noise = Z90 * repeat_noise(key)
        above, below = math.log(max(values) / own.centre), math.log(own.centre / min(values))
        low = own.centre * math.exp(-math.hypot(below, noise))
        found[key] = Interval(own.centre, low, own.centre * math.exp(math.hypot(above, noise)))
    return found


def _with_intervals(result: BenchResult, found: dict[str, Interval], text: str) -> BenchResult:
    shown: dict[str, Any] = {
        "level": LEVEL,
        "from": text,
        "figures": {key: [interval.low, interval.high] for key, interval in found.items()},
    }
    return replace(result, extra={**result.extra, "intervals": shown})
