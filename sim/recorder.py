"""What a simulated run leaves behind: result times once per step, and runs of steps per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.engines.base import FinishReason
from sim.request import Request
from sim.results import Floats, RequestRecords
from sim.steptime.base import FrontEnd

NAN = float("nan")


@dataclass(slots=True)
class Track:
    """One request's way through client, front end and engine; times are seconds since the run's start.

    `runs` holds (first emission, last emission, position): the request got one token at each of these
    consecutive emissions, as the `position`-th sequence of the step's output.
    """

    request: Request
    sent: float = NAN
    at_engine: float = NAN
    first_scheduled: float = NAN
    first_result: float = NAN
    cached_tokens: int = -1
    preemptions: int = 0
    reason: FinishReason | None = None
    runs: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TtftParts:
    """Where the time from schedule to first token goes; one entry per request, seconds.

    `client_wait` passes before the request is sent and is no part of the TTFT that a client reports; the
    other four add up to it.
    """

    client_wait: Floats
    front_end: Floats
    queue: Floats
    prefill: Floats
    stream: Floats


class Recorder:
    """Collects a run compactly: memory grows with steps and with batch changes, not with tokens.

    Attributes:
        start: the moment from which records count (warm-ups come before it).
        tracks: by request id.
    """

    def __init__(self, front_end: FrontEnd, stream_interval: int = 1) -> None:
        self.start = 0.0
        self.tracks: dict[str, Track] = {}
        self._front_end = front_end
        self._interval = stream_interval
        self._chunk_cost = front_end.output_token / stream_interval
        self._output_free = 0.0
        self._bases: list[float] = []
        self._flushed: Floats = np.empty(0)
        self._batch: list[str] = []
        self._open: dict[str, tuple[int, int]] = {}

    def emit(self, now: float, ids: list[str]) -> None:
        """One output token for each of `ids`, in processing order, from a result processed at `now`.

        The API process streams the chunks one after the other, and falls behind if they come too fast.
        """
        if not ids:
            return
        emission = len(self._bases)
        base = max(now, self._output_free)
        self._output_free = base + self._chunk_cost * len(ids)
        self._bases.append(base)
        if ids != self._batch:
            self._regroup(emission, ids)

    def _regroup(self, emission: int, ids: list[str]) -> None:
        positions = {rid: at for at, rid in enumerate(ids)}
        keep_place = not self._chunk_cost
        for rid in self._batch:
            start, place = self._open[rid]
            now_at = positions.get(rid)
            if now_at is None or not (keep_place or now_at == place):
                self.tracks[rid].runs.append((start, emission - 1, place))
                del self._open[rid]
        for rid, at in positions.items():
            if rid not in self._open:
                self._open[rid] = (emission, at)
        self._batch = ids

    def flush(self) -> None:
        """Close all open runs; needed before anything is read."""
        self._regroup(len(self._bases), [])
        self._flushed = np.asarray(self._bases)

    def delivery(self, place: int) -> float:
        """When the client has the chunk of the latest emission's `place`-th sequence."""
        return self._bases[-1] + (place + 1) * self._chunk_cost + self._front_end.output_delay

    def token_times(self, track: Track) -> Floats:
        """When each output token reaches the client, streaming intervals aside. Call `flush` first."""
        if not track.runs:
            return np.empty(0)
        bases = self._flushed - self.start
        delay, cost = self._front_end.output_delay, self._chunk_cost
        return np.concatenate(
            [bases[first : last + 1] + ((place + 1) * cost + delay) for first, last, place in track.runs]
        )

    def records(self, order: Sequence[Request]) -> RequestRecords:
        """Records of all requests, in the given order. Call `flush` first."""
        tracks = [self.tracks[r.request_id] for r in order]
        tokens = [self.token_times(t) for t in tracks]
        chunks = [times[streamed(len(times), self._interval)] for times in tokens]
        gaps = [np.diff(times) for times in chunks]
        offsets = np.zeros(len(tracks) + 1, dtype=np.int64)
        np.cumsum([len(g) for g in gaps], out=offsets[1:])
        parts = self.ttft_parts(order)
        return RequestRecords(
            request_id=tuple(r.request_id for r in order),
            scheduled=np.array([r.arrival for r in order], dtype=np.float64),
            sent=np.array([t.sent - self.start for t in tracks], dtype=np.float64),
            first_token=np.array([c[0] if len(c) else NAN for c in chunks], dtype=np.float64),
            last_token=np.array([c[-1] if len(c) else NAN for c in chunks], dtype=np.float64),
            prompt_len=np.array([r.prompt_len for r in order], dtype=np.int64),
            output_len=np.array([len(t) for t in tokens], dtype=np.int64),
            cached_tokens=np.array([t.cached_tokens for t in tracks], dtype=np.int64),
            status=tuple(_status(t) for t in tracks),
            itls=np.concatenate(gaps) if gaps else np.empty(0),
            itl_offsets=offsets,
            queue=parts.queue,
            prefill=parts.prefill,
            preemptions=np.array([t.preemptions for t in tracks], dtype=np.int64),
        )

    def ttft_parts(self, order: Sequence[Request]) -> TtftParts:
        """The split of each request's time to first token. Call `flush` first."""
        tracks = [self.tracks[r.request_id] for r in order]
        scheduled = np.array([self.start + r.arrival for r in order], dtype=np.float64)
        sent = np.array([t.sent for t in tracks], dtype=np.float64)
        at_engine = np.array([t.at_engine for t in tracks], dtype=np.float64)
        first_scheduled = np.array([t.first_scheduled for t in tracks], dtype=np.float64)
        first_result = np.array([t.first_result for t in tracks], dtype=np.float64)
        first_token = np.array([self._first_token(t) for t in tracks], dtype=np.float64)
        return TtftParts(
            client_wait=sent - scheduled,
            front_end=at_engine - sent,
            queue=first_scheduled - at_engine,
            prefill=first_result - first_scheduled,
            stream=first_token - first_result,
        )

    def _first_token(self, track: Track) -> float:
        if not track.runs:
            return NAN
        first, _, place = track.runs[0]
        return self._bases[first] + (place + 1) * self._chunk_cost + self._front_end.output_delay


def streamed(num_tokens: int, interval: int) -> slice | list[int]:
    """Indices of the tokens at which a chunk goes out.

    Both engines send the first token, then whenever `interval` tokens are unsent, and at the finish
    (vllm v1/engine/output_processor.py, sglang scheduler output processing).
    """
    if interval == 1:
        return slice(None)
    sent = list(range(0, num_tokens, interval))
    if num_tokens and sent[-1] != num_tokens - 1:
        sent.append(num_tokens - 1)
    return sent


def _status(track: Track) -> str:
    if track.reason is None:
        return "unfinished"
    if track.reason == "abort":
        return "server_error"
    return "ok" if track.runs else "empty"
