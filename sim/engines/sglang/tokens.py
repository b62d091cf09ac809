"""Token sequences as runs, so that comparing and storing prefixes costs per segment, not per token.

A run `(key, start, length)` stands for tokens `start .. start + length - 1` of the endless sequence `key`
(see `sim.request`). Two tokens are equal exactly if key and position are equal, so two aligned runs either
agree over the shorter of them or differ in their very first token.

The end-of-sequence token is the one exception: whoever samples it, it is the same token. It has a key of its
own, the one of `STOP_RUN`, and a prompt that quotes it names it by that key.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.request import Segment, SegmentKey

Run = tuple[SegmentKey, int, int]

STOP_RUN: Run = ("stop", 0, 1)


def output_key(request_id: str) -> str:
    """Key of the tokens that a request generates."""
    return f"out:{request_id}"


def prompt_runs(prompt: Sequence[Segment]) -> tuple[Run, ...]:
    """Runs of a prompt."""
    return tuple([(key, 0, length) for key, length in prompt])


def clip(runs: Sequence[Run], length: int) -> list[Run]:
    """The first `length` tokens of a sequence (all of it if it is shorter)."""
    clipped: list[Run] = []
    for run in runs:
        if length <= 0:
            break
        key, start, n = run
        clipped.append(run if n <= length else (key, start, length))
        length -= n
    return clipped


def take(runs: Sequence[Run], index: int, offset: int, length: int) -> tuple[Run, ...]:
    """`length` tokens from token `offset` of run `index` on (fewer at the end of the sequence)."""
    taken: list[Run] = []
    while length > 0 and index < len(runs):
        key, start, n = runs[index]
        step = min(n - offset, length)
        taken.append((key, start + offset, step))
        length -= step
        index += 1
        offset = 0
    return tuple(taken)


def agree(runs: Sequence[Run], index: int, offset: int, other: Sequence[Run]) -> tuple[int, int, int]:
    """How many tokens of `runs`, from token `offset` of run `index` on, equal those of `other`.

    Returns:
        That number, and the position (index, offset) right after them.
    """
    matched = 0
    for key, start, n in other:
        done = 0
        while done < n:
            if index == len(runs):
                return matched, index, offset
            run_key, run_start, run_n = runs[index]
            if run_key != key or run_start + offset != start + done:
                return matched, index, offset
            step = min(run_n - offset, n - done)
            done += step
            matched += step
            offset += step
            if offset == run_n:
                index += 1
                offset = 0
    return matched, index, offset


def common_prefix(a: Sequence[Run], b: Sequence[Run]) -> int:
    """Length of the longest common prefix of two sequences [tokens]."""
    return agree(a, 0, 0, b)[0]
