"""A prediction with its intervals: the most likely simulation, and those that are also possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.carry import account_of
from sim.copies import begun
from sim.figures.intervals import LEVEL, Interval, intervals, reaching, repeat_noise
from sim.figures.metrics import Figures
from sim.loop.replica import StepSink
from sim.memory import MemoryAccount
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

    run = partial(_simulated, account=account, leap=leap, fast=fast)
    models = basis.models if basis else ()
    if basis is None or basis.envelope:
        tasks = [partial(run, scenario, model, requests, load) for model in models]
    else:
        tasks = [partial(run, _reseeded(scenario, n), m, requests) for n, m in enumerate(models, start=1)]
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
    if load is not None and (
        sides := _starts(partial(run, scenario, step_time), scenario, load, centre, copies)
    ):
        together, *apart = sides
        found = reaching(found, together, apart)
        text += f", and {len(apart)} starts with the first requests up to {WITHIN:.0f} s apart (assumed)"
        told = _told_by(scenario.workload.max_concurrency, centre, together, apart)
        result = replace(result, notes=(*result.notes, *told))
    return replace(nominal, result=_with_intervals(result, found, text))


def _simulated(
    scenario: Scenario,
    model: StepTimeModel | None,
    requests: Sequence[Request] | None,
    load: Load | None = None,
    *,
    account: MemoryAccount,
    leap: bool,
    fast: bool | None,
) -> Figures:
    outcome = simulate(
        scenario, step_time=model, requests=requests, load=load, account=account, leap=leap, fast=fast
    )
    return _figures(outcome.result)


def _starts(
    run: Callable[[Sequence[Request]], Figures], scenario: Scenario, load: Load, centre: Figures, copies: bool
) -> list[Figures]:
    """Figures of the load, or of its beginning, sent together and with other starts; none if it forgets."""
    rate = centre.get("request_throughput")
    apart = other_starts(scenario.workload, load.requests, rate, whole=False) if rate else []
    if not apart:
        return []
    part = load.requests.first(len(apart[0]))
    known = [centre] if len(part) == len(load.requests) else []
    sent = apart if known else [part, *apart]
    with begun([partial(run, requests) for requests in sent], copies) as results:
        return [*known, *results()]


def _told_by(
    cap: int | None, nominal: Figures, together: Figures, starts: Sequence[Figures]
) -> Iterator[Note]:
    """A warning where the mean TTFT depends on whether the first requests are sent together or apart."""
    mean, *means = (figures.get("mean_ttft_ms") for figures in (nominal, together, *starts))
    known = [value for value in means if value]
    if mean and means[0] and max(known) > (1 + MOVED) * min(known):
        low, high = (mean * value / means[0] for value in (min(known), max(known)))
        text = (
            f"equal output lengths in a closed loop of {cap}: the run keeps the cycle that its first second "
        )
        text += "leads to: "
        yield Note("warning", "mean TTFT", f"{text}{low:.0f} to {high:.0f} ms")


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
