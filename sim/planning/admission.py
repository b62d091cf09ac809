"""How many requests the KV pool admits, whatever the caps on sequences and concurrency say."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests of one length against one KV pool.

    Attributes:
        at_full_length: requests that fit when each has generated its whole output: what the pool holds in
            the worst case, without preemption.
        on_average: requests that fit when each is half through its output, as in a steady mix.
        kv_bound: whether the pool, not the offered concurrency, is the limit even on average.
        waiting: of the offered requests, those that at least have to wait.
    """

    at_full_length: int
    on_average: int
    kv_bound: bool
    waiting: int


def admission(
    pool_tokens: int, prompt: float, output: float, *, block_size: int = 1, concurrency: int | None = None
) -> Admission:
    """Admission by KV, each request rounded up to whole blocks.

    Args:
        pool_tokens: KV pool of one replica.
        prompt, output: tokens of a request, or their means.
        concurrency: requests offered at once; None if unlimited.
    """
    full = pool_tokens // _blocks(prompt + output, block_size)
    average = pool_tokens // _blocks(prompt + output / 2, block_size)
    bound = concurrency is not None and concurrency > average
    return Admission(full, average, bound, max(0, (concurrency or 0) - average))


def _blocks(tokens: float, block_size: int) -> int:
    return max(block_size, math.ceil(tokens / block_size) * block_size)
