"""Priority scheduling: which running requests make way for a waiting one."""

from __future__ import annotations

from collections.abc import Sequence

from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.kv_pool import KvPool
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.prefill_adder import CLIP_MAX_NEW_TOKENS, PrefillAdder
from sim.engines.sglang.retract import release_running


def preempt_for(
    req: LiveRequest,
    running: Sequence[LiveRequest],
    adder: PrefillAdder,
    pool: KvPool,
    config: SglangSchedulerConfig,
) -> list[LiveRequest]:
    """Release running requests until `req` is expected to fit.

    Lowest priority first, latest queued first among equals, and only those whose priority is lower by more
    than the threshold. At least one goes; if all of them together free too little, none goes.

    Returns:
        The victims in running order, their KV released; the caller takes them out of the
        running list, frees their slots and queues them.

    Source: SGLang 0.5.21 `managers/schedule_policy.py PrefillAdder.preempt_to_schedule`. What is needed is
    judged by the hit of the request's previous lookup, for the present one comes after. The engine keeps
    the victims of one such call in a set of objects and so queues them in the order of their addresses;
    here they keep their running order.
    """
    sign = -1 if config.schedule_low_priority_values_first else 1
    candidates = sorted(
        (other for other in running if not other.finished),
        key=lambda other: (other.request.priority * sign, -other.entered),
    )
    missing = req.fill_len - req.prefix_len + min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS) - adder.rem_total
    chosen: set[LiveRequest] = set()
    for other in candidates:
        if (
            req.request.priority - other.request.priority
        ) * sign <= config.priority_scheduling_preemption_threshold:
            break
        chosen.add(other)
        missing -= adder.running_reserve(other)
        if missing <= 0:
            break
    if not chosen or missing > 0:
        return []
    victims = [other for other in running if other in chosen]
    before = len(running)
    for gone, victim in enumerate(victims, start=1):
        adder.released(adder.running_reserve(victim))
        release_running(victim, before - gone, pool)
    return victims
