"""What every launcher does, and what it is told."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bench.failures import EngineFailed, Failure
from bench.fetch import Fault
from sim.scenario import EngineName
from sim.secrets import SECRET_NAME, without_secrets

LaunchKind = Literal["process", "docker", "url"]
LABEL = "servecast"  # on every container that servecast starts
MARKER = "SERVECAST_LAUNCH"  # in the environment of every process that it starts


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """How a container is made.

    Attributes:
        image: with its tag.
        network: "bridge" publishes the port on the loopback interface; "host" shares the host's network,
            for engines or hosts without a bridge.
        shm_bytes: size of /dev/shm; None shares the host's (`--ipc host`).
        gpus: "all", a tuple of device ids, or None for no GPU.
        mounts: (host folder, path in the container), read-only: models, caches.
        writable: the same, for what the engine is to write (the step probe's file).
        entrypoint: replaces the image's; None keeps it.
    """

    image: str
    network: Literal["bridge", "host"] = "bridge"
    shm_bytes: int | None = None
    gpus: Literal["all"] | tuple[str, ...] | None = "all"
    mounts: tuple[tuple[Path, str], ...] = ()
    writable: tuple[tuple[Path, str], ...] = ()
    entrypoint: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to start.

    Attributes:
        engine: whose words the flags are.
        command: the program and its arguments, without `--host` and `--port`.
        model_id: the name that the server must list and answer to.
        env: variables on top of the environment (a process) or on top of the image's (a container).
        port: to listen on; None takes a free one.
        log_path: where the engine's output goes, whole and raw.
        name: of the run, for the container.
        docker: only for the docker kind.
    """

    engine: EngineName
    command: tuple[str, ...]
    model_id: str
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    name: str = "run"
    docker: DockerOptions | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """An engine that is no longer there. `code` below 0 is a signal; None is unknown.

    `fault` is why an address gives no answer, where that is all that is known.
    """

    code: int | None
    detail: str = ""
    fault: Fault = ""


class Server(Protocol):
    """One engine, from `start` to `stop`.

    `stop` may be called at any time, also twice, also when `start` failed half-way, and leaves nothing of
    ours behind.
    """

    @property
    def kind(self) -> LaunchKind:
        """How it was launched."""
        ...

    @property
    def base_url(self) -> str:
        """Where it answers; known after `start`."""
        ...

    def start(self) -> None:
        """Begin to start; returns before the engine is ready.

        Raises:
            EngineFailed: it cannot even be launched.
        """
        ...

    def exited(self) -> Exit | None:
        """None while it is there."""
        ...

    def logs(self) -> str:
        """All output so far; "" if it cannot be had."""
        ...

    def log_size(self) -> int:
        """Bytes of output so far: the measure of progress while starting."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What was really launched: pid or image digest, command, port; without secrets."""
        ...

    def stop(self) -> None:
        """Take it down, and wait until it is gone."""
        ...


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free_port(port: int, host: str = "127.0.0.1") -> int:
    """Return `port` if nothing listens there.

    Raises:
        EngineFailed: something does, so the engine would load its model for minutes only to fail.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineFailed(
                Failure(
                    "port_taken",
                    "launch",
                    f"port {port}: {error.strerror}",
                    "stop what listens there, or leave --port out and a free one is taken",
                    flag="port",
                )
            ) from error
    return port


_SECRET_WORDS = ("key", "token", "secret", "password")


def public_command(command: tuple[str, ...]) -> list[str]:
    """The command with the values of secret flags (`--api-key`, ...) replaced, fit for results and logs."""
    shown: list[str] = []
    hide = False
    for word in command:
        flag, separator, _ = word.partition("=")
        is_flag = word.startswith("--")
        secret = is_flag and any(part in _SECRET_WORDS for part in re.split("[-_]", flag.lower()))
        if hide and not is_flag:
            shown.append("***")
        elif secret and separator:
            shown.append(f"{flag}=***")
        else:
            shown.append(without_secrets(word))
        hide = secret and not separator
    return shown


def public_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables without secrets: neither those of secret names (`HF_TOKEN`, ...) nor those in a value."""
    return {name: "***" if _is_secret(name) else without_secrets(value) for name, value in env.items()}


def _is_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name)) or any(part in _SECRET_WORDS for part in name.lower().split("_"))
