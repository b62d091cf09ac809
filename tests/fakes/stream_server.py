"""A fake OpenAI-compatible server over raw sockets: streams the tokens asked for, one chunk each.

It sends running usage counts if asked, and keeps connections alive, as real servers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self


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


class StreamServer:
    """Answers as a server does; `behave` does otherwise for every `every`-th request. On a port of 127.0.0.1.

    Attributes:
        asked: every request that came, in order.
        in_flight_peak: most requests that were open at once.
    """

    def __init__(
        self,
        behave: Behaviour | None = None,
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
        self.behave = behave
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

    async def __aenter__(self) -> Self:
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
            if self.behave is not None and len(self.asked) % self.every == 0:
                await self.behave(self, conn, asked)
            else:
                await self.answer(conn, asked)
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

    async def answer(self, conn: Conn, asked: Asked) -> None:
        """All tokens that were asked for, without a fault."""
        await conn.open_stream()
        if "messages" in asked.body:
            await conn.event({"id": "x", "model": self.model, "choices": [{"delta": {"role": "assistant"}}]})
        await self.tokens(conn, asked, asked.max_tokens)
        await self.finish(conn, asked)


Behaviour = Callable[[StreamServer, Conn, Asked], Coroutine[Any, Any, None]]
