"""SGLang's usual call beside a leap: whoever waits is prefilled whole.

It decides what `SglangScheduler.schedule` decides, without looking for anything that cannot happen then.
"""

from __future__ import annotations

from sim.engines.base import ScheduledChunk, StepPlan, new_tuple
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.kv_pool import ChainedKvPool
from sim.engines.sglang.leap import LeapingSglangScheduler
from sim.engines.sglang.scheduler import Batch, InFlightBatch


class WelcomingSglangScheduler(LeapingSglangScheduler):
    """`LeapingSglangScheduler` with a short way in for those whom nothing holds up.

    It is open where no prompt can be stored already, and to requests that were never looked at before.
    """

    def __init__(self, config: SglangSchedulerConfig, *, shares_prefixes: bool = True) -> None:
        super().__init__(config, shares_prefixes=shares_prefixes)
        self._most_tokens = config.max_prefill_tokens - 1
        if (chunk := config.chunk_tokens) is not None:
            self._most_tokens = min(self._most_tokens, chunk)
        self._is_open = isinstance(self.pool, ChainedKvPool) and config.schedule_policy == "fcfs"

    def schedule(self) -> StepPlan:
        """Decide the next batch; see `SglangScheduler`."""
        if self._waiting and self._is_open and self._chunked is None and not self._decode_rounds:
            plan = self._take_all_in()
            if plan is not None:
                return plan
        return super().schedule()

    def _take_all_in(self) -> StepPlan | None:
        """Prefill everybody who waits; None if they do not fit for certain."""
        if self._ratio_resets:
            self._ratio_resets = False
            self.ratio.reset()
        if self._fresh and not any(flight.num_prefill for flight in self._in_flight):
            self._park()
        if self._last_prefill is not None:
            self._merge_last_prefill()
        reqs, running, pool, page = self._waiting, self._running, self.pool, self.pool.page_size
        most = self.config.prefill_max_requests
        if running.is_full or running.prefill_only or (most and len(reqs) > most):
            return None
        if len(reqs) > self._free_slots or len(reqs) > self._slots - len(running.reqs):
            return None
        tokens = limits = 0
        for req in reqs:
            tokens += -(-req.prompt_len // page) * page
            limits += req.max_new_tokens
            if tokens > self._most_tokens or req.chain is not None or not req.max_new_tokens:
                return None
        # As much as a sum of reserves can be off, and more, is left to the engine's own sum.
        needed = tokens + page * len(reqs) + limits + self._reserve() + 1.0
        if needed >= pool.reclaimable:
            return None
        assert isinstance(pool, ChainedKvPool)
        plan = StepPlan(self._step, "prefill")
        self._step += 1
        for req in reqs:
            pool.begin_chain(req)
            req.fill_len = req.end = req.prompt_len
            req.holds_slot = True
            plan.cached.append((req.request_id, 0))
            plan.add(new_tuple(ScheduledChunk, (req.request, 0, req.prompt_len, True)))
        self._waiting = []
        self._free_slots -= len(reqs)
        pool.allocate_extend(reqs)
        self._last_prefill = batch = Batch(reqs)
        batch.num_prefill = len(reqs)
        self._decode_rounds = self.config.prefill_decode_interval
        self._in_flight.append(InFlightBatch(plan.step, reqs, len(reqs), None))
        return plan
