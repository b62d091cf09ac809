"""What the SGLang scheduler is configured with."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import BadInput

CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")
CACHE_AGNOSTIC_POLICIES = ("fcfs", "lof", "random")
VERSIONS = ("0.5.21",)
MODELLED_POLICIES = (*CACHE_AGNOSTIC_POLICIES, *CACHE_AWARE_POLICIES)


@dataclass(frozen=True, slots=True)
class SglangSchedulerConfig:
    """Flags with underscores, as SGLang's server takes them, resolved to numbers.

    Raises BadInput for a value that no engine could start with, and for a policy that is not modelled.

    Attributes:
        max_running_requests: the scheduler never uses more than half of `max_total_tokens`.
        chunked_prefill_size: tokens of one prefill batch; 0 or less turns chunking (and mixing) off.
        max_prefill_tokens: tokens of one prefill batch after which no further request joins it.
        schedule_policy: one of `MODELLED_POLICIES`; cache-aware ones mean "fcfs" without a radix cache.
        schedule_conservativeness: scales the initial new-token ratio.
        page_size: tokens per page of the KV pool.
        max_total_tokens: tokens of the KV pool; whole pages of them are used.
        context_length: the model's limit on prompt plus output [tokens].
        enable_priority_scheduling: order and preempt by `Request.priority` (larger is sooner, unless
            `schedule_low_priority_values_first`).
        priority_scheduling_preemption_threshold: a running request is preempted only if its priority is
            lower by more than this.
        prefill_max_requests: requests of one prefill batch; None means any number.
        prefill_decode_interval: calls after a prefill batch in which only decodes may run.
        num_continuous_decode_steps: accepted; no reader in 0.5.21.
        init_new_token_ratio, min_new_token_ratio, new_token_ratio_decay: where SGLANG_*NEW_TOKEN_RATIO*
            variables say otherwise; None follows from `schedule_conservativeness`.
        seed: seed of the "random" policy.
        version: whose rules apply, one of `VERSIONS`.
    """

    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    schedule_policy: str
    schedule_conservativeness: float
    page_size: int
    disable_radix_cache: bool
    enable_mixed_chunk: bool
    disable_overlap_schedule: bool
    max_total_tokens: int
    context_length: int
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    schedule_low_priority_values_first: bool = False
    prefill_max_requests: int | None = None
    prefill_decode_interval: int = 0
    num_continuous_decode_steps: int = 1
    init_new_token_ratio: float | None = None
    min_new_token_ratio: float | None = None
    new_token_ratio_decay: float | None = None
    seed: int = 0
    version: str = "0.5.21"

    def __post_init__(self) -> None:
        for field in ("max_running_requests", "max_prefill_tokens", "page_size", "context_length"):
            if getattr(self, field) < 1:
                raise BadInput(_flag(field), getattr(self, field), "must be at least 1")
        if self.max_total_tokens // self.page_size < 2:
            raise BadInput("--max-total-tokens", self.max_total_tokens, "must be at least two pages")
        if self.schedule_conservativeness < 0:
            raise BadInput(
                "--schedule-conservativeness", self.schedule_conservativeness, "must be at least 0"
            )
        if self.version not in VERSIONS:
            hint = f"the scheduler's rules are known for SGLang {', '.join(VERSIONS)} only"
            raise BadInput("version", self.version, hint)
        if self.schedule_policy not in MODELLED_POLICIES:
            hint = f"is not modelled; choose one of {', '.join(MODELLED_POLICIES)}"
            raise BadInput("--schedule-policy", self.schedule_policy, hint)
        if self.prefill_max_requests is not None and self.prefill_max_requests < 1:
            raise BadInput("--prefill-max-requests", self.prefill_max_requests, "must be at least 1")
        threshold = self.priority_scheduling_preemption_threshold
        if threshold < 0:
            hint = "must be at least 0, or requests of equal priority preempt each other for ever"
            raise BadInput("--priority-scheduling-preemption-threshold", threshold, hint)
        if self.prefill_decode_interval < 0:
            raise BadInput("--prefill-decode-interval", self.prefill_decode_interval, "must be at least 0")

    @property
    def pool_tokens(self) -> int:
        """Usable tokens of the KV pool."""
        return self.max_total_tokens // self.page_size * self.page_size

    @property
    def request_slots(self) -> int:
        """Request slots. Source: SGLang 0.5.21 `kv_cache_configurator.resolve_max_num_reqs`."""
        return min(self.max_running_requests, self.pool_tokens // 2)

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of one prefill batch, None without chunking."""
        return self.chunked_prefill_size if self.chunked_prefill_size > 0 else None

    @property
    def mixes_chunks(self) -> bool:
        """Whether decodes join prefill batches; without chunking the flag does nothing."""
        return self.enable_mixed_chunk and self.chunked_prefill_size > 0


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
