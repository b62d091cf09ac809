"""Step-time models and small schedulers whose timing can be worked out by hand."""

from dataclasses import dataclass, field, replace

from sim.engines.base import QueueState, ScheduledChunk, StepPlan, StepResult
from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.vllm.config import VllmSchedulerConfig
from sim.engines.vllm.scheduler import VllmScheduler
from sim.steptime.base import FrontEnd


@dataclass(frozen=True)
class FixedSteps:
    """Every step takes `step` seconds on the device, whatever is in it."""

    step: float = 1.0
    before: float = 0.0
    after: float = 0.0
    per_token: float = 0.0
    front_end: FrontEnd = field(default_factory=FrontEnd)

    def gpu(self, shape):
        return self.step + self.per_token * shape.num_tokens if shape.num_tokens else 0.0

    def host_before(self, shape):
        return self.before

    def host_after(self, shape):
        return self.after

    def out_of_range(self, shape):
        return None


VLLM = VllmSchedulerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
    num_gpu_blocks=1001,
    enable_prefix_caching=True,
    async_scheduling=False,
    scheduling_policy="fcfs",
    long_prefill_token_threshold=0,
    scheduler_reserve_full_isl=True,
    watermark=0.0,
    max_model_len=4096,
    enable_chunked_prefill=True,
)
SGLANG = SglangSchedulerConfig(
    max_running_requests=8,
    chunked_prefill_size=64,
    max_prefill_tokens=1024,
    schedule_policy="fcfs",
    schedule_conservativeness=1.0,
    page_size=1,
    disable_radix_cache=False,
    enable_mixed_chunk=False,
    disable_overlap_schedule=True,
    max_total_tokens=16000,
    context_length=4096,
)


def vllm(**changes):
    return VllmScheduler(replace(VLLM, **changes))


def sglang(**changes):
    return SglangScheduler(replace(SGLANG, **changes))


class NeverSchedules:
    """Holds requests and never runs one: a latch that nothing clears."""

    pipeline_depth = 1

    def __init__(self):
        self.requests = []
        self.steps = 0

    def add_request(self, request):
        self.requests.append(request)

    def schedule(self):
        self.steps += 1
        return StepPlan(self.steps - 1, "idle")

    def update(self, plan):
        return StepResult()

    def has_work(self):
        return bool(self.requests)

    def queue_state(self):
        return QueueState(0, len(self.requests), 0, 1000)

    def running_ids(self):
        return []

    def waiting_ids(self):
        return [request.request_id for request in self.requests]


class NeverFinishes(NeverSchedules):
    """Computes the first request's prompt again and again: recompute, preempt, recompute."""

    def schedule(self):
        self.steps += 1
        request = self.requests[0]
        chunk = ScheduledChunk(request, 0, request.prompt_len, False)
        return StepPlan(self.steps - 1, "mixed", [chunk], [request.request_id])
