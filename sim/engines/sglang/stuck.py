"""The states in which the real engine dies, hangs or drops a request, and the way out of each.

Source: SGLang 0.5.21; each was reproduced on the engine's own scheduler classes.
"""

from __future__ import annotations

from sim.errors import EngineStuck

_MORE_KV = "raise --max-total-tokens or --mem-fraction-static"


def out_of_memory(phase: str, request_id: str, needed: int, available: int, page_size: int) -> EngineStuck:
    """An allocation fails although admission let it through; the scheduler process dies."""
    return EngineStuck(
        f"SGLang dies with 'Out of memory' in the {phase} allocation that begins with request {request_id}: "
        f"{needed} KV tokens are needed (page size {page_size}) and {available} are left after eviction. A "
        "chunked prompt must go on and, in a mixed batch, decodes get memory without the check that would "
        f"retract some; drop --enable-mixed-chunk, {_MORE_KV}, or raise --schedule-conservativeness"
    )


def cannot_retract(request_id: str) -> EngineStuck:
    """The last running request cannot decode even with the pool to itself; the engine aborts it."""
    return EngineStuck(
        f"SGLang aborts request {request_id}: nothing else is left to retract and the KV pool has no room "
        f"for its next token; {_MORE_KV}, or drop --prefill-decode-interval"
    )


def never_admitted(request_id: str, behind: int, version: str, *, is_full: bool) -> EngineStuck:
    """Nothing runs, and no further call will admit anybody.

    Args:
        is_full: whether `batch_is_full` is set, which only a running request could clear; else the request's
            first chunk would be less than a page.
    """
    why, way_out = (
        (
            "batch_is_full was set while memory or request slots were short, and only a running request "
            "could clear it",
            f"{_MORE_KV}, or raise --max-running-requests",
        )
        if is_full
        else ("its first chunk would be less than a page", "raise --chunked-prefill-size to --page-size")
    )
    return EngineStuck(
        f"SGLang {version} hangs: nothing runs, yet request {request_id} and {behind} behind it are never "
        f"admitted, because {why}; {way_out}"
    )


def never_fits(request_id: str, prompt_len: int, max_tokens: int, pool_tokens: int) -> EngineStuck:
    """A request that ignores EOS, whose output is clipped to the pool, is not admitted even alone."""
    return EngineStuck(
        f"SGLang hangs as soon as it comes to request {request_id}: {prompt_len} + {max_tokens} tokens leave "
        f"no more than one of the pool's {pool_tokens} free, which a request with ignore_eos needs without "
        f"the radix cache; {_MORE_KV}, ask for fewer tokens, or drop --disable-radix-cache"
    )


def lost(request_id: str, waiting_id: str) -> EngineStuck:
    """A preempted request is queued again only if the pass admits somebody."""
    return EngineStuck(
        f"SGLang loses request {request_id}: it was preempted for request {waiting_id}, which then did not "
        f"fit, and in that case it is not queued again; {_MORE_KV}, or raise "
        "--priority-scheduling-preemption-threshold"
    )
