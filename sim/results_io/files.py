"""Reading and writing results: ours, and those of the benchmark clients in use.

A file is recognised by what is in it, not by its name: our own JSON, `vllm bench serve` JSON (aggregate or
detailed, one or several after another), its printed report pasted into a text file, `sglang.bench_serving`
JSON lines, GuideLLM JSON, AIPerf JSON and CSV.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sim.errors import BadInput
from sim.jsontext import load_json
from sim.results import BenchResult
from sim.results_io.aiperf import looks_like_aiperf, looks_like_aiperf_csv, read_aiperf, read_aiperf_csv
from sim.results_io.guidellm import looks_like_guidellm, read_guidellm
from sim.results_io.own import read_own
from sim.results_io.printed import looks_printed, read_printed
from sim.results_io.said import check_said
from sim.results_io.sglang import looks_like_sglang, read_sglang
from sim.results_io.vllm import looks_like_vllm, read_vllm
from sim.results_io.writing import result_text, workload_identity, write_requests_csv, write_result
from sim.workload.files import parse_json, read_text

__all__ = [
    "read_result",
    "read_results",
    "result_text",
    "workload_identity",
    "write_requests_csv",
    "write_result",
]

FORMATS = "vllm bench serve JSON or printed report, sglang.bench_serving, GuideLLM, AIPerf, or our own"


def read_result(path: str | Path, index: int | None = None) -> BenchResult:
    """The one result in a file; `index`, from 1, chooses where there are several. `FILE#2` does the same.

    Raises:
        BadInput: naming the file, and the field or line where it is wrong; or several results and no choice.
    """
    name = str(path)
    chosen = re.fullmatch(r"(.+)#(\d+)", name)
    if chosen and not Path(name).exists():
        name, index = chosen[1], int(chosen[2])
    results = read_results(name)
    if index is None and len(results) > 1:
        raise BadInput(
            "result", name, f"holds {len(results)} results; choose one: {name}#1 to #{len(results)}"
        )
    if index is not None and not 1 <= index <= len(results):
        raise BadInput("result", f"{name}#{index}", f"the file holds {len(results)}")
    return results[(index or 1) - 1]


def read_results(path: str | Path) -> list[BenchResult]:
    """Every result in a file, in order; at least one.

    Raises:
        BadInput: naming the file, and the field or line where it is wrong.
    """
    text = read_text(path, "result")
    where = str(path)
    found = _read(text, where)
    for number, result in enumerate(found, start=1):
        check_said(result.identity, where if len(found) == 1 else f"{where}#{number}")
    return found


def _read(text: str, where: str) -> list[BenchResult]:
    if text.lstrip().startswith("{"):
        return [r for document, place in _documents(text, where) for r in _of_document(document, place)]
    if looks_like_aiperf_csv(text):
        return [read_aiperf_csv(text, where)]
    if looks_printed(text):
        return read_printed(text, where)
    raise BadInput("result", where, f"is of no known format ({FORMATS})")


def _documents(text: str, where: str) -> list[tuple[dict[str, Any], str]]:
    """JSON objects one after another, as clients append them to a file, each with the place it stands at."""
    try:
        single = load_json(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            parse_json(text, where)  # says where the text stops being JSON
    else:
        return [(single, where)]
    documents: list[tuple[dict[str, Any], str]] = []
    decoder, position = json.JSONDecoder(), _skip_space(text, 0)
    while position < len(text):
        line = text.count("\n", 0, position) + 1
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            value, end = parse_json(text[position:], where, line), len(text)
        if not isinstance(value, dict):
            raise BadInput(f"{where} line {line}", None, "must be a JSON object")
        documents.append((value, f"{where} line {line}"))
        position = _skip_space(text, end)
    return documents


def _skip_space(text: str, position: int) -> int:
    match = re.compile(r"\s*").match(text, position)
    return match.end() if match else position


def _of_document(document: dict[str, Any], where: str) -> list[BenchResult]:
    if "servecast" in document:
        return [read_own(document, where)]
    if looks_like_guidellm(document):
        return read_guidellm(document, where)
    if looks_like_sglang(document):
        return [read_sglang(document, where)]
    if looks_like_aiperf(document):
        return [read_aiperf(document, where)]
    if looks_like_vllm(document):
        return [read_vllm(document, where)]
    fields = ", ".join(list(document)[:6]) or "none"
    raise BadInput("result", where, f"is of no known format ({FORMATS}); its fields: {fields}")
