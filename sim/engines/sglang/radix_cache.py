"""The prefix tree: which prefixes have their KV in the pool, who uses them, which go first.

Rules: SGLang 0.5.21 `mem_cache/unified_radix_cache.py` with its default tree core, LRU eviction.
Sizes are tokens; everything stored is a whole number of pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sim.engines.sglang.tokens import Run, agree, clip, take

_ChildKey = Run | tuple[Run, ...]


class Node:
    """A piece of a prefix that is stored, locked and evicted as a whole.

    Attributes:
        runs, length: the tokens on the edge from the parent to this node.
        children: by the first page of their tokens, in order of creation.
        time: last touch; larger is later.
        locks: requests that use this node or one below it.
    """

    __slots__ = ("children", "length", "locks", "number", "parent", "queued", "runs", "time")

    def __init__(self, number: int, runs: Sequence[Run], length: int, parent: Node | None) -> None:
        self.number = number
        self.runs = runs
        self.length = length
        self.parent = parent
        self.children: dict[_ChildKey, Node] = {}
        self.time = 0
        self.locks = 0
        self.queued = False


class RadixCache:
    """A radix tree over token runs with locks and least-recently-used eviction of whole leaves.

    Attributes:
        evictable: tokens in nodes that nobody uses.
        evicted: tokens evicted so far.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable = 0
        self.evicted = 0
        self.root = Node(0, (), 0, None)
        self.root.locks = 1
        self._clock = 0
        self._nodes = 1
        self._leaves: list[tuple[int, int, Node]] = []

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
            self._clock += 1
            leaf = self._new_node(take(runs, index, offset, length - matched), length - matched, node)
            leaf.time = self._clock
            node.children[self._child_key(runs, index, offset)] = leaf
            self.evictable += leaf.length
            self._queue_if_evictable(leaf)
            node = leaf
        return matched, node

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
            del parent.children[self._child_key(node.runs, 0, 0)]
            gone += node.length
            self.evictable -= node.length
            self._queue_if_evictable(parent)
        self.evicted += gone
        return gone

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
        """Cut a node after `length` tokens; the remainder counts as just used. Returns the upper part."""
        parent = node.parent
        assert parent is not None
        upper = self._new_node(take(node.runs, 0, 0, length), length, parent)
        upper.locks = node.locks
        parent.children[self._child_key(node.runs, 0, 0)] = upper
        index, offset = _advance(node.runs, 0, 0, length)
        node.runs = take(node.runs, index, offset, node.length - length)
        node.length -= length
        node.parent = upper
        node.time = self._clock
        upper.children[self._child_key(node.runs, 0, 0)] = node
        return upper

    def _new_node(self, runs: Sequence[Run], length: int, parent: Node) -> Node:
        node = Node(self._nodes, runs, length, parent)
        self._nodes += 1
        return node

    def _child_key(self, runs: Sequence[Run], index: int, offset: int) -> _ChildKey:
        if self.page_size == 1:
            key, start, _ = runs[index]
            return (key, start + offset, 1)
        return take(runs, index, offset, self.page_size)

    def _queue_if_evictable(self, node: Node) -> None:
        # At most one entry per node. A later touch leaves the entry's time stale, which `evict` repairs when
        # the entry comes up: a stale time is always too early, never too late.
        if node.locks == 0 and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.time, node.number, node))


def _advance(runs: Sequence[Run], index: int, offset: int, length: int) -> tuple[int, int]:
    """The position `length` tokens after (index, offset)."""
    offset += length
    while index < len(runs) and offset >= runs[index][2]:
        offset -= runs[index][2]
        index += 1
    return index, offset
