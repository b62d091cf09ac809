"""A server that somebody else runs: we only look and load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bench.fetch import fetch
from bench.payload import Target
from bench.servers.base import Exit, LaunchKind

GRACE = 5.0  # s; somebody may be starting it this very moment


class UrlServer:
    """Never started and never stopped by us; gone when nothing answers on its port any more."""

    kind: LaunchKind = "url"

    def __init__(self, base_url: str, *, api_key_env: str = "OPENAI_API_KEY") -> None:
        # Clients of OpenAI's want the /v1 in the address; the paths asked for here have it already.
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api_key_env = api_key_env
        # Checks the address, and knows how to show it without a password in it.
        self._public_url = Target(self._base_url, "").public_url
        self._answered = False
        self._looked_since: float | None = None

    @property
    def base_url(self) -> str:
        """As given, without a trailing /v1."""
        return self._base_url

    def start(self) -> None:
        """Nothing to do."""

    def exited(self) -> Exit | None:
        """Gone if it refuses connections and has answered before, or has had its time to come up.

        An address that leads nowhere gets the same time. A slow answer is no exit.
        """
        answer = fetch(self._base_url, "/health", api_key_env=self._api_key_env)
        if answer.status:
            self._answered = True
            return None
        now = time.monotonic()
        self._looked_since = self._looked_since or now
        if answer.fault == "refused" and (self._answered or now - self._looked_since > GRACE):
            return Exit(None, f"{self._public_url} refuses connections", answer.fault)
        if answer.fault and not self._answered and now - self._looked_since > GRACE:
            return Exit(None, f"{self._public_url}: {answer.reason}", answer.fault)
        return None

    def logs(self) -> str:
        """None to be had."""
        return ""

    def log_size(self) -> int:
        """No progress to be seen."""
        return 0

    def facts(self) -> Mapping[str, Any]:
        """The address, without user and password."""
        return {"launch": self.kind, "base_url": self._public_url}

    def stop(self) -> None:
        """Not ours to stop."""
