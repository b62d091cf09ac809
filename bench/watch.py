"""Watches a server while it is loaded: is it there, what does it say of itself, what do the GPUs do."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bench.fetch import fetch
from bench.metrics import (
    COUNTERS,
    GAUGES,
    ServerView,
    Snapshot,
    counter_by_engine,
    difference,
    gauge_by_engine,
    parse,
)
from bench.servers.base import Exit, Server
from bench.telemetry import Gpus, GpuSample, GpusSilent
from bench.wire import clock
from sim.results import ServerSeries

_NAMES = tuple(name for names in (*GAUGES.values(), *COUNTERS.values()) for name in names)
_SCRAPE_SHARE = 0.02  # of the time
_GPU_SHARE = 0.1  # of the time; nvidia-smi takes up to a second, and a CPU with it
_KEPT = (*_NAMES, "process_start_time_seconds")


@dataclass(slots=True)
class Watched:
    """What was seen; times on `bench.wire.clock` [s].

    Attributes:
        before, after: whole scrapes around the load; None if /metrics was not to be had.
        scrapes: (time, the lines worth keeping) during the load.
        gpu: (time, samples).
        died: the engine's exit, if it was gone during or right after the load.
        failed_scrapes: scrapes without an answer while the engine was there.
        gpu_failures: why GPU samples were not to be had, one for each.
    """

    before: str | None = None
    after: str | None = None
    scrapes: list[tuple[float, str]] = field(default_factory=list)
    gpu: list[tuple[float, tuple[GpuSample, ...]]] = field(default_factory=list)
    died: Exit | None = None
    failed_scrapes: int = 0
    gpu_failures: list[str] = field(default_factory=list)

    def difference(self) -> ServerView | None:
        """Growth from before to after; None without both scrapes.

        A counter that went down in between (and may have passed its old value again by the end) is told
        from the scrapes during the load.
        """
        if self.before is None or self.after is None:
            return None
        return difference(parse(self.before), parse(self.after))

    def restarted(self) -> bool:
        """Whether an engine began anew between any two scrapes."""
        if self.before is None:
            return False
        texts = [self.before, *(text for _, text in self.scrapes)]
        if self.after is not None:
            texts.append(self.after)
        return any_restart(parse(text) for text in texts)

    def series(self, start: float) -> ServerSeries | None:
        """Running, waiting, KV use over time since `start`, summed (KV use: the fullest) over engines."""
        snapshots = [parse(text, time - start) for time, text in self.scrapes]
        if not snapshots:
            return None
        nan = float("nan")

        def column(figure: str) -> list[float]:
            found = [gauge_by_engine(snapshot, figure).values() for snapshot in snapshots]
            return [sum(values) if values else nan for values in found]

        usage = [max(gauge_by_engine(s, "kv_usage").values(), default=nan) for s in snapshots]
        return ServerSeries(
            time=np.array([snapshot.time for snapshot in snapshots]),
            running=np.array(column("running"), dtype=np.float64),
            waiting=np.array(column("waiting"), dtype=np.float64),
            kv_usage=np.array(usage, dtype=np.float64),
        )

    def preemptions(self) -> list[float | None]:
        """The preemption counter at each scrape of `series`, from 0 at the start; None unknown."""
        base = sum(counter_by_engine(parse(self.before), "num_preemptions").values()) if self.before else 0.0
        found = [counter_by_engine(parse(text), "num_preemptions") for _, text in self.scrapes]
        return [sum(values.values()) - base if values else None for values in found]


def any_restart(snapshots: Iterable[Snapshot]) -> bool:
    """Whether a process start time rose or a counter fell between consecutive snapshots."""
    last: Snapshot | None = None
    for snapshot in snapshots:
        if last is not None:
            if (
                last.started is not None
                and snapshot.started is not None
                and snapshot.started > last.started + 0.5
            ):
                return True
            for figure in COUNTERS:
                then, now = counter_by_engine(last, figure), counter_by_engine(snapshot, figure)
                if any(value < then.get(engine, 0.0) for engine, value in now.items()):
                    return True
        last = snapshot
    return False


def worth_keeping(text: str) -> str:
    """The lines of a scrape that the time series need: a tenth of the whole."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_KEPT))


class Watcher:
    """Looks at a server from a thread of its own, from `begin` to `finish`; at the GPUs from another one.

    Scrapes are only kept here and parsed afterwards: parsing beside the load generator would be felt in
    the latencies that it measures.
    """

    def __init__(
        self,
        server: Server,
        *,
        gpus: Gpus | None = None,
        interval: float = 1.0,
        api_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        self._server = server
        self._gpus = gpus
        self._interval = interval
        self._api_key_env = api_key_env
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self.seen = Watched()
        self.engine_gone = threading.Event()

    def begin(self) -> None:
        """Take the scrape before the load and start to watch."""
        self.seen.before = self.scrape()
        work = [self._run] if self._gpus is None else [self._run, self._run_gpus]
        self._threads = [threading.Thread(target=run, name="watcher", daemon=True) for run in work]
        for thread in self._threads:
            thread.start()

    def finish(self) -> Watched:
        """Stop to watch and take the scrape after the load."""
        self._done.set()
        for thread in self._threads:
            thread.join()
        if self.seen.died is None:
            self.seen.died = self._server.exited()
        if self.seen.died is None:
            self.seen.after = self.scrape()
        return self.seen

    def _run(self) -> None:
        due = clock()
        while not self._done.is_set():
            gone = self._server.exited()
            if gone is not None:
                self.seen.died = gone
                self.engine_gone.set()
                return
            began = clock()
            if began >= due:
                self._look()
                # A scrape stalls the server's event loop for as long as it takes: keep that to a share.
                due = began + max(self._interval, (clock() - began) / _SCRAPE_SHARE)
            self._done.wait(min(0.5, self._interval))

    def _look(self) -> None:
        now = clock()
        text = self.scrape() if self.seen.before is not None else None
        if text is not None:
            self.seen.scrapes.append((now, worth_keeping(text)))
        elif self.seen.before is not None:
            self.seen.failed_scrapes += 1

    def _run_gpus(self) -> None:
        assert self._gpus is not None
        while not self._done.is_set() and not self.engine_gone.is_set():
            began = clock()
            try:
                self.seen.gpu.append((began, self._gpus.sample()))
            except GpusSilent as error:
                self.seen.gpu_failures.append(str(error))
            took = clock() - began
            self._done.wait(max(self._interval, took / _GPU_SHARE) - took)

    def scrape(self) -> str | None:
        """The text of /metrics now; None if it is not to be had."""
        answer = fetch(self._server.base_url, "/metrics", timeout=10.0, api_key_env=self._api_key_env)
        return answer.text if answer.ok and "# TYPE" in answer.text else None
