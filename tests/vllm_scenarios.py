"""Random scenarios for the vLLM scheduler, small and cramped, so that every rule of it gets to work."""

from __future__ import annotations

import random
from typing import Any


def draw(seed: str, number: int) -> dict[str, Any]:
    """Scenario `number` of the stream `seed`, in the format that `sim.parity` reads."""
    rng = random.Random(f"{seed}/{number}")
    block = rng.choice((2, 4, 8, 16))
    requests = _draw_requests(rng, block)
    sizes = [_length(request) + request["max_tokens"] for request in requests]
    max_model_len = (
        max(sizes) if rng.random() < 0.7 else max(max(map(_length, requests)) + 1, max(sizes) * 2 // 3)
    )
    needs = [-(-min(size, max_model_len) // block) for size in sizes]
    usable = max(-(-max_model_len // block), round(rng.uniform(0.1, 0.5) * sum(needs)))
    chunked = rng.random() < 0.85
    max_num_seqs = rng.randint(1, 8)
    budget = rng.choice((8, 16, 24, 64, 256)) if chunked else max_model_len + rng.choice((0, 5))
    args = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(budget, max_num_seqs),
        "block_size": block,
        "num_gpu_blocks": usable + 1,
        "enable_prefix_caching": rng.random() < 0.85,
        "async_scheduling": rng.random() < 0.6,
        "scheduling_policy": "priority" if rng.random() < 0.4 else "fcfs",
        "long_prefill_token_threshold": min(max_model_len, rng.randint(3, 20)) if rng.random() < 0.3 else 0,
        "scheduler_reserve_full_isl": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.05, 0.15)),
        "max_model_len": max_model_len,
        "enable_chunked_prefill": chunked,
    }
    return {
        "id": f"{seed}-{number:04d}",
        "engine": "vllm",
        "engine_version": "0.28.0",
        "args": args,
        "requests": requests,
    }


def _length(request: dict[str, Any]) -> int:
    return sum(length for _, length in request["prompt"])


def _draw_requests(rng: random.Random, block: int) -> list[dict[str, Any]]:
    families = [(segment, rng.randint(1, 5 * block)) for segment in range(3)]
    hot, quoting, stopping = rng.choice((0.0, 0.5, 0.9)), rng.choice((0.0, 0.3)), rng.choice((0.0, 0.4))
    gap, arrival = rng.choice((0.0, 1.0, 6.0)), 0
    requests: list[dict[str, Any]] = []
    for number in range(rng.randint(3, 12)):
        arrival += int(rng.expovariate(1 / gap)) if gap else 0
        prompt = [list(rng.choice(families))] if rng.random() < hot else []
        if requests and rng.random() < quoting:
            earlier = rng.choice(requests)
            outputs = earlier["stop_after"] or earlier["max_tokens"]
            prompt = [*map(list, earlier["prompt"]), [f"out:{earlier['id']}", rng.randint(1, outputs)]]
            arrival += rng.randint(0, outputs)
        max_tokens = rng.randint(1, 5 * block)
        requests.append(
            {
                "id": f"q{number}",
                "arrival_step": arrival,
                "prompt": [*prompt, [100 + number, rng.randint(1, rng.choice((3, 4 * block, 10 * block)))]],
                "max_tokens": max_tokens,
                "stop_after": rng.randint(1, max_tokens) if rng.random() < stopping else None,
                "priority": rng.randrange(3),
            }
        )
    return requests
