"""What the simulator needs to know of an engine beyond its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.engines.base import Scheduler
from sim.hardware.spec import GpuSpec
from sim.memory import MemoryAccount
from sim.models.model import ModelConfig
from sim.request import Request
from sim.scenario import EngineConfig, Observed
from sim.steptime.buckets import GraphBuckets


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine's own flags cap, for naming what requests wait for; None is no cap.

    Attributes:
        max_num_seqs: sequences that may run at once.
        max_num_tokens: tokens of one step (SGLang: of one prefill batch).
    """

    max_num_seqs: int | None = None
    max_num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineGlue:
    """From a resolved configuration to the parts of a simulation.

    Attributes:
        account: the memory account of one rank: model, GPU, number of GPUs, configuration, observed facts.
            Raises BadInput where the engine would refuse to start.
        make_scheduler: a fresh scheduler for this configuration, KV pool, and seed. It will be given exactly
            the listed requests (which may spare it work; they decide nothing). Raises BadInput where the
            engine would refuse to start.
        graph_buckets: what batches are padded to.
        limits: the engine's own caps.
        idle_poll: pause of the engine's loop after a scheduling call that came to nothing [s].
    """

    account: Callable[[ModelConfig, GpuSpec, int, EngineConfig, Observed], MemoryAccount]
    make_scheduler: Callable[[EngineConfig, MemoryAccount, Sequence[Request], int], Scheduler]
    graph_buckets: Callable[[EngineConfig], GraphBuckets]
    limits: Callable[[EngineConfig, MemoryAccount], Limits]
    idle_poll: float
