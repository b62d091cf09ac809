"""The load generator in simulated time: when each request goes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from sim.loop.moments import Clock, at
from sim.request import Request


class Client:
    """Sends requests at their scheduled times, at most `max_concurrency` of them in flight.

    As `vllm bench serve` does (benchmarks/serve.py): a request whose time has come waits first come, first
    served for a free place, and its own clock starts once it has one. Arrivals count from the moment at
    which the client is made.

    Args:
        requests: by arrival.
        send: sends a request now.
        plan: takes all requests with their send times in advance, instead of `send`, where no cap can hold
            any back.
        turn_away: takes note that the server refuses a request sent at that time; False if it does not.
        duration: nothing is sent later than so many seconds after the start; None: no limit.

    Attributes:
        done: succeeds at the moment the last answer is complete.
        sent: requests sent so far, the first ones; all of them where `plan` took them.
    """

    def __init__(
        self,
        env: Clock,
        requests: Sequence[Request],
        send: Callable[[Request], None],
        max_concurrency: int | None = None,
        plan: Callable[[Iterator[tuple[float, Request]]], None] | None = None,
        duration: float | None = None,
        turn_away: Callable[[Request, float], bool] | None = None,
    ) -> None:
        self._start = env.now
        self.done = env.event()
        self._env = env
        self._send = send
        self._due = iter(requests)
        self._next: Request | None = None
        self._free = max_concurrency if max_concurrency is not None else len(requests)
        self._capped = max_concurrency is not None
        self._open = self._total = len(requests)
        self._latest = env.now
        self._alarm_set = False
        self._last = math.inf if duration is None else self._start + duration
        self._turn_away = turn_away
        self.sent = 0
        if not requests:
            self.done.succeed()
        elif plan is not None and not self._capped:
            self.sent = len(requests)
            plan(self._planned())
        else:
            self._next = next(self._due)
            self._pump()

    def _planned(self) -> Iterator[tuple[float, Request]]:
        """Send times and requests, without those that the server turns away."""
        for request in self._due:
            when = self._start + request.arrival
            if self._turn_away is None or not self._turn_away(request, when):
                yield when, request
            else:
                self._turned_away(when)

    def _turned_away(self, when: float) -> None:
        self._open -= 1
        self._latest = max(self._latest, when)
        if not self._open:
            at(self._env, self._latest, self._finish)

    def delivered(self, request: Request, when: float) -> None:
        """Take note that `request` will be complete at `when`; what waits for its place is sent then."""
        del request
        self._open -= 1
        if when > self._latest:
            self._latest = when
        if not self._open:
            at(self._env, self._latest, self._finish)
        elif self._capped:
            at(self._env, when, self._release)

    def _release(self) -> None:
        self._free += 1
        self._pump()

    def _finish(self) -> None:
        self.done.succeed()

    def _pump(self) -> None:
        while self._next is not None and self._free:
            due = self._start + self._next.arrival
            if due > self._env.now:
                if not self._alarm_set:
                    self._alarm_set = True
                    at(self._env, due, self._alarm)
                return
            if self._env.now > self._last:
                self._stop()
                return
            self.sent += 1
            request, self._next = self._next, next(self._due, None)
            if self._turn_away is not None and self._turn_away(request, self._env.now):
                self._turned_away(self._env.now)  # its place is free again at once
                continue
            self._free -= 1
            self._send(request)

    def _stop(self) -> None:
        """Leave out what has not been sent: the time is up."""
        self._next = None
        self._open -= self._total - self.sent
        if not self._open:
            at(self._env, self._latest, self._finish)

    def _alarm(self) -> None:
        self._alarm_set = False
        self._pump()
