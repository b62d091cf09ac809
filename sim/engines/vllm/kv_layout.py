"""How vLLM lays out the KV pool: groups of layers, blocks, and the figures of its capacity log line.

Rules: `vllm/v1/core/kv_cache_utils.py` and `vllm/v1/kv_cache_interface.py` (0.28). Layers of one kind form
groups of equal size; each group has a block table of its own, and all draw blocks from one pool. A block is
one page in each of `group_size` layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import BadInput
from sim.models.model import ModelConfig
from sim.models.weights import kv_bytes_per_token_per_layer, state_bytes_per_sequence


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table.

    Attributes:
        kind: "full", "sliding", "chunked" or "state".
        block_size: tokens per block of this group; 0 for state, whose block is one snapshot.
        window: tokens that a sliding or chunked layer looks back.
        count: groups of this kind.
    """

    kind: str
    block_size: int
    window: int
    count: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Blocks of one rank. `page_bytes`: one block in one layer; a block spans `group_size` layers."""

    groups: tuple[KvGroup, ...]
    page_bytes: int
    group_size: int
    block_size: int
    bytes_per_token: int

    @property
    def block_bytes(self) -> int:
        """Pool bytes of one block."""
        return self.page_bytes * self.group_size

    @property
    def num_groups(self) -> int:
        """Block tables per request."""
        return sum(group.count for group in self.groups)


def kv_layout(
    model: ModelConfig,
    *,
    tp: int,
    kv_cache_dtype: str,
    block_size: int,
    hybrid: bool = True,
) -> KvLayout:
    """Groups and page size for a model.

    `hybrid` False: `--disable-hybrid-kv-cache-manager`, sliding layers are charged as full ones.

    Raises:
        BadInput: `tp` does not divide the model, or it has no layer that keeps KV.
    """
    full = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype)
    sliding = kv_bytes_per_token_per_layer(model, tp, kv_cache_dtype, sliding=True)
    counts = {"full": model.num_full_attention_layers, "sliding": model.num_sliding_layers}
    per_token = counts["full"] * full + counts["sliding"] * sliding
    if counts["full"] + counts["sliding"] == 0:
        raise BadInput("--model", model.name, "keeps no KV: models without attention are not modelled")
    if not hybrid or model.sliding_window is None:
        counts = {"full": counts["full"] + counts["sliding"], "sliding": 0}
    if model.state is not None:
        return _with_state(model, tp, block_size, full, counts["full"], per_token)
    if counts["full"] == 0:
        return _one_group(_sliding_kind(model), model, sliding, counts["sliding"], block_size, per_token)
    if counts["sliding"] == 0:
        if full == sliding or model.num_sliding_layers == 0:
            per_token += _indexer_bytes(model) * counts["full"]
            full += _indexer_bytes(model)
            return _one_group("full", model, full, counts["full"], block_size, per_token)
        # Unlike pages in one group: a block is the sum of all layers' pages.
        return KvLayout(
            (KvGroup("full", block_size, 0, 1),), per_token * block_size, 1, block_size, per_token
        )
    return _mixed(model, full, sliding, counts, block_size, per_token)


def blocks_per_request(layout: KvLayout, length: int, in_flight: int) -> int:
    """Blocks that a request of `length` tokens holds at most, over all groups.

    `in_flight`: tokens scheduled but not yet processed (concurrent batches x token budget); out-of-window
    blocks are freed only behind them.
    """
    total = 0
    for group in layout.groups:
        if group.kind == "full":
            blocks = -(-length // group.block_size)
        elif group.kind == "chunked":
            blocks = -(-min(group.window + in_flight, length) // group.block_size)
        elif group.kind == "sliding":
            blocks = -(-min(group.window - 1 + in_flight, length) // group.block_size) + 1
        else:
            blocks = group.window  # snapshots of the state
        total += blocks * group.count
    return total


def num_blocks(layout: KvLayout, available: int) -> int:
    """Blocks that fit into `available` bytes, null block included."""
    return max(0, available // layout.page_bytes // layout.group_size)


def logged_tokens(
    layout: KvLayout, blocks: int, max_model_len: int, in_flight: int, *, by_concurrency: bool = True
) -> tuple[int, float]:
    """ "GPU KV cache size" and "Maximum concurrency" as the engine logs them.

    `by_concurrency`: the rule since 0.20, tokens = int(concurrency * max_model_len); before, blocks over
    groups times the block size.
    """
    concurrency = blocks / blocks_per_request(layout, max_model_len, in_flight)
    if by_concurrency:
        return int(concurrency * max_model_len), concurrency
    return blocks // layout.num_groups * layout.block_size, concurrency


def blocks_from_tokens(
    layout: KvLayout, tokens: int, max_model_len: int, in_flight: int, *, by_concurrency: bool = True
) -> int:
    """The fewest blocks whose log line would print at least `tokens`: `logged_tokens` turned round."""
    if by_concurrency:
        blocks = tokens * blocks_per_request(layout, max_model_len, in_flight) // max_model_len
    else:
        blocks = tokens // layout.block_size * layout.num_groups
    for candidate in range(max(0, blocks - 1), blocks + 3):
        shown, _ = logged_tokens(layout, candidate, max_model_len, in_flight, by_concurrency=by_concurrency)
        if shown >= tokens:
            return candidate
    return blocks


def longest_request(layout: KvLayout, blocks: int, max_model_len: int, in_flight: int) -> int:
    """The longest request that `blocks` can hold, at most `max_model_len`; 0 if not one token fits."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(layout, middle, in_flight) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _sliding_kind(model: ModelConfig) -> str:
    return "chunked" if model.model_type.startswith("llama4") else "sliding"


def _indexer_bytes(model: ModelConfig) -> int:
    """Sparse attention's key cache per token and layer: fp8 values and an fp32 scale per 128 of them
    (`vllm/model_executor/layers/sparse_attn_indexer.py`)."""
    if model.mla is None or model.mla.index_head_dim == 0:
        return 0
    return model.mla.index_head_dim + model.mla.index_head_dim // 128 * 4


def _one_group(
    kind: str, model: ModelConfig, bytes_per_layer: int, layers: int, block_size: int, per_token: int
) -> KvLayout:
    group = KvGroup(kind, block_size, model.sliding_window or 0, 1)
    return KvLayout((group,), bytes_per_layer * block_size, layers, block_size, per_token)


def _group_size(counts: tuple[int, int]) -> int:
    """The smaller count, or the larger one if it is less than half as large again."""
    least, most = min(counts), max(counts)
    return most if most < least * 1.5 else least


def _mixed(
    model: ModelConfig, full: int, sliding: int, counts: dict[str, int], block_size: int, per_token: int
) -> KvLayout:
    size = _group_size((counts["full"], counts["sliding"]))
    page = max(full, sliding) * block_size
    groups = []
    for kind, own in (("full", full), (_sliding_kind(model), sliding)):
        count = -(-counts["full" if kind == "full" else "sliding"] // size)
        # Smaller pages grow to the common size by holding more tokens; where that does not divide, padding.
        tokens = block_size * (page // (own * block_size)) if page % (own * block_size) == 0 else block_size
        groups.append(KvGroup(kind, tokens, model.sliding_window or 0, count))
    return KvLayout(tuple(groups), page, size, block_size, per_token)


def _with_state(
    model: ModelConfig, tp: int, block_size: int, full: int, layers: int, per_token: int
) -> KvLayout:
    """Attention blocks grow until one holds a layer's state (`platforms/interface.py
    _align_hybrid_block_size`); with prefix caching a request keeps two snapshots per layer."""
    state = model.state
    if state is None:
        raise ValueError("no state layers")
    state_page = state_bytes_per_sequence(model, tp) // state.num_layers
    align = 128 if model.mla is not None else block_size
    tokens = max(block_size, align * -(-state_page // (align * full)))
    if layers == 0:
        raise BadInput("--model", model.name, "keeps no KV: models without attention are not modelled")
    size = _group_size((layers, state.num_layers))
    groups = (
        KvGroup("full", tokens, 0, -(-layers // size)),
        KvGroup("state", 0, 2, -(-state.num_layers // size)),
    )
    return KvLayout(groups, full * tokens, size, tokens, per_token)
