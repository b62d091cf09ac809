"""The prefix tree: which prefixes have their KV in the pool, who uses them, which go first.

Rules: SGLang 0.5.21 `mem_cache/unified_radix_cache.py` with its default tree core, LRU eviction.
Sizes are tokens; everything stored is a whole number of pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sim.engines.sglang.tokens import Run, agree, clip, take

ChildKey = Run | tuple[Run, ...]


class Node:
    """A piece of a prefix that is stored, locked and evicted as a whole.

    Attributes:
        runs, length: the tokens on the edge from the parent to this node.
        key: its place among the parent's children, the first page of its tokens.
        children: by their keys, in order of creation.
        time: last touch; larger is later.
        locks: requests that use this node or one below it.
    """

    __slots__ = ("children", "key", "length", "locks", "number", "parent", "queued", "runs", "time")

    def __init__(
        self, number: int, runs: Sequence[Run], length: int, parent: Node | None, key: ChildKey = ()
    ) -> None:
        self.number = number
        self.runs = runs
        self.length = length
        self.parent = parent
        self.key = key
        self.children: dict[ChildKey, Node] = {}
        self.time = 0
        self.locks = 0
        self.queued = False


def new_root() -> Node:
    """A node that holds nothing and always stays."""
    root = Node(0, (), 0, None)
    root.locks = 1
    return root


class EvictableNodes:
    """Nodes below roots, with locks and least-recently-used eviction of whole leaves.

    Attributes:
        evictable: tokens in nodes that nobody uses.
        evicted: tokens evicted so far.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable = 0
        self.evicted = 0
        self._clock = 0
        self._nodes = 1
        self._leaves: list[tuple[int, int, Node]] = []

    def lock(self, node: Node) -> None:
        """Keep a node and everything above it from eviction."""
        while node.parent is not None:
            if node.locks == 0:
                self.evictable -= node.length
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable += node.length
                self._queue_if_evictable(node)
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Remove unused leaves, least recently used first, until at least `tokens` tokens are gone.

        A leaf goes as a whole, so more may go than asked for; a parent that becomes a leaf takes part with
        its own time.

        Returns:
            Tokens removed; fewer than asked for if nothing unused is left.
        """
        gone = 0
        leaves = self._leaves
        while gone < tokens and leaves:
            time, _, node = heapq.heappop(leaves)
            node.queued = False
            if node.locks or node.children:
                continue
            if node.time != time:
                self._queue_if_evictable(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            gone += node.length
            self.evictable -= node.length
            self._queue_if_evictable(parent)
        self.evicted += gone
        return gone

    def _new_node(self, runs: Sequence[Run], length: int, parent: Node, key: ChildKey) -> Node:
        node = Node(self._nodes, runs, length, parent, key)
        self._nodes += 1
        parent.children[key] = node
        return node

    def _new_leaf(self, runs: Sequence[Run], length: int, parent: Node, key: ChildKey) -> Node:
        """Store tokens that nobody uses yet."""
        self._clock += 1
        leaf = self._new_node(runs, length, parent, key)
        leaf.time = self._clock
        self.evictable += length
        self._queue_if_evictable(leaf)
        return leaf

    def _cut(
        self, node: Node, length: int, upper_runs: Sequence[Run], runs: Sequence[Run], key: ChildKey
    ) -> Node:
        """Cut a node after `length` tokens; the remainder counts as just used. Returns the upper part."""
        assert node.parent is not None
        upper = self._new_node(upper_runs, length, node.parent, node.key)
        upper.locks = node.locks
        node.runs, node.length, node.parent, node.key = runs, node.length - length, upper, key
        node.time = self._clock
        upper.children[key] = node
        return upper

    def _queue_if_evictable(self, node: Node) -> None:
        # At most one entry per node. A later touch leaves the entry's time stale, which `evict` repairs when
        # the entry comes up: a stale time is always too early, never too late.
        if node.locks == 0 and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.time, node.number, node))


class RadixCache(EvictableNodes):
    """A radix tree over token runs."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.root = new_root()

    def match(self, runs: Sequence[Run], limit: int) -> tuple[int, Node]:
        """Find the longest stored prefix of the first `limit` tokens, and mark its path as just used.

        A match that ends inside a node splits the node there.

        Returns:
            Matched length, whole pages [tokens], and the node at its end (the root if nothing matches).
        """
        runs = clip(runs, limit // self.page_size * self.page_size)
        matched, node, _, _ = self._walk(runs)
        return matched, node

    def insert(self, runs: Sequence[Run], length: int) -> tuple[int, Node]:
        """Store the first `length` tokens (whole pages of them), and mark their path as just used.

        Returns:
            How many of them were stored already [tokens], and the node at the end.
        """
        length = length // self.page_size * self.page_size
        runs = clip(runs, length)
        matched, node, index, offset = self._walk(runs)
        if matched < length:
            rest = take(runs, index, offset, length - matched)
            node = self._new_leaf(rest, length - matched, node, self._child_key(runs, index, offset))
        return matched, node

    def _walk(self, runs: Sequence[Run]) -> tuple[int, Node, int, int]:
        """Follow `runs` from the root: matched length, last node, and the position in `runs` after it."""
        self._clock += 1
        node = self.root
        matched = index = offset = 0
        while index < len(runs):
            child = node.children.get(self._child_key(runs, index, offset))
            if child is None:
                break
            same, next_index, next_offset = agree(runs, index, offset, child.runs)
            if same < child.length:
                same = same // self.page_size * self.page_size
                child = self._split(child, same)
                child.time = self._clock
                return matched + same, child, *_advance(runs, index, offset, same)
            child.time = self._clock
            node = child
            matched += same
            index, offset = next_index, next_offset
        return matched, node, index, offset

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` tokens. Returns the upper part."""
        index, offset = _advance(node.runs, 0, 0, length)
        upper, lower = take(node.runs, 0, 0, length), take(node.runs, index, offset, node.length - length)
        return self._cut(node, length, upper, lower, self._child_key(lower, 0, 0))

    def _child_key(self, runs: Sequence[Run], index: int, offset: int) -> ChildKey:
        if self.page_size == 1:
            key, start, _ = runs[index]
            return (key, start + offset, 1)
        return take(runs, index, offset, self.page_size)


def _advance(runs: Sequence[Run], index: int, offset: int, length: int) -> tuple[int, int]:
    """The position `length` tokens after (index, offset)."""
    offset += length
    while index < len(runs) and offset >= runs[index][2]:
        offset -= runs[index][2]
        index += 1
    return index, offset
