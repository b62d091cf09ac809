"""Replay of a recorded scenario, for comparison with what the real scheduler decided."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any

from sim.engines.base import StepPlan
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.sglang.tokens import prompt_runs
from sim.errors import BadInput
from sim.request import Request, Segment

Line = dict[str, Any]


def config_of(scenario: Line, version: str) -> SglangSchedulerConfig:
    """The scheduler configuration of a scenario.

    Raises:
        BadInput: an argument is missing or unknown.
    """
    args = scenario["args"]
    known = {field.name for field in fields(SglangSchedulerConfig)}
    for name in args:
        if name not in known:
            raise BadInput(f"args.{name}", args[name], "is no argument of the SGLang scheduler")
    try:
        return SglangSchedulerConfig(**{**args, "version": version})
    except TypeError as error:
        raise BadInput("args", None, str(error)) from error


def requests_of(scenario: Line) -> list[Request]:
    """The requests of a scenario, in its order."""
    stops = {
        spec["id"]: spec["stop_after"] for spec in scenario["requests"] if spec["stop_after"] is not None
    }
    requests = []
    for spec in scenario["requests"]:
        prompt: tuple[Segment, ...] = tuple((key, length) for key, length in spec["prompt"])
        requests.append(
            Request(
                request_id=spec["id"],
                prompt=_with_stop_tokens(prompt, stops),
                max_tokens=spec["max_tokens"],
                stop_after=spec["stop_after"],
                priority=spec["priority"],
            )
        )
    return requests


def replay(scenario: Line, version: str) -> tuple[list[Line], Line]:
    """Run a scenario with the clock of the recordings: one tick per scheduling call.

    Returns:
        One line per call, and the facts of the header: "outcome" {id: [reason, outputs, retractions]} and
        "evicted_tokens".

    Raises:
        EngineStuck: the real engine dies or hangs in this scenario.
    """
    scheduler = SglangScheduler(config_of(scenario, version))
    requests = requests_of(scenario)
    steps = [spec["arrival_step"] for spec in scenario["requests"]]
    pending = deque(sorted(range(len(requests)), key=lambda i: steps[i]))
    retractions = {request.request_id: 0 for request in requests}
    outcome: dict[str, list[Any]] = {}
    lines: list[Line] = []
    unprocessed: deque[StepPlan] = deque()
    step = 0
    while pending or scheduler.has_work():
        if not scheduler.has_work():
            step = max(step, steps[pending[0]])
        while pending and steps[pending[0]] <= step:
            scheduler.add_request(requests[pending.popleft()])
        plan = scheduler.schedule()
        line = _line(step, plan, scheduler)
        for request_id in plan.preempted:
            retractions[request_id] += 1
        unprocessed.append(plan)
        if len(unprocessed) == scheduler.pipeline_depth:
            result = scheduler.update(unprocessed.popleft())
            outputs = dict(result.new_tokens)
            line["new_tokens"] = [list(entry) for entry in result.new_tokens]
            line["finished"] = [request_id for request_id, _ in result.finished]
            for request_id, reason in result.finished:
                outcome[request_id] = [reason, outputs[request_id], retractions[request_id]]
        lines.append(line)
        step += 1
    evicted = 0 if scheduler.pool.tree is None else scheduler.pool.tree.evicted
    ordered = {request.request_id: outcome[request.request_id] for request in requests}
    return lines, {"outcome": ordered, "evicted_tokens": evicted}


def _line(step: int, plan: StepPlan, scheduler: SglangScheduler) -> Line:
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


def _with_stop_tokens(prompt: tuple[Segment, ...], stops: dict[str, int]) -> tuple[Segment, ...]:
    """Write quoted stop tokens out: a scenario knows them before the run, a scheduler only after it."""
    quoted = prompt_runs(prompt, stops)
    for key, start, length in quoted:
        if start:
            raise BadInput("prompt", key, f"quotes {start + length} tokens, more than the request generates")
    return tuple((key, length) for key, _, length in quoted)
