"""Small SGLang scenarios written by hand, and their traces in words."""

from __future__ import annotations

from typing import Any

from sim.engines.sglang.parity import replay

ARGS: dict[str, Any] = {
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "max_prefill_tokens": 16384,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "page_size": 1,
    "disable_radix_cache": False,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": True,
    "max_total_tokens": 200,
    "context_length": 400,
}


def ask(name: str, prompt: int | list[tuple[int | str, int]], outputs: int, **more: Any) -> dict[str, Any]:
    """A request of a scenario; a prompt given as a number shares nothing with any other."""
    segments = [[sum(map(ord, name)) + 100, prompt]] if isinstance(prompt, int) else [[*s] for s in prompt]
    spec = {"arrival_step": 0, "stop_after": None, "priority": 0}
    return {"id": name, "prompt": segments, "max_tokens": outputs, **spec, **more}


def scenario(*requests: dict[str, Any], **args: Any) -> dict[str, Any]:
    return {
        "id": "by-hand",
        "engine": "sglang",
        "engine_version": "0.5.21",
        "args": {**ARGS, **args},
        "requests": list(requests),
    }


def play(*requests: dict[str, Any], **args: Any) -> list[dict[str, Any]]:
    return replay(scenario(*requests, **args), "0.5.21")[0]


def told(lines: list[dict[str, Any]]) -> list[str]:
    """Each call as its kind and its chunks: `prefill A[0:6]`, `decode A[6]`."""
    return [
        " ".join(
            [line["kind"]]
            + [f"{name}[{at}:{at + n}]" if n > 1 else f"{name}[{at}]" for name, at, n in line["scheduled"]]
        )
        for line in lines
    ]


def outcome(*requests: dict[str, Any], **args: Any) -> dict[str, list[Any]]:
    facts: dict[str, list[Any]] = replay(scenario(*requests, **args), "0.5.21")[1]["outcome"]
    return facts
