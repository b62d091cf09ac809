"""Requests that decode one token in every scheduling call, counted instead of visited.

Calls are numbered. A member that has computed n tokens after call p has computed n - p + q after call q, so
one number, its anchor n - p, tells its state at every later call; what the whole crowd needs is a sum.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import accumulate
from typing import Generic, TypeVar

Member = TypeVar("Member")


class Crowd(Generic[Member]):
    """Counts of a crowd whose members are known by their anchors [tokens].

    Args:
        block_size: tokens per KV block.

    Attributes:
        size: members.
        ends: members by the call whose result will end them, in the order in which they joined; entries of
            members that left before are not taken out.
    """

    def __init__(self, block_size: int) -> None:
        self.size = 0
        self.ends: dict[int, list[Member]] = {}
        self._block_size = block_size
        self._anchors = 0
        self._phases = [0] * block_size
        self._end_calls: list[int] = []

    def join(self, anchor: int) -> None:
        """Count a member."""
        self.size += 1
        self._anchors += anchor
        self._phases[(1 - anchor) % self._block_size] += 1

    def leave(self, anchor: int) -> None:
        """Count a member no more."""
        self.size -= 1
        self._anchors -= anchor
        self._phases[(1 - anchor) % self._block_size] -= 1

    def expect_end(self, call: int, member: Member) -> None:
        """The result of that call will end a member, unless it leaves before."""
        ending = self.ends.get(call)
        if ending is None:
            self.ends[call] = [member]
            heapq.heappush(self._end_calls, call)
        else:
            ending.append(member)

    def first_end(self, since: int) -> int:
        """The earliest call, from that one on, whose result may end a member; there must be one."""
        calls, ends = self._end_calls, self.ends
        while (first := calls[0]) < since or first not in ends:
            ends.pop(heapq.heappop(calls), None)
        return first

    def context(self, call: int) -> int:
        """Tokens computed once the call is done, summed over the members."""
        return self._anchors + self.size * call

    def new_blocks(self, call: int, calls: int = 1) -> int:
        """Blocks that the crowd begins in that call and those after it."""
        if calls == 1:
            return self._phases[call % self._block_size]
        phases, size = self._phases, self._block_size
        rounds, rest = divmod(calls, size)
        begin = call % size
        end = begin + rest
        blocks = rounds * self.size + sum(phases[begin:end])
        return blocks + sum(phases[: end - size]) if end > size else blocks

    def blocks_begun(self, call: int, calls: int) -> list[int]:
        """`new_blocks` of the first, the first two, ... of that many calls from that one on."""
        phases, begin = self._phases, call % self._block_size
        if calls == 1:
            return [phases[begin]]
        end = begin + calls
        if end > self._block_size:
            phases = phases * (end // self._block_size + 1)
        return list(accumulate(phases[begin:end]))

    def begins_block(self, anchor: int, call: int) -> bool:
        """Whether a member begins a block in that call."""
        return (1 - anchor - call) % self._block_size == 0

    def calls_within(self, blocks: int, call: int, most: int) -> int:
        """How many calls from that one on, at most `most`, need no more than that many blocks."""
        size, phases = self._block_size, self._phases
        if -(-most // size) * self.size <= blocks:
            return most
        rounds = blocks // self.size if self.size else 0
        blocks -= rounds * self.size
        begin = call % size
        needed = list(accumulate(phases[begin:] + phases[:begin]))
        return min(most, rounds * size + bisect_right(needed, blocks))
