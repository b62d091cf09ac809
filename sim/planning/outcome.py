"""One prediction boiled down to what plans are made of: small, JSON-ready, the same from every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.comparison.compare import figure
from sim.engines.glue import Limits
from sim.errors import BadInput, EngineStuck
from sim.figures.metrics import summarise
from sim.figures.regime import regime
from sim.memory import MemoryAccount
from sim.request import Request
from sim.results import RequestRecords, ServerSeries
from sim.scenario import Scenario
from sim.simulate import ENGINES, SimResult, simulate
from sim.steptime.base import StepTimeModel
from sim.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from sim.planning.cluster import NodeOutcome

Value = float | int | None
WORKER_DIED = "the worker died"  # begins a failure that says nothing of the run itself


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of one run. Latencies in ms, rates per second, other times in seconds.

    Attributes:
        figures: under `vllm bench serve`'s keys, as `sim.figures.metrics.summarise` gives them.
        server: counters and gauges, as in `BenchResult`.
        parts_ms: mean parts of TTFT.
        waiting: seconds of device time behind which requests waited, by what kept them out.
        device: seconds by what bounded the steps, with "host" and "idle".
        regime: the fields of `sim.figures.regime.Regime` but its notes.
        queues: time-weighted mean and highest numbers of running and waiting requests, and KV use (0..1).
        caps: what the configuration allows: kv_cache_tokens, max_num_seqs, max_num_tokens, max_concurrency;
            request_tokens is the mean of prompt and output over the load.
        duration: of the run [s].
        failure: why there is nothing to keep; all else is then empty.
    """

    figures: Mapping[str, Value] = field(default_factory=dict)
    server: Mapping[str, Value] = field(default_factory=dict)
    parts_ms: Mapping[str, Value] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)
    regime: Mapping[str, Any] = field(default_factory=dict)
    queues: Mapping[str, Value] = field(default_factory=dict)
    caps: Mapping[str, Value] = field(default_factory=dict)
    duration: float = 0.0
    failure: str | None = None

    def get(self, key: str) -> float | None:
        """A figure, or a server counter, by its key; None if unknown."""
        value = self.figures.get(key)
        if value is None:
            value = self.server.get(key)
        return None if value is None else float(value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, in a fixed order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_dict`."""
        return cls(**content)


def worker_died(outcome: Outcome) -> bool:
    """Whether the run was lost with its process; another try may well succeed."""
    return (outcome.failure or "").startswith(WORKER_DIED)


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Several seeds of one point as one: means of every figure, but of the highest queue the highest.

    A figure that one of them lacks is None. `regime` is the first one's.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    return Outcome(
        figures=_pooled([o.figures for o in outcomes]),
        server=_pooled([o.server for o in outcomes]),
        parts_ms=_pooled([o.parts_ms for o in outcomes]),
        waiting=_seconds([o.waiting for o in outcomes]),
        device=_seconds([o.device for o in outcomes]),
        regime=outcomes[0].regime,
        queues=_pooled([o.queues for o in outcomes]),
        caps=_pooled([o.caps for o in outcomes]),
        duration=sum(o.duration for o in outcomes) / len(outcomes),
        failure=next((o.failure for o in outcomes if o.failure is not None), None),
    )


def _seconds(maps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean times; what a run does not name took none of its time."""
    keys = dict.fromkeys(key for one in maps for key in one)
    return {key: sum(one.get(key, 0.0) for one in maps) / len(maps) for key in keys}


def _pooled(maps: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key in dict.fromkeys(key for one in maps for key in one):
        values = [v for one in maps if (v := one.get(key)) is not None]
        if len(values) < len(maps):
            found[key] = None
        elif key.startswith("max_"):
            found[key] = max(values)
        else:
            found[key] = sum(values) / len(values)
    return found


def run_outcome(
    scenario: Scenario,
    *,
    step_time: StepTimeModel | None = None,
    requests: Sequence[Request] | None = None,
    before: Sequence[Request] = (),
) -> Outcome:
    """Simulate one scenario and keep what plans need; a scenario that cannot run says why.

    Args: see `sim.simulate.simulate`.
    """
    try:
        outcome = simulate(scenario, step_time=step_time, requests=requests, before=before)
    except (BadInput, EngineStuck) as error:
        return Outcome(failure=str(error))
    return boil_down(scenario, outcome)


def boil_down(scenario: Scenario, outcome: SimResult) -> Outcome:
    """What is kept of a simulated run."""
    result = outcome.result
    figures = dict(result.aggregates)
    for key in ("p50_ttft_ms", "p50_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "p99_e2el_ms"):
        figures.setdefault(key, figure(result, key))
    extra = result.extra
    verdict = {k: v for k, v in extra["regime"].items() if k != "notes"}
    return Outcome(
        figures=figures,
        server=dict(result.server),
        parts_ms=dict(extra["ttft_parts_ms"]),
        waiting=dict(extra["waiting_time"]),
        device=dict(extra["device_time"]),
        regime=verdict,
        queues=queues(result.series, result.duration) if result.series is not None else {},
        caps=_caps(scenario, outcome),
        duration=result.duration,
    )


def of_node(scenario: Scenario, records: RequestRecords, node: NodeOutcome, duration: float) -> Outcome:
    """What is kept of a replica that was the whole cluster."""
    spec = WorkloadSpec(request_rate=1.0)
    figures = summarise(records, spec, duration)
    usage = node.usage
    verdict = {k: v for k, v in asdict(regime(records, node.series, spec)).items() if k != "notes"}
    limits = ENGINES[scenario.engine.name].limits(scenario.engine, node.account)
    total = usage.kv_total_tokens
    parts = {"queue": figures.get("mean_queue_ms"), "prefill": figures.get("mean_prefill_ms")}
    return Outcome(
        figures=figures,
        server={
            "kv_cache_tokens": node.account.kv_cache_tokens,
            "num_preemptions": usage.preemptions,
            "prefix_cache_queries": usage.prefix_queries,
            "prefix_cache_hits": usage.prefix_hits,
            "max_kv_usage": usage.max_kv_used_tokens / total if total else None,
        },
        parts_ms={**parts, "stream": figures.get("mean_first_token_delivery_ms")},
        waiting=dict(usage.waiting),
        device=dict(usage.device),
        regime=verdict,
        queues=queues(node.series, duration),
        caps=_caps_of(node.account, limits, None, records),
        duration=duration,
    )


def queues(series: ServerSeries, duration: float) -> dict[str, Value]:
    """Time-weighted means and maxima of the server's series; a sample holds until the next one."""
    if not len(series.time):
        return {}
    ends = np.append(series.time[1:], max(duration, float(series.time[-1])))
    weights = np.maximum(ends - series.time, 0.0)
    total = float(weights.sum())
    found: dict[str, Value] = {}
    for name in ("running", "waiting", "kv_usage"):
        values = getattr(series, name)
        found[f"mean_{name}"] = float((values * weights).sum() / total) if total else None
        found[f"max_{name}"] = float(values.max())
    return found


def _caps(scenario: Scenario, outcome: SimResult) -> dict[str, Value]:
    limits = ENGINES[scenario.engine.name].limits(scenario.engine, outcome.account)
    return _caps_of(outcome.account, limits, scenario.workload.max_concurrency, outcome.result.records)


def _caps_of(
    account: MemoryAccount, limits: Limits, max_concurrency: int | None, records: RequestRecords | None
) -> dict[str, Value]:
    tokens = None
    if records is not None and len(records):
        tokens = float((records.prompt_len + np.maximum(records.output_len, 0)).mean())
    return {
        "kv_cache_tokens": account.kv_cache_tokens,
        "block_size": account.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_tokens": limits.max_num_tokens,
        "max_concurrency": max_concurrency,
        "request_tokens": tokens,
    }
