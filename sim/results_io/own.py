"""Our own result files: everything comes back as it was."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np

from sim.errors import BadInput
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords, ServerSeries, Verdict
from sim.results_io.consistency import check_records
from sim.results_io.fields import check_figures, check_lists, number, required, section
from sim.results_io.writing import (
    FLOAT_COLUMNS,
    FORMAT,
    INT_COLUMNS,
    LATENCY_KEY,
    LIST_KEYS,
    PEAK_KEYS,
    TOTAL_KEYS,
)


def read_own(document: dict[str, Any], where: str) -> BenchResult:
    """A result that servecast wrote.

    Raises:
        BadInput: another format version, or a field that is not what it must be.
    """
    ours = section(document, "servecast", where)
    where = f"{where} servecast"
    if ours.get("format") != FORMAT:
        raise BadInput(f"{where}.format", str(ours.get("format")), f"this version reads format {FORMAT}")
    if ours.get("origin") not in ("predicted", "measured"):
        raise BadInput(f"{where}.origin", str(ours.get("origin")), "must be predicted or measured")
    try:
        figures = {key: document.get(key) for key in (*TOTAL_KEYS, *PEAK_KEYS) if key != "rtfx"}
        figures.update({key: value for key, value in document.items() if LATENCY_KEY.fullmatch(key)})
        figures.update(section(ours, "aggregates", where))
        check_figures(figures, where)
        check_figures(section(ours, "server", where), f"{where}.server")
        columns = ours.get("records")
        series = ours.get("series")
        check_lists(document, LIST_KEYS, where)
        _check_intervals(section(ours, "extra", where), where)
        tool = str(ours["tool"])
        duration = float(required(ours, "duration", where))
        records = None if columns is None else _records(columns, document["itls"])
        if records is not None:
            check_records(records, figures, duration, where)
        return BenchResult(
            origin=cast(Literal["predicted", "measured"], ours["origin"]),
            tool=tool,
            identity=section(ours, "identity", where),
            duration=duration,
            aggregates=figures,
            records=records,
            series=None if series is None else ServerSeries(**{k: _floats(v, k) for k, v in series.items()}),
            server=section(ours, "server", where),
            verdict=_verdict(ours["verdict"]),
            notes=_notes(ours["notes"]),
            extra=section(ours, "extra", where),
        )
    except KeyError as error:
        raise BadInput(where, None, f"lacks the field {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInput(where, None, f"is damaged: {error}") from None


def _check_intervals(extra: dict[str, Any], where: str) -> None:
    """Refuse intervals that are none: of each figure null, or [low, high] with null for an unknown end."""
    where = f"{where}.extra.intervals"
    told = extra.get("intervals")
    if told is None:
        return
    if not isinstance(told, dict) or not isinstance(told.get("figures"), dict):
        raise BadInput(where, None, "must be an object with the object figures")
    for key, ends in told["figures"].items():
        if ends is None:
            continue
        place = f"{where}.figures.{key}"
        if not isinstance(ends, list) or len(ends) != 2:
            raise BadInput(place, None, "must be [low, high]")
        low, high = (number({"end": end}, "end", place) for end in ends)
        if low is not None and high is not None and low > high:
            raise BadInput(place, f"{low:g} to {high:g}", "the low end must not lie above the high one")


def _verdict(value: dict[str, Any]) -> Verdict:
    if value["status"] not in ("VALID", "SUSPECT", "INVALID"):
        raise ValueError(f"verdict {value['status']}")
    return Verdict(value["status"], _notes(value["reasons"]))


def _notes(values: list[dict[str, str]]) -> tuple[Note, ...]:
    return tuple(Note(v["kind"], v["subject"], v["text"]) for v in values)


def _floats(values: list[float | None], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column in which null is unknown."""
    column = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    if np.isinf(column).any():
        raise ValueError(f"{name} has an infinite number")
    return column


def _records(columns: dict[str, Any], itls: list[list[float]]) -> RequestRecords:
    n = len(columns["request_id"])
    held: dict[str, Any] = {name: _floats(columns[name], name) for name in FLOAT_COLUMNS}
    for name in INT_COLUMNS:
        held[name] = np.array([-1 if v is None else v for v in columns[name]], dtype=np.int64)
    lengths = {
        name: len(values) for name, values in (*held.items(), ("itls", itls), ("status", columns["status"]))
    }
    wrong = next((name for name, length in lengths.items() if length != n), None)
    if wrong is not None:
        raise ValueError(f"{wrong} has {lengths[wrong]} entries for {n} requests")
    return RequestRecords(
        request_id=tuple(columns["request_id"]),
        status=tuple(columns["status"]),
        itls=_floats([gap for row in itls for gap in row], "itls"),
        itl_offsets=np.cumsum([0, *(len(row) for row in itls)]).astype(np.int64),
        **held,
    )
