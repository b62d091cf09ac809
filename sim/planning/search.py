"""The flags that carry the most load under objectives: successive halving, then full simulations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.build import ScenarioSource
from sim.errors import BadInput, EngineStuck
from sim.planning.capacity import Capacity, capacity
from sim.planning.load_curve import Effort
from sim.planning.pool import Pool, run_here
from sim.planning.search_space import Settings, draw_candidates
from sim.planning.slo import Slos
from sim.planning.stats import Estimate, jackknife
from sim.planning.vary import Dimension, build, locked, plain, variant
from sim.profile import Profile
from sim.scenario import Scenario

KEPT = 3  # one in so many goes on to the next round
FINALISTS = 3
ROUNDS = (8, 3)  # the first rounds simulate so many times fewer requests
MATTERS = 0.03  # a flag whose best and worst value differ by less does not matter
# Flags of the client that every level of load replaces.
OVERWRITTEN = (
    "request-rate",
    "max-concurrency",
    "num-prompts",
    "duration",
    "rate-scale",
    "ramp-up-strategy",
    "ramp-up-start-rps",
    "ramp-up-end-rps",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One combination at one effort.

    Attributes:
        settings: empty for the scenario as it stands.
        score: load sustained per GPU [requests/s, or requests in flight]; 0 if none or if it cannot run.
        failure: why it cannot run.
    """

    settings: Settings
    score: float
    found: Capacity | None = None
    failure: str | None = None

    @property
    def label(self) -> str:
        """`max-num-seqs=64, …`, or "as given"."""
        return words_of(self.settings)


def words_of(settings: Settings) -> str:
    """`max-num-seqs=64, …`, or "as given"."""
    return ", ".join(f"{plain(key)}={value}" for key, value in settings) or "as given"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one flag does around one combination: score by value, the others held.

    Scores are of short simulations under one seed, to be compared with each other and with nothing else.
    That of a value which cannot run is None, and says nothing of the flag.
    """

    name: str
    scores: tuple[tuple[str, float | None], ...]

    @property
    def effect(self) -> float:
        """Loss from the best value to the worst, as a share of the best."""
        values = self._known
        return 1.0 - min(values) / max(values) if max(values, default=0.0) > 0 else 0.0

    @property
    def losses(self) -> tuple[tuple[str, float | None], ...]:
        """By value, what is lost against the best value, as a share of it; None of what cannot run."""
        top = max(self._known, default=0.0)
        shares = [
            None if score is None else 1.0 - score / top if top > 0 else 0.0 for _, score in self.scores
        ]
        return tuple((value, share) for (value, _), share in zip(self.scores, shares, strict=True))

    @property
    def _known(self) -> list[float]:
        return [score for _, score in self.scores if score is not None]

    @property
    def matters(self) -> bool:
        """Whether the flag moves the answer by more than the search resolves."""
        return self.effect > MATTERS


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer: the best, what it is compared with, and which flag matters.

    Attributes:
        best: at full effort.
        given: the scenario as it stands, at full effort.
        finalists: all at full effort, best first.
        rounds: how many combinations each round looked at.
        ranking: by effect, strongest first, around `centre`.
        centre: the combination around which flags were moved one at a time.
        held: the flags' values in the scenario as it stands.
        refused: combinations that cannot run, with the reason.
    """

    best: Trial
    given: Trial
    finalists: tuple[Trial, ...]
    rounds: tuple[int, ...]
    ranking: tuple[Sensitivity, ...]
    refused: tuple[Trial, ...]
    centre: Settings = ()
    held: Settings = ()

    @property
    def gain(self) -> Estimate | None:
        """log(best / as given), load per GPU, seed by seed; None where the seeds do not tell.

        Both were simulated under the same seeds, so that what is luck in both cancels out: the jackknife is
        that of the ratio.
        """
        best, given = self.best.found, self.given.found
        if best is None or given is None or min(self.best.score, self.given.score) <= 0:
            return None
        ours, theirs = best.left_out, given.left_out
        if len(ours) < 2 or len(ours) != len(theirs) or min(*ours, *theirs) <= 0:
            return None
        whole = math.log(self.best.score / self.given.score)
        return jackknife(whole, [whole + math.log(a / b) for a, b in zip(ours, theirs, strict=True)])

    @property
    def clearly_better(self) -> bool | None:
        """Whether the best beats the scenario as it stands by more than chance.

        By `gain`; without it, if their 95 % intervals do not meet. None where one of them has no interval.
        """
        if self.gain is not None:
            return (self.gain.low or 0.0) > 0.0
        best, given = self.best.found, self.given.found
        if best is None or given is None or best.low is None or given.high is None:
            return None
        gpus = best.scenario.gpu_count, given.scenario.gpu_count
        return best.replications > 1 and best.low / gpus[0] > given.high / gpus[1]


@dataclass(frozen=True, slots=True)
class _Job:
    settings: Settings
    scenario: Scenario
    slos: Slos
    kind: str
    effort: Effort
    profile: Profile | None
    with_error: bool


def search(
    source: ScenarioSource,
    space: Sequence[Dimension],
    slos: Slos,
    *,
    kind: str = "rate",
    effort: Effort | None = None,
    candidates: int = 27,
    pool: Pool = run_here,
    profile: Profile | None = None,
) -> SearchResult:
    """Search.

    Rounds of short simulations throw out two thirds each; the best of the last round and the scenario as it
    stands are simulated in full. Then each flag is moved alone around the best, which gives the ranking;
    a value that does better there replaces the best one.

    Args:
        candidates: combinations in the first round.

    Raises:
        BadInput: an unknown flag, a value that it does not take, or nothing that can run.
    """
    effort = effort or Effort()
    base = source.build()
    wanted = "request-rate" if kind == "rate" else "max-concurrency"
    for dimension in space:
        if dimension.name == wanted:
            raise BadInput("--over", wanted, "is what is searched for; name flags of the engine")
        if dimension.name in OVERWRITTEN:
            raise BadInput("--over", dimension.name, "is set by the search itself; name flags of the engine")
    maker = _Maker(source, base, slos, kind, profile)
    left: list[Settings] = draw_candidates(space, max(2, candidates), base.seed)
    refused: dict[Settings, Trial] = {}
    sizes = []
    for divisor in ROUNDS:
        sizes.append(len(left))
        trials = maker.run(left, _smaller(effort, divisor), pool)
        refused.update({t.settings: t for t in trials if t.failure is not None})
        able = sorted((t for t in trials if t.failure is None), key=lambda t: -t.score)
        if not able:
            raise BadInput("--over", None, f"no combination can run: {next(iter(refused.values())).failure}")
        left = [t.settings for t in able[: max(FINALISTS, math.ceil(len(able) / KEPT))]]
        if len(left) <= FINALISTS:
            break
    left = left[:FINALISTS]
    middle = _smaller(effort, ROUNDS[-1])
    centre = left[0]
    left[0], ranking = _around(maker, centre, space, middle, pool)
    finals = list(dict.fromkeys([(), *left]))
    sizes.append(len(finals))
    trials = maker.run(finals, effort, pool, with_error=True)
    ordered = sorted(trials, key=lambda t: -t.score)
    return SearchResult(
        ordered[0],
        next(t for t in trials if not t.settings),
        tuple(ordered),
        tuple(sizes),
        tuple(ranking),
        tuple(refused.values()),
        centre,
        tuple(locked(source, space).items()),
    )


def _around(
    maker: _Maker, best: Settings, space: Sequence[Dimension], effort: Effort, pool: Pool
) -> tuple[Settings, list[Sensitivity]]:
    """Every flag alone through its values around `best`; the best combination seen on the way."""
    moved = {d.key: [_with(best, d.key, value) for value in d.values] for d in space}
    everything = list(dict.fromkeys([best, *(s for many in moved.values() for s in many)]))
    trials = maker.run(everything, effort, pool)
    scores = {t.settings: None if t.failure is not None else t.score for t in trials}
    ranking = [
        Sensitivity(d.name, tuple((v, scores[s]) for v, s in zip(d.values, moved[d.key], strict=True)))
        for d in space
    ]
    return max(scores, key=lambda s: scores[s] or 0.0), sorted(ranking, key=lambda r: -r.effect)


def _with(settings: Settings, key: str, value: str) -> Settings:
    return tuple((k, value if k == key else v) for k, v in settings)


def _smaller(effort: Effort, divisor: int) -> Effort:
    return Effort(max(100, effort.prompts // divisor), 1)


class _Maker:
    """Turns settings into trials."""

    def __init__(
        self, source: ScenarioSource, base: Scenario, slos: Slos, kind: str, profile: Profile | None
    ) -> None:
        self._source = source
        self._base = base
        self._slos = slos
        self._kind = kind
        self._profile = profile

    def run(
        self, many: Sequence[Settings], effort: Effort, pool: Pool, *, with_error: bool = False
    ) -> list[Trial]:
        """A trial for each, in their order; what cannot be built is refused."""
        jobs: list[_Job] = []
        trials: dict[Settings, Trial] = {}
        for settings in many:
            changed = variant(self._source, settings, field="--over")
            try:
                scenario, _ = build(changed, self._base, self._base.seed)
            except BadInput as error:
                trials[settings] = Trial(settings, 0.0, failure=str(error))
                continue
            jobs.append(_Job(settings, scenario, self._slos, self._kind, effort, self._profile, with_error))
        trials.update({trial.settings: trial for trial in pool(_try, jobs)})
        return [trials[settings] for settings in many]


def _try(job: _Job) -> Trial:
    try:
        found = capacity(
            job.scenario,
            job.slos,
            kind=job.kind,
            effort=job.effort,
            profile=job.profile,
            with_error=job.with_error,
        )
    except (BadInput, EngineStuck) as error:
        return Trial(job.settings, 0.0, failure=str(error))
    value = 0.0 if found.level is None else found.level.value
    return Trial(job.settings, value / job.scenario.gpu_count, found)
