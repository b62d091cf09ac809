"""Which single flag changes are worth a simulation: the knobs that decide capacity and step times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sim.explain.knowledge import Knob, knobs
from sim.scenario import EngineName, Scenario

FULL = ("bf16", "fp16", "bfloat16", "float16", "half", "auto")


@dataclass(frozen=True, slots=True)
class Change:
    """One flag changed.

    Attributes:
        flag: canonical, e.g. "--max-num-seqs".
        before, after: values as people read them.
        settings: for `ScenarioSource.with_settings`.
    """

    flag: str
    before: str
    after: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The flag without dashes."""
        return self.flag.lstrip("-")

    @property
    def direction(self) -> str:
        """raise, lower, on, off, or "to" for a value without order."""
        if self.after in ("on", "off"):
            return self.after
        try:
            return "raise" if float(self.after) > float(self.before) else "lower"
        except ValueError:
            return "to"

    def knob(self, engine: EngineName) -> Knob:
        """What is known of the flag."""
        return knobs(engine)[self.flag]


def candidates(scenario: Scenario, fits: int | None) -> list[Change]:
    """Every change worth trying, whether it helps or not; values that the engine already has are left out.

    Args:
        fits: how many requests the KV cache holds to their end, if known: a natural sequence cap.
    """
    make = _vllm if scenario.engine.name == "vllm" else _sglang
    return list(make(scenario, fits))


def _vllm(scenario: Scenario, fits: int | None) -> Iterator[Change]:
    engine = scenario.engine
    if engine["num_gpu_blocks_override"] is None and engine["kv_cache_memory_bytes"] is None:
        share = float(engine["gpu_memory_utilization"])
        yield from _shares("--gpu-memory-utilization", share, (0.85, 0.92, 0.95))
    cap = int(engine["max_num_seqs"])
    yield from _caps("--max-num-seqs", cap, fits, int(engine["max_num_batched_tokens"]))
    budget = int(engine["max_num_batched_tokens"])
    for value in (2 * budget, budget // 2, budget // 4):
        if value >= max(cap, 256):
            yield _set("--max-num-batched-tokens", budget, value)
    yield from _formats(scenario, "fp8")
    tp = int(engine["tensor_parallel_size"])
    yield _set("--tensor-parallel-size", tp, 2 * tp)
    if not engine["enable_prefix_caching"]:
        yield _set("--enable-prefix-caching", "off", "true", shown="on")
    if not engine["enable_chunked_prefill"]:
        yield _set("--enable-chunked-prefill", "off", "true", shown="on")
    if not engine["async_scheduling"]:
        yield _set("--async-scheduling", "off", "true", shown="on")
    if engine["enforce_eager"]:
        yield _set("--enforce-eager", "on", "false", shown="off")
    sizes = [int(size) for size in engine["cudagraph_capture_sizes"]]
    if sizes and max(sizes) < min(cap, 512):
        yield _set("--max-cudagraph-capture-size", max(sizes), min(cap, 512))
    if not engine["long_prefill_token_threshold"] and budget >= 1024:
        yield _set("--long-prefill-token-threshold", 0, budget // 4)
    if not engine["watermark"]:
        yield _set("--watermark", 0, 0.05)


def _sglang(scenario: Scenario, fits: int | None) -> Iterator[Change]:
    engine = scenario.engine
    share = _number(engine.values["mem_fraction_static"].value)
    if share is not None:
        yield from _shares("--mem-fraction-static", share, (0.80, 0.85, 0.90, 0.92))
    cap = _number(engine["max_running_requests"])
    if cap is not None:
        yield from _caps("--max-running-requests", int(cap), fits, None)
    elif fits:
        yield _set("--max-running-requests", "default", fits)
    chunk = int(engine["chunked_prefill_size"] or -1)
    if chunk > 0:
        for value in (2 * chunk, chunk // 2, chunk // 4):
            if value >= 256:
                yield _set("--chunked-prefill-size", chunk, value)
    conservative = float(engine["schedule_conservativeness"])
    for factor in (0.3, 0.7, 1.3):
        if abs(conservative - factor) > 0.05:
            yield _set("--schedule-conservativeness", conservative, factor)
    yield from _formats(scenario, "fp8_e4m3")
    tp = int(engine["tensor_parallel_size"])
    yield _set("--tp-size", tp, 2 * tp)
    if not engine["enable_mixed_chunk"]:
        yield _set("--enable-mixed-chunk", "off", "true", shown="on")
    if not engine["prefill_decode_interval"]:
        yield _set("--prefill-decode-interval", 0, 4)
    if engine["disable_radix_cache"]:
        yield _set("--disable-radix-cache", "on", "false", shown="off")
    elif engine["schedule_policy"] == "fcfs":
        yield _set("--schedule-policy", "fcfs", "lpm")
    if engine["disable_overlap_schedule"]:
        yield _set("--disable-overlap-schedule", "on", "false", shown="off")


def _shares(flag: str, now: float, steps: tuple[float, ...]) -> Iterator[Change]:
    """The next two steps above the present share; none above the last."""
    for value in [step for step in steps if step > now + 0.005][:2]:
        yield _set(flag, now, value)


def _caps(flag: str, cap: int, fits: int | None, budget: int | None) -> Iterator[Change]:
    """Twice and half the sequence cap, and what the KV cache holds."""
    values = [2 * cap, cap // 2]
    if fits is not None and 0 < fits < cap:
        values.insert(1, fits)
    for value in dict.fromkeys(values):
        if value >= 1 and (budget is None or value <= budget):
            yield _set(flag, cap, value)


def _formats(scenario: Scenario, kv_word: str) -> Iterator[Change]:
    """FP8 for KV cache and weights, on cards that have the units."""
    engine, gpu = scenario.engine, scenario.gpu
    if "fp8" not in gpu.dense_flops:
        return
    kv = str(engine["kv_cache_dtype"])
    if kv in FULL:
        yield _set("--kv-cache-dtype", kv, kv_word)
    if engine["quantization"] is None and scenario.model.quant is None:
        yield _set("--quantization", "none", "fp8")


def _set(flag: str, before: Any, after: Any, shown: str | None = None) -> Change:
    word = f"{after:g}" if isinstance(after, float) else str(after)
    was = f"{before:g}" if isinstance(before, float) else str(before)
    return Change(flag, was, shown or word, (f"serve.{flag.lstrip('-')}={word}",))


def _number(value: Any) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)


def variations(scenario: Scenario, flag: str, fits: int | None) -> list[Change]:
    """Changes of one flag, for its own page: the candidates, or else its value doubled and halved."""
    own = [change for change in candidates(scenario, fits) if change.flag == flag]
    if own:
        return own
    key = flag.lstrip("-").replace("-", "_")
    value = scenario.engine.values[key].value if key in scenario.engine.values else None
    if isinstance(value, bool):
        return [_set(flag, "on" if value else "off", str(not value).lower(), "off" if value else "on")]
    if isinstance(value, int) and value > 1:
        return [_set(flag, value, value // 2), _set(flag, value, 2 * value)]
    return []
