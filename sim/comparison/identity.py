"""Whether two results describe the same thing, by what they say of themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.comparison.facts import fact, followed_times, load_of, pace_of, same_rate, tells_load, tells_pace
from sim.secrets import SECRET_NAME

__all__ = [
    "Difference",
    "differences",
    "fact",
    "followed_times",
    "load_of",
    "minor",
    "setup_differences",
]

# Facts that must agree; a side that does not tell one is not held to it.
SUBJECT = ("engine", "engine_version", "model_sha", "model", "gpu", "gpu_sha", "gpu_count", "image_digest")
LOAD = ("request_rate", "max_concurrency", "burstiness")
MANY = 8  # values of a list that is told in full
# Flags that change nothing of what is measured: where the server listens, what it is called, what it logs.
_INERT = frozenset(("host", "port", "served_model_name", "uvicorn_log_level", "log_level"))
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact on which two results differ; `fatal` ones forbid a comparison."""

    key: str
    predicted: str
    measured: str
    fatal: bool

    def told(self, ours: str = "predicted", theirs: str = "measured") -> str:
        """The difference in words, the sides called as given."""
        return f"{self.key} is {_short(self.predicted)} {ours} but {_short(self.measured)} {theirs}"


def _short(value: str) -> str:
    """A list of many values by its ends and their number."""
    parts = value.strip("[]()").split(", ")
    if value[:1] not in "[(" or len(parts) <= MANY:
        return value
    return f"{value[0]}{', '.join(parts[:3])}, … {parts[-1]}{value[-1]} ({len(parts)} values)"


def differences(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What two identities disagree on, in a fixed order; facts that only one of them has are passed over.

    Versions that differ in the third place rarely change a scheduler, and a name that a server was told to
    serve a model under need not be the model's: those are not fatal.
    """
    found = setup_differences(predicted, measured)
    both_tell = tells_load(predicted) and tells_load(measured)
    for key in (*SUBJECT, *LOAD):
        ours, theirs = fact(predicted, key), fact(measured, key)
        if key == "max_concurrency" and both_tell:
            ours, theirs = ours or "unlimited", theirs or "unlimited"
        if ours is None or theirs is None or _same(key, ours, theirs):
            continue
        if key == "request_rate" and same_rate(ours, theirs, predicted, measured):
            continue
        fatal = True
        if key == "engine_version":
            fatal = minor(ours) != minor(theirs)
        elif key == "model":
            fatal = "served_model" in measured or _HUB_NAME.fullmatch(str(theirs)) is not None
        found.append(Difference(key, str(ours), str(theirs), fatal))
    # The prediction of a recorded run has its very times, whatever made them.
    if tells_pace(predicted) and tells_pace(measured) and not _replays(predicted):
        ours, theirs = pace_of(predicted), pace_of(measured)
        if not ours.agrees(theirs):
            found.append(Difference("arrivals", str(ours), str(theirs), True))
    return tuple(found)


def setup_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """What two engines were started with otherwise: resolved arguments, flags, environment variables.

    A prediction tells every argument as resolved, a bench run the flags that it was given: between the two,
    those flags are compared; between two bench runs, a flag that only one was given is a difference as well.
    """
    found = [
        Difference(name, _told(one), _told(other), False)
        for name, one, other in _arguments(ours, theirs)
        if not _same_value(one, other)
    ]
    before, after = ours.get("env"), theirs.get("env")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            one, other = before.get(name), after.get(name)
            if one != other and not SECRET_NAME.search(name):  # which token was used changes no timing
                found.append(Difference(f"env {name}", _told(one), _told(other), False))
    return found


def _arguments(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, our value, their value) of every argument that both sides tell; None is not given."""
    resolved = [side.get("engine_args") for side in (ours, theirs)]
    flags = [side.get("flags") for side in (ours, theirs)]
    known = [args if isinstance(args, Mapping) else None for args in resolved]
    given = [pairs if isinstance(pairs, list | tuple) else None for pairs in flags]
    first, second = known
    if first is not None and second is not None:
        names = [name for name in first if first[name] is not None and second.get(name) is not None]
        return [(name, first[name], second[name]) for name in names]
    if first is not None and given[1] is not None:
        told = _given(given[1], first)
        names = [name for name in told if first.get(name) is not None]
        return [(name, first[name], told[name]) for name in names]
    if second is not None and given[0] is not None:
        told = _given(given[0], second)
        return [(name, told[name], second[name]) for name in told if second.get(name) is not None]
    if given[0] is not None and given[1] is not None:
        one, other = _given(given[0]), _given(given[1])
        names = [name for name in dict.fromkeys((*one, *other)) if name not in _INERT]
        return [(name, one.get(name), other.get(name)) for name in names]
    return []


def _given(flags: Sequence[Any], args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Flags as arguments, a bare one as True and its `--no-` form as False.

    `args` tells which arguments there are, as a flag's own name may begin with `no`.
    """
    found: dict[str, Any] = {}
    for flag, value in flags:
        name = str(flag).lstrip("-").replace("-", "_")
        bare = name.removeprefix("no_")
        if value is None and (args is None or bare in args):
            found[bare] = bare == name
        else:
            found[name] = True if value is None else value
    return found


def _told(value: Any) -> str:
    return "not given" if value is None else str(value)


def _replays(identity: Mapping[str, Any]) -> bool:
    dataset = fact(identity, "dataset")
    return isinstance(dataset, Mapping) and dataset.get("kind") == "vllm-result"


def _same_value(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=1e-6)
    except (TypeError, ValueError):
        return _plain(ours) == _plain(theirs)


def _same(key: str, ours: Any, theirs: Any) -> bool:
    if key == "model":
        return _model(ours) == _model(theirs)
    if key == "engine_version":
        # What stands behind a plus names a build of the same release, and 0.28 is 0.28.0.
        first, second = (str(v).partition("+")[0].lstrip("v") for v in (ours, theirs))
        return first == second or (first.removesuffix(".0") == second.removesuffix(".0"))
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return _plain(ours) == _plain(theirs)


def _model(name: Any) -> str:
    """The name without its owner or folder."""
    return _plain(str(name).rstrip("/").rpartition("/")[2])


def _plain(value: Any) -> str:
    return re.sub(r"[^a-z0-9.]", "", str(value).lower())


def minor(version: Any) -> tuple[str, ...]:
    """Major and minor number of a version, which tell a scheduler apart."""
    return tuple(re.findall(r"\d+", str(version))[:2])
