"""Which CUDA graphs vLLM captures (vllm/config/vllm.py `_set_cudagraph_sizes`, compilation.py, 0.28).

What differs in 0.33 is said where it does.
"""

from __future__ import annotations

from typing import Any

from sim.commands.given import Given
from sim.commands.numbers import at_least
from sim.engines.values import Values, version_key
from sim.errors import BadInput
from sim.hardware.spec import GpuSpec

_LEVEL_MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_FIELD = "--compilation-config"
_USED_KEYS = {"cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "mode", "level"}


def resolve_graphs(given: Given, values: Values, gpu: GpuSpec, rules: str) -> None:
    """Set enforce_eager, optimization_level, cudagraph_mode and cudagraph_capture_sizes.

    Raises:
        BadInput: an unknown level or mode, or sizes that contradict each other.
    """
    config = given.mapping(_FIELD)
    eager = values.choose("enforce_eager", given.truth("--enforce-eager"), False, "off by default")
    text = given.word("--optimization-level")
    level = None if text is None else text.upper().removeprefix("O")
    if level is not None and level not in {"0", "1", "2", "3"}:
        raise BadInput("--optimization-level", text, "must be 0, 1, 2 or 3")
    values.choose("optimization_level", None if level is None else int(level), 2, "O2 by default")
    _resolve_mode(values, config, eager, values["device"])
    sizes = given.integers("--cudagraph-capture-sizes") or _size_list(config.get("cudagraph_capture_sizes"))
    largest = given.integer("--max-cudagraph-capture-size") or _size(config.get("max_cudagraph_capture_size"))
    if values["cudagraph_mode"] == "NONE":
        values.derive("cudagraph_capture_sizes", (), "no CUDA graphs")
    elif sizes is not None:
        fitting = tuple(sorted({s for s in sizes if s <= values["max_num_batched_tokens"]}))
        if largest is not None and largest != (fitting[-1] if fitting else 0):
            raise BadInput(
                "--max-cudagraph-capture-size",
                largest,
                "must equal the largest of --cudagraph-capture-sizes; the engine refuses to start",
            )
        values.choose("cudagraph_capture_sizes", fitting, None, "")
    else:
        _derive_sizes(values, largest, gpu, rules)
    for key in config:
        if key not in _USED_KEYS:
            values.not_modelled(f"{_FIELD}.{key}", "compilation details: kernels may be faster or slower")


def default_sizes(max_size: int, max_num_batched_tokens: int, interactivity: bool = False) -> tuple[int, ...]:
    """The capture sizes up to `max_size` [tokens]."""
    small = range(1, min(max_size, 32) + 1) if interactivity else (1, 2, 4)
    sizes = {s for s in small if s <= max_size}
    sizes |= set(range(8, min(max_size + 1, 256), 8)) | set(range(256, max_size + 1, 16))
    if max_num_batched_tokens <= max_size:
        sizes.add(max_num_batched_tokens)
    return tuple(sorted(sizes))


def _derive_sizes(values: Values, largest: int | None, gpu: GpuSpec, rules: str) -> None:
    blackwell = gpu.compute_capability is not None and gpu.compute_capability[0] == 10
    cap = 1024 if blackwell else 512
    tokens = values["max_num_batched_tokens"]
    if largest is None:
        max_size = min(2 * values["max_num_seqs"], cap, tokens)
        rule = f"up to min(2 x max_num_seqs, {cap}, max_num_batched_tokens)"
    else:
        max_size, rule = min(largest, tokens), "up to --max-cudagraph-capture-size"
    interactive = values["performance_mode"] == "interactivity"
    sizes = default_sizes(max_size, tokens, interactive)
    seqs = values["max_num_seqs"]
    if version_key(rules) >= (0, 33) and largest is None and seqs <= max_size and seqs not in sizes:
        sizes, rule = tuple(sorted((*sizes, seqs))), rule + ", and max_num_seqs itself"
    values.derive("cudagraph_capture_sizes", sizes, rule)


def _resolve_mode(values: Values, config: dict[str, Any], eager: bool, device: str) -> None:
    asked = config.get("cudagraph_mode")
    if device == "cpu":
        values.derive("cudagraph_mode", "NONE", "no CUDA graphs on a CPU")
    elif eager:
        values.derive("cudagraph_mode", "NONE", "--enforce-eager")
    elif asked is not None:
        mode = str(asked).rpartition(".")[2].upper()
        if mode not in _MODES:
            raise BadInput(f"{_FIELD}.cudagraph_mode", str(asked), f"must be one of {', '.join(_MODES)}")
        values.choose("cudagraph_mode", mode, None, "")
    elif str(config.get("mode", config.get("level", ""))).upper() in {"0", "NONE"}:
        values.derive("cudagraph_mode", "NONE", "compilation mode NONE")
    else:
        level = values["optimization_level"]
        values.derive("cudagraph_mode", _LEVEL_MODES[level], f"optimisation level O{level}")


def _size_list(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise BadInput(f"{_FIELD}.cudagraph_capture_sizes", str(value), "must be a list of whole numbers")
    return tuple(at_least(f"{_FIELD}.cudagraph_capture_sizes", v, 1) for v in value)


def _size(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int):
        raise BadInput(f"{_FIELD}.max_cudagraph_capture_size", str(value), "must be a whole number")
    return at_least(f"{_FIELD}.max_cudagraph_capture_size", value, 1)
