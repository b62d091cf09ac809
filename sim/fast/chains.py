"""SGLang's prefix tree, compiled, for prompts that share nothing: `sim.engines.sglang.radix_cache`.

Every request then has a chain of nodes of its own below the root, which is node -1. nodes (int64) has a row
per node, leaves (int64) is a heap of the leaves that may be evicted, with the time they had when they were
queued, and behind it the numbers of nodes that are free again. The topmost node of a request stands in its
row of rows.
"""

from __future__ import annotations

import numpy as np

from sim.fast.jit import allocating, kernel
from sim.fast.state import OWN, OWN_K

ROOT = -1
# Columns of nodes: tokens, time of the last touch, locks, parent, child, owner, whether it is queued.
LENGTH, TIME, LOCKS, PARENT, CHILD, OWNER, QUEUED = range(7)
# Columns of leaves.
LEAF_TIME, LEAF, SPARE_NODE = range(3)
# Column of rows.
TOPMOST = OWN
# ints: clock, evictable tokens, nodes ever made, free node numbers, queued leaves; tokens per page.
CLOCK, EVICTABLE, MADE, SPARE, LEAVES, PAGE = range(OWN_K, OWN_K + 6)


@kernel
def match(rows, ints, nodes, leaves, request, limit):
    """Longest stored prefix of the first `limit` tokens: (tokens, node at its end). Marks it as just used."""
    return _walk(rows, ints, nodes, leaves, request, limit // ints[PAGE] * ints[PAGE])


@kernel
def insert(rows, ints, nodes, leaves, request, length):
    """Store the first `length` tokens: (how many were stored already, node at the end)."""
    length = length // ints[PAGE] * ints[PAGE]
    matched, node = _walk(rows, ints, nodes, leaves, request, length)
    if matched < length:
        ints[CLOCK] += 1
        leaf = _new_node(ints, nodes, leaves, request, length - matched, node)
        nodes[leaf, TIME] = ints[CLOCK]
        _hang(rows, nodes, request, node, leaf)
        ints[EVICTABLE] += length - matched
        _queue_if_evictable(ints, nodes, leaves, leaf)
        node = leaf
    return matched, node


@kernel
def lock(ints, nodes, node):
    """Keep a node and everything above it."""
    while node != ROOT:
        if nodes[node, LOCKS] == 0:
            ints[EVICTABLE] -= nodes[node, LENGTH]
        nodes[node, LOCKS] += 1
        node = nodes[node, PARENT]


@kernel
def unlock(ints, nodes, leaves, node):
    """Undo one `lock`."""
    while node != ROOT:
        nodes[node, LOCKS] -= 1
        if nodes[node, LOCKS] == 0:
            ints[EVICTABLE] += nodes[node, LENGTH]
            _queue_if_evictable(ints, nodes, leaves, node)
        node = nodes[node, PARENT]


@kernel
def evict(rows, ints, nodes, leaves, tokens):
    """Remove unused leaves, least recently used first, until that many tokens are gone.

    Returns how many are.
    """
    gone = 0
    while gone < tokens and ints[LEAVES]:
        time, node = _pop_leaf(ints, leaves)
        nodes[node, QUEUED] = 0
        if nodes[node, LOCKS] or nodes[node, CHILD] != ROOT:
            continue
        if nodes[node, TIME] != time:
            _queue_if_evictable(ints, nodes, leaves, node)
            continue
        parent = nodes[node, PARENT]
        _hang(rows, nodes, nodes[node, OWNER], parent, ROOT)
        gone += nodes[node, LENGTH]
        ints[EVICTABLE] -= nodes[node, LENGTH]
        leaves[ints[SPARE], SPARE_NODE] = node
        ints[SPARE] += 1
        if parent != ROOT:
            _queue_if_evictable(ints, nodes, leaves, parent)
    return gone


@kernel
def is_full(ints, nodes, more):
    """Whether that many further nodes might not fit."""
    return ints[MADE] - ints[SPARE] + more > len(nodes)


@allocating
def larger(nodes, leaves):
    """The same nodes with room for twice as many."""
    more_nodes, more_leaves = np.zeros((2 * len(nodes), 7), np.int64), np.zeros((2 * len(nodes), 3), np.int64)
    more_nodes[: len(nodes)], more_leaves[: len(nodes)] = nodes, leaves
    return more_nodes, more_leaves


@kernel
def _hang(rows, nodes, request, parent, child):
    """Put a node (or nothing, ROOT) below another one of the same chain."""
    if parent == ROOT:
        rows[request, TOPMOST] = child
    else:
        nodes[parent, CHILD] = child


@kernel
def _walk(rows, ints, nodes, leaves, request, length):
    ints[CLOCK] += 1
    matched, last, node = 0, ROOT, rows[request, TOPMOST]
    while matched < length and node != ROOT:
        if nodes[node, LENGTH] > length - matched:
            upper = _split(rows, ints, nodes, leaves, node, length - matched)
            nodes[upper, TIME] = ints[CLOCK]
            return length, upper
        nodes[node, TIME] = ints[CLOCK]
        matched += nodes[node, LENGTH]
        last, node = node, nodes[node, CHILD]
    return matched, last


@kernel
def _split(rows, ints, nodes, leaves, node, length):
    """Cut a node after `length` tokens; the remainder counts as just used. Returns the upper part."""
    parent, request = nodes[node, PARENT], nodes[node, OWNER]
    upper = _new_node(ints, nodes, leaves, request, length, parent)
    nodes[upper, LOCKS] = nodes[node, LOCKS]
    _hang(rows, nodes, request, parent, upper)
    nodes[node, LENGTH] -= length
    nodes[node, PARENT] = upper
    nodes[node, TIME] = ints[CLOCK]
    nodes[upper, CHILD] = node
    return upper


@kernel
def _new_node(ints, nodes, leaves, owner, length, parent):
    if ints[SPARE]:
        ints[SPARE] -= 1
        node = leaves[ints[SPARE], SPARE_NODE]
    else:
        node = ints[MADE]
        ints[MADE] += 1
    nodes[node, LENGTH], nodes[node, TIME], nodes[node, LOCKS] = length, 0, 0
    nodes[node, PARENT], nodes[node, CHILD], nodes[node, OWNER], nodes[node, QUEUED] = parent, ROOT, owner, 0
    return node


@kernel
def _queue_if_evictable(ints, nodes, leaves, node):
    if nodes[node, LOCKS] or nodes[node, CHILD] != ROOT or nodes[node, QUEUED]:
        return
    nodes[node, QUEUED] = 1
    at, time = ints[LEAVES], nodes[node, TIME]
    ints[LEAVES] = at + 1
    while at:
        above = (at - 1) // 2
        if leaves[above, LEAF_TIME] <= time:
            break
        leaves[at, LEAF_TIME], leaves[at, LEAF] = leaves[above, LEAF_TIME], leaves[above, LEAF]
        at = above
    leaves[at, LEAF_TIME], leaves[at, LEAF] = time, node


@kernel
def _pop_leaf(ints, leaves):
    first_time, first = leaves[0, LEAF_TIME], leaves[0, LEAF]
    last = ints[LEAVES] - 1
    ints[LEAVES] = last
    time, node, at = leaves[last, LEAF_TIME], leaves[last, LEAF], 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last and leaves[below + 1, LEAF_TIME] < leaves[below, LEAF_TIME]:
            below += 1
        if time <= leaves[below, LEAF_TIME]:
            break
        leaves[at, LEAF_TIME], leaves[at, LEAF] = leaves[below, LEAF_TIME], leaves[below, LEAF]
        at = below
    leaves[at, LEAF_TIME], leaves[at, LEAF] = time, node
    return first_time, first
