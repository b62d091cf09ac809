"""Simulated time: a clock, and calls that come before whatever else happens at the same instant."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappush

import simpy
from simpy.events import NORMAL, URGENT, EventPriority


class Clock(simpy.Environment):
    """SimPy's environment, for processes that are often the only ones with anything to do."""

    def peek(self) -> float:
        """When the next event is due; infinity if none is. SimPy's own catches an exception if none is."""
        return self._queue[0][0] if self._queue else math.inf

    def skip(self, seconds: float) -> bool:
        """Let time pass at once if nothing else is due by then, as `timeout` would; returns whether it did.

        For the one process that is being resumed.
        """
        then = self._now + seconds
        if self._queue and self._queue[0][0] <= then:
            return False
        self._now = then
        return True

    def until(self, when: float, priority: EventPriority = NORMAL) -> simpy.Event:
        """An event at that very moment; `timeout`, which adds a delay, may miss it by the last bit."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (when, priority, next(self._eid), event))
        return event


def at(env: Clock, when: float, call: Callable[[], None]) -> None:
    """Run `call` at time `when`, ahead of any process that resumes at the same instant.

    What clients do at one instant thus precedes what the engine does then: a request that is sent in the
    moment a step ends is seen by the next scheduling call.
    """
    if when <= env.now:
        call()
    else:
        env.until(when, URGENT).callbacks.append(lambda _: call())
