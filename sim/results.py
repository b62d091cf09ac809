"""`BenchResult`: what is reported of a run, predicted or measured alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sim.provenance import Note

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RequestRecords:
    """One row per request, ordered by scheduled send time; times are seconds since the run's start.

    NaN stands for "did not happen" or "unknown" in float columns, -1 in integer columns.

    Attributes:
        scheduled: when the load plan says the request should go out.
        sent: when it went out (later than `scheduled` if the client or its concurrency cap held it).
        first_token, last_token: as the client sees them.
        prompt_len, output_len: tokens, counted by the server where measured.
        cached_tokens: prompt tokens served from the prefix cache.
        status: "ok", "empty", "server_error", "truncated", "timeout", "refused", "unfinished".
        itls: inter-token latencies of all requests, one after the other [s].
        itl_offsets: shape (n + 1,): row i owns itls[itl_offsets[i]:itl_offsets[i + 1]].
        queue, prefill: engine-side parts of TTFT, only where known (simulator, probe) [s].
        preemptions: how often each request was preempted; -1 unknown.
    """

    request_id: tuple[str, ...]
    scheduled: Floats
    sent: Floats
    first_token: Floats
    last_token: Floats
    prompt_len: Ints
    output_len: Ints
    cached_tokens: Ints
    status: tuple[str, ...]
    itls: Floats
    itl_offsets: Ints
    queue: Floats
    prefill: Floats
    preemptions: Ints

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(frozen=True, slots=True)
class ServerSeries:
    """Server-side time series; all arrays have one entry per sample."""

    time: Floats
    running: Floats
    waiting: Floats
    kv_usage: Floats  # 0..1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the figures may be used: VALID, SUSPECT or INVALID, with reasons."""

    status: Literal["VALID", "SUSPECT", "INVALID"]
    reasons: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The outcome of one run.

    Attributes:
        origin: "predicted" or "measured".
        tool: who made it: "servecast predict", "servecast bench", "vllm bench serve", ...
        identity: engine, version, model, GPU, flags ... as far as known; for comparing like with like.
        duration: from just before the first send to the last answer [s].
        aggregates: figures under `vllm bench serve`'s keys (times in ms); None is unknown. Computed from
            `records` where those exist, else as the tool reported them.
        records: per request, or None if only aggregates are known.
        series: server-side time series, or None.
        server: counters and gauges: num_preemptions, prefix_cache_queries, prefix_cache_hits,
            kv_cache_tokens, max_kv_usage, ...; absent is unknown.
        extra: anything else, JSON-ready, that is written under our one extra key.
    """

    origin: Literal["predicted", "measured"]
    tool: str
    identity: Mapping[str, Any]
    duration: float
    aggregates: Mapping[str, float | int | None]
    records: RequestRecords | None = None
    series: ServerSeries | None = None
    server: Mapping[str, float | int | None] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=lambda: Verdict("VALID"))
    notes: tuple[Note, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
