"""Careful reading of other tools' JSON: every value says where it stood if it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sim.errors import BadInput
from sim.figures.metrics import Figures
from sim.figures.quantiles import percentile_word
from sim.results_io.writing import LATENCY_KEY, is_vllm_figure

Object = Mapping[str, Any]
TO_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3}
UNIT_SLACK = 30.0  # a factor that no workload explains, but a wrong unit does (1000)
ROUNDED = 1e-3  # of printed figures
LARGEST = 1e15  # more tokens than were ever served; as milliseconds thirty thousand years


def number(source: Object, key: str, where: str) -> float | int | None:
    """A number under `key`; None if it is absent or null.

    Raises:
        BadInput: it is something else, NaN, infinite or negative.
    """
    value = source.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{where} {key}", None, f"must be a number, is {type(value).__name__}")
    if isinstance(value, int) and value > LARGEST:  # it may be too large for a float
        raise BadInput(f"{where} {key}", None, "is beyond what any run can have")
    if not math.isfinite(value) or value < 0:
        raise BadInput(f"{where} {key}", value, "must be finite and not negative")
    return value


def required(source: Object, key: str, where: str) -> float | int:
    """`number` that must be there.

    Raises:
        BadInput: naming the field that lacks.
    """
    value = number(source, key, where)
    if value is None:
        raise BadInput(where, None, f"lacks the field {key}")
    return value


def count(source: Object, key: str, where: str) -> int | None:
    """A whole number under `key`, as tools may write 20.0 for 20."""
    value = number(source, key, where)
    if value is not None and value != int(value):
        raise BadInput(f"{where} {key}", value, "must be a whole number")
    return None if value is None else int(value)


def numbers(source: Object, key: str, where: str) -> list[float]:
    """A list of finite numbers.

    Raises:
        BadInput: naming the field and the index.
    """
    values = source.get(key)
    if not isinstance(values, list):
        raise BadInput(where, None, f"lacks the list {key}")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise BadInput(
                f"{where} {key}[{i}]", None, "must be a finite number of a size that a run can have"
            )
    return values


def check_lists(source: Object, keys: Sequence[str], where: str) -> None:
    """Refuse what is there under one of the keys, and no list.

    Raises:
        BadInput: naming the field.
    """
    for key in keys:
        value = source.get(key)
        if value is not None and not isinstance(value, list):
            raise BadInput(f"{where} {key}", None, f"must be a list, is {type(value).__name__}")


def section(source: Object, key: str, where: str) -> dict[str, Any]:
    """An object under `key`; empty if it is absent or null.

    Raises:
        BadInput: it is something else.
    """
    value = source.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadInput(f"{where} {key}", None, f"must be an object, is {type(value).__name__}")
    return value


def statistics(name: str, block: Object, where: str, names: Mapping[str, str], scale: float = 1.0) -> Figures:
    """One metric's statistics under our keys in ms; `names` maps ours ("mean", "p99") to the block's."""
    figures: Figures = {}
    for ours, theirs in names.items():
        value = number(block, theirs, where)
        if value is not None:
            figures[f"{ours}_{name}_ms"] = value * scale
    return figures


def percentile_names(quantiles: Sequence[float], form: str = "p{}") -> dict[str, str]:
    """Our names of percentiles, mapped to those of a tool that writes them in this form."""
    return {f"p{percentile_word(q)}": form.format(percentile_word(q)) for q in quantiles}


def check_figures(figures: Mapping[str, Any], where: str) -> None:
    """Refuse figures that no run can have: no finite numbers, below zero, beyond any server, in a wrong unit.

    Raises:
        BadInput: naming the field.
    """
    for key, value in figures.items():
        if value is None or (isinstance(value, str) and not is_vllm_figure(key)):
            continue  # a rate without bound is stored as text
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInput(f"{where} {key}", None, f"must be a number, is {type(value).__name__}")
        if value != value or abs(value) == math.inf:
            raise BadInput(f"{where} {key}", value, "must be finite")
        if abs(value) > LARGEST:
            shown = None if isinstance(value, int) else value
            raise BadInput(f"{where} {key}", shown, "is beyond what any run can have")
        if value < 0 and is_vllm_figure(key):
            raise BadInput(f"{where} {key}", value, "must not be negative")
    if figures.get("duration") == 0 and figures.get("completed"):
        raise BadInput(f"{where} duration", 0, f"cannot be, with {figures['completed']:g} requests completed")
    _check_order(figures, where)
    _check_units(figures, where)


def _check_order(figures: Mapping[str, Any], where: str) -> None:
    """Refuse a percentile below one that is less far out."""
    columns: dict[str, list[tuple[float, str]]] = {}
    for key, value in figures.items():
        match = LATENCY_KEY.fullmatch(key)
        if value is not None and match and match[1] not in ("mean", "std"):
            columns.setdefault(match[2], []).append(
                (50.0 if match[1] == "median" else float(match[1][1:]), key)
            )
    for column in columns.values():
        column.sort()
        for (_, low), (_, high) in pairwise(column):
            if figures[high] < figures[low] * (1.0 - ROUNDED):
                raise BadInput(f"{where} {high}", figures[high], f"lies below {low} ({figures[low]:g})")


def _check_units(figures: Mapping[str, Any], where: str) -> None:
    """Refuse figures that contradict each other by a factor that only a wrong unit explains.

    Identities that hold for any load: no request takes longer than the run, a throughput is a total by the
    duration, and E2EL = TTFT + (n - 1) TPOT.
    """
    duration, completed = figures.get("duration"), figures.get("completed")
    total = figures.get("total_output_tokens")
    if duration:
        for key, value in figures.items():
            if value is not None and LATENCY_KEY.fullmatch(key) and value > UNIT_SLACK * duration * 1000.0:
                hint = f"is longer than the run ({duration:g} s); is it in ms, and the duration in s?"
                raise BadInput(f"{where} {key}", value, hint)
        for key, amount in (("request_throughput", completed), ("output_throughput", total)):
            rate = figures.get(key)
            if rate and amount and not 1 / UNIT_SLACK < rate * duration / amount < UNIT_SLACK:
                raise BadInput(f"{where} {key}", rate, f"does not fit {amount:g} in {duration:g} s")
    ttft, tpot, e2el = (figures.get(f"mean_{name}_ms") for name in ("ttft", "tpot", "e2el"))
    if not (ttft and tpot and e2el and total and completed) or total <= completed:
        return
    expected = ttft + (total / completed - 1) * tpot
    ratio = e2el / expected
    if not 1 / UNIT_SLACK < ratio < UNIT_SLACK:
        hint = f"TTFT and TPOT imply about {expected:.3g} ms; are all three in milliseconds?"
        raise BadInput(f"{where} mean_e2el_ms", e2el, hint)
