"""A real vLLM and a real Docker engine for the tests, or a clear word why there is none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.bench_runs import DockerHost, Engine
from tests.real.dummy_model import write

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMAGE = "servecast-test/python:base"
# Linux hands out AMX tiles only on request (arch_prctl ARCH_REQ_XCOMP_PERM); .pth files are not read from
# PYTHONPATH, sitecustomize is.
AMX = "import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, 18)\n"


def unavailable(reason: str) -> None:
    """Fail loudly in CI, where these tests must run; skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """The environment with vLLM for the CPU that `./dev test-real` makes."""
    venv = Path(os.environ.get("SERVECAST_VLLM_VENV", ROOT / ".venv-vllm"))
    if not (venv / "bin" / "vllm").exists():
        unavailable(f"no vLLM in {venv}: run ./dev test-real")
    return venv


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, without weights."""
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    """A Docker engine with the base image, of the tests' own unless DOCKER_HOST names one."""
    script, state = HERE / "docker_engine.sh", ROOT / ".cache" / "docker-engine"
    given = os.environ.get("DOCKER_HOST")
    verbs = ["image"] if given else ["start", "image"]
    address = given or ""
    for verb in verbs:
        done = subprocess.run(
            ["bash", str(script), verb, str(state)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            subprocess.run(["bash", str(script), "stop", str(state)], check=False)
            unavailable(f"docker_engine.sh {verb}: {done.stderr.strip()[-500:] or done.returncode}")
        if "DOCKER_HOST=" in done.stdout:
            address = done.stdout.strip().rpartition("DOCKER_HOST=")[2]
    yield DockerHost(address)
    if not given:
        subprocess.run(["bash", str(script), "stop", str(state)], check=True)


@pytest.fixture(scope="session")
def process_engine(vllm_venv: Path) -> Engine:
    """How to launch vLLM as a process."""
    return Engine(("--launch", "process", "--program", str(vllm_venv / "bin" / "vllm")))


@pytest.fixture(scope="session")
def docker_engine(
    vllm_venv: Path, docker_host: DockerHost, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    """How to launch vLLM in a container: the environment's packages are mounted into the base image."""
    amx = tmp_path_factory.mktemp("amx")
    (amx / "sitecustomize.py").write_text(AMX)
    site = next((vllm_venv / "lib").glob("python3.*")) / "site-packages"
    words = ["--launch", "docker", "--image", IMAGE, "--gpus", "none", "--shm-size", "256m"]
    words += ["--program", "/usr/bin/python3 -m vllm.entrypoints.cli.main"]
    words += ["--mount", f"{site}:/site", "--mount", f"{amx}:/opt/amx"]
    words += ["--env", "PYTHONPATH=/opt/amx:/site"]
    return Engine(tuple(words), docker_host)
