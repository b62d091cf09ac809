"""HTTP/1.1 chunked transfer coding, undone from bytes."""

from __future__ import annotations

_MAX_SIZE_LINE = 1024


class BodyBroken(Exception):
    """The connection ended, or its framing broke, before the body was complete."""


class ChunkDecoder:
    """Undoes HTTP/1.1 chunked coding (RFC 9112, 7.1), however the bytes are cut.

    `rest` is None until the last chunk begins; then it holds that chunk and all that follows it.
    """

    def __init__(self) -> None:
        self._size_line = b""
        self._left = 0  # payload bytes of the current chunk that are still to come
        self._line_end = 0  # of the CRLF after them
        self.rest: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`; "" once the last chunk has begun.

        Raises:
            BodyBroken: the framing is not that of chunked coding.
        """
        if self._size_line:
            data = self._size_line + data
            self._size_line = b""
        elif not self._left and not self._line_end:
            whole = self._one_whole_chunk(data)
            if whole is not None:
                return whole
        pieces: list[bytes] = []
        pos, end = 0, len(data)
        while pos < end:
            if self._left:
                piece = data[pos : pos + self._left]
                pieces.append(piece)
                pos += len(piece)
                self._left -= len(piece)
            elif self._line_end:
                skipped = min(self._line_end, end - pos)
                if data[pos : pos + skipped] != b"\r\n"[2 - self._line_end :][:skipped]:
                    raise BodyBroken("a chunk is longer than it said")
                pos += skipped
                self._line_end -= skipped
            else:
                eol = data.find(b"\r\n", pos)
                if eol < 0:
                    self._size_line = data[pos:]
                    if len(self._size_line) > _MAX_SIZE_LINE:
                        raise BodyBroken("a chunk size without an end")
                    break
                try:
                    size = int(data[pos:eol].partition(b";")[0], 16)
                except ValueError:
                    size = -1
                if size < 0:
                    raise BodyBroken(f"not a chunk size: {data[pos:eol][:40]!r}")
                if size == 0:
                    self.rest = data[pos:]
                    break
                pos = eol + 2
                self._left, self._line_end = size, 2
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    def _one_whole_chunk(data: bytes) -> bytes | None:
        """The payload, if `data` is one chunk and nothing else: how servers send their tokens."""
        eol = data.find(b"\r\n", 0, 8)
        try:
            size = int(data[:eol], 16) if eol > 0 else 0
        except ValueError:
            return None
        end = eol + 2 + size
        if size <= 0 or len(data) != end + 2 or not data.endswith(b"\r\n"):
            return None
        return data[eol + 2 : end]
