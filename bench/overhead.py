"""What the load generator itself costs, and whether it could keep up with its own plan."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.wire import clock
from sim.provenance import Note

SLIP_FLOOR = 0.010  # s
SLIP_SHARE = 0.05  # of the median TTFT
RATE_SHARE = 0.95  # of the target rate
HELD_SHARE = 0.10  # of the latency from schedule
CPU_LIMIT = 0.9  # of one core: an event loop that is busier than that queues its own work


@dataclass(frozen=True, slots=True)
class Overhead:
    """The load generator's own figures over the run.

    Attributes:
        loop_lag_p50, loop_lag_p99, loop_lag_max: how late timers fired [s].
        cpu_share: CPU seconds per wall second, per process (the highest, with several).
        processes: how many sent the load.
        slips: per request, how late it went out, waiting for the concurrency cap aside [s].
    """

    loop_lag_p50: float
    loop_lag_p99: float
    loop_lag_max: float
    cpu_share: float
    processes: int
    slips: tuple[float, ...]

    def merged(self, other: Overhead) -> Overhead:
        """The figures of two processes together: the worse of each."""
        return Overhead(
            max(self.loop_lag_p50, other.loop_lag_p50),
            max(self.loop_lag_p99, other.loop_lag_p99),
            max(self.loop_lag_max, other.loop_lag_max),
            max(self.cpu_share, other.cpu_share),
            self.processes + other.processes,
            self.slips + other.slips,
        )


class Meter:
    """Samples event-loop lag and CPU time from `start` to `stop`."""

    def __init__(self, period: float = 0.02) -> None:
        self._period = period
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._wall, self._cpu = clock(), time.process_time()
        self._task = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            due = clock() + self._period
            await asyncio.sleep(self._period)
            self._lags.append(max(0.0, clock() - due))

    def stop(self, slips: Sequence[float]) -> Overhead:
        """The figures since `start`."""
        if self._task is not None:
            self._task.cancel()
        wall = max(clock() - self._wall, 1e-9)
        lags = self._lags or [0.0]
        p50, p99, worst = (float(np.percentile(lags, q)) for q in (50, 99, 100))
        return Overhead(p50, p99, worst, (time.process_time() - self._cpu) / wall, 1, tuple(slips))


@contextmanager
def calm_collector() -> Iterator[None]:
    """Keep the cycle collector from walking all that the run has recorded in the middle of it.

    A full pass over the records of some thousand requests stops the loop for tens of milliseconds.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 100_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def achieved_rate(sent: Sequence[float]) -> float | None:
    """Requests/s between the first and the last of these send times [s]; None below two."""
    if len(sent) < 2:
        return None
    span = max(sent) - min(sent)
    return (len(sent) - 1) / span if span > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class ClientLimit:
    """Whether the client kept its plan.

    `cause` is "client" where the load generator was too slow, "cap" where `max_concurrency` held requests
    back in an open-loop run (the measured load is then not the planned one), None where it kept up.
    """

    cause: Literal["client", "cap"] | None
    notes: tuple[Note, ...]


def judge_client(
    scheduled: Sequence[float],
    sent: Sequence[float],
    ended: Sequence[float],
    *,
    median_ttft: float | None,
    overhead: Overhead | None = None,
    is_open_loop: bool = True,
) -> ClientLimit:
    """Judge from send times [s], in order of schedule; all three have one entry per request that was sent.

    Client-limited: p95 slip above 10 ms and above 5 % of the median TTFT; or, of an open loop, sends at
    less than 95 % of the planned rate; or requests that waited to be sent for more than 10 % of their
    latency from schedule. Without `overhead` the whole delay counts as slip.
    """
    notes: list[Note] = []
    cause: Literal["client", "cap"] | None = None
    delays = np.asarray(sent) - np.asarray(scheduled)
    slips = np.asarray(overhead.slips) if overhead is not None else delays
    limit = max(SLIP_FLOOR, SLIP_SHARE * (median_ttft or 0.0))
    slip = float(np.percentile(slips, 95)) if len(slips) else 0.0
    if slip > limit:
        cause = "client"
        notes.append(
            Note(
                "warning",
                "client_limited",
                f"requests left {slip * 1e3:.1f} ms late at P95, above {limit * 1e3:.1f} ms: "
                "the load generator was the bottleneck",
            )
        )
    if overhead is not None and overhead.cpu_share > CPU_LIMIT:
        cause = "client"
        notes.append(
            Note(
                "warning",
                "client_limited",
                f"the load generator used {overhead.cpu_share:.0%} of a core: latencies contain its queue",
            )
        )
    if not is_open_loop or len(delays) < 2:
        return ClientLimit(cause, tuple(notes))
    target, achieved = achieved_rate(scheduled), achieved_rate(sent)
    if target is not None and achieved is not None and achieved < RATE_SHARE * target:
        cause = cause or "cap"
        notes.append(
            Note(
                "warning",
                "client_limited",
                f"requests were sent at {achieved:.4g}/s, planned were {target:.4g}/s",
            )
        )
    latency = float(np.mean(np.asarray(ended) - np.asarray(scheduled)))
    delay = float(np.mean(delays))
    if latency > 0 and delay > HELD_SHARE * latency:
        cause = cause or "cap"
        notes.append(
            Note(
                "warning",
                "client_limited",
                f"requests waited {delay * 1e3:.0f} ms before they were sent, {delay / latency:.0%} of the "
                "latency from schedule: judge by the figures from schedule",
            )
        )
    return ClientLimit(cause, tuple(notes))
