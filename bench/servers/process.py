"""An engine as a process of this host, in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from bench.failures import EngineFailed, Failure
from bench.servers.base import (
    MARKER,
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

# No usage reports. And setproctitle, which engines name their workers with, must not write over the
# environment, which is where our marker stands.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "SPT_NOENV": "1"}


class ProcessServer:
    """Runs the command as a list (never through a shell), away from the terminal's signals.

    An engine is many processes. Whoever inherits our marker from the environment is ours, however it was
    forked, and nobody else is touched.
    """

    kind: LaunchKind = "process"

    def __init__(self, spec: LaunchSpec, *, patience: float = 20.0) -> None:
        self._spec = spec
        self._patience = patience  # s from SIGTERM to SIGKILL
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._seen: set[tuple[str, int]] = set()  # pid and start time of every process that was ours
        self._launch_id = uuid.uuid4().hex
        self._port: int | None = None

    @property
    def base_url(self) -> str:
        """The loopback address of the port that was taken."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the command, once started."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Spawn the command.

        Raises:
            EngineFailed: no such program, or the port asked for is taken.
        """
        spec = self._spec
        self._port = require_free_port(spec.port) if spec.port else free_port()
        command = [*spec.command, "--host", "127.0.0.1", "--port", str(self._port)]
        env = {**os.environ, **QUIET, **spec.env, MARKER: self._launch_id}
        make_folder(spec.log_path.parent, "--result-dir")
        with uninterrupted():
            self._log = spec.log_path.open("wb")
            try:
                self._process = subprocess.Popen(  # noqa: S603 - an argument list, never a shell
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            except OSError as error:
                self._close_log()
                raise EngineFailed(
                    Failure(
                        "command_not_found",
                        "launch",
                        f"{spec.command[0]}: {error.strerror}",
                        "install the engine, name its program in the scenario, or use --launch docker",
                    )
                ) from error

    def exited(self) -> Exit | None:
        """The command's exit status once it is over."""
        if self._process is None:
            return Exit(None, "not started")
        code = self._process.poll()
        return None if code is None else Exit(code)

    def logs(self) -> str:
        """The log file's content."""
        return read_log(self._spec.log_path)

    def log_size(self) -> int:
        """The log file's size."""
        return log_size(self._spec.log_path)

    def facts(self) -> Mapping[str, Any]:
        """Pid, port, command, environment on top of ours."""
        return {
            "launch": self.kind,
            "pid": self.pid,
            "port": self._port,
            "command": public_command(self._spec.command),
            "env": public_env(self._spec.env),
        }

    def stop(self) -> None:
        """SIGTERM to all that is ours, SIGKILL after a while, and wait until the last one is gone."""
        with uninterrupted():
            if self._process is not None:
                self._end()
            self._close_log()

    def _end(self) -> None:
        """Ask the command (it takes its workers down in order), then everything, then kill."""
        assert self._process is not None
        for targets, number in (
            ([self._process.pid] if self._process.poll() is None else [], signal.SIGTERM),
            (None, signal.SIGTERM),
        ):
            for pid in self._ours() if targets is None else targets:
                _kill(pid, number)
            if self._wait(self._patience / 2 if self._ours() else 0):
                return
        for _ in range(100):
            for pid in self._ours():
                _kill(pid, signal.SIGKILL)
            if self._wait(0.2):
                return
        pids = ", ".join(map(str, self._ours()))
        raise EngineFailed(
            Failure("not_stopped", "stop", f"pids {pids}", "they survive SIGKILL: the GPU driver hangs")
        )

    def _wait(self, seconds: float) -> bool:
        """Whether all of ours are gone within that time."""
        deadline = time.monotonic() + seconds
        while self._ours():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _ours(self) -> list[int]:
        """Live processes of the command's session, or with our marker: all that it started."""
        assert self._process is not None
        leader = self._process.pid
        alive = {leader} if self._process.poll() is None else set()  # poll reaps: a zombie is not alive
        wanted = f"{MARKER}={self._launch_id}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            # Gone in the meantime, or another user's.
            with contextlib.suppress(OSError):
                state, session, started = _state_session_start((entry / "stat").read_bytes())
                if state == b"Z":
                    continue
                # One that is dying has no environment any more while it still gives its memory back.
                known = (entry.name, started) in self._seen
                if known or session == leader or wanted in (entry / "environ").read_bytes().split(b"\0"):
                    self._seen.add((entry.name, started))
                    alive.add(int(entry.name))
        return sorted(alive)

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
            mask_log(self._spec.log_path)


def _state_session_start(stat: bytes) -> tuple[bytes, int, int]:
    """Fields 3, 6 and 22 of /proc/PID/stat; the name in field 2 may hold spaces and brackets."""
    fields = stat[stat.rindex(b")") + 2 :].split()
    return fields[0], int(fields[3]), int(fields[19])


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
