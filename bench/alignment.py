"""Two engines beside each other: every knob that has a counterpart, its value on both sides, what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.scenario import EngineConfig, EngineName, Scenario

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting under both engines' names; a name is None where that engine has no such thing.

    `caveat` says where the same number does not mean the same.
    """

    vllm: str | None
    sglang: str | None
    caveat: str = ""
    invert_sglang: bool = False


# Both engines' argument classes (vLLM 0.28 config/, SGLang 0.5.21 srt/arg_groups/), compared rule by rule.
KNOBS: tuple[Knob, ...] = (
    Knob("max_model_len", "context_length"),
    Knob("max_num_seqs", "max_running_requests", "SGLang is also bounded by its request slots"),
    Knob(
        "max_num_batched_tokens",
        "chunked_prefill_size",
        "vLLM's budget covers decodes and prefill of one forward, SGLang's covers prefill only",
    ),
    Knob(None, "max_prefill_tokens", "SGLang's second bound on prefill per batch"),
    Knob("enable_chunked_prefill", None, "SGLang: chunked_prefill_size -1 turns it off"),
    Knob(
        "gpu_memory_utilization",
        "mem_fraction_static",
        "vLLM's share includes activations and graphs, SGLang's is weights and KV only",
    ),
    Knob("num_gpu_blocks_override", "max_total_tokens", "blocks against tokens; SGLang can only lower it"),
    Knob("block_size", "page_size", "the grain of prefix hits"),
    Knob("enable_prefix_caching", "disable_radix_cache", invert_sglang=True),
    Knob(
        "scheduling_policy",
        "schedule_policy",
        "priority: opposite direction by default, and SGLang preempts for it",
    ),
    Knob(
        "async_scheduling",
        "disable_overlap_schedule",
        "what runs in vain after a stop differs",
        invert_sglang=True,
    ),
    Knob(
        "watermark",
        "schedule_conservativeness",
        "vLLM reserves the prompt only, SGLang prompt and expected output",
    ),
    Knob(None, "enable_mixed_chunk", "mixing prefill and decode is vLLM's only mode"),
    Knob("long_prefill_token_threshold", None),
    Knob("stream_interval", "stream_interval", "the rule when a chunk is sent differs"),
    Knob("cudagraph_capture_sizes", "cuda_graph_bs_decode", "tokens against sequences"),
    Knob("kv_cache_dtype", "kv_cache_dtype"),
    Knob("dtype", "dtype"),
    Knob("quantization", "quantization"),
    Knob("tensor_parallel_size", "tp_size"),
    Knob("pipeline_parallel_size", "pp_size"),
    Knob("data_parallel_size", "dp_size"),
)
# Under which names a resolved SGLang configuration may hold a knob.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
    "context_length": ("context_length", "context_len", "max_model_len"),
    "cuda_graph_bs_decode": ("cuda_graph_bs_decode", "cuda_graph_bs", "cuda_graph_max_bs"),
}


@dataclass(frozen=True, slots=True)
class Aligned:
    """One line of the table. `same` is None where a value is unknown or there is no counterpart."""

    names: tuple[str | None, str | None]
    values: tuple[Any, Any]
    same: bool | None
    caveat: str


def align(first: Scenario, second: Scenario) -> list[Aligned]:
    """Line up two scenarios: model, GPU, load, then every knob, and every other argument of one engine."""
    lines = [
        _line("model", first.model.name, second.model.name),
        _line("gpu", first.gpu.name, second.gpu.name),
        _line("gpu_count", first.gpu_count, second.gpu_count),
        _line("workload", *_workloads(first, second)),
        _line("engine", _engine_name(first.engine), _engine_name(second.engine)),
    ]
    a, b = first.engine, second.engine
    if a.name == b.name:
        keys = [*a.values, *(key for key in b.values if key not in a.values)]
        return lines + [_line(key, _value(a, key), _value(b, key)) for key in keys]
    for knob in KNOBS:
        names = (_name(knob, a.name), _name(knob, b.name))
        values = (_knob_value(a, knob), _knob_value(b, knob))
        both = None not in names and None not in values
        lines.append(Aligned(names, values, values[0] == values[1] if both else None, knob.caveat))
    return lines


def _line(name: str, a: Any, b: Any) -> Aligned:
    return Aligned((name, name), (a, b), a == b, "")


def _engine_name(engine: EngineConfig) -> str:
    return f"{engine.name} {engine.asked_version or engine.version}"


def _workloads(first: Scenario, second: Scenario) -> tuple[str, str]:
    if first.workload == second.workload:
        return "the same", "the same"
    different = [
        name
        for name in first.workload.__dataclass_fields__
        if getattr(first.workload, name) != getattr(second.workload, name)
    ]

    def show(scenario: Scenario) -> str:
        return ", ".join(f"{name}={getattr(scenario.workload, name)}" for name in different)

    return show(first), show(second)


def _name(knob: Knob, engine: EngineName) -> str | None:
    return knob.vllm if engine == "vllm" else knob.sglang


def _value(engine: EngineConfig, key: str) -> Any:
    return engine.values[key].value if key in engine.values else None


def _knob_value(engine: EngineConfig, knob: Knob) -> Any:
    name = _name(knob, engine.name)
    if name is None:
        return None
    value = next(
        (found for key in _ALIASES.get(name, (name,)) if (found := _value(engine, key)) is not None), None
    )
    if engine.name == "sglang" and knob.invert_sglang and isinstance(value, bool):
        return not value
    return value


def table(lines: Sequence[Aligned], show: Callable[[Any], str] = str) -> list[tuple[str, str, str, str]]:
    """The lines as text: name (both names where they differ), both values, and what to know."""
    rows = []
    for line in lines:
        first, second = line.names
        name = first or second or ""
        if first and second and first != second:
            name = f"{first} / {second}"
        values = [
            "no counterpart" if own is None else "unknown" if value is None else show(value)
            for own, value in zip(line.names, line.values, strict=True)
        ]
        state = {True: "", False: "differs", None: ""}[line.same]
        rows.append((name, values[0], values[1], "; ".join(part for part in (state, line.caveat) if part)))
    return rows
