"""One setting changed, everything else kept: also the KV pool that a real start was seen to have."""

from __future__ import annotations

from dataclasses import replace

from sim.build import ScenarioSource
from sim.memory import MemoryAccount
from sim.scenario import Observed, Scenario
from sim.simulate import ENGINES

# Flags that name the pool themselves: what an earlier start was seen to have says nothing of it any more.
_POOL_FLAGS = ("num-gpu-blocks-override", "kv-cache-memory-bytes", "max-total-tokens")


def changed(source: ScenarioSource, settings: tuple[str, ...], shift: float = 0.0) -> ScenarioSource:
    """The source with `settings` on top and its observed KV pool carried over.

    An observed pool belongs to the flags it was seen under. Under other flags it is the observed one plus the
    difference of the two estimates in bytes: whatever the estimate has wrong of this machine cancels, as
    vLLM's and SGLang's accounts are sums (sim/engines/*/memory.py).

    Args:
        shift: without an observation, move the pool to a bound of its estimate: -1 the lower, 1 the upper.

    Raises:
        BadInput: what the engine would refuse.
    """
    after = source.with_settings(settings)
    observed = source.observed
    if observed.kv_cache_tokens is None and observed.num_gpu_blocks is None:
        return _shifted(after, shift) if shift else after
    if any(setting.partition("=")[0].removeprefix("serve.") in _POOL_FLAGS for setting in settings):
        return replace(after, observed=Observed())
    blank = Observed()
    before_built = source.build()
    after_built = replace(after, observed=blank).build()
    if before_built.engine.values == after_built.engine.values:
        return after
    seen = account_of(before_built)
    old = account_of(replace(before_built, observed=blank))
    new = account_of(after_built)
    size = seen.kv_pool_bytes + new.kv_pool_bytes - old.kv_pool_bytes
    if observed.num_gpu_blocks is not None:
        block_bytes = new.kv_pool_bytes / max(new.num_gpu_blocks, 1)
        return replace(after, observed=Observed(num_gpu_blocks=max(1, int(size / block_bytes))))
    tokens = observed.kv_cache_tokens or 0
    price = (old.kv_pool_bytes / old.estimated_tokens) / (new.kv_pool_bytes / new.estimated_tokens)
    carried = int(tokens * size / seen.kv_pool_bytes * price)
    # Both engines hand memory out in blocks or pages.
    return replace(after, observed=Observed(kv_cache_tokens=max(1, carried - carried % new.block_size)))


def account_of(scenario: Scenario) -> MemoryAccount:
    """The memory account of a scenario.

    Raises:
        BadInput: the engine would refuse to start.
    """
    return ENGINES[scenario.engine.name].account(
        scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
    )


def _shifted(source: ScenarioSource, shift: float) -> ScenarioSource:
    account = account_of(source.build())
    tokens = account.estimated_tokens_low if shift < 0 else account.estimated_tokens_high
    return replace(source, observed=Observed(kv_cache_tokens=max(1, tokens)))
