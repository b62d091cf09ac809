"""`servecast bench` as a user runs it, on a real engine, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.servers.base import LABEL

ROOT = Path(__file__).parents[2]
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class DockerHost:
    """A Docker engine's address."""

    address: str

    def containers(self) -> list[str]:
        """Names of our containers, running or not."""
        # The Docker SDK is not in the environment where only the engine's own classes are tested.
        import docker

        client = docker.DockerClient(base_url=self.address)
        try:
            return [str(found.name) for found in client.containers.list(all=True, filters={"label": LABEL})]
        finally:
            client.close()


@dataclass(frozen=True, slots=True)
class Engine:
    """Options that launch the engine one way or the other."""

    words: tuple[str, ...]
    docker: DockerHost | None = None

    @property
    def kind(self) -> str:
        """The launch kind."""
        return self.words[1]


@dataclass(slots=True)
class Run:
    """One `servecast bench` under way."""

    process: subprocess.Popen[str]
    out: Path
    engine: Engine
    mark: str  # in the environment of everything that belongs to this run's engine

    def wait(self, seconds: float = 240.0) -> tuple[int, str]:
        """Exit status and output."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        """Wait until something has happened; fail if the command ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"ended early: {self.process.communicate()[0]}")
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError("nothing happened")
            time.sleep(0.05)

    def log(self) -> str:
        """The engine's log so far."""
        path = next(iter(self.out.glob("*.engine.log")), None)
        return path.read_text(errors="replace") if path else ""

    def processes(self) -> list[int]:
        """Live processes of this run's engine, in a container or not."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def nothing_left(self) -> bool:
        """Whether no process and no container of ours is there any more."""
        return not self.processes() and not (self.engine.docker and self.engine.docker.containers())


def start(folder: Path, engine: Engine, serve: str, load: str, *options: str, name: str = "run") -> Run:
    """Write the scenario and start the command on it."""
    scenario = folder / f"{name}.yaml"
    scenario.write_text(
        f"serve: {serve} --load-format dummy --enforce-eager\n"
        f"bench: vllm bench serve --ignore-eos --metric-percentiles 50 {load}\n"
        "gpu: cpu\n"
    )
    out = folder / "out"
    words = [str(scenario), "--result-dir", str(out), *engine.words, *options]
    mark = uuid.uuid4().hex
    for key, value in {**ENV, "SERVECAST_TEST_RUN": mark}.items():
        words += ["--env", f"{key}={value}"]
    env = dict(os.environ)
    if engine.docker is not None:
        env["DOCKER_HOST"] = engine.docker.address
    process = subprocess.Popen(
        [sys.executable, "-c", "from cli import main; main()", "bench", *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Run(process, out, engine, mark)
