"""Our result file: `vllm bench serve`'s JSON, plus one key with what it has no place for.

Tools that read vLLM's files read ours; identical results give identical bytes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sim.loop.records import SimulatedRecords
from sim.results import BenchResult, RequestRecords
from sim.results_io.atomic import write_text
from sim.workload.spec import WorkloadSpec

FORMAT = 1
# Keys in front of the figures, in vllm bench serve's order; values come from a result's identity.
HEAD_KEYS = (
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
)
TOTAL_KEYS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)
LIST_KEYS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
PEAK_KEYS = ("max_output_tokens_per_s", "max_concurrent_requests", "rtfx")
LATENCY_KEY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el)_ms")
FLOAT_COLUMNS = ("scheduled", "sent", "first_token", "last_token", "queue", "prefill")
INT_COLUMNS = ("prompt_len", "output_len", "cached_tokens", "preemptions")


def is_vllm_figure(key: str) -> bool:
    """Whether an aggregate stands at the top level of the file, where vllm bench serve has it."""
    return key in TOTAL_KEYS or key in PEAK_KEYS or LATENCY_KEY.fullmatch(key) is not None


def write_result(result: BenchResult, path: str | Path, detailed: bool = True, field: str = "--json") -> None:
    """Write a result file, whole or not at all; see `result_text`.

    Raises:
        BadInput: the place cannot be written to.
    """
    write_text(path, result_text(result, detailed), field)


def result_text(result: BenchResult, detailed: bool = True) -> str:
    """The text of a result file: one JSON object and a line end, no NaN or infinity in it.

    Args:
        result: what to write.
        detailed: with one entry per request (as `--save-detailed`), where the result has them.
    """
    head = {**_traffic(result.identity), "rtfx": 0.0}
    document: dict[str, Any] = {key: head.get(key) for key in HEAD_KEYS}
    document.update({key: result.aggregates.get(key) for key in TOTAL_KEYS})
    records = result.records if detailed else None
    if records is not None:
        document.update(_lists(records, result.extra.get("requests", {}).get("detail")))
    document.update({key: result.aggregates.get(key, head.get(key)) for key in PEAK_KEYS})
    document.update({k: v for k, v in result.aggregates.items() if LATENCY_KEY.fullmatch(k)})
    document["servecast"] = {
        "format": FORMAT,
        "origin": result.origin,
        "tool": result.tool,
        "verdict": asdict(result.verdict),
        "notes": [asdict(note) for note in result.notes],
        "identity": result.identity,
        "duration": result.duration,
        "aggregates": {k: v for k, v in result.aggregates.items() if not is_vllm_figure(k)},
        "server": result.server,
        "extra": result.extra,
        "series": None if result.series is None else asdict(result.series),
        "records": None if records is None else _columns(records),
    }
    if records is None:
        return _json(document) + "\n"
    at = list(document).index("itls")
    before, after = dict(list(document.items())[:at]), dict(list(document.items())[at + 1 :])
    return f'{_json(before)[:-1]}, "itls": {_itls_text(records)}, {_json(after)[1:]}\n'


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(plain(document), allow_nan=False, ensure_ascii=False)


def _itls_text(records: RequestRecords) -> str:
    """Inter-token latencies by request, as JSON.

    They make up nine tenths of a file. Requests that decode together have the same ones, so each number is
    spelled once, and each list is a piece of one text.
    """
    shared = records.emissions.spans(len(records)) if isinstance(records, SimulatedRecords) else None
    if shared is not None:
        gaps, spans = shared
        texts = _spelled(gaps.tolist())
    else:
        values = records.itls.tolist()
        different = list(dict.fromkeys(values))
        spelled = dict(zip(different, _spelled(different), strict=True))
        texts = list(map(spelled.__getitem__, values))
        spans = list(pairwise(records.itl_offsets.tolist()))
    whole = ", ".join(texts)
    begins = [0, *accumulate(len(text) + 2 for text in texts)]
    lists = [f"[{whole[begins[a] : max(begins[a], begins[b] - 2)]}]" for a, b in spans]
    return f"[{', '.join(lists)}]"


def _spelled(values: list[float]) -> list[str]:
    if all(map(math.isfinite, values)):
        return list(map(repr, values))
    return [repr(value) if math.isfinite(value) else json.dumps(plain(value)) for value in values]


def plain(value: Any) -> Any:
    """The same in JSON's own types: arrays as lists, unknown numbers as null, infinities as text."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, np.ndarray):
        return _column(value) if value.ndim == 1 else plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(v) for v in value)
    return str(value)


def _column(values: np.ndarray[Any, Any]) -> list[Any]:
    """An array as a list; only one that has unknowns needs to be looked at value by value."""
    listed: list[Any] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [plain(v) for v in listed]
    return listed


def _traffic(identity: Mapping[str, Any]) -> dict[str, Any]:
    """vllm bench serve's head, from an identity and the workload within it."""
    workload = identity.get("workload")
    merged = {**(workload if isinstance(workload, Mapping) else {}), **identity}
    found = {key: merged.get(key) for key in HEAD_KEYS}
    found["model_id"] = merged.get("model_id", merged.get("model"))
    found["endpoint_type"] = merged.get("endpoint_type", merged.get("backend"))
    return found


def _lists(records: RequestRecords, details: Sequence[str] | None) -> dict[str, Any]:
    """One entry per request under vLLM's keys and with its conventions: a failed request has zeros.

    `details`: what went wrong with each, in the server's words, where a bench run kept them.
    """
    if details is None or len(details) != len(records):
        details = [""] * len(records)
    ok = np.array([status == "ok" for status in records.status], dtype=np.bool_)
    ttfts = np.where(ok, records.first_token - records.sent, 0.0)
    return {
        "input_lens": records.prompt_len,
        "output_lens": np.where(ok, records.output_len, 0),
        "ttfts": ttfts,
        "itls": None,  # see `_itls_text`
        "start_times": records.sent,
        "generated_texts": [""] * len(records),
        "errors": [
            "" if status == "ok" else f"{status}: {detail}" if detail else status
            for status, detail in zip(records.status, details, strict=True)
        ],
    }


def _columns(records: RequestRecords) -> dict[str, Any]:
    """What the lists lack or round away; unknown is null."""
    columns: dict[str, Any] = {"request_id": records.request_id, "status": records.status}
    for name in FLOAT_COLUMNS:
        columns[name] = getattr(records, name)
    for name in INT_COLUMNS:
        values = getattr(records, name)
        columns[name] = [v if v >= 0 else None for v in values.tolist()]
    return columns


def workload_identity(spec: WorkloadSpec) -> dict[str, Any]:
    """A load as part of a result's identity, JSON-ready, with vllm bench serve's names where it has them."""
    described: dict[str, Any] = plain(asdict(spec))
    described["dataset_name"] = type(spec.dataset).__name__
    return described


def write_requests_csv(records: RequestRecords, path: str | Path, field: str = "--csv") -> None:
    """Write one line per request: times in seconds since the run's start, latencies in ms, unknown empty.

    Raises:
        BadInput: the place cannot be written to.
    """
    ttft, e2el = records.first_token - records.sent, records.last_token - records.sent
    decoded = records.output_len - 1
    tpot = np.where(decoded > 0, (e2el - ttft) / np.maximum(decoded, 1), np.nan)
    columns: dict[str, list[Any]] = {"request_id": list(records.request_id), "status": list(records.status)}
    for name in ("scheduled", "sent", "first_token", "last_token"):
        columns[f"{name}_s"] = plain(getattr(records, name))
    for name in INT_COLUMNS:
        columns[name] = [v if v >= 0 else None for v in getattr(records, name).tolist()]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2el)):
        columns[f"{name}_ms"] = plain(values * 1000.0)
    for name in ("queue", "prefill"):
        columns[f"{name}_ms"] = plain(getattr(records, name) * 1000.0)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_text(path, buffer.getvalue(), field)
