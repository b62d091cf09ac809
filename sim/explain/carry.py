"""One setting changed, everything else kept: also the KV pool that a real start was seen to have."""

from __future__ import annotations

from dataclasses import replace

from sim.build import ScenarioSource
from sim.carry import account_of, carried
from sim.scenario import Observed


def changed(source: ScenarioSource, settings: tuple[str, ...], shift: float = 0.0) -> ScenarioSource:
    """The source with `settings` on top and its observed KV pool carried over; see `sim.carry.carried`.

    Args:
        shift: without an observation, move the pool to a bound of its estimate: -1 the lower, 1 the upper.

    Raises:
        BadInput: what the engine would refuse.
    """
    after = source.with_settings(settings)
    if source.observed == Observed():
        return _shifted(after, shift) if shift else after
    return replace(after, observed=carried(source.build(), replace(after, observed=Observed()).build()))


def _shifted(source: ScenarioSource, shift: float) -> ScenarioSource:
    account = account_of(source.build())
    tokens = account.estimated_tokens_low if shift < 0 else account.estimated_tokens_high
    return replace(source, observed=Observed(kv_cache_tokens=max(1, tokens)))
