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
    """The moments of certain calls [s]: call 0 is made at `now`, call 1 at `first`.

    Call i > 1 is made at begin + sum of i - 1 periods, and period k (from 0) is period + k * growth. Results
    are processed at the moments of calls 1, 2, ...
    """

    now: float
    first: float
    begin: float
    period: float
    growth: float

    def call(self, i: int) -> float:
        """When call i is made."""
        now, first, begin, period, growth = self
        if i < 2:
            return first if i else now
        i -= 1  # `progression`, spelled out
        return begin + (i * period + growth * (i * (i - 1) // 2))

    def emit(self, recorder: Recorder, calls: int, landed: float, joined: list[str]) -> None:
        """Hand out that many results, of which the last one is processed at `landed`."""
        _, first, begin, period, growth = self
        if calls == 1:
            recorder.emit(landed, (), joined)
            return
        due = self.call(calls)
        if landed != due and not math.isclose(landed, due, rel_tol=1e-12):
            self.emit(recorder, calls - 1, self.call(calls - 1), joined)
            recorder.emit(landed)
        elif first == begin:
            recorder.emit_run((begin, period, growth), calls, landed, joined)
        else:
            recorder.emit(first, (), joined)
            recorder.emit_run((begin + period, period + growth, growth), calls - 1, landed)

    def calls_before(self, moment: float, most: int) -> int:
        """How many calls, at most `most`, are made before that moment. It lies behind call 0."""
        if moment <= self.first:
            return 1
        if self.call(most - 1) < moment:
            return most
        ahead, half = max(0.0, moment - self.begin), self.growth / 2
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
            event = env.peek()
            if event <= now:
                yield env.until(now)
                event = env.peek()
            if inbox and inbox[0][0] <= now:
                self._drain(now)
            calls = scheduler.steady_calls()
            if calls and (landed := self._leap(calls, now, event, in_flight)) is not None:
                now = landed
                continue
            came_to_nothing = False
            if scheduler.has_work():
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

    def _leap(self, calls: int, now: float, event: float, in_flight: deque[InFlight]) -> float | None:
        """Make as many of the certain calls as lie before `event`. Returns when the next one is due.

        None if host and device are not in step yet.
        """
        shape = self._leaper.steady_shape()
        line = self._prices.line(shape)
        intercept, slope, _, high, _, _, before, after = line
        _, _, _, size, _, _, context, _ = shape
        if (fit := (high - context) // size + 1) < calls:
            calls = fit
        duration, growth = intercept + slope * context, slope * size
        stretch = stretch_of(line, duration, growth, calls, now, in_flight)
        if stretch is None:
            return None
        if self._inbox and self._inbox[0][0] < event:
            event = self._inbox[0][0]
        if event < math.inf:
            calls = stretch.calls_before(event, calls)
        self._state = self._leaper.queue_state()
        plan, blocks, prefill, joined, finished = self._leaper.leap(calls)
        self._sample(stretch, blocks)
        alike = calls if plan is None or plan.crowd == size else calls - 1
        busy, last, launched = 0.0, duration, now + before
        if alike != 1:
            busy, last = progression(alike - 1, duration, growth), duration + growth * (alike - 1)
            launched = stretch.call(alike - 1) + before
        start = self._device_free + busy
        if launched > start:
            add_time(self.usage.device, "host", launched - start)
            start = launched
        self._device_free = start + last
        self._account(line, shape, busy + last, alike)
        landed = stretch.call(calls)
        if prefill is not None:
            self._deliver(in_flight[0], prefill, stretch.first)
        if plan is not None:
            in_flight[0] = new_tuple(InFlight, (plan, start, self._device_free, after))
            if alike < calls:
                landed = self._launch_fewer(stretch.call(alike), in_flight)
        if prefill is None:
            stretch.emit(self._recorder, calls, landed, joined)
        elif calls > 1:
            _, _, begin, period, growth = stretch
            self._recorder.emit_run((begin + period, period + growth, growth), calls - 1, landed, joined)
        for request_id, reason in finished:
            self._finish(request_id, reason, landed)
        return landed

    def _launch_fewer(self, now: float, in_flight: deque[InFlight]) -> float:
        """Launch the last call of a leap at `now`, with fewer requests. Returns when the next call is due."""
        plan, _, end, after = in_flight[0]
        shape = plan.shape()
        price = self._prices.price(shape)
        launched = now + price[3]
        in_flight[0] = self._launch_at(price, plan, shape, launched)
        self._tokens_since_output = 0
        return max(launched, end) + after

    def _sample(self, stretch: Stretch, blocks: list[int]) -> None:
        """What `_note_plan` keeps of each call, of which each then held that many more blocks."""
        size = self._leaper.block_size
        most = self._state.kv_used_tokens + blocks[-1] * size
        if most > self.usage.max_kv_used_tokens:
            self.usage.max_kv_used_tokens = most
        self.series.add_run(stretch, blocks, size, self._state)

    def _account(self, line: Line, shape: StepShape, seconds: float, calls: int) -> None:
        """What `_launch` keeps of each step; `seconds` of device time in all."""
        usage = self.usage
        usage.steps += calls
        if line.resource is not None:
            add_time(usage.device, line.resource, seconds)
        if self._state.num_waiting and (reason := self._kept_out(shape)):
            add_time(usage.waiting, reason, seconds)
        if line.reason is not None:
            usage.out_of_range[line.reason] = usage.out_of_range.get(line.reason, 0) + calls
        self._idle_calls = self._tokens_since_output = 0


def stretch_of(
    line: Line, duration: float, growth: float, calls: int, now: float, in_flight: deque[InFlight]
) -> Stretch | None:
    """When these calls are made, the first of them `now`, on a device that takes `duration` for its batch.

    None if the host neither always hides behind the device nor always keeps it waiting.
    """
    before, after = line.host_before, line.host_after
    launched = now + before
    if not in_flight:
        begin = launched + duration + after
        return new_tuple(Stretch, (now, begin, begin, before + duration + growth + after, growth))
    _, _, behind, first_after = in_flight[0]
    shortest = longest = duration
    if growth > 0.0:
        longest += growth * (calls - 1)
    else:
        shortest += growth * (calls - 1)
    if launched <= behind and before + after <= shortest and before + first_after <= shortest:
        return new_tuple(Stretch, (now, behind + first_after, behind + after, duration, growth))
    if launched >= behind and before + after >= longest and before + first_after >= longest:
        begin = launched + first_after
        return new_tuple(Stretch, (now, begin, begin, before + after, 0.0))
    return None
