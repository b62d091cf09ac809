"""Results of `vllm bench serve` as JSON, aggregate or detailed (vllm/benchmarks/serve.py, 0.28 and 0.33)."""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.figures.metrics import Figures, success_verdict, summarise
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords
from sim.results_io.consistency import VLLM_NAMES, check_records
from sim.results_io.fields import check_figures, check_lists, count, number, numbers, required
from sim.results_io.writing import (
    HEAD_KEYS,
    LATENCY_KEY,
    LIST_KEYS,
    PEAK_KEYS,
    TOTAL_KEYS,
    is_vllm_figure,
)
from sim.workload.spec import WorkloadSpec

Floats = NDArray[np.float64]
MISMATCH = 0.01  # a reported mean this far from the records' own is worth a word
WHOLE_KEYS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests")
_RAMP_KEYS = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
_TIMES = ("latencies", "queue_times")  # one per request, of newer clients [s]


def looks_like_vllm(document: dict[str, Any]) -> bool:
    """Whether an object is a result of `vllm bench serve`."""
    return "request_throughput" in document and "total_token_throughput" in document


def read_vllm(document: dict[str, Any], where: str) -> BenchResult:
    """A result of `vllm bench serve`; with `--save-detailed` it brings its records.

    Figures come from the records where there are any; a reported mean that they contradict is noted.

    Raises:
        BadInput: naming file and field.
    """
    reported = _reported(document, where)
    records = _records(document, where)
    if records is not None:
        _check_seconds(document, records, reported, where)
        check_records(records, reported, float(reported["duration"] or 0.0), where, VLLM_NAMES)
    check_figures(reported, where)
    figures, notes = reported, list[Note]()
    if records is not None:
        figures = _from_records(records, reported, document)
        check_figures({key: value for key, value in figures.items() if is_vllm_figure(key)}, where)
        notes = _contradictions(figures, reported)
    known = (*HEAD_KEYS, *_RAMP_KEYS, *TOTAL_KEYS, *PEAK_KEYS, *LIST_KEYS, *_TIMES)
    extra = {k: v for k, v in document.items() if k not in known and not LATENCY_KEY.fullmatch(k)}
    return BenchResult(
        origin="measured",
        tool="vllm bench serve",
        identity=_identity(document),
        duration=float(reported["duration"] or 0.0),
        aggregates=figures,
        records=records,
        verdict=success_verdict(figures),
        notes=tuple(notes),
        extra={"reported": extra} if extra else {},
    )


def _identity(document: dict[str, Any]) -> dict[str, Any]:
    identity = {k: document[k] for k in (*HEAD_KEYS, *_RAMP_KEYS) if document.get(k) is not None}
    if "model_id" in identity:
        identity["model"] = identity["model_id"]
    return identity


def _reported(document: dict[str, Any], where: str) -> Figures:
    figures: Figures = {"duration": required(document, "duration", where)}
    figures["completed"] = int(required(document, "completed", where))
    for key in (*TOTAL_KEYS, *PEAK_KEYS):
        if key in document and key not in figures and key != "rtfx":
            figures[key] = (count if key in WHOLE_KEYS else number)(document, key, where)
    for key in document:
        if LATENCY_KEY.fullmatch(key):
            figures[key] = number(document, key, where)
    return figures


def _records(document: dict[str, Any], where: str) -> RequestRecords | None:
    """Per-request rows of a detailed file; None if it is an aggregate one."""
    check_lists(document, LIST_KEYS, where)
    if not all(document.get(key) is not None for key in ("ttfts", "itls", "start_times")):
        return None
    starts = np.array(numbers(document, "start_times", where))
    if len(starts) and starts.min() < 0:  # readings of a clock that starts with the host
        place = int(np.argmax(starts < 0))
        raise BadInput(f"{where} start_times[{place}]", float(starts[place]), "must not be negative")
    ttfts = np.array(numbers(document, "ttfts", where))
    n = len(starts)
    inputs, outputs = (_wholes(document, key, where) for key in ("input_lens", "output_lens"))
    itls = [numbers({"itls": v}, "itls", f"{where} request {i}") for i, v in enumerate(document["itls"])]
    errors = document.get("errors") or [""] * n
    timed: dict[str, list[float]] = {
        key: numbers(document, key, where) for key in _TIMES if document.get(key) is not None
    }
    lists: dict[str, Sized] = {"ttfts": ttfts, "input_lens": inputs, "output_lens": outputs, "itls": itls}
    for key, values in (lists | timed).items():
        if len(values) != n:
            raise BadInput(f"{where} {key}", None, f"has {len(values)} entries, start_times has {n}")
    if n == 0 or len(errors) != n:
        raise BadInput(f"{where} errors", None, f"has {len(errors)} entries, start_times has {n}")
    status = tuple(_status(str(e), int(o)) for e, o in zip(errors, outputs, strict=True))
    ok = np.array([s == "ok" for s in status], dtype=np.bool_)
    spans = np.array([sum(row) for row in itls])
    latency = np.array(timed["latencies"]) if "latencies" in timed else ttfts + spans
    zero = _run_start(starts, latency, float(required(document, "duration", where)), bool(ok.all()))
    unknown, none = np.full(n, np.nan), np.full(n, -1)
    return RequestRecords(
        request_id=tuple(str(i) for i in range(n)),
        scheduled=_scheduled(document, starts - zero, timed.get("queue_times")),
        sent=starts - zero,
        first_token=np.where(ok, starts - zero + ttfts, np.nan),
        last_token=np.where(ok, starts - zero + latency, np.nan),
        prompt_len=inputs,
        output_len=np.where(ok, outputs, -1),
        cached_tokens=none,
        status=status,
        itls=np.array([gap for row in itls for gap in row], dtype=np.float64),
        itl_offsets=np.cumsum([0, *(len(row) for row in itls)]),
        queue=unknown,
        prefill=unknown,
        preemptions=none,
    )


def _wholes(document: dict[str, Any], key: str, where: str) -> NDArray[np.int64]:
    values = numbers(document, key, where)
    if any(value < 0 or value != int(value) for value in values):
        raise BadInput(f"{where} {key}", None, "must hold whole numbers of at least 0")
    return np.array(values, dtype=np.int64)


def _run_start(starts: Floats, latency: Floats, duration: float, complete: bool) -> float:
    """The clock's reading at the run's start, as the duration ends with the last answer."""
    first = float(starts.min())
    return min(first, float((starts + latency).max()) - duration) if complete else first


def _at_once(document: dict[str, Any]) -> bool:
    """Whether all was sent at once, or as the cap let through; a ramp says inf as well."""
    return document.get("request_rate") == "inf" and document.get("ramp_up_strategy") is None


def _scheduled(document: dict[str, Any], sent: Floats, waited: list[float] | None) -> Floats:
    """Scheduled times: recorded (0.33), at once (rate inf), as sent (no cap), else unknown."""
    if waited is not None:
        times: Floats = sent - np.array(waited, dtype=np.float64)
        return times
    if _at_once(document):
        return np.zeros(len(sent))
    return sent if document.get("max_concurrency") is None else np.full(len(sent), np.nan)


def _status(error: str, output_len: int) -> str:
    if not error:
        return "ok" if output_len > 0 else "empty"
    if re.search(r"time ?out", error, re.IGNORECASE):
        return "timeout"
    return "refused" if re.search(r"connect|refused", error, re.IGNORECASE) else "server_error"


def _check_seconds(document: dict[str, Any], records: RequestRecords, reported: Figures, where: str) -> None:
    """Lists are in seconds, means in milliseconds: a file that mixes them up is refused."""
    mean = reported.get("mean_ttft_ms")
    ok = ~np.isnan(records.first_token)
    if not mean or not ok.any():
        return
    own = float((records.first_token[ok] - records.sent[ok]).mean())
    if own > 0 and not 100.0 < mean / own < 10_000.0:
        raise BadInput(
            f"{where} ttfts", None, f"mean {own:g} does not fit mean_ttft_ms {mean:g}; wrong unit?"
        )


def _from_records(records: RequestRecords, reported: Figures, document: dict[str, Any]) -> Figures:
    """Figures by our definitions, with the percentiles that the file has."""
    words = sorted(
        {m[1][1:] for k in reported if (m := LATENCY_KEY.fullmatch(k)) and m[1][0] == "p"}, key=float
    )
    spec = WorkloadSpec(
        request_rate=float("inf") if _at_once(document) else 1.0,
        percentiles=tuple(float(word) for word in words) or (99.0,),
    )
    figures = summarise(records, spec, float(reported["duration"] or 0.0))
    figures["request_goodput"] = reported.get("request_goodput")
    return figures


def _contradictions(figures: Figures, reported: Figures) -> list[Note]:
    notes = []
    for key, theirs in reported.items():
        ours = figures.get(key)
        if theirs is None or ours is None or not key.startswith(("mean_", "completed", "total_")):
            continue
        if abs(ours - theirs) > MISMATCH * abs(theirs):
            text = f"the file reports {theirs:g}, its requests give {ours:g}"
            notes.append(Note("warning", key, text))
    return notes
