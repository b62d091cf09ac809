"""A vLLM scheduler driven call by call, written down so that a test can be read."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from sim.engines.base import StepPlan, StepResult
from sim.engines.vllm.scheduler import VllmScheduler, VllmSchedulerConfig
from sim.request import Request
from tests.engines_for_tests import VLLM

ROOMY = replace(VLLM, block_size=4, num_gpu_blocks=101, max_model_len=400)
TIGHT = replace(ROOMY, num_gpu_blocks=7, max_model_len=24)


def ask(name: str, prompt: int, outputs: int, **more: Any) -> Request:
    """A request whose prompt is its own."""
    return Request(name, ((name, prompt),), outputs, **more)


class Play:
    """Drives a scheduler and writes each call down as `A[0:4] B[7:8] | preempted | waiting | free`."""

    def __init__(self, config: VllmSchedulerConfig, pipeline_depth: int | None = None) -> None:
        self.scheduler = VllmScheduler(config)
        self.depth = pipeline_depth or self.scheduler.pipeline_depth
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def add(self, *requests: Request) -> Play:
        for request in requests:
            self.scheduler.add_request(request)
        return self

    def step(self) -> str:
        """One call and, if the pipeline is full, one result."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        scheduled = " ".join(
            f"{c.request.request_id}[{c.start}:{c.start + c.num_tokens}]" for c in plan.scheduled
        )
        waiting = "".join(self.scheduler.waiting_ids())
        shown = [scheduled, "".join(plan.preempted), waiting, str(self.scheduler.block_pool.num_free_blocks)]
        if plan.scheduled:
            self.in_flight.append(plan)
        if self.in_flight and (len(self.in_flight) >= self.depth or not plan.scheduled):
            self.results.append(self.scheduler.update(self.in_flight.popleft()))
        return " | ".join(shown)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def to_the_end(self) -> list[str]:
        calls = []
        while self.scheduler.has_work():
            calls.append(self.step())
        return calls

    @property
    def finished(self) -> dict[str, str]:
        return {name: reason for result in self.results for name, reason in result.finished}


def two_that_outgrow_the_pool(config: VllmSchedulerConfig) -> tuple[list[str], Play]:
    play = Play(config).add(ask("A", 8, 8), ask("B", 8, 8))
    return play.to_the_end(), play
