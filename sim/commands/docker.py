"""`docker run … IMAGE args`: find the image, its arguments and the environment; name docker's own flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.errors import BadInput

_PROGRAMS = {"docker", "podman", "nerdctl"}
# docker run's options that take no value (docker CLI 28); every other option takes one.
_SWITCHES = {
    "--detach",
    "--disable-content-trust",
    "--help",
    "--init",
    "--interactive",
    "--no-healthcheck",
    "--oom-kill-disable",
    "--privileged",
    "--publish-all",
    "--quiet",
    "--read-only",
    "--rm",
    "--sig-proxy",
    "--tty",
}
_SHORT_SWITCHES = set("ditPq")
# What the container itself is about, and nothing that runs in it.
_HOUSEKEEPING = {"--name", "--label", "-l", "--restart", "--publish", "-p", "--pull", "--hostname", "-h"}


@dataclass(frozen=True, slots=True)
class ContainerRun:
    """The parts of a `docker run` that matter: image, overriding entry point, arguments, environment.

    `options` are the names of docker's other options that change what runs in it, e.g. "--gpus", once each.
    """

    image: str
    entrypoint: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]
    options: tuple[str, ...] = ()


def parse_docker_run(words: Sequence[str]) -> ContainerRun | None:
    """Read a `docker run` or `docker container run`; None if `words` is none.

    Raises:
        BadInput: no image.
    """
    start = _run_index(words)
    if start is None:
        return None
    env: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ()
    others: dict[str, None] = {}
    index = start
    while index < len(words) and words[index].startswith("-"):
        name, equals, value = words[index].partition("=")
        index += 1
        if name in _SWITCHES or (_is_short(name) and set(name[1:]) <= _SHORT_SWITCHES):
            continue
        if _is_short(name) and len(name) > 2:
            name, value, equals = name[:2], words[index - 1][2:].lstrip("="), "="
        if not equals:
            value = words[index] if index < len(words) else ""
            index += 1
        if name in {"-e", "--env"} and "=" in value:
            key, _, content = value.partition("=")
            env[key] = content
        elif name == "--entrypoint":
            entrypoint = tuple(shlex.split(value))
        elif name not in _HOUSEKEEPING and name not in {"-e", "--env"}:
            others[name] = None
    if index >= len(words):
        raise BadInput("--serve", " ".join(words[:start]), "no image in it")
    return ContainerRun(words[index], entrypoint, tuple(words[index + 1 :]), env, tuple(others))


def _is_short(name: str) -> bool:
    return len(name) > 1 and name[0] == "-" and name[1] != "-"


def _run_index(words: Sequence[str]) -> int | None:
    """Index of the first word after `docker run`."""
    for index, word in enumerate(words):
        if Path(word).name in _PROGRAMS:
            rest = list(words[index + 1 : index + 3])
            if rest[:1] == ["run"]:
                return index + 2
            if rest == ["container", "run"]:
                return index + 3
    return None
