"""vLLM's usual call beside a leap: one newcomer brings its whole prompt, everybody else decodes.

It decides what `VllmScheduler.schedule` decides, without looking for anything that cannot happen then.
"""

from __future__ import annotations

from sim.engines.base import ScheduledChunk, StepPlan, new_tuple
from sim.engines.vllm.leap import LeapingVllmScheduler, ParkedRequest


class WelcomingVllmScheduler(LeapingVllmScheduler):
    """`LeapingVllmScheduler` with a short way in for a lone newcomer."""

    def schedule(self) -> StepPlan:
        """Decide the next batch; see `VllmScheduler`."""
        if self.waiting.size == 1 and self._partial is None and len(self.running) < self._max_running:
            plan = self._take_in()
            if plan is not None:
                return plan
        return super().schedule()

    def _take_in(self) -> StepPlan | None:
        """Admit the one request that waits with all of its tokens; None if they do not fit for certain."""
        call, crowd, pool = self._num_steps, self._crowd, self.block_pool
        if self._is_async and call - 1 in crowd.ends:
            self._leave_at_limit(call)
        if self._fresh:
            self._park_fresh(call)
        request, size, blocks = self.waiting.peek(), pool.block_size, crowd.new_blocks(call)
        tokens, table = request.num_tokens, request.table
        whole = -(-tokens // size)
        if (
            whole > pool.num_free_blocks - blocks - self._watermark_blocks
            or tokens > self._token_budget - crowd.size
            or request.num_stale_results
        ):
            return None
        assert isinstance(request, ParkedRequest)
        self._num_steps = call + 1
        self._blocked = self._finished_unannounced = False
        if blocks:
            pool.allocate(self._crowd_table, blocks)
        hit = pool.find_cached(table, (tokens - 1) // size)
        pool.allocate(table, whole - hit.num_blocks, hit)
        start = hit.num_blocks * size
        request.num_computed_tokens = tokens
        if table.hash_at <= tokens:
            pool.register(table, tokens)
        self.waiting.pop()
        self.running.append(request)
        self._fresh.append(request)
        chunk = new_tuple(ScheduledChunk, (request.request, start, tokens - start, True))
        cached = [(request.request_id, start)]
        plan = StepPlan(call, "mixed", [chunk], None, cached, crowd.size, crowd.context(call))
        self._in_flight.append((plan, [request]))
        return plan
