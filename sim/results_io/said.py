"""What a result says of itself, checked before anything relies on it: counts, rates, ramps, seeds, flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sim.errors import BadInput
from sim.results_io.fields import LARGEST

COUNTS = ("num_prompts", "max_concurrency", "gpu_count")
RATES = ("request_rate", "burstiness")
RAMPS = ("linear", "exponential")
LARGEST_SEED = 2**32 - 1  # of numpy's generator, which both clients draw from


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
        if block.get("rate_scale") is not None:
            _check_finite(block["rate_scale"], f"{place}.rate_scale", above=True)
        _check_seed(block.get("seed"), f"{place}.seed")
        _check_ramp(block, place)
    if not isinstance(identity.get("env") or {}, Mapping):
        raise BadInput(f"{where} identity.env", None, "must be an object")
    _check_flags(identity.get("flags"), f"{where} identity.flags")


def _check_count(value: Any, place: str) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 1 <= value <= LARGEST or value != int(value):
        raise BadInput(place, _shown(value), "must be a whole number of at least 1")


def _number(value: Any) -> float:
    """As a number, which clients may write as text; NaN if it is none."""
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _check_rate(value: Any, place: str) -> None:
    if not _number(value) > 0:
        raise BadInput(place, _shown(value), "must be a number above 0, or inf")


def _check_finite(value: Any, place: str, *, above: bool = False) -> None:
    number = _number(value)
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise BadInput(place, _shown(value), f"must be a number {'above' if above else 'of at least'} 0")


def _check_seed(value: Any, place: str) -> None:
    if value is None or isinstance(value, str):  # a client's words for none
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_SEED:
        raise BadInput(place, _shown(value), f"must be a whole number from 0 to {LARGEST_SEED}")


def _check_ramp(block: Mapping[str, Any], place: str) -> None:
    """Refuse half a ramp. Ours is [strategy, first rate, last rate]; a client's stands under three keys."""
    strategy, told = block.get("ramp_up_strategy"), block.get("ramp_up")
    if told is None and strategy is None:
        return
    name = "ramp_up_strategy" if told is None else "ramp_up"
    if told is None:
        told = [strategy, block.get("ramp_up_start_rps"), block.get("ramp_up_end_rps")]
    if not isinstance(told, list | tuple) or len(told) != 3 or told[0] not in RAMPS or None in told:
        hint = f"must be {' or '.join(RAMPS)}, with the rates that it starts and ends with"
        raise BadInput(f"{place}.{name}", _shown(strategy), hint)
    for rate in told[1:]:
        _check_finite(rate, f"{place}.{name}")


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
