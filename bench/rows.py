"""What the client knows of each request, in a form that crosses process borders, and its `RequestRecords`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.client import Exchange
from sim.request import Request
from sim.results import RequestRecords


@dataclass(frozen=True, slots=True)
class Row:
    """One request; times are seconds since the run's start, None is "did not happen".

    Attributes:
        scheduled, sent, connected, headers, stream_open, first_token, first_answer, last_token, ended: as
            in `Exchange` and `StreamOutcome`.
        slip: how late it was sent by the client's own fault, waiting for the concurrency cap aside [s].
        asked_prompt, asked_output: tokens that the plan asked for.
        prompt_tokens, output_tokens, cached_tokens, reasoning_tokens: as counted by the server; None
            unknown. `token_source` says where `output_tokens` is from.
        gaps: inter-token latencies if `itl_source` is set, else gaps between chunks [s].
        chunk_tokens: tokens per token-bearing chunk; empty if unknown.
        chunk_gaps: gaps between token-bearing chunks [s].
    """

    request_id: str
    scheduled: float
    asked_prompt: int
    asked_output: int
    status: str = "unfinished"
    sent: float | None = None
    slip: float = 0.0
    connected: float | None = None
    headers: float | None = None
    stream_open: float | None = None
    first_token: float | None = None
    first_answer: float | None = None
    last_token: float | None = None
    ended: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    token_source: str | None = None
    itl_source: str | None = None
    gaps: tuple[float, ...] = ()
    chunk_gaps: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    http_status: int | None = None
    timeout: str = ""
    error_code: int | None = None
    detail: str = ""
    reused: bool = False
    finish_reason: str | None = None
    warnings: tuple[str, ...] = ()
    text: str = ""


def row_of(request: Request, exchange: Exchange, start: float, slip: float) -> Row:
    """The row of a finished exchange; `start` is the run's, on the client's clock."""

    def since(time: float | None) -> float | None:
        return None if time is None else time - start

    outcome = exchange.outcome
    has_itls = outcome.itl_source is not None
    return Row(
        request_id=request.request_id,
        scheduled=request.arrival,
        asked_prompt=request.prompt_len,
        asked_output=request.max_tokens,
        status=outcome.status,
        sent=exchange.sent - start,
        slip=slip,
        connected=since(exchange.connected),
        headers=since(exchange.headers),
        stream_open=since(outcome.stream_open),
        first_token=since(outcome.first_token),
        first_answer=since(outcome.first_answer),
        last_token=since(outcome.last_token),
        ended=exchange.ended - start,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens if outcome.token_source else None,
        cached_tokens=outcome.cached_tokens,
        reasoning_tokens=outcome.reasoning_tokens,
        token_source=outcome.token_source,
        itl_source=outcome.itl_source,
        gaps=outcome.itls if has_itls else outcome.chunk_gaps,
        chunk_gaps=outcome.chunk_gaps,
        chunk_tokens=outcome.token_counts if has_itls else (),
        http_status=exchange.http_status,
        timeout=exchange.timeout,
        error_code=outcome.error_code,
        detail=outcome.detail,
        reused=exchange.reused,
        finish_reason=outcome.finish_reason,
        warnings=outcome.warnings,
        text=outcome.text,
    )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON lines."""
    names = [f.name for f in fields(Row)]
    with path.open("w") as file:
        for row in rows:
            json.dump({name: getattr(row, name) for name in names}, file)
            file.write("\n")


def read_rows(path: Path) -> list[Row]:
    """Rows that `write_rows` wrote."""
    rows = []
    with path.open() as file:
        for line in file:
            values: dict[str, Any] = json.loads(line)
            for name in ("gaps", "chunk_gaps", "chunk_tokens", "warnings"):
                values[name] = tuple(values[name])
            rows.append(Row(**values))
    return rows


def records_of(rows: Sequence[Row]) -> RequestRecords:
    """The rows as columns, in the given order.

    Lengths are the server's; where it gave none, the prompt's is the one asked for (prompts sent as token
    ids have it exactly) and the output's is -1.
    """

    def floats(name: str) -> Any:
        values = (getattr(row, name) for row in rows)
        return np.array([math.nan if v is None else v for v in values], dtype=np.float64)

    def ints(values: Sequence[int | None]) -> Any:
        return np.array([-1 if v is None else v for v in values], dtype=np.int64)

    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row.gaps) for row in rows], out=offsets[1:])
    unknown = np.full(len(rows), math.nan)
    return RequestRecords(
        request_id=tuple(row.request_id for row in rows),
        scheduled=floats("scheduled"),
        sent=floats("sent"),
        first_token=floats("first_token"),
        last_token=floats("last_token"),
        prompt_len=ints([r.asked_prompt if r.prompt_tokens is None else r.prompt_tokens for r in rows]),
        output_len=ints([row.output_tokens for row in rows]),
        cached_tokens=ints([row.cached_tokens for row in rows]),
        status=tuple(row.status for row in rows),
        itls=np.array([gap for row in rows for gap in row.gaps], dtype=np.float64),
        itl_offsets=offsets,
        queue=unknown,
        prefill=unknown.copy(),
        preemptions=np.full(len(rows), -1, dtype=np.int64),
    )
