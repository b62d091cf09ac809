"""In which order waiting requests are looked at.

Rules: SGLang 0.5.21 `managers/schedule_policy.py SchedulePolicy`.
"""

from __future__ import annotations

import math
import random

from sim.engines.sglang.config import CACHE_AWARE_POLICIES, SglangSchedulerConfig
from sim.engines.sglang.kv_pool import KvPool
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.radix_cache import Node, RadixCache

LPM_FALLBACK_QUEUE = 128
IN_BATCH_CHECK = 32
IN_BATCH_DEPRIORITIZE = 32


class SchedulePolicy:
    """Sorts the waiting queue in place; the new order is there to stay."""

    def __init__(self, config: SglangSchedulerConfig) -> None:
        without_cache = config.disable_radix_cache and config.schedule_policy in CACHE_AWARE_POLICIES
        self.name = "fcfs" if without_cache else config.schedule_policy
        self._by_priority = config.enable_priority_scheduling
        self._sign = 1 if config.schedule_low_priority_values_first else -1
        self._random = random.Random(config.seed)

    def order(self, waiting: list[LiveRequest], pool: KvPool) -> None:
        """Put the next request to look at first."""
        if self.name == "fcfs":
            if self._by_priority:
                waiting.sort(key=lambda req: (req.request.priority * self._sign, req.entered))
        elif self.name == "lof":
            sign = self._sign if self._by_priority else 0
            waiting.sort(key=lambda req: (req.request.priority * sign, -req.max_new_tokens))
        elif self.name == "random":
            self._random.shuffle(waiting)
        elif self.name == "dfs-weight":
            _match_all(waiting, pool)
            assert isinstance(pool.tree, RadixCache)
            waiting[:] = dfs_weight_order(waiting, pool.tree.root)
        elif len(waiting) <= LPM_FALLBACK_QUEUE:
            _match_all(waiting, pool)
            late = in_batch_duplicates(waiting, pool)
            waiting.sort(key=lambda req: math.inf if req in late else -min(req.matched, req.num_tokens - 1))


def _match_all(waiting: list[LiveRequest], pool: KvPool) -> None:
    for req in waiting:
        req.matched = req.prefix_len = pool.match(req, req.num_tokens)


def in_batch_duplicates(waiting: list[LiveRequest], pool: KvPool) -> set[LiveRequest]:
    """Requests with a short cache hit that share a longer prefix with one noted before them in the queue.

    Letting those wait behind the one that computes the prefix turns their prefill into hits later.
    """
    late: set[LiveRequest] = set()
    noted = RadixCache(page_size=1)
    for req in waiting:
        if req.matched > IN_BATCH_CHECK:
            continue
        runs = req.runs()
        shared, _ = noted.match(runs, req.num_tokens)
        if shared >= IN_BATCH_DEPRIORITIZE:
            late.add(req)
        else:
            noted.insert(runs, req.num_tokens)
    return late


def dfs_weight_order(waiting: list[LiveRequest], root: Node) -> list[LiveRequest]:
    """Depth first through the tree, the subtree with more waiting requests first, children before parents.

    A node's weight counts the requests whose match ends there or below. Source: SGLang 0.5.21
    `mem_cache/base_prefix_cache.py _dfs_weight_order`.
    """
    ends: dict[Node, list[LiveRequest]] = {}
    weight: dict[Node, int] = {}
    for req in waiting:
        end = req.node
        assert end is not None
        ends.setdefault(end, []).append(req)
        above: Node | None = end
        while above is not None:
            weight[above] = weight.get(above, 0) + 1
            above = above.parent
    ordered: list[LiveRequest] = []
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            ordered += ends.get(node, ())
            continue
        stack.append((node, True))
        # Subtrees in which nothing waits contribute nothing, so they need not be visited.
        children = [child for child in node.children.values() if child in weight]
        children.sort(key=lambda child: -weight[child])
        stack += [(child, False) for child in reversed(children)]
    return ordered
