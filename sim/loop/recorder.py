"""What a simulated run leaves behind: columns by request, and emissions instead of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from sim.engines.base import FinishReason
from sim.loop.records import SimulatedRecords
from sim.loop.tokens import EmissionTable, num_gaps
from sim.request import Request
from sim.results import Floats, Ints
from sim.steptime.base import FrontEnd
from sim.workload.table import RequestTable

NAN = float("nan")
STATUS = ("unfinished", "ok", "empty", "server_error", "refused")


class Track:
    """One request while it is in the system; what is known for good goes into the recorder's columns.

    Attributes:
        row: its place in the order of sending.
        cached_tokens: hit of its first admission, -1 before.
        num_tokens: tokens that came, those of the run that is still open aside.
        last_time: when its latest token reached the client, open run aside [s].
        run_first, run_place: the emission at which its open run began, and its place there; -1: none is open.
    """

    __slots__ = (
        "cached_tokens",
        "last_time",
        "num_tokens",
        "preemptions",
        "request",
        "row",
        "run_first",
        "run_place",
    )

    def __init__(self, request: Request, row: int) -> None:
        self.request = request
        self.row = row
        self.cached_tokens = -1
        self.preemptions = 0
        self.num_tokens = 0
        self.last_time = NAN
        self.run_first = -1
        self.run_place = 0


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
    """Collects a run compactly: memory grows with requests and with batch changes, not with tokens.

    The running group is an ordered set: whoever joins it gets one token at each emission until leaving it.

    Attributes:
        start: the moment from which records count (warm-ups come before it).
        tracks: requests sent and not finished, by id.
    """

    def __init__(self, front_end: FrontEnd, stream_interval: int = 1) -> None:
        self._delay = front_end.output_delay
        self._interval = stream_interval
        self._cost = front_end.output_token / stream_interval
        self._output_free = 0.0
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget everything: records count from `now`. Nothing may be in the system."""
        self.start = now
        self.tracks: dict[str, Track] = {}
        self._sent, self._at_engine = array("d"), array("d")
        self._first_scheduled, self._first_result = array("d"), array("d")
        self._first_token, self._last_token = array("d"), array("d")
        self._prompt_len, self._output_len = array("q"), array("q")
        self._cached, self._preemptions = array("q"), array("q")
        self._status = bytearray()
        self._num_sent = 0
        self._group: dict[Track, None] = {}
        self._named: list[str] | None = None
        self._ended: list[Track] = []
        self._emissions = 0
        self._last_base = 0.0
        self._base = array("d")
        self._size, self._stayed = array("i"), array("i")
        self._leaps, self._gaps = array("d"), array("d")
        self._runs = array("q")
        self._apart_row, self._apart_time = array("q"), array("d")

    # -- a request's way in and out ------------------------------------------------------------------------

    def expect(self, requests: int) -> None:
        """Make room for that many."""
        unknown = array("d", [NAN]) * requests
        for column in (self._sent, self._at_engine, self._first_scheduled, self._first_result):
            column.extend(unknown)
        for column in (self._first_token, self._last_token):
            column.extend(unknown)
        for counts, first in (
            (self._prompt_len, 0),
            (self._output_len, 0),
            (self._cached, -1),
            (self._preemptions, 0),
        ):
            counts.extend(array("q", [first]) * requests)
        self._status.extend(bytes(requests))

    def forget_unsent(self) -> None:
        """Drop the rows of requests that no client sent; nothing is sent any more."""
        columns: list[array[float] | array[int] | bytearray] = [
            *(self._sent, self._at_engine, self._first_scheduled, self._first_result),
            *(self._first_token, self._last_token, self._prompt_len, self._output_len),
            *(self._cached, self._preemptions, self._status),
        ]
        for column in columns:
            del column[self._num_sent :]

    def sent(self, request: Request, now: float, at_engine: float) -> None:
        """The client sends a request now; it will have passed the front end at `at_engine`."""
        row = self._num_sent
        self._num_sent = row + 1
        self.tracks[request.request_id] = Track(request, row)
        self._sent[row] = now
        self._at_engine[row] = at_engine
        self._prompt_len[row] = request.prompt_len

    def refused(self, request: Request, now: float) -> None:
        """The client sends a request now, and the server turns it away at once."""
        row = self._num_sent
        self._num_sent = row + 1
        self._sent[row] = now
        self._prompt_len[row] = request.prompt_len
        self._status[row] = 4

    def admitted(self, request_id: str, hit: int, now: float) -> bool:
        """A scheduling call lets a request run, with that prefix hit. Returns whether it is the first one."""
        track = self.tracks[request_id]
        if track.cached_tokens >= 0:
            return False
        track.cached_tokens = self._cached[track.row] = hit
        self._first_scheduled[track.row] = now
        return True

    def preempted(self, request_id: str) -> None:
        """A request lost its place in the engine."""
        self._preemptions[self.tracks[request_id].row] += 1

    def finished(self, request_id: str, reason: FinishReason) -> tuple[Request, float]:
        """A request ends with the latest emission, or without any.

        Returns:
            The request, and when the client has all of it (NaN: it never got a token).
        """
        track = self.tracks.pop(request_id)
        if track.run_first >= 0:
            self._close(track, self._emissions - 1, self._place(track) if self._cost else 0)
            self._ended.append(track)
        row = track.row
        self._output_len[row] = track.num_tokens
        self._last_token[row] = track.last_time
        self._status[row] = 3 if reason == "abort" else 1 if track.num_tokens else 2
        return track.request, track.last_time

    # -- tokens ---------------------------------------------------------------------------------------------

    def emit(self, now: float, left: Collection[str] = (), joined: Collection[str] = ()) -> bool:
        """One token for everybody in the group, after some left it and some joined at its end.

        Whoever finished is gone without being named. A result processed at `now` is streamed at once, or as
        soon as the API process has streamed the one before; it falls behind if they come too fast.

        Returns:
            Whether anybody got a token.
        """
        group, tracks, cost = self._group, self.tracks, self._cost
        if left or joined or self._ended:
            self._named = None
        base = now if now >= self._output_free else self._output_free
        if left:
            leaving = [track for track in map(tracks.get, left) if track is not None and track in group]
            stayed = self._leave(leaving, base)
        elif self._ended:
            stayed = self._leave([], base)
        else:
            stayed = len(group)
        emission = self._emissions
        for request_id in joined:
            track = tracks[request_id]
            if track not in group:
                track.run_first = emission
                track.run_place = len(group)
                group[track] = None
                self._receives(track, now, base + len(group) * cost + self._delay)
        size = len(group)
        if not size:
            return False
        self._emissions = emission + 1
        self._last_base = base
        self._output_free = base + cost * size
        self._base.append(base)
        self._size.append(size)
        self._stayed.append(stayed)
        return True

    def emit_ids(self, now: float, ids: list[str]) -> None:
        """One token for each of `ids`, in processing order: they are the group from now on.

        The list is kept: it must not change later.
        """
        if not ids:
            return
        if ids == self._named and not self._ended:
            self.emit(now)
            return
        named = [self.tracks[request_id] for request_id in ids]
        group = self._group
        present = dict.fromkeys(named)
        left = [track.request.request_id for track in group if track not in present]
        joined = [track.request.request_id for track in named if track not in group]
        if self._cost and [t for t in group if t in present] != named[: len(named) - len(joined)]:
            # Everybody moves: they leave, and join anew.
            left = [track.request.request_id for track in group]
            joined = ids
        self.emit(now, left, joined)
        self._named = ids

    def emit_run(
        self, times: tuple[float, float, float], count: int, last: float, joined: Collection[str] = ()
    ) -> None:
        """`count` emissions to a group that some may join before the first.

        Args:
            times: (first, gap, slope): results are processed at first, and after gaps of gap, gap + slope,
                gap + 2 slope ...
            count: at least 1.
            last: when the last of them is processed, to the last bit: who waits for it must see that moment.
        """
        first, gap, slope = times
        self.emit(last if count == 1 else first, (), joined)
        if count == 1:
            return
        spent = self._cost * len(self._group)
        if self._last_base > first or spent > min(gap, gap + slope * (count - 2)):
            # The API process cannot keep up: every emission waits for it.
            for k in range(1, count - 1):
                self.emit(first + gap * k + slope * (k * (k - 1) // 2))
            self.emit(last)
            return
        self._leaps.extend((len(self._base) - 1, count, gap, slope))
        self._emissions += count - 1
        self._last_base = last
        self._output_free = last + spent

    def emit_apart(self, now: float, ids: Sequence[str]) -> None:
        """One token for each of `ids`, none of which is in the group."""
        base = max(now, self._output_free)
        for place, request_id in enumerate(ids, 1):
            track = self.tracks[request_id]
            time = base + place * self._cost + self._delay
            self._receives(track, now, time)
            self._apart_row.append(track.row)
            self._apart_time.append(time)
            track.num_tokens += 1
            track.last_time = time
        self._output_free = base + self._cost * len(ids)

    def _receives(self, track: Track, now: float, time: float) -> None:
        """A first token, or one that continues no run."""
        if track.num_tokens:
            self._gaps.extend((time - track.last_time, 1))
        else:
            self._first_result[track.row] = now
            self._first_token[track.row] = time

    def _place(self, track: Track) -> int:
        return list(self._group).index(track)

    def _close(self, track: Track, emission: int, place: int) -> None:
        """End a request's open run with the latest emission, at its place there."""
        self._runs.extend((track.row, track.run_first, emission, track.run_place))
        track.num_tokens += emission - track.run_first + 1
        track.last_time = self._last_base + (place + 1) * self._cost + self._delay
        track.run_first = -1

    def _leave(self, leaving: list[Track], base: float) -> int:
        """Take out who finished and who leaves; those behind move up.

        Returns:
            How many stay at their place.
        """
        group, before = self._group, self._emissions - 1
        gone, self._ended = self._ended + leaving, []
        if not self._cost:
            for track in leaving:
                self._close(track, before, 0)
            for track in gone:
                del group[track]
            return len(group)
        places = sorted(map(list(group).index, gone))
        for track in leaving:
            self._close(track, before, self._place(track))
        size = len(group)
        for track in gone:
            del group[track]
        gap = base - self._last_base
        for shift, (low, high) in enumerate(zip([-1, *places], [*places, size], strict=True)):
            if high - low > 1:
                self._gaps.extend((gap - shift * self._cost, high - low - 1))
        return 0

    # -- the outcome ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Close what is still open; needed before anything is read."""
        for track in list(self._group):
            if track.run_first >= 0:
                self._close(track, self._emissions - 1, self._place(track) if self._cost else 0)

    def records(self, order: Sequence[Request], parts: TtftParts) -> SimulatedRecords:
        """Records of all requests, in the order in which they were sent. Call `flush` first."""
        output_len = _ints(self._output_len)
        offsets = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(num_gaps(output_len, self._interval), out=offsets[1:])
        return SimulatedRecords(
            request_id=order.ids if isinstance(order, RequestTable) else tuple([r.request_id for r in order]),
            scheduled=_arrivals(order),
            sent=_floats(self._sent) - self.start,
            first_token=_floats(self._first_token) - self.start,
            last_token=_floats(self._last_token) - self.start,
            prompt_len=_ints(self._prompt_len),
            output_len=output_len,
            cached_tokens=_ints(self._cached),
            status=tuple([STATUS[code] for code in self._status]),
            itl_offsets=offsets,
            queue=parts.queue,
            prefill=parts.prefill,
            preemptions=_ints(self._preemptions),
            emissions=self._table(),
        )

    def ttft_parts(self, order: Sequence[Request]) -> TtftParts:
        """The split of each request's time to first token."""
        scheduled = _arrivals(order) + self.start
        sent, at_engine = _floats(self._sent), _floats(self._at_engine)
        first_scheduled, first_result = _floats(self._first_scheduled), _floats(self._first_result)
        return TtftParts(
            client_wait=sent - scheduled,
            front_end=at_engine - sent,
            queue=first_scheduled - at_engine,
            prefill=first_result - first_scheduled,
            stream=_floats(self._first_token) - first_result,
        )

    def _table(self) -> EmissionTable:
        leaps = _floats(self._leaps).reshape(-1, 4)
        runs = _ints(self._runs).reshape(-1, 4)
        return EmissionTable(
            base=_floats(self._base),
            size=np.frombuffer(self._size, dtype=np.int32),
            stayed=np.frombuffer(self._stayed, dtype=np.int32),
            leap_piece=leaps[:, 0].astype(np.int64),
            leap_count=leaps[:, 1].astype(np.int64),
            leap_gap=leaps[:, 2],
            leap_slope=leaps[:, 3],
            gaps=_floats(self._gaps).reshape(-1, 2),
            run_row=runs[:, 0],
            run_first=runs[:, 1],
            run_last=runs[:, 2],
            run_place=runs[:, 3],
            apart_row=_ints(self._apart_row),
            apart_time=_floats(self._apart_time),
            cost=self._cost,
            delay=self._delay,
            start=self.start,
            interval=self._interval,
        )


def _arrivals(order: Sequence[Request]) -> Floats:
    if isinstance(order, RequestTable):
        return order.arrivals
    return np.array([request.arrival for request in order], dtype=np.float64)


def _floats(column: array[float]) -> Floats:
    return np.frombuffer(column, dtype=np.float64) if column else np.empty(0)


def _ints(column: array[int]) -> Ints:
    return np.frombuffer(column, dtype=np.int64) if column else np.empty(0, dtype=np.int64)
