"""vLLM's usual call beside a leap: newcomers bring their whole prompts, everybody else decodes.

It decides what `VllmScheduler.schedule` decides, without looking for anything that cannot happen then.
"""

from __future__ import annotations

from sim.engines.base import ScheduledChunk, StepPlan, new_tuple
from sim.engines.vllm.leap import LeapingVllmScheduler, ParkedRequest
from sim.engines.vllm.request import EngineRequest


class WelcomingVllmScheduler(LeapingVllmScheduler):
    """`LeapingVllmScheduler` with a short way in for those whom nothing holds up."""

    def schedule(self) -> StepPlan:
        """Decide the next batch; see `VllmScheduler`."""
        waiting = self.waiting.size
        if waiting and self._partial is None and len(self.running) + waiting <= self._max_running:
            plan = self._take_all_in()
            if plan is not None:
                return plan
        return super().schedule()

    def _take_all_in(self) -> StepPlan | None:
        """Admit everybody who waits, with all of their tokens; None if these do not fit for certain."""
        call, crowd, pool = self._num_steps, self._crowd, self.block_pool
        if self._is_async and call - 1 in crowd.ends:
            self._leave_at_limit(call)
        if self._fresh:
            self._park_fresh(call)
        size, begun = pool.block_size, crowd.new_blocks(call)
        budget = self._token_budget - crowd.size
        spare = pool.num_free_blocks - begun - self._watermark_blocks
        newcomers: list[EngineRequest] = [*self.waiting.in_order()]
        for request in newcomers:
            tokens = request.num_tokens
            budget -= tokens
            spare -= -(-tokens // size)
            if budget < 0 or spare < 0 or request.num_stale_results:
                return None  # though hits may yet make it fit
        self._num_steps = call + 1
        self._blocked = self._finished_unannounced = False
        if begun:
            pool.allocate(self._crowd_table, begun)
        plan = StepPlan(call, "mixed", crowd=crowd.size, crowd_context=crowd.context(call))
        for request in newcomers:
            assert isinstance(request, ParkedRequest)
            tokens, table = request.num_tokens, request.table
            hit = pool.find_cached(table, (tokens - 1) // size)
            pool.allocate(table, -(-tokens // size) - hit.num_blocks, hit)
            if table.hash_at <= tokens:
                pool.register(table, tokens)
            request.num_computed_tokens = tokens
            start = hit.num_blocks * size
            plan.cached.append((request.request_id, start))
            plan.add(new_tuple(ScheduledChunk, (request.request, start, tokens - start, True)))
            self.waiting.pop()
            self.running.append(request)
            self._fresh.append(request)
        self._in_flight.append((plan, newcomers))
        return plan
