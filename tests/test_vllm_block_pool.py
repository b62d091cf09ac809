"""Block pool and prefix cache: names of blocks, order of reuse, and the counting twin."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.vllm import block_pool
from sim.engines.vllm.block_pool import (
    BlockPool,
    BlockTable,
    CountingBlockPool,
    PrefixCachingBlockPool,
)
from sim.request import Request, Segment, can_share_prefixes

SIZE = 4


def fill(pool: BlockPool, name: str, *prompt: Segment, outputs: int = 0) -> BlockTable:
    """A table that holds a whole prompt and some outputs, after a prefix lookup."""
    table = pool.new_table(name, prompt)
    tokens = sum(length for _, length in prompt) + outputs
    hit = pool.find_cached(table, (tokens - 1) // SIZE)
    pool.allocate(table, -(-tokens // SIZE) - hit.num_blocks, hit)
    pool.register(table, tokens)
    return table


def hits(pool: BlockPool, *prompt: Segment) -> int:
    """Cached blocks that a prompt would find."""
    return pool.find_cached(pool.new_table("probe", prompt), 1000).num_blocks


def test_the_null_block_is_not_usable() -> None:
    assert PrefixCachingBlockPool(9, SIZE, True).num_free_blocks == 8


def test_freed_blocks_are_reused_unhashed_first_then_by_age_and_each_chain_from_its_tail() -> None:
    pool = PrefixCachingBlockPool(9, SIZE, True)
    old = fill(pool, "old", (1, 10))  # two full blocks and an unhashed one
    new = fill(pool, "new", (2, 12))
    pool.free(old)
    pool.free(new)
    assert pool.num_free_blocks == 8
    fill(pool, "first", (3, 12))  # the two never used and the unhashed one
    assert (hits(pool, (1, 10)), hits(pool, (2, 12)), pool.num_evicted_blocks) == (2, 3, 0)
    fill(pool, "second", (4, 4))
    assert (hits(pool, (1, 10)), hits(pool, (2, 12)), pool.num_evicted_blocks) == (1, 3, 1)
    fill(pool, "third", (5, 8))
    assert (hits(pool, (1, 10)), hits(pool, (2, 12)), pool.num_evicted_blocks) == (0, 2, 3)


def test_a_hit_takes_free_blocks_out_of_the_queue_and_shares_those_in_use() -> None:
    pool = PrefixCachingBlockPool(9, SIZE, True)
    owner = fill(pool, "owner", (1, 8), (2, 4))
    guest = fill(pool, "guest", (1, 8), (3, 4))
    assert pool.num_free_blocks == 8 - 4
    pool.free(owner)
    assert pool.num_free_blocks == 8 - 3  # the guest still holds the two shared ones
    pool.free(guest)
    assert pool.num_free_blocks == 8
    probe = pool.find_cached(pool.new_table("again", ((1, 8), (2, 9))), 4)
    assert (probe.num_blocks, probe.num_free) == (3, 3)


def test_identical_blocks_are_all_kept_and_the_first_registered_is_found() -> None:
    pool = PrefixCachingBlockPool(9, SIZE, True)
    tables = [pool.new_table(name, ((1, 4),)) for name in "abc"]
    for table in tables:  # computed side by side, so none could hit another
        pool.allocate(table, 1)
        pool.register(table, 4)
    for table, name in zip(tables, "abc", strict=True):
        found = pool.find_cached(pool.new_table("probe", ((1, 5),)), 1).blocks[0]
        assert found is tables["abc".index(name)].hashed[0]
        pool.free(table)
        fill(pool, f"other {name}", (f"other {name}", 4 * pool.num_free_blocks))  # takes it


def test_a_block_across_segments_is_its_own() -> None:
    pool = PrefixCachingBlockPool(50, SIZE, True)
    fill(pool, "x", (1, 3), (2, 1), (3, 4))
    assert hits(pool, (1, 3), (2, 1), (3, 4)) == 2
    assert hits(pool, (1, 3), (2, 1), (3, 3)) == 1
    assert hits(pool, (1, 3), (2, 5)) == 1
    assert hits(pool, (1, 4)) == 0
    assert hits(pool, (1, 3), (3, 5)) == 0


def test_outputs_are_cached_under_the_name_by_which_a_later_turn_quotes_them() -> None:
    pool = PrefixCachingBlockPool(50, SIZE, True)
    fill(pool, "turn", (1, 6), outputs=7)
    assert hits(pool, (1, 6), ("out:turn", 7), (2, 5)) == 3
    assert hits(pool, (1, 6), ("out:other", 7)) == 1


def test_without_caching_nothing_is_ever_found() -> None:
    pool = PrefixCachingBlockPool(9, SIZE, False)
    pool.free(fill(pool, "x", (1, 12)))
    assert hits(pool, (1, 12)) == 0
    fill(pool, "y", (2, 32))
    assert pool.num_evicted_blocks == 0


def test_names_are_forgotten_with_their_last_block() -> None:
    pool = PrefixCachingBlockPool(9, SIZE, True)
    for number in range(100):
        pool.free(fill(pool, f"r{number}", (0, 4), (number + 1, 24)))
    nodes, stack = 0, [pool._root]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        nodes += len(node.children)
    assert nodes <= 8


def _tokens(prompt: list[Segment]) -> list[tuple[int | str, int]]:
    return [(key, position) for key, length in prompt for position in range(length)]


PROMPTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=4)


@given(st.lists(PROMPTS, min_size=2, max_size=8), st.sampled_from((1, 2, 3, 4)))
@settings(max_examples=150, deadline=None)
def test_hits_are_those_of_comparing_token_by_token(prompts: list[list[Segment]], size: int) -> None:
    pool = PrefixCachingBlockPool(10_000, size, True)
    *earlier, last = prompts
    for number, prompt in enumerate(earlier):
        table = pool.new_table(f"r{number}", tuple(prompt))
        pool.allocate(table, len(_tokens(prompt)) // size)
        pool.register(table, len(_tokens(prompt)))
    ours = _tokens(last)
    longest = 0
    for prompt in earlier:
        theirs = _tokens(prompt)
        common = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        longest = max(longest, (min(len(ours), len(theirs)) if common is None else common) // size)
    assert pool.find_cached(pool.new_table("last", tuple(last)), 1000).num_blocks == longest


@given(
    st.lists(st.tuples(st.sampled_from(("start", "grow", "end", "resume")), st.integers(0, 5)), max_size=60),
    st.sampled_from((0, 3, 1024)),
)
@settings(max_examples=200, deadline=None)
def test_counting_agrees_with_naming_where_nothing_is_shared(
    actions: list[tuple[str, int]], settled_at_once: int
) -> None:
    with patch.object(block_pool, "SETTLED_AT_ONCE", settled_at_once):
        compare_pools(actions)


def compare_pools(actions: list[tuple[str, int]]) -> None:
    pools: tuple[BlockPool, BlockPool] = (
        PrefixCachingBlockPool(13, SIZE, True),
        CountingBlockPool(13, SIZE, True),
    )
    tables = {key: [pool.new_table(f"r{key}", ((key, 1000),)) for pool in pools] for key in range(6)}
    tokens = dict.fromkeys(range(6), 0)
    for action, key in actions:
        held = tables[key][0].num_blocks > 0
        if action == "end" and held:
            for pool, table in zip(pools, tables[key], strict=True):
                pool.free(table)
        elif action == "grow" and held and pools[0].num_free_blocks:
            tokens[key] += SIZE
            for pool, table in zip(pools, tables[key], strict=True):
                pool.allocate(table, 1)
                pool.register(table, tokens[key] + key % SIZE)
        elif action in ("start", "resume") and not held:
            found = [pool.find_cached(table, 1000) for pool, table in zip(pools, tables[key], strict=True)]
            assert found[0][:2] == found[1][:2]
            if pools[0].num_free_blocks - found[0].num_free < 1:
                continue
            tokens[key] = found[0].num_blocks * SIZE
            for pool, table, hit in zip(pools, tables[key], found, strict=True):
                pool.allocate(table, 1, hit)
                pool.register(table, tokens[key])
        assert pools[0].num_free_blocks == pools[1].num_free_blocks
        assert pools[0].num_evicted_blocks == pools[1].num_evicted_blocks
        assert tables[key][0].capacity == tables[key][1].capacity
        assert len(tables[key][0].hashed) == tables[key][1].num_hashed


def test_whether_prefixes_can_be_shared_is_told_by_the_first_segments() -> None:
    alone = [Request(f"r{number}", ((number, 5), (0, 5)), 3) for number in range(4)]
    assert not can_share_prefixes(alone)
    assert can_share_prefixes([*alone, Request("x", ((2, 1),), 3)])


def test_a_counting_pool_refuses_to_guess() -> None:
    pool = CountingBlockPool(9, SIZE, True)
    table = fill(pool, "x", (1, 12))
    pool.free(table)
    with pytest.raises(ValueError, match="3 blocks are left"):
        pool.find_cached(table, 2)
