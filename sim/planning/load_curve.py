"""A scenario under rising load: readings for the search, each level simulated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.errors import BadInput
from sim.planning.bracket import Reading
from sim.planning.mix import Traffic
from sim.planning.pool import Pool
from sim.planning.probe import Level, Probe, ProbeJob, at_level, load_ratio, run_probe
from sim.planning.slo import Slos
from sim.planning.stats import estimate
from sim.scenario import Scenario
from sim.steptime.base import StepTimeModel

MAX_PROMPTS = 50_000
TURNOVERS = 12  # a run must be long against the time that one request spends in the system
SESSION_TURNOVERS = 5  # and several times as long as a whole conversation, pauses included
GROWTH = 0.02  # backlog growth as a share of the offered rate, as in `sim.figures.regime`


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated per level.

    Attributes:
        prompts: least number of requests per replication.
        replications: seeds.
    """

    prompts: int = 1000
    replications: int = 5


class LevelReading(NamedTuple):
    """A simulated level: the share of the worst objective used there, by so many seeds pooled."""

    load: float
    used: float
    seeds: int


class LoadCurve:
    """Readings of one scenario at levels of load; every replication of a level is simulated once.

    Args:
        turnaround: about how long a request takes end to end [s]; runs last many times as long.
        traffic: instead of the scenario's own load; levels are arrivals (of sessions) per second.
    """

    def __init__(
        self,
        scenario: Scenario,
        slos: Slos,
        kind: str,
        effort: Effort,
        pool: Pool,
        step_time: StepTimeModel,
        turnaround: float = 0.0,
        traffic: Traffic | None = None,
    ) -> None:
        self.scenario = scenario
        self.slos = slos
        self.kind = kind
        self.effort = effort
        self._pool = pool
        self.step_time = step_time
        self._turnaround = turnaround
        self.traffic = traffic
        self._probes: dict[tuple[float, int], Probe] = {}

    def with_step_time(self, model: StepTimeModel) -> LoadCurve:
        """The same question with other step times."""
        return LoadCurve(
            self.scenario,
            self.slos,
            self.kind,
            self.effort,
            self._pool,
            model,
            self._turnaround,
            self.traffic,
        )

    def probes(self, value: float, replications: int) -> list[Probe]:
        """The simulated replications of a level, as many as asked for.

        Raises:
            BadInput: the load cannot be made or served there; that is no matter of objectives.
        """
        missing = [r for r in range(replications) if (value, r) not in self._probes]
        jobs = [self._job(value, r) for r in missing]
        for r, probe in zip(missing, self._pool(run_probe, jobs), strict=True):
            if probe.outcome.failure is not None:  # of the load itself, at whatever level
                hint = f"cannot run at {Level(self.kind, value)}: {probe.outcome.failure}"
                raise BadInput("SCENARIO", self.scenario.name or None, hint)
            self._probes[value, r] = probe
        return [self._probes[value, r] for r in range(replications)]

    def read(self, value: float, replications: int) -> Reading:
        """Objectives and stability at a level."""
        probes = self.probes(value, replications)
        left_out: tuple[float, ...] = ()
        if replications > 1:
            left_out = tuple(load_ratio(self.slos, probes[:j] + probes[j + 1 :]) for j in range(replications))
        return Reading(load_ratio(self.slos, probes), left_out, is_stable(probes))

    def readings(self) -> tuple[LevelReading, ...]:
        """Every simulated level that is stable, ascending.

        Levels that were tried with fewer seeds on the way are left out between those with all of them: the
        luck of one seed among means looks like a bend.
        """
        counts: dict[float, int] = {}
        for value, _ in self._probes:
            counts[value] = counts.get(value, 0) + 1
        sure = [value for value, n in counts.items() if n == max(counts.values())]
        low, high = (min(sure), max(sure)) if sure else (0.0, 0.0)
        found = []
        for value, n in sorted(counts.items()):
            if value in sure or not low < value < high:
                reading = self.read(value, n)
                if reading.stable:
                    found.append(LevelReading(value, reading.ratio, n))
        return tuple(found)

    def prompts_at(self, value: float) -> int:
        """Requests per replication: enough for percentiles, and for a run long against one request's stay."""
        least = self.effort.prompts
        if self.kind == "concurrency":
            return min(MAX_PROMPTS, max(least, 6 * int(value)))
        if self.traffic is not None:
            return min(MAX_PROMPTS, max(least, math.ceil(SESSION_TURNOVERS * self._in_system(value))))
        return min(MAX_PROMPTS, max(least, math.ceil(TURNOVERS * value * self._turnaround)))

    def _in_system(self, value: float) -> float:
        """Requests that arrivals of one turnaround bring."""
        turns = 1.0 if self.traffic is None else self.traffic.mean_turns
        return value * self._turnaround * turns

    def _job(self, value: float, replication: int) -> ProbeJob:
        level = Level(self.kind, value)
        scenario = at_level(self.scenario, level, self.prompts_at(value))
        return ProbeJob(
            scenario,
            seed=self.scenario.seed + replication,
            part=replication,
            parts=self.effort.replications,
            step_time=self.step_time,
            itl=any(slo.metric == "itl" for slo in self.slos.statistics),
            skip=self._skip(value),
            traffic=self.traffic,
        )

    def _skip(self, value: float) -> int:
        """Requests before the system has filled: the first wave, or the sessions of one turnaround."""
        if self.kind == "concurrency":
            return int(value)
        return 0 if self.traffic is None else int(self._in_system(value))


def is_stable(probes: Sequence[Probe]) -> bool:
    """Whether the load can be sustained, by all replications together.

    Not if most of them are saturated, be it behind a cap in the client; nor if the backlog grows by more than
    2 % of what is offered and the replications agree that it does.
    """
    states = [p.outcome.regime.get("state") for p in probes]
    if 2 * (states.count("saturated") + states.count("capped")) > len(states):
        return False
    growths = [
        float(p.outcome.regime["backlog_growth"]) / float(p.outcome.regime["offered_rate"])
        for p in probes
        if p.outcome.regime.get("backlog_growth") is not None and p.outcome.regime.get("offered_rate")
    ]
    if len(growths) < 2:
        return True
    mean = estimate(growths)
    return not (mean.mean > GROWTH and (mean.low or 0.0) > 0.0)
