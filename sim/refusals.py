"""Which requests of a load a server turns away for their length, before its engine sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sim.errors import BadInput
from sim.length_limits import LENGTH_FLAG, LENGTH_KEY
from sim.provenance import Note
from sim.request import Request
from sim.scenario import EngineConfig, EngineName
from sim.workload.table import OwnPrompts, RequestTable

# Tokens that a prompt must leave of the longest sequence.
_RESERVED: dict[EngineName, int] = {"vllm": 1, "sglang": 7}


def refusals(
    engine: EngineConfig, requests: Sequence[Request], fitting: int | None = None
) -> tuple[Callable[[Request], bool] | None, list[Note]]:
    """Which requests the server turns away for their length (None: not one), and a note that says how many.

    vLLM (renderers/params.py, 0.28) and SGLang (`validate_input_length`, 0.5.21) refuse what asks for more
    than the longest sequence; SGLang leaves a prompt some tokens besides, and lets it be no longer than the
    pool, to which it cuts the output.

    Args:
        fitting: `MemoryAccount.longest`.

    Raises:
        BadInput: it turns all of them away.
    """
    flag, limit = LENGTH_FLAG[engine.name], int(engine[LENGTH_KEY[engine.name]])
    short = limit if fitting is None else min(limit, fitting)
    longest = short - _RESERVED[engine.name]
    if engine.name == "vllm":
        limit = short

    def refuses(request: Request) -> bool:
        prompt = request.prompt_len
        return prompt + request.max_tokens > limit or prompt > longest

    if not requests or _surely_fit(requests, limit, longest):
        return None, []
    count = sum(map(refuses, requests))
    if not count:
        return None, []
    if count == len(requests):
        one = requests[0]
        such = f"a prompt of {one.prompt_len} tokens with {one.max_tokens} of output"
        if short < limit and one.prompt_len + one.max_tokens <= limit:
            such += f" beside a KV pool of {short:,} tokens"
        hint = f"is exceeded by all {count:,} requests, such as {such}: raise it, or shorten them"
        raise BadInput(flag, limit, hint)
    share = f"{count:,} of {len(requests):,} requests"
    text = f"{share} ask for more than {short:,} tokens: the server refuses them, and they count as failed"
    return refuses, [Note("warning", flag, text)]


def _surely_fit(requests: Sequence[Request], limit: int, longest: int) -> bool:
    """Whether columns tell at once that no request is too long; False where they do not."""
    if not isinstance(requests, RequestTable):
        return False
    if isinstance(requests.prompts, OwnPrompts):
        lens = requests.prompts.lens
    else:
        parts = (sum(tokens for _, tokens in prompt) for prompt in requests.prompts)
        lens = np.fromiter(parts, np.int64, len(requests))
    return bool((lens + requests.output_lens).max() <= limit and lens.max() <= longest)
