"""A request as the engines see it: who, when, which tokens, how many at most.

Prompts are described by segments, not token ids. Segment `(key, n)` stands for the first `n` tokens of
an endless sequence named `key`; two tokens are equal exactly if their key and their position within the
segment are equal. Requests whose prompts begin with the same segments share that prefix. The key
`"out:<request_id>"` names the tokens which that request generates, so a follow-up turn can quote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SegmentKey = int | str
Segment = tuple[SegmentKey, int]


@dataclass(frozen=True, slots=True, init=False)
class Request:
    """One request of a workload.

    Attributes:
        request_id: unique within a run.
        prompt: segments, first to last; every length is at least 1.
        max_tokens: the limit that the client asks for [tokens].
        arrival: scheduled send time, seconds since the start of the run.
        stop_after: the how-manieth generated token (1-based) is a stop token; None means `ignore_eos`:
            the request runs until a length limit. A scheduler must never read this field to decide; it
            learns of a stop through `samples_stop`, when the token comes out.
        priority: as the client sends it (vLLM: lower is sooner).
        session: requests of one multi-turn session share this id; None if there is none.
    """

    request_id: str
    prompt: tuple[Segment, ...]
    max_tokens: int
    arrival: float = 0.0
    stop_after: int | None = None
    priority: int = 0
    session: str | None = None
    prompt_len: int = field(init=False)

    def __init__(
        self,
        request_id: str,
        prompt: tuple[Segment, ...],
        max_tokens: int,
        arrival: float = 0.0,
        stop_after: int | None = None,
        priority: int = 0,
        session: str | None = None,
    ) -> None:
        # A frozen dataclass's own constructor takes twice as long, and a load has a million of them.
        put_id, put_prompt, put_max, put_arrival, put_stop, put_priority, put_session, put_len = _PUT
        put_id(self, request_id)
        put_prompt(self, prompt)
        put_max(self, max_tokens)
        put_arrival(self, arrival)
        put_stop(self, stop_after)
        put_priority(self, priority)
        put_session(self, session)
        put_len(self, prompt[0][1] if len(prompt) == 1 else sum([length for _, length in prompt]))

    @property
    def ignore_eos(self) -> bool:
        """Whether the request runs to a length limit whatever it samples."""
        return self.stop_after is None

    def samples_stop(self, num_output_tokens: int) -> bool:
        """Whether the `num_output_tokens`-th generated token (1-based) is a stop token.

        This stands for the model's sampler: call it only for a token that a step has just produced.
        """
        return num_output_tokens == self.stop_after


_PUT = tuple([getattr(Request, name).__set__ for name in Request.__slots__])


def can_share_prefixes(requests: Iterable[Request]) -> bool:
    """Whether two of the requests may begin alike; False if all first segments differ."""
    if getattr(requests, "shares_nothing", False):
        return False
    seen: set[SegmentKey] = set()
    for request in requests:
        key = request.prompt[0][0]
        if key in seen:
            return True
        seen.add(key)
    return False
