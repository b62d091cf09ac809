"""The replica that leaps: the same events at the same times, without stopping at each.

Two things spare work. Between two events outside the engine (a client's send, a delivery that a client waits
for) nobody looks at the engine, so it steps on its own clock and lets SimPy catch up when something is due.
And where the scheduler is certain of its next calls, their step times form an arithmetic progression, so that
all of them are priced, emitted and accounted for at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import simpy

from sim.engines.base import Leaping, StepPlan, StepResult, StepShape, new_tuple
from sim.engines.glue import Limits
from sim.loop.moments import Clock
from sim.loop.pricing import DecodePrices, Line, Price
from sim.loop.recorder import Recorder
from sim.loop.replica import InFlight, Replica, add_time
from sim.request import Request
from sim.steptime.base import StepTimeModel


class Stretch(NamedTuple):
    """The moments of certain calls [s]: call 0 is made at `now`, call i > 0 at begin + sum of i - 1 periods.

    Period k (from 0) is period + k * growth. Results are processed at the moments of calls 1, 2, ...
    """

    now: float
    begin: float
    period: float
    growth: float

    def call(self, i: int) -> float:
        """When call i is made."""
        if not i:
            return self.now
        i -= 1  # `progression`, spelled out: this is asked for every sample
        return self.begin + (i * self.period + self.growth * (i * (i - 1) // 2))

    def calls_before(self, moment: float, most: int) -> int:
        """How many calls, at most `most`, are made before that moment. It lies behind call 0."""
        ahead = moment - self.begin
        if ahead <= 0.0:
            return 1
        if self.call(most) < moment:
            return most
        half = self.growth / 2
        linear = self.period - half
        root = (
            (math.sqrt(linear * linear + 4 * half * ahead) - linear) / (2 * half) if half else ahead / linear
        )
        calls = min(most, max(1, int(root) + 1))
        while calls > 1 and self.call(calls - 1) >= moment:
            calls -= 1
        while calls < most and self.call(calls) < moment:
            calls += 1
        return calls


def progression(count: int, first: float, growth: float) -> float:
    """first + (first + growth) + ..., `count` terms."""
    return count * first + growth * (count * (count - 1) // 2)


class LeapingReplica(Replica):
    """`Replica` for a scheduler that can leap."""

    def __init__(
        self,
        env: Clock,
        scheduler: Leaping,
        step_time: StepTimeModel,
        recorder: Recorder,
        *,
        idle_poll: float = 0.0,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(env, scheduler, step_time, recorder, idle_poll=idle_poll, limits=limits)
        self._leaper = scheduler
        self._prices = DecodePrices(step_time)
        self._planned: Iterator[tuple[float, Request]] = iter(())

    def plan(self, sends: Iterator[tuple[float, Request]]) -> None:
        """Take requests with the times at which a client will send them, earliest first."""
        self._planned = sends
        self._look_ahead()
        self._wake_up()

    def _look_ahead(self) -> None:
        """Keep the next arrival in sight."""
        planned = next(self._planned, None)
        if planned is not None:
            self._send(planned[1], planned[0])

    def _drain(self, now: float) -> None:
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            request = inbox.popleft()[1]
            self._leaper.add_request(request)
            self._tokens_inside += request.prompt_len + request.max_tokens
            if not inbox:
                self._look_ahead()

    def _loop(self) -> Generator[simpy.Event, Any, None]:
        """The loop of `Replica`; `now` runs ahead of SimPy's clock while nobody else has anything to do."""
        env, scheduler, depth = self._env, self._leaper, self._scheduler.pipeline_depth
        inbox, prices = self._inbox, self._prices
        in_flight: deque[InFlight] = deque()
        now = env.now
        while True:
            if env.peek() <= now:
                yield env.timeout(now - env.now)
            if inbox and inbox[0][0] <= now:
                self._drain(now)
            came_to_nothing = False
            if scheduler.has_work():
                calls = scheduler.steady_calls()
                if calls and (landed := self._leap(calls, now, in_flight)) is not None:
                    now = landed
                    continue
                plan = scheduler.schedule()
                shape = plan.shape()
                self._note_plan(plan, now)
                price = prices.price(shape)
                now += price[3]
                if plan.kind != "idle":
                    in_flight.append(self._launch_at(price, plan, shape, now))
                    if len(in_flight) < depth:
                        continue
                came_to_nothing = plan.kind == "idle"
            elif not in_flight:
                if not self._inbox:
                    yield self._arrival()
                    self._wake = None
                now = max(now, env.now, self._inbox[0][0])
                self._device_free = max(self._device_free, now)
                continue
            if in_flight:
                step = in_flight.popleft()
                now = max(now, step.end)
                result = scheduler.update(step.plan)
                now += step.after
                self._deliver(step, result, now)
            elif came_to_nothing:
                self._watch_idle()
            if came_to_nothing and self._idle_poll and self._unfinished():
                now += self._idle_poll

    def _launch_at(self, price: Price, plan: StepPlan, shape: StepShape, now: float) -> InFlight:
        """`_launch` with the price at hand."""
        seconds, resource, out_of_range, _, host_after = price
        usage, start = self.usage, self._device_free
        device = usage.device
        if now > start:
            device["host"] = device.get("host", 0.0) + (now - start)
            start = now
        if shape.num_prefill_seqs:
            seconds = self._throttle.seconds(shape, start, seconds)
        end = self._device_free = start + seconds
        if resource is not None:
            device[resource] = device.get(resource, 0.0) + seconds
        usage.steps += 1
        if self._state.num_waiting and (reason := self._kept_out(shape)):
            add_time(usage.waiting, reason, seconds)
        if out_of_range is not None:
            usage.out_of_range[out_of_range] = usage.out_of_range.get(out_of_range, 0) + 1
        self._idle_calls = 0
        self._tokens_since_output += shape.num_prefill_tokens + shape.num_decode_seqs
        return new_tuple(InFlight, (plan, start, end, host_after))

    def _deliver(self, step: InFlight, result: StepResult, now: float) -> None:
        recorder = self._recorder
        new = result.new_tokens
        ids = [rid for rid, _ in new] if new else []
        if step.plan.kind == "prefill":
            recorder.emit_apart(now, ids)
            some = bool(ids)
        elif result.regrouped:
            recorder.emit_ids(now, ids)
            some = bool(ids)
        else:
            some = recorder.emit(now, result.left, ids)
        if some:
            self._tokens_since_output = 0
        else:
            self._note_nothing(step)
        for rid, reason in result.finished:
            self._finish(rid, reason, now)

    def _leap(self, calls: int, now: float, in_flight: deque[InFlight]) -> float | None:
        """Make as many of the certain calls as lie before the next event. Returns when the next one is due.

        None if host and device are not in step yet.
        """
        shape = self._leaper.steady_shape()
        line = self._prices.line(shape)
        context, size = shape.decode_context, shape.num_decode_seqs
        calls = min(calls, (line.high - context) // size + 1)
        duration, growth = line.intercept + line.slope * context, line.slope * size
        last_duration = duration + growth * (calls - 1)
        host = line.host_before + line.host_after
        behind = in_flight[-1].end if in_flight else None
        if behind is None:
            stretch = Stretch(now, now + host + duration, host + duration + growth, growth)
        elif now + line.host_before <= behind and host <= min(duration, last_duration):
            stretch = Stretch(now, behind + line.host_after, duration, growth)
        elif now + line.host_before >= behind and host >= max(duration, last_duration):
            stretch, behind = Stretch(now, now + host, host, 0.0), None
        else:
            return None
        event = self._env.peek()
        if self._inbox and self._inbox[0][0] < event:
            event = self._inbox[0][0]
        if event < math.inf:
            calls = stretch.calls_before(event, calls)
        busy = progression(calls - 1, duration, growth)
        start = stretch.call(calls - 1) + line.host_before if behind is None else behind + busy
        if start - busy > self._device_free:
            add_time(self.usage.device, "host", start - busy - self._device_free)
        last_duration = duration + growth * (calls - 1)
        self._device_free = start + last_duration
        self._recorder.emit_run((stretch.begin, stretch.period, stretch.growth), calls)
        self._sample(stretch, calls)
        plan = self._leaper.leap(calls)
        if plan is not None:
            in_flight[-1] = InFlight(plan, start, self._device_free, line.host_after)
        self._account(line, shape, busy + last_duration, calls)
        return stretch.call(calls)

    def _sample(self, stretch: Stretch, calls: int) -> None:
        """What `_note_plan` keeps of each call."""
        more_tokens, series = self._leaper.steady_kv_tokens, self.series
        running, waiting, held, total = self._leaper.queue_state()
        for i in series.turns(calls):
            used = held + more_tokens(i + 1)
            series.keep((stretch.call(i), running, waiting, used / total if total else 0.0))

    def _account(self, line: Line, shape: StepShape, seconds: float, calls: int) -> None:
        """What `_launch` keeps of each step; `seconds` of device time in all."""
        usage = self.usage
        self._state = self._leaper.queue_state()
        usage.max_kv_used_tokens = max(usage.max_kv_used_tokens, self._state.kv_used_tokens)
        usage.steps += calls
        if line.resource is not None:
            add_time(usage.device, line.resource, seconds)
        if reason := self._kept_out(shape):
            add_time(usage.waiting, reason, seconds)
        if line.reason is not None:
            usage.out_of_range[line.reason] = usage.out_of_range.get(line.reason, 0) + calls
        self._idle_calls = self._tokens_since_output = 0
