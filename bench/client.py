"""The HTTP client of the bench: sends one request, follows its stream, says what happened and when.

The only module that knows httpx. It uses httpx for requests and answers, and httpcore's connections
below it, but not httpcore's pool: the pool walks through all connections whenever a request begins or
ends, which makes a thousand streams cost a million steps each.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from base64 import b64encode
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, cast

import httpcore
import httpx

from bench.chunked import BodyBroken
from bench.payload import Target, Timeouts
from bench.stream import Status, StreamOutcome, StreamReader
from bench.wire import Wire, WireBackend, clock
from sim.errors import ServecastError
from sim.jsontext import load_json
from sim.secrets import without_secrets

# vLLM and SGLang serve through uvicorn, which closes connections after 5 s without a request.
_KEEPALIVE_S = 4.0
_MAX_ERROR_BODY = 64 * 1024
_AFTER_DONE_S = 1.0  # how long to wait for the end of a body after [DONE]

_HTTPX_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.RemoteProtocolError, httpx.RemoteProtocolError),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
)


class NoAnswer(ServecastError):
    """The server did not give the plain answer that was asked for."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what became of it; times on `bench.wire.clock` [s], None is "did not happen".

    Attributes:
        sent: when the client began to send, connecting included.
        connected: when a connection stood and the request began to be written.
        headers: when the answer's head had come.
        ended: when the request was over, however it ended.
        http_status: of the answer.
        timeout: which limit was met: "connect", "first_token", "idle", "total"; "" if none.
        reused: whether an earlier connection was used.
        outcome: of the stream.
    """

    sent: float
    connected: float | None
    headers: float | None
    ended: float
    http_status: int | None
    timeout: str
    reused: bool
    outcome: StreamOutcome


def _translate(error: Exception) -> httpx.TransportError:
    for theirs, ours in _HTTPX_ERRORS:
        if isinstance(error, theirs):
            return ours(str(error))
    return httpx.TransportError(str(error))


class _Body(httpx.AsyncByteStream):
    """An answer's body that gives its connection back when it is closed."""

    def __init__(
        self, stream: AsyncIterable[bytes], transport: _Transport, conn: httpcore.AsyncHTTPConnection
    ):
        self._stream = stream
        self._transport = transport
        self._conn = conn

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._stream:
                yield part
        except Exception as error:
            if isinstance(error, httpx.TransportError):
                raise
            raise _translate(error) from error

    async def aclose(self) -> None:
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()
        self._transport.give_back(self._conn)


class _Transport(httpx.AsyncBaseTransport):
    """HTTP/1.1 connections to one server: as many as requests are open, reused last in, first out."""

    def __init__(self) -> None:
        self._backend = WireBackend()
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        # Whoever is cancelled while an answer is being closed leaves its connection neither idle nor closed.
        self._open: set[httpcore.AsyncHTTPConnection] = set()
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = httpcore.Origin(
            url.raw_scheme, url.raw_host, url.port or (443 if url.scheme == "https" else 80)
        )
        conn = await self._take(origin)
        inner = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            response = await conn.handle_async_request(inner)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            await self._drop(conn)
            raise _translate(error) from error
        except BaseException:
            await self._drop(conn)
            raise
        assert isinstance(response.stream, AsyncIterable)
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response.stream, self, conn),
            extensions=response.extensions,
        )

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            conn = self._idle.pop()
            if conn.can_handle_request(origin) and not conn.has_expired():
                return conn
            await self._drop(conn)
        if origin.scheme == b"https" and self._ssl is None:
            self._ssl = ssl.create_default_context()
        conn = httpcore.AsyncHTTPConnection(
            origin=origin,
            ssl_context=self._ssl,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=self._backend,
        )
        self._open.add(conn)
        return conn

    async def _drop(self, conn: httpcore.AsyncHTTPConnection) -> None:
        self._open.discard(conn)
        await conn.aclose()

    def give_back(self, conn: httpcore.AsyncHTTPConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        if conn.is_idle():
            self._idle.append(conn)
        elif conn.is_closed():
            self._open.discard(conn)

    async def aclose(self) -> None:
        self._idle.clear()
        while self._open:
            await self._open.pop().aclose()


class Watch:
    """A stream that is being followed; `hit` names the limit that it met, "" for none."""

    __slots__ = ("hit", "reader", "sent", "wire")

    def __init__(self, sent: float, wire: Wire, reader: StreamReader) -> None:
        self.sent = sent
        self.wire = wire
        self.reader = reader
        self.hit = ""

    def check(self, now: float, limits: Timeouts) -> None:
        """Abort the connection if a limit has passed."""
        if self.hit:
            return
        quiet = now - self.wire.last_read_at
        if now - self.sent > limits.total:
            self.hit = "total"
        elif not self.reader.has_token:
            if now - self.sent > limits.first_token:
                self.hit = "first_token"
        elif quiet > limits.idle:
            self.hit = "idle"
        elif self.reader.done and self.wire.takes_body and quiet > _AFTER_DONE_S:
            self.hit = "after_done"
        if self.hit:
            self.wire.abort()


class Client:
    """Sends requests to one target; use as an async context manager, within one event loop.

    The API key is read from the environment here, lives in the request headers alone, and is cut out of
    every message that the server sends back.
    """

    def __init__(self, target: Target, *, keep_text: bool = False) -> None:
        self._target = target
        self._keep_text = keep_text
        self._key = os.environ.get(target.api_key_env, "")
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
            "user-agent": "servecast",
        }
        self._url = httpx.URL(target.url)
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        elif self._url.userinfo:
            login = f"{self._url.username}:{self._url.password}"
            headers["authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        self._headers = httpx.Headers(headers)
        limits = target.timeouts
        self._timeout = {
            "connect": limits.connect,
            "read": min(limits.first_token, limits.total),
            "write": limits.total,
            "pool": None,
        }
        self._watched: set[Watch] = set()
        self._watchdog: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._transport = _Transport()
        self._http = httpx.AsyncClient(transport=self._transport, trust_env=False)
        self._watchdog = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._http.aclose()

    async def _watch(self) -> None:
        limits = self._target.timeouts
        period = min(0.25, limits.first_token / 5, limits.idle / 5, limits.total / 5)
        while True:
            await asyncio.sleep(period)
            now = clock()
            for watch in tuple(self._watched):
                watch.check(now, limits)

    async def get_json(self, path: str, timeout: float = 10.0) -> Any:
        """The JSON that a GET of `path` on the server gives.

        Raises:
            NoAnswer: no connection, another status than 200, or no JSON.
        """
        url = httpx.URL(self._target.base_url.rstrip("/") + path)
        try:
            response = await self._http.get(url, headers=self._headers, timeout=timeout)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise NoAnswer(f"GET {path} at {self._target.public_url}: {self._clean(str(error))}") from error

    async def send(self, body: bytes) -> Exchange:
        """Send one request and follow it to its end; failures are outcomes, not exceptions."""
        reader = StreamReader(keep_text=self._keep_text)
        request = httpx.Request(
            "POST", self._url, headers=self._headers, content=body, extensions={"timeout": self._timeout}
        )
        sent = clock()
        try:
            # Not through `self._http`: its cookies, redirects and hooks cost more than all else here.
            response = await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            return self._no_answer(sent, error)
        wire = cast(Wire, response.extensions["network_stream"])
        written = wire.written_at
        head = {
            "sent": sent,
            "connected": written,
            "headers": wire.head_at if wire.head_at is not None else clock(),
            "http_status": response.status_code,
            "reused": wire.connected_at < sent,
        }
        watch = Watch(sent, wire, reader)
        self._watched.add(watch)
        try:
            if wire.takes_body:
                await self._follow(wire, reader)
                if not reader.failed:
                    await response.aread()
                outcome = reader.finish("eof")
            elif response.status_code == 200 and _is_event_stream(response):
                async for part in response.aiter_bytes():
                    reader.feed(clock(), part)
                outcome = reader.finish("eof")
            else:
                outcome = await self._plain(response)
        except (BodyBroken, httpx.TransportError) as error:
            is_timeout = bool(watch.hit) and watch.hit != "after_done"
            detail = f"no end within the {watch.hit} limit" if is_timeout else str(error)
            outcome = reader.finish("timeout" if is_timeout else "reset", detail)
        finally:
            self._watched.discard(watch)
            await response.aclose()
        return self._exchange(watch.hit if outcome.status == "timeout" else "", outcome, **head)

    def _exchange(self, timeout: str, outcome: StreamOutcome, **head: Any) -> Exchange:
        accepted = {self._target.model, *self._target.model_aliases, None}
        if outcome.status in ("ok", "empty") and outcome.model not in accepted:
            outcome = replace(
                outcome,
                status="server_error",
                detail=f"wrong model: asked for {self._target.model!r}, answered by {outcome.model!r}",
            )
        if outcome.detail:
            outcome = replace(outcome, detail=self._clean(outcome.detail))
        return Exchange(ended=clock(), timeout=timeout, outcome=outcome, **head)

    async def _follow(self, wire: Wire, reader: StreamReader) -> None:
        def sink(when: float, data: bytes) -> None:
            reader.feed(when, data)
            if reader.failed:
                wire.abort()  # nothing that follows can turn this into a good answer

        await wire.body(sink)

    async def _plain(self, response: httpx.Response) -> StreamOutcome:
        """An answer that is no event stream: an error, or a server that does not stream."""
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MAX_ERROR_BODY:
                break
        code = response.status_code
        message, inner = _error_message(body)
        if code == 200:
            detail = message if inner else f"not an event stream but {response.headers.get('content-type')}"
            return StreamOutcome("server_error", detail, error_code=inner)
        status: Status = "refused" if 400 <= code < 500 else "server_error"
        return StreamOutcome(status, f"HTTP {code}: {message}", error_code=code)

    def _no_answer(self, sent: float, error: httpx.TransportError) -> Exchange:
        status: Status
        timeout = ""
        if isinstance(error, httpx.ConnectTimeout):
            status, timeout, detail = "timeout", "connect", "no connection within the connect limit"
        elif isinstance(error, httpx.TimeoutException):
            limits = self._target.timeouts
            timeout = "first_token" if limits.first_token <= limits.total else "total"
            status, detail = "timeout", f"no answer within the {timeout} limit"
        elif isinstance(error, httpx.ConnectError):
            status, detail = "refused", f"no connection: {error}"
        else:
            status, detail = "server_error", f"the connection ended before an answer: {error}"
        outcome = StreamOutcome(status, detail)
        return self._exchange(
            timeout, outcome, sent=sent, connected=None, headers=None, http_status=None, reused=False
        )

    def _clean(self, message: str) -> str:
        return without_secrets(message.replace(self._key, "***") if self._key else message)


def _is_event_stream(response: httpx.Response) -> bool:
    return str(response.headers.get("content-type", "")).lower().startswith("text/event-stream")


def _error_message(body: bytes) -> tuple[str, int | None]:
    """The message in an error body, and its code (-1 for an error without a code, None for no error)."""
    text = body.decode("utf-8", "replace").strip()
    try:
        parsed = load_json(text)
    except ValueError:
        return text[:500], None
    if not isinstance(parsed, dict):
        return text[:500], None
    error = parsed.get("error")
    holder = error if isinstance(error, dict) else parsed
    if not error and parsed.get("object") != "error":
        return str(parsed.get("detail") or parsed.get("message") or text)[:500], None
    code = holder.get("code")
    message = error if isinstance(error, str) else holder.get("message") or text
    return str(message)[:500], code if isinstance(code, int) else -1
