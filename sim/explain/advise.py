"""Flag changes ranked by what they would do, one at a time: each with interval, price and command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sim.build import ScenarioSource
from sim.command_text import predict_text, serve_text
from sim.comparison.compare import figure
from sim.errors import ServecastError
from sim.explain.carry import changed
from sim.explain.changes import Change, candidates
from sim.explain.knowledge import Direction
from sim.explain.outcome import GOALS, Goal, Outcome, evaluate
from sim.explain.uncertain import OTHER_FORMAT, StepTimes, Variant, defaults, run_variant, variants
from sim.scenario import EngineName

LOSS = 0.10  # of throughput, from which a change says so
NOTHING = 0.005  # relative effect below which a change "does nothing"
# The direction in which each concept gets worse.
_WORSE: Mapping[str, Direction] = {
    **dict.fromkeys(("ttft", "tpot", "itl", "e2el", "queue_time", "preemptions"), "up"),
    **dict.fromkeys(("throughput", "kv_capacity", "hit_rate"), "down"),
}
QUALITY = "answers may change: measure quality scores again before you keep it"


@dataclass(frozen=True, slots=True)
class Effect:
    """A relative change of a figure, with its range over the variants; None where that was not computed."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def sure(self) -> bool:
        """Whether every variant agrees on the direction."""
        return self.low is not None and self.high is not None and self.low * self.high > 0


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and what it would do.

    Attributes:
        effect: on the goal's figure, relative (-0.5 halves it).
        throughput: on output tokens/s, relative.
        outcome: the run with the change.
        costs: what the flag's change gives up.
        warnings: what must be said beside it: lost throughput, quality, more GPUs.
        serve: the launch command with the change.
        predict: the command that makes this very prediction again.
    """

    change: Change
    effect: Effect
    throughput: float
    outcome: Outcome
    costs: str
    warnings: tuple[str, ...]
    serve: str
    predict: str


@dataclass(frozen=True, slots=True)
class Advised:
    """The answer.

    Attributes:
        base: the scenario as it is.
        ranked: changes that help, on the GPUs at hand, best first.
        more_gpus: changes that help and need more GPUs than the deployment has now.
        useless: changes that move the goal by less than half a per cent.
        harmful: changes that make it worse, with their effect.
        refused: changes that the engine would not take, with its reason.
        goal_note: what to know of the goal itself for this load; "" if nothing.
    """

    goal: Goal
    base: Outcome
    ranked: tuple[Advice, ...]
    more_gpus: tuple[Advice, ...]
    useless: tuple[Change, ...]
    harmful: tuple[tuple[Change, float], ...]
    refused: tuple[tuple[Change, str], ...]
    goal_note: str = ""


def advise(
    source: ScenarioSource,
    goal: Goal,
    *,
    top: int = 5,
    step_times: StepTimes = defaults,
    profile: str | None = None,
) -> Advised:
    """Try every candidate change alone against the scenario as it is, under the same load.

    Args:
        top: how many of the best get an interval (each costs several simulations).
        step_times: calibrated step times, or the GPU's defaults.
        profile: the calibration's file, for the commands that are written.

    Raises:
        BadInput: the scenario itself is refused.
        EngineStuck: it hangs as it is.
    """
    scenario = source.build()
    base = evaluate(scenario, step_times(scenario))
    found: list[tuple[Change, Outcome, float]] = []
    refused: list[tuple[Change, str]] = []
    for change in candidates(scenario, base.fits or None):
        try:
            after = changed(source, change.settings).build()
            outcome = evaluate(after, step_times(after))
        except ServecastError as error:
            refused.append((change, str(error)))
            continue
        effect = relative(base.value(goal), outcome.value(goal))
        if effect is not None:
            found.append((change, outcome, effect))
    sign = 1.0 if GOALS[goal][1] else -1.0
    helping = sorted((row for row in found if sign * row[2] < -NOTHING), key=lambda row: sign * row[2])
    here = [row for row in best_of_each(helping) if row[1].gpus <= base.gpus]
    more = [row for row in best_of_each(helping) if row[1].gpus > base.gpus]
    cases = variants(source, scenario, profile=step_times is not defaults)
    bases = [_try_variant(source, (), case, step_times) for case in cases]
    make = _Maker(source, goal, base, cases, bases, step_times, profile)
    return Advised(
        goal=goal,
        base=base,
        ranked=tuple(make(row, interval=i < top) for i, row in enumerate(here)),
        more_gpus=tuple(make(row, interval=i < 1) for i, row in enumerate(more)),
        useless=tuple(row[0] for row in found if abs(row[2]) <= NOTHING),
        harmful=tuple((row[0], row[2]) for row in found if sign * row[2] > NOTHING),
        refused=tuple(refused),
        goal_note=_goal_note(goal, base),
    )


def relative(before: float | None, after: float | None) -> float | None:
    """after / before - 1; None where either is unknown or nothing."""
    return None if after is None or not before else after / before - 1.0


def best_of_each(rows: Iterable[tuple[Change, Outcome, float]]) -> list[tuple[Change, Outcome, float]]:
    """Of several values of one flag the best, in the given order."""
    first: dict[str, tuple[Change, Outcome, float]] = {}
    for row in rows:
        first.setdefault(row[0].flag, row)
    return list(first.values())


def _goal_note(goal: Goal, base: Outcome) -> str:
    if base.state == "saturated" and goal in ("ttft", "p99-ttft"):
        return (
            "the load exceeds what the server completes: TTFT measures the length of the test, so ask for "
            "throughput first"
        )
    if base.state == "stable" and goal in ("throughput", "cost"):
        return (
            "the server completes all that is offered, so throughput is the load's; to see what it could do, "
            "offer more: --set request-rate=inf"
        )
    return ""


@dataclass(frozen=True, slots=True)
class _Maker:
    """Turns a ranked row into advice."""

    source: ScenarioSource
    goal: Goal
    base: Outcome
    cases: Sequence[Variant]
    bases: Sequence[Outcome | None]
    step_times: StepTimes
    profile: str | None

    def __call__(self, row: tuple[Change, Outcome, float], *, interval: bool) -> Advice:
        change, outcome, mean = row
        after = changed(self.source, change.settings)
        loss = relative(self.base.figures.get("output_throughput"), outcome.figures.get("output_throughput"))
        return Advice(
            change=change,
            effect=self._interval(change, mean) if interval else Effect(mean),
            throughput=loss or 0.0,
            outcome=outcome,
            costs=_costs(change, self.source.serve.engine, self.base, outcome),
            warnings=tuple(self._warnings(change, outcome, loss or 0.0)),
            serve=serve_text(after),
            predict=predict_text(after, self.profile),
        )

    def _interval(self, change: Change, mean: float) -> Effect:
        pairs = list(zip(self.cases, self.bases, strict=True))
        if change.knob(self.source.serve.engine).quality:
            # Rates in another number format are known of no card here: only the run with the change moves.
            pairs += [(case, self.base) for case in OTHER_FORMAT]
        effects = [mean]
        for case, base in pairs:
            outcome = (
                None if base is None else _try_variant(self.source, change.settings, case, self.step_times)
            )
            if base is not None and outcome is not None:
                effect = relative(base.value(self.goal), outcome.value(self.goal))
                effects += [] if effect is None else [effect]
        return Effect(mean, min(effects), max(effects))

    def _warnings(self, change: Change, outcome: Outcome, loss: float) -> Iterable[str]:
        if loss < -LOSS:
            yield f"lowers throughput by {-loss:.0%}"
        if outcome.gpus > self.base.gpus:
            yield f"needs {outcome.gpus} GPUs instead of {self.base.gpus}"
        if change.knob(self.source.serve.engine).quality:
            yield QUALITY
        if outcome.preemptions > max(2 * self.base.preemptions, self.base.preemptions + 5):
            yield f"preemptions rise from {self.base.preemptions} to {outcome.preemptions}"
        if outcome.result.verdict.status == "INVALID":
            yield "requests fail in this run"


def _costs(change: Change, engine: EngineName, before: Outcome, after: Outcome) -> str:
    """What a change gives up; for one against the direction that its knob speaks of, what that would give.

    Of the latter only what the two runs do not contradict.
    """
    knob = change.knob(engine)
    against = {"raise": "lower", "on": "off", "lower": "raise", "off": "on"}.get(knob.change)
    if against is None or change.direction != against:
        return knob.costs
    lost = [key for key, way in _turned(knob.moves).items() if way == _WORSE.get(key)]
    told = [f"{key.replace('_', ' ')} {_WORSE[key]}" for key in lost if not _contradicted(key, before, after)]
    if told:
        return f"may be {', '.join(told)}"
    return "nothing that shows under this load" if lost else "nothing known"


def _contradicted(concept: str, before: Outcome, after: Outcome) -> bool:
    """Whether the runs show that something does not get worse; False where they do not tell."""
    old, new = _figure(concept, before), _figure(concept, after)
    if old is None or new is None:
        return False
    loss = new - old if _WORSE[concept] == "up" else old - new
    return loss <= NOTHING * abs(old)


def _figure(concept: str, outcome: Outcome) -> float | None:
    if concept == "queue_time":
        return outcome.parts.get("queue")
    if concept == "preemptions":
        return outcome.preemptions
    if concept == "kv_capacity":
        return outcome.kv_cache_tokens
    if concept == "hit_rate":
        queries, hits = (outcome.result.server.get(f"prefix_cache_{key}") for key in ("queries", "hits"))
        return None if not queries or hits is None else float(hits) / float(queries)
    keys = {"throughput": "output_throughput", "itl": "p99_itl_ms"}
    return figure(outcome.result, keys.get(concept, f"mean_{concept}_ms"))


def _turned(moves: Mapping[str, Direction]) -> dict[str, Direction]:
    turned: dict[Direction, Direction] = {"up": "down", "down": "up", "either": "either"}
    return {key: turned[way] for key, way in moves.items()}


def _try_variant(
    source: ScenarioSource, settings: tuple[str, ...], case: Variant, step_times: StepTimes
) -> Outcome | None:
    try:
        return run_variant(source, settings, case, step_times)
    except ServecastError:
        return None
