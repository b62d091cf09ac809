"""Whether two results describe the same thing, by what they say of themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Facts that must agree; a side that does not tell one is not held to it.
SUBJECT = ("engine", "engine_version", "model_sha", "model", "gpu", "gpu_sha", "gpu_count", "image_digest")
LOAD = ("request_rate", "max_concurrency", "burstiness")
_TIMED = ("use_trace_arrivals", "ramp_up", "ramp_up_strategy")
MANY = 8  # values of a list that is told in full
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
    found = [*_flag_differences(predicted, measured)]
    for key in (*SUBJECT, *LOAD):
        ours, theirs = fact(predicted, key), fact(measured, key)
        if key == "max_concurrency" and _tells_load(predicted) and _tells_load(measured):
            ours, theirs = ours or "unlimited", theirs or "unlimited"
        if ours is None or theirs is None or _same(key, ours, theirs):
            continue
        fatal = True
        if key == "engine_version":
            fatal = minor(ours) != minor(theirs)
        elif key == "model":
            fatal = "served_model" in measured or _HUB_NAME.fullmatch(str(theirs)) is not None
        found.append(Difference(key, str(ours), str(theirs), fatal))
    return tuple(found)


def _flag_differences(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Difference]:
    """Engine flags that the measured engine was started with, and the prediction has otherwise; a warning."""
    args, flags = predicted.get("engine_args"), measured.get("flags")
    theirs = measured.get("engine_args")
    if not isinstance(args, Mapping):
        return []
    found = []
    if isinstance(theirs, Mapping):
        known = [name for name in args if args[name] is not None and theirs.get(name) is not None]
        pairs = [(name, args[name], theirs[name]) for name in known]
        return [Difference(n, str(a), str(b), False) for n, a, b in pairs if not _same_value(a, b)]
    if not isinstance(flags, list | tuple):
        return []
    for flag, value in flags:
        positive = str(flag).lstrip("-").replace("-", "_")
        name, told = positive, value
        if value is None:
            name = positive.removeprefix("no_") if positive.removeprefix("no_") in args else positive
            told = name == positive
        if name in args and args[name] is not None and not _same_value(args[name], told):
            found.append(Difference(name, str(args[name]), str(told), False))
    return found


def _same_value(ours: Any, theirs: Any) -> bool:
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=1e-6)
    except (TypeError, ValueError):
        return _plain(ours) == _plain(theirs)


def fact(identity: Mapping[str, Any], key: str) -> Any:
    """A fact of an identity or of the workload within it; rates are floats, None is unknown or none."""
    workload = identity.get("workload")
    value = identity.get(key)
    if value is None and isinstance(workload, Mapping):
        value = workload.get(key)
    if key == "engine" and value is None:
        backend = str(identity.get("backend", ""))
        value = next((name for name in ("vllm", "sglang") if backend.startswith(name)), None)
    if key == "request_rate" and value is not None:
        return _rate(value, workload if isinstance(workload, Mapping) else {})
    return value


def load_of(identity: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """(request rate, concurrency cap) of a run: what tells its loads apart; None is unknown or none.

    A client that tells its cap and no rate has none: reports leave out a rate without bound.
    """
    rate, cap = fact(identity, "request_rate"), fact(identity, "max_concurrency")
    if rate is None and cap is not None and not followed_times(identity):
        rate = math.inf
    return rate, None if cap is None else int(cap)


def followed_times(identity: Mapping[str, Any]) -> bool:
    """Whether a run says that it sent at a trace's times, or by a ramp."""
    workload = identity.get("workload")
    blocks = (identity, workload if isinstance(workload, Mapping) else {})
    return any(block.get(key) for block in blocks for key in _TIMED)


def _tells_load(identity: Mapping[str, Any]) -> bool:
    return load_of(identity) != (None, None)


def _rate(value: Any, workload: Mapping[str, Any]) -> float | None:
    # Arrivals from a trace or a ramp have no one rate.
    if workload.get("use_trace_arrivals") or workload.get("ramp_up"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


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
