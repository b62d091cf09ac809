"""The vLLM V1 scheduler, decision for decision.

Source of the rules: vLLM 0.28.0, `v1/core/sched/scheduler.py`, `async_scheduler.py`, `utils.py check_stop`,
`v1/core/kv_cache_manager.py allocate_slots`; 0.33.0 where a comment says so.

There are no phases: a request merely has tokens that are known but not computed yet. Each call first gives
the running requests what they lack, in list order, then admits waiting ones while budget, slots and blocks
last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.engines.base import (
    FinishReason,
    Leaping,
    QueueState,
    ScheduledChunk,
    StepPlan,
    StepResult,
    new_tuple,
)
from sim.engines.vllm.block_pool import BlockPool, CountingBlockPool, PrefixCachingBlockPool
from sim.engines.vllm.config import VllmSchedulerConfig
from sim.engines.vllm.queue import FcfsQueue, PriorityQueue, WaitingQueue
from sim.engines.vllm.request import EngineRequest
from sim.errors import BadInput, EngineStuck
from sim.request import Request

__all__ = ["VllmScheduler", "VllmSchedulerConfig"]


class VllmScheduler:
    """vLLM's scheduler without a clock and without a model (see `sim.engines.base.Scheduler`).

    Before each call to `schedule` at most `pipeline_depth - 1` results should be outstanding; more are
    allowed, as with pipeline parallelism.

    Args:
        shares_prefixes: False promises that no two requests begin with the same segment, which spares the
            prefix tree (see `sim.request.can_share_prefixes`). It changes no decision.
    """

    def __init__(self, config: VllmSchedulerConfig, *, shares_prefixes: bool = True) -> None:
        self.config = config
        self.shares_prefixes = shares_prefixes
        self.pipeline_depth = 2 if config.async_scheduling else 1
        self._hits_its_own_only = not shares_prefixes and config.scheduling_policy == "fcfs"
        self.block_pool: BlockPool = (
            CountingBlockPool if self._hits_its_own_only else PrefixCachingBlockPool
        )(config.num_gpu_blocks, config.block_size, config.enable_prefix_caching)
        self.running: list[EngineRequest] = []
        self.waiting: WaitingQueue = (
            FcfsQueue(separate_skipped=not config.follows_0_33)
            if config.scheduling_policy == "fcfs"
            else PriorityQueue()
        )
        self._token_budget = min(
            config.max_num_batched_tokens, config.max_num_scheduled_tokens or config.max_num_batched_tokens
        )
        self._is_async = config.async_scheduling
        # What a decoding request's known tokens are ahead of the computed ones when a call is made.
        self._decode_lead = 0 if config.async_scheduling else 1
        self._by_priority = config.scheduling_policy == "priority"
        self._num_usable_blocks = config.num_gpu_blocks - 1
        self._num_usable_tokens = self._num_usable_blocks * config.block_size
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        self._max_running = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
        self._in_flight: deque[tuple[StepPlan, list[EngineRequest]]] = deque()
        self._num_steps = 0
        self._num_added = 0
        self._finished_unannounced = False

    # -- the interface of sim.engines.base.Scheduler ------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises BadInput if the engine refuses it or could never run it."""
        config = self.config
        if request.prompt_len >= config.max_model_len:
            hint = f"leaves no room for an output within --max-model-len {config.max_model_len}"
            raise BadInput(f"request {request.request_id}", f"prompt of {request.prompt_len} tokens", hint)
        blocks = -(-request.prompt_len // config.block_size)
        if blocks > self._num_usable_blocks:
            what = f"prompt of {request.prompt_len} tokens"
            hint = f"needs {blocks} KV blocks of {self._num_usable_blocks} usable ones; {_MORE_MEMORY}"
            raise BadInput(f"request {request.request_id}", what, hint)
        self.waiting.add(self._new_request(request))
        self._num_added += 1

    def has_work(self) -> bool:
        """Whether a call is due: requests are left, or finished ones not yet announced to the workers."""
        return bool(self.running or self.waiting.size or self._finished_unannounced)

    def queue_state(self) -> QueueState:
        """Queue lengths and KV occupancy now."""
        total, pool = self._num_usable_tokens, self.block_pool
        held = total - pool.num_free_blocks * pool.block_size
        return new_tuple(QueueState, (len(self.running), self.waiting.size, held, total))

    def running_ids(self) -> Sequence[str]:
        """Ids in the running list, in its order."""
        return [request.request_id for request in self.running]

    def waiting_ids(self) -> Sequence[str]:
        """Ids of waiting requests in the order in which the scheduler will look at them."""
        return [request.request_id for request in self.waiting.in_order()]

    def schedule(self) -> StepPlan:
        """Decide the next batch.

        Raises EngineStuck if the engine would go round in circles without ever computing anything again.
        """
        plan = StepPlan(self._num_steps, "mixed")
        self._num_steps += 1
        batch: list[EngineRequest] = []
        threshold = self.config.prefill_threshold(len(self.running) + self.waiting.size)
        seen = self._schedule_decodes(plan, batch)
        budget = self._schedule_running(plan, batch, threshold, self._token_budget - plan.head, seen)
        if not plan.preempted:
            self._schedule_waiting(plan, batch, threshold, budget)
        if batch:
            self._in_flight.append((plan, batch))
        else:
            plan.kind = "idle"
            self._check_progress(plan)
        self._finished_unannounced = False
        return plan

    def update(self, plan: StepPlan) -> StepResult:
        """Process the result of a plan. Plans without a batch have none and are ignored."""
        result = StepResult([], [], [])
        if plan.kind == "idle":
            return result
        expected, batch = self._in_flight.popleft()
        if expected is not plan:
            raise ValueError(f"the result of step {expected.step} is due before that of step {plan.step}")
        new_tokens = result.new_tokens
        for request in batch[: plan.head]:
            num_tokens = request.num_tokens + 1
            if num_tokens >= request.notice_at:
                self._take_result(request, True, result)
                continue
            request.num_tokens = num_tokens
            num_outputs = num_tokens - request.num_prompt_tokens
            new_tokens.append((request.request_id, num_outputs))
            if request.samples_stop(num_outputs):
                self._finish(request, "stop", result)
        for request, chunk in zip(batch[plan.head :], plan.behind_head(), strict=True):
            self._take_result(request, chunk.samples, result)
        if result.finished:
            self.running = [request for request in self.running if not request.finished]
            self._finished_unannounced = True
        return result

    def leaping(self, requests: Sequence[Request]) -> Leaping | None:
        """A fresh scheduler that decides the same for these requests and can leap, or None."""
        from sim.engines.vllm.leap import can_leap
        from sim.engines.vllm.newcomer import WelcomingVllmScheduler

        if not can_leap(self.config, requests):
            return None
        return WelcomingVllmScheduler(self.config, shares_prefixes=self.shares_prefixes)

    def _new_request(self, request: Request) -> EngineRequest:
        table = self.block_pool.new_table(request.request_id, request.prompt)
        return EngineRequest(request, self._num_added, self.config.max_model_len, table)

    # -- the running loop ---------------------------------------------------------------------------------

    def _schedule_decodes(self, plan: StepPlan, batch: list[EngineRequest]) -> int:
        """Give the first of the running requests a token each, up to one for which more is to be decided.

        Returns:
            The position of that one.
        """
        lead, starts, at_limit = self._decode_lead, [], 0
        for request in self.running[: self._token_budget]:
            start = request.num_computed_tokens
            if request.num_tokens - start != lead:
                break
            if start >= request.plain_until:
                if start >= request.length_limit - 1:
                    at_limit += 1  # the step in flight brings its last token
                    continue
                if not self._prepare_decode(request):
                    break
            request.num_computed_tokens = start + 1
            starts.append(start)
            batch.append(request)
        if starts:
            plan.decode_first(batch[:], starts)
        return len(starts) + at_limit

    def _prepare_decode(self, request: EngineRequest) -> bool:
        """Take the block that the next token of a decoding request needs, and hash the one that is full.

        Returns:
            Whether that could be done; False if no block is free.
        """
        computed, known, table = request.num_computed_tokens, request.num_tokens, request.table
        if computed == table.capacity:
            if not self.block_pool.num_free_blocks:
                return False
            self.block_pool.allocate(table, 1)
        if table.hash_at <= known:
            self.block_pool.register(table, known)
        request.plain_until = min(request.length_limit - 1, table.capacity, table.hash_at - self._decode_lead)
        request.notice_at = min(request.length_limit, table.hash_at + 1)
        return True

    def _schedule_running(
        self, plan: StepPlan, batch: list[EngineRequest], threshold: int, budget: int, index: int = 0
    ) -> int:
        """Give each running request, from position `index` on, what it lacks. Returns the budget left."""
        running = self.running
        last_position = self.config.max_model_len - 1
        block_size = self.config.block_size
        pool = self.block_pool
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            placeholders = self._placeholders(request)
            if placeholders and computed + 2 - placeholders >= request.max_total_tokens:
                index += 1  # the steps in flight bring it to max_tokens
                continue
            num_new = request.num_tokens + placeholders - computed
            if num_new != 1 or computed >= last_position:
                num_new = min(num_new, threshold, budget, last_position - computed)
                if num_new <= 0:
                    index += 1
                    continue
            if computed + num_new > request.table.capacity:
                missing = -(-(computed + num_new) // block_size) - request.table.num_blocks
                victim = None
                while missing > pool.num_free_blocks and victim is not request:
                    victim, position = self._preempt()
                    plan.preempted.append(victim.request_id)
                    if position < index:
                        index -= 1
                        budget += self._unschedule(victim, plan, batch)
                if victim is request:
                    if self._by_priority and self.config.follows_0_33:
                        continue  # 0.33.0: those behind it may still run
                    break
                pool.allocate(request.table, missing)
            self._run(request, num_new, plan, batch)
            budget -= num_new
            index += 1
        return budget

    def _placeholders(self, request: EngineRequest) -> int:
        """Tokens that steps in flight are generating for it; synchronous calls know of none."""
        return max(0, request.num_computed_tokens + 1 - request.num_tokens) if self._is_async else 0

    def _preempt(self) -> tuple[EngineRequest, int]:
        """Send one running request back to the queue. Returns it and the position that it had."""
        position = len(self.running) - 1
        if self._by_priority:
            position = max(range(len(self.running)), key=lambda i: self.running[i].sort_key)
        victim = self.running.pop(position)
        self.block_pool.free(victim.table)
        victim.num_computed_tokens = victim.plain_until = victim.notice_at = 0
        victim.num_stale_results = sum(victim in batch for _, batch in self._in_flight)
        self.waiting.add_preempted(victim)
        return victim, position

    @staticmethod
    def _unschedule(victim: EngineRequest, plan: StepPlan, batch: list[EngineRequest]) -> int:
        """Drop what this call had given to a victim. Returns its tokens, which go back to the budget."""
        if victim not in batch:
            return 0
        position = batch.index(victim)
        del batch[position]
        chunk = plan.scheduled.pop(position)
        if position < plan.head:
            plan.head -= 1
            plan.head_context -= chunk.start + 1
        return chunk.num_tokens

    # -- the waiting loop ---------------------------------------------------------------------------------

    def _schedule_waiting(
        self, plan: StepPlan, batch: list[EngineRequest], threshold: int, budget: int
    ) -> None:
        """Admit waiting requests in queue order, up to the first that does not fit."""
        set_aside: list[EngineRequest] = []
        while self.waiting.size and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting.peek()
            if request.num_stale_results:
                set_aside.append(self.waiting.pop())
                continue
            num_new = self._admit(request, threshold, budget, plan)
            if not num_new:
                break
            self.waiting.pop()
            self.running.append(request)
            self._run(request, num_new, plan, batch)
            budget -= num_new
        if set_aside:
            self.waiting.put_back(set_aside)

    def _admit(self, request: EngineRequest, threshold: int, budget: int, plan: StepPlan) -> int:
        """Give a waiting request its blocks. Returns the tokens of its first chunk, 0 if it does not fit."""
        size, pool, table = self.config.block_size, self.block_pool, request.table
        whole = -(-request.num_tokens // size)
        if whole > self._num_usable_blocks:
            raise EngineStuck(_never_fits(request, whole, self._num_usable_blocks))
        spare = pool.num_free_blocks - (self._watermark_blocks if self.running else 0)
        if self._hits_its_own_only and whole > spare and self.config.scheduler_reserve_full_isl:
            return 0  # what it hits is free as well, so no hit makes it fit
        hit = pool.find_cached(table, (request.num_tokens - 1) // size)  # the last token is always computed
        cached = hit.num_blocks * size
        num_new = min(request.num_tokens - cached, threshold)
        if num_new > budget:
            if not self.config.enable_chunked_prefill:
                return 0
            num_new = budget
        available = spare - hit.num_free
        missing = -(-(cached + num_new) // size) - hit.num_blocks
        if missing > available:
            return 0
        if self.config.scheduler_reserve_full_isl and whole - hit.num_blocks > available:
            return 0
        pool.allocate(table, missing, hit)
        request.num_computed_tokens = cached
        plan.cached.append((request.request_id, cached))
        return num_new

    # -- both loops, and results --------------------------------------------------------------------------

    def _run(self, request: EngineRequest, num_new: int, plan: StepPlan, batch: list[EngineRequest]) -> None:
        """Put a chunk into the batch. Its full blocks can be hit at once, even within this call."""
        start, known = request.num_computed_tokens, request.num_tokens
        samples = start + num_new >= known + self._placeholders(request)
        end = request.num_computed_tokens = start + num_new
        if request.table.hash_at <= end:
            self.block_pool.register(request.table, min(end, known))
        batch.append(request)
        plan.add(new_tuple(ScheduledChunk, (request.request, start, num_new, samples)))

    def _take_result(self, request: EngineRequest, samples: bool, result: StepResult) -> None:
        """Process the result of one chunk."""
        if request.num_stale_results:
            request.num_stale_results -= 1
        if request.finished or not samples:
            return
        num_tokens = request.num_tokens = request.num_tokens + 1
        num_outputs = num_tokens - request.num_prompt_tokens
        result.new_tokens.append((request.request_id, num_outputs))
        # All tokens but the new one are computed, unless it was preempted: that may have completed a block.
        if request.table.hash_at < num_tokens <= request.num_computed_tokens + 1:
            self.block_pool.register(request.table, num_tokens - 1)
        if request.samples_stop(num_outputs):  # counts before any length limit
            self._finish(request, "stop", result)
        elif num_tokens >= request.length_limit:
            self._finish(request, "length", result)

    def _finish(self, request: EngineRequest, reason: FinishReason, result: StepResult) -> None:
        request.finished = True
        request.notice_at = 0
        if request.num_computed_tokens:
            self.block_pool.free(request.table)
        else:  # preempted: it holds no block and stands in the queue
            self.waiting.remove(request)
        result.finished.append((request.request_id, reason))

    def _check_progress(self, plan: StepPlan) -> None:
        """A call that changes nothing, with nothing to wait for, would be repeated for ever."""
        if plan.preempted or self._in_flight or not (self.running or self.waiting.size):
            return
        first = self.running[0] if self.running else self.waiting.peek()
        raise EngineStuck(
            f"request {first.request_id}: the scheduler made an empty step with {len(self.running)} running "
            f"and {self.waiting.size} waiting requests and no result to wait for, and would do so for ever"
        )


_MORE_MEMORY = (
    "give it more KV cache (--gpu-memory-utilization, --num-gpu-blocks-override) or lower --max-model-len"
)


def _never_fits(request: EngineRequest, blocks: int, usable: int) -> str:
    return (
        f"request {request.request_id}: grew to {request.num_tokens} tokens, which need {blocks} KV "
        f"blocks of {usable} usable ones, so it can never be resumed and the engine hangs; {_MORE_MEMORY}"
    )
