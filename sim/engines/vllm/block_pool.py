"""vLLM's KV block pool and prefix cache for one full-attention group.

Source of the rules: vLLM 0.28.0, `v1/core/block_pool.py`, `kv_cache_utils.py`, `kv_cache_manager.py`,
`single_type_kv_cache_manager.py FullAttentionManager`; the same on 0.33.0.

vLLM names a full block by a hash chained over its own tokens and the hash of the block before it. Here the
name is a node of a prefix tree: the path to it spells the tokens as runs of (segment, offset), so two blocks
have the same node exactly if they stand for the same token prefix, and no token is ever looked at alone.

The free list of vLLM holds unhashed blocks first and hashed ones after them, least recently freed first. The
mutual order of unhashed blocks cannot be told from outside, so they are a mere count, and only hashed blocks
are objects.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from sim.request import Segment, SegmentKey

NEVER = 1 << 62
"""A token count that no sequence reaches."""

SETTLED_AT_ONCE = 1024
"""Evictions [blocks] whose bookkeeping may wait."""

Piece = tuple[SegmentKey | int, ...]
"""Contents of a block: `(key, offset)` if it lies in one segment, else `(key, offset, length, key, ...)`."""


class PrefixNode:
    """A token prefix that ends at a block boundary: the name of the blocks which end there.

    `blocks` are the blocks registered under this name, first registered first.
    """

    __slots__ = ("blocks", "children", "parent", "piece")

    def __init__(self, parent: PrefixNode | None, piece: Piece) -> None:
        self.parent = parent
        self.piece = piece
        self.children: dict[Piece, PrefixNode] = {}
        self.blocks: list[Block] = []


class Block:
    """A hashed block. It keeps its hash until it is taken for new tokens."""

    __slots__ = ("node", "ref_cnt")

    def __init__(self, node: PrefixNode) -> None:
        self.node = node
        self.ref_cnt = 1


class BlockTable:
    """The blocks of one request; the fields belong to the pool.

    Attributes:
        segments: the request's tokens, its own outputs as a last segment without end.
        num_blocks: blocks that it holds.
        capacity: tokens for which they have room.
        hash_at: number of computed tokens at which its next block is full and gets a hash.
        hashed: those of its first blocks that have a hash, in order.
        num_hashed: their number, where nobody needs to know more (`CountingBlockPool`).
        segment, offset: where in `segments` the first block without a hash begins.
    """

    __slots__ = ("capacity", "hash_at", "hashed", "num_blocks", "num_hashed", "offset", "segment", "segments")

    def __init__(self, segments: tuple[Segment, ...], hash_at: int) -> None:
        self.segments = segments
        self.num_blocks = 0
        self.capacity = 0
        self.hash_at = hash_at
        self.num_hashed = 0
        self.hashed: list[Block] = []
        self.segment = 0
        self.offset = 0


class Hit(NamedTuple):
    """Outcome of a prefix lookup: cached blocks, and how many of them nobody uses."""

    num_blocks: int
    num_free: int
    blocks: list[Block]


NO_HIT = Hit(0, 0, [])


class BlockPool(Protocol):
    """What the scheduler needs of a pool. `num_free_blocks` counts cached but unused blocks as free."""

    block_size: int
    num_free_blocks: int
    num_evicted_blocks: int

    def new_table(self, request_id: str, prompt: tuple[Segment, ...]) -> BlockTable:
        """An empty table for a request."""

    def find_cached(self, table: BlockTable, max_blocks: int) -> Hit:
        """Longest run of cached blocks from the start of the sequence, at most `max_blocks`."""

    def allocate(self, table: BlockTable, num_new: int, hit: Hit = NO_HIT) -> None:
        """Give a table the blocks of a hit and `num_new` further ones; the caller has checked the room."""

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Give every block that is full with `num_tokens` tokens its hash, if it has none."""

    def free(self, table: BlockTable) -> None:
        """Take all blocks of a table back."""


class PrefixCachingBlockPool:
    """Block pool in which requests share cached prefixes.

    Args:
        num_gpu_blocks: blocks as the engine counts them; one of them, the null block, is never usable.
        block_size: tokens per block.
        enable_caching: False: no block ever gets a hash.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.num_free_blocks = num_gpu_blocks - 1
        self.num_evicted_blocks = 0
        self._first_hash_at = block_size if enable_caching else NEVER
        self._root = PrefixNode(None, ())
        self._num_free_unhashed = num_gpu_blocks - 1
        self._free_hashed: OrderedDict[Block, None] = OrderedDict()

    def new_table(self, request_id: str, prompt: tuple[Segment, ...]) -> BlockTable:
        """An empty table for a request."""
        return BlockTable((*prompt, (f"out:{request_id}", NEVER)), self._first_hash_at)

    def find_cached(self, table: BlockTable, max_blocks: int) -> Hit:
        """Longest run of cached blocks from the start of the sequence, at most `max_blocks`.

        Of several blocks with the same hash it is the one registered first.
        """
        if self._first_hash_at == NEVER:
            return NO_HIT
        node, segment, offset, num_free = self._root, 0, 0, 0
        blocks: list[Block] = []
        while len(blocks) < max_blocks:
            piece, segment, offset = _next_piece(table.segments, segment, offset, self.block_size)
            child = node.children.get(piece)
            if child is None or not child.blocks:
                break
            node, block = child, child.blocks[0]
            blocks.append(block)
            num_free += not block.ref_cnt
        return Hit(len(blocks), num_free, blocks)

    def allocate(self, table: BlockTable, num_new: int, hit: Hit = NO_HIT) -> None:
        """Give a table the blocks of a hit and `num_new` further ones; the caller has checked the room."""
        if hit.blocks:
            self._touch(table, hit)
        unhashed = min(num_new, self._num_free_unhashed)
        self._num_free_unhashed -= unhashed
        for _ in range(num_new - unhashed):
            self._evict(self._free_hashed.popitem(last=False)[0])
        self.num_free_blocks -= num_new
        table.num_blocks += num_new
        table.capacity = table.num_blocks * self.block_size

    def _touch(self, table: BlockTable, hit: Hit) -> None:
        for block in hit.blocks:
            if not block.ref_cnt:
                del self._free_hashed[block]
            block.ref_cnt += 1
        self.num_free_blocks -= hit.num_free
        table.hashed += hit.blocks
        table.num_blocks += hit.num_blocks
        for _ in hit.blocks:
            _, table.segment, table.offset = _next_piece(
                table.segments, table.segment, table.offset, self.block_size
            )
        table.hash_at = (hit.num_blocks + 1) * self.block_size

    def _evict(self, block: Block) -> None:
        self.num_evicted_blocks += 1
        node = block.node
        node.blocks.remove(block)
        while not node.blocks and not node.children and node.parent is not None:
            del node.parent.children[node.piece]
            node = node.parent

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Give every block that is full with `num_tokens` tokens its hash, if it has none.

        Identical blocks are all kept, under the same hash.
        """
        hashed, size = table.hashed, self.block_size
        node = hashed[-1].node if hashed else self._root
        while table.hash_at <= num_tokens:
            piece, table.segment, table.offset = _next_piece(
                table.segments, table.segment, table.offset, size
            )
            child = node.children.get(piece)
            if child is None:
                child = node.children[piece] = PrefixNode(node, piece)
            node, block = child, Block(child)
            node.blocks.append(block)
            hashed.append(block)
            table.hash_at += size

    def free(self, table: BlockTable) -> None:
        """Take all blocks of a table back, its last block first.

        Unhashed ones are reused first, hashed ones last.
        """
        unhashed = table.num_blocks - len(table.hashed)
        self._num_free_unhashed += unhashed
        self.num_free_blocks += unhashed
        for block in reversed(table.hashed):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free_hashed[block] = None
                self.num_free_blocks += 1
        table.hashed = []
        table.num_blocks = table.capacity = table.segment = table.offset = 0
        table.hash_at = self._first_hash_at


class CountingBlockPool:
    """The same pool for workloads in which no request can hit another's blocks: it only counts.

    Every free hashed block then belongs to one request, whose chain loses its tail first, so one number per
    request says which of its blocks are left. What a preempted request hits when it resumes are these. Good
    for first come, first served only: under `priority` a request can be preempted in the very call that
    completed its last block, and then resumes with fewer blocks than it has left.

    Args: as of `PrefixCachingBlockPool`.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.num_free_blocks = num_gpu_blocks - 1
        self.num_evicted_blocks = 0
        self._first_hash_at = block_size if enable_caching else NEVER
        self._num_free_unhashed = num_gpu_blocks - 1
        self._free_hashed: OrderedDict[BlockTable, int] = OrderedDict()
        self._owed = 0  # blocks evicted that are not taken out of `_free_hashed` yet

    def new_table(self, request_id: str, prompt: tuple[Segment, ...]) -> BlockTable:
        """An empty table for a request."""
        return BlockTable(prompt, self._first_hash_at)

    def find_cached(self, table: BlockTable, max_blocks: int) -> Hit:
        """The request's own blocks that are left; they are never more than `max_blocks`."""
        if table not in self._free_hashed:
            return NO_HIT
        self._settle()
        left = self._free_hashed.get(table, 0)
        if left > max_blocks:
            raise ValueError(f"{left} blocks are left of a sequence that can use {max_blocks}")
        return Hit(left, left, []) if left else NO_HIT

    def allocate(self, table: BlockTable, num_new: int, hit: Hit = NO_HIT) -> None:
        """Give a table the blocks of a hit and `num_new` further ones; the caller has checked the room."""
        if hit.num_blocks:
            del self._free_hashed[table]
            table.num_hashed = table.num_blocks = hit.num_blocks
            table.hash_at = (hit.num_blocks + 1) * self.block_size
        self._num_free_unhashed -= num_new
        if self._num_free_unhashed < 0:
            self._owed -= self._num_free_unhashed
            self.num_evicted_blocks -= self._num_free_unhashed
            self._num_free_unhashed = 0
        self.num_free_blocks -= num_new + hit.num_free
        table.num_blocks += num_new
        table.capacity = table.num_blocks * self.block_size

    def _settle(self) -> None:
        """Take out what is owed, which are the blocks that have been free for longest."""
        owed, self._owed = self._owed, 0
        while owed:
            oldest, left = self._free_hashed.popitem(last=False)
            if left > owed:
                self._free_hashed[oldest] = left - owed
                self._free_hashed.move_to_end(oldest, last=False)
                return
            owed -= left

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Give every block that is full with `num_tokens` tokens its hash, if it has none."""
        if table.hash_at <= num_tokens:
            table.num_hashed = num_tokens // self.block_size
            table.hash_at = (table.num_hashed + 1) * self.block_size

    def free(self, table: BlockTable) -> None:
        """Take all blocks of a table back."""
        self._num_free_unhashed += table.num_blocks - table.num_hashed
        self.num_free_blocks += table.num_blocks
        if self._owed > SETTLED_AT_ONCE:
            self._settle()
        if table.num_hashed:
            self._free_hashed[table] = table.num_hashed
        table.num_hashed = table.num_blocks = table.capacity = 0
        table.hash_at = self._first_hash_at


def _next_piece(
    segments: tuple[Segment, ...], segment: int, offset: int, size: int
) -> tuple[Piece, int, int]:
    """Contents of the block that begins at (segment, offset), and where the next one begins."""
    key, length = segments[segment]
    if offset + size < length:
        return (key, offset), segment, offset + size
    if offset + size == length:
        return (key, offset), segment + 1, 0
    piece: list[SegmentKey | int] = []
    while True:
        key, length = segments[segment]
        taken = min(size, length - offset)
        piece += (key, offset, taken)
        size -= taken
        if not size:
            break
        segment, offset = segment + 1, 0
    if offset + taken == length:
        return tuple(piece), segment + 1, 0
    return tuple(piece), segment, offset + taken
