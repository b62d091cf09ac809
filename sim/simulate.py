"""From a scenario to a predicted `BenchResult`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from sim.engines.glue import EngineGlue
from sim.errors import BadInput
from sim.figures.metrics import success_verdict, summarise
from sim.figures.regime import regime
from sim.fingerprint import fingerprint, model_fingerprint
from sim.hardware.spec import GpuSpec
from sim.loop.recorder import TtftParts
from sim.loop.replica import StepSink, Usage
from sim.loop.run import RunOutcome, run
from sim.memory import MemoryAccount
from sim.provenance import Note
from sim.refusals import refusals
from sim.request import Request
from sim.results import BenchResult, Verdict
from sim.results_io.writing import workload_identity
from sim.scenario import Scenario
from sim.steptime.base import StepTimeModel
from sim.steptime.cost import model_cost
from sim.steptime.defaults import default_efficiencies
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import TOO_FAR, Peaks, RooflineModel
from sim.workload.generate import Load, generate_load, warmups


class _Engines(Mapping[str, EngineGlue]):
    """The engines' rules by name; a module loads when its engine is asked for."""

    def __getitem__(self, name: str) -> EngineGlue:
        if name not in ENGINE_NAMES:
            raise KeyError(name)
        glue: EngineGlue = import_module(f"sim.engines.{name}.engine").ENGINE
        return glue

    def __iter__(self) -> Iterator[str]:
        return iter(ENGINE_NAMES)

    def __len__(self) -> int:
        return len(ENGINE_NAMES)


ENGINE_NAMES = ("vllm", "sglang")
ENGINES: Mapping[str, EngineGlue] = _Engines()

MAX_OUTSIDE = (
    0.01  # share of steps that may lie outside a calibration before the prediction is an extrapolation
)


@dataclass(frozen=True, slots=True)
class SimResult:
    """A prediction, and what only a simulator knows of it.

    Attributes:
        result: what a bench would have reported.
        ttft_parts: per request, in the order of `result.records`.
        usage: time by what bound the system, and the engine's counters.
        account: the memory account that the KV pool was taken from.
    """

    result: BenchResult
    ttft_parts: TtftParts
    usage: Usage
    account: MemoryAccount


def simulate(
    scenario: Scenario,
    *,
    step_time: StepTimeModel | None = None,
    requests: Sequence[Request] | None = None,
    load: Load | None = None,
    steps: StepSink | None = None,
    account: MemoryAccount | None = None,
    before: Sequence[Request] = (),
    leap: bool = True,
    fast: bool | None = None,
) -> SimResult:
    """Predict what the scenario's client would report.

    Args:
        step_time: instead of the roofline with the GPU's default efficiencies.
        requests: instead of those that the scenario's workload generates.
        load: what the scenario's workload generates, if that is at hand.
        steps: called with a JSON-ready dict for every step.
        account: instead of the one computed from the scenario.
        before: what the engine served before this run; it leaves the prefix cache warm, as an earlier run
            of a client with the same seed does.
        leap: False takes every step with the plain scheduler; the result is the same.
        fast: False leaves the compiled kernels alone, which take a moment to load; None: if installed.

    Raises:
        BadInput: the engine would refuse to start, or refuse a request; or the steps lie too far outside of
            what `step_time` was calibrated on.
        EngineStuck: the engine would hang, die or recompute for ever; names the request.
    """
    engine, spec = ENGINES[scenario.engine.name], scenario.workload
    notes: list[Note] = [*scenario.notes]
    if account is None:
        account = engine.account(
            scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
        )
    notes += account.notes
    if requests is None:
        load = load or generate_load(spec)
        requests = load.requests
        notes += load.notes
    refuses, refused = refusals(scenario.engine, requests, account.longest)
    notes += refused
    first = [*_renamed(before), *warmups(spec, requests)]
    if refuses is not None:
        first = [request for request in first if not refuses(request)]
    if step_time is None:
        step_time = roofline(scenario)
        notes += default_efficiencies(scenario.gpu).notes()
    everything = [*first, *requests] if first else requests
    outcome = run(
        engine.make_scheduler(scenario.engine, account, everything, scenario.seed),
        requests,
        step_time,
        max_concurrency=spec.max_concurrency,
        duration=spec.duration,
        refuses=refuses,
        warmups=first,
        stream_interval=scenario.engine["stream_interval"],
        idle_poll=engine.idle_poll,
        limits=engine.limits(scenario.engine, account),
        steps=steps,
        leap=leap,
        fast=fast,
    )
    return _report(scenario, account, step_time, outcome, notes)


def _renamed(before: Sequence[Request]) -> list[Request]:
    return [replace(request, request_id=f"before-{request.request_id}", arrival=0.0) for request in before]


def roofline(scenario: Scenario, efficiencies: Efficiencies | None = None) -> RooflineModel:
    """The roofline model of a scenario, with the GPU's default efficiencies unless others are given.

    Raises:
        BadInput: the GPU cannot compute in the dtypes that the model needs.
    """
    engine = scenario.engine
    ranks = int(engine["tensor_parallel_size"])
    cost = model_cost(scenario.model, ranks, engine["kv_cache_dtype"])
    defaults = default_efficiencies(scenario.gpu)
    return RooflineModel(
        efficiencies or defaults.efficiencies,
        cost,
        Peaks.of(scenario.gpu, cost),
        ENGINES[engine.name].graph_buckets(engine),
        ranks,
        source="given" if efficiencies else f"defaults of {defaults.family}",
    )


def _report(
    scenario: Scenario,
    account: MemoryAccount,
    step_time: StepTimeModel,
    outcome: RunOutcome,
    notes: list[Note],
) -> SimResult:
    records, usage, spec = outcome.records, outcome.usage, scenario.workload
    figures = summarise(records, spec, outcome.duration)
    verdict = success_verdict(figures)
    outside = sum(usage.out_of_range.values()) / max(1, usage.steps)
    reasons = tuple(
        Note("warning", "step time", f"{count} of {usage.steps} steps: {reason}")
        for reason, count in sorted(usage.out_of_range.items(), key=lambda item: (-item[1], item[0]))
    )
    _refuse_what_lies_too_far(usage)
    if outside > MAX_OUTSIDE:
        status = verdict.status if verdict.status == "INVALID" else "SUSPECT"
        verdict = Verdict(status, (*verdict.reasons, *reasons))
    else:
        notes += reasons
    result = BenchResult(
        origin="predicted",
        tool="servecast predict",
        identity=_identity(scenario, account, step_time),
        duration=outcome.duration,
        aggregates=figures,
        records=records,
        series=outcome.series,
        server=_server(account, usage),
        verdict=verdict,
        notes=tuple(notes),
        extra={
            "regime": asdict(regime(records, outcome.series, spec)),
            "ttft_parts_ms": _mean_parts(outcome.ttft_parts),
            "device_time": _device_time(usage, outcome.duration),
            "kv_origin": str(account.kv_origin),
            "waiting_time": dict(sorted(usage.waiting.items())),
            "steps": usage.steps,
            "path": outcome.path,
            "step_time": _described(step_time),
            "range": {
                "status": "extrapolated" if outside > MAX_OUTSIDE else "in range",
                "share_outside": outside,
                "how_far": sorted(usage.out_of_range),
            }
            if getattr(step_time, "valid", None) is not None
            else None,
        },
    )
    return SimResult(result, outcome.ttft_parts, usage, account)


def _refuse_what_lies_too_far(usage: Usage) -> None:
    far = {reason: count for reason, count in usage.out_of_range.items() if reason.endswith(TOO_FAR)}
    if sum(far.values()) > MAX_OUTSIDE * usage.steps:
        reason = max(far, key=lambda text: (far[text], text))
        hint = f"{reason} ({far[reason]} of {usage.steps} steps); calibrate nearer to this load"
        raise BadInput("--profile", None, hint)


def _identity(scenario: Scenario, account: MemoryAccount, step_time: StepTimeModel) -> dict[str, Any]:
    engine = scenario.engine
    return {
        "engine": engine.name,
        "engine_version": engine.asked_version,
        "rules_version": engine.version,
        "model": scenario.model.name,
        "model_id": scenario.model.name,
        "gpu": scenario.gpu.name,
        "gpu_count": scenario.gpu_count,
        "backend": engine.name,
        "engine_args": {key: value.value for key, value in sorted(engine.values.items())},
        "kv_cache_tokens": account.kv_cache_tokens,
        "workload": workload_identity(scenario.workload),
        "seed": scenario.seed,
        "scenario": scenario.name,
        "model_sha": model_fingerprint(scenario.model),
        "gpu_sha": fingerprint(_card(scenario.gpu)),
        "step_time_sha": fingerprint(_described(step_time)),
        "servecast_version": _own_version(),
    }


def _card(gpu: GpuSpec) -> dict[str, Any]:
    """What the card is, wherever its file lies."""
    return {key: value for key, value in asdict(gpu).items() if key != "file"}


def _server(account: MemoryAccount, usage: Usage) -> dict[str, float | int | None]:
    total = usage.kv_total_tokens
    return {
        "kv_cache_tokens": account.kv_cache_tokens,
        "num_preemptions": usage.preemptions,
        "prefix_cache_queries": usage.prefix_queries,
        "prefix_cache_hits": usage.prefix_hits,
        "max_kv_usage": usage.max_kv_used_tokens / total if total else None,
    }


def _mean_parts(parts: TtftParts) -> dict[str, float | None]:
    """Mean of each part over the requests that got a first token [ms]."""
    means: dict[str, float | None] = {}
    for name, seconds in asdict(parts).items():
        known = seconds[~np.isnan(seconds)]
        means[name] = float(known.mean()) * 1000.0 if len(known) else None
    return means


def _device_time(usage: Usage, duration: float) -> dict[str, float]:
    busy = sum(usage.device.values())
    return {**dict(sorted(usage.device.items())), "idle": max(0.0, duration - busy)}


def _described(step_time: StepTimeModel) -> dict[str, Any]:
    """The step-time model's coefficients, JSON-ready; other models are told by their type."""
    if isinstance(step_time, RooflineModel):
        return {
            "model": "roofline",
            "source": step_time.source,
            "efficiencies": step_time.efficiencies.to_dict(),
            "peaks": asdict(step_time.peaks),
            "cost": asdict(step_time.cost),
        }
    return {"model": type(step_time).__name__}


@cache
def _own_version() -> str | None:
    try:
        return version("servecast")
    except PackageNotFoundError:
        return None
