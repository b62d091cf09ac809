"""Who gets a request: routers in front of several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.errors import BadInput
from sim.request import Request, Segment

# Defaults of the SGLang router's cache-aware policy (sglang-router, cache_threshold, balance_abs_threshold,
# balance_rel_threshold).
CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a router can know of a replica: what it sent there and is not back yet, and its KV use (0..1)."""

    outstanding: int
    kv_usage: float


class Router(Protocol):
    """Chooses the replica for each request, in order of arrival."""

    def choose(self, request: Request, nodes: Sequence[NodeView]) -> int:
        """Index of the replica."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: Request, nodes: Sequence[NodeView]) -> int:
        """The next one, whatever its state."""
        del request
        self._turn = (self._turn + 1) % len(nodes)
        return self._turn


class LeastRequests:
    """The replica with the fewest requests that have not come back; the first of several."""

    def choose(self, request: Request, nodes: Sequence[NodeView]) -> int:
        """The least busy one."""
        del request
        return min(range(len(nodes)), key=lambda i: (nodes[i].outstanding, i))


class LeastKv:
    """The replica whose KV pool is least used; of several the one with the fewest requests."""

    def choose(self, request: Request, nodes: Sequence[NodeView]) -> int:
        """The emptiest one."""
        del request
        return min(range(len(nodes)), key=lambda i: (nodes[i].kv_usage, nodes[i].outstanding, i))


class PrefixAffinity:
    """The replica that has seen most of the prompt's beginning, unless the load is out of balance.

    The rule of the SGLang router's cache-aware policy: out of balance means that the busiest replica has
    more than `BALANCE_ABS` requests more than the least busy one and more than `BALANCE_REL` times as many;
    then, or where less than `CACHE_THRESHOLD` of the prompt is known anywhere, the least busy one gets it.
    """

    def __init__(self) -> None:
        self._seen: list[set[int]] = []

    def choose(self, request: Request, nodes: Sequence[NodeView]) -> int:
        """The one with the longest known beginning."""
        while len(self._seen) < len(nodes):
            self._seen.append(set())
        chain = _chain(request.prompt)
        loads = [node.outstanding for node in nodes]
        least = min(range(len(nodes)), key=lambda i: (loads[i], i))
        chosen = least
        unbalanced = max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads)
        if not unbalanced:
            known = [_known(chain, seen) for seen in self._seen[: len(nodes)]]
            best = max(range(len(nodes)), key=lambda i: (known[i], -loads[i], -i))
            if known[best] > CACHE_THRESHOLD * request.prompt_len:
                chosen = best
        self._seen[chosen].update(key for key, _ in chain)
        self._seen[chosen].add(_after(request))
        return chosen


def _chain(prompt: Sequence[Segment]) -> list[tuple[int, int]]:
    """(hash, tokens) of every beginning of the prompt that ends with a segment."""
    found, key, tokens = [], 0, 0
    for segment in prompt:
        key, tokens = hash((key, segment)), tokens + segment[1]
        found.append((key, tokens))
    return found


def _after(request: Request) -> int:
    """Hash of the prompt with its answer, which a follow-up turn begins with."""
    whole = (*request.prompt, (f"out:{request.request_id}", request.max_tokens))
    return _chain(whole)[-1][0]


def _known(chain: Sequence[tuple[int, int]], seen: set[int]) -> int:
    return max((tokens for key, tokens in chain if key in seen), default=0)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-requests": LeastRequests,
    "least-kv": LeastKv,
    "prefix-affinity": PrefixAffinity,
}


def make_router(name: str) -> Router:
    """A fresh router.

    Raises:
        BadInput: no such router.
    """
    if name not in ROUTERS:
        raise BadInput("--router", name, f"must be one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()
