"""One simulation as a job that can be sent to another process, and its result as one line of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sim.carry import account_of
from sim.errors import BadInput, EngineStuck
from sim.planning.outcome import Outcome, run_outcome
from sim.request import Request
from sim.scenario import Scenario
from sim.steptime.base import StepTimeModel
from sim.workload.generate import generate
from sim.workload.spec import WorkloadSpec

# What ran before this many pools' worth of tokens has left no trace in the prefix cache.
MEMORY_OF_POOLS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """A simulation to be run, complete in itself.

    Attributes:
        key: names the job; unique among the jobs of one sweep.
        step_time: None is the roofline with the GPU's default efficiencies.
        requests: None is what the scenario's workload generates.
        before: loads that the same engine served before, oldest first.
    """

    key: str
    scenario: Scenario
    step_time: StepTimeModel | None = None
    requests: tuple[Request, ...] | None = None
    before: tuple[WorkloadSpec, ...] = ()


Runner = Callable[[Sequence[Job]], list[Outcome]]


def run_job(job: Job) -> Outcome:
    """Run one job here and now."""
    try:
        before = earlier_requests(job.scenario, job.before) if job.before else []
    except (BadInput, EngineStuck) as error:
        return Outcome(failure=str(error))
    return run_outcome(job.scenario, step_time=job.step_time, requests=job.requests, before=before)


def run_serially(jobs: Sequence[Job]) -> list[Outcome]:
    """The plainest runner: one after the other."""
    return [run_job(job) for job in jobs]


def earlier_requests(scenario: Scenario, specs: Sequence[WorkloadSpec]) -> list[Request]:
    """What the engine served before, as far back as its KV pool can remember."""
    enough = MEMORY_OF_POOLS * account_of(scenario).kv_cache_tokens
    runs: list[list[Request]] = []
    for back, spec in enumerate(reversed(specs)):
        requests = generate(spec)
        runs.append([replace(r, request_id=f"{back}-{r.request_id}", session=None) for r in requests])
        enough -= sum(r.prompt_len + r.max_tokens for r in requests)
        if enough <= 0:
            break
    return [request for run in reversed(runs) for request in run]
