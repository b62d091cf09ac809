"""Replays recorded scenarios through `SglangScheduler` (the event loops of SGLang 0.5.21's scheduler)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import MISSING, fields
from typing import Any

from sim.engines.base import StepPlan
from sim.engines.replay import Scenario, arrivals
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.scheduler import SglangScheduler
from sim.errors import BadInput


def replay(scenario: Scenario, version: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a scenario: lines of the trace, one per scheduling call, and `outcome` and `evicted_tokens`.

    The clock ticks with every call, also with one that returns no batch, and jumps to the next arrival once
    the engine has found itself idle. With the overlap schedule the results in a line are those of the
    previous call.

    Raises:
        BadInput: a malformed scenario.
        EngineStuck: the real engine dies or hangs in it.
    """
    pending = arrivals(scenario)
    scheduler = SglangScheduler(_config(scenario, version))
    ids = [request["id"] for request in scenario["requests"]]
    outcome: dict[str, list[Any]] = {}
    outputs: dict[str, int] = {}
    retractions: Counter[str] = Counter()
    lines: list[dict[str, Any]] = []
    unprocessed: deque[StepPlan] = deque()
    step = 0
    while pending or scheduler.has_work():
        if not scheduler.has_work():
            step = max(step, pending[0][0])
        while pending and pending[0][0] <= step:
            scheduler.add_request(pending.popleft()[1])
        plan = scheduler.schedule()
        line = _line(step, plan, scheduler)
        lines.append(line)
        step += 1
        retractions.update(plan.preempted)
        unprocessed.append(plan)
        if len(unprocessed) < scheduler.pipeline_depth:
            continue
        result = scheduler.update(unprocessed.popleft())
        outputs.update(result.new_tokens)
        line["new_tokens"] = [list(entry) for entry in result.new_tokens]
        line["finished"] = [request_id for request_id, _ in result.finished]
        for request_id, reason in result.finished:
            outcome[request_id] = [reason, outputs[request_id], retractions[request_id]]
    facts = {
        "outcome": {request_id: outcome[request_id] for request_id in ids},
        "evicted_tokens": 0 if scheduler.pool.tree is None else scheduler.pool.tree.evicted,
    }
    return lines, facts


def _config(scenario: Scenario, version: str) -> SglangSchedulerConfig:
    args = scenario["args"]
    known = [field for field in fields(SglangSchedulerConfig) if field.name != "version"]
    for name in sorted(args.keys() - {field.name for field in known}):
        raise BadInput(f"scenario {scenario['id']}", name, "unknown argument")
    for field in known:
        if field.default is MISSING and field.name not in args:
            raise BadInput(f"scenario {scenario['id']}", field.name, "argument is missing")
    return SglangSchedulerConfig(**args, version=version)


def _line(step: int, plan: StepPlan, scheduler: SglangScheduler) -> dict[str, Any]:
    """The trace line of a call, before any result."""
    return {
        "step": step,
        "scheduled": [[chunk.request.request_id, chunk.start, chunk.num_tokens] for chunk in plan.scheduled],
        "kind": plan.kind,
        "retracted": plan.preempted,
        "new_tokens": [],
        "finished": [],
        "running": list(scheduler.running_ids()),
        "waiting": list(scheduler.waiting_ids()),
        "available": scheduler.pool.available,
        "evictable": scheduler.pool.evictable,
        "cached": [list(entry) for entry in plan.cached],
        "new_token_ratio": round(scheduler.ratio.current, 6),
    }
