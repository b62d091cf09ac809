"""The arguments of the vLLM scheduler (vLLM: `config/scheduler.py`, `config/cache.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.errors import BadInput

_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "max_model_len",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
)


@dataclass(frozen=True, slots=True)
class VllmSchedulerConfig:
    """The flags that the scheduler reads, under the engine's own names.

    Attributes:
        num_gpu_blocks: KV blocks as the engine counts them; one of them, the null block, is not usable.
        watermark: fraction of `num_gpu_blocks` that an admission must leave free while anything runs.
        version: engine version; the rules differ between 0.28 and 0.33, others use those of the nearer one.
        max_num_scheduled_tokens: token budget of a step, if it is below `max_num_batched_tokens`.
        max_num_active_seqs: cap on admissions below `max_num_seqs` (0.33.0 and later); None: no such cap.
        long_prefill_token_threshold_adaptive: the threshold is at least the fair share of the budget, which
            is `max_num_batched_tokens` over all running and waiting requests (0.33.0 and later).

    Raises BadInput for values with which the engine does not start.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    async_scheduling: bool
    scheduling_policy: str
    long_prefill_token_threshold: int
    scheduler_reserve_full_isl: bool
    watermark: float
    max_model_len: int
    enable_chunked_prefill: bool
    version: str = "0.28.0"
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    long_prefill_token_threshold_adaptive: bool = False

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput("--" + name.replace("_", "-"), value, "must be at least 1")
        if self.num_gpu_blocks < 2:
            raise BadInput("--num-gpu-blocks-override", self.num_gpu_blocks, "must be at least 2")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise BadInput("--scheduling-policy", self.scheduling_policy, "must be fcfs or priority")
        if self.max_num_batched_tokens < self.max_num_seqs:
            hint = f"must be at least max_num_seqs ({self.max_num_seqs})"
            raise BadInput("--max-num-batched-tokens", self.max_num_batched_tokens, hint)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            hint = f"must be at least max_model_len ({self.max_model_len}) without chunked prefill"
            raise BadInput("--max-num-batched-tokens", self.max_num_batched_tokens, hint)
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            hint = f"must lie between 0 and max_model_len ({self.max_model_len})"
            raise BadInput("--long-prefill-token-threshold", self.long_prefill_token_threshold, hint)
        if not 0 <= self.watermark < 1:
            raise BadInput("--watermark", self.watermark, "must be at least 0 and below 1")
        if not re.match(r"\d+\.\d+", self.version):
            raise BadInput("--engine-version", self.version, "must look like 0.28.0")

    @property
    def follows_0_33(self) -> bool:
        """Whether the rules of 0.33 hold rather than those of 0.28."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return (major, minor) > (0, 30)

    def prefill_threshold(self, num_requests: int) -> int:
        """Most tokens that one request may get in a step, with that many running and waiting requests."""
        threshold = self.long_prefill_token_threshold
        if not threshold or (self.follows_0_33 and num_requests <= 1):
            return self.max_model_len  # since 0.33.0 a lone request is not slowed down
        if self.follows_0_33 and self.long_prefill_token_threshold_adaptive:
            return max(threshold, self.max_num_batched_tokens // num_requests)
        return threshold
