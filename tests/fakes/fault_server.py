"""A fake OpenAI-compatible server over raw sockets that can be told to misbehave.

    async with FaultServer("reset_mid_token") as server: ...     # in the caller's loop
    with fault_server_thread("http_503") as url: ...              # in a thread of its own
    python -m tests.fakes.fault_server --fault no_done --port 9000

Without a fault it streams the tokens asked for (`max_tokens`) at `interval` seconds each, with running usage
counts if asked. It keeps connections alive, as real servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as the server read it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        if "messages" in self.body:
            return sum(len(m["content"].split()) for m in self.body["messages"]) + 8
        prompt = self.body.get("prompt", self.body.get("input_ids", self.body.get("text", "")))
        return len(prompt) if isinstance(prompt, list) else len(prompt.split())

    @property
    def max_tokens(self) -> int:
        sampling = self.body.get("sampling_params", {})
        for holder, key in (
            (self.body, "max_tokens"),
            (self.body, "max_completion_tokens"),
            (sampling, "max_new_tokens"),
        ):
            if key in holder:
                return int(holder[key])
        return 16


class Conn:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self) -> Asked | None:
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        raw = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Asked(method, path, headers, json.loads(raw) if raw else {})

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def plain(self, status: str, body: object, content_type: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
        await self.raw(head.encode() + data)

    async def open_stream(self) -> None:
        await self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, body: object) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.chunk(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class FaultServer:
    """Listens on a free port of 127.0.0.1.

    Attributes:
        asked: every request that came, in order.
        in_flight_peak: most requests that were open at once.
    """

    def __init__(
        self,
        fault: str = "none",
        *,
        model: str = "m",
        interval: float = 0.0,
        first_delay: float = 0.0,
        cached_tokens: int = 0,
        every: int = 1,
        port: int = 0,
        max_model_len: int = 4096,
        tokens_per_chunk: int = 1,
    ) -> None:
        self.fault = fault
        self.model = model
        self.interval = interval
        self.first_delay = first_delay
        self.cached_tokens = cached_tokens
        self.every = every  # only every n-th request meets the fault
        self.port = port
        self.max_model_len = max_model_len
        self.tokens_per_chunk = tokens_per_chunk
        self.asked: list[Asked] = []
        self.connections = 0
        self.in_flight_peak = 0
        self._in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FaultServer:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=1 << 24, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        conn = Conn(reader, writer)
        try:
            while (asked := await conn.ask()) is not None:
                await self._answer(conn, asked)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, conn: Conn, asked: Asked) -> None:
        if asked.method == "GET":
            models = {
                "data": [{"id": self.model, "max_model_len": self.max_model_len}],
                "object": "list",
            }
            await conn.plain("200 OK", models if asked.path == "/v1/models" else {})
            return
        self.asked.append(asked)
        self._in_flight += 1
        self.in_flight_peak = max(self.in_flight_peak, self._in_flight)
        try:
            is_hit = len(self.asked) % self.every == 0
            await FAULTS[self.fault if is_hit else "none"](self, conn, asked)
        finally:
            self._in_flight -= 1

    def text_event(self, asked: Asked, text: str, count: int, finish: str | None = None) -> dict[str, Any]:
        """One event of the dialect that was asked for; `count` is the running number of tokens."""
        if asked.path == "/generate":
            return {
                "text": " w" * count,
                "meta_info": {
                    "prompt_tokens": asked.prompt_tokens,
                    "completion_tokens": count,
                    "cached_tokens": self.cached_tokens,
                    "finish_reason": {"type": finish, "length": count} if finish else None,
                },
            }
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in asked.body else {"text": text}
        event: dict[str, Any] = {"id": "x", "model": asked.body.get("model"), "choices": [choice]}
        if asked.body.get("stream_options", {}).get("continuous_usage_stats"):
            event["usage"] = self.usage(asked, count)
        return event

    def usage(self, asked: Asked, count: int) -> dict[str, Any]:
        prompt = asked.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def tokens(self, conn: Conn, asked: Asked, count: int) -> None:
        """`count` token events, the last of them with a finish reason if it is the last one asked for."""
        if self.first_delay:
            await asyncio.sleep(self.first_delay)
        sent = 0
        while sent < count:
            if sent and self.interval:
                await asyncio.sleep(self.interval)
            step = min(self.tokens_per_chunk, count - sent)
            sent += step
            finish = "length" if sent == asked.max_tokens else None
            await conn.event(self.text_event(asked, " w" * step, sent, finish))

    async def finish(self, conn: Conn, asked: Asked) -> None:
        if asked.path != "/generate":
            await conn.event(
                {
                    "id": "x",
                    "model": asked.body.get("model"),
                    "choices": [],
                    "usage": self.usage(asked, asked.max_tokens),
                }
            )
        await conn.event(b"[DONE]")
        await conn.end()


Fault = Callable[[FaultServer, Conn, Asked], Coroutine[Any, Any, None]]
FAULTS: dict[str, Fault] = {}


def fault(behave: Fault) -> Fault:
    FAULTS[behave.__name__] = behave
    return behave


async def _good(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    if "messages" in asked.body:
        await conn.event({"id": "x", "model": server.model, "choices": [{"delta": {"role": "assistant"}}]})
    await server.tokens(conn, asked, asked.max_tokens)
    await server.finish(conn, asked)


FAULTS["none"] = _good


@fault
async def reset_before_headers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    conn.reset()


@fault
async def close_before_headers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    conn.writer.close()


@fault
async def reset_in_headers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.raw(b"HTTP/1.1 200 OK\r\ncontent-ty")
    conn.reset()


@fault
async def reset_after_headers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await asyncio.sleep(0.01)
    conn.reset()


@fault
async def reset_mid_token(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.raw(b'40\r\ndata: {"choices": [{"te')
    await asyncio.sleep(0.01)
    conn.reset()


@fault
async def end_mid_stream(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """Well-formed HTTP, but the answer simply stops."""
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.end()


@fault
async def http_400(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("400 Bad Request", {"error": {"message": "context too long", "code": 400}})


@fault
async def http_404(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("404 Not Found", {"error": {"message": "The model `x` does not exist.", "code": 404}})


@fault
async def http_429(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("429 Too Many Requests", {"error": {"message": "slow down"}})


@fault
async def http_500(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("500 Internal Server Error", b"Internal Server Error", "text/plain")


@fault
async def http_503(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("503 Service Unavailable", {"error": "no capacity"})


@fault
async def echoes_key(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("401 Unauthorized", {"error": {"message": f"bad {asked.headers['authorization']}"}})


@fault
async def error_first(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await conn.event({"error": "prompt too long"})
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def error_after_tokens(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def error_event(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.chunk(b'event: error\ndata: {"detail": "worker lost"}\n\n')
    await conn.end()


@fault
async def error_as_json(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("200 OK", {"error": {"message": "overloaded", "code": 529}})


@fault
async def not_streamed(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("200 OK", {"choices": [{"text": "all at once", "finish_reason": "stop"}]})


@fault
async def abort_reason(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.event(server.text_event(asked, "", 2, "abort"))
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def no_done(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """Complete, but for the [DONE] that some servers never send: a success."""
    await conn.open_stream()
    await server.tokens(conn, asked, asked.max_tokens)
    await conn.end()


@fault
async def empty(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await conn.event(server.text_event(asked, "", 0, "stop"))
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def utf8_split(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """A character cut in two by the network: a success."""
    await conn.open_stream()
    event = b'data: {"choices": [{"text": "\xc3\xa9\xe2\x82\xac", "finish_reason": "length"}]}\n\n'
    for cut in (event[:30], event[30:33], event[33:]):
        await conn.chunk(cut)
        await asyncio.sleep(0.005)
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def half_utf8(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """Half a character, and then the event goes on as if nothing had happened."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.event(b'{"choices": [{"text": "\xe2\x82", "finish_reason": "length"}]}')
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def half_utf8_end(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """The stream ends within a character."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.chunk(b'data: {"choices": [{"text": "\xe2\x82')
    await conn.end()


@fault
async def long_line(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """A line of 10 MB."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.chunk(b'data: {"choices": [{"text": "')
    for _ in range(160):
        await conn.chunk(b"x" * 65536)
    await conn.chunk(b'", "finish_reason": "length"}]}\n\n')
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def slow_loris(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """Drips bytes that never become a token."""
    await conn.open_stream()
    while True:
        await conn.chunk(b":")
        await asyncio.sleep(0.02)


@fault
async def slow_loris_headers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.raw(b"HTTP/1.1 200 OK\r\nx-slow: ")
    while True:
        await conn.raw(b"z")
        await asyncio.sleep(0.02)


@fault
async def drips_tokens(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """Never idle, never finished."""
    await conn.open_stream()
    count = 0
    while True:
        count += 1
        await conn.event(server.text_event(asked, " w", count))
        await asyncio.sleep(0.02)


@fault
async def stops_answering(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await asyncio.sleep(3600)


@fault
async def never_answers(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await asyncio.sleep(3600)


@fault
async def never_ends(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """All tokens and [DONE], but the body stays open: a success."""
    await conn.open_stream()
    await server.tokens(conn, asked, asked.max_tokens)
    await conn.event(b"[DONE]")
    await asyncio.sleep(3600)


@fault
async def wrong_model(server: FaultServer, conn: Conn, asked: Asked) -> None:
    asked.body["model"] = "someone-else"
    await _good(server, conn, asked)


@fault
async def bad_json(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.event(b'{"choices": [')
    await conn.end()


@fault
async def bad_chunk_size(server: FaultServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.raw(b"zz\r\ndata: x\n\n\r\n")
    await asyncio.sleep(1)


@fault
async def until_close(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """No framing at all: the answer lasts until the connection closes. A success."""
    await conn.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    for i in range(asked.max_tokens):
        finish = "length" if i + 1 == asked.max_tokens else None
        event = json.dumps(server.text_event(asked, " w", i + 1, finish)).encode()
        await conn.raw(b"data: " + event + b"\n\n")
    await conn.raw(b"data: [DONE]\n\n")
    conn.writer.close()


@fault
async def sized_stream(server: FaultServer, conn: Conn, asked: Asked) -> None:
    """An event stream with a content-length, as a buffering proxy makes it. A success."""
    data = b""
    for i in range(asked.max_tokens):
        finish = "length" if i + 1 == asked.max_tokens else None
        data += b"data: " + json.dumps(server.text_event(asked, " w", i + 1, finish)).encode() + b"\n\n"
    await conn.plain("200 OK", data + b"data: [DONE]\n\n", "text/event-stream")


@contextlib.contextmanager
def fault_server_thread(fault: str = "none", **options: Any) -> Iterator[str]:
    """Run a `FaultServer` in a thread; gives its URL."""
    started = threading.Event()
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop
    url = ""

    async def main() -> None:
        nonlocal stop, loop, url
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with FaultServer(fault, **options) as server:
            url = server.url
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


async def _main(options: argparse.Namespace) -> None:
    async with FaultServer(
        options.fault, model=options.model, interval=options.interval, port=options.port
    ) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none", choices=sorted(FAULTS))
    parser.add_argument("--model", default="m")
    parser.add_argument("--interval", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
