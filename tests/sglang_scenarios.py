"""Random scenarios for the SGLang scheduler, small and cramped, so that every rule of it gets to work."""

from __future__ import annotations

import random
from typing import Any

POLICIES = ("fcfs", "fcfs", "lpm", "lpm", "lof", "dfs-weight", "random")


def draw(seed: str, number: int) -> dict[str, Any]:
    """Scenario `number` of the stream `seed`, in the format that `sim.parity` reads."""
    rng = random.Random(f"{seed}/{number}")
    page = rng.choice((1, 1, 4, 16))
    requests = _draw_requests(rng, max(page, 4))
    lengths = [sum(length for _, length in request["prompt"]) for request in requests]
    needs = [length + request["max_tokens"] for length, request in zip(lengths, requests, strict=True)]
    context = max(max(needs), max(lengths) + 8) + rng.choice((0, 1, 2, 40))
    # The cramped half clips long outputs to what the pool can hold.
    floor = max(max(lengths) + 8, 0 if rng.random() < 0.3 else max(needs) + 2) + 2 * page
    tokens = max(floor, int(rng.uniform(0.1, 0.6) * sum(needs)))
    chunk = rng.choice((16, 32, 64)) if rng.random() < 0.9 else -1
    prioritized = rng.random() < 0.25
    args = {
        "max_running_requests": rng.choice((1, 2, 3) if prioritized else (1, 3, 8, 8)),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": rng.choice((16384, 200, 24)),
        "schedule_policy": rng.choice(("fcfs", "lof") if prioritized else POLICIES),
        "schedule_conservativeness": rng.choice((0.05, 0.1, 0.3, 1.4)),
        "page_size": page,
        "disable_radix_cache": rng.random() < 0.15,
        "enable_mixed_chunk": chunk > 0 and rng.random() < 0.35,
        "disable_overlap_schedule": rng.random() < 0.5,
        "max_total_tokens": -(-tokens // page) * page,
        "context_length": context,
        "enable_priority_scheduling": prioritized,
        "priority_scheduling_preemption_threshold": rng.choice((0, 1)),
        "schedule_low_priority_values_first": rng.random() < 0.5,
        "prefill_max_requests": rng.choice((None, None, None, 2)),
        "prefill_decode_interval": rng.choice((0, 0, 0, 2)),
        "seed": number,
    }
    return {
        "id": f"{seed}-{number:04d}",
        "engine": "sglang",
        "engine_version": "0.5.21",
        "args": args,
        "requests": requests,
    }


def _draw_requests(rng: random.Random, unit: int) -> list[dict[str, Any]]:
    families = [(segment, rng.randint(unit, 8 * unit)) for segment in range(3)]
    hot, quoting, stopping = rng.choice((0.0, 0.6, 0.9)), rng.choice((0.0, 0.3)), rng.choice((0.0, 0.4))
    gap, longest, arrival = rng.choice((0.0, 1.0, 4.0)), rng.choice((4, 40, 90)), 0
    requests: list[dict[str, Any]] = []
    for number in range(rng.randint(3, 12)):
        arrival += int(rng.expovariate(1 / gap)) if gap else 0
        prompt = [list(rng.choice(families))] if rng.random() < hot else []
        if requests and rng.random() < quoting:
            earlier = rng.choice(requests)
            outputs = earlier["stop_after"] or earlier["max_tokens"]
            prompt = [*map(list, earlier["prompt"]), [f"out:{earlier['id']}", rng.randint(1, outputs)]]
            arrival += rng.randint(0, outputs)
        max_tokens = rng.randint(1, longest)
        requests.append(
            {
                "id": f"q{number}",
                "arrival_step": arrival,
                "prompt": [*prompt, [100 + number, rng.randint(1, rng.choice((4, 4 * unit, 100)))]],
                "max_tokens": max_tokens,
                "stop_after": rng.randint(1, max_tokens) if rng.random() < stopping else None,
                "priority": rng.randrange(4),
            }
        )
    return requests
