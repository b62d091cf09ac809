"""What the engines' argument rules share: versions, resolved values with origins, notes on flags."""

from __future__ import annotations

import re
from typing import Any

from sim.commands.flags import Flag
from sim.commands.serve import ServeCommand, table
from sim.errors import BadInput
from sim.provenance import Note, Origin, Sourced


def version_key(version: str) -> tuple[int, int, int]:
    """(major, minor, patch) of a version text; a missing part counts as 0, a suffix is ignored."""
    parts = [re.match(r"\d*", part) for part in version.lstrip("v").split(".")]
    major, minor, patch, *_ = (*(int(p.group() or 0) if p else 0 for p in parts), 0, 0, 0)
    return major, minor, patch


def nearest_version(asked: str, known: tuple[str, ...]) -> str:
    """The known version closest to `asked`; of two equally close the older."""

    def number(version: str) -> int:
        major, minor, patch = version_key(version)
        return (major * 1000 + minor) * 1000 + min(patch, 999)

    def distance(candidate: str) -> tuple[int, int]:
        return abs(number(asked) - number(candidate)), number(candidate)

    return min(known, key=distance)


class Values:
    """Resolved arguments under construction: each with its origin and rule."""

    def __init__(self) -> None:
        self.items: dict[str, Sourced[Any]] = {}
        self.notes: list[Note] = []

    def __getitem__(self, key: str) -> Any:
        return self.items[key].value

    def is_given(self, key: str) -> bool:
        """Whether the user wrote this value."""
        return self.items[key].origin is Origin.GIVEN

    def choose(self, key: str, given: Any, default: Any, rule: str) -> Any:
        """Take the given value, or the default with its rule where nothing was given; return the result."""
        if given is not None:
            self.items[key] = Sourced(given, Origin.GIVEN)
        else:
            self.items[key] = Sourced(default, Origin.DEFAULT, rule)
        return self.items[key].value

    def derive(self, key: str, value: Any, rule: str) -> Any:
        """Set a value that the engine computes from others."""
        self.items[key] = Sourced(value, Origin.DERIVED, rule)
        return value

    def warn(self, subject: str, text: str) -> None:
        """Add a warning."""
        self.notes.append(Note("warning", subject, text))

    def inform(self, subject: str, text: str) -> None:
        """Add a piece of information."""
        self.notes.append(Note("info", subject, text))

    def not_modelled(self, subject: str, effect: str) -> None:
        """Name something that the engine does and the simulation does not."""
        self.notes.append(Note("not-modelled", subject, effect))


def flag_notes(command: ServeCommand, asked: str, program: str) -> list[Note]:
    """Notes on the flags that are known but not modelled, or of which it is unknown whether `asked` has them.

    Raises:
        BadInput: a flag that this version does not have (`since`, `until` of the table).
    """
    notes: list[Note] = []
    read_from = table(command.engine).version
    for item in command.given:
        flag = item.flag
        if flag.since and version_key(asked) < version_key(flag.since):
            if version_key(asked)[:2] <= version_key(read_from)[:2]:
                hint = f"{program} {asked} has no such flag; it came after {read_from}"
                raise BadInput(flag.name, None, hint)
            notes.append(
                Note("warning", flag.name, f"is in {flag.since}; whether {asked} has it is not known")
            )
        if _gone(flag, asked):
            others = [i.flag.name for i in command.given if _gone(i.flag, asked) and i.flag is not flag]
            also = f" (so are {', '.join(others)})" if others else ""
            raise BadInput(
                flag.name,
                None,
                f"{program} {asked} has no such flag (gone by {flag.until}: {flag.effect}){also}; "
                "remove it, or name the engine version",
            )
        if flag.role == "not-modelled" and not item.negated:
            notes.append(Note("not-modelled", item.spelling, flag.effect))
    return notes


def _gone(flag: Flag, asked: str) -> bool:
    return bool(flag.until) and version_key(asked) >= version_key(flag.until)


# Variables that are read, here or in the memory account; and those without bearing on performance.
_READ_ENV = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    "VLLM_USE_V2_MODEL_RUNNER",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    "SGLANG_INIT_NEW_TOKEN_RATIO",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
}
_IDLE_ENV = re.compile(
    r"^(VLLM|SGLANG|SGL)_(LOG|NO_USAGE|DO_NOT|CACHE_ROOT|CONFIG_ROOT|USE_MODELSCOPE|HOST_IP|PORT)"
)


def env_notes(command: ServeCommand) -> list[Note]:
    """Notes on the engine's environment variables that the simulation does not follow."""
    return [
        Note("not-modelled", name, "an environment variable of the engine; its effect is not simulated")
        for name in command.env
        if re.match(r"(VLLM|SGLANG|SGL)_", name) and name not in _READ_ENV and not _IDLE_ENV.match(name)
    ]
