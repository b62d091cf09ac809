"""Sends planned requests in real time: one event loop, one client."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.client import Client, Exchange
from bench.overhead import Meter, Overhead, calm_collector
from bench.payload import Target, request_body
from bench.prompts import OUTPUT_PREFIX, PromptMaker
from bench.rows import Row, row_of
from bench.wire import clock
from sim.request import Request

_READY_BYTES = 256 * 1024 * 1024  # of request bodies made before the clock starts
_PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands; `elapsed` in seconds, `last_ttft` and `mean_ttft` over good answers [s]."""

    elapsed: float
    planned: int
    sent: int
    done: int
    failed: int
    output_tokens: int
    mean_ttft: float | None = None

    @property
    def in_flight(self) -> int:
        """Requests that are sent and not answered."""
        return self.sent - self.done


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process sends.

    Attributes:
        requests: in order of arrival; arrivals in seconds since the run's start.
        warmups: sent and awaited before the clock starts.
        seed: of the prompts' contents.
        max_concurrency: cap on requests in flight, or None.
        duration: stop sending after this many seconds, or None.
        tokens_per_word: of prompts that go as text.
    """

    requests: Sequence[Request]
    warmups: Sequence[Request] = ()
    seed: int = 0
    max_concurrency: int | None = None
    duration: float | None = None
    tokens_per_word: float = 1.0


@dataclass(slots=True)
class Outcome:
    """What has been measured so far; complete once `overhead` is set.

    Attributes:
        start: the run's start on `bench.wire.clock`; None until then.
        rows: of finished requests, in order of completion.
        open: requests in flight: id -> (request, dispatch time).
        interrupted: whether the run was cut short from outside.
        warmup_failures: what went wrong with warm-ups.
    """

    start: float | None = None
    rows: list[Row] = field(default_factory=list)
    open: dict[str, tuple[Request, float, float]] = field(default_factory=dict)
    overhead: Overhead | None = None
    interrupted: bool = False
    warmup_failures: list[str] = field(default_factory=list)

    def all_rows(self) -> list[Row]:
        """Finished and unfinished requests, in order of schedule."""
        start = self.start or 0.0
        unfinished = [
            Row(r.request_id, r.arrival, r.prompt_len, r.max_tokens, sent=sent - start, slip=slip)
            for r, sent, slip in self.open.values()
        ]
        return sorted([*self.rows, *unfinished], key=lambda row: row.scheduled)


class _Bodies:
    """Request bodies, made before the clock starts as far as memory allows."""

    def __init__(self, target: Target, plan: Plan, outputs: dict[str, tuple[int, ...]]) -> None:
        self._target = target
        self._maker = PromptMaker(plan.seed, target.vocab_size)
        self._tokens_per_word = plan.tokens_per_word
        self._outputs = outputs
        self.quotes = any(_quotes_output(r) for r in plan.requests)
        self._ready: dict[str, bytes] = {}
        size = 0
        for request in plan.requests:
            if _quotes_output(request):
                continue
            if size > _READY_BYTES:
                break
            body = self._make(request)
            size += len(body)
            self._ready[request.request_id] = body

    def take(self, request: Request) -> bytes:
        body = self._ready.pop(request.request_id, None)
        return self._make(request) if body is None else body

    def _make(self, request: Request) -> bytes:
        return body_for(
            self._target,
            request,
            self._maker,
            self._outputs,
            want_token_ids=self.quotes,
            tokens_per_word=self._tokens_per_word,
        )


def body_for(
    target: Target,
    request: Request,
    maker: PromptMaker,
    outputs: dict[str, tuple[int, ...]] | None = None,
    *,
    want_token_ids: bool = False,
    tokens_per_word: float = 1.0,
) -> bytes:
    """The body of one request, with token ids where the endpoint takes them and words elsewhere."""
    prompt: list[int] | str
    prompt = (
        maker.token_ids(request, outputs) if target.takes_token_ids else maker.text(request, tokens_per_word)
    )
    return request_body(
        target, prompt, request.max_tokens, ignore_eos=request.ignore_eos, want_token_ids=want_token_ids
    )


def _quotes_output(request: Request) -> bool:
    return any(isinstance(key, str) and key.startswith(OUTPUT_PREFIX) for key, _ in request.prompt)


async def drive(
    target: Target,
    plan: Plan,
    outcome: Outcome,
    *,
    start_at: Callable[[], float] | None = None,
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
    keep_text: bool = False,
) -> None:
    """Send the plan and fill `outcome` as answers come in; cancelling it keeps what was measured.

    Args:
        start_at: called when all is prepared; gives the run's start (several processes share one).
        stop: when set, nothing more is sent and what is in flight is given up.
    """
    outputs: dict[str, tuple[int, ...]] = {}
    bodies = _Bodies(target, plan, outputs)
    async with Client(target, keep_text=keep_text) as client:
        await _warm_up(client, target, plan, outcome)
        run = _Run(client, plan, outcome, bodies, outputs)
        with calm_collector():
            outcome.start = start_at() if start_at is not None else clock()
            watcher = asyncio.create_task(run.watch(on_progress, stop))
            try:
                await run.send_all()
            except asyncio.CancelledError:
                outcome.interrupted = True
            finally:
                watcher.cancel()
                await run.give_up()


async def _warm_up(client: Client, target: Target, plan: Plan, outcome: Outcome) -> None:
    gate = asyncio.Semaphore(plan.max_concurrency or max(1, len(plan.warmups)))
    # Contents of their own: warm-ups must not leave the run's prompts in a prefix cache.
    maker = PromptMaker(plan.seed, target.vocab_size, salt="warmup")

    async def one(request: Request) -> None:
        async with gate:
            body = body_for(target, request, maker, tokens_per_word=plan.tokens_per_word)
            exchange = await client.send(body)
        if exchange.outcome.status != "ok":
            outcome.warmup_failures.append(f"{exchange.outcome.status}: {exchange.outcome.detail}")

    async with asyncio.TaskGroup() as group:
        for request in plan.warmups:
            group.create_task(one(request))


class _Run:
    def __init__(
        self,
        client: Client,
        plan: Plan,
        outcome: Outcome,
        bodies: _Bodies,
        outputs: dict[str, tuple[int, ...]],
    ) -> None:
        self._client = client
        self._plan = plan
        self._outcome = outcome
        self._bodies = bodies
        self._outputs = outputs
        self._tasks: set[asyncio.Task[None]] = set()
        self._meter = Meter()
        self._slips: list[float] = []
        self._sent = 0
        self._failed = 0
        self._tokens = 0
        self._ttft_sum = 0.0
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._error: BaseException | None = None
        # Times at which slots under the concurrency cap fell free; None stands for a cap of infinity.
        cap = plan.max_concurrency
        self._free: deque[float] | None = deque([float("-inf")] * cap) if cap is not None else None
        self._freed = asyncio.Event()

    async def send_all(self) -> None:
        """Dispatch everything in order, then wait for the answers."""
        start = self._outcome.start
        assert start is not None
        self._meter.start()
        last = start + self._plan.duration if self._plan.duration is not None else float("inf")
        for request in self._plan.requests:
            due = start + request.arrival
            now = clock()
            if due > now:
                await self._pause(due - now)
            freed = await self._slot()
            now = clock()
            if self._stopping.is_set() or now > last:
                break
            slip = now - max(due, freed)
            self._slips.append(slip)
            self._sent += 1
            self._outcome.open[request.request_id] = (request, now, slip)
            task = asyncio.create_task(self._one(request, self._bodies.take(request), start, slip))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        while self._tasks and not self._stopping.is_set():
            self._idle.clear()
            await self._idle.wait()
        if self._error is not None:
            raise self._error

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._stopping.set()
        if not self._tasks or self._error is not None:
            self._idle.set()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _slot(self) -> float:
        """Wait for a place under the cap; when it fell free."""
        if self._free is None:
            return float("-inf")
        while not self._free and not self._stopping.is_set():
            self._freed.clear()
            await self._freed.wait()
        return self._free.popleft() if self._free else float("-inf")

    async def _one(self, request: Request, body: bytes, start: float, slip: float) -> None:
        exchange: Exchange = await self._client.send(body)
        row = row_of(request, exchange, start, slip)
        self._outcome.rows.append(row)
        del self._outcome.open[request.request_id]
        if self._bodies.quotes:
            self._outputs[request.request_id] = exchange.outcome.token_ids
        if row.status == "ok":
            self._tokens += row.output_tokens or 0
            if row.first_token is not None and row.sent is not None:
                self._ttft_sum += row.first_token - row.sent
        else:
            self._failed += 1
        if self._free is not None:
            self._free.append(exchange.ended)
            self._freed.set()

    async def watch(self, on_progress: OnProgress | None, stop: threading.Event | None) -> None:
        """Report progress, and pass a stop from outside on to the loop."""
        while True:
            await asyncio.sleep(_PROGRESS_S if stop is None else 0.1)
            if stop is not None and stop.is_set():
                self._outcome.interrupted = True
                self._stopping.set()
                self._freed.set()
                self._idle.set()
            if on_progress is not None:
                on_progress(self.progress())

    def progress(self) -> Progress:
        """Where the run stands."""
        done = len(self._outcome.rows)
        good = done - self._failed
        return Progress(
            elapsed=clock() - (self._outcome.start or clock()),
            planned=len(self._plan.requests),
            sent=self._sent,
            done=done,
            failed=self._failed,
            output_tokens=self._tokens,
            mean_ttft=self._ttft_sum / good if good else None,
        )

    async def give_up(self) -> None:
        """Drop what is in flight, if anything is, and close the books."""
        self._outcome.overhead = self._meter.stop(self._slips)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
