"""How many prompts a load sends at each concurrency of a sweep: the same in predictions and on the engine."""

from __future__ import annotations

from sim.workload.spec import RandomDataset, WorkloadSpec

MIN_PROMPTS = 20
PROMPTS_PER_STREAM = 2


def prompts_for(concurrency: int) -> int:
    """Requests that a closed loop needs for its figures to mean something: 1 -> 20, 16 -> 32, 128 -> 256.

    Every stream is to be used twice at least, and below ten streams there would be too few requests.
    """
    return max(MIN_PROMPTS, PROMPTS_PER_STREAM * concurrency)


def prompts_of(workload: WorkloadSpec, concurrency: int) -> int:
    """Prompts to send of a load at a concurrency.

    Those of shared prefixes stay, one per prefix at least: how many there are of each decides on its hit
    rate. A file has as many as it has, and a load with a duration ends by that.
    """
    if workload.duration is None and isinstance(workload.dataset, RandomDataset):
        return prompts_for(concurrency)
    prefixes = getattr(workload.dataset, "num_prefixes", 0)
    return max(workload.num_prompts, prefixes)
