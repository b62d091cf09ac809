"""One plain HTTP question and its answer, for readiness checks and scrapes: no pool, no proxy, no redirects.

Load goes through `bench.client`; this is for the questions asked around it, from any thread.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from sim.errors import BadInput

Fault = Literal["", "refused", "unknown_host", "unreachable", "tls"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; `status` 0 means that there was none (refused, reset, timed out).

    `fault` is what waiting does not mend about an answer that there is none of, or "".
    """

    status: int
    body: bytes
    reason: str = ""
    fault: Fault = ""

    @property
    def ok(self) -> bool:
        """Whether the server answered 200."""
        return self.status == 200

    @property
    def text(self) -> str:
        """The body as text, with broken bytes replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body's JSON, or None if it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def fetch(
    base_url: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    timeout: float = 5.0,
    api_key_env: str = "OPENAI_API_KEY",
) -> Answer:
    """GET `path`, or POST `body` to it as JSON; a server that does not answer is an answer with status 0.

    Args:
        timeout: of each socket operation [s].
        api_key_env: the environment variable that holds the API key, sent if set.

    Raises:
        BadInput: `base_url` is no http(s) address.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("--base-url", base_url, "must look like http://host:port")
    maker = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"user-agent": "servecast", "connection": "close"}
    key = os.environ.get(api_key_env, "")
    if key:
        headers["authorization"] = f"Bearer {key}"
    elif parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["content-type"] = "application/json"
    try:
        connection = maker(parts.hostname, parts.port, timeout=timeout)
        try:
            connection.request("POST" if body is not None else "GET", parts.path + path, data, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(), response.reason)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(0, b"", str(error) or type(error).__name__, _fault(error))


def _fault(error: Exception) -> Fault:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, socket.gaierror):
        return "unknown_host"
    if isinstance(error, ssl.SSLError):
        return "tls"
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "unreachable"
    return ""
