"""Which waiting requests join the next prefill batch, and with how many tokens.

Rules: SGLang 0.5.21 `managers/schedule_policy.py PrefillAdder` and `mem_cache/prefill_budget.py`. All budgets
are tokens. What is charged is page-rounded; what a candidate is tested with is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.kv_pool import KvPool
from sim.engines.sglang.live_request import LiveRequest

# A very long max_tokens is reserved only up to here (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
CLIP_MAX_NEW_TOKENS = 4096


class Verdict(Enum):
    """What becomes of the pass after a candidate."""

    CONTINUE = 0
    NO_TOKEN = 1  # memory is short: the running batch counts as full
    OTHER = 2  # a token budget is used up


class PrefillAdder:
    """The budgets of one admission pass.

    Args:
        reserve: sum of `running_reserve` over the running list, in its order, if it is known.

    Attributes:
        can_run: requests of the batch so far, the carried chunked one first.
        new_chunked: the request that this pass truncated, if any.
        running: the running list, finished requests included.
    """

    def __init__(
        self,
        config: SglangSchedulerConfig,
        pool: KvPool,
        running: Sequence[LiveRequest],
        new_token_ratio: float,
        reserve: float | None = None,
    ) -> None:
        mixed_decodes = len(running) if config.mixes_chunks else 0
        chunk = config.chunk_tokens
        self.can_run: list[LiveRequest] = []
        self.new_chunked: LiveRequest | None = None
        self._pool = pool
        self._page = config.page_size
        self.running = running
        self._ratio = new_token_ratio
        self._max_requests = config.prefill_max_requests
        self._rem_input = config.max_prefill_tokens - mixed_decodes
        self._rem_chunk = None if chunk is None else chunk - mixed_decodes
        self._current_offset = mixed_decodes
        if reserve is None:
            reserve = sum([self.running_reserve(req) for req in running])
        self._total_offset = mixed_decodes + reserve
        self._live: list[tuple[float, int]] | None = None

    def running_reserve(self, req: LiveRequest) -> float:
        """Tokens reserved for what a running request has still to generate."""
        return min(req.max_new_tokens - req.num_output_tokens, CLIP_MAX_NEW_TOKENS) * self._ratio

    def released(self, reserve: float) -> None:
        """A running request with this reserve was preempted."""
        self._total_offset -= reserve

    @property
    def rem_total(self) -> float:
        """Tokens left when everybody's expected output is reserved."""
        return self._pool.reclaimable - self._total_offset

    @property
    def _rem_current(self) -> int:
        return self._pool.reclaimable - self._current_offset

    def add_chunked(self, req: LiveRequest) -> bool:
        """Continue the carried chunked request. Returns whether a part of its prompt remains after this."""
        assert self._rem_chunk is not None
        limit = min(self._rem_chunk, int(self.rem_total))
        if limit <= 0:
            limit = self._rem_chunk  # only by going on will it ever release its KV
        remaining = req.num_tokens - req.prefix_len
        self._admit(req, min(remaining, limit), truncated=remaining > limit)
        return remaining > limit

    def add(self, req: LiveRequest) -> Verdict:
        """Try a waiting request whose longest hit was just looked up."""
        if self._max_requests is not None and len(self.can_run) >= self._max_requests:
            return Verdict.OTHER
        tree = self._pool.tree
        if tree is None:
            return self._add_ignore_eos(req) if req.ignore_eos else self._add_normal(req)
        # The hit counts as used, not as evictable, from here on.
        assert req.node is not None
        tree.lock(req.node)
        verdict = self._add_normal(req)
        if not self.can_run or self.can_run[-1] is not req:
            tree.unlock(req.node)
        return verdict

    def _add_normal(self, req: LiveRequest) -> Verdict:
        extend = req.num_tokens - req.prefix_len
        left = min(max(req.max_new_tokens - req.num_output_tokens, 0), CLIP_MAX_NEW_TOKENS)
        if extend + left + self._page >= self.rem_total:
            return Verdict.NO_TOKEN
        paged = self._pool.ceil(extend)
        if self._rem_chunk is None:
            if self.can_run and paged >= self._rem_input:
                return Verdict.OTHER
        elif paged > self._rem_chunk:
            end = self._pool.floor(req.prefix_len + self._pool.floor(self._rem_chunk))
            if end <= req.prefix_len:
                return Verdict.OTHER
            self._admit(req, end - req.prefix_len, truncated=True)
            self.new_chunked = req
            return self._verdict()
        self._admit(req, extend, truncated=False)
        return self._verdict()

    def _add_ignore_eos(self, req: LiveRequest) -> Verdict:
        """Admission when nothing is cached and the output length is certain.

        Plays the completions through in order of remaining tokens: whenever one is about to finish there
        must be more than one free token for each request still alive.
        """
        extend = req.num_tokens
        pinned = self._pool.ceil(extend) + self._page
        if pinned > min(self._rem_current, self.rem_total):
            return Verdict.NO_TOKEN
        free = self._rem_current - pinned
        live = self._live_with(req)
        for i, (left, occupied) in enumerate(live):
            alive = len(live) - i
            if free - left * alive <= alive:
                return Verdict.NO_TOKEN
            free += occupied
        if self._rem_chunk is None or extend <= self._rem_chunk:
            self._admit(req, extend, truncated=False)
        elif self._rem_chunk <= 0:
            return Verdict.OTHER
        else:
            self._admit(req, self._rem_chunk, truncated=True)
            self.new_chunked = req
        return self._verdict()

    def _live_with(self, req: LiveRequest) -> list[tuple[float, int]]:
        """(remaining output, occupied tokens) of everybody alive if `req` joins, by remaining output."""
        if self._live is None:
            everybody = (req, *self.running, *self.can_run)
            self._live = [state for state in map(self._state, everybody) if state[0] > 0]
            self._live.sort(key=lambda state: state[0])
        else:
            state = self._state(req)
            if state[0] > 0:
                # A newcomer that outlasts everybody goes before the last one, not after it.
                last = max(len(self._live) - 1, 0)
                at = next((i for i, other in enumerate(self._live) if state[0] <= other[0]), last)
                self._live.insert(at, state)
        return self._live

    def _state(self, req: LiveRequest) -> tuple[float, int]:
        share = 1.0 if req.ignore_eos else self._ratio
        return req.max_new_tokens * share - req.num_output_tokens, req.num_tokens

    def _admit(self, req: LiveRequest, tokens: int, *, truncated: bool) -> None:
        req.start = req.prefix_len
        req.end = req.start + tokens
        self.can_run.append(req)
        paged = self._pool.ceil(tokens)
        # The whole limit is charged, also for a request that has already generated a part of it.
        reserve = 0 if truncated else min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        self._current_offset += paged + self._page
        self._total_offset += paged + self._page + reserve
        self._rem_input -= paged
        if self._rem_chunk is not None:
            self._rem_chunk -= paged

    def _verdict(self) -> Verdict:
        if self._pool.reclaimable <= max(self._total_offset, self._current_offset):
            return Verdict.NO_TOKEN
        if self._rem_input <= 0 or (self._rem_chunk is not None and self._rem_chunk <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE
