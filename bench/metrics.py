"""Reading /metrics: one view over engines, versions and data-parallel ranks.

Every figure has the names it went by in different versions, and the first one present wins: an absent
figure is None and named as missing, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from bench.histogram import Histogram, from_buckets, merge

Labels = tuple[tuple[str, str], ...]

# vLLM: v1/metrics/loggers.py (0.28) and the names of V0 and early V1; SGLang: srt/observability and
# srt/metrics collectors. "perc" in a name is a share, 0..1. Counters stand with the `_total` of the exporter.
GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_rate_gauge": ("vllm:gpu_prefix_cache_hit_rate", "sglang:cache_hit_rate"),
    "kv_cache_tokens": ("sglang:max_total_num_tokens",),
}
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "num_preemptions": (
        "vllm:num_preemptions_total",
        "vllm:num_preemptions",
        "sglang:num_retracted_requests_total",
    ),
    "prefix_cache_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prefix_cache_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits",
        "sglang:cached_tokens_total",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "generation_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "finished": ("vllm:request_success_total", "sglang:num_requests_total"),
    "aborted": ("sglang:num_aborted_requests_total",),
}
HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    # One sample per output event in vLLM, which may carry several tokens; per token in SGLang.
    "itl": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
    ),
    # The mean TPOT of each request.
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "queue": (
        "vllm:request_queue_time_seconds",
        "vllm:time_in_queue_requests",
        "sglang:queue_time_seconds",
    ),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
}
# Several processes of one SGLang engine (tensor-parallel ranks) report the same requests, so only different
# values of these labels are different engines.
ENGINE_LABELS = ("engine", "dp_rank", "engine_id")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape.

    Attributes:
        time: when, on the caller's clock [s].
        samples: sample name -> [(labels, value)], in the exporter's order, without `_created`.
    """

    time: float
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    def find(self, names: Sequence[str]) -> tuple[tuple[Mapping[str, str], float], ...]:
        """The samples under the first of `names` that is present."""
        for name in names:
            if name in self.samples:
                return self.samples[name]
        return ()

    @property
    def started(self) -> float | None:
        """When the serving process started [unix s], for telling a restart; None if not exported."""
        found = self.find(("process_start_time_seconds",))
        return found[0][1] if found else None


def parse(text: str, time: float = 0.0) -> Snapshot:
    """Parse the text format.

    Raises:
        ValueError: it is not the Prometheus text format.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    return Snapshot(time, {name: tuple(found) for name, found in samples.items()})


def _engine(labels: Mapping[str, str]) -> str:
    return "/".join(labels[key] for key in ENGINE_LABELS if key in labels)


def gauge_by_engine(snapshot: Snapshot, figure: str) -> dict[str, float]:
    """A gauge per engine; {} if absent. Ranks that share an engine report one load: the largest counts."""
    values: dict[str, float] = {}
    for labels, value in snapshot.find(GAUGES[figure]):
        if not math.isnan(value):
            values[_engine(labels)] = max(value, values.get(_engine(labels), -math.inf))
    return values


def counter_by_engine(snapshot: Snapshot, figure: str) -> dict[str, float]:
    """A counter per engine, added up over its other labels (finish reason, source); {} if absent."""
    values: dict[str, float] = {}
    ranks: dict[tuple[str, str], float] = {}
    for labels, value in snapshot.find(COUNTERS[figure]):
        # Each tensor-parallel rank counts the same event again; take the first rank's.
        rank = labels.get("tp_rank", "0") + "/" + labels.get("pp_rank", "0")
        ranks[(_engine(labels), rank)] = ranks.get((_engine(labels), rank), 0.0) + value
    for (engine, _), value in ranks.items():
        values[engine] = max(value, values.get(engine, 0.0))
    return values


def histogram_by_engine(snapshot: Snapshot, figure: str) -> dict[str, Histogram]:
    """A histogram per engine, added up over its other labels; {} if absent."""
    for name in HISTOGRAMS[figure]:
        if f"{name}_count" in snapshot.samples:
            return histogram_by_name(snapshot, name)
    return {}


def histogram_by_name(snapshot: Snapshot, name: str) -> dict[str, Histogram]:
    """Any histogram of the exporter, per engine."""
    buckets: dict[tuple[str, Labels], dict[float, float]] = {}
    counts: dict[tuple[str, Labels], float] = {}
    sums: dict[tuple[str, Labels], float] = {}

    def series(labels: Mapping[str, str]) -> tuple[str, Labels]:
        return _engine(labels), tuple(sorted((k, v) for k, v in labels.items() if k != "le"))

    for labels, value in snapshot.samples.get(f"{name}_bucket", ()):
        buckets.setdefault(series(labels), {})[float(labels["le"])] = value
    for labels, value in snapshot.samples.get(f"{name}_count", ()):
        counts[series(labels)] = value
    for labels, value in snapshot.samples.get(f"{name}_sum", ()):
        sums[series(labels)] = value
    parts: dict[str, list[Histogram]] = {}
    for key, count in counts.items():
        parts.setdefault(key[0], []).append(from_buckets(buckets.get(key, {}), count, sums.get(key, 0.0)))
    return {engine: whole for engine, found in parts.items() if (whole := merge(found)) is not None}


@dataclass(frozen=True, slots=True)
class ServerView:
    """One scrape, or the difference of two, over all engines of a server; None is "not exported".

    Attributes:
        engines: how many engines the server runs (data-parallel ranks).
        running, waiting: sums over engines.
        kv_usage_mean, kv_usage_max: over engines, 0..1: a mean hides the one that is full.
        counters: sums over engines, by the names of `COUNTERS`; only those that are exported.
        histograms: merged over engines, by the names of `HISTOGRAMS`.
        prefix_hit_rate: hits / queries, or the gauge of old versions.
        per_engine: engine -> figure -> value, for telling an imbalance.
        missing: figures that this server does not export.
        restarted: whether an engine was restarted between the two scrapes.
    """

    engines: int
    running: float | None
    waiting: float | None
    kv_usage_mean: float | None
    kv_usage_max: float | None
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    prefix_hit_rate: float | None
    per_engine: Mapping[str, Mapping[str, float]]
    missing: tuple[str, ...]
    restarted: bool = False

    def mean(self, figure: str) -> float | None:
        """Mean of a histogram; None if absent or empty."""
        histogram = self.histograms.get(figure)
        return histogram.mean if histogram else None

    @property
    def imbalance(self) -> float | None:
        """Largest share of the generated tokens times the number of engines: 1 is even; None below two.

        Of engines that count their own: SGLang labels its gauges by rank and adds its counters up.
        """
        own = [figures for engine, figures in self.per_engine.items() if engine]
        tokens = [figures["generation_tokens"] for figures in own if "generation_tokens" in figures]
        if len(tokens) < 2 or sum(tokens) <= 0:
            return None
        return max(tokens) * len(tokens) / sum(tokens)


def prefix_lookups(counters: Mapping[str, float | int | None]) -> tuple[float, float] | None:
    """(hits, tokens looked up) of the prefix cache, from counters by their names here; None if unknown.

    SGLang counts no lookups: it looks every prompt token up.
    """
    hits = counters.get("prefix_cache_hits")
    queries = counters.get("prefix_cache_queries") or counters.get("prompt_tokens")
    return None if hits is None or not queries else (float(hits), float(queries))


def view(snapshot: Snapshot) -> ServerView:
    """Everything of one scrape, since the server's start."""
    return _view(snapshot, None)


def difference(before: Snapshot, after: Snapshot) -> ServerView:
    """What happened between two scrapes: counters and histograms as increases, gauges as they are after.

    A counter that went down, or a process that started in between, is a restart: then the value after it is
    the increase since the restart, a lower bound, and `restarted` is set.
    """
    return _view(after, before)


def _view(after: Snapshot, before: Snapshot | None) -> ServerView:
    per_engine: dict[str, dict[str, float]] = {}
    restarted = (
        before is not None
        and before.started is not None
        and after.started is not None
        and after.started > before.started + 0.5
    )

    def note(figure: str, values: Mapping[str, float]) -> None:
        for engine, value in values.items():
            per_engine.setdefault(engine, {})[figure] = value

    gauges: dict[str, dict[str, float]] = {}
    for figure in GAUGES:
        gauges[figure] = gauge_by_engine(after, figure)
        note(figure, gauges[figure])
    counters: dict[str, float] = {}
    for figure in COUNTERS:
        now = counter_by_engine(after, figure)
        then = counter_by_engine(before, figure) if before else {}
        if now:
            backwards = any(value < then.get(engine, 0.0) for engine, value in now.items())
            restarted = restarted or backwards
            increase = {
                engine: value - (0.0 if restarted or value < then.get(engine, 0.0) else then.get(engine, 0.0))
                for engine, value in now.items()
            }
            note(figure, increase)
            counters[figure] = sum(increase.values())
    histograms: dict[str, Histogram] = {}
    for figure in HISTOGRAMS:
        now_parts = histogram_by_engine(after, figure)
        then_parts = histogram_by_engine(before, figure) if before else {}
        parts, went_back = _increase(now_parts, then_parts, restarted)
        restarted = restarted or went_back
        if (whole := merge(parts)) is not None:
            histograms[figure] = whole
    hits, queries = counters.get("prefix_cache_hits"), counters.get("prefix_cache_queries")
    rates = gauges["hit_rate_gauge"]
    asked = counters.get("prompt_tokens") if queries is None else queries  # SGLang looks every token up
    rate = None
    if hits is not None and asked:
        rate = hits / asked
    elif queries is None and rates:
        rate = _mean(rates.values())
    missing = [figure for figure in ("running", "waiting", "kv_usage") if not gauges[figure]]
    missing += [figure for figure in COUNTERS if figure not in counters]
    missing += [figure for figure in HISTOGRAMS if figure not in histograms]
    usage = gauges["kv_usage"]
    return ServerView(
        # Figures without a label beside labelled ones are sums over the engines, not one more of them.
        engines=sum(engine != "" for engine in per_engine) or min(1, len(per_engine)),
        running=sum(gauges["running"].values()) if gauges["running"] else None,
        waiting=sum(gauges["waiting"].values()) if gauges["waiting"] else None,
        kv_usage_mean=_mean(usage.values()),
        kv_usage_max=max(usage.values()) if usage else None,
        counters=counters,
        histograms=histograms,
        prefix_hit_rate=rate,
        per_engine=per_engine,
        missing=tuple(missing),
        restarted=restarted,
    )


def _increase(
    now: Mapping[str, Histogram], then: Mapping[str, Histogram], restarted: bool
) -> tuple[list[Histogram], bool]:
    parts: list[Histogram] = []
    went_back = False
    for engine, histogram in now.items():
        earlier = then.get(engine)
        if earlier is None or restarted:
            parts.append(histogram)
            continue
        try:
            parts.append(histogram.minus(earlier))
        except ValueError:
            went_back = True
            parts.append(histogram)
    return parts, went_back


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """`vllm:cache_config_info`: the pool as the engine exports it; None is "not exported"."""

    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def cache_info(snapshot: Snapshot) -> CacheInfo:
    """Read the engine's cache configuration from its info metric (vLLM), or SGLang's token gauge."""
    found = snapshot.find(("vllm:cache_config_info",))
    if not found:
        tokens = gauge_by_engine(snapshot, "kv_cache_tokens")
        return CacheInfo(kv_cache_tokens=int(min(tokens.values())) if tokens else None)
    labels = found[0][0]

    def integer(key: str) -> int | None:
        text = labels.get(key, "")
        return int(text) if text.isdigit() else None

    caching = labels.get("enable_prefix_caching")
    return CacheInfo(
        num_gpu_blocks=integer("num_gpu_blocks"),
        block_size=integer("block_size"),
        kv_cache_tokens=integer("kv_cache_size_tokens"),
        enable_prefix_caching=None if caching not in ("True", "False") else caching == "True",
        labels=dict(labels),
    )
