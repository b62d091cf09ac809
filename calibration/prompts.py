"""What the prompts of a recorded run had in common: a prefix cache makes steps of shared ones shorter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sim.errors import BadInput
from sim.request import Request
from sim.results import RequestRecords
from sim.workload.generate import generate
from sim.workload.spec import WorkloadSpec

Prompt = tuple[tuple[int | str, int], ...]

RETOKENISED = 0.10  # of a prompt: what a tokenizer makes more or less of words
TEMPLATE = 128  # tokens that a chat template adds at most
UNSHARED = (
    "what its prompts had in common is not known, so that each is replayed in full: {why}; leave the run "
    "out, or give the scenario with the very load that it was sent"
)


def recorded_prompts(records: RequestRecords, spec: WorkloadSpec) -> tuple[list[Prompt], str | None]:
    """Segments of every recorded prompt, and why they may be wrong.

    The load's own segments where it makes the same requests (by their ids, and lengths that differ by no more
    than a template and the tokenizer explain); else no prompt shares anything with another.

    Args:
        records: of n requests.
        spec: the load that they were sent by, as far as it is known.

    Returns:
        n prompts, and None or a text for the user: prompts may have been shared, and are replayed as if not.
    """
    alone: list[Prompt] = [((i, int(n)),) for i, n in enumerate(records.prompt_len)]
    try:
        made = _in_order(generate(spec), records)
    except BadInput:
        made = []
    fitted = [_fitted(request, int(n)) for request, n in zip(made, records.prompt_len, strict=False)]
    prompts = [prompt for prompt in fitted if prompt is not None]
    if made and len(prompts) == len(records):
        return prompts, None
    if bool((records.cached_tokens > 0).any()):
        return alone, UNSHARED.format(why="the engine found some of them in its prefix cache")
    if _shares(made):
        return alone, UNSHARED.format(why="the load shares prefixes, but makes prompts of other lengths")
    return alone, None


def _in_order(made: Sequence[Request], records: RequestRecords) -> list[Request]:
    """The load's requests in the order of the records, often that of their ends; empty if they are others."""
    by_id = {request.request_id: request for request in made}
    found = [by_id.get(request_id) for request_id in records.request_id]
    known = [request for request in found if request is not None]
    if len(known) == len(records):
        return known
    return list(made) if not known and len(made) == len(records) else []


def _fitted(request: Request, length: int) -> Prompt | None:
    """A prompt's segments at the length that was counted; None: it is another prompt.

    What is missing or too much is put down to its end: the beginning is what others share.
    """
    more = length - request.prompt_len
    if length <= 0 or more == 0:  # nobody counted the tokens of a request that failed
        return request.prompt
    if not -RETOKENISED * length <= more <= RETOKENISED * length + TEMPLATE:
        return None
    if more > 0:
        return (*request.prompt, (f"{request.request_id}-more", more))
    key, last = request.prompt[-1]
    return (*request.prompt[:-1], (key, last + more)) if last + more > 0 else None


def _shares(made: Sequence[Request]) -> bool:
    """Whether any two prompts have a segment in common."""
    counts = Counter(key for request in made for key, _ in request.prompt)
    return any(count > 1 for count in counts.values())
