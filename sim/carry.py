"""The KV pool that a real start was seen to have, carried over to other flags."""

from __future__ import annotations

from dataclasses import replace

from sim.errors import BadInput
from sim.memory import MemoryAccount
from sim.scenario import Observed, Scenario
from sim.simulate import ENGINES

# Flags that set the pool themselves: what an earlier start was seen to have says nothing of it any more.
_POOL_FLAGS = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "max_total_tokens")


def carried(before: Scenario, after: Scenario) -> Observed:
    """What would be observed of the KV pool under the flags of `after`.

    An observed pool belongs to the flags that it was seen under. Under others it is the observed one plus
    the difference of the two estimates in bytes: whatever the estimate has wrong of this machine cancels, as
    vLLM's and SGLang's accounts are sums (sim/engines/*/memory.py). Nothing is observed of another model,
    another GPU, or a pool that a flag sets.

    Args:
        before: with the observation.
        after: its own observation is not looked at.

    Raises:
        BadInput: nothing is left of the pool, or the engine would refuse to start.
    """
    observed = before.observed
    if observed == Observed():
        return observed
    if (before.model, before.gpu) != (after.model, after.gpu):
        return Observed()
    if any(_value(before, flag) != _value(after, flag) for flag in _POOL_FLAGS):
        return Observed()
    seen = account_of(before)
    old = account_of(replace(before, observed=Observed()))
    new = account_of(replace(after, observed=Observed()))
    if (old.kv_pool_bytes, old.estimated_tokens) == (new.kv_pool_bytes, new.estimated_tokens):
        return observed
    size = seen.kv_pool_bytes + new.kv_pool_bytes - old.kv_pool_bytes
    if size <= 0:
        raise BadInput(
            "observed KV pool",
            None,
            f"its {seen.kv_pool_bytes / 2**30:.2f} GiB are less than the other flags take away "
            f"({(old.kv_pool_bytes - new.kv_pool_bytes) / 2**30:.2f} GiB); drop it, or name the pool that "
            "the engine logs with these flags",
        )
    if observed.num_gpu_blocks is not None:
        block_bytes = new.kv_pool_bytes / max(new.num_gpu_blocks, 1)
        return Observed(num_gpu_blocks=max(1, int(size / block_bytes)))
    tokens = observed.kv_cache_tokens or 0
    price = (old.kv_pool_bytes / old.estimated_tokens) / (new.kv_pool_bytes / new.estimated_tokens)
    moved = int(tokens * size / seen.kv_pool_bytes * price)
    # Both engines hand memory out in blocks or pages.
    return Observed(kv_cache_tokens=max(1, moved - moved % new.block_size))


def account_of(scenario: Scenario) -> MemoryAccount:
    """The memory account of a scenario.

    Raises:
        BadInput: the engine would refuse to start.
    """
    return ENGINES[scenario.engine.name].account(
        scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
    )


def _value(scenario: Scenario, flag: str) -> object:
    found = scenario.engine.values.get(flag)
    return None if found is None else found.value
