"""What a result says of itself, checked before anything relies on it: counts, rates, flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.errors import BadInput
from sim.results_io.fields import LARGEST

COUNTS = ("num_prompts", "max_concurrency", "gpu_count")
RATES = ("request_rate", "burstiness")


def with_trace(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of `sglang.bench_serving`, which calls the rate of a trace's own times "trace"."""
    if identity.get("request_rate") != "trace":
        return dict(identity)
    known = {key: value for key, value in identity.items() if key != "request_rate"}
    return {**known, "use_trace_arrivals": True}


def check_said(identity: Mapping[str, Any], where: str) -> None:
    """Refuse facts of another kind than they can be; absent ones are unknown.

    Raises:
        BadInput: names the field, in the identity or in the workload within it.
    """
    workload = identity.get("workload")
    if workload is not None and not isinstance(workload, Mapping):
        raise BadInput(f"{where} identity.workload", None, "must be an object")
    for block, place in ((identity, f"{where} identity"), (workload or {}, f"{where} identity.workload")):
        for key in COUNTS:
            if block.get(key) is not None:
                _check_count(block[key], f"{place}.{key}")
        for key in RATES:
            if block.get(key) is not None:
                _check_rate(block[key], f"{place}.{key}")
    if not isinstance(identity.get("env") or {}, Mapping):
        raise BadInput(f"{where} identity.env", None, "must be an object")
    _check_flags(identity.get("flags"), f"{where} identity.flags")


def _check_count(value: Any, place: str) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 1 <= value <= LARGEST or value != int(value):
        raise BadInput(place, _shown(value), "must be a whole number of at least 1")


def _check_rate(value: Any, place: str) -> None:
    try:
        rate = float("nan" if isinstance(value, bool) else value)  # clients write "inf" as text
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not rate > 0:
        raise BadInput(place, _shown(value), "must be a number above 0, or inf")


def _check_flags(flags: Any, place: str) -> None:
    if flags is None:
        return
    if not isinstance(flags, list | tuple):
        raise BadInput(place, None, "must be a list of [flag, value]")
    for i, pair in enumerate(flags):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadInput(f"{place}[{i}]", None, "must be [flag, value]")


def _shown(value: Any) -> str | float | None:
    return value if isinstance(value, str | float) else str(value) if isinstance(value, int) else None
