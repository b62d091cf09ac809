"""A fake engine that streams tokens at a fixed pace and says, in each token's text, when it sent it.

Lean on purpose (one process, raw epoll): it must not be the bottleneck when clients are measured. The text of
a token is `<sent>` followed by a space, that of the first `<received>:<sent>`: seconds of CLOCK_MONOTONIC,
which all processes of a machine share. A client's own delay is then its time stamp minus the server's.

    python benchmarks/token_server.py --rate 50 --first-delay 0.1     # prints its URL
"""

from __future__ import annotations

import argparse
import heapq
import json
import select
import socket
import time
from dataclasses import dataclass, field
from itertools import count

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1764620000,'
    b'"model":"m","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b,"stop_reason":null}],'
    b'"usage":%b}\n\n'
)
_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}'
_LAST = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1764620000,'
    b'"model":"m","choices":[],"usage":%b}\n\n'
)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 01 Dec 2025 00:00:00 GMT\r\nserver: fake\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(slots=True)
class Conn:
    """A connection and the request it is answering."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    received: float = 0.0
    due: float = 0.0
    sent: int = 0
    wanted: int = 0
    prompt: int = 0
    usage: bool = False


class TokenServer:
    """One listening socket, one epoll loop."""

    def __init__(self, rate: float, first_delay: float, port: int = 0) -> None:
        self._gap = 1.0 / rate
        self._first_delay = first_delay
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._conns: dict[int, Conn] = {}
        self._due: list[tuple[float, int, Conn]] = []
        self._order = count()

    def serve(self) -> None:
        """Serve until the process is ended."""
        listener = self._listener.fileno()
        while True:
            wait = -1.0
            if self._due:
                wait = max(0.0, self._due[0][0] - time.monotonic())
            for fd, _ in self._epoll.poll(wait):
                if fd == listener:
                    self._accept()
                else:
                    self._read(self._conns[fd])
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._token(heapq.heappop(self._due)[2])

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._conns[sock.fileno()] = Conn(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _close(self, conn: Conn) -> None:
        fd = conn.sock.fileno()
        if fd >= 0:
            self._epoll.unregister(fd)
            del self._conns[fd]
            conn.sock.close()
        conn.wanted = 0

    def _read(self, conn: Conn) -> None:
        try:
            data = conn.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(conn)
            return
        conn.inbox += data
        end = conn.inbox.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(conn.inbox[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(conn.inbox) < end + 4 + length:
            return
        body = bytes(conn.inbox[end + 4 : end + 4 + length])
        del conn.inbox[: end + 4 + length]
        self._request(conn, head, body)

    def _request(self, conn: Conn, head: bytes, body: bytes) -> None:
        conn.received = time.monotonic()
        if not head.startswith(b"post /v1/completions "):
            is_models = head.startswith(b"get /v1/models ")
            status = b"200 OK" if is_models else b"404 Not Found"
            answer = b'{"object":"list","data":[{"id":"m"}]}' if is_models else b"{}"
            self._send(
                conn,
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(answer), answer),
            )
            return
        asked = json.loads(body)
        prompt = asked["prompt"]
        conn.prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        conn.wanted, conn.sent = asked["max_tokens"], 0
        conn.usage = bool((asked.get("stream_options") or {}).get("continuous_usage_stats"))
        conn.due = conn.received + self._first_delay
        self._send(conn, _HEAD)
        heapq.heappush(self._due, (conn.due, next(self._order), conn))

    def _token(self, conn: Conn) -> None:
        if not conn.wanted:
            return
        conn.sent += 1
        usage = _USAGE % (conn.prompt, conn.sent, conn.prompt + conn.sent)
        is_last = conn.sent == conn.wanted
        stamp = b"%.6f " % time.monotonic()
        if conn.sent == 1:
            stamp = b"%.6f:%b" % (conn.received, stamp)
        data = _chunk(_EVENT % (stamp, b'"length"' if is_last else b"null", usage if conn.usage else b"null"))
        if is_last:
            data += _chunk(_LAST % usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            conn.wanted = 0
        else:
            conn.due += self._gap
            heapq.heappush(self._due, (conn.due, next(self._order), conn))
        self._send(conn, data)

    def _send(self, conn: Conn, data: bytes) -> None:
        data = conn.unsent + data
        try:
            sent = conn.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(conn)
            return
        conn.unsent = data[sent:]  # goes out with the next token: the client is far behind anyway


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of one stream")
    parser.add_argument("--first-delay", type=float, default=0.1, help="seconds to the first token")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    server = TokenServer(options.rate, options.first_delay, options.port)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    server.serve()
