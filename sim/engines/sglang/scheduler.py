"""SGLang's scheduler, call by call.

Rules: SGLang 0.5.21 `managers/scheduler.py` (event loops, `get_next_batch_to_run`, `get_new_batch_prefill`,
`update_running_batch`), `managers/schedule_batch.py`, and
`managers/scheduler_components/batch_result_processor.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sim.engines.base import (
    FinishReason,
    Leaping,
    QueueState,
    ScheduledChunk,
    StepPlan,
    StepResult,
    new_tuple,
)
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.kv_pool import KvPool
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.new_token_ratio import NewTokenRatio
from sim.engines.sglang.policy import SchedulePolicy
from sim.engines.sglang.preempt import preempt_for
from sim.engines.sglang.prefill_adder import PrefillAdder, Verdict
from sim.engines.sglang.radix_cache import RadixCache
from sim.engines.sglang.retract import retract_decode
from sim.engines.sglang.stuck import lost, never_admitted
from sim.errors import BadInput
from sim.request import Request, can_share_prefixes


class Batch:
    """The engine's batch object.

    Attributes:
        reqs: its requests.
        is_full: the `batch_is_full` latch. It belongs to the object, so replacing the object loses it.
        prefill_only: none of its requests generates more than the prefill's token.
        chunked: the request whose prompt continues in a later batch.
        num_prefill: how many of `reqs` are prefills; the rest are decodes of a mixed batch.
    """

    __slots__ = ("chunked", "is_full", "num_prefill", "prefill_only", "reqs")

    def __init__(self, reqs: list[LiveRequest], *, is_full: bool = False) -> None:
        self.reqs = reqs
        self.is_full = is_full
        self.prefill_only = False
        self.chunked: LiveRequest | None = None
        self.num_prefill = 0

    def drop_finished(self) -> bool:
        """Keep what is not finished. Returns whether anything left."""
        kept = [req for req in self.reqs if not req.finished]
        shrank = len(kept) < len(self.reqs)
        self.reqs = kept
        return shrank


@dataclass(slots=True)
class InFlightBatch:
    """A launched batch as its result will find it."""

    step: int
    reqs: list[LiveRequest]
    num_prefill: int
    chunked: LiveRequest | None


class SglangScheduler:
    """SGLang's scheduler behind the interface of `sim.engines.base.Scheduler`.

    With the overlap schedule (`pipeline_depth` 2) call k+1 comes before the result of call k. Idle plans
    need not be handed back.
    """

    def __init__(self, config: SglangSchedulerConfig) -> None:
        self.config = config
        self.pipeline_depth = 1 if config.disable_overlap_schedule else 2
        tree = None if config.disable_radix_cache else RadixCache(config.page_size)
        self.pool = KvPool(config.pool_tokens, config.page_size, tree)
        self._longest = min(config.context_length, self.pool.total) - 1
        self.ratio = NewTokenRatio(config)
        self._policy = SchedulePolicy(config)
        self._waiting: list[LiveRequest] = []
        self._running = Batch([])
        self._last_prefill: Batch | None = None
        self._chunked: LiveRequest | None = None
        self._in_flight: deque[InFlightBatch] = deque()
        self._slots = self._free_slots = config.request_slots
        self._step = 0
        self._entries = 0
        self._decode_rounds = 0
        self._fully_idle = True
        self._ratio_resets = False
        self._some_finished = False
        self._mixes_chunks = config.mixes_chunks

    # -- interface ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request, its `max_tokens` clipped to what context and pool allow.

        Raises:
            BadInput: the server would refuse it.

        Source: SGLang 0.5.21 `Scheduler.init_req_max_new_tokens`, `utils/validate_input_length`.
        """
        config, pool, prompt, limit = self.config, self.pool, request.prompt_len, request.max_tokens
        longest = self._longest
        if prompt >= longest - 5:
            hint = f"{prompt} prompt tokens are too many; the engine takes less than {longest - 5}"
            raise BadInput("request", request.request_id, hint)
        if prompt + limit > config.context_length:
            hint = f"asks for {prompt} + {limit} tokens, more than --context-length {config.context_length}"
            raise BadInput("request", request.request_id, hint)
        limit = min(limit, longest - prompt - 1, pool.total - pool.ceil(prompt) - pool.page_size - 1)
        self._queue(self._new_request(request, limit if limit > 0 else 0))
        self._fully_idle = False

    def schedule(self) -> StepPlan:
        """Decide the next batch.

        Raises:
            EngineStuck: the engine runs out of memory for good, or waits for ever.
        """
        if self._ratio_resets:
            self._ratio_resets = False
            self.ratio.reset()
        plan = StepPlan(self._step, "idle", [], [], [])
        self._step += 1
        drained = not self._in_flight
        if self._last_prefill is not None or self._chunked is not None or self._running.prefill_only:
            self._merge_last_prefill()
        batch = None
        stands_still = not self._decode_rounds
        if self._decode_rounds:
            self._decode_rounds -= 1
        elif self._waiting or self._chunked is not None:
            batch = self._new_prefill_batch(plan)
        if batch is not None:
            self._decode_rounds = self.config.prefill_decode_interval
            self._launch_prefill(batch, plan)
        else:
            running = self._running
            if running.reqs and not running.prefill_only:
                self._update_running(plan)
                stands_still = False
            if running.reqs and not running.prefill_only:
                self._launch_decode(plan)
            elif drained:
                self._check_idle(stands_still)
        return plan

    def update(self, plan: StepPlan) -> StepResult:
        """Process the result of a plan; a sampled token counts only from here on."""
        result = StepResult([], [], [])
        if plan.kind == "idle":
            return result
        flight = self._in_flight.popleft()
        if flight.step != plan.step:
            raise ValueError(f"plan {plan.step} handed back while {flight.step} is due")
        chunked, num_prefill = flight.chunked, flight.num_prefill
        for req in flight.reqs[:num_prefill]:
            if not (req.finished or req.retracted or req is chunked):
                self._take_token(req, result)
                if not req.finished:
                    self.pool.store_unfinished(req)
        new_tokens = result.new_tokens
        for req in flight.reqs[num_prefill:]:
            if req.finished or req.retracted:
                continue
            outputs = req.num_output_tokens = req.num_output_tokens + 1
            new_tokens.append((req.request_id, outputs))
            if outputs >= req.max_new_tokens or not req.ignore_eos:
                self._finish_if_done(req, result)
        return result

    def has_work(self) -> bool:
        """Whether the engine has anything to do, its own idle housekeeping included."""
        return not self._fully_idle

    def queue_state(self) -> QueueState:
        """Requests with a slot, requests waiting, and the KV that requests hold."""
        pool = self.pool
        held = pool.total - pool.available - pool.evictable
        return new_tuple(QueueState, (self._slots - self._free_slots, len(self._waiting), held, pool.total))

    def running_ids(self) -> Sequence[str]:
        """The running list; a prefill joins it one call later, and during a mixed batch it is empty."""
        return [req.request_id for req in self._running.reqs]

    def waiting_ids(self) -> Sequence[str]:
        """The waiting queue in its present order."""
        return [req.request_id for req in self._waiting]

    # -- one call ----------------------------------------------------------------------------------------

    def _merge_last_prefill(self) -> None:
        """Let the previous call's prefills join the running list, all but the one still chunked."""
        chunked = self._chunked
        if chunked is not None and chunked.end > chunked.prefix_len:
            self.pool.store_unfinished(chunked)
        last = self._last_prefill
        if last is not None:
            self._last_prefill = None
            ready = [req for req in last.reqs if not (req.finished or req is chunked or req is last.chunked)]
            if len(ready) < len(last.reqs):
                self._running.is_full = False
            last.reqs = ready
            if last.reqs:
                if not self._running.reqs:
                    self._running = last
                else:
                    self._running.reqs = self._running.reqs + last.reqs
                    self._running.prefill_only &= last.prefill_only
        if self._running.prefill_only:
            self._running.drop_finished()
            if not self._running.reqs:
                self._running.is_full = False

    def _new_prefill_batch(self, plan: StepPlan) -> Batch | None:
        """Admit what slots and budgets allow, the carried chunked request first."""
        config, running, chunked = self.config, self._running, self._chunked
        preempts = config.enable_priority_scheduling
        if preempts:
            running.is_full = False
        if running.is_full and chunked is None:
            return None
        if chunked is None and not preempts and self._allocatable() <= 0:
            running.is_full = True
            return None
        self._policy.order(self._waiting, self.pool)
        adder = self._new_adder(running.reqs)
        if chunked is not None and not adder.add_chunked(chunked):
            self._chunked = None
        carried = len(adder.can_run)
        preempted = self._admit_waiting(adder, plan)
        if not adder.can_run:
            if preempted:
                raise lost(preempted[0].request_id, self._waiting[0].request_id)
            return None
        plan.cached += [(req.request_id, req.start) for req in adder.can_run[carried:]]
        del self._waiting[: len(adder.can_run) - carried]
        for req in preempted:
            self._queue(req)
        if adder.new_chunked is not None:
            self._chunked = adder.new_chunked
        batch = Batch(adder.can_run)
        batch.chunked = self._chunked
        batch.prefill_only = not any(req.max_new_tokens for req in adder.can_run)
        return batch

    def _admit_waiting(self, adder: PrefillAdder, plan: StepPlan) -> list[LiveRequest]:
        """Offer the waiting requests to the adder, in order, up to the first that is refused.

        Returns:
            The running requests that were preempted to make room.
        """
        running, pool = self._running, self.pool
        preempted: list[LiveRequest] = []
        for req in self._waiting:
            if len(adder.can_run) >= self._allocatable():
                running.is_full = True
            if running.is_full:
                if not self.config.enable_priority_scheduling:
                    break
                victims = preempt_for(req, running.reqs, adder, pool, self.config)
                if not victims:
                    break
                self._leave_running(victims, plan)
                running.reqs = adder.running = [other for other in running.reqs if not other.retracted]
                preempted += victims
            req.fill_len = req.num_tokens
            req.prefix_len = req.owned = pool.match(req, req.fill_len - 1)
            verdict = adder.add(req)
            if verdict is not Verdict.CONTINUE:
                running.is_full |= verdict is Verdict.NO_TOKEN
                break
        return preempted

    def _launch_prefill(self, batch: Batch, plan: StepPlan) -> None:
        """Allocate a prefill batch; in mixed mode let the running decodes join it."""
        for req in batch.reqs:
            if not req.holds_slot:
                req.holds_slot = True
                self._free_slots -= 1
            req.retracted = False
        self.pool.allocate_extend(batch.reqs)
        chunked = batch.chunked
        plan.scheduled = [
            new_tuple(ScheduledChunk, (req.request, req.start, req.end - req.start, req is not chunked))
            for req in batch.reqs
        ]
        batch.num_prefill = len(batch.reqs)
        plan.kind = "prefill"
        running = self._running
        if self._mixes_chunks and running.reqs:
            running.drop_finished()
            if running.reqs:
                for req, start in zip(running.reqs, self._decode_one(running.reqs), strict=True):
                    req.fill_len = req.num_tokens
                    plan.add(ScheduledChunk(req.request, start, 1, True))
                batch.reqs = batch.reqs + running.reqs
                batch.prefill_only = False
                plan.kind = "mixed"
                self._running = Batch([], is_full=running.is_full)
        self._last_prefill = batch
        self._in_flight.append(InFlightBatch(plan.step, batch.reqs, batch.num_prefill, batch.chunked))

    def _update_running(self, plan: StepPlan) -> None:
        """Make the running list ready to decode: drop who finished, retract who does not fit."""
        running = self._running
        shrank = self._some_finished and self._drop_finished(running)
        if not running.reqs:
            running.is_full = False
            return
        if self._decode_fits(running):
            self.ratio.decay_step()
        else:
            running.reqs, victims = retract_decode(running.reqs, self.pool)
            self._leave_running(victims, plan)
            for req in victims:
                self._queue(req)
            self.ratio.after_retraction(running.reqs)
            shrank = True
        if shrank:
            running.is_full = False

    def _launch_decode(self, plan: StepPlan) -> None:
        reqs = self._running.reqs
        plan.kind = "decode"
        plan.decode_first(reqs, self._decode_one(reqs))
        self._in_flight.append(InFlightBatch(plan.step, reqs, 0, None))

    def _decode_one(self, reqs: list[LiveRequest]) -> list[int]:
        """One more position for each request, to feed its newest token. Returns these positions."""
        self.pool.allocate_decode(reqs)
        starts = []
        for req in reqs:
            starts.append(req.kv)
            req.kv += 1
        return starts

    # -- helpers -----------------------------------------------------------------------------------------

    def leaping(self, requests: Sequence[Request]) -> Leaping | None:
        """A fresh scheduler that decides the same and can leap, or None where there is none for this case."""
        from sim.engines.sglang.leap import can_leap
        from sim.engines.sglang.newcomer import WelcomingSglangScheduler

        if not can_leap(self.config):
            return None
        return WelcomingSglangScheduler(self.config, shares_prefixes=can_share_prefixes(requests))

    def _new_request(self, request: Request, max_new_tokens: int) -> LiveRequest:
        return LiveRequest(request, max_new_tokens)

    def _new_adder(self, running: list[LiveRequest]) -> PrefillAdder:
        return PrefillAdder(self.config, self.pool, running, self.ratio.current)

    def _drop_finished(self, running: Batch) -> bool:
        self._some_finished = False
        return running.drop_finished()

    def _decode_fits(self, running: Batch) -> bool:
        return self.pool.decode_fits(running.reqs)

    def _queue(self, req: LiveRequest) -> None:
        req.entered = self._entries
        self._entries += 1
        self._waiting.append(req)

    def _allocatable(self) -> int:
        """Requests that may still be admitted; finished but unfiltered ones count as running."""
        return min(self._slots - len(self._running.reqs), self._free_slots)

    def _leave_running(self, victims: Sequence[LiveRequest], plan: StepPlan) -> None:
        """Free the slots of retracted or preempted requests."""
        for req in victims:
            req.holds_slot = False
            self._free_slots += 1
            plan.preempted.append(req.request_id)

    def _finish(self, req: LiveRequest, reason: FinishReason, result: StepResult) -> None:
        req.finished = self._some_finished = True
        req.holds_slot = False
        self._free_slots += 1
        self.pool.release(req, store=True)
        result.finished.append((req.request_id, reason))

    def _take_token(self, req: LiveRequest, result: StepResult) -> None:
        req.num_output_tokens += 1
        result.new_tokens.append((req.request_id, req.num_output_tokens))
        self._finish_if_done(req, result)

    def _finish_if_done(self, req: LiveRequest, result: StepResult) -> None:
        outputs = req.num_output_tokens
        if not req.ignore_eos and req.request.samples_stop(outputs):
            req.stopped = True
            self._finish(req, "stop", result)
        elif outputs >= req.max_new_tokens:
            self._finish(req, "length", result)

    def _check_idle(self, stands_still: bool) -> None:
        """Nothing runs and no result is due: either the work is done, or the engine waits for ever."""
        if not self._waiting:
            self._fully_idle = self._ratio_resets = self._chunked is None
            return
        if stands_still:
            head, behind = self._waiting[0].request_id, len(self._waiting) - 1
            raise never_admitted(head, behind, self.config.version, is_full=self._running.is_full)
