"""The prefix tree where no two prompts begin alike: a chain of nodes for each request, which only count.

Such a tree can only ever hit what a retracted request left of itself. So nobody needs to know the tokens: how
many of them a node holds is enough. Sizes, locks and the order of eviction are those of `RadixCache`.
"""

from __future__ import annotations

from sim.engines.sglang.radix_cache import EvictableNodes, Node


class ChainCache(EvictableNodes):
    """`RadixCache` for requests of which none can hit what another one stored; each has a root of its own."""

    def match(self, root: Node, limit: int) -> tuple[int, Node]:
        """Find how much is stored of the first `limit` tokens; see `RadixCache.match`."""
        return self._walk(root, limit // self.page_size * self.page_size)

    def insert(self, root: Node, length: int) -> tuple[int, Node]:
        """Store the first `length` tokens (whole pages of them); see `RadixCache.insert`."""
        length = length // self.page_size * self.page_size
        matched, node = self._walk(root, length)
        if matched < length:
            node = self._new_leaf((), length - matched, node, ())
        return matched, node

    def begin(self, root: Node, length: int) -> Node:
        """`insert` into an empty chain, and `lock` what is stored."""
        self._clock += 1
        node = self._new_node((), length, root, ())
        node.time = self._clock
        node.locks = 1
        return node

    def end(self, node: Node, more: int) -> None:
        """`insert` tokens behind a chain's one node, `insert` that node again, and `unlock` it."""
        self._new_leaf((), more, node, ())
        self._clock += 1
        node.time = self._clock
        node.locks = 0
        self.evictable += node.length

    def _walk(self, root: Node, length: int) -> tuple[int, Node]:
        self._clock += 1
        matched, node = 0, root
        while matched < length and node.children:
            child = node.children[()]
            missing = length - matched
            if child.length > missing:
                child = self._cut(child, missing, (), (), ())
                child.time = self._clock
                return length, child
            child.time = self._clock
            matched += child.length
            node = child
        return matched, node
