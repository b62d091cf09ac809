"""Recorded loads: when requests came, how long they were, and what their prompts had in common."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.provenance import Note
from sim.request import Segment
from sim.workload.datasets import Prompts
from sim.workload.files import (
    INPUT_NAMES,
    OUTPUT_NAMES,
    finite,
    json_lines,
    parse_json,
    pick,
    place,
    read_text,
    whole,
)
from sim.workload.spec import FileDataset
from sim.workload.table import OwnPrompts

Floats = NDArray[np.float64]

MOONCAKE_BLOCK = 512  # tokens per entry of hash_ids (Mooncake trace format, FAST'25 release)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?)(?:Z|[+-]\d\d:?\d\d)?")


def read_trace(dataset: FileDataset) -> Prompts:
    """Read a trace; arrivals count from the first request, ascending.

    Raises:
        BadInput: naming file, line and field.
    """
    readers = {
        "azure": _azure,
        "mooncake": _mooncake,
        "vllm-result": _vllm_result,
        "lengths": _lengths,
    }
    if dataset.kind not in readers:
        raise BadInput("--dataset-name", dataset.kind, "is not a trace")
    prompts = readers[dataset.kind](dataset.path, read_text(dataset.path), dataset.output_len)
    if not len(prompts):
        raise BadInput("--dataset-path", dataset.path, "holds no request")
    return prompts


def _by_arrival(
    arrivals: Sequence[float] | Floats,
    segments: Sequence[tuple[Segment, ...]],
    output_lens: list[int],
    output_len: int | None,
    **more: Any,
) -> Prompts:
    """Order rows by arrival (equal times keep the file's order) and count time from the first."""
    times = np.asarray(arrivals, dtype=np.float64)
    if len(times) and bool(np.any(np.diff(times) < 0)):
        ranks = np.argsort(times, kind="stable")
        times, order = times[ranks], ranks.tolist()
        if isinstance(segments, OwnPrompts):
            segments = segments.in_order(ranks)
        else:
            segments = [segments[i] for i in order]
        output_lens = [output_lens[i] for i in order]
        more = {k: [v[i] for i in order] if isinstance(v, list) else v for k, v in more.items()}
    if output_len is not None:
        output_lens = [output_len] * len(output_lens)
    return Prompts(segments, output_lens, times - times[0] if len(times) else times, **more)


def _azure(path: str, text: str, output_len: int | None) -> Prompts:
    """Azure LLM inference trace (Azure/AzurePublicDataset, 2023 and 2024)."""
    rows = _csv_rows(text, path)
    _, first_row = next(rows)
    header = [name.strip() for name in first_row]
    missing = [name for name in AZURE_COLUMNS if name not in header]
    if missing:
        raise BadInput(place(path, 1), None, f"lacks the column {missing[0]}; has {', '.join(header)}")
    when, context, generated = (header.index(name) for name in AZURE_COLUMNS)
    stamps: list[str] = []
    lines: list[int] = []
    lens: list[int] = []
    output_lens: list[int] = []
    for line, row in rows:
        if not row:
            continue
        where = place(path, line)
        if len(row) < len(header):
            raise BadInput(where, None, f"has {len(row)} of {len(header)} columns; is the file truncated?")
        stamps.append(row[when].strip())
        lines.append(line)
        lens.append(whole(row[context], where, "ContextTokens", 1))
        output_lens.append(whole(row[generated], where, "GeneratedTokens", 1))
    return _by_arrival(_stamps(stamps, lines, path), OwnPrompts(lens), output_lens, output_len)


def _csv_rows(text: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row; one at least, as no text read is empty."""
    rows = csv.reader(io.StringIO(text))
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise BadInput(place(path, rows.line_num), None, f"is not CSV: {error}") from None


def _stamps(stamps: list[str], lines: list[int], path: str) -> Floats:
    """Seconds of ISO time stamps, to the nanosecond; a zone is dropped, as all rows carry the same one."""
    parsed = []
    for stamp, line in zip(stamps, lines, strict=True):
        match = _STAMP.fullmatch(stamp)
        try:
            parsed.append(np.datetime64(match[1] if match else "no match", "ns"))
        except ValueError:
            raise BadInput(f"{place(path, line)} TIMESTAMP", stamp, "is not a time stamp") from None
    times = np.array(parsed, dtype="datetime64[ns]").astype(np.int64)
    return (times - times.min()) / 1e9 if len(times) else times.astype(np.float64)


def _mooncake(path: str, text: str, output_len: int | None) -> Prompts:
    """Mooncake trace: milliseconds, and one id per 512 prompt tokens; equal ids are equal prefixes."""
    arrivals: list[float] = []
    segments: list[tuple[Segment, ...]] = []
    output_lens: list[int] = []
    for line, entry in json_lines(text, path):
        where = place(path, line)
        arrivals.append(finite(pick(entry, ("timestamp",), where), where, "timestamp") / 1000.0)
        length = whole(pick(entry, ("input_length",), where), where, "input_length", 1)
        output_lens.append(whole(pick(entry, ("output_length",), where), where, "output_length", 1))
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or any(not isinstance(i, int) for i in ids):
            raise BadInput(f"{where} hash_ids", None, "must be a list of whole numbers")
        if len(ids) > math.ceil(length / MOONCAKE_BLOCK):
            hint = f"{len(ids)} blocks of {MOONCAKE_BLOCK} tokens are more than input_length {length}"
            raise BadInput(f"{where} hash_ids", None, hint)
        segments.append(_blocks(ids, length, len(segments)))
    return _by_arrival(arrivals, segments, output_lens, output_len)


def _blocks(ids: list[int], length: int, row: int) -> tuple[Segment, ...]:
    """One segment per block; tokens beyond the last id belong to this request alone."""
    parts: list[Segment] = []
    left = length
    for key in ids:
        parts.append((key, min(MOONCAKE_BLOCK, left)))
        left -= parts[-1][1]
    if left:
        parts.append((f"row:{row}", left))
    return tuple(parts)


def _vllm_result(path: str, text: str, output_len: int | None) -> Prompts:
    """A detailed result of `vllm bench serve`: what was really sent, and when.

    A failed request left no output length; it is replayed only if `output_len` gives one.
    """
    entry = parse_json(text, path)
    if not isinstance(entry, dict):
        raise BadInput(path, None, "must be one JSON object, as vllm bench serve --save-result writes it")
    for name in ("input_lens", "output_lens", "start_times"):
        if not isinstance(entry.get(name), list):
            hint = f"lacks {name}; save the result with --save-detailed to replay it"
            raise BadInput(path, None, hint)
    inputs, outputs, starts = (entry[k] for k in ("input_lens", "output_lens", "start_times"))
    if not len(inputs) == len(outputs) == len(starts):
        counts = f"{len(inputs)}, {len(outputs)}, {len(starts)}"
        raise BadInput(path, None, f"input_lens, output_lens and start_times differ in length: {counts}")
    arrivals: list[float] = []
    segments: list[tuple[Segment, ...]] = []
    output_lens: list[int] = []
    for i, (length, out, start) in enumerate(zip(inputs, outputs, starts, strict=True)):
        where = f"{path} request {i}"
        generated = whole(out, where, "output_lens", 0)
        if not generated and output_len is None:
            continue
        arrivals.append(finite(start, where, "start_times"))
        segments.append(((i, whole(length, where, "input_lens", 1)),))
        output_lens.append(generated)
    notes: tuple[Note, ...] = ()
    if len(arrivals) < len(inputs):
        gone = len(inputs) - len(arrivals)
        notes = (Note("warning", path, f"{gone} of {len(inputs)} requests failed and are not replayed"),)
    return _by_arrival(arrivals, segments, output_lens, output_len, notes=notes)


def _lengths(path: str, text: str, output_len: int | None) -> Prompts:
    """JSONL, one object per request: arrival [s], input_len, output_len; optional prefix, prefix_len, ...

    `prefix` names a beginning that other requests share, `prefix_len` says how many of the `input_len`
    tokens it makes up; `session` and `priority` are passed on.
    """
    known = {"arrival", "prefix", "prefix_len", "session", "priority", *INPUT_NAMES, *OUTPUT_NAMES}
    arrivals: list[float] = []
    segments: list[tuple[Segment, ...]] = []
    output_lens: list[int] = []
    sessions: list[str | None] = []
    priorities: list[int] = []
    timed = 0
    for line, entry in json_lines(text, path):
        where = place(path, line)
        unknown = sorted(set(entry) - known)
        if unknown:
            raise BadInput(where, None, f"unknown field {unknown[0]}; known are {', '.join(sorted(known))}")
        timed += "arrival" in entry
        arrivals.append(finite(entry.get("arrival", 0.0), where, "arrival"))
        segments.append(_with_prefix(entry, where, len(segments)))
        output_lens.append(whole(pick(entry, OUTPUT_NAMES, where), where, "output_len", 1))
        session = entry.get("session")
        sessions.append(None if session is None else str(session))
        priorities.append(whole(entry.get("priority", 0), where, "priority", -(2**31)))
    if timed not in (0, len(arrivals)):
        raise BadInput(
            path, None, f"{timed} of {len(arrivals)} lines have an arrival; give it on all or on none"
        )
    prompts = _by_arrival(
        arrivals, segments, output_lens, output_len, sessions=sessions, priorities=priorities
    )
    if timed:
        return prompts
    return Prompts(prompts.segments, prompts.output_lens, None, sessions, priorities)


def _with_prefix(entry: Mapping[str, Any], where: str, row: int) -> tuple[Segment, ...]:
    """The prompt of one line of a lengths file."""
    length = whole(pick(entry, INPUT_NAMES, where), where, "input_len", 1)
    if "prefix" not in entry and "prefix_len" not in entry:
        return ((row, length),)
    if entry.get("prefix") is None or entry.get("prefix_len") is None:
        raise BadInput(where, None, "prefix and prefix_len go together")
    shared = whole(entry["prefix_len"], where, "prefix_len", 0)
    if shared > length:
        raise BadInput(f"{where} prefix_len", shared, f"exceeds input_len ({length}), which includes it")
    parts: tuple[Segment, Segment] = ((f"prefix:{entry['prefix']}", shared), (row, length - shared))
    return tuple(part for part in parts if part[1])


def first(prompts: Prompts, n: int) -> Prompts:
    """The first `n` requests of a trace (all, if it has fewer)."""
    if len(prompts) <= n:
        return prompts
    return Prompts(
        prompts.segments[:n],
        prompts.output_lens[:n],
        None if prompts.arrivals is None else prompts.arrivals[:n],
        None if prompts.sessions is None else list(islice(prompts.sessions, n)),
        None if prompts.priorities is None else list(islice(prompts.priorities, n)),
        prompts.forces_ignore_eos,
        prompts.notes,
    )
