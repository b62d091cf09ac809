"""vLLM's queues of waiting requests (vLLM: `v1/core/sched/request_queue.py`, `scheduler.py`)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from sim.engines.vllm.request import EngineRequest


class WaitingQueue(Protocol):
    """Waiting requests in the order in which the scheduler looks at them.

    Attributes:
        size: how many; asked for several times in every call, and a method would take ten times as long.
    """

    size: int

    def add(self, request: EngineRequest) -> None:
        """Take in a new request."""

    def add_preempted(self, request: EngineRequest) -> None:
        """Take back a request that was preempted."""

    def peek(self) -> EngineRequest:
        """The next request."""

    def pop(self) -> EngineRequest:
        """Take the next request out."""

    def put_back(self, set_aside: list[EngineRequest]) -> None:
        """Return requests that were popped but could not be looked at, in the order of popping."""

    def remove(self, request: EngineRequest) -> None:
        """Take a request out wherever it stands."""

    def in_order(self) -> Iterable[EngineRequest]:
        """All of them, next first."""


class FcfsQueue:
    """First come, first served, but preempted requests come before new ones.

    Requests that were set aside (0.28.0: `skipped_waiting`) come before everything else; since 0.33.0 they
    return to the front of the one queue, and a request preempted later is put before them.
    """

    def __init__(self, separate_skipped: bool) -> None:
        self.size = 0
        self._waiting: deque[EngineRequest] = deque()
        self._skipped: deque[EngineRequest] = deque() if separate_skipped else self._waiting

    def add(self, request: EngineRequest) -> None:
        """Take in a new request."""
        self.size += 1
        self._waiting.append(request)

    def add_preempted(self, request: EngineRequest) -> None:
        """Take back a request that was preempted."""
        self.size += 1
        self._waiting.appendleft(request)

    def peek(self) -> EngineRequest:
        """The next request."""
        return (self._skipped or self._waiting)[0]

    def pop(self) -> EngineRequest:
        """Take the next request out."""
        self.size -= 1
        return (self._skipped or self._waiting).popleft()

    def put_back(self, set_aside: list[EngineRequest]) -> None:
        """Return requests that were popped but could not be looked at, in the order of popping."""
        self.size += len(set_aside)
        self._skipped.extendleft(reversed(set_aside))

    def remove(self, request: EngineRequest) -> None:
        """Take a request out wherever it stands."""
        self.size -= 1
        (self._skipped if request in self._skipped else self._waiting).remove(request)

    def in_order(self) -> Iterable[EngineRequest]:
        """All of them, next first."""
        if self._skipped is self._waiting:
            return list(self._waiting)
        return [*self._skipped, *self._waiting]


class PriorityQueue:
    """Lowest priority value first, ties by arrival, whether new, preempted or set aside."""

    def __init__(self) -> None:
        self.size = 0
        self._heap: list[tuple[tuple[int, int], EngineRequest]] = []

    def add(self, request: EngineRequest) -> None:
        """Take in a new request."""
        self.size += 1
        heapq.heappush(self._heap, (request.sort_key, request))

    def add_preempted(self, request: EngineRequest) -> None:
        """Take back a request that was preempted."""
        self.add(request)

    def peek(self) -> EngineRequest:
        """The next request."""
        return self._heap[0][1]

    def pop(self) -> EngineRequest:
        """Take the next request out."""
        self.size -= 1
        return heapq.heappop(self._heap)[1]

    def put_back(self, set_aside: list[EngineRequest]) -> None:
        """Return requests that were popped but could not be looked at, in the order of popping."""
        for request in set_aside:
            self.add(request)

    def remove(self, request: EngineRequest) -> None:
        """Take a request out wherever it stands."""
        self.size -= 1
        self._heap.remove((request.sort_key, request))
        heapq.heapify(self._heap)

    def in_order(self) -> Iterable[EngineRequest]:
        """All of them, next first."""
        return [request for _, request in sorted(self._heap, key=lambda entry: entry[0])]
