"""The part of two runs in which neither fills up or drains, with figures of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sim.comparison.figures import figure
from sim.figures.metrics import run_duration, select
from sim.figures.regime import sending_clock, steady_window
from sim.results import BenchResult, RequestRecords


def common_window(results: Sequence[BenchResult]) -> tuple[float, float] | None:
    """When no run is filling up or draining, in seconds since its first send; None: no telling."""
    bounds = []
    for result in results:
        if result.records is None or (window := steady_window(result.records)) is None:
            return None
        start = _start(result.records)
        bounds.append((window[0] - start, window[1] - start))
    begin, end = max(low for low, _ in bounds), min(high for _, high in bounds)
    return (begin, end) if end > begin else None


def in_window(result: BenchResult, begin: float, end: float) -> BenchResult:
    """The requests sent within a window of times since the first send, with figures of their own.

    Throughputs count what came out within the window, of whatever request, over its length; a prompt counts
    with its first token. Intervals keep their width relative to the figure of the whole run.
    """
    records = result.records
    if records is None:
        return result
    start = _start(records)
    since = sending_clock(records) - start
    kept = select(records, (since >= begin) & (since <= end))
    ok = np.array([status == "ok" for status in kept.status], dtype=np.bool_)
    done = int(ok.sum())
    figures: dict[str, float | int | None] = {
        "completed": done,
        "failed": len(kept) - done,
        "total_input_tokens": int(kept.prompt_len[ok].sum()),
        "total_output_tokens": int(kept.output_len[ok].sum()),
        **_throughputs(records, start + begin, start + end),
    }
    cut = replace(result, records=kept, aggregates=figures, duration=run_duration(kept), series=None)
    told = result.extra.get("intervals")
    if not isinstance(told, Mapping) or not isinstance(told.get("figures"), Mapping):
        return cut
    moved = {
        key: _moved(bounds, figure(result, key), figure(cut, key)) for key, bounds in told["figures"].items()
    }
    return replace(cut, extra={**result.extra, "intervals": {**told, "figures": moved}})


def _start(records: RequestRecords) -> float:
    return float(np.nanmin(sending_clock(records)))


def _throughputs(records: RequestRecords, begin: float, end: float) -> dict[str, float | int | None]:
    """Requests and tokens per second that came out between two times of the records' clock."""
    length = end - begin
    served = select(records, np.array([status == "ok" for status in records.status], dtype=np.bool_))
    ended = (served.last_token >= begin) & (served.last_token <= end)
    started = (served.first_token >= begin) & (served.first_token <= end)
    prompts, output = int(served.prompt_len[started].sum()), _output_within(served, begin, end)
    amounts = {
        "request_throughput": int(ended.sum()),
        "output_throughput": output,
        "total_token_throughput": prompts + output,
    }
    return {key: amount / length if length > 0 else None for key, amount in amounts.items()}


def _output_within(served: RequestRecords, begin: float, end: float) -> float:
    """Output tokens of completed requests that came between two times.

    A message may carry several tokens: each counts for its request's tokens per message. Where the gaps
    between messages are not known, tokens are spread evenly over the time from the first to the last.
    """
    counts = np.diff(served.itl_offsets)
    first, last, tokens = served.first_token, served.last_token, np.maximum(served.output_len, 0)
    at_first = (first >= begin) & (first <= end)
    known = (counts > 0) | (last <= first)
    weight = np.where(known, tokens / (counts + 1), np.minimum(tokens, 1))
    total = float(weight[at_first].sum())
    owner = np.repeat(np.arange(len(counts)), counts)
    run = np.concatenate(([0.0], np.cumsum(served.itls)))
    later = first[owner] + run[1:] - run[served.itl_offsets[owner]]
    total += float(weight[owner][(later >= begin) & (later <= end)].sum())
    spread = np.flatnonzero(~known)
    span = last[spread] - first[spread]
    inside = np.minimum(last[spread], end) - np.maximum(first[spread], begin)
    return total + float((np.clip(inside / span, 0.0, 1.0) * (tokens[spread] - weight[spread])).sum())


def _moved(bounds: Any, whole: float | None, part: float | None) -> list[float] | None:
    """An interval about another figure, as wide relative to it; None where either is unknown."""
    if (
        not isinstance(bounds, list | tuple)
        or len(bounds) != 2
        or None in bounds
        or not whole
        or part is None
    ):
        return None
    return [float(bound) * part / whole for bound in bounds]
