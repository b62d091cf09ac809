"""Replays recorded scenarios through `VllmScheduler` (the loop of vLLM 0.28.0, `v1/engine/core.py`)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import fields
from typing import Any

from sim.engines.base import StepPlan
from sim.engines.replay import Scenario, arrivals
from sim.engines.vllm.scheduler import VllmScheduler, VllmSchedulerConfig
from sim.errors import BadInput


def replay(
    scenario: Scenario, version: str, pipeline_depth: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a scenario: lines of the trace, one per scheduling call, and `outcome` and `evicted_blocks`.

    With asynchronous scheduling one iteration is "call k, then the result of call k - 1"; an iteration that
    only drains the pipeline makes no call and no line, and a call that schedules nothing has no result.
    `pipeline_depth` lets results come later than the engine's own two steps at most, as pipeline parallelism
    does. Raises BadInput for a malformed scenario, EngineStuck where the engine would hang.
    """
    pending = arrivals(scenario)
    ids = [request["id"] for request in scenario["requests"]]
    scheduler = VllmScheduler(_config(scenario, version))
    lines: list[dict[str, Any]] = []
    outcome: dict[str, list[Any]] = {}
    outputs: dict[str, int] = {}
    preemptions: Counter[str] = Counter()
    in_flight: deque[StepPlan] = deque()
    depth = pipeline_depth or scheduler.pipeline_depth
    step = 0
    while pending or in_flight or scheduler.has_work():
        if not in_flight and not scheduler.has_work():
            step = max(step, pending[0][0])
        while pending and pending[0][0] <= step:
            scheduler.add_request(pending.popleft()[1])
        line: dict[str, Any] | None = None
        if scheduler.has_work():
            plan = scheduler.schedule()
            line = _line(step, plan, scheduler)
            lines.append(line)
            preemptions.update(plan.preempted)
            step += 1
            if plan.scheduled:
                in_flight.append(plan)
                if len(in_flight) < depth:
                    continue
        if in_flight:
            result = scheduler.update(in_flight.popleft())
            outputs.update(result.new_tokens)
            for request_id, reason in result.finished:
                outcome[request_id] = [reason, outputs[request_id], preemptions[request_id]]
            if line is not None:
                line["new_tokens"] = [list(entry) for entry in result.new_tokens]
                line["finished"] = [request_id for request_id, _ in result.finished]
    facts = {
        "outcome": {request_id: outcome[request_id] for request_id in ids},
        "evicted_blocks": scheduler.block_pool.num_evicted_blocks,
    }
    return lines, facts


def _config(scenario: Scenario, version: str) -> VllmSchedulerConfig:
    args = scenario["args"]
    known = {field.name for field in fields(VllmSchedulerConfig)} - {"version"}
    optional = {
        "max_num_scheduled_tokens",
        "max_num_active_seqs",
        "long_prefill_token_threshold_adaptive",
    }
    for name in args.keys() - known:
        raise BadInput(f"scenario {scenario['id']}", name, "unknown argument")
    for name in sorted(known - optional - args.keys()):
        raise BadInput(f"scenario {scenario['id']}", name, "argument is missing")
    return VllmSchedulerConfig(**args, version=version)


def _line(step: int, plan: StepPlan, scheduler: VllmScheduler) -> dict[str, Any]:
    """The trace line of a call, before any result."""
    return {
        "step": step,
        "scheduled": [[chunk.request.request_id, chunk.start, chunk.num_tokens] for chunk in plan.scheduled],
        "kind": "mixed",
        "preempted": plan.preempted,
        "new_tokens": [],
        "finished": [],
        "running": list(scheduler.running_ids()),
        "waiting": list(scheduler.waiting_ids()),
        "free_blocks": scheduler.block_pool.num_free_blocks,
        "cached": [list(entry) for entry in plan.cached],
    }
