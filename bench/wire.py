"""The socket end of the client: bytes with the time at which they arrived, at little cost per read.

A network backend for httpcore. Heads and whole answers pass through as usual; the body of an event stream
goes around httpcore's generic machinery (asyncio streams, h11, four nested async generators), which would
cost more per token than everything else the client does. httpcore sees such an answer's head and its last
chunk, so that it keeps the connection alive as ever.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import httpcore

from bench.chunked import BodyBroken, ChunkDecoder

SOCKET_OPTION = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]

_DRAIN_BUDGET = 0.0005  # s of parsing before the loop looks at the sockets again
_READ_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_METHODS = (b"POST ", b"GET ")

clock = time.monotonic


class Drainer:
    """Parses what the wires have received, after all of them have noted their arrival times.

    Attributes:
        buffer: that the wires read into.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dirty: deque[Wire] = deque()
        # asyncio.Protocol would have a fresh 256 KiB for every read, most of it given back at once.
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._scheduled = False

    def add(self, wire: Wire) -> None:
        """Have `wire` drained soon."""
        self._dirty.append(wire)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        dirty = self._dirty
        until = clock() + _DRAIN_BUDGET
        try:
            while dirty:
                dirty.popleft().drain()
                if clock() > until:
                    break
        finally:  # whatever one wire meets, the others are drained
            if dirty:
                self._loop.call_soon(self._run)
            else:
                self._scheduled = False


class Wire(asyncio.BufferedProtocol, httpcore.AsyncNetworkStream):
    """One connection.

    Attributes:
        connected_at: when the connection stood [s].
        written_at: when the current request began to be written.
        head_at: when the head of the current answer was complete.
        last_read_at: when bytes last came.
        takes_body: whether the current answer's body is to be had from `body` instead of from httpcore.
    """

    def __init__(self, drainer: Drainer) -> None:
        self._drainer = drainer
        self._transport: asyncio.Transport | None = None
        self._inbox = bytearray()  # what httpcore may read
        self._inbox_waiter: asyncio.Future[None] | None = None
        self._is_closed = False  # by the peer, an error, or us
        self._is_given_up = False  # by us: asyncio tells of the end only later
        self._error: Exception | None = None
        self._writable: asyncio.Future[None] | None = None
        self._unsent_head = b""
        self._head = bytearray()
        self._expects_head = True
        self._decoder: ChunkDecoder | None = None
        self._reads: list[tuple[float, bytes]] = []
        self._queued = False
        self._sink: Callable[[float, bytes], None] | None = None
        self._body_done: asyncio.Future[None] | None = None
        self._body_over = True
        self.takes_body = False
        self.connected_at = clock()
        self.written_at: float | None = None
        self.head_at: float | None = None
        self.last_read_at = self.connected_at

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.BufferedProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of asyncio.BufferedProtocol: one buffer for all, as it is emptied at once."""
        return self._drainer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Part of asyncio.BufferedProtocol; the path that every token takes."""
        now = clock()
        data = bytes(self._drainer.buffer[:nbytes])
        self.last_read_at = now
        if self.takes_body:
            self._reads.append((now, data))
            if not self._queued:
                self._queued = True
                self._drainer.add(self)
        elif self._expects_head:
            self._take_head(now, data)
        else:
            self._deliver(data)

    def eof_received(self) -> None:
        """Part of asyncio.BufferedProtocol."""
        self._lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.BufferedProtocol."""
        self._lost(exc)

    def pause_writing(self) -> None:
        """Part of asyncio.BufferedProtocol."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Part of asyncio.BufferedProtocol."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # What httpcore calls

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Bytes meant for httpcore, "" at the end.

        Raises:
            httpcore.ReadTimeout, httpcore.ReadError.
        """
        if not self._inbox and not self._is_closed:
            self._inbox_waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._inbox_waiter
            except TimeoutError as error:
                raise httpcore.ReadTimeout("no answer in time") from error
            finally:
                self._inbox_waiter = None
        if self._inbox:
            data = bytes(self._inbox[:max_bytes])
            del self._inbox[:max_bytes]
            return data
        if self._error is not None:
            raise httpcore.ReadError(str(self._error)) from self._error
        return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes; the first ones after an answer's end begin a new exchange.

        httpcore writes a request's head, its body and (empty) its end: head and body leave together.

        Raises:
            httpcore.WriteTimeout, httpcore.WriteError.
        """
        if self._is_closed or self._transport is None:
            raise httpcore.WriteError(str(self._error or "the connection is closed"))
        if self._body_over and buffer.startswith(_METHODS):
            self._begin()
            self._unsent_head = buffer
            return
        buffer, self._unsent_head = self._unsent_head + buffer, b""
        if not buffer:
            return
        self._transport.write(buffer)
        if self._writable is not None:
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(self._writable)
            except TimeoutError as error:
                raise httpcore.WriteTimeout("the request could not be sent in time") from error

    async def aclose(self) -> None:
        """Close the connection, dropping what is unsent."""
        self.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Encrypt the connection.

        Raises:
            httpcore.ConnectTimeout, httpcore.ConnectError.
        """
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport = await loop.start_tls(
                    self._transport, self, ssl_context, server_hostname=server_hostname
                )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("TLS took too long") from error
        except (OSError, ssl.SSLError) as error:
            raise httpcore.ConnectError(str(error)) from error
        assert transport is not None
        self._transport = transport
        self.connected_at = clock()
        return self

    def get_extra_info(self, info: str) -> Any:
        """`is_readable` tells httpcore that an idle connection is dead."""
        if info == "is_readable":
            return self._is_closed or self._is_given_up or bool(self._inbox)
        if self._transport is None:
            return None
        return self._transport.get_extra_info(info)

    # What the client calls

    async def body(self, sink: Callable[[float, bytes], None]) -> None:
        """Hand the body's bytes to `sink` with their arrival times until the body is complete.

        Call once, and only if `takes_body`.

        Raises:
            BodyBroken: it never will be; what came before was handed over.
        """
        self._sink = sink
        self._body_done = asyncio.get_running_loop().create_future()
        self.drain()
        if self._is_closed:
            self._lost(None)
        await self._body_done

    def drain(self) -> None:
        """Parse and hand over what has been received."""
        self._queued = False
        if self._sink is None or not self._reads:
            return
        reads, self._reads = self._reads, []
        decoder = self._decoder
        for when, data in reads:
            if self._body_over:
                self._deliver(data)
                continue
            if decoder is None:
                self._sink(when, data)
                continue
            try:
                payload = decoder.feed(data)
            except BodyBroken as error:
                self._end_body(error)
                self.abort()
                return
            if payload:
                self._sink(when, payload)
            if decoder.rest is not None:
                self._deliver(decoder.rest)
                self._end_body(None)

    def abort(self) -> None:
        """Give the connection up; whoever waits for its bytes is told that it is over."""
        self._is_given_up = True
        if self._transport is not None:
            self._transport.abort()

    # Inside

    def _begin(self) -> None:
        self._expects_head = True
        self._body_over = False
        self.takes_body = False
        self._head.clear()
        self._decoder = None
        self._sink = None
        self._body_done = None
        self.written_at = clock()
        self.head_at = None

    def _take_head(self, now: float, data: bytes) -> None:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _MAX_HEAD_BYTES:
                self._expects_head = False
                self._deliver(bytes(self._head))  # httpcore refuses it in its own words
            return
        head, rest = bytes(self._head[: end + 4]), bytes(self._head[end + 4 :])
        self._head.clear()
        status, _, fields = head.partition(b"\r\n")
        code = status.split(b" ")[1:2]
        if code and code[0].startswith(b"1") and code[0] != b"101":
            self._deliver(head)
            if rest:
                self._take_head(now, rest)
            return
        self._expects_head = False
        self.head_at = now
        fields = fields.lower().replace(b" ", b"")
        is_stream = code == [b"200"] and b"\r\ncontent-type:text/event-stream" in b"\r\n" + fields
        is_chunked = b"transfer-encoding:chunked" in fields
        if (
            is_stream
            and b"content-encoding:" not in fields
            and (is_chunked or b"content-length:" not in fields)
        ):
            self.takes_body = True
            self._decoder = ChunkDecoder() if is_chunked else None
            if rest:
                self._reads.append((now, rest))
            self._deliver(head)
        else:
            self._body_over = True  # for the wire; httpcore frames it
            self._deliver(head + rest)

    def _deliver(self, data: bytes) -> None:
        self._inbox += data
        self._wake()

    def _wake(self) -> None:
        waiter = self._inbox_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _end_body(self, error: BodyBroken | None) -> None:
        self._body_over = True
        self.takes_body = False
        if self._body_done is not None and not self._body_done.done():
            if error is None:
                self._body_done.set_result(None)
            else:
                self._body_done.set_exception(error)

    def _lost(self, exc: Exception | None) -> None:
        if exc is not None and self._error is None:
            self._error = exc
        self._is_closed = True
        if self._head:
            self._deliver(bytes(self._head))
            self._head.clear()
        self.drain()
        if self.takes_body and self._sink is not None:
            is_whole = self._decoder is None and self._error is None
            self._end_body(None if is_whole else BodyBroken(str(self._error or "the connection was closed")))
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)


class WireBackend(httpcore.AsyncNetworkBackend):
    """Opens wires for httpcore."""

    def __init__(self) -> None:
        self._drainer = Drainer()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect.

        Raises:
            httpcore.ConnectTimeout, httpcore.ConnectError.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                transport, wire = await loop.create_connection(lambda: Wire(self._drainer), host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("no connection in time") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return wire

    async def sleep(self, seconds: float) -> None:
        """Part of httpcore's interface."""
        await asyncio.sleep(seconds)
