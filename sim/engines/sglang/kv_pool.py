"""The KV pool: tokens that are free, in requests, or in the prefix tree.

Rules: SGLang 0.5.21 `mem_cache/allocation.py`, `mem_cache/common.py`, `mem_cache/allocator/`. A request
occupies whole pages; the part of its prefix that lies in the tree belongs to the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.engines.sglang.chain_cache import ChainCache
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.radix_cache import EvictableNodes, Node, RadixCache, new_root
from sim.engines.sglang.stuck import out_of_memory


class KvPool:
    """Token accounting of one replica.

    Attributes:
        total, page_size: tokens.
        available: tokens in neither a request nor the tree.
        tree: the prefix tree; None with the radix cache off.
    """

    def __init__(self, total: int, page_size: int, tree: RadixCache | None) -> None:
        self.total = total
        self.page_size = page_size
        self.available = total
        self.tree: EvictableNodes | None = tree
        self._radix = tree

    @property
    def evictable(self) -> int:
        """Tokens in the tree that nobody uses."""
        return 0 if self.tree is None else self.tree.evictable

    @property
    def reclaimable(self) -> int:
        """Tokens that are available, or will be once everything evictable is evicted."""
        return self.available if self.tree is None else self.available + self.tree.evictable

    def ceil(self, tokens: int) -> int:
        """Round up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    def floor(self, tokens: int) -> int:
        """Round down to whole pages."""
        return tokens // self.page_size * self.page_size

    def make_room(self, tokens: int) -> None:
        """Evict until `tokens` tokens are available, or nothing is left to evict."""
        if tokens > self.available and self.tree is not None:
            self.available += self.tree.evict(tokens - self.available)

    def match(self, req: LiveRequest, limit: int) -> int:
        """Look the first `limit` tokens of a request up; sets its `node`. Returns the hit length."""
        if self.tree is None:
            return 0
        matched, req.node = self._match(req, limit)
        return matched

    def _match(self, req: LiveRequest, limit: int) -> tuple[int, Node]:
        assert self._radix is not None
        return self._radix.match(req.runs(), limit)

    def _insert(self, req: LiveRequest, length: int) -> tuple[int, Node]:
        assert self._radix is not None
        return self._radix.insert(req.runs(), length)

    def allocate_extend(self, reqs: Sequence[LiveRequest]) -> None:
        """Give each request KV for its chunk.

        Raises:
            EngineStuck: the pool is too small even after eviction; the real engine dies of it.
        """
        page = self.page_size
        tokens = taken = sum([req.end - req.start for req in reqs])
        if page > 1:
            tokens += page * len(reqs)
            taken = sum([self.ceil(req.end) - self.ceil(req.start) for req in reqs])
        self.make_room(tokens)
        if taken > self.available:
            raise out_of_memory("prefill", reqs[0].request_id, taken, self.available, page)
        self.available -= taken
        for req in reqs:
            req.kv = req.end

    def decode_fits(self, reqs: Sequence[LiveRequest]) -> bool:
        """Whether one more position for each request fits, after eviction if need be."""
        page = self.page_size
        needed = len(reqs) if page == 1 else page * sum(1 for req in reqs if req.kv % page == 0)
        if needed > self.available:
            self.make_room(needed)
        return needed <= self.available

    def allocate_decode(self, reqs: Sequence[LiveRequest]) -> None:
        """Give each request one more position; the caller advances `kv`.

        Raises:
            EngineStuck: the pool is too small even after eviction; the real engine dies of it.
        """
        page = self.page_size
        reserve = page * len(reqs)
        if reserve > self.available:
            self.make_room(reserve)
        taken = reserve if page == 1 else page * sum(1 for req in reqs if req.kv % page == 0)
        if taken > self.available:
            raise out_of_memory("decode", reqs[0].request_id, taken, self.available, page)
        self.available -= taken

    def store_unfinished(self, req: LiveRequest) -> None:
        """Put a request's sequence up to its chunk's end into the tree and go on from there."""
        req.prefix_len = req.end
        tree = self.tree
        if tree is None:
            return
        length = self.floor(req.end)
        known, node = self._insert(req, length)
        self.available += known - req.owned
        tree.lock(node)
        assert req.node is not None
        tree.unlock(req.node)
        req.node = node
        req.owned = length

    def release(self, req: LiveRequest, *, store: bool) -> None:
        """Take back everything a request holds; with `store`, leave its KV in the tree for others.

        A stored sequence is split where its prompt ends, so that its output can be evicted by itself.
        """
        tree = self.tree
        pages = self.ceil(req.kv)
        if tree is None:
            self.available += pages
        else:
            assert req.node is not None
            if store:
                length = self.floor(req.kv)
                known, _ = self._insert(req, length)
                prompt = self.floor(req.prompt_len)
                if 0 < prompt < length:
                    self._insert(req, prompt)
                self.available += known - req.owned + pages - length
            else:
                self.available += pages - req.owned
            tree.unlock(req.node)
            req.node = None
        req.kv = req.owned = req.prefix_len = 0


class ChainedKvPool(KvPool):
    """`KvPool` with a radix cache for requests of which no two begin alike: a chain of nodes per request."""

    def __init__(self, total: int, page_size: int) -> None:
        super().__init__(total, page_size, None)
        self.tree = self._chains = ChainCache(page_size)

    def begin_chain(self, req: LiveRequest) -> None:
        """`match` for a request of which nothing was ever stored."""
        req.chain = req.node = new_root()

    def store_unfinished(self, req: LiveRequest) -> None:
        """See `KvPool`; mostly nothing of the request is stored yet."""
        root, length = req.chain, self.floor(req.end)
        if root is None or root.children or not length:
            super().store_unfinished(req)
            return
        req.prefix_len = req.end
        req.owned = length
        req.node = self._chains.begin(root, length)

    def release(self, req: LiveRequest, *, store: bool) -> None:
        """See `KvPool`; mostly the prompt is stored as one node, and its output follows."""
        node, prompt, more = req.node, self.floor(req.prompt_len), self.floor(req.kv) - req.owned
        plain = store and 0 < prompt == req.owned and more > 0
        if node is None or not plain or node.length != prompt or node.children:
            super().release(req, store=store)
            return
        self._chains.end(node, more)
        self.available += self.ceil(req.kv) - prompt - more
        req.node = None
        req.kv = req.owned = req.prefix_len = 0

    def _match(self, req: LiveRequest, limit: int) -> tuple[int, Node]:
        if req.chain is None:
            req.chain = new_root()
        return self._chains.match(req.chain, limit)

    def _insert(self, req: LiveRequest, length: int) -> tuple[int, Node]:
        assert req.chain is not None
        return self._chains.insert(req.chain, length)
