"""Server-sent events from bytes, however the network cut them.

Rules: WHATWG HTML, "Server-sent events", 9.2.5 and 9.2.6. Lines end with LF, CRLF or CR and nothing
else: U+2028 and U+0085 are legal inside a JSON string, so text line splitters corrupt such streams.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_LINE_BYTES = 4 * 1024 * 1024

_USUAL = b"data: "
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event: its `event:` name ("" if none was given) and its data lines joined by LF."""

    name: str
    data: bytes


class SseLineTooLong(Exception):
    """A line or an event's data grew past the limit; the stream cannot be followed any further."""


class SseParser:
    """Turns reads into events; the events do not depend on where the bytes were cut.

    An event counts as complete when the blank line after it has arrived. Comments, events without
    data, and `id:` and `retry:` fields yield nothing. Bytes after the last blank line are no event.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._partial: list[bytes] = []  # the unfinished line, in pieces: no quadratic copying
        self._partial_len = 0
        self._skip_lf = False
        self._at_start = True
        self._is_fresh = False  # nothing of an event has come since the last one, nor is a BOM possible
        self._name = ""
        self._data: list[bytes] = []
        self._data_len = 0

    @property
    def is_mid_event(self) -> bool:
        """Whether bytes have arrived that belong to an event that is not complete."""
        return self._partial_len > 0 or bool(self._data)

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that `chunk` completes, in order.

        Raises:
            SseLineTooLong: a line, or the data of one event, is longer than `max_line_bytes`.
        """
        if self._is_fresh and chunk.startswith(_USUAL) and chunk.find(b"\n") == len(chunk) - 2:
            # One whole event in one read: the usual case by far, and all below would say the same.
            data = chunk[len(_USUAL) : -2]
            if data and chunk.endswith(b"\n") and b"\r" not in data:
                return [Event("", data)]
        events: list[Event] = []
        if self._skip_lf and chunk:
            self._skip_lf = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if b"\r" in chunk:
            # A CR ends its line at once; should the LF of a CRLF come with the next read, it is skipped.
            self._skip_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        last = lines.pop()
        for line in lines:
            if self._partial_len:
                line = self._joined(line)
            if not line:
                self._dispatch(events)
            else:
                self._line(line)
        if last:
            self._partial.append(last)
            self._partial_len += len(last)
            if self._partial_len > self._max:
                raise SseLineTooLong(f"a line is longer than {self._max} bytes")
        self._is_fresh = not (
            self._partial_len or self._data or self._name or self._skip_lf or self._at_start
        )
        return events

    def _joined(self, rest: bytes) -> bytes:
        self._partial.append(rest)
        line = b"".join(self._partial)
        self._partial.clear()
        self._partial_len = 0
        return line

    def _line(self, line: bytes) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            self._data.append(value)
            self._data_len += len(value)
            if self._data_len > self._max:
                raise SseLineTooLong(f"the data of one event is longer than {self._max} bytes")
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")

    def _dispatch(self, events: list[Event]) -> None:
        self._at_start = False
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            if data:
                events.append(Event(self._name, data))
            self._data.clear()
            self._data_len = 0
        self._name = ""
