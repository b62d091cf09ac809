"""Drive one scheduler through one workload: the core of every simulation, free of scenarios and flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

from sim.engines.base import Leaping, Scheduler
from sim.engines.glue import Limits
from sim.errors import EngineStuck
from sim.loop.client import Client
from sim.loop.collector import collector_off
from sim.loop.leap import LeapingReplica
from sim.loop.moments import Clock
from sim.loop.recorder import Recorder, TtftParts
from sim.loop.replica import Replica, StepSink, Usage
from sim.request import Request
from sim.results import RequestRecords, ServerSeries
from sim.steptime.base import StepTimeModel
from sim.workload.table import RequestTable

Path = Literal["steps", "leaps", "compiled"]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What happened: `duration` runs from time 0 of the load plan to the last answer [s].

    `path` tells how it was found out: step by step, in leaps, or compiled (`sim.fast`).
    """

    records: RequestRecords
    ttft_parts: TtftParts
    series: ServerSeries
    usage: Usage
    duration: float
    path: Path = "steps"


def run(
    scheduler: Scheduler,
    requests: Sequence[Request],
    step_time: StepTimeModel,
    *,
    max_concurrency: int | None = None,
    duration: float | None = None,
    refuses: Callable[[Request], bool] | None = None,
    warmups: Sequence[Request] = (),
    stream_interval: int = 1,
    idle_poll: float = 0.0,
    limits: Limits | None = None,
    steps: StepSink | None = None,
    leap: bool = True,
    fast: bool | None = None,
) -> RunOutcome:
    """Simulate `requests` on one replica until the last one is answered.

    Args:
        scheduler: fresh; it is used up.
        max_concurrency: cap of the client on requests in flight.
        duration: the client sends nothing later than so many seconds after its start; what is left out then
            leaves no record.
        refuses: whether the server turns a request away before its engine sees it; None: it takes them all.
        warmups: sent before the clock starts, all at once; they leave no records but what they cached.
        stream_interval: tokens per streamed chunk (both engines' `--stream-interval`).
        idle_poll: see `Replica`.
        limits: for naming what requests wait for.
        steps: called with a JSON-ready dict for every step; no step is leapt over then.
        leap: False takes every step with the plain scheduler, at leisure; the outcome is the same.
        fast: whether to use a compiled kernel where one applies; None: if the extra `fast` is installed.

    Raises:
        EngineStuck: the real engine would hang, die or recompute for ever; names the request.
        BadInput: the engine would refuse a request.
    """
    requests = _in_order(requests)
    # The kernels send everything; without a cap, what would come too late is not among the requests.
    cut = refuses is not None or (duration is not None and max_concurrency is not None)
    if leap and steps is None and not warmups and not cut and fast is not False and _has_kernels():
        from sim.fast.glue import run_compiled
        from sim.interrupts import uninterrupted

        with uninterrupted():
            outcome = run_compiled(
                scheduler,
                requests,
                step_time,
                max_concurrency=max_concurrency,
                stream_interval=stream_interval,
                idle_poll=idle_poll,
                limits=limits or Limits(),
            )
        if outcome is not None:
            return outcome
    env = Clock()
    recorder = Recorder(step_time.front_end, stream_interval)
    everything = [*warmups, *requests] if warmups else requests
    leaper = _leaping(scheduler, everything) if leap and steps is None else None
    if leaper is None:
        replica = Replica(
            env, scheduler, step_time, recorder, idle_poll=idle_poll, limits=limits, steps=steps
        )
    else:
        replica = LeapingReplica(env, leaper, step_time, recorder, idle_poll=idle_poll, limits=limits)
    if warmups:
        _send(env, replica, recorder, warmups, max_concurrency)
        recorder.restart(env.now)
        replica.forget_usage()
    sent = _send(env, replica, recorder, requests, max_concurrency, duration, refuses)
    recorder.flush()
    if sent < len(requests):
        requests = requests.first(sent) if isinstance(requests, RequestTable) else requests[:sent]
        recorder.forget_unsent()
    parts = recorder.ttft_parts(requests)
    return RunOutcome(
        records=recorder.records(requests, parts),
        ttft_parts=parts,
        series=replica.series.since(recorder.start),
        usage=replica.usage,
        duration=env.now - recorder.start,
        path="steps" if leaper is None else "leaps",
    )


@cache
def _has_kernels() -> bool:
    """Whether the extra `fast` is installed."""
    return find_spec("numba") is not None


def _in_order(requests: Sequence[Request]) -> Sequence[Request]:
    """The requests by arrival; a table has them in order already."""
    if isinstance(requests, RequestTable):
        return requests
    return sorted(requests, key=lambda request: request.arrival)


def _leaping(scheduler: Scheduler, requests: Sequence[Request]) -> Leaping | None:
    make: Callable[[Sequence[Request]], Leaping | None] | None = getattr(scheduler, "leaping", None)
    return None if make is None else make(requests)


def _send(
    env: Clock,
    replica: Replica,
    recorder: Recorder,
    requests: Sequence[Request],
    max_concurrency: int | None,
    duration: float | None = None,
    refuses: Callable[[Request], bool] | None = None,
) -> int:
    """Run until the last of `requests` is answered, or of those sent in time. Returns how many were sent."""
    recorder.expect(len(requests))
    plan = replica.plan if isinstance(replica, LeapingReplica) else None

    def turn_away(request: Request, when: float) -> bool:
        if refuses is None or not refuses(request):
            return False
        recorder.refused(request, when)
        return True

    turn = None if refuses is None else turn_away
    client = Client(env, requests, replica.submit, max_concurrency, plan, duration, turn)
    replica.on_delivered = client.delivered
    try:
        with collector_off():
            env.run(until=client.done | replica.failed)
    except RuntimeError as ran_dry:
        raise EngineStuck(
            f"request {_first_open(recorder)}: the engine stopped with requests unanswered"
        ) from ran_dry
    if replica.failure is not None:
        raise replica.failure
    return client.sent


def _first_open(recorder: Recorder) -> str:
    return next(iter(recorder.tracks), "none")
