"""Who leaves when the decodes no longer fit into the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from sim.engines.sglang.kv_pool import KvPool
from sim.engines.sglang.live_request import LiveRequest
from sim.engines.sglang.new_token_ratio import RETRACT_DECODE_STEPS
from sim.engines.sglang.stuck import cannot_retract


def retract_decode(reqs: Sequence[LiveRequest], pool: KvPool) -> tuple[list[LiveRequest], list[LiveRequest]]:
    """Retract requests until the rest can decode one step.

    The one with the fewest outputs goes first, among equals the one with the longest prompt. At least one
    goes, and at least one stays.

    Returns:
        The requests that stay, in the order of preference (which becomes the running order), and the victims
        in the order they were taken. The caller frees their slots and queues them.

    Raises:
        EngineStuck: the last one does not fit either; the real engine aborts it.

    Source: SGLang 0.5.21 `managers/schedule_batch.py ScheduleBatch.retract_decode`.
    """
    kept = sorted(reqs, key=lambda req: (req.num_output_tokens, -req.prompt_len), reverse=True)
    victims: list[LiveRequest] = []
    while len(kept) > 1 and (not victims or not pool.decode_fits(kept)):
        victim = kept.pop()
        victims.append(victim)
        release_running(victim, len(kept), pool)
    if len(kept) == 1 and not pool.decode_fits(kept):
        raise cannot_retract(kept[0].request_id)
    return kept, victims


def release_running(victim: LiveRequest, num_kept: int, pool: KvPool) -> None:
    """Free a running request's KV without storing it, and room for the next steps of those that stay.

    Source: SGLang 0.5.21 `managers/schedule_batch.py release_req`, `Req.reset_for_retract`.
    """
    pool.release(victim, store=False)
    pool.make_room(RETRACT_DECODE_STEPS * num_kept)
    victim.retracted = True
