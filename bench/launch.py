"""From a scenario to the command that serves it here: as a process, in a container, or somewhere else."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from bench.hf_cache import cache_root, find_model, inner_cache
from bench.probe.reading import FILE_VARIABLE, FOLDER, SCHEDULER
from bench.servers.base import DockerOptions, LaunchKind, LaunchSpec, Server
from bench.servers.process import ProcessServer
from bench.servers.url import UrlServer
from sim.build import ScenarioSource
from sim.commands.serve import launch_words
from sim.errors import BadInput
from sim.provenance import Note
from sim.scenario import EngineName, Scenario

_PROGRAMS: Mapping[EngineName, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "sglang": ("python3", "-m", "sglang.launch_server"),
}
_IMAGES: Mapping[EngineName, str] = {
    "vllm": "vllm/vllm-openai:v{version}",
    "sglang": "lmsysorg/sglang:v{version}",
}
# Ours to choose, or meaningless for a launch by us.
_OURS = {"--host", "--port"}
_INNER_CACHE = "/root/.cache/huggingface"
_INNER_PROBE = "/opt/servecast-probe"
_INNER_OUT = "/opt/servecast-out"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to run the engine, beside what the scenario says of it.

    Attributes:
        kind: None chooses: url if there is a base_url, docker if an image is named, else process.
        image: None takes the one in the serve command, or the engine's own release image.
        program: words to run in place of `vllm` or `python3 -m sglang.launch_server`.
        env: on top of the scenario's.
        mounts: more read-only mounts (host folder, path in the container).
        shm_bytes: of the container; None shares the host's.
        gpus: None: all if this host has any.
        probe: note every scheduling step (vLLM only).
        stall_timeout: give up a start after this long without progress [s].
        stop_timeout: from asking an engine to go to killing it [s].
        memory_timeout: for GPU memory to come back after a stop, before the host counts as dirty [s].
    """

    kind: LaunchKind | None = None
    base_url: str | None = None
    image: str | None = None
    program: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[tuple[Path, str], ...] = ()
    network: Literal["bridge", "host"] = "bridge"
    shm_bytes: int | None = None
    gpus: Literal["all", "none"] | tuple[str, ...] | None = None
    probe: bool = False
    stall_timeout: float = 900.0
    stop_timeout: float = 20.0
    memory_timeout: float = 60.0
    api_key_env: str = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that can be started, and what it will be called.

    `steps_path` is where the step probe writes, as this host sees it; None without the probe.
    """

    server: Server
    kind: LaunchKind
    model_id: str
    log_path: Path | None
    steps_path: Path | None
    notes: tuple[Note, ...]


def choose_kind(source: ScenarioSource, options: LaunchOptions) -> LaunchKind:
    """The kind asked for, or the one that the other options imply.

    Raises:
        BadInput: the options contradict each other.
    """
    if options.kind == "url" and options.base_url is None:
        raise BadInput("--base-url", None, "--launch url needs it: where does the server answer?")
    if options.base_url is not None and options.kind not in (None, "url"):
        raise BadInput("--base-url", options.base_url, f"does not go with --launch {options.kind}")
    kind, elsewhere = options.kind, source.bench.base_url
    if kind is None and options.base_url is None and elsewhere is not None and not _is_here(elsewhere):
        hint = "names a running server: give it as servecast's --base-url to load that one, or say --launch "
        raise BadInput("--bench --base-url", elsewhere, hint + "process or docker to start an engine here")
    if kind is None:
        named = options.image or source.serve.image
        kind = "url" if options.base_url is not None else "docker" if named else "process"
    if kind != "docker":
        _refuse_container_options(options, "--base-url" if kind == "url" else "a process")
    return kind


def _is_here(url: str) -> bool:
    """Whether an address is this host's own, as the client's default and that of an engine started here."""
    return urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}


def _refuse_container_options(options: LaunchOptions, instead: str) -> None:
    gpus = options.gpus if options.gpus is None or isinstance(options.gpus, str) else ",".join(options.gpus)
    mount = None if not options.mounts else str(options.mounts[0][0])
    network = None if options.network == "bridge" else options.network
    given = {
        "--gpus": gpus,
        "--mount": mount,
        "--shm-size": options.shm_bytes,
        "--network": network,
        "--image": options.image,
    }
    for flag, value in given.items():
        if value is not None:
            hint = f"is of a container and means nothing to {instead}: leave it out, or use --launch docker"
            raise BadInput(flag, value, hint)


def prepare(
    source: ScenarioSource,
    scenario: Scenario,
    options: LaunchOptions,
    folder: Path,
    stem: str,
    has_gpus: bool,
) -> Launch:
    """Make the server of a scenario; nothing is started.

    Args:
        folder: of the results; logs go there.
        stem: of this engine's files.
        has_gpus: whether this host has GPUs to hand on.

    Raises:
        BadInput: options that contradict each other, a port that is none, or a model cache that is mounted
            where the engine does not look.
    """
    kind = choose_kind(source, options)
    model_id = served_name(source)
    if kind == "url":
        assert options.base_url is not None
        if options.probe:
            raise BadInput("--probe", None, "cannot be put into a server that is already running")
        server: Server = UrlServer(options.base_url, api_key_env=options.api_key_env)
        return Launch(server, kind, model_id, None, None, ())
    flags, port, notes = _flags(scenario)
    env = {**scenario.engine.env, **options.env}
    log_path, steps_path = folder / f"{stem}.engine.log", None
    spec = LaunchSpec(scenario.engine.name, (), model_id, log_path, env, port, name=stem)
    if options.probe:
        if scenario.engine.name != "vllm":
            raise BadInput("--probe", None, "knows vLLM only")
        if any(word.startswith("--scheduler-cls") for word in flags):
            raise BadInput("--probe", None, "takes the place of --scheduler-cls, which the scenario sets")
        steps_path = (folder / f"{stem}.steps.jsonl").absolute()
        flags = [*flags, "--scheduler-cls", SCHEDULER]
    if kind == "process":
        if options.probe:
            inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
            env = _with_probe({**inherited, **env}, str(FOLDER), str(steps_path))
        command = _command(scenario.engine.name, options.program, source.model, flags)
        server = ProcessServer(replace(spec, command=tuple(command), env=env), patience=options.stop_timeout)
        return Launch(server, kind, model_id, log_path, steps_path, tuple(notes))
    return _container(source, scenario, options, spec, flags, notes, steps_path, has_gpus)


def _container(
    source: ScenarioSource,
    scenario: Scenario,
    options: LaunchOptions,
    spec: LaunchSpec,
    flags: list[str],
    notes: list[Note],
    steps_path: Path | None,
    has_gpus: bool,
) -> Launch:
    from bench.servers.docker import DockerServer  # loads the Docker SDK

    engine = scenario.engine
    image = options.image or source.serve.image
    if image is None:
        image = _IMAGES[engine.name].format(version=engine.asked_version or engine.version)
        notes.append(Note("info", "--image", f"not named: {image}"))
    mounts = list(options.mounts)
    model, env = source.model, dict(spec.env)
    local = Path(model).expanduser()
    if any(Path(target) == local for _, target in mounts):
        pass  # it is a path in the container already
    elif local.is_dir():
        # The folder as it is named outside, so that it serves under the same name.
        mounts.append((local, f"/models/{local.resolve().name}"))
        model = f"/models/{local.resolve().name}"
    elif find_model(model).folder is not None:
        cache, home = cache_root(), env.setdefault("HF_HOME", _INNER_CACHE)
        if not any(source in (cache, cache.parent) for source, _ in mounts):
            mounts.append((cache, f"{home.rstrip('/')}/hub"))
        if (problem := inner_cache(tuple(mounts), env, cache)) is not None:
            raise BadInput("--mount", None, problem)
    writable: list[tuple[Path, str]] = []
    if steps_path is not None:
        mounts.append((FOLDER, _INNER_PROBE))
        writable.append((steps_path.parent, _INNER_OUT))
        env = _with_probe(env, _INNER_PROBE, f"{_INNER_OUT}/{steps_path.name}")
    if not any(word.partition("=")[0] == "--served-model-name" for word in flags):
        flags = [*flags, "--served-model-name", spec.model_id]
    command = _command(engine.name, options.program, model, flags)
    gpus: Literal["all"] | tuple[str, ...] | None = "all" if has_gpus else None
    if options.gpus is not None:
        gpus = None if options.gpus == "none" else options.gpus
    program = options.program or _PROGRAMS[engine.name]
    docker = DockerOptions(
        image=image,
        network=options.network,
        shm_bytes=options.shm_bytes,
        gpus=gpus,
        mounts=tuple(mounts),
        writable=tuple(writable),
        entrypoint=program,
    )
    spec = replace(spec, command=tuple(command[len(program) :]), env=env, docker=docker)
    server = DockerServer(spec, patience=math.ceil(options.stop_timeout))
    return Launch(server, "docker", spec.model_id, spec.log_path, steps_path, tuple(notes))


def served_name(source: ScenarioSource) -> str:
    """The name that the server answers to: `--served-model-name`'s first, else the model as given."""
    given = source.serve.get("--served-model-name")
    if given is not None and given.text:
        return given.text.split()[0]
    return source.model


def _command(engine: EngineName, program: tuple[str, ...] | None, model: str, flags: list[str]) -> list[str]:
    words = list(program or _PROGRAMS[engine])
    return [*words, "serve", model, *flags] if engine == "vllm" else [*words, "--model-path", model, *flags]


def _flags(scenario: Scenario) -> tuple[list[str], int | None, list[Note]]:
    """The scenario's flags without host and port, the port it asks for, and what was added."""
    given = scenario.engine.given
    kept = tuple((flag, value) for flag, value in given if flag not in _OURS)
    port = next((value for flag, value in given if flag == "--port"), None)
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise BadInput("--port", port, "must be a port number")
    words = launch_words(replace(scenario.engine, given=kept))
    notes: list[Note] = []
    if scenario.engine.name == "sglang" and "--enable-metrics" not in words:
        words.append("--enable-metrics")
        notes.append(Note("info", "--enable-metrics", "added: without it SGLang has no /metrics"))
    return words, None if port is None else int(port), notes


def _with_probe(env: Mapping[str, str], folder: str, steps: str) -> dict[str, str]:
    path = f"{folder}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else folder
    return {**env, "PYTHONPATH": path, FILE_VARIABLE: steps}


def split_program(text: str) -> tuple[str, ...]:
    """A program with leading words, as in "python3 -m vllm.entrypoints.cli.main".

    Raises:
        BadInput: empty, or quotes that do not close.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput("--program", text, str(error)) from None
    if not words:
        raise BadInput("--program", text, "names no program")
    return words
