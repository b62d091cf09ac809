"""Load a server with the requests that the simulator would be given, in real time, and report on it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bench.client import Client, NoAnswer
from bench.driver import OnProgress, Outcome, Plan, Progress, body_for, drive
from bench.overhead import judge_client
from bench.payload import Target, Timeouts
from bench.prompts import PromptMaker
from bench.rows import Row, records_of
from bench.validity import Evidence, intended_prefix_hits, judge
from bench.workers import processes_for, run_workers
from sim.errors import BadInput, NotComparable
from sim.figures.metrics import latencies, select, summarise
from sim.figures.regime import steady_window
from sim.provenance import Note
from sim.request import Request
from sim.results import BenchResult, RequestRecords
from sim.workload.generate import generate
from sim.workload.spec import WorkloadSpec

__all__ = ["Progress", "Target", "Timeouts", "run_load"]

_PROBE_WORDS = (32, 160)
_LEAST_PER_WORD = 0.5  # below, words are unknown to the tokenizer, and lengths beyond control
SERVER_COUNT = "server_usage"


def run_load(
    target: Target,
    spec: WorkloadSpec,
    *,
    seed: int,
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
    processes: int | None = None,
    outcome: Outcome | None = None,
) -> BenchResult:
    """Send the load that `spec` describes and wait for the answers.

    Ctrl-C ends the run early and keeps what was measured.

    Args:
        target: a server that is ready.
        spec: the load, as the simulator takes it.
        seed: of lengths, arrivals and contents; a sweep gives every point its own, so that no point finds
            the prompts of another in the prefix cache.
        on_progress: called about twice a second, from the event loop: must return quickly.
        stop: set it from another thread to end the run early.
        processes: how many send the load; None: as many as the expected number of streams needs.
        outcome: filled as the run goes, for whoever needs its start.

    Returns:
        origin "measured", with a verdict on client-side evidence; see `bench.validity` for adding the
        server's.

    Raises:
        BadInput: the load cannot be generated, or a request cannot fit the server's context.
        NotComparable: not a single request could be sent.
    """
    requests = generate(spec, seed)
    target, facts = asyncio.run(_survey(target, requests))
    plan = Plan(
        requests=requests,
        warmups=shapes(requests, spec.num_warmups),
        seed=seed,
        max_concurrency=spec.max_concurrency,
        duration=spec.duration,
        tokens_per_word=facts["tokens_per_word"] or 1.0,
    )
    outcome = Outcome() if outcome is None else outcome
    if processes is None:
        processes = processes_for(expected_streams(spec, requests))
    try:
        if processes > 1:
            run_workers(target, plan, outcome, processes, on_progress=on_progress, stop=stop)
        else:
            asyncio.run(drive(target, plan, outcome, on_progress=on_progress, stop=stop))
    except KeyboardInterrupt:
        outcome.interrupted = True
    return report(target, spec, seed, outcome, facts)


def expected_streams(spec: WorkloadSpec, requests: Sequence[Request]) -> float:
    """About how many requests will be open at once, before the server has shown how fast it is.

    The cap, or what an open loop keeps open if a request takes half a second and 20 ms per token.
    """
    streams = float(len(requests))
    last = max((r.arrival for r in requests), default=0.0)
    if last > 0:
        tokens = sum(r.max_tokens for r in requests)
        streams = min(streams, (0.5 * len(requests) + 0.02 * tokens) / last)
    return min(streams, spec.max_concurrency) if spec.max_concurrency is not None else streams


def shapes(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` warm-up requests over the shapes (prompt and output length) of the load.

    From the shortest to the longest prompt, evenly spread; fewer shapes than `count` are repeated.
    """
    if count < 1 or not requests:
        return []
    distinct = sorted({(r.prompt_len, r.max_tokens): r for r in requests}.items())
    picks = np.linspace(0, len(distinct) - 1, min(count, len(distinct))).round().astype(int)
    chosen = [distinct[pick][1] for pick in picks.tolist()]
    return [
        Request(
            request_id=f"warmup-{i}",
            prompt=((f"warmup-{i}", shape.prompt_len),),
            max_tokens=shape.max_tokens,
            stop_after=shape.stop_after,
        )
        for i, shape in ((i, chosen[i % len(chosen)]) for i in range(count))
    ]


def fits_context(user_tokens: int, overhead: int, max_tokens: int, max_model_len: int) -> tuple[bool, int]:
    """Whether prompt, chat template and output fit, and how many output tokens would at most."""
    room = max_model_len - user_tokens - overhead
    return max_tokens <= room, max(room, 0)


async def _survey(target: Target, requests: Sequence[Request]) -> tuple[Target, dict[str, Any]]:
    """Ask the server what it is, and refuse what cannot fit before anything is measured."""
    facts: dict[str, Any] = {
        "template_overhead": None,
        "tokens_per_word": None,
        "probe_requests": 0 if target.takes_token_ids else len(_PROBE_WORDS),
        "intended_prefix_hits": intended_prefix_hits(requests),
    }
    async with Client(target) as client:
        target = await _ask_models(client, target)
        if not target.takes_token_ids:
            facts["template_overhead"], facts["tokens_per_word"] = await _template(client, target)
    if target.max_model_len is not None:
        overhead = facts["template_overhead"] or 0
        for request in requests:
            fits, room = fits_context(request.prompt_len, overhead, request.max_tokens, target.max_model_len)
            if not fits:
                raise BadInput(
                    f"request {request.request_id}",
                    f"{request.prompt_len} + {overhead} template + {request.max_tokens} output tokens",
                    f"do not fit the server's {target.max_model_len}; at most {room} output tokens do",
                )
    return target, facts


async def _ask_models(client: Client, target: Target) -> Target:
    try:
        answer = await client.get_json("/v1/models")
    except NoAnswer:
        return target  # proxies and bare engines need not have it
    models = answer.get("data") if isinstance(answer, dict) else None
    listed = models if isinstance(models, list) else []
    entries = [m for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str)]
    ids = [entry["id"] for entry in entries]
    if target.model not in ids:
        return target
    lengths = [entry.get("max_model_len") for entry in entries if entry["id"] == target.model]
    known = lengths[0] if isinstance(lengths[0], int) else None
    return replace(
        target,
        # vLLM answers under the first of its served names, whichever was asked for.
        model_aliases=tuple({*target.model_aliases, *ids} - {target.model}),
        max_model_len=target.max_model_len if target.max_model_len is not None else known,
    )


async def _template(client: Client, target: Target) -> tuple[int | None, float | None]:
    """Tokens that the chat template adds, and tokens per word of our prompts, by two probes.

    None and None if the server does not count, or if its tokenizer makes nothing of our words.
    """
    maker = PromptMaker(0, target.vocab_size, salt="probe")
    counted = []
    for words in _PROBE_WORDS:
        probe = Request("probe", (("probe", words),), max_tokens=1)
        exchange = await client.send(body_for(target, probe, maker))
        if exchange.outcome.prompt_tokens is None:
            return None, None
        counted.append(exchange.outcome.prompt_tokens)
    per_word = (counted[1] - counted[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    overhead = round(counted[0] - per_word * _PROBE_WORDS[0])
    return (max(0, overhead), per_word) if per_word >= _LEAST_PER_WORD else (None, None)


def report(
    target: Target, spec: WorkloadSpec, seed: int, outcome: Outcome, facts: dict[str, Any]
) -> BenchResult:
    """What was measured, as a `BenchResult`.

    Raises:
        NotComparable: nothing was sent.
    """
    rows = outcome.all_rows()
    if not rows:
        raise NotComparable("nothing was measured: the run ended before its first request")
    records = records_of(rows)
    duration = _duration(rows)
    sent = [row for row in rows if row.sent is not None and row.ended is not None]
    ttfts = latencies(records).ttft
    limit = judge_client(
        [row.scheduled for row in sent],
        [row.sent or 0.0 for row in sent],
        [row.ended or 0.0 for row in sent],
        median_ttft=float(np.median(ttfts)) if len(ttfts) else None,
        overhead=outcome.overhead,
        is_open_loop=is_open_loop(spec),
    )
    evidence = Evidence(
        client_limit=limit,
        interrupted=outcome.interrupted,
        warmup_failures=tuple(outcome.warmup_failures),
    )
    result = BenchResult(
        origin="measured",
        tool="servecast bench",
        identity={"base_url": target.public_url, "model": target.model, "endpoint": target.endpoint},
        duration=duration,
        aggregates=summarise(records, spec, duration),
        records=records,
        notes=_notes(rows),
        extra=_extra(target, spec, seed, rows, records, outcome, facts, limit.cause),
    )
    return judge(result, spec, evidence)


def is_open_loop(spec: WorkloadSpec) -> bool:
    """Whether requests have send times of their own, instead of following answers."""
    return spec.use_trace_arrivals or spec.ramp_up is not None or math.isfinite(spec.request_rate)


def steady_span(records: RequestRecords, spec: WorkloadSpec) -> tuple[float, float] | None:
    """Send times [s] between which the load neither fills up nor drains; None if there is no such time.

    In a closed loop: from the first request that had to wait for another's end, to the last one sent.
    """
    if is_open_loop(spec):
        return steady_window(records)
    sent = np.sort(records.sent[~np.isnan(records.sent)])
    cap = spec.max_concurrency
    if cap is None or len(sent) <= cap + 1:
        return None
    return float(sent[cap]), float(sent[-1])


def _steady(records: RequestRecords, spec: WorkloadSpec) -> dict[str, Any] | None:
    """The steady span and the figures of the requests sent within it."""
    span = steady_span(records, spec)
    if span is None:
        return None
    start, end = span
    inside = select(records, (records.sent >= start) & (records.sent <= end))
    figures = summarise(inside, spec, end - start)
    # Requests sent within the span end outside of it: rates over its length would count them twice.
    kept = {key: value for key, value in figures.items() if key.endswith("_ms") or key.startswith("n_")}
    return {"start": start, "end": end, "requests": len(inside), "figures": kept}


def _duration(rows: Sequence[Row]) -> float:
    ends = [t for row in rows for t in (row.ended, row.last_token, row.sent) if t is not None]
    return max(ends, default=0.0)


def _notes(rows: Sequence[Row]) -> tuple[Note, ...]:
    good = [row for row in rows if row.status == "ok"]
    notes = []
    if any(row.itl_source is None and len(row.gaps) for row in good):
        notes.append(
            Note(
                "warning",
                "itl",
                "the server gave no running token counts: these are gaps between chunks, not per-token ITL",
            )
        )
    if any(row.token_source != SERVER_COUNT for row in good):
        notes.append(Note("warning", "output_len", "estimated from the number of chunks: no usage was sent"))
    for warning, count in Counter(w for row in good for w in row.warnings).items():
        notes.append(Note("warning", warning, f"in {count} of {len(good)} answers"))
    return tuple(notes)


def _extra(
    target: Target,
    spec: WorkloadSpec,
    seed: int,
    rows: Sequence[Row],
    records: RequestRecords,
    outcome: Outcome,
    facts: dict[str, Any],
    cause: str | None,
) -> dict[str, Any]:
    columns = ("connected", "headers", "stream_open", "first_answer", "ended", "slip", "asked_prompt")
    more = ("asked_output", "reasoning_tokens", "timeout", "error_code", "detail", "reused", "finish_reason")
    extra: dict[str, Any] = {
        "seed": seed,
        "timeouts": asdict(target.timeouts),
        **facts,
        "interrupted": outcome.interrupted,
        "client_limited": cause,
        "steady": _steady(records, spec),
        "requests": {name: [getattr(row, name) for row in rows] for name in columns + more},
    }
    overhead = outcome.overhead
    if overhead is not None:
        slips = np.asarray(overhead.slips or [0.0])
        extra["client"] = {
            "loop_lag_p50_ms": overhead.loop_lag_p50 * 1e3,
            "loop_lag_p99_ms": overhead.loop_lag_p99 * 1e3,
            "loop_lag_max_ms": overhead.loop_lag_max * 1e3,
            "slip_p95_ms": float(np.percentile(slips, 95)) * 1e3,
            "slip_max_ms": float(slips.max()) * 1e3,
            "cpu_share": overhead.cpu_share,
            "processes": overhead.processes,
        }
    return extra
