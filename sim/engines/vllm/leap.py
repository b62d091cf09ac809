"""vLLM's scheduler for simulations: the same decisions, at a cost per change instead of per request and step.

Under first come, first served the running list begins with requests that decode one token in every call. They
are parked in a crowd (`sim.engines.crowd`), which is scheduled as a number. Whatever happens to one of them
(its end, a preemption) takes it out of the crowd and is then decided by the plain scheduler's own code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import cast

from sim.engines.base import (
    FinishReason,
    Leapt,
    ScheduledChunk,
    StepPlan,
    StepResult,
    StepShape,
    decodes,
    new_tuple,
)
from sim.engines.crowd import Crowd
from sim.engines.vllm.config import VllmSchedulerConfig
from sim.engines.vllm.request import EngineRequest
from sim.engines.vllm.scheduler import VllmScheduler
from sim.request import Request


def can_leap(config: VllmSchedulerConfig, requests: Iterable[Request]) -> bool:
    """Whether `LeapingVllmScheduler` may stand in for the plain one.

    Not with priorities or a threshold for long prompts (then the decodes are no longer the head of the
    running list), with a token budget that may not reach for all decodes, or if a prompt quotes the output of
    another request (whose blocks would get their hashes too late).
    """
    budget = config.max_num_scheduled_tokens
    return (
        config.scheduling_policy == "fcfs"
        and not config.long_prefill_token_threshold
        and (budget is None or budget >= config.max_num_seqs)
        and (getattr(requests, "shares_nothing", False) or not any(map(_quotes, requests)))
    )


def _quotes(request: Request) -> bool:
    return any(isinstance(key, str) and key.startswith("out:") for key, _ in request.prompt)


class ParkedRequest(EngineRequest):
    """A request that can be parked.

    Attributes:
        anchor: tokens computed after a call, less the number of the call; None while it is not parked.
        since: the first call in which the crowd counts it.
        last_call: the last call that has a token for it to compute, a length limit permitting no more.
        end_call: the call whose result ends it; earlier than `last_call` if it samples a stop token.
        in_crowd: whether the crowd counts it now.
    """

    __slots__ = ("anchor", "end_call", "in_crowd", "last_call", "since")

    anchor: int | None
    since: int
    last_call: int
    end_call: int
    in_crowd: bool


class LeapingVllmScheduler(VllmScheduler):
    """`VllmScheduler` with its decodes in a crowd (see `sim.engines.base.Leaping` and `can_leap`)."""

    def __init__(self, config: VllmSchedulerConfig, *, shares_prefixes: bool = True) -> None:
        super().__init__(config, shares_prefixes=shares_prefixes)
        self.block_size = config.block_size
        self._crowd: Crowd[ParkedRequest] = Crowd(config.block_size)
        self._crowd_table = self.block_pool.new_table("crowd", ())
        self._fresh: list[ParkedRequest] = []
        self._partial: ParkedRequest | None = None
        self._left: deque[tuple[int, list[str]]] = deque()
        self._blocked = False
        self._longest = config.max_model_len

    def _new_request(self, request: Request) -> EngineRequest:
        table = self.block_pool.new_table(request.request_id, request.prompt)
        new = ParkedRequest(request, self._num_added, self.config.max_model_len, table)
        new.anchor = None
        new.in_crowd = False
        self._blocked = False  # it may fit where those who wait do not
        return new

    # -- leaps --------------------------------------------------------------------------------------------

    def steady_calls(self) -> int:
        """See `sim.engines.base.Leaping`."""
        if self._partial is not None or self._left or (self.waiting.size and not self._blocked):
            return 0
        crowd, call = self._crowd, self._num_steps
        if self._is_async:
            if not self._in_flight:
                return 0
            if call - 1 in crowd.ends:
                self._leave_at_limit(call)
        if self._fresh:
            self._park_fresh(call)
        if not crowd.size:
            return 0
        calls = 1
        if self._is_async:
            if batch := self._in_flight[-1][1]:
                for request in _own(batch):
                    if request.anchor is None:
                        return 0  # its result ends it, or is stale
            calls = 2
        end = crowd.first_end(call - self._is_async)
        calls += end - call
        if self._is_async and (self.waiting.size or (end >= call and len(crowd.ends[end]) >= crowd.size)):
            calls -= 1  # the last one may find a token for somebody who waits, or nobody at all
        return crowd.calls_within(self.block_pool.num_free_blocks, call, calls) if calls else 0

    def steady_shape(self) -> StepShape:
        """See `sim.engines.base.Leaping`."""
        size = self._crowd.size
        return decodes("mixed", size, self._crowd.context(self._num_steps))

    def leap(self, calls: int) -> Leapt:
        """See `sim.engines.base.Leaping`."""
        crowd = self._crowd
        blocks = crowd.blocks_begun(self._num_steps, calls)
        self._num_steps += calls
        self._finished_unannounced = False
        known = last = self._num_steps - 1
        plan: StepPlan | None = None
        joined: list[str] = []
        if self._is_async:
            known -= 1
            if known in crowd.ends:
                blocks[-1] -= self._leave_at_limit(last)
            if batch := self._in_flight[-1][1]:
                joined = [request.request_id for request in batch]
            plan = StepPlan(last, "mixed", crowd=crowd.size, crowd_context=crowd.context(last))
            self._in_flight[-1] = (plan, [])
        if blocks[-1]:
            self.block_pool.allocate(self._crowd_table, blocks[-1])
        finished: list[tuple[str, FinishReason]] = []
        if known in crowd.ends:
            result = StepResult([], finished, [])
            for request in crowd.ends.pop(known):
                if request.anchor is not None and request.end_call == known:
                    self._end(request, result)
            if finished:
                self._blocked = False
                self._finished_unannounced = True
        return new_tuple(Leapt, (plan, blocks, None, joined, finished))

    # -- single calls -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next batch; see `VllmScheduler`."""
        call = self._num_steps
        self._num_steps = call + 1
        crowd = self._crowd
        plan = StepPlan(call, "mixed")
        batch: list[EngineRequest] = []
        if self._is_async and call - 1 in crowd.ends:
            self._leave_at_limit(call)
        if self._fresh:
            self._park_fresh(call)
        threshold, budget = self._longest, self._token_budget
        if crowd.size:
            if blocks := crowd.new_blocks(call):
                if blocks <= self.block_pool.num_free_blocks:
                    self.block_pool.allocate(self._crowd_table, blocks)
                else:
                    self._allocate_crowd(blocks, call, plan)
            plan.crowd = crowd.size
            plan.crowd_context = crowd.context(call)
            budget -= crowd.size
        if self._partial is not None:
            partial, self._partial = self._partial, None
            budget = self._schedule_running(plan, batch, threshold, budget, len(self.running) - 1)
            if not batch and not plan.preempted:
                self._partial = partial  # no budget was left for it
        self._blocked = False
        if not plan.preempted and self.waiting.size:
            self._schedule_waiting(plan, batch, threshold, budget)
            self._blocked = not batch and self.waiting.size > 0 and not self.waiting.peek().num_stale_results
        if batch:
            for request, chunk in zip(_own(batch), plan.scheduled, strict=True):
                if chunk.samples:
                    self._fresh.append(request)
                else:
                    self._partial = request
            self._in_flight.append((plan, batch))
        elif plan.crowd:
            self._in_flight.append((plan, batch))
        else:
            plan.kind = "idle"
            self._check_progress(plan)
        if plan.preempted:
            self._left.append((call, plan.preempted))
        self._finished_unannounced = False
        return plan

    def update(self, plan: StepPlan) -> StepResult:
        """Process the result of a plan; see `VllmScheduler`."""
        result = StepResult([], [], [])
        if plan.kind == "idle":
            return result
        expected, batch = self._in_flight.popleft()
        if expected is not plan:
            raise ValueError(f"the result of step {expected.step} is due before that of step {plan.step}")
        call = plan.step
        while self._left and self._left[0][0] <= call:
            result.left += self._left.popleft()[1]
        ending = self._crowd.ends.pop(call, None)
        if ending is not None:
            for parked in ending:
                if parked.anchor is not None and parked.end_call == call and parked.since <= call:
                    self._end(parked, result)
        if batch:
            for request, chunk in zip(_own(batch), plan.scheduled, strict=True):
                if request.anchor is None:
                    self._take_result(request, chunk.samples, result)
                    continue
                known = request.anchor + call + 1 - request.num_prompt_tokens
                result.new_tokens.append((request.request_id, known))
                if request.end_call == call:
                    self._end(request, result)
        if result.finished:
            self._blocked = False
            self._finished_unannounced = True
        return result

    def _end(self, request: ParkedRequest, result: StepResult) -> None:
        """The result just processed ends a parked request."""
        self._unpark(request, self._num_steps - 1)
        stops = request.samples_stop(request.num_tokens - request.num_prompt_tokens)
        self._finish(request, "stop" if stops else "length", result)

    def _finish(self, request: EngineRequest, reason: FinishReason, result: StepResult) -> None:
        if request.num_computed_tokens:
            self.running.remove(request)
        super()._finish(request, reason, result)

    # -- in and out of the crowd --------------------------------------------------------------------------

    def _park_fresh(self, call: int) -> None:
        """Whoever computed the last of its known tokens in the previous call decodes from this call on."""
        crowd = self._crowd
        for request in self._fresh:
            if request.finished:
                continue
            anchor = request.num_computed_tokens - (call - 1)
            last = request.length_limit - 1 - anchor
            if last < call:
                continue  # the result in flight is its last token
            request.anchor, request.since, request.last_call = anchor, call, last
            # The length only tells when the crowd will change; it decides nothing.
            stop = request.request.stop_after
            end = last if stop is None else min(last, request.num_prompt_tokens + stop - 1 - anchor)
            request.end_call = end
            request.in_crowd = True
            crowd.join(anchor)
            crowd.expect_end(end, request)
        self._fresh.clear()

    def _leave_at_limit(self, call: int) -> int:
        """Asynchronous calls know by the length limit which requests the results in flight will end.

        Returns:
            How many blocks these would have begun in that call.
        """
        crowd, spared = self._crowd, 0
        for request in crowd.ends[call - 1]:
            anchor = request.anchor
            if anchor is not None and request.in_crowd and request.last_call == call - 1:
                request.in_crowd = False
                crowd.leave(anchor)
                spared += crowd.begins_block(anchor, call)
        return spared

    def _unpark(self, request: ParkedRequest, latest: int) -> None:
        """Write down where a request and its block table are, now that `latest` is the latest call made."""
        anchor = request.anchor
        assert anchor is not None
        call = result = latest if latest < request.last_call else request.last_call
        if self._in_flight and self._in_flight[0][0].step <= call:
            result = self._in_flight[0][0].step - 1
        request.num_computed_tokens = anchor + call
        request.num_tokens = anchor + result + 1
        table, size = request.table, self.config.block_size
        more = -(-(anchor + call) // size) - table.num_blocks
        table.num_blocks += more
        table.capacity += more * size
        self._crowd_table.num_blocks -= more
        hashed = max(result, call - 1) if self._is_async else call
        if table.hash_at <= anchor + hashed:
            self.block_pool.register(table, anchor + hashed)
        if request.in_crowd:
            request.in_crowd = False
            self._crowd.leave(anchor)
        request.anchor = None

    def _allocate_crowd(self, blocks: int, call: int, plan: StepPlan) -> None:
        """Give the crowd its new blocks, in order; preempt from the end of the running list for them."""
        pool = self.block_pool
        while blocks:
            if given := min(blocks, pool.num_free_blocks):
                pool.allocate(self._crowd_table, given)
                blocks -= given
            if not blocks:
                return
            victim = self.running[-1]
            assert isinstance(victim, ParkedRequest)
            if victim.in_crowd and victim.anchor is not None:
                blocks -= self._crowd.begins_block(victim.anchor, call)
            plan.preempted.append(victim.request_id)
            self._preempt()

    def _preempt(self) -> tuple[EngineRequest, int]:
        """Send the last running request back to the queue; its results in flight are listed from now on."""
        victim = self.running[-1]
        assert isinstance(victim, ParkedRequest)
        if victim is self._partial:
            self._partial = None
        anchor = victim.anchor
        if anchor is not None:
            self._unpark(victim, self._num_steps - 2)
            for plan, batch in self._in_flight:
                if victim.since <= plan.step <= victim.last_call:
                    plan.crowd -= 1
                    plan.crowd_context -= anchor + plan.step
                    chunk = ScheduledChunk(victim.request, anchor + plan.step - 1, 1, True)
                    plan.scheduled.insert(0, chunk)
                    batch.insert(0, victim)
        return super()._preempt()


def _own(batch: list[EngineRequest]) -> list[ParkedRequest]:
    """This scheduler makes no others."""
    return cast("list[ParkedRequest]", batch)
