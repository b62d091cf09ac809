"""Other ways in which a closed loop may start, where the whole run depends on it.

Requests of equal output lengths that share a step end together, and so their successors are sent together:
who is in step stays in step, and a loop keeps, for as long as it lasts, the cycle that its first requests
led to. Prompt lengths do not matter for that; outputs that differ by a few per cent mix the cycles within
some hundred requests (found by simulation).

The load as planned has all first requests sent at one instant. That a client, its connections and a server
not yet warm may need up to `WITHIN` is assumed, not measured. What speaks for that size: a burst of 32 chat
prompts of 1,024 tokens takes 0.18 s through the API process of vLLM 0.28 alone (measured, on two slow
cores); a published first wave under SGLang took half a second longer than any later one (SemiAnalysis
InferenceX, 2026-03-25); and closed loops of vLLM 0.20 (Wentao274/vllm-benchmark-test @21f4d96), simulated
with coefficients fitted to four of them, come out nearest to most of the measured times if they start
within 0.3 to 1 s.
"""

from __future__ import annotations

import numpy as np

from sim.workload.spec import WorkloadSpec
from sim.workload.table import RequestTable

STARTS = 6
WITHIN = 1.0  # s
# What is enough of a load to see its cycle: its first and last requests in flight are a tenth of that then.
CYCLES = 20
REQUESTS = 1000


def keeps_start(spec: WorkloadSpec, requests: RequestTable) -> bool:
    """Whether the run stays in the cycle that its first requests lead to."""
    cap, outputs = spec.max_concurrency, requests.output_lens
    if not spec.closed_loop or cap is None or not 1 < cap < len(requests):
        return False
    return bool(outputs.min() == outputs.max())


def other_starts(
    spec: WorkloadSpec, requests: RequestTable, rate: float, count: int = STARTS, *, whole: bool = True
) -> list[RequestTable]:
    """The same requests with the first ones, as many as may be in flight, sent apart from each other.

    In the k-th of n starts they are spread at random over k/n of a second, the earliest at 0, or of the time
    that a cycle takes if that is less: then every phase has been met.

    Args:
        spec: the load; its seed is that of the draws.
        requests: all sent at 0.
        rate: what the loop completes [requests/s].
        whole: False leaves out what a long load holds beyond what tells its cycle.

    Returns:
        `count` loads, all of one length, or none if the run does not keep its start.
    """
    cap = spec.max_concurrency
    if cap is None or not keeps_start(spec, requests):
        return []
    if not whole:
        requests = requests.first(max(REQUESTS, CYCLES * cap))
    within = min(WITHIN, cap / rate)
    return [_spread(requests, cap, within * k / count, (spec.seed, 0x57A27, k)) for k in range(1, count + 1)]


def _spread(requests: RequestTable, cap: int, seconds: float, seed: tuple[int, ...]) -> RequestTable:
    first = np.sort(np.random.default_rng(seed).uniform(0.0, seconds, cap))
    first -= first[0]
    arrivals = np.full(len(requests), first[-1])  # the others wait for a place
    arrivals[:cap] = first
    return requests.sent_at(arrivals)
