"""The prefix tree by itself: what it matches, keeps, splits and evicts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.replay import STOP_SEGMENT
from sim.engines.sglang.radix_cache import Node, RadixCache
from sim.engines.sglang.tokens import STOP_RUN, Run, agree, clip, common_prefix, prompt_runs, take

A, B, C = "a", "b", "c"


def runs(*prompt: tuple[str | int, int]) -> tuple[Run, ...]:
    return prompt_runs(prompt)


def length(sequence: tuple[Run, ...]) -> int:
    return sum(n for _, _, n in sequence)


def stored(tree: RadixCache, sequence: tuple[Run, ...]) -> int:
    return tree.insert(sequence, length(sequence))[0]


def hit(tree: RadixCache, sequence: tuple[Run, ...]) -> int:
    return tree.match(sequence, length(sequence))[0]


def nodes(tree: RadixCache) -> list[Node]:
    found, stack = [], [tree.root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found[1:]


def test_tokens_are_equal_where_key_and_position_are() -> None:
    assert common_prefix(runs((A, 5), (B, 4)), runs((A, 5), (B, 9))) == 9
    assert common_prefix(runs((A, 5), (B, 4)), runs((A, 7))) == 5  # b's first token is not a's sixth
    assert common_prefix(runs((A, 5), (A, 4)), runs((A, 9))) == 5  # a segment starts at its first token
    assert common_prefix(runs((A, 5)), runs((B, 5))) == 0


def test_runs_are_compared_wherever_they_are_cut() -> None:
    whole: tuple[Run, ...] = ((A, 0, 6), (B, 0, 4))
    cut: tuple[Run, ...] = ((A, 0, 2), (A, 2, 4), (B, 0, 1), (B, 1, 3))
    assert common_prefix(whole, cut) == common_prefix(cut, whole) == 10
    assert agree(whole, 0, 3, ((A, 3, 3), (B, 0, 2))) == (5, 1, 2)


def test_clip_and_take() -> None:
    sequence = runs((A, 6), (B, 4))
    assert clip(sequence, 8) == [(A, 0, 6), (B, 0, 2)]
    assert clip(sequence, 0) == []
    assert take(sequence, 0, 4, 5) == ((A, 4, 2), (B, 0, 3))
    assert take(sequence, 1, 1, 99) == ((B, 1, 3),)


def test_the_stop_token_is_the_one_that_scenarios_quote() -> None:
    assert STOP_RUN == (STOP_SEGMENT, 0, 1)


def test_a_match_reports_whole_pages_only() -> None:
    tree = RadixCache(page_size=16)
    assert stored(tree, runs((A, 40))) == 0
    assert tree.evictable == 32
    assert hit(tree, runs((A, 40))) == 32
    assert tree.match(runs((A, 40)), 31)[0] == 16
    assert hit(tree, runs((A, 31), (B, 9))) == 16
    assert hit(tree, runs((A, 15), (B, 25))) == 0


def test_pages_of_several_segments_are_found_again() -> None:
    tree = RadixCache(page_size=8)
    stored(tree, runs((A, 3), (B, 7), (C, 10)))
    assert hit(tree, runs((A, 3), (B, 7), (C, 6))) == 16
    assert hit(tree, runs((A, 3), (B, 4), (C, 9))) == 0
    assert hit(tree, runs((A, 3), (B, 7), (A, 9))) == 8


def test_an_insert_stores_what_is_new_and_splits_where_it_branches_off() -> None:
    tree = RadixCache(page_size=1)
    stored(tree, runs((A, 10)))
    assert stored(tree, runs((A, 4), (B, 6))) == 4
    assert sorted(node.length for node in nodes(tree)) == [4, 6, 6]
    assert tree.evictable == 16
    assert stored(tree, runs((A, 10))) == 10  # known, though in two pieces


def test_eviction_takes_whole_leaves_the_least_recently_used_first() -> None:
    tree = RadixCache(page_size=1)
    stored(tree, runs((A, 10)))
    stored(tree, runs((B, 7)))
    stored(tree, runs((C, 5)))
    hit(tree, runs((A, 10)))
    assert tree.evict(1) == 7
    assert (hit(tree, runs((B, 7))), hit(tree, runs((A, 10))), hit(tree, runs((C, 5)))) == (0, 10, 5)
    assert tree.evict(11) == 15
    assert (tree.evictable, tree.evicted, tree.evict(1)) == (0, 22, 0)


def test_a_parent_that_becomes_a_leaf_competes_in_the_same_eviction() -> None:
    tree = RadixCache(page_size=1)
    stored(tree, runs((A, 4), (B, 3)))
    stored(tree, runs((A, 4), (C, 3)))
    stored(tree, runs((B, 9)))
    # Both children go, then their parent, which is older than the last one inserted.
    assert tree.evict(7) == 10
    assert hit(tree, runs((B, 9))) == 9


def test_a_split_refreshes_the_part_that_was_not_matched() -> None:
    tree = RadixCache(page_size=1)
    stored(tree, runs((A, 10)))
    stored(tree, runs((B, 10)))
    hit(tree, runs((A, 4)))
    assert tree.evict(1) == 10
    assert hit(tree, runs((A, 10))) == 10


def test_locks_hold_a_path_and_count_it_as_used() -> None:
    tree = RadixCache(page_size=1)
    stored(tree, runs((A, 4), (B, 3)))
    _, node = tree.match(runs((A, 4), (B, 3)), 7)
    tree.lock(node)
    stored(tree, runs((A, 4), (C, 5)))  # splits below the lock
    assert tree.evictable == 5
    assert tree.evict(99) == 5
    assert hit(tree, runs((A, 4), (B, 3))) == 7
    tree.unlock(node)
    assert tree.evictable == 7
    assert tree.evict(99) == 7


def test_a_lock_outlasts_a_split_of_its_node() -> None:
    tree = RadixCache(page_size=1)
    _, node = tree.insert(runs((A, 10)), 10)
    tree.lock(node)
    hit(tree, runs((A, 6)))
    assert tree.evictable == 0
    tree.unlock(node)
    assert tree.evictable == 10


Keys = st.sampled_from([A, B])
Prompts = st.lists(st.tuples(Keys, st.integers(1, 9)), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    page=st.sampled_from([1, 3, 4]),
    steps=st.lists(st.tuples(st.sampled_from(["insert", "match", "evict"]), Prompts), max_size=25),
)
def test_the_tree_is_a_set_of_prefixes(page: int, steps: list[tuple[str, list[tuple[str, int]]]]) -> None:
    """Against a plain set of token prefixes: hits, sizes, and that eviction leaves closed prefixes."""
    tree = RadixCache(page)
    known: set[tuple[tuple[str, int], ...]] = set()

    def pages(prompt: list[tuple[str, int]]) -> list[tuple[tuple[str, int], ...]]:
        tokens = tuple((key, i) for key, n in prompt for i in range(n))
        return [tokens[:end] for end in range(page, len(tokens) + 1, page)]

    for kind, prompt in steps:
        sequence = prompt_runs(prompt)
        expected = page * sum(prefix in known for prefix in pages(prompt))
        if kind == "match":
            assert hit(tree, sequence) == expected
        elif kind == "insert":
            assert stored(tree, sequence) == expected
            known.update(pages(prompt))
        else:
            before = tree.evictable
            gone = tree.evict(length(sequence))
            assert gone == before or gone >= length(sequence)
            known = {prefix for prefix in known if _holds(tree, prefix)}
        assert tree.evictable == page * len(known) == sum(node.length for node in nodes(tree))
        assert all(
            node.length % page == 0 and length(tuple(node.runs)) == node.length for node in nodes(tree)
        )


def _holds(tree: RadixCache, prefix: tuple[tuple[str, int], ...]) -> bool:
    """Whether the tree holds a prefix, found without touching it."""
    node, at = tree.root, 0
    while at < len(prefix):
        for child in node.children.values():
            tokens = [(key, start + i) for key, start, n in child.runs for i in range(n)]
            overlap = min(len(tokens), len(prefix) - at)
            if tuple(tokens[:overlap]) == prefix[at : at + overlap]:
                node, at = child, at + overlap
                break
        else:
            return False
    return True
