"""One scenario, two ways to run it: `predict` simulates it, `bench` runs it on the real engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sim.hardware.spec import GpuSpec
from sim.models.model import ModelConfig
from sim.provenance import Note, Sourced
from sim.workload.spec import WorkloadSpec

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Observed:
    """Facts read off a real start of this engine; they win over estimates.

    Attributes:
        kv_cache_tokens: "GPU KV cache size: N tokens" (vLLM) or `max_total_num_tokens` (SGLang).
        num_gpu_blocks: KV blocks, null block included (vLLM).
    """

    kv_cache_tokens: int | None = None
    num_gpu_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine's resolved configuration.

    Attributes:
        name, version: the engine, and the version whose rules were used (`asked_version`: what the user
            named; the two differ where no rules exist for the named one).
        values: every modelled argument, with underscores (`max_num_seqs`), resolved, with its origin.
        given: the arguments exactly as the user wrote them, for the launch: (flag, value or None).
        env: environment variables in front of the command.
    """

    name: EngineName
    version: str
    asked_version: str
    values: Mapping[str, Sourced[Any]]
    given: tuple[tuple[str, str | None], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The resolved value of one argument."""
        return self.values[key].value


@dataclass(frozen=True, slots=True)
class Scenario:
    """An engine with its flags, a model, GPUs, and a load."""

    engine: EngineConfig
    model: ModelConfig
    gpu: GpuSpec
    gpu_count: int
    workload: WorkloadSpec
    seed: int = 0
    observed: Observed = field(default_factory=Observed)
    notes: tuple[Note, ...] = ()
    name: str = ""
