"""What an engine says of itself while it starts: resolved flags and the size of its KV pool.

Engines print the pool in several ways, and each carries its own trap; every format has an id here, and
the lines it was read from are kept as they were.

    vllm-v0-blocks   `# GPU blocks: 2000, # CPU blocks: 2048` (vLLM 0.5 to 0.8, engine V0): blocks, not
                     tokens; the block size is a flag (16 unless given).
    vllm-v1-tokens   `GPU KV cache size: 72,816 tokens` and `Maximum concurrency for 8,192 tokens per
                     request: 8.89x` on two lines (V1 up to 0.1x, v1/core/kv_cache_utils.py).
    vllm-v1-oneline  the same on one line (0.2x and later). There N = int(C * max_model_len).
    sglang           `KV Cache is allocated. #tokens: 300000, K size: 6.72 GB, V size: 6.72 GB` (or one
                     `KV size`, mem_cache/memory_pool.py; its GB are GiB) and `max_total_num_tokens=...`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sim.provenance import Origin, Sourced

GIB = 1 << 30
DEFAULT_V0_BLOCK_SIZE = 16
FormatId = Literal["vllm-v0-blocks", "vllm-v1-tokens", "vllm-v1-oneline", "sglang"]


@dataclass(frozen=True, slots=True)
class KvPool:
    """A KV pool as one engine core printed it.

    Attributes:
        format_id, raw: which format, and the lines as printed.
        tokens: as printed, or blocks * block_size. For a hybrid layout this is a derived figure, not the
            pool's size: use `equivalent_tokens`.
        blocks: KV blocks, where the log names them.
        max_len: the length that `concurrency` refers to [tokens].
        concurrency: sequences of `max_len` that fit, as printed.
        kv_bytes: memory of the pool [bytes], as precise as the log's two decimals.
        layout: "uniform", or "hybrid" if tokens / max_len disagrees with the printed concurrency.
    """

    format_id: FormatId
    raw: tuple[str, ...]
    tokens: int
    blocks: int | None = None
    max_len: int | None = None
    concurrency: float | None = None
    kv_bytes: int | None = None
    layout: Literal["uniform", "hybrid"] = "uniform"

    @property
    def consistent(self) -> bool:
        """Whether tokens / max_len is the printed concurrency."""
        return self.layout == "uniform"

    @property
    def check(self) -> str | None:
        """The cross-check in words, e.g. "32000/20000=1.60"; None where the log prints no concurrency."""
        if self.max_len is None or self.concurrency is None:
            return None
        ratio = f"{self.tokens}/{self.max_len}={self.tokens / self.max_len:.2f}"
        return ratio if self.consistent else f"{ratio}, but the log says {self.concurrency:.2f}x"

    @property
    def equivalent_tokens(self) -> int:
        """Tokens that sequences of `max_len` can really hold: concurrency * max_len for a hybrid layout."""
        if self.consistent or self.max_len is None or self.concurrency is None:
            return self.tokens
        return round(self.concurrency * self.max_len)

    @property
    def bytes_per_token(self) -> float | None:
        """KV bytes per token; None where one line cannot tell (hybrid layout, or no size printed)."""
        if self.kv_bytes is None or not self.consistent or self.tokens == 0:
            return None
        return self.kv_bytes / self.tokens


@dataclass(frozen=True, slots=True)
class StartupLog:
    """All that a start-up log told.

    Attributes:
        engine, version: None where the log does not say.
        pools: one per engine core (data parallel), in order of first appearance.
        given: arguments that differ from the engine's defaults, as the engine echoes them.
        resolved: the engine's resolved arguments, with underscores, each with the line's source.
        facts: short facts about the environment, e.g. "pin_memory=False".
    """

    engine: Literal["vllm", "sglang"] | None
    version: str | None
    pools: tuple[KvPool, ...]
    given: Mapping[str, Any]
    resolved: Mapping[str, Sourced[Any]]
    facts: tuple[str, ...]

    @property
    def kv(self) -> KvPool | None:
        """The pool of the first engine core; all cores of one deployment are configured alike."""
        return self.pools[0] if self.pools else None


def parse_startup_log(text: str, *, block_size: int | None = None) -> StartupLog:
    """Read a start-up log of vLLM (V0, V1) or SGLang; missing facts are absent, never 0.

    Args:
        text: the log, whole or in part; colours and process prefixes do not matter.
        block_size: the `--block-size` of the launch, needed where the log counts blocks only.
    """
    lines = [_plain(line) for line in text.splitlines()]
    given, resolved, engine, version = _arguments(lines)
    size = block_size or _int_or_none(_value(resolved, "block_size")) or _int_or_none(given.get("block_size"))
    pools = tuple(_pools(lines, size or DEFAULT_V0_BLOCK_SIZE))
    if engine is None and pools:
        engine = "sglang" if pools[0].format_id == "sglang" else "vllm"
    facts = _facts(lines)
    return StartupLog(engine, version, pools, given, resolved, facts)


def fit_bytes_per_request(runs: Sequence[tuple[int, int, int]]) -> tuple[float, float]:
    """Solve bytes_per_request(L) = a + b * L from starts of one model at two or more `max_model_len`.

    This is how a hybrid model's cost per token is told from logs: one line cannot, because its token count
    already folds the fixed part in.

    Args:
        runs: (max_model_len, kv_bytes, printed tokens); concurrency = printed tokens / max_model_len.

    Returns:
        (a [bytes], b [bytes/token]), least squares if more than two runs.

    Raises:
        ValueError: fewer than two different lengths.
    """
    xs = [float(length) for length, _, _ in runs]
    ys = [kv_bytes / (tokens / length) for length, kv_bytes, tokens in runs]
    if len(set(xs)) < 2:
        raise ValueError("needs starts at two different max_model_len")
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope


# ---------------------------------------------------------------- KV pool

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\(([A-Za-z]+[\w-]*) pid=\d+\)\s*|^\[[\d -]+[\d:.,]+ ?((?:DP|TP|PP)\d[^\]]*)?\]\s*")
_V0_BLOCKS = re.compile(r"# (?:GPU|cuda|rocm|cpu) blocks: ([\d,]+)", re.IGNORECASE)
_V0_MEMORY = re.compile(r"reserved for KV Cache is ([\d.]+)\s*GiB")
_V1_TOKENS = re.compile(r"\b(?:GPU|CPU|TPU|XPU|HPU)? ?KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.,]+)x")
_V1_MEMORY = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
_CPU_MEMORY = re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache")
_OVERRIDE = re.compile(r"num_gpu_blocks_override=(\d+)")
_SGL_POOL = re.compile(
    r"KV Cache is allocated\b[^#]*?(?:#tokens: (\d+), )?((?:(?:, |\. |: )?(?:K|V|KV) size: [\d.]+ GB)+)"
)
_SGL_SIZE = re.compile(r"size: ([\d.]+) GB")
_SGL_TOTAL = re.compile(r"\bmax_total_num_tokens=(\d+)")
_SGL_CONTEXT = re.compile(r"\bcontext_len=(\d+)")


def _plain(line: str) -> str:
    return _ANSI.sub("", line).rstrip()


def _source(line: str) -> str:
    """Return the engine core that printed a line: "EngineCore_DP1" of "(EngineCore_DP1 pid=7) ...", or ""."""
    match = _PREFIX.match(line)
    if not match:
        return ""
    if match[1]:
        return match[1] if match[1].startswith("EngineCore") else ""
    rank = re.match(r"DP\d+", match[2] or "")
    return rank[0] if rank else ""


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _is_hybrid(tokens: int, max_len: int, concurrency: float) -> bool:
    # Printed to two decimals, so half a unit of the last place is no disagreement.
    return abs(tokens / max_len - concurrency) > max(0.01 * concurrency, 0.0051)


def _pools(lines: Sequence[str], block_size: int) -> Iterator[KvPool]:
    sources: dict[str, list[str]] = {}
    for line in lines:
        sources.setdefault(_source(line), []).append(line)
    # Memory lines may come from a worker process while the core prints the size.
    for own in sources.values():
        pool = _vllm_v1(own, lines) or _vllm_v0(own, lines, block_size) or _sglang(own)
        if pool is not None:
            yield pool


def _search(pattern: re.Pattern[str], lines: Sequence[str]) -> tuple[re.Match[str], str] | None:
    """Find the match with the smallest figure (its last group): ranks print their own, the smallest rules."""
    found = [(match, line) for line in lines if (match := pattern.search(line))]
    return min(found, key=lambda item: float(item[0].groups()[-1].replace(",", ""))) if found else None


def _memory(lines: Sequence[str], *patterns: re.Pattern[str]) -> tuple[int | None, tuple[str, ...]]:
    for pattern in patterns:
        if found := _search(pattern, lines):
            return round(float(found[0][1]) * GIB), (found[1],)
    return None, ()


def _vllm_v1(own: Sequence[str], lines: Sequence[str]) -> KvPool | None:
    size = _search(_V1_TOKENS, own)
    if size is None:
        return None
    tokens = _number(size[0][1])
    raw = [size[1]]
    concurrency = _search(_CONCURRENCY, own)
    if concurrency and concurrency[1] not in raw:
        raw.append(concurrency[1])
    kv_bytes, memory_line = _memory(own, _V1_MEMORY)
    if kv_bytes is None:
        kv_bytes, memory_line = _memory(lines, _V1_MEMORY, _CPU_MEMORY)
    override = _search(_OVERRIDE, [line for line in own if "Overriding" in line])
    if override:  # the pool is what the override says, not what memory would allow
        kv_bytes, memory_line = None, (override[1],)
    max_len = _number(concurrency[0][1]) if concurrency else None
    times = float(concurrency[0][2].replace(",", "")) if concurrency else None
    hybrid = max_len is not None and times is not None and _is_hybrid(tokens, max_len, times)
    return KvPool(
        format_id="vllm-v1-oneline" if concurrency and concurrency[1] == size[1] else "vllm-v1-tokens",
        raw=(*memory_line, *raw),
        tokens=tokens,
        blocks=int(override[0][1]) if override else None,
        max_len=max_len,
        concurrency=times,
        kv_bytes=kv_bytes,
        layout="hybrid" if hybrid else "uniform",
    )


def _vllm_v0(own: Sequence[str], lines: Sequence[str], block_size: int) -> KvPool | None:
    found = _search(_V0_BLOCKS, own)
    if found is None:
        return None
    blocks = _number(found[0][1])
    concurrency = _search(_CONCURRENCY, own)
    kv_bytes, memory_line = _memory(lines, _V0_MEMORY)
    return KvPool(
        format_id="vllm-v0-blocks",
        raw=(*memory_line, found[1], *((concurrency[1],) if concurrency else ())),
        tokens=blocks * block_size,
        blocks=blocks,
        max_len=_number(concurrency[0][1]) if concurrency else None,
        concurrency=float(concurrency[0][2].replace(",", "")) if concurrency else None,
        kv_bytes=kv_bytes,
    )


def _sglang(own: Sequence[str]) -> KvPool | None:
    allocated = next(((match, line) for line in own if (match := _SGL_POOL.search(line))), None)
    total = _search(_SGL_TOTAL, [line for line in own if "ServerArgs" not in line])
    stored = int(allocated[0][1]) if allocated and allocated[0][1] else None
    tokens = int(total[0][1]) if total else stored
    if tokens is None:
        return None
    context = _SGL_CONTEXT.search(total[1]) if total else None
    kv_bytes = None
    # A pool that was allocated for another number of tokens (two pools, an upper bound) has no one price.
    if allocated and stored in (None, tokens):
        kv_bytes = round(sum(float(size) for size in _SGL_SIZE.findall(allocated[0][2])) * GIB)
    return KvPool(
        format_id="sglang",
        raw=tuple(found[1] for found in (allocated, total) if found),
        tokens=tokens,
        max_len=int(context[1]) if context else None,
        kv_bytes=kv_bytes,
    )


# ---------------------------------------------------------------- arguments

_VLLM_GIVEN = re.compile(r"non-default args: (\{.*\})\s*$")
_VLLM_CONFIG = re.compile(r"Initializing a V\d LLM engine \(v([^)]+)\) with config: (.*)$")
_VLLM_V0_CONFIG = re.compile(r"Initializing an LLM engine \(v([^)]+)\) with config: (.*)$")
_VLLM_VERSION = re.compile(r"(?:vLLM API server version|\bversion) v?(\d+\.\d+\S*)")
_SGL_ARGS = re.compile(r"server_args=ServerArgs\((.*)\)\s*$")
_SGL_LINE = re.compile(r"\bmax_total_num_tokens=\d+, .*$")
_BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_MAX_LEN = re.compile(r"Using max model len (\d+)")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_RENAMES = {"max_seq_len": "max_model_len", "context_len": "context_length"}


def _arguments(
    lines: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Sourced[Any]], Literal["vllm", "sglang"] | None, str | None]:
    given: dict[str, Any] = {}
    resolved: dict[str, Sourced[Any]] = {}
    engine: Literal["vllm", "sglang"] | None = None
    version: str | None = None

    def learn(pairs: Mapping[str, Any], origin: Origin, rule: str) -> None:
        resolved.update({key: Sourced(value, origin, rule) for key, value in pairs.items()})

    for line in lines:
        if match := _VLLM_GIVEN.search(line):
            engine = "vllm"
            given.update(_dict_literal(match[1]))
            learn(given, Origin.GIVEN, "echoed by the engine")
        elif match := _VLLM_CONFIG.search(line) or _VLLM_V0_CONFIG.search(line):
            engine, version = "vllm", match[1]
            learn(_renamed(split_arguments(match[2])), Origin.LOGGED, "engine config line")
        elif match := _SGL_ARGS.search(line):
            engine = "sglang"
            learn(_renamed(split_arguments(match[1])), Origin.LOGGED, "server_args line")
        elif match := _SGL_LINE.search(line):
            engine = engine or "sglang"
            learn(_renamed(split_arguments(match[0])), Origin.LOGGED, "scheduler line")
        elif match := _BUDGET.search(line):
            learn({"max_num_batched_tokens": int(match[1])}, Origin.LOGGED, "scheduler line")
        elif match := _MAX_LEN.search(line):
            learn({"max_model_len": int(match[1])}, Origin.LOGGED, "model line")
        elif match := _ASYNC.search(line):
            learn({"async_scheduling": match[1] == "enabled"}, Origin.LOGGED, "scheduler line")
        elif version is None and (match := _VLLM_VERSION.search(line)):
            version = match[1]
    return given, resolved, engine, version


def split_arguments(text: str) -> dict[str, Any]:
    """Split `a=1, b=[1, 2], c=Name(x=2)` at its outer commas; values that are no literals stay text."""
    pairs: dict[str, Any] = {}
    for piece in _outer_pieces(text):
        key, separator, value = piece.partition("=")
        if separator and key.strip().isidentifier():
            pairs[key.strip()] = _literal(value.strip())
    return pairs


def _outer_pieces(text: str) -> Iterator[str]:
    depth, start = 0, 0
    quote = ""
    for position, char in enumerate(text):
        if quote:
            if char == quote and text[position - 1] != "\\":
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _dict_literal(text: str) -> dict[str, Any]:
    value = _literal(text)
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    # Objects among the values (enums, configs) are no literals: take the pieces that are.
    pairs: dict[str, Any] = {}
    for piece in _outer_pieces(text.strip()[1:-1]):
        key, separator, item = piece.partition(":")
        name = _literal(key.strip())
        if separator and isinstance(name, str):
            pairs[name] = _literal(item.strip())
    return pairs


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _renamed(pairs: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMES.get(key, key): value for key, value in pairs.items()}


def _value(resolved: Mapping[str, Sourced[Any]], key: str) -> Any:
    return resolved[key].value if key in resolved else None


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _facts(lines: Sequence[str]) -> tuple[str, ...]:
    facts: list[str] = []
    for line in lines:
        if "WSL is detected" in line:
            facts.append("wsl2")
        if match := re.search(r"pin_memory=(True|False)", line):
            facts.append(match[0])
    return tuple(dict.fromkeys(facts))
