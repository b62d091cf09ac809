"""A prediction with its intervals: the most likely simulation, and those that are also possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.carry import account_of
from sim.copies import begun
from sim.figures.intervals import LEVEL, Interval, intervals, reaching, repeat_noise
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
from sim.workload.generate import Load, generate_load
from sim.workload.starts import WITHIN, other_starts

if TYPE_CHECKING:
    from sim.profile import Profile

DRAWS = 8
MOVED = 0.10  # of the mean TTFT, by how a closed loop starts, from which on that is said


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
    A closed loop that keeps the cycle it starts in is simulated with other starts as well, as
    `sim.workload.starts` tells.

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

    def simulated(
        model: StepTimeModel | None, sent: Sequence[Request] | None, own: Load | None, by: int = 0
    ) -> Figures:
        run = simulate(
            _reseeded(scenario, by) if by else scenario,
            step_time=model,
            requests=sent,
            load=own,
            account=account,
            leap=leap,
            fast=fast,
        )
        return _figures(run.result)

    reseeds = basis is not None and not basis.envelope
    tasks = [
        partial(simulated, model, requests, None, number)
        if reseeds
        else partial(simulated, model, requests, load)
        for number, model in enumerate(basis.models if basis else (), start=1)
    ]
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
    result, text = nominal.result, basis.text
    rate = centre.get("request_throughput")
    apart = other_starts(scenario.workload, load.requests, rate) if load is not None and rate else []
    if apart:
        with begun([partial(simulated, step_time, sent, None) for sent in apart], copies) as results:
            starts = results()
        found = reaching(found, centre, starts)
        text += f", and {len(apart)} starts with the first requests up to {WITHIN:.0f} s apart (assumed)"
        result = replace(result, notes=(*result.notes, *_told_by(centre, starts)))
    return replace(nominal, result=_with_intervals(result, found, text))


def _told_by(nominal: Figures, starts: Sequence[Figures]) -> Iterator[Note]:
    """A warning where the mean TTFT depends on the start."""
    means = [value for figures in (nominal, *starts) if (value := figures.get("mean_ttft_ms")) is not None]
    if means and max(means) > (1 + MOVED) * min(means):
        text = (
            "equal output lengths in a closed loop: the run keeps the cycle that its first second leads to: "
            f"{min(means):.0f} to {max(means):.0f} ms"
        )
        yield Note("warning", "mean TTFT", text)


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
