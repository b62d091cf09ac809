"""The KV pool: tokens that are free, in requests, or in the prefix tree.

Rules: SGLang 0.5.21 `mem_cache/allocation.py`, `mem_cache/common.py`, `mem_cache/allocator/`. A request
occupies whole pages; the part of its prefix that lies in the tree belongs to the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.radix_cache import RadixCache
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
        self.tree = tree

    @property
    def evictable(self) -> int:
        """Tokens in the tree that nobody uses."""
        return 0 if self.tree is None else self.tree.evictable

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
        matched, req.node = self.tree.match(req.runs(), limit)
        return matched

    def allocate_extend(self, reqs: Sequence[LiveRequest]) -> None:
        """Give each request KV for its chunk.

        Raises:
            EngineStuck: the pool is too small even after eviction; the real engine dies of it.
        """
        page = self.page_size
        tokens = sum(req.end - req.start for req in reqs)
        self.make_room(tokens if page == 1 else tokens + page * len(reqs))
        taken = sum(self.ceil(req.end) - self.ceil(req.start) for req in reqs)
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
        known, node = tree.insert(req.runs(), length)
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
                runs = req.runs()
                length = self.floor(req.kv)
                known, _ = tree.insert(runs, length)
                prompt = self.floor(req.prompt_len)
                if 0 < prompt < length:
                    tree.insert(runs, prompt)
                self.available += known - req.owned + pages - length
            else:
                self.available += pages - req.owned
            tree.unlock(req.node)
            req.node = None
        req.kv = req.owned = req.prefix_len = 0
