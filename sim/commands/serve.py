"""A pasted launch command of vLLM or SGLang -> `ServeCommand`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from sim.commands.docker import ContainerRun, parse_docker_run
from sim.commands.flags import FlagTable, GivenFlag, load_table, normalise, read_flags
from sim.commands.shell import Words, split_commands
from sim.errors import BadInput
from sim.paths import file_text
from sim.provenance import Note
from sim.scenario import EngineConfig, EngineName
from sim.secrets import SECRET_NAME
from sim.yamltext import load_yaml

FIELD = "--serve"
_OTHER: dict[EngineName, EngineName] = {"vllm": "sglang", "sglang": "vllm"}
MODEL_FLAG: dict[EngineName, str] = {"vllm": "--model", "sglang": "--model-path"}
_MODULES: dict[str, EngineName] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "sglang.launch_server": "sglang",
}
_CLI_MODULES: dict[str, EngineName] = {"vllm.entrypoints.cli.main": "vllm", "sglang.cli.main": "sglang"}
_SCRIPTS = re.compile(r"(?:^|/)(?:vllm/.*api_server\.py|sglang/launch_server\.py|launch_server\.py)$")
_TAG_VERSION = re.compile(r"^v?(\d+\.\d+(?:\.\d+)?)(?:[.\-+_].*)?$")
_KEPT_ENV = re.compile(
    r"^(VLLM|SGLANG|SGL|NCCL|CUDA|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TORCH|PYTORCH|OMP_NUM_THREADS|FLASHINFER)"
)


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """One launch command, read but not yet resolved against a model and a GPU.

    Attributes:
        engine: whose command it is.
        model: model name or path as given; None if the command names none.
        given: the flags in order, each once (the last of a repeated one), the config file's first.
        env: the environment variables that matter to the engine; secrets are left out.
        image: container image, if it is a `docker run`.
        version: engine version as the image tag tells it, or "".
        entry: "vllm serve", "python -m …", or "docker image".
        notes: what was skipped or read leniently.
    """

    engine: EngineName
    model: str | None
    given: tuple[GivenFlag, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    version: str = ""
    entry: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def flags(self) -> tuple[tuple[str, str | None], ...]:
        """(canonical flag, value or None) of every flag; secrets are left out."""
        return tuple((g.spelling, g.text) for g in self.given if not g.flag.secret)

    def get(self, name: str) -> GivenFlag | None:
        """The flag `name` (canonical, undotted) if it was given."""
        return next((g for g in self.given if g.flag.name == name and not g.path), None)

    def with_flags(self, extra: Iterable[GivenFlag]) -> ServeCommand:
        """A copy in which `extra` replaces flags of the same name."""
        added = list(extra)
        names = {(g.flag.name, g.path) for g in added}
        kept = [g for g in self.given if (g.flag.name, g.path) not in names]
        return replace(self, given=(*kept, *(g for g in added if not g.absent)))


def table(engine: EngineName) -> FlagTable:
    """The flag table of an engine."""
    return load_table(f"engines/{engine}/flags.json")


def parse_serve_command(text: str) -> ServeCommand:
    """Read a launch command as it was pasted.

    Raises:
        BadInput: no engine in it, an unknown flag (named with the nearest), a missing value, an unreadable
            `--config` file.
    """
    found: list[ServeCommand] = []
    others: list[str] = []
    for command in split_commands(text, FIELD):
        parsed = _parse_words(command)
        if parsed is not None:
            found.append(parsed)
        else:
            others.append(command.words[0])
    if not found:
        shown = " ".join(text.split())
        raise BadInput(
            FIELD,
            shown if len(shown) < 80 else shown[:79] + "…",
            "no engine in it: expected `vllm serve MODEL …`, `python -m sglang.launch_server …` "
            "or `docker run … IMAGE …`",
        )
    if len(found) > 1:
        raise BadInput(FIELD, None, f"holds {len(found)} engine commands; give one")
    (only,) = found
    if not others:
        return only
    left = Note(
        "info", FIELD, f"only the engine's command is read, not what else the text runs: {', '.join(others)}"
    )
    return replace(only, notes=(*only.notes, left))


def serve_from_words(
    engine: EngineName,
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    image: str | None = None,
    version: str = "",
    entry: str = "",
    extra_notes: Iterable[Note] = (),
) -> ServeCommand:
    """Read an engine's own argument list (model and flags)."""
    flags, positional, notes = read_flags(words, table(engine), lambda: table(_OTHER[engine]))
    config = next((g for g in flags if g.flag.name == "--config"), None)
    if config is not None:
        from_file, file_positional = _config_flags(config.words[0], engine)
        named = {(g.flag.name, g.path) for g in flags}
        flags = [g for g in from_file if (g.flag.name, g.path) not in named] + [
            g for g in flags if g is not config
        ]
        positional = positional or file_positional
    if len(positional) > 1:
        raise BadInput(FIELD, positional[1], f"is not a flag; the model is already {positional[0]!r}")
    model_flag = MODEL_FLAG[engine]
    named_model = next((g.text for g in flags if g.flag.name == model_flag), None)
    model = positional[0] if positional else named_model
    if positional and named_model not in (None, positional[0]):
        raise BadInput(model_flag, named_model, f"differs from the positional model {positional[0]!r}")
    if model is not None and model.startswith("$"):
        raise BadInput(FIELD, model, "is a shell variable that the text does not set; write the model's name")
    secrets = [g.flag.name for g in flags if g.flag.secret]
    notes += [Note("info", name, "a secret: left out of the scenario") for name in secrets]
    return ServeCommand(
        engine=engine,
        model=model,
        given=tuple(g for g in flags if g.flag.name != model_flag and not g.flag.secret and not g.absent),
        env=_keep_env(env or {}),
        image=image,
        version=version,
        entry=entry,
        notes=(*extra_notes, *notes),
    )


def launch_words(engine: EngineConfig) -> list[str]:
    """The flags of a resolved engine as an argument list, without the model (for a process launch)."""
    flags = table(engine.name)
    words: list[str] = []
    for spelling, value in engine.given:
        words.append(spelling)
        if value is not None:
            flag = flags.find(spelling.partition(".")[0])
            many = flag is not None and flag.kind == "list"
            words += value.split() if many else [value]
    return words


def version_of_tag(image: str) -> str:
    """`vllm/vllm-openai:v0.28.0-cu129` -> "0.28.0"; "" if the tag names no version."""
    _, colon, tag = image.rpartition("/")[2].partition(":")
    match = _TAG_VERSION.match(tag.partition("@")[0]) if colon else None
    return match.group(1) if match else ""


def _parse_words(command: Words) -> ServeCommand | None:
    words = list(command.words)
    run = parse_docker_run(words)
    if run is not None:
        return _parse_container(run)
    for index in range(len(words)):
        entry = _entry_at(words, index)
        if entry is not None:
            engine, start, name = entry
            return serve_from_words(engine, words[start:], env=command.env, entry=name)
        if words[index] in {"-c", "-lc"} and index + 1 < len(words) and " " in words[index + 1]:
            inner = parse_serve_command(words[index + 1])
            return replace(inner, env={**_keep_env(command.env), **inner.env})
    return None


def _parse_container(run: ContainerRun) -> ServeCommand:
    version = version_of_tag(run.image)
    words = [*run.entrypoint, *run.args]
    left = _left_to_docker(run)
    inner = _parse_words(Words(tuple(words), run.env))
    if inner is not None:
        return replace(
            inner,
            env={**_keep_env(run.env), **inner.env},
            image=run.image,
            version=version,
            entry="docker " + inner.entry,
            notes=(*inner.notes, *left),
        )
    lowered = run.image.lower()
    engine: EngineName | None = "sglang" if "sglang" in lowered else "vllm" if "vllm" in lowered else None
    if engine is None:
        raise BadInput(FIELD, run.image, "the name does not tell the engine; write its command after it")
    return serve_from_words(
        engine,
        run.args,
        env=run.env,
        image=run.image,
        version=version,
        entry="docker image",
        extra_notes=left,
    )


def _left_to_docker(run: ContainerRun) -> list[Note]:
    """Docker's own options, which the scenario does not keep."""
    if not run.options:
        return []
    text = (
        "docker's own, not in the scenario: the engine's flags and --gpu-count say what is predicted, and "
        "`servecast bench` has --gpus, --mount, --env, --network and --shm-size"
    )
    return [Note("info", ", ".join(run.options), text)]


def _entry_at(words: Sequence[str], index: int) -> tuple[EngineName, int, str] | None:
    """(engine, index of the first argument, name) if an engine's command begins at `index`."""
    name = Path(words[index]).name
    following = words[index + 1] if index + 1 < len(words) else ""
    if name in {"vllm", "sglang"}:
        if following == "serve":
            return ("vllm" if name == "vllm" else "sglang"), index + 2, f"{name} serve"
        if index == 0 and following:
            raise BadInput(FIELD, f"{name} {following}", f"is not a launch command; expected `{name} serve`")
    if words[index] == "-m" and following in _MODULES:
        return _MODULES[following], index + 2, f"python -m {following}"
    if words[index] == "-m" and following in _CLI_MODULES and words[index + 2 : index + 3] == ["serve"]:
        return _CLI_MODULES[following], index + 3, f"python -m {following} serve"
    if _SCRIPTS.search(words[index]):
        return ("sglang" if "launch_server" in name else "vllm"), index + 1, words[index]
    return None


def _config_flags(path: str, engine: EngineName) -> tuple[list[GivenFlag], list[str]]:
    """Read a `--config` YAML: keys are flag names, lists and mappings become words and JSON."""
    try:
        raw = load_yaml(file_text(path))
    except OSError as error:
        raise BadInput("--config", path, f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise BadInput("--config", path, "is not YAML") from None
    if not isinstance(raw, Mapping):
        raise BadInput("--config", path, "must hold `flag: value` lines")
    words: list[str] = []
    for key, value in raw.items():
        words += mapping_words(str(key), value, table(engine))
    flags, positional, _ = read_flags(words, table(engine), lambda: table(_OTHER[engine]))
    return flags, positional


def mapping_words(key: str, value: object, flags: FlagTable) -> list[str]:
    """One `key: value` of a YAML mapping as command-line words.

    Raises:
        BadInput: an unknown key, or a list where one value belongs.
    """
    if key in {"model_tag", "model-tag"}:
        return [str(value)]
    spelling = normalise("--" + key.lstrip("-"))
    flag = flags.find(spelling.partition(".")[0])
    if flag is None:
        raise flags.unknown(spelling)
    if value is None:
        return []
    if flag.kind in {"bool", "switch"} and isinstance(value, bool):
        if value or flag.kind == "switch":
            return [spelling] if value else []
        return [flag.name if flags.is_negative(spelling) else flag.negative]
    if isinstance(value, Mapping) or (isinstance(value, list) and flag.kind == "json"):
        return [spelling, json.dumps(value)]
    if isinstance(value, list):
        if flag.kind != "list":
            raise BadInput(spelling, str(value), "takes one value, not a list")
        return [spelling, *map(str, value)]
    if isinstance(value, str) and flag.kind == "list":
        return [spelling, *shlex.split(value)]
    return [f"{spelling}={value}"]


def _keep_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to the engine, without secrets."""
    return {k: v for k, v in env.items() if _KEPT_ENV.match(k) and not SECRET_NAME.search(k)}
