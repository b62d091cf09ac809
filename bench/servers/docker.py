"""An engine as a Docker container."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Mount

from bench.failures import EngineFailed, Failure, classify
from bench.servers.base import (
    LABEL,
    DockerOptions,
    Exit,
    LaunchKind,
    LaunchSpec,
    free_port,
    public_command,
    public_env,
    require_free_port,
)
from bench.servers.logfile import log_size, mask_log, read_log
from sim.interrupts import uninterrupted
from sim.results_io.atomic import make_folder

INNER_PORT = 8000
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class DockerServer:
    """One labelled container with a name of its own, removed with its anonymous volumes at the end.

    Its output is followed into the log file by a thread, so that it survives the container.
    """

    kind: LaunchKind = "docker"

    def __init__(
        self, spec: LaunchSpec, *, patience: int = 20, client: docker.DockerClient | None = None
    ) -> None:
        if spec.docker is None:
            raise ValueError("a docker launch needs DockerOptions")
        self._spec = spec
        self._options: DockerOptions = spec.docker
        self._patience = patience
        self._given_client = client
        self._client: docker.DockerClient | None = None
        self._name = f"servecast-{_safe(spec.name)}-{uuid.uuid4().hex[:8]}"
        self._container: Container | None = None
        self._follower: threading.Thread | None = None
        self._port: int | None = None
        self._digest: str | None = None
        self._image_id: str | None = None

    @property
    def name(self) -> str:
        """The container's name."""
        return self._name

    @property
    def base_url(self) -> str:
        """The loopback address of the published (or shared) port."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Create and start the container.

        Raises:
            EngineFailed: no Docker, no image, no GPU runtime, port or name taken.
        """
        spec, options = self._spec, self._options
        self._client = self._given_client or connect()
        self._find_image(options.image)
        self._port = require_free_port(spec.port) if spec.port else free_port()
        on_host = options.network == "host"
        command = [
            *spec.command,
            "--host",
            "127.0.0.1" if on_host else "0.0.0.0",  # noqa: S104 - inside the container; published on loopback
            "--port",
            str(self._port if on_host else INNER_PORT),
        ]
        settings: dict[str, Any] = {
            "name": self._name,
            "labels": {LABEL: "1", f"{LABEL}.run": spec.name},
            "environment": {**OFFLINE, **spec.env},
            "mounts": [
                Mount(target, str(source.resolve()), type="bind", read_only=read_only)
                for read_only, mounts in ((True, options.mounts), (False, options.writable))
                for source, target in mounts
            ],
            "stdin_open": False,
            "init": True,  # engines leave zombies behind when their pid 1 does not reap
        }
        if options.entrypoint is not None:
            settings["entrypoint"] = list(options.entrypoint)
        if options.shm_bytes is None:
            settings["ipc_mode"] = "host"
        else:
            settings["shm_size"] = options.shm_bytes
        if options.gpus == "all":
            settings["device_requests"] = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
        elif options.gpus:
            settings["device_requests"] = [
                DeviceRequest(device_ids=list(options.gpus), capabilities=[["gpu"]])
            ]
        if on_host:
            settings["network_mode"] = "host"
        else:
            settings["ports"] = {f"{INNER_PORT}/tcp": ("127.0.0.1", self._port)}
        with uninterrupted():
            try:
                self._container = self._client.containers.create(options.image, command, **settings)
                self._container.start()
            except (APIError, DockerException) as error:
                self._remove()
                raise EngineFailed(_launch_failure(error)) from error
        make_folder(spec.log_path.parent, "--result-dir")
        self._follower = threading.Thread(target=self._follow, name="container-log", daemon=True)
        self._follower.start()

    def exited(self) -> Exit | None:
        """The container's exit status once it is over."""
        if self._container is None:
            return Exit(None, "not started")
        try:
            self._container.reload()
        except NotFound:
            return Exit(None, "the container was removed")
        except (APIError, OSError, DockerException):
            return None  # the daemon is busy: no news of the container
        state = self._container.attrs["State"]
        if state["Status"] in ("exited", "dead"):
            detail = "killed by the kernel for want of memory" if state.get("OOMKilled") else ""
            return Exit(state.get("ExitCode"), detail or state.get("Error", ""))
        return None

    def logs(self) -> str:
        """The log file's content."""
        return read_log(self._spec.log_path)

    def log_size(self) -> int:
        """The log file's size."""
        return log_size(self._spec.log_path)

    def facts(self) -> Mapping[str, Any]:
        """Image with digest, container name, port, command, environment on top of the image's."""
        options = self._options
        return {
            "launch": self.kind,
            "image": options.image,
            "image_digest": self._digest,
            "image_id": self._image_id,
            "container": self._name,
            "network": options.network,
            "shm_bytes": options.shm_bytes,
            "port": self._port,
            "command": public_command(self._spec.command),
            "env": public_env({**OFFLINE, **self._spec.env}),
        }

    def stop(self) -> None:
        """Stop the container, keep its log, remove it."""
        with uninterrupted():
            if self._container is not None:
                with contextlib.suppress(NotFound):
                    try:
                        self._container.stop(timeout=self._patience)
                    except (APIError, OSError, DockerException):
                        self._container.kill()
                if self._follower is not None:
                    self._follower.join(timeout=10)
                    if not self._follower.is_alive():
                        mask_log(self._spec.log_path)
                self._remove()
            if self._client is not None and self._given_client is None:
                self._client.close()
                self._client = None

    def _remove(self) -> None:
        """Remove the container; found by name if creating it failed half-way."""
        container, self._container = self._container, None
        if container is None and self._client is not None:
            with contextlib.suppress(DockerException):
                container = self._client.containers.get(self._name)
        if container is not None:
            try:
                container.remove(force=True, v=True)
            except NotFound:
                return
            except APIError as error:
                if error.status_code != 409:  # 409: its removal is already under way
                    raise EngineFailed(
                        Failure("not_stopped", "stop", str(error), f"docker rm -f {self._name}")
                    ) from error

    def _follow(self) -> None:
        assert self._container is not None
        with self._spec.log_path.open("wb") as log, contextlib.suppress(DockerException, OSError, ValueError):
            for part in self._container.logs(stream=True, follow=True, stdout=True, stderr=True):
                log.write(part)
                log.flush()

    def _find_image(self, name: str) -> None:
        """Record the image's digest; pull it if it is not here.

        Raises:
            EngineFailed: it is not here and cannot be pulled.
        """
        assert self._client is not None
        try:
            image = self._client.images.get(name)
        except ImageNotFound:
            try:
                image = self._client.images.pull(name)
            except (APIError, DockerException) as error:
                fix = "not on this host and not to be pulled: check its name and tag, or docker load it"
                raise EngineFailed(Failure("image_missing", "launch", f"{name}: {error}", fix)) from error
        digests = image.attrs.get("RepoDigests") or []
        self._digest = digests[0] if digests else None
        self._image_id = image.id


def connect() -> docker.DockerClient:
    """A client of the Docker engine that the environment names.

    Raises:
        EngineFailed: none answers.
    """
    try:
        _knock(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
        client = docker.from_env(timeout=120)
        client.ping()
    except (DockerException, OSError) as error:
        reason = str(error).splitlines()[0][:200]
        fix = "start Docker, join the group docker, or set DOCKER_HOST; or use --launch process"
        raise EngineFailed(Failure("no_docker", "launch", reason, fix)) from error
    return client


def _knock(host: str) -> None:
    """Connect once: the SDK leaks its socket where nothing listens, and takes long to say so.

    Raises:
        OSError: nothing listens.
    """
    scheme, _, path = host.partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except OSError as error:
                raise OSError(f"{host}: {error.strerror or error}") from error


def leftovers(client: docker.DockerClient) -> list[str]:
    """Names of containers that an earlier servecast left behind (it was killed with SIGKILL)."""
    return [str(found.name) for found in client.containers.list(all=True, filters={"label": LABEL})]


def image_env(client: docker.DockerClient, name: str) -> list[str] | None:
    """The environment that an image sets, as NAME=VALUE; None if it is not on this host."""
    try:
        config = client.images.get(name).attrs.get("Config") or {}
    except DockerException:
        return None
    return list(config.get("Env") or [])


def _safe(name: str) -> str:
    kept = "".join(char if char.isalnum() or char in "_.-" else "-" for char in name.lower())
    return kept.strip("-._")[:40] or "run"


def _launch_failure(error: Exception) -> Failure:
    text = str(getattr(error, "explanation", "") or error)
    failure = classify(text, phase="launch")
    if failure.kind.startswith("engine_exited"):
        return Failure("docker_refused", "launch", text[:400], "Docker refused to start the container")
    return failure
