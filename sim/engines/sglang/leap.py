"""SGLang's scheduler for simulations: the same decisions, at a cost per change, not per request and step.

The running list consists of requests that decode one token in every decode round, and of those that have just
joined. The former are parked in a crowd (`sim.engines.crowd`), scheduled as a number. Whatever happens
to one of them takes it out of the crowd and is then decided by the plain scheduler's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
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
from sim.engines.sglang.config import CACHE_AGNOSTIC_POLICIES, SglangSchedulerConfig
from sim.engines.sglang.kv_pool import ChainedKvPool
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.prefill_adder import CLIP_MAX_NEW_TOKENS, PrefillAdder
from sim.engines.sglang.scheduler import Batch, InFlightBatch, SglangScheduler
from sim.engines.sglang.stuck import out_of_memory
from sim.request import Request

ROUNDING = 1e-6  # tokens; more than a sum of reserves can be off


def can_leap(config: SglangSchedulerConfig) -> bool:
    """Whether `LeapingSglangScheduler` may stand in for the plain one.

    Not where decodes join prefill batches (each of them makes the running list anew), nor with priorities (a
    waiting request may then preempt any running one).
    """
    return not config.mixes_chunks and not config.enable_priority_scheduling


class ParkedRequest(LiveRequest):
    """A request that can be parked.

    Attributes:
        parked: whether it is.
        anchor: its KV positions after a decode round, less the number of the round.
        outputs: its output tokens known after the result of a round, less the number of the round.
        since: the first round whose result need not name it, as it has joined the crowd.
        end_round: the round whose result ends it.
    """

    __slots__ = ("anchor", "end_round", "outputs", "parked", "since")

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        super().__init__(request, max_new_tokens)
        self.parked = False
        self.anchor = self.outputs = self.since = self.end_round = 0


@dataclass(slots=True)
class DecodeInFlight(InFlightBatch):
    """A launched decode round.

    Attributes:
        reqs: those of its requests which were not parked then; all of them if it is `regrouped`.
        running: all of them, in order.
        left: ids of those who were retracted from it or just before it.
        regrouped: whether a retraction has just changed their order.
    """

    plan: StepPlan
    round: int
    running: list[LiveRequest]
    left: list[str]
    regrouped: bool = False


class LeapingSglangScheduler(SglangScheduler):
    """`SglangScheduler` with its decodes in a crowd (see `sim.engines.base.Leaping` and `can_leap`).

    Args:
        shares_prefixes: False promises that no two requests begin with the same segment, which spares the
            prefix tree. It changes no decision.
    """

    def __init__(self, config: SglangSchedulerConfig, *, shares_prefixes: bool = True) -> None:
        super().__init__(config)
        agnostic = config.schedule_policy in CACHE_AGNOSTIC_POLICIES
        if agnostic and not (shares_prefixes or config.disable_radix_cache):
            self.pool = ChainedKvPool(config.pool_tokens, config.page_size)
        self.block_size = config.page_size
        self._crowd: Crowd[ParkedRequest] = Crowd(config.page_size)
        self._tail: list[ParkedRequest] = []
        self._ended: list[ParkedRequest] = []
        self._joining: list[ParkedRequest] = []  # parked, and in no round so far
        self._fresh = False
        self._long = False
        self._left_of_crowd = 0
        self._order_before: list[LiveRequest] = []
        self._round = 0  # the latest decode round launched, counted from 1
        self._known_round = 0  # the latest one whose result was processed

    # -- leaps --------------------------------------------------------------------------------------------

    def steady_calls(self) -> int:
        """See `sim.engines.base.Leaping`."""
        crowd, pool = self._crowd, self.pool
        if self._chunked is not None or self._decode_rounds:
            return 0
        if self._waiting and (self._some_finished or not self._running.is_full):
            return 0
        overlapped = self.pipeline_depth > 1
        if len(self._in_flight) != overlapped:
            return 0
        if self._last_prefill is not None:
            if not self._stay_together(self._last_prefill):
                return 0
            self._merge_last_prefill()
            self._joining = self._tail
            self._park(before_decode=True)
        elif overlapped:
            latest = self._in_flight[0]
            if not isinstance(latest, DecodeInFlight) or latest.left or latest.regrouped:
                return 0
        if self._fresh:
            self._park()
        if self._some_finished and self._drop_finished(self._running):
            self._running.is_full = False
        if not crowd.size or self._tail:
            return 0
        end = crowd.first_end(self._known_round + 1)
        calls, pages = end - self._round + overlapped, pool.reclaimable // pool.page_size
        return crowd.calls_within(pages, self._round + 1, calls)

    def _stay_together(self, prefill: Batch) -> bool:
        """Whether all of a prefill batch, and all who decode now, are certain to decode in the next call.

        Then no first token ends anybody, and storing the prompts frees nothing.
        """
        pool = self.pool
        if self._waiting or self._tail or prefill.chunked is not None or not isinstance(pool, ChainedKvPool):
            return False
        if pool.page_size * (self._crowd.size + len(prefill.reqs)) > pool.reclaimable:
            return False
        behind = self.pipeline_depth - 1
        for req in prefill.reqs:
            outputs = req.num_output_tokens + behind
            if req.finished or outputs >= req.max_new_tokens or outputs == req.request.stop_after:
                return False
        return True

    def steady_shape(self) -> StepShape:
        """See `sim.engines.base.Leaping`."""
        return decodes("decode", self._crowd.size, self._crowd.context(self._round + 1))

    def leap(self, calls: int) -> Leapt:
        """See `sim.engines.base.Leaping`."""
        crowd, pool = self._crowd, self.pool
        pages = crowd.blocks_begun(self._round + 1, calls)
        # Each round makes room for a page per request before it takes what it needs.
        room = pool.page_size * (crowd.size if calls == 1 else pages[-2] + crowd.size)
        if room > pool.available:
            pool.make_room(room)
        pool.available -= pages[-1] * pool.page_size
        self.ratio.decay_steps(calls)
        self._round += calls
        self._step += calls
        known = self._known_round = self._round - len(self._in_flight)
        plan, prefill = None, None
        joining: Sequence[LiveRequest] = self._joining
        self._joining = []
        if self._in_flight:
            latest, running, step = self._in_flight[0], self._running.reqs, self._step - 1
            if isinstance(latest, DecodeInFlight):
                joining = latest.reqs
            else:
                prefill = self._take_prefill(latest)
            later = [*joining] if prefill is not None and calls == 1 else []
            plan = StepPlan(step, "decode", crowd=crowd.size, crowd_context=crowd.context(self._round))
            self._in_flight[0] = DecodeInFlight(step, later, 0, None, plan, self._round, running, [])
            if later:
                joining = ()
        joined = [req.request_id for req in joining if not req.finished] if joining else []
        finished: list[tuple[str, FinishReason]] = []
        if known in crowd.ends:
            result = StepResult([], finished, [])
            for req in self._ending(known, self._running.reqs):
                if req.parked and req.end_round == known:
                    self._end(req, known, result)
        return new_tuple(Leapt, (plan, pages, prefill, joined, finished))

    def _take_prefill(self, flight: InFlightBatch) -> StepResult:
        """Process the result of a prefill that ends nobody."""
        result = StepResult([], [], [])
        for req in flight.reqs:
            self._take_token(req, result)
            self.pool.store_unfinished(req)
        return result

    # -- single calls -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next batch; see `SglangScheduler`."""
        if self._fresh and not any(flight.num_prefill for flight in self._in_flight):
            self._park()
        return super().schedule()

    def _merge_last_prefill(self) -> None:
        last = self._last_prefill
        super()._merge_last_prefill()
        if last is not None:
            self._tail += _own(last.reqs)

    def _new_adder(self, running: list[LiveRequest]) -> PrefillAdder:
        known = self._known_round
        if self.pool.tree is None:
            for req in _own(running):
                if req.parked:
                    req.num_output_tokens = req.outputs + known
            return super()._new_adder(running)
        ratio, reserve = self.ratio.current, self._reserve()
        if self._long or abs(reserve - round(reserve)) < ROUNDING:
            # The engine adds the reserves up one by one, and compares the sum with whole tokens.
            each = [
                req.max_new_tokens - (req.outputs + known if req.parked else req.num_output_tokens)
                for req in _own(running)
            ]
            reserve = sum([min(tokens, CLIP_MAX_NEW_TOKENS) * ratio for tokens in each])
        return PrefillAdder(self.config, self.pool, running, ratio, reserve)

    def _reserve(self) -> float:
        """What is reserved for the running list, very long limits not clipped [tokens]."""
        left = self._left_of_crowd - self._crowd.size * self._known_round
        for req in (*self._tail, *self._ended):
            left += req.max_new_tokens - req.num_output_tokens
        return left * self.ratio.current

    def _drop_finished(self, running: Batch) -> bool:
        ended, tail = self._ended, self._tail
        self._ended, self._tail = [], [req for req in tail if not req.finished]
        if len(ended) == 1 and len(self._tail) == len(tail) and ended[0] in running.reqs:
            # Nobody else has finished, and mostly it is one of the first.
            self._some_finished = False
            running.reqs = running.reqs.copy()
            running.reqs.remove(ended[0])
            return True
        return super()._drop_finished(running)

    def _decode_fits(self, running: Batch) -> bool:
        needed = self._new_pages(self._round + 1) * self.pool.page_size
        if needed > self.pool.available:
            self.pool.make_room(needed)
        if needed <= self.pool.available:
            return True
        # A retraction compares all of them.
        self._order_before = running.reqs
        for req in _own(running.reqs):
            if req.parked:
                self._write_down(req, self._known_round)
        return False

    def _new_pages(self, decode_round: int) -> int:
        page = self.pool.page_size
        if page == 1:
            return len(self._running.reqs)
        return self._crowd.new_blocks(decode_round) + sum([not req.kv % page for req in self._tail])

    def _leave_running(self, victims: Sequence[LiveRequest], plan: StepPlan) -> None:
        super()._leave_running(victims, plan)
        for req in cast("Sequence[ParkedRequest]", victims):
            if req.parked:
                self._leave_crowd(req)
        self._tail = [req for req in self._tail if not req.retracted]
        for flight in self._in_flight:
            if isinstance(flight, DecodeInFlight):
                flight.left += plan.preempted

    def _launch_decode(self, plan: StepPlan) -> None:
        pool, running, crowd = self.pool, self._running.reqs, self._crowd
        plan.kind = "decode"
        self._round += 1
        reserve = pool.page_size * len(running)
        if reserve > pool.available:
            pool.make_room(reserve)
        taken = self._new_pages(self._round) * pool.page_size
        if taken > pool.available:
            raise out_of_memory("Decode", running[0].request_id, taken, pool.available, pool.page_size)
        pool.available -= taken
        plan.crowd = crowd.size
        plan.crowd_context = crowd.context(self._round)
        tail = self._tail
        for req in tail:
            plan.scheduled.append(ScheduledChunk(req.request, req.kv, 1, True))
            req.kv += 1
        self._fresh = bool(tail)
        reqs: list[LiveRequest] = [*self._joining, *tail]
        flight = DecodeInFlight(plan.step, reqs, 0, None, plan, self._round, running, [*plan.preempted])
        if plan.preempted and running != self._order_before[: len(running)]:
            flight.reqs, flight.regrouped = running, True
        self._in_flight.append(flight)
        self._joining = []

    def update(self, plan: StepPlan) -> StepResult:
        """Process the result of a plan; see `SglangScheduler`."""
        flight = self._in_flight[0] if self._in_flight else None
        if plan.kind == "idle" or not isinstance(flight, DecodeInFlight) or flight.plan is not plan:
            return super().update(plan)
        self._in_flight.popleft()
        result = StepResult([], [], flight.left, flight.regrouped)
        number = self._known_round = flight.round
        ending = self._ending(number, flight.running)
        if not flight.regrouped:
            for req in ending:
                if req.parked and req.end_round == number and req.since <= number:
                    self._end(req, number, result)
        for req in _own(flight.reqs):
            if req.finished or req.retracted:
                continue
            if req.parked:
                result.new_tokens.append((req.request_id, req.outputs + number))
                if req.end_round == number:
                    self._end(req, number, result)
            else:
                self._take_token(req, result)
        return result

    def _ending(self, number: int, running: list[LiveRequest]) -> Sequence[ParkedRequest]:
        """Members whom the result of that round may end, in the order of the running list."""
        ending = self._crowd.ends.pop(number, ())
        if len(ending) < 2:
            return ending
        in_order = (req for req in _own(running) if req in ending)
        return list(islice(in_order, len(ending)))  # mostly they are the first

    def _end(self, req: ParkedRequest, number: int, result: StepResult) -> None:
        """The result of that round ends a parked request."""
        self._write_down(req, number)
        self._leave_crowd(req)
        self._ended.append(req)
        self._finish_if_done(req, result)

    # -- in and out of the crowd --------------------------------------------------------------------------

    def _new_request(self, request: Request, max_new_tokens: int) -> LiveRequest:
        self._long |= max_new_tokens > CLIP_MAX_NEW_TOKENS
        return ParkedRequest(request, max_new_tokens)

    def _park(self, before_decode: bool = False) -> None:
        """Whoever took part in the latest decode round, or prefill, decodes in every round from now on."""
        since = self._round + 1 + before_decode
        due = before_decode and len(self._in_flight)
        crowd = self._crowd
        for req in self._tail:
            if req.finished:
                continue
            req.parked = True
            req.since = since
            req.anchor = req.kv - self._round
            req.outputs = req.num_output_tokens + due - self._known_round
            # The length only tells when the crowd will change; it decides nothing.
            last = req.max_new_tokens
            stop = req.request.stop_after
            if stop is not None and stop > req.num_output_tokens:
                last = min(last, stop)
            req.end_round = last - req.outputs
            self._left_of_crowd += req.max_new_tokens - req.outputs
            crowd.join(req.anchor)
            crowd.expect_end(req.end_round, req)
        self._tail = [req for req in self._tail if req.finished]
        self._fresh = False

    def _write_down(self, req: ParkedRequest, result_round: int) -> None:
        """Where a parked request is after the latest round, and after the result of that one."""
        req.kv = req.anchor + self._round
        req.num_output_tokens = req.outputs + result_round

    def _leave_crowd(self, req: ParkedRequest) -> None:
        req.parked = False
        self._left_of_crowd -= req.max_new_tokens - req.outputs
        self._crowd.leave(req.anchor)


def _own(reqs: list[LiveRequest]) -> list[ParkedRequest]:
    """This scheduler makes no others."""
    return cast("list[ParkedRequest]", reqs)
