"""One engine replica in simulated time: the only place where SimPy meets a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import simpy

from sim.engines.base import (
    FinishReason,
    QueueState,
    Scheduler,
    StepPlan,
    StepResult,
    StepShape,
    new_tuple,
)
from sim.engines.glue import Limits
from sim.errors import EngineStuck
from sim.loop.moments import Clock, at
from sim.loop.recorder import Recorder
from sim.loop.series import SeriesBuffer
from sim.request import Request
from sim.steptime.base import StepTimeModel
from sim.steptime.throttle import Throttle

StepSink = Callable[[dict[str, Any]], None]

# Scheduling calls in a row that may come to nothing, with nothing on the device, before it is called a hang.
MAX_IDLE_CALLS = 1000

# How often all tokens in the engine may be computed without one output token before it is called a livelock.
MAX_RECOMPUTE = 8


class InFlight(NamedTuple):
    """A step on the device: it runs from `start` to `end`, its result takes the host `after` seconds."""

    plan: StepPlan
    start: float
    end: float
    after: float


@dataclass(slots=True)
class Usage:
    """What the run's time went to, in seconds, and the counters an engine would export.

    Attributes:
        device: device time by what bounds its steps ("compute", "bandwidth", "overhead"), plus "host": the
            device waits for the host though there is work; the rest of the run it is idle.
        waiting: device time of steps behind which requests waited, by what kept them out: "budget" (the
            step's tokens were used up), "slots" (no free sequence slot), "kv" (anything else: no KV, or no
            promise of it).
        out_of_range: how many steps lay outside the step-time model's range, by reason.
    """

    device: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    out_of_range: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    max_kv_used_tokens: int = 0
    kv_total_tokens: int = 0


class Replica:
    """An engine with its front end, stepped in simulated time.

    The loop is that of vLLM V1 (v1/engine/core.py `step`, `step_with_batch_queue`) and SGLang
    (`event_loop_normal`, `event_loop_overlap`), which differ only in how many steps may be in flight
    (`Scheduler.pipeline_depth`): take in what has arrived, schedule, launch behind what the device still
    runs; with room for another step in flight do so again; otherwise wait for the oldest result and
    process it. Host work shows only where the device waits for it.

    Args:
        idle_poll: pause after a scheduling call that came to nothing while requests are unfinished (vLLM
            sleeps 1 ms there) [s].

    Attributes:
        on_delivered: called as soon as it is certain when the client will hold a request's last chunk.
        usage, series: what the run used, so far.
        failure: the exception that ended the loop; `failed` succeeds with it.
    """

    def __init__(
        self,
        env: Clock,
        scheduler: Scheduler,
        step_time: StepTimeModel,
        recorder: Recorder,
        *,
        idle_poll: float = 0.0,
        limits: Limits | None = None,
        steps: StepSink | None = None,
    ) -> None:
        self.on_delivered: Callable[[Request, float], None] | None = None
        self.usage = Usage()
        self.series = SeriesBuffer()
        self.failure: Exception | None = None
        self.failed = env.event()
        self._env = env
        self._scheduler = scheduler
        self._step_time = step_time
        self._recorder = recorder
        self._idle_poll = idle_poll
        self._limits = limits or Limits()
        self._steps = steps
        self._inbox: deque[tuple[float, Request]] = deque()
        self._wake: simpy.Event | None = None
        self._front_end_free = 0.0
        self._device_free = 0.0
        self._idle_calls = 0
        self._tokens_inside = 0
        self._tokens_since_output = 0
        self._state = QueueState(0, 0, 0, 0)
        self._throttle = Throttle(step_time)
        self._assess: Callable[[StepShape], tuple[float, str]] | None = getattr(step_time, "assess", None)
        env.process(self._guarded())

    def forget_usage(self) -> None:
        """Begin anew with counters and series."""
        self.usage = Usage()
        self.series = SeriesBuffer()

    def submit(self, request: Request) -> None:
        """Take a request from a client now; it queues for the serial front end, then for the engine."""
        self._send(request, self._env.now)
        self._wake_up()

    def _wake_up(self) -> None:
        """End the sleep of an idle engine when the first request reaches it."""
        if self._wake is not None and len(self._inbox) == 1:
            at(self._env, self._inbox[0][0], partial(_succeed, self._wake))

    def _send(self, request: Request, now: float) -> None:
        front = self._step_time.front_end
        work = front.request + front.prompt_token * request.prompt_len
        free = self._front_end_free
        arrival = self._front_end_free = (free if free > now else now) + work
        self._recorder.sent(request, now, arrival)
        self._inbox.append((arrival, request))

    def _guarded(self) -> Generator[simpy.Event, Any, None]:
        try:
            yield from self._loop()
        except Exception as failure:
            self.failure = failure
            self.failed.succeed()

    def _loop(self) -> Generator[simpy.Event, Any, None]:
        env, scheduler, depth = self._env, self._scheduler, self._scheduler.pipeline_depth
        in_flight: deque[InFlight] = deque()
        while True:
            self._drain(env.now)
            came_to_nothing = False
            if scheduler.has_work():
                plan = scheduler.schedule()
                shape = plan.shape()
                self._note_plan(plan, env.now)
                host = self._step_time.host_before(shape)
                if host and not env.skip(host):
                    yield env.timeout(host)
                if plan.kind != "idle":
                    in_flight.append(self._launch(plan, shape, env.now))
                    if len(in_flight) < depth:
                        continue
                came_to_nothing = plan.kind == "idle"
            elif not in_flight:
                yield self._arrival()
                self._wake = None
                self._device_free = max(self._device_free, env.now)
                continue
            if in_flight:
                step = in_flight.popleft()
                rest = step.end - env.now
                if rest > 0.0 and not env.skip(rest):
                    yield env.timeout(rest)
                result = scheduler.update(step.plan)
                if step.after and not env.skip(step.after):
                    yield env.timeout(step.after)
                self._deliver(step, result, env.now)
            elif came_to_nothing:
                self._watch_idle()
            if came_to_nothing and self._idle_poll and self._unfinished():
                yield env.timeout(self._idle_poll)

    def _arrival(self) -> simpy.Event:
        """An event for the moment at which the next request reaches the engine, or has reached it."""
        if self._inbox:
            return self._env.timeout(max(0.0, self._inbox[0][0] - self._env.now))
        self._wake = self._env.event()
        return self._wake

    def _drain(self, now: float) -> None:
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            request = inbox.popleft()[1]
            self._scheduler.add_request(request)
            self._tokens_inside += request.prompt_len + request.max_tokens

    def _note_plan(self, plan: StepPlan, now: float) -> None:
        usage, recorder = self.usage, self._recorder
        for rid, hit in plan.cached:
            if recorder.admitted(rid, hit, now):
                usage.prefix_queries += recorder.tracks[rid].request.prompt_len
                usage.prefix_hits += hit
        for rid in plan.preempted:
            recorder.preempted(rid)
            usage.preemptions += 1
        state = self._scheduler.queue_state()
        if state.kv_used_tokens > usage.max_kv_used_tokens:
            usage.max_kv_used_tokens = state.kv_used_tokens
        usage.kv_total_tokens = state.kv_total_tokens
        self.series.add(now, *state)
        self._state = state

    def _launch(self, plan: StepPlan, shape: StepShape, now: float) -> InFlight:
        usage, model = self.usage, self._step_time
        idle, start = now - self._device_free, max(now, self._device_free)
        if self._assess is None:
            duration = self._throttle.seconds(shape, start, model.gpu(shape))
        else:
            duration, resource = self._assess(shape)
            duration = self._throttle.seconds(shape, start, duration)
            add_time(usage.device, resource, duration)
        if idle > 0.0:
            add_time(usage.device, "host", idle)
        end = self._device_free = start + duration
        usage.steps += 1
        if self._state.num_waiting and (reason := self._kept_out(shape)):
            add_time(usage.waiting, reason, duration)
        if reason := model.out_of_range(shape):
            usage.out_of_range[reason] = usage.out_of_range.get(reason, 0) + 1
        self._idle_calls = 0
        self._tokens_since_output += shape.num_prefill_tokens + shape.num_decode_seqs
        return new_tuple(InFlight, (plan, start, end, model.host_after(shape)))

    def _kept_out(self, shape: StepShape) -> str | None:
        if not self._state.num_waiting:
            return None
        limits = self._limits
        if limits.max_num_tokens is not None and shape.num_tokens >= limits.max_num_tokens:
            return "budget"
        if limits.max_num_seqs is not None and self._state.num_running >= limits.max_num_seqs:
            return "slots"
        return "kv"

    def _deliver(self, step: InFlight, result: StepResult, now: float) -> None:
        recorder = self._recorder
        ids = [rid for rid, _ in result.new_tokens]
        if step.plan.kind == "prefill":
            recorder.emit_apart(now, ids)
        else:
            recorder.emit_ids(now, ids)
        if ids:
            self._tokens_since_output = 0
        else:
            self._note_nothing(step)
        for rid, reason in result.finished:
            self._finish(rid, reason, now)
        if self._steps is not None:
            self._steps(describe(step, result, self._state))

    def _note_nothing(self, step: InFlight) -> None:
        """A result brought no output token."""
        if self._tokens_since_output > MAX_RECOMPUTE * self._tokens_inside + MAX_IDLE_CALLS:
            raise EngineStuck(
                f"request {step.plan.scheduled[0].request.request_id}: computed and preempted over and over "
                f"without one output token; the KV pool of {self._state.kv_total_tokens} tokens is too small"
            )

    def _finish(self, request_id: str, reason: FinishReason, now: float) -> None:
        request, last = self._recorder.finished(request_id, reason)
        self._tokens_inside -= request.prompt_len + request.max_tokens
        if self.on_delivered is not None:
            self.on_delivered(request, last if last == last else now)  # NaN differs from itself

    def _unfinished(self) -> bool:
        state = self._scheduler.queue_state()
        return state.num_running + state.num_waiting > 0

    def _watch_idle(self) -> None:
        self._idle_calls += 1
        if self._idle_calls <= MAX_IDLE_CALLS:
            return
        state = self._scheduler.queue_state()
        waiting, running = self._scheduler.waiting_ids(), self._scheduler.running_ids()
        who = waiting[0] if waiting else running[0] if running else "none"
        raise EngineStuck(
            f"request {who}: can never be scheduled ({state.num_running} running, "
            f"{state.num_waiting} waiting, {state.kv_used_tokens} of {state.kv_total_tokens} KV tokens held)"
        )


def describe(step: InFlight, result: StepResult, state: QueueState) -> dict[str, Any]:
    """One step as a JSON-ready line; `running` and `waiting` are those after the latest scheduling call."""
    plan = step.plan
    return {
        "step": plan.step,
        "kind": plan.kind,
        "start": step.start,
        "duration": step.end - step.start,
        "scheduled": [[c.request.request_id, c.start, c.num_tokens] for c in plan.scheduled],
        "preempted": list(plan.preempted),
        "cached": [list(hit) for hit in plan.cached],
        "new_tokens": [list(token) for token in result.new_tokens],
        "finished": [list(end) for end in result.finished],
        "running": state.num_running,
        "waiting": state.num_waiting,
    }


def _succeed(event: simpy.Event) -> None:
    event.succeed()


def add_time(counter: dict[str, float], key: str, amount: float) -> None:
    """Add seconds to one of several totals."""
    counter[key] = counter.get(key, 0.0) + amount
