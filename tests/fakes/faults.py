"""Ways in which a server can fail its client, by name."""

from __future__ import annotations

import asyncio
import json

from tests.fakes.stream_server import Asked, Behaviour, Conn, StreamServer

FAULTS: dict[str, Behaviour] = {}


def fault(behave: Behaviour) -> Behaviour:
    FAULTS[behave.__name__] = behave
    return behave


@fault
async def reset_before_headers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    conn.reset()


@fault
async def close_before_headers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    conn.writer.close()


@fault
async def reset_in_headers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.raw(b"HTTP/1.1 200 OK\r\ncontent-ty")
    conn.reset()


@fault
async def reset_after_headers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await asyncio.sleep(0.01)
    conn.reset()


@fault
async def reset_mid_token(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.raw(b'40\r\ndata: {"choices": [{"te')
    await asyncio.sleep(0.01)
    conn.reset()


@fault
async def end_mid_stream(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """Well-formed HTTP, but the answer simply stops."""
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.end()


@fault
async def http_400(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("400 Bad Request", {"error": {"message": "context too long", "code": 400}})


@fault
async def http_404(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("404 Not Found", {"error": {"message": "The model `x` does not exist.", "code": 404}})


@fault
async def http_429(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("429 Too Many Requests", {"error": {"message": "slow down"}})


@fault
async def http_500(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("500 Internal Server Error", b"Internal Server Error", "text/plain")


@fault
async def http_503(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("503 Service Unavailable", {"error": "no capacity"})


@fault
async def echoes_key(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("401 Unauthorized", {"error": {"message": f"bad {asked.headers['authorization']}"}})


@fault
async def error_first(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await conn.event({"error": "prompt too long"})
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def error_after_tokens(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def error_event(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.chunk(b'event: error\ndata: {"detail": "worker lost"}\n\n')
    await conn.end()


@fault
async def error_as_json(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("200 OK", {"error": {"message": "overloaded", "code": 529}})


@fault
async def not_streamed(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.plain("200 OK", {"choices": [{"text": "all at once", "finish_reason": "stop"}]})


@fault
async def abort_reason(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await conn.event(server.text_event(asked, "", 2, "abort"))
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def no_done(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """Complete, but for the [DONE] that some servers never send: a success."""
    await conn.open_stream()
    await server.tokens(conn, asked, asked.max_tokens)
    await conn.end()


@fault
async def empty(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await conn.event(server.text_event(asked, "", 0, "stop"))
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def utf8_split(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """A character cut in two by the network: a success."""
    await conn.open_stream()
    event = b'data: {"choices": [{"text": "\xc3\xa9\xe2\x82\xac", "finish_reason": "length"}]}\n\n'
    for cut in (event[:30], event[30:33], event[33:]):
        await conn.chunk(cut)
        await asyncio.sleep(0.005)
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def half_utf8(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """Half a character, and then the event goes on as if nothing had happened."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.event(b'{"choices": [{"text": "\xe2\x82", "finish_reason": "length"}]}')
    await conn.event(b"[DONE]")
    await conn.end()


@fault
async def half_utf8_end(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """The stream ends within a character."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.chunk(b'data: {"choices": [{"text": "\xe2\x82')
    await conn.end()


@fault
async def long_line(server: StreamServer, conn: Conn, asked: Asked) -> None:
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
async def slow_loris(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """Drips bytes that never become a token."""
    await conn.open_stream()
    while True:
        await conn.chunk(b":")
        await asyncio.sleep(0.02)


@fault
async def slow_loris_headers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.raw(b"HTTP/1.1 200 OK\r\nx-slow: ")
    while True:
        await conn.raw(b"z")
        await asyncio.sleep(0.02)


@fault
async def drips_tokens(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """Never idle, never finished."""
    await conn.open_stream()
    count = 0
    while True:
        count += 1
        await conn.event(server.text_event(asked, " w", count))
        await asyncio.sleep(0.02)


@fault
async def stops_answering(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 2)
    await asyncio.sleep(3600)


@fault
async def never_answers(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await asyncio.sleep(3600)


@fault
async def never_ends(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """All tokens and [DONE], but the body stays open: a success."""
    await conn.open_stream()
    await server.tokens(conn, asked, asked.max_tokens)
    await conn.event(b"[DONE]")
    await asyncio.sleep(3600)


@fault
async def wrong_model(server: StreamServer, conn: Conn, asked: Asked) -> None:
    asked.body["model"] = "someone-else"
    await server.answer(conn, asked)


@fault
async def bad_json(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.event(b'{"choices": [')
    await conn.end()


@fault
async def odd_shape(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """An event of JSON, but with another type where the dialect has an object."""
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.event({"choices": [{"index": 0, "delta": "hello"}]})
    await asyncio.sleep(3600)


@fault
async def bad_chunk_size(server: StreamServer, conn: Conn, asked: Asked) -> None:
    await conn.open_stream()
    await server.tokens(conn, asked, 1)
    await conn.raw(b"zz\r\ndata: x\n\n\r\n")
    await asyncio.sleep(1)


@fault
async def until_close(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """No framing at all: the answer lasts until the connection closes. A success."""
    await conn.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    for i in range(asked.max_tokens):
        finish = "length" if i + 1 == asked.max_tokens else None
        event = json.dumps(server.text_event(asked, " w", i + 1, finish)).encode()
        await conn.raw(b"data: " + event + b"\n\n")
    await conn.raw(b"data: [DONE]\n\n")
    conn.writer.close()


@fault
async def sized_stream(server: StreamServer, conn: Conn, asked: Asked) -> None:
    """An event stream with a content-length, as a buffering proxy makes it. A success."""
    data = b""
    for i in range(asked.max_tokens):
        finish = "length" if i + 1 == asked.max_tokens else None
        data += b"data: " + json.dumps(server.text_event(asked, " w", i + 1, finish)).encode() + b"\n\n"
    await conn.plain("200 OK", data + b"data: [DONE]\n\n", "text/event-stream")
