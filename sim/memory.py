"""The memory account: from flags, model and GPU to the KV pool, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from sim.models.model import ModelConfig
from sim.models.stages import largest_stage
from sim.models.weights import kv_bytes_per_sequence, with_quantization
from sim.provenance import Note, Origin
from sim.scenario import EngineConfig, Scenario


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the account. `low`/`high` bound what the engine measures and we only estimate [bytes]."""

    name: str
    bytes: int
    origin: Origin
    rule: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Where one rank's GPU memory goes, and the KV pool that remains.

    Attributes:
        lines: total memory, what is taken from it, and the pool, in the engine's own order.
        kv_pool_bytes: bytes for KV on one rank.
        kv_bytes_per_token: on one rank, over all layers that keep KV for every token.
        block_size: tokens per block (vLLM) or page (SGLang).
        num_gpu_blocks: blocks including the null block (vLLM); pages for SGLang.
        kv_cache_tokens: as the engine's log prints it.
        estimated_tokens: our estimate, also when `kv_cache_tokens` was given; with its bounds.
        max_concurrency: sequences of `max_model_len` that fit, as vLLM logs it.
        kv_origin: GIVEN, LOGGED or COMPUTED.
        longest: tokens of the longest request, where memory leaves less than the engine's flags say.
    """

    lines: tuple[MemoryLine, ...]
    kv_pool_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_gpu_blocks: int
    kv_cache_tokens: int
    estimated_tokens: int
    estimated_tokens_low: int
    estimated_tokens_high: int
    max_concurrency: float
    kv_origin: Origin
    notes: tuple[Note, ...]
    longest: int | None = None


def attention_ranks(engine: EngineConfig) -> int:
    """Ranks that share the KV heads of a request: with SGLang's DP attention those of one replica only."""
    ranks = int(engine["tensor_parallel_size"])
    shared = "enable_dp_attention" in engine.values and engine["enable_dp_attention"]
    return ranks // int(engine["data_parallel_size"]) if shared else ranks


def rank_model(scenario: Scenario) -> ModelConfig:
    """The layers that the account's rank holds, in the formats that the engine is told to use."""
    engine = scenario.engine
    model = with_quantization(scenario.model, engine["quantization"], engine["dtype"])
    return largest_stage(model, int(engine["pipeline_parallel_size"]))


def request_bytes(scenario: Scenario, length: int) -> int:
    """KV and state that a request of `length` tokens holds on the account's rank [bytes]."""
    ranks, dtype = attention_ranks(scenario.engine), str(scenario.engine["kv_cache_dtype"])
    return kv_bytes_per_sequence(rank_model(scenario), length, ranks, dtype)


def config_notes(model: ModelConfig) -> list[Note]:
    """What was assumed of a config.json that the user passed; rows of the shipped table are known."""
    if model.source:
        return []
    return [Note("assumed", f"config.json {field}", rule) for field, rule in model.defaulted]
