"""A recorded load through the exact scheduler, with every step kept: whose tokens came out of which."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engines.base import StepShape
from sim.loop.run import RunOutcome, run
from sim.memory import MemoryAccount
from sim.request import Request
from sim.results import RequestRecords
from sim.scenario import Scenario
from sim.simulate import ENGINES
from sim.steptime.base import FrontEnd, StepTimeModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# The share of a lag that the next step makes up for: a measured time has noise of its own.
GAIN = 0.5


class Pace:
    """When the measured engine emitted which token, so that a replay can keep its pace.

    A replay with wrong coefficients sees other batches than the engine did: a slow one piles up requests,
    which makes it slower. Set right by every token whose time is known it overlaps the same requests as the
    engine, whatever its coefficients, and the fit needs no detour through queueing.
    """

    def __init__(self, tokens: Mapping[str, Mapping[int, float]]) -> None:
        """Time [s] at which the engine emitted tokens, by request and the token's number from 1 on."""
        self._tokens = tokens
        self._changes: deque[float] = deque()
        self._due = 0.0

    def note(self, end: float, new_tokens: Sequence[tuple[str, int]]) -> None:
        """Compare the output of the oldest step that has not been noted with the measurement."""
        self._changes.popleft()
        late = [
            end - known[count]
            for rid, count in new_tokens
            if (known := self._tokens.get(rid)) is not None and count in known
        ]
        if late:
            # What steps in flight already make up for does not show yet.
            self._due = -GAIN * median(late) - sum(self._changes)

    def paced(self, seconds: float) -> float:
        """How long the next step is to last: half to twice of what it would."""
        change = min(seconds, max(-0.5 * seconds, self._due))
        self._due -= change
        self._changes.append(change)
        return seconds + change


class Recording:
    """A step-time model that remembers the shapes it priced, in the order of their launch."""

    def __init__(self, model: StepTimeModel, pace: Pace | None = None) -> None:
        self.shapes: list[StepShape] = []
        self._model = model
        self._pace = pace

    @property
    def front_end(self) -> FrontEnd:
        """As the model behind."""
        return self._model.front_end

    @property
    def throttle(self) -> tuple[float, float]:
        """As the model behind."""
        told: tuple[float, float] = getattr(self._model, "throttle", (0.0, 1.0))
        return told

    def gpu(self, shape: StepShape) -> float:
        """As the model behind."""
        self.shapes.append(shape)
        seconds = self._model.gpu(shape)
        return seconds if self._pace is None else self._pace.paced(seconds)

    def heats(self, shape: StepShape) -> bool:
        """As the model behind."""
        told = getattr(self._model, "heats", None)
        return told is not None and bool(told(shape))

    def host_before(self, shape: StepShape) -> float:
        """As the model behind."""
        return self._model.host_before(shape)

    def host_after(self, shape: StepShape) -> float:
        """As the model behind."""
        return self._model.host_after(shape)

    def out_of_range(self, shape: StepShape) -> str | None:
        """Never: replays are not judged."""
        del shape
        return None


@dataclass(frozen=True, slots=True)
class Replay:
    """One simulated run with its steps, numbered in the order of their launch.

    Attributes:
        records: the requests in the order of their sending; times in seconds.
        shapes: of every step.
        start, duration: of every step on the device, shape (steps,) [s].
        token_steps: by request in the order of `records`, the steps that its output tokens came out of.
        at_engine: when each request left the front end [s].
    """

    records: RequestRecords
    shapes: tuple[StepShape, ...]
    start: Floats
    duration: Floats
    token_steps: tuple[Ints, ...]
    at_engine: Floats


def account_of(scenario: Scenario) -> MemoryAccount:
    """The KV pool of a scenario, from what was observed or the engine's own rules."""
    glue = ENGINES[scenario.engine.name]
    return glue.account(scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed)


def replay(
    scenario: Scenario,
    requests: Sequence[Request],
    model: StepTimeModel,
    account: MemoryAccount | None = None,
    *,
    max_concurrency: int | None = None,
    pace: Pace | None = None,
) -> Replay:
    """Send `requests` at their arrivals and keep every step; with `pace`, at the measured pace.

    Raises:
        BadInput, EngineStuck: as `sim.loop.run.run`.
    """
    watched = Recording(model, pace)
    starts: list[float] = []
    durations: list[float] = []
    steps: dict[str, list[int]] = {r.request_id: [] for r in requests}

    def note(step: dict[str, Any]) -> None:
        if pace is not None:
            pace.note(step["start"] + step["duration"], step["new_tokens"])
        for rid, _ in step["new_tokens"]:
            steps[rid].append(len(starts))
        starts.append(step["start"])
        durations.append(step["duration"])

    outcome = run_once(scenario, requests, watched, account, max_concurrency=max_concurrency, steps=note)
    order = sorted(requests, key=lambda r: r.arrival)
    front = outcome.ttft_parts.front_end
    return Replay(
        records=outcome.records,
        shapes=tuple(watched.shapes[: len(starts)]),
        start=np.array(starts),
        duration=np.array(durations),
        token_steps=tuple(np.array(steps[r.request_id], dtype=np.int64) for r in order),
        at_engine=outcome.records.sent + front,
    )


def run_once(
    scenario: Scenario,
    requests: Sequence[Request],
    model: StepTimeModel,
    account: MemoryAccount | None = None,
    *,
    max_concurrency: int | None = None,
    steps: Any = None,
) -> RunOutcome:
    """`sim.loop.run.run` with everything that the scenario's engine brings."""
    glue = ENGINES[scenario.engine.name]
    pool = account_of(scenario) if account is None else account
    return run(
        glue.make_scheduler(scenario.engine, pool, requests, scenario.seed),
        requests,
        model,
        max_concurrency=max_concurrency,
        stream_interval=scenario.engine["stream_interval"],
        idle_poll=glue.idle_poll,
        limits=glue.limits(scenario.engine, pool),
        steps=steps,
    )
