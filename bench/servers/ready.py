"""When an engine may be loaded, and how long each phase of its start took.

Ready is health 200, the right model id listed, and one real completion: a port that is open, or a health
check that answers, comes minutes too early (SGLang warms up behind an open port; a vLLM worker can die at
its first prompt after /health was 200).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from bench.failures import EngineFailed, Failure, classify
from bench.fetch import Fault, fetch
from bench.servers.base import Exit, Server
from sim.secrets import without_secrets

_REFUSAL_S = 60.0
_GRACE_S = 5.0  # for an answer that only another address would change
_LOCKED = (401, 403)
_DEAD_ENDS: Mapping[Fault, tuple[str, str]] = {
    "unknown_host": ("unknown_host", "no such host: check the spelling of --base-url"),
    "unreachable": ("unreachable", "no way leads to that host: check --base-url and the network"),
    "tls": (
        "no_tls",
        "no trusted TLS there: check http:// against https:// in --base-url, or its certificate",
    ),
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """What one look at a server found.

    `models` is None while the listing is not to be had; `locked` says that it wants an API key that we lack;
    `elsewhere` that this is not the address of an OpenAI API, unless it is still coming up.
    """

    port_open: bool = False
    health: bool = False
    models: tuple[str, ...] | None = None
    completion: bool = False
    locked: bool = False
    elsewhere: bool = False
    detail: str = ""


class Look(Protocol):
    """One look at a server; must not block for long."""

    def __call__(self) -> Readiness:
        """Look now."""
        ...


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from the launch to each milestone, in order of time; the last one is "ready"."""

    milestones: tuple[tuple[str, float], ...]

    @property
    def ready(self) -> float:
        """From launch to ready [s]."""
        return self.milestones[-1][1]

    def phases(self) -> dict[str, float]:
        """Seconds between milestones, by the name of the milestone that ends the phase."""
        times = [0.0, *(at for _, at in self.milestones)]
        return {name: at - before for (name, at), before in zip(self.milestones, times[:-1], strict=True)}


# What a start-up log says when a phase is over (vLLM 0.6 to 0.33, SGLang 0.4 to 0.5).
_MILESTONES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("configured", re.compile(r"non-default args:|server_args=ServerArgs|Initializing a V\d LLM engine")),
    ("loading", re.compile(r"Starting to load model|Load weight begin")),
    ("weights", re.compile(r"[Ll]oading (?:model )?weights took|Model loading took|Load weight end")),
    ("kv_cache", re.compile(r"KV cache size: |# (?:GPU|CPU) blocks:|KV Cache is allocated")),
    ("graphs", re.compile(r"Graph capturing finished|Capture (?:cuda )?graph end")),
    ("engine", re.compile(r"init engine \(|max_total_num_tokens=\d+, ")),
    ("http", re.compile(r"Application startup complete|Uvicorn running on")),
)


def http_look(
    base_url: str, model_id: str, *, endpoint: str = "/v1/completions", api_key_env: str = "OPENAI_API_KEY"
) -> Look:
    """A look over HTTP: /health, /v1/models, then one token from `endpoint`."""

    def look() -> Readiness:
        health = fetch(base_url, "/health", api_key_env=api_key_env)
        if health.status == 0:
            return Readiness(detail=health.reason)
        # Both engines have the route; other servers may not, and what they list and complete tells as much.
        if not health.ok and health.status != 404:
            locked, elsewhere = health.status in _LOCKED, 300 <= health.status < 400
            detail = f"/health says {health.status}"
            return Readiness(port_open=True, locked=locked, elsewhere=elsewhere, detail=detail)
        listing = fetch(base_url, "/v1/models", api_key_env=api_key_env)
        models = _model_ids(listing.json()) if listing.ok else None
        if models is None:
            locked, elsewhere = listing.status in _LOCKED, 200 <= listing.status < 500
            detail = f"/v1/models says {listing.status}"
            return Readiness(True, health=True, locked=locked, elsewhere=elsewhere, detail=detail)
        seen = Readiness(port_open=True, health=True, models=models)
        if model_id not in models:
            return replace(seen, detail=f"serves {', '.join(models) or 'no model'}")
        answer = fetch(
            base_url, endpoint, body=_one_token(endpoint, model_id), timeout=300.0, api_key_env=api_key_env
        )
        if answer.ok and not _is_error(answer.json()):
            return replace(seen, completion=True)
        detail = without_secrets(f"{endpoint} says {answer.status}: {answer.text[:200] or answer.reason}")
        return replace(seen, locked=answer.status in _LOCKED, detail=detail)

    return look


def _model_ids(listing: object) -> tuple[str, ...] | None:
    data = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(data, list):
        return None
    return tuple(str(item["id"]) for item in data if isinstance(item, dict) and "id" in item)


def _one_token(endpoint: str, model_id: str) -> dict[str, object]:
    if endpoint.rstrip("/").endswith("/chat/completions"):
        return {"model": model_id, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    if endpoint.rstrip("/").endswith("/generate"):
        return {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}
    return {"model": model_id, "prompt": "Hello", "max_tokens": 1}


def _is_error(answer: object) -> bool:
    return not isinstance(answer, dict) or "error" in answer or answer.get("object") == "error"


def wait_ready(
    server: Server,
    look: Look,
    model_id: str,
    *,
    stall_timeout: float = 900.0,
    poll: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[str, float], None] | None = None,
) -> StartTimes:
    """Wait until the server is ready; give up when it is dead, or when nothing has moved for a while.

    A start may take an hour (download, compile), so there is no limit on the whole: the limit is on the
    time without a new line in the log and without progress in what the server answers.

    Args:
        stall_timeout: without any progress [s].
        on_progress: called with each milestone and its time since the launch [s].

    Raises:
        EngineFailed: it died, serves another model, refuses the completion for good, or does not move.
    """
    launched = clock()
    milestones: list[tuple[str, float]] = []

    def reached(name: str) -> None:
        if all(known != name for known, _ in milestones):
            milestones.append((name, clock() - launched))
            if on_progress is not None:
                on_progress(name, clock() - launched)

    def read_log() -> None:
        log = server.logs()
        for name, pattern in _MILESTONES:
            if pattern.search(log):
                reached(name)

    moved_at, seen_size, seen = launched, -1, Readiness()
    refused_since: float | None = None
    elsewhere_since: float | None = None
    while True:
        if (gone := server.exited()) is not None:
            raise EngineFailed(_death(server, gone))
        size = server.log_size()
        if size != seen_size:
            moved_at, seen_size = clock(), size
            read_log()
        now_seen = look()
        if now_seen.port_open:
            reached("port")
        if now_seen.health:
            reached("health")
        if now_seen.locked:
            fix = "the server wants an API key: export the right one as OPENAI_API_KEY"
            raise EngineFailed(Failure("unauthorised", "startup", now_seen.detail, fix))
        if now_seen.models is not None and model_id not in now_seen.models:
            raise EngineFailed(_wrong_model(model_id, now_seen.models))
        if now_seen.completion:
            read_log()  # what was written during this look, which may have found everything at once
            reached("ready")
            return StartTimes(tuple(milestones))
        strays = server.kind == "url" and now_seen.elsewhere
        elsewhere_since = None if not strays else clock() if elsewhere_since is None else elsewhere_since
        if elsewhere_since is not None and clock() - elsewhere_since > _GRACE_S:
            fix = "no OpenAI API at this address: check host, port and path of --base-url (without /v1)"
            raise EngineFailed(Failure("no_api", "startup", now_seen.detail, fix))
        # Healthy, the model listed, and still no completion: that is no warm-up any more.
        refuses = now_seen.health and now_seen.models is not None
        refused_since = None if not refuses else clock() if refused_since is None else refused_since
        if refused_since is not None and clock() - refused_since > _REFUSAL_S:
            raise EngineFailed(
                Failure(
                    "no_completion", "startup", now_seen.detail, "it lists the model but completes nothing"
                )
            )
        if now_seen != seen:
            moved_at, seen = clock(), now_seen
        if clock() - moved_at > stall_timeout:
            last = _last_line(server)
            where = "the log's last line says where" if last else now_seen.detail or "it says nothing"
            fix = f"nothing has moved for {stall_timeout:.0f} s: it hangs ({where})"
            raise EngineFailed(Failure("start_stalled", "startup", last, fix))
        sleep(poll)


def _death(server: Server, gone: Exit) -> Failure:
    detail = gone.detail
    if gone.fault in _DEAD_ENDS:
        kind, fix = _DEAD_ENDS[gone.fault]
        return Failure(kind, "startup", detail, fix)
    if server.kind == "url":  # no log of it is to be had, and nobody saw it exit
        fix = "nothing listens there: start the server, or check the address of --base-url"
        return Failure("connection_refused", "startup", detail, fix, retryable=True)
    # A log thread may be a moment behind the exit; what it wrote last is what matters.
    time.sleep(0.2)
    failure = classify(server.logs(), phase="startup", exit_code=gone.code)
    return replace(failure, line=failure.line or detail)


def _wrong_model(wanted: str, served: tuple[str, ...]) -> Failure:
    names = ", ".join(served) or "none"
    fix = f"the server lists {names}, not {wanted}: name it with --served-model-name, or check the address"
    return Failure("wrong_model", "startup", "", fix, flag="served_model_name")


def _last_line(server: Server) -> str:
    return next((line.strip()[-300:] for line in reversed(server.logs().splitlines()) if line.strip()), "")
