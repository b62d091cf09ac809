"""Multi-turn conversations: each turn quotes what was said, and waits for the answer before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from sim.errors import BadInput
from sim.loop.moments import Clock, at
from sim.request import Request, Segment

DRAWN = 20_000  # sessions by which the mean of cut ones is known to 1 %


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one user: the first is sent at its arrival, each other one after the answer and a pause.

    Attributes:
        turns: requests in order; `arrival` counts for the first one only.
        pauses: seconds between the end of an answer and the next turn; one fewer than turns.
    """

    turns: tuple[Request, ...]
    pauses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionShape:
    """What conversations look like. Lengths are means of geometric draws unless fixed.

    Attributes:
        turns: mean number of turns, at least 1 (geometric).
        think_time: mean pause before a follow-up [s], exponential.
        system_prompt: tokens that all sessions of a tenant begin with.
        first_prompt, follow_up, output: mean tokens of the first question, of later ones, of an answer.
        max_context: a session ends before its prompt and answer would exceed this many tokens.
    """

    turns: float = 4.0
    think_time: float = 10.0
    system_prompt: int = 0
    first_prompt: int = 200
    follow_up: int = 60
    output: int = 200
    max_context: int = 8192

    def check(self, where: str) -> None:
        """Refuse shapes that describe no conversation.

        Raises:
            BadInput: naming the field.
        """
        for name, low in (("turns", 1), ("think_time", 0), ("system_prompt", 0)):
            if not low <= getattr(self, name) < math.inf:
                raise BadInput(f"{where}.{name}", getattr(self, name), f"must be at least {low} and finite")
        for name in ("first_prompt", "follow_up", "output"):
            if getattr(self, name) < 1:
                raise BadInput(f"{where}.{name}", getattr(self, name), "must be at least 1 token")
        if self.system_prompt + self.first_prompt + self.output > self.max_context:
            raise BadInput(f"{where}.max_context", self.max_context, "does not hold even a first turn")


@lru_cache(maxsize=64)
def lasting(shape: SessionShape) -> tuple[float, float]:
    """Mean turns of a session as `draw_sessions` draws them, and the share that `max_context` ends early."""
    rng = np.random.default_rng(0)
    left = rng.geometric(1.0 / shape.turns, DRAWN)
    history = np.full(DRAWN, shape.system_prompt)
    turns = early = 0
    first = True
    while len(left):
        asked = rng.geometric(1.0 / (shape.first_prompt if first else shape.follow_up), len(left))
        answer = rng.geometric(1.0 / shape.output, len(left))
        room = shape.max_context - history - asked
        fits = (room >= 1) & (first | (room >= answer))
        turns += int(fits.sum())
        early += int((~fits).sum())
        going = fits & (left > 1)
        history, left = (history + asked + np.minimum(answer, room))[going], left[going] - 1
        first = False
    return (turns / DRAWN if early else shape.turns), early / DRAWN


def singles(requests: Sequence[Request]) -> list[Session]:
    """Requests that have nothing to do with each other, as sessions of one turn."""
    return [Session((request,)) for request in requests]


def draw_sessions(
    shape: SessionShape, starts: Sequence[float], name: str, rng: np.random.Generator, priority: int = 0
) -> list[Session]:
    """One session for each start [s]; ids are `name:session.turn`."""
    found = []
    for number, start in enumerate(starts):
        count = int(rng.geometric(1.0 / shape.turns))
        session = f"{name}:{number}"
        history: tuple[Segment, ...] = (
            ((f"{name}:system", shape.system_prompt),) if shape.system_prompt else ()
        )
        turns: list[Request] = []
        for turn in range(count):
            asked = int(rng.geometric(1.0 / (shape.follow_up if turn else shape.first_prompt)))
            answer = int(rng.geometric(1.0 / shape.output))
            prompt: tuple[Segment, ...] = (*history, (f"{session}.{turn}", asked))
            room = shape.max_context - sum(length for _, length in prompt)
            if room < 1 or (turn and room < answer):
                break
            rid = f"{session}.{turn}"
            answer = min(answer, room)
            turns.append(Request(rid, prompt, answer, float(start), None, priority, session))
            history = (*prompt, (f"out:{rid}", answer))
        pauses = tuple(rng.exponential(shape.think_time, max(0, len(turns) - 1)).tolist())
        if turns:
            found.append(Session(tuple(turns), pauses))
    return found


class SessionClient:
    """Sends first turns at their times and follow-ups when their users get to them.

    `scheduled` of a follow-up is the moment at which the user asks, so that nothing hides a wait.

    Attributes:
        done: succeeds when the last answer is complete.
        sent: requests in the order in which they went out, with their true arrivals.
    """

    def __init__(
        self,
        env: Clock,
        sessions: Sequence[Session],
        send: Callable[[Request], None],
        max_concurrency: int | None = None,
    ) -> None:
        self.done = env.event()
        self.sent: list[Request] = []
        self._env = env
        self._send = send
        self._start = env.now
        self._free = max_concurrency if max_concurrency is not None else len(sessions) * 10**9 + 1
        self._waiting: list[Request] = []
        self._next: dict[str, tuple[Session, int]] = {}
        self._open = sum(len(session.turns) for session in sessions)
        if not self._open:
            self.done.succeed()
        for session in sorted(sessions, key=lambda s: s.turns[0].arrival):
            first = session.turns[0]
            self._next[first.request_id] = (session, 0)
            at(env, self._start + first.arrival, partial(self._ask, first))

    def delivered(self, request: Request, when: float) -> None:
        """Take note that `request` will be complete at `when`."""
        at(self._env, when, partial(self._answered, request))

    def _answered(self, request: Request) -> None:
        self._free += 1
        self._open -= 1
        session, turn = self._next.pop(request.request_id)
        if turn + 1 < len(session.turns):
            follow_up = session.turns[turn + 1]
            self._next[follow_up.request_id] = (session, turn + 1)
            at(self._env, self._env.now + session.pauses[turn], partial(self._ask, follow_up))
        if not self._open:
            self.done.succeed()
        self._pump()

    def _ask(self, request: Request) -> None:
        self._waiting.append(replace(request, arrival=self._env.now - self._start))
        self._pump()

    def _pump(self) -> None:
        while self._waiting and self._free > 0:
            self._free -= 1
            request = self._waiting.pop(0)
            self.sent.append(request)
            self._send(request)
