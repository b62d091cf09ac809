"""The memory account: from flags, model and GPU to the KV pool, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from sim.models.model import ModelConfig
from sim.provenance import Note, Origin


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


def config_notes(model: ModelConfig) -> list[Note]:
    """What was assumed of a config.json that the user passed; rows of the shipped table are known."""
    if model.source:
        return []
    return [Note("assumed", f"config.json {field}", rule) for field, rule in model.defaulted]
