"""One run as an audit sees it: everything that report, log and /metrics together say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.histogram import QuantileInterval
from bench.metrics import CacheInfo, ServerView, prefix_lookups
from bench.startup_log import StartupLog
from sim.explain.outcome import Outcome
from sim.results import BenchResult

DEFAULT_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of one run; None and absent keys are unknown.

    Attributes:
        name: of the file, and of no other run of the audit.
        result: as read, where a result file or a whole report was given.
        figures: keys of `vllm bench serve`, times in ms.
        settings: of the client: max_concurrency, request_rate, num_prompts, num_warmups, seed, ...
        engine: engine, engine_version, model, gpu, and flags with underscores.
        log: the start-up log that goes with it.
        view: growth of /metrics over the run (`paired`), or all since start-up.
        cache: the pool as /metrics has it.
        kv_given: tokens that the whole server holds, from the command line.
        simulated: the run predicted, where enough is known.
    """

    name: str
    result: BenchResult | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    log: StartupLog | None = None
    view: ServerView | None = None
    paired: bool = False
    cache: CacheInfo | None = None
    kv_given: int | None = None
    simulated: Outcome | None = None

    def get(self, *keys: str) -> float | None:
        """The first of these figures that is known."""
        return next((value for key in keys if (value := self.figures.get(key)) is not None), None)

    def median(self, metric: str) -> float | None:
        """Median of a latency [ms], under either of its names."""
        return self.get(f"median_{metric}_ms", f"p50_{metric}_ms")

    @property
    def completed(self) -> int | None:
        """Requests with a good answer."""
        value = self.get("completed", "num_prompts")
        value = self.settings.get("num_prompts") if value is None else value
        value = self.counted("finished") if value is None else value
        return None if value is None else int(value)

    @property
    def num_prompts(self) -> int | None:
        """Requests sent."""
        asked = self.settings.get("num_prompts")
        if asked is not None:
            return int(asked)
        completed = self.get("completed")
        return None if completed is None else int(completed + (self.get("failed") or 0))

    @property
    def concurrency(self) -> int | None:
        """The client's cap."""
        value = self.settings.get("max_concurrency")
        return None if value is None else int(value)

    @property
    def rate(self) -> float | None:
        """Offered requests/s where that is finite."""
        value = self.settings.get("request_rate")
        try:
            rate = math.inf if value is None else float(value)  # clients write it as text, too
        except (TypeError, ValueError):
            return None
        return rate if math.isfinite(rate) else None

    def mean_tokens(self, side: str) -> float | None:
        """Mean prompt ("input") or output length [tokens]."""
        total, completed = self.get(f"total_{side}_tokens"), self.get("completed")
        if not self.figures:
            name = "prompt_tokens" if side == "input" else "generation_tokens"
            total, completed = self.counted(name), self.counted("finished")
        return total / completed if total and completed else None

    def counted(self, name: str) -> float | None:
        """Growth of a server counter over the run; None where only one dump is known."""
        return self.view.counters.get(name) if self.view is not None and self.paired else None

    @property
    def foreign_tokens(self) -> float | None:
        """Prompt tokens that the server counted over those that the report sent; None if one is unknown."""
        counted, sent = self.counted("prompt_tokens"), self.get("total_input_tokens")
        return counted / sent if counted and sent else None

    @property
    def throughput(self) -> float | None:
        """Requests/s over the whole run."""
        value, completed, duration = (
            self.get("request_throughput"),
            self.get("completed"),
            self.get("duration"),
        )
        if completed and duration:
            return completed / duration
        return value

    @property
    def mean_e2e(self) -> float | None:
        """Mean E2E latency [s]; from TTFT and TPOT where the report leaves it out."""
        value = self.get("mean_e2el_ms")
        if value is not None:
            return value / 1e3
        ttft, tpot, out = self.get("mean_ttft_ms"), self.get("mean_tpot_ms"), self.mean_tokens("output")
        if ttft is None or tpot is None or out is None:
            return None
        return (ttft + (out - 1) * tpot) / 1e3

    @property
    def in_flight(self) -> float | None:
        """Mean requests in flight: throughput x mean E2E (Little's law)."""
        rate, e2e = self.throughput, self.mean_e2e
        return None if rate is None or e2e is None else rate * e2e

    @property
    def decoding(self) -> float | None:
        """Mean requests between first and last token, by the same law."""
        rate, e2e, ttft = self.throughput, self.mean_e2e, self.get("mean_ttft_ms")
        return None if rate is None or e2e is None or ttft is None else rate * max(0.0, e2e - ttft / 1e3)

    @property
    def kv_pools(self) -> tuple[int, ...]:
        """Tokens that each engine's pool really holds: one entry per data-parallel replica; () is unknown."""
        if self.kv_given is not None:
            return (self.kv_given,)
        logged = () if self.log is None else tuple(pool.equivalent_tokens for pool in self.log.pools)
        stored = self.result.server.get("kv_cache_tokens") if self.result else None
        if stored and len(logged) < 2:  # a result keeps one engine's pool only
            return (int(stored),)
        if logged:
            return logged
        if self.cache is None:
            return ()
        tokens = self.cache.kv_cache_tokens
        if not tokens and self.cache.num_gpu_blocks and self.cache.block_size:
            tokens = self.cache.num_gpu_blocks * self.cache.block_size
        engines = max(1, self.view.engines) if self.view is not None else 1
        return (tokens,) * engines if tokens else ()

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the pools of all replicas really hold."""
        return sum(self.kv_pools) or None

    @property
    def block_size(self) -> int:
        """Tokens per block; vLLM's usual one if nothing says."""
        known = self.cache.block_size if self.cache else None
        if known is None and self.log is not None and "block_size" in self.log.resolved:
            value = self.log.resolved["block_size"].value
            known = value if isinstance(value, int) else None
        return known or (1 if self.engine.get("engine") == "sglang" else DEFAULT_BLOCK)

    def fits(self, *, of_output: float = 1.0) -> int | None:
        """Requests of mean length that the pools hold with this share of their output: 1 to their end."""
        pools, length, out = self.kv_pools, self.mean_tokens("input"), self.mean_tokens("output")
        if not pools or length is None or out is None:
            return None
        tokens = max(length + of_output * out, length + 1)
        blocks = -(-tokens // self.block_size)
        return int(sum(pool // (blocks * self.block_size) for pool in pools))

    @property
    def preemptions(self) -> int | None:
        """Preemptions (SGLang: retractions) over the run."""
        value = self.get("num_preemptions")
        if value is None and self.result is not None:
            stored = self.result.server.get("num_preemptions")
            value = None if stored is None else float(stored)
        if value is None:
            value = self.counted("num_preemptions")
        return None if value is None else int(value)

    @property
    def kv_usage(self) -> float | None:
        """Highest KV use that is known, 0..1; a scrape after the run shows an idle server: no use."""
        stored = self.result.server.get("max_kv_usage") if self.result else None
        return None if stored is None else float(stored)

    @property
    def hit_rate(self) -> tuple[float, float] | None:
        """(hits, queries) of the prefix cache over the run [tokens]."""
        if self.view is not None and self.paired and (found := prefix_lookups(self.view.counters)):
            return found
        return prefix_lookups(self.result.server) if self.result is not None else None

    @property
    def intended_hits(self) -> int | None:
        """Prompt tokens that a cache may hold of this load by itself [tokens]; None if it is not known."""
        extra = self.result.extra if self.result is not None else {}
        intended = extra.get("intended_prefix_hits")
        if intended is None:
            return None
        return int(intended + (extra.get("template_overhead") or 0) * (self.num_prompts or 0))

    def server_quantile(self, figure: str, q: float) -> QuantileInterval | None:
        """Where a client's percentile lies, by a server-side histogram [s]."""
        histogram = self.view.histograms.get(figure) if self.view else None
        return histogram.percentile(q) if histogram else None

    @property
    def label(self) -> str:
        """A short name for sentences: concurrency where known, else the file."""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return f"rate {self.rate:g}" if self.rate is not None else self.name

    def queue_share(self) -> tuple[float, float] | None:
        """Part of mean TTFT that is wait for a place in the KV cache: lower and upper estimate, 0..1.

        By Little's law requests spend (number served) / throughput in service. The number served lies between
        what fits to the end and what fits at admission; the rest of E2E is queue. None if all fit.
        """
        rate, e2e, ttft, flight = self.throughput, self.mean_e2e, self.get("mean_ttft_ms"), self.in_flight
        full, prompt = self.fits(), self.fits(of_output=0.0)
        if not rate or e2e is None or not ttft or flight is None or not full or not prompt or flight <= full:
            return None
        shares = [(e2e - served / rate) / (ttft / 1e3) for served in (prompt, full)]
        return max(0.0, min(shares)), min(1.0, max(shares))

    def with_(self, **changes: Any) -> Run:
        """A copy with other fields."""
        return replace(self, **changes)


def alone(runs: tuple[Run, ...], run: Run) -> Run | None:
    """A run at concurrency 1 with the same prompt lengths: what one request takes undisturbed."""
    length = run.mean_tokens("input")
    for other in runs:
        own = other.mean_tokens("input")
        same = own is not None and length is not None and abs(own - length) <= 0.01 * length
        if other.concurrency == 1 and same and other is not run:
            return other
    return None
