"""Questions to a Docker engine that answers its ping, but perhaps not these.

A proxy in front of its socket lets some through only, and a busy engine takes its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from docker.errors import DockerException

from bench.failures import EngineFailed, Failure

_Answer = TypeVar("_Answer")


def asked(question: Callable[[], _Answer]) -> _Answer:
    """The answer to a question.

    Raises:
        EngineFailed: it was refused, or not answered in time.
    """
    try:
        return question()
    except (DockerException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        fix = "see that `docker version`, `docker info` and `docker ps -a` work for this user"
        raise EngineFailed(Failure("docker_silent", "launch", reason, fix)) from error
