"""What the vLLM scheduler remembers of one request (vLLM: `v1/request.py Request`)."""

from __future__ import annotations

from sim.engines.vllm.block_pool import BlockTable
from sim.request import Request


class EngineRequest:
    """Progress of one request inside the engine. All counts are tokens unless said otherwise.

    Attributes:
        sort_key: (priority, position in the order of arrival): the lowest runs first under `priority`.
        length_limit: the sequence length at which generation ends, `min(prompt + max_tokens, max_model_len)`.
        max_total_tokens: prompt + max_tokens.
        num_tokens: prompt and generated tokens that the scheduler knows.
        num_computed_tokens: positions whose KV exists or is being computed by a step in flight.
        num_stale_results: results in flight [steps] since before the last preemption.
        table: its KV blocks.
        samples_stop: see `Request.samples_stop`.
        plain_until: while it decodes and has computed fewer tokens than this, its next token needs no block,
            completes none and meets no limit; 0: not known.
        notice_at: a result that makes the number of its tokens this or more may end it, or complete a block.
    """

    __slots__ = (
        "finished",
        "length_limit",
        "max_total_tokens",
        "notice_at",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_stale_results",
        "num_tokens",
        "plain_until",
        "request",
        "request_id",
        "samples_stop",
        "sort_key",
        "table",
    )

    def __init__(self, request: Request, order: int, max_model_len: int, table: BlockTable) -> None:
        self.request = request
        self.request_id = request.request_id
        self.samples_stop = request.samples_stop
        self.sort_key = (request.priority, order)
        self.max_total_tokens = request.prompt_len + request.max_tokens
        self.length_limit = min(self.max_total_tokens, max_model_len)
        self.num_prompt_tokens = request.prompt_len
        self.num_tokens = request.prompt_len
        self.num_computed_tokens = 0
        self.num_stale_results = 0
        self.plain_until = 0
        self.notice_at = 0
        self.finished = False
        self.table = table
