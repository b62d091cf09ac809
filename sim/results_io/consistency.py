"""Whether the requests of a result can have happened, and are those that its totals count."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.results import RequestRecords

ROUNDING = 1e-6  # s; times are sums of gaps in files that hold gaps
SPAN_SLACK = (1.05, 1.0)  # a share and seconds that clocks of client and requests may differ by
# What a column is called where it does not stand in the file under its own name.
VLLM_NAMES = {"sent": "start_times", "first_token": "ttfts", "last_token": "latencies"}


def check_records(
    records: RequestRecords,
    totals: Mapping[str, float | int | None],
    duration: float,
    where: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Refuse requests that run backwards, outlast the run, or are not as many as the totals say.

    Args:
        totals: `completed` and `failed` as reported, where they are. Clients count an answer without tokens
            as completed, or not.
        duration: of the run [s].
        names: column -> the file's name for it.

    Raises:
        BadInput: naming field and index.
    """
    names = names or {}

    def refuse_first(wrong: NDArray[np.bool_], column: str, hint: str) -> None:
        if wrong.any():
            raise BadInput(f"{where} {names.get(column, column)}[{int(np.argmax(wrong))}]", None, hint)

    gaps = records.itls < 0
    if gaps.any():
        place = int(np.argmax(gaps))
        row = int(np.searchsorted(records.itl_offsets, place, side="right")) - 1
        within = place - int(records.itl_offsets[row])
        raise BadInput(f"{where} itls[{row}][{within}]", float(records.itls[place]), "must not be negative")
    refuse_first(records.sent < -ROUNDING, "sent", "lies before the run's start")
    refuse_first(
        records.first_token < records.sent - ROUNDING, "first_token", "lies before the request was sent"
    )
    refuse_first(records.last_token < records.first_token - ROUNDING, "last_token", "lies before the first")
    for column in ("prompt_len", "output_len"):
        refuse_first(getattr(records, column) < -1, column, "must not be negative")
    ends = np.concatenate((records.sent, records.last_token))
    ends = ends[~np.isnan(ends)]
    if len(ends) and duration > 0 and ends.max() - ends.min() > SPAN_SLACK[0] * duration + SPAN_SLACK[1]:
        hint = f"must cover the requests, which take {ends.max() - ends.min():.4g} s"
        raise BadInput(f"{where} duration", duration, hint)
    _check_counts(records, totals, where)


def _check_counts(records: RequestRecords, totals: Mapping[str, float | int | None], where: str) -> None:
    ok, empty = records.status.count("ok"), records.status.count("empty")
    counts = {"completed": ok, "failed": len(records) - ok - empty}
    for key, count in counts.items():
        told = totals.get(key)
        if told is not None and not count <= told <= count + empty:
            raise BadInput(f"{where} {key}", told, f"does not fit its requests, of which {count} {key}")
