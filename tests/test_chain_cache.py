"""Chains that only count do what the prefix tree does for sequences of which no two begin alike."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.sglang.chain_cache import ChainCache
from sim.engines.sglang.leap import LeapingSglangScheduler
from sim.engines.sglang.radix_cache import EvictableNodes, Node, RadixCache, new_root
from sim.engines.sglang.scheduler import SglangScheduler
from tests.engines_for_tests import SGLANG
from tests.leap_workloads import draw

LONGEST = 60


class Owners:
    """Requests that store and use parts of their own sequences in both caches at once."""

    def __init__(self, page: int) -> None:
        self.tree, self.chains = RadixCache(page), ChainCache(page)
        self.roots = [new_root() for _ in range(4)]
        self.used: list[tuple[Node, Node]] = []

    def look_up(self, owner: int, length: int) -> None:
        self._use(
            self.tree.match([(owner, 0, LONGEST)], length), self.chains.match(self.roots[owner], length)
        )

    def store(self, owner: int, length: int) -> None:
        runs = [(owner, 0, LONGEST)]
        self._use(self.tree.insert(runs, length), self.chains.insert(self.roots[owner], length))

    def _use(self, one: tuple[int, Node], other: tuple[int, Node]) -> None:
        assert one[0] == other[0]
        self.tree.lock(one[1])
        self.chains.lock(other[1])
        self.used.append((one[1], other[1]))

    def leave(self, which: int) -> None:
        if self.used:
            one, other = self.used.pop(which % len(self.used))
            self.tree.unlock(one)
            self.chains.unlock(other)

    def evict(self, tokens: int) -> None:
        assert self.tree.evict(tokens) == self.chains.evict(tokens)


@settings(max_examples=80, deadline=None)
@given(page=st.sampled_from((1, 4)), seed=st.integers(0, 100_000))
def test_chains_match_keep_and_evict_what_the_tree_does(page: int, seed: int) -> None:
    rng, owners = random.Random(seed), Owners(page)
    for _ in range(60):
        owner, length = rng.randrange(4), rng.randint(1, LONGEST)
        what = rng.randrange(5)
        if what == 0:
            owners.look_up(owner, length)
        elif what == 1:
            owners.store(owner, length)
        elif what < 4:
            owners.leave(owner)
        else:
            owners.evict(length)
        assert counts(owners.tree) == counts(owners.chains)


def counts(cache: EvictableNodes) -> tuple[int, int]:
    return cache.evictable, cache.evicted


def test_only_loads_that_share_nothing_get_chains() -> None:
    alone = draw("sglang", 4).requests
    for config, requests, kind in (
        (SGLANG, alone, ChainCache),
        (SGLANG, [*alone, alone[0]], RadixCache),
        (replace(SGLANG, schedule_policy="lpm"), alone, RadixCache),
        (replace(SGLANG, disable_radix_cache=True), alone, type(None)),
    ):
        leaping = SglangScheduler(config).leaping(requests)
        assert isinstance(leaping, LeapingSglangScheduler)
        assert type(leaping.pool.tree) is kind
