"""A request inside the engine."""

from __future__ import annotations

from sim.engines.sglang.radix_cache import Node
from sim.engines.sglang.tokens import STOP_RUN, Run, output_key, prompt_runs
from sim.request import Request


class LiveRequest:
    """What the engine knows of a request between arrival and finish.

    Attributes:
        request, request_id, prompt_len: as sent.
        entered: position in the order in which requests (re-)entered the waiting queue.
        max_new_tokens: the client's limit after the engine's clipping.
        ignore_eos: whether only a length limit ends it.
        num_output_tokens: outputs whose results were processed.
        stopped: whether its last output is the stop token.
        finished, retracted: state flags; `retracted` holds from retraction to the next admission.
        kv: positions with a KV slot.
        prefix_len: tokens that its next chunk need not compute.
        start, end: positions of its current chunk.
        owned: tokens of its prefix that lie in the tree, locked for it at `node`.
        holds_slot: whether it has a request slot.
        fill_len: length of its sequence when the engine last assembled it (0: never).
        chain: where its own chain begins, if nobody else can hit it (`ChainedKvPool`).
        matched: hit length of its last lookup over the whole sequence [tokens], for ordering policies.
    """

    __slots__ = (
        "_prompt_runs",
        "chain",
        "end",
        "entered",
        "fill_len",
        "finished",
        "holds_slot",
        "ignore_eos",
        "kv",
        "matched",
        "max_new_tokens",
        "node",
        "num_output_tokens",
        "owned",
        "prefix_len",
        "prompt_len",
        "request",
        "request_id",
        "retracted",
        "start",
        "stopped",
    )

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_len = request.prompt_len
        self._prompt_runs: tuple[Run, ...] = ()
        self.entered = 0
        self.max_new_tokens = max_new_tokens
        self.ignore_eos = request.ignore_eos
        self.num_output_tokens = 0
        self.stopped = False
        self.finished = False
        self.retracted = False
        self.kv = 0
        self.prefix_len = 0
        self.start = 0
        self.end = 0
        self.owned = 0
        self.node: Node | None = None
        self.chain: Node | None = None
        self.holds_slot = False
        self.fill_len = 0
        self.matched = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs known so far."""
        return self.prompt_len + self.num_output_tokens

    def runs(self) -> list[Run]:
        """The tokens of prompt and outputs."""
        if not self._prompt_runs:
            self._prompt_runs = prompt_runs(self.request.prompt)
        runs = list(self._prompt_runs)
        own = self.num_output_tokens - self.stopped
        if own:
            runs.append((output_key(self.request_id), 0, own))
        if self.stopped:
            runs.append(STOP_RUN)
        return runs
