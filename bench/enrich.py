"""What the server's side adds to a client's result: counters, start-up facts, series, a second verdict."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bench.crosscheck import cross_check, describe, trust_histograms
from bench.doctor import environment_facts
from bench.failures import classify
from bench.live_log import read_samples
from bench.metrics import prefix_lookups
from bench.probe.reading import probe_cost
from bench.session import Live, Subject
from bench.sweep import Point
from bench.telemetry import GpuSample
from bench.validity import Evidence, engine, warm_cache
from bench.watch import Watched
from sim.fingerprint import model_fingerprint
from sim.provenance import Note
from sim.results import BenchResult, Verdict
from sim.results_io.files import workload_identity
from sim.secrets import SECRET_NAME, without_secrets

LAG_FLOOR_MS = 20.0
LAG_SHARE = 0.1
_GRADES = ("VALID", "SUSPECT", "INVALID")


@dataclass(frozen=True, slots=True)
class Context:
    """Around one measured point; `begun` is the run's start on `bench.wire.clock` [s]."""

    subject: Subject
    point: Point
    live: Live
    seen: Watched
    begun: float
    warmup_failures: tuple[str, ...]
    key: str


def complete(result: BenchResult, context: Context) -> BenchResult:
    """Add what the server's side knows, and judge again with it."""
    subject, point, live, seen = context.subject, context.point, context.live, context.seen
    launch, log = live.launch, live.log
    view = seen.difference()
    server: dict[str, float | int | None] = {
        "kv_cache_tokens": log.kv.tokens if log.kv else live.cache.kv_cache_tokens,
        "num_gpu_blocks": live.cache.num_gpu_blocks or (log.kv.blocks if log.kv else None),
        "block_size": live.cache.block_size,
    }
    extra: dict[str, Any] = {**result.extra, "point": context.key, "start": _start_facts(live)}
    extra["launch"] = dict(launch.server.facts())
    extra["environment"] = list(environment_facts(platform.release(), log.facts))
    extra["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    notes = [*subject.scenario.notes, *launch.notes, *result.notes]
    evidence = Evidence(warmup_failures=context.warmup_failures, engine_died=_death(live, seen))
    series = seen.series(context.begun)
    if view is not None and result.records is not None:
        probes = int(result.extra.get("probe_requests", 0))
        found = cross_check(result.records, view, probes=probes)
        notes += [note for note in found if note.kind == "info"]
        server |= {name: _whole(value) for name, value in view.counters.items()}
        server["max_kv_usage"] = None if series is None else _largest(series.kv_usage.tolist())
        extra["metrics"] = describe(view, trust_histograms(result.records, view))
        hits, queries = prefix_lookups(view.counters) or (None, None)
        evidence = replace(
            evidence,
            prefix_queries=_whole(queries),
            prefix_hits=_whole(hits),
            engine_restarted=view.restarted or seen.restarted(),
            server_notes=tuple(note for note in found if note.kind != "info"),
        )
    if (lag := _client_lag(result)) is not None:
        evidence = replace(evidence, server_notes=(*evidence.server_notes, lag))
    if view is None and seen.before is None and seen.died is None:
        notes.append(Note("info", "/metrics", "not to be had: no server-side figures"))
    if seen.failed_scrapes:
        notes.append(Note("info", "/metrics", f"{seen.failed_scrapes} scrapes went unanswered"))
    if seen.gpu_failures:
        count, last = len(seen.gpu_failures), seen.gpu_failures[-1]
        text = f"{count} looks at the GPUs went unanswered, the last because {last}"
        notes.append(Note("info", "gpus", text))
    if seen.gpu:
        extra["gpus"] = _gpu_summary(seen)
    samples = [asdict(sample) for sample in read_samples(launch.server.logs())]
    if samples:
        extra["engine_log"] = samples[-200:]
    if launch.steps_path is not None and launch.steps_path.exists():
        cost = probe_cost(launch.steps_path)
        extra["probe"] = {
            "file": launch.steps_path.name,
            "cost": None if cost is None else asdict(cost),
            # The steps' own clock at the run's start: which of them belong to this run.
            "begun_s": context.begun,
        }
    identity = {**subject.identity(), **result.identity, "workload": workload_identity(point.spec)}
    model = subject.scenario.model
    identity |= {"model": model.name, "model_sha": model_fingerprint(model), "served_model": launch.model_id}
    identity |= {"backend": subject.scenario.engine.name, "launch": launch.kind, "seed": point.seed}
    if log.version is not None:
        identity["engine_version"] = log.version
    digest = extra["launch"].get("image_digest") or extra["launch"].get("image_id")
    if digest is not None:
        identity["image_digest"] = digest
    result = replace(result, identity=identity, server=server, series=series, notes=tuple(notes), extra=extra)
    return _judged(result, point, evidence)


def _client_lag(result: BenchResult) -> Note | None:
    """Whether the client's own event loop was late by more than a share of the latencies that it measured."""
    lag = result.extra.get("client", {}).get("loop_lag_p99_ms")
    ttft = result.aggregates.get("median_ttft_ms")
    if lag is None or ttft is None or lag <= max(LAG_FLOOR_MS, LAG_SHARE * ttft):
        return None
    text = (
        f"the load generator's event loop was {lag:.0f} ms late at P99 (median TTFT {ttft:.0f} ms): "
        "the host was too busy for it, and its latencies contain that"
    )
    return Note("warning", "client_lag", text)


def _judged(result: BenchResult, point: Point, evidence: Evidence) -> BenchResult:
    """Join the client's verdict with the findings that need the server's evidence."""
    records = result.records
    if records is None:
        return result
    known = {note.subject for note in result.verdict.reasons}
    status, reasons = result.verdict.status, list(result.verdict.reasons)
    for check in (engine, warm_cache):
        for grade, note in check(result, records, point.spec, evidence):
            if note.subject not in known:
                status = max(status, grade, key=_GRADES.index)
                reasons.insert(0, note) if grade == "INVALID" else reasons.append(note)
    return replace(result, verdict=Verdict(status, tuple(reasons)))


def _death(live: Live, seen: Watched) -> str:
    if seen.died is None:
        return ""
    failure = classify(live.launch.server.logs(), phase="run", exit_code=seen.died.code)
    return f"the engine was gone: {failure}" + (f" ({seen.died.detail})" if seen.died.detail else "")


def _start_facts(live: Live) -> dict[str, Any]:
    """Start-up phases, and all that the start-up log told."""
    log = live.log
    pools = [
        {
            **asdict(pool),
            "check": pool.check,
            "equivalent_tokens": pool.equivalent_tokens,
            "bytes_per_token": pool.bytes_per_token,
        }
        for pool in log.pools
    ]
    return {
        "ready_s": live.times.ready,
        "milestones_s": dict(live.times.milestones),
        "phases_s": live.times.phases(),
        "engine": log.engine,
        "version": log.version,
        "kv_pools": pools,
        "given": {name: _public(name, value) for name, value in log.given.items()},
        "resolved": {name: _public(name, value.value) for name, value in log.resolved.items()},
        "cache_config": dict(live.cache.labels),
    }


def _public(name: str, value: Any) -> Any:
    return "***" if value is not None and SECRET_NAME.search(name) else _plain(value)


def _plain(value: Any) -> Any:
    """`value` as JSON takes it, secrets in its texts masked."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _public(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return without_secrets(str(value))


def _gpu_summary(seen: Watched) -> list[dict[str, Any]]:
    """Per GPU over the run: peak memory [bytes], and means of what the driver tells; None is unknown."""
    by_index: dict[int, list[GpuSample]] = {}
    for _, samples in seen.gpu:
        for sample in samples:
            by_index.setdefault(sample.index, []).append(sample)
    summary = []
    for index, found in sorted(by_index.items()):
        figures: dict[str, Any] = {"index": index, "memory_peak": max(s.memory_used for s in found)}
        for name in ("utilisation", "sm_clock", "memory_clock", "power", "temperature"):
            known = [value for sample in found if (value := getattr(sample, name)) is not None]
            figures[f"mean_{name}"] = sum(known) / len(known) if known else None
        summary.append(figures)
    return summary


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _largest(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return max(known) if known else None
