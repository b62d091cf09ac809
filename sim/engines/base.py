"""What the simulator and an engine's scheduler say to each other.

A scheduler is a plain class without a clock. Each scheduling call yields a `StepPlan`, and each result that
is handed back yields a `StepResult`. Who calls when (pipeline depth) is the replica's business, what a
step costs is the step-time model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from sim.request import Request

StepKind = Literal["mixed", "prefill", "decode", "idle"]
FinishReason = Literal["stop", "length", "abort"]

new_tuple = tuple.__new__  # a named tuple's own constructor takes twice as long


class ScheduledChunk(NamedTuple):
    """Tokens `start .. start + num_tokens - 1` of one request's sequence, computed in one step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # whether this chunk reaches the end of the known sequence, so a token comes out


class StepShape(NamedTuple):
    """What a step-time model needs to know of a batch. All counts are tokens or sequences of one step.

    A chunk of exactly one token counts as a decode: its attention and its graph are a decode's.

    Attributes:
        kind: "mixed" (vLLM always), or SGLang's "prefill", "decode", "mixed".
        num_prefill_tokens: tokens in chunks of more than one token.
        num_prefill_seqs: number of such chunks.
        num_decode_seqs: chunks of one token.
        prefill_pairs: sum over prefill chunks of query-key pairs, n * start + n * (n + 1) / 2.
        prefill_context: sum over prefill chunks of start + n [tokens of KV read].
        decode_context: sum over decodes of start + 1 [tokens of KV read].
        num_sampled: sequences for which logits are computed.
    """

    kind: StepKind
    num_prefill_tokens: int
    num_prefill_seqs: int
    num_decode_seqs: int
    prefill_pairs: int
    prefill_context: int
    decode_context: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        """All tokens of the step."""
        return self.num_prefill_tokens + self.num_decode_seqs


def decodes(kind: StepKind, sequences: int, context: int) -> StepShape:
    """A batch of decodes with `context` tokens in all, every one of them sampled."""
    return new_tuple(StepShape, (kind, 0, 0, sequences, 0, 0, context, sequences))


class Holder(Protocol):
    """What an engine keeps of one of its requests."""

    request: Request


class StepPlan:
    """What one scheduling call decided.

    Attributes:
        step: number of the call, from 0.
        kind: "idle" if nothing is to be run.
        preempted: ids of the victims of this call, in the order they were taken (SGLang: retracted).
        cached: (id, prefix-cache hit in tokens) for every request admitted or resumed by this call,
            zero hits included.
        crowd, crowd_context: decodes that `scheduled` does not list (see `Leaping`), and the sum over them of
            start + 1.
        head, head_context: how many of the first chunks are known to be sampled decodes (see `decode_first`),
            and the sum over them of start + 1.
    """

    __slots__ = (
        "_chunks",
        "_decoding",
        "_starts",
        "cached",
        "crowd",
        "crowd_context",
        "head",
        "head_context",
        "kind",
        "preempted",
        "step",
    )

    def __init__(
        self,
        step: int,
        kind: StepKind,
        scheduled: list[ScheduledChunk] | None = None,
        preempted: list[str] | None = None,
        cached: list[tuple[str, int]] | None = None,
        crowd: int = 0,
        crowd_context: int = 0,
    ) -> None:
        self.step = step
        self.kind = kind
        self.preempted = preempted or []
        self.cached = cached or []
        self.crowd = crowd
        self.crowd_context = crowd_context
        self.head = 0
        self.head_context = 0
        self._chunks = scheduled or []
        self._decoding: Sequence[Holder] = ()
        self._starts: Sequence[int] = ()

    @property
    def scheduled(self) -> list[ScheduledChunk]:
        """Chunks in batch order."""
        if self._starts:
            self._chunks[:0] = [
                new_tuple(ScheduledChunk, (holder.request, start, 1, True))
                for holder, start in zip(self._decoding, self._starts, strict=True)
            ]
            self._decoding = self._starts = ()
        return self._chunks

    @scheduled.setter
    def scheduled(self, chunks: list[ScheduledChunk]) -> None:
        self._chunks, self._decoding, self._starts = chunks, (), ()

    def decode_first(self, requests: Sequence[Holder], starts: Sequence[int]) -> None:
        """Let the batch begin with the token at `starts[i]` of `requests[i]`, sampling one for each.

        Only once, and before anything else is added. Chunks are made of them when somebody asks for
        `scheduled`, which few do.
        """
        self._decoding, self._starts = requests, starts
        self.head = len(starts)
        self.head_context = sum(starts) + len(starts)

    def add(self, chunk: ScheduledChunk) -> None:
        """Put a chunk at the end of the batch."""
        self._chunks.append(chunk)

    def behind_head(self) -> list[ScheduledChunk]:
        """The chunks behind the first `head`."""
        return self._chunks if self._starts else self._chunks[self.head :]

    def shape(self) -> StepShape:
        """Sum the batch up for pricing."""
        decode_seqs = sampled = self.crowd + self.head
        decode_context = self.crowd_context + self.head_context
        chunks = self._chunks
        if self.head and not self._starts:
            chunks = chunks[self.head :]
        if not chunks:
            return new_tuple(StepShape, (self.kind, 0, 0, decode_seqs, 0, 0, decode_context, sampled))
        prefill_tokens = prefill_seqs = pairs = prefill_context = 0
        for _, start, n, samples in chunks:
            if n == 1:
                decode_seqs += 1
                decode_context += start + 1
            else:
                prefill_seqs += 1
                prefill_tokens += n
                pairs += n * start + n * (n + 1) // 2
                prefill_context += start + n
            sampled += samples
        return new_tuple(
            StepShape,
            (
                self.kind,
                prefill_tokens,
                prefill_seqs,
                decode_seqs,
                pairs,
                prefill_context,
                decode_context,
                sampled,
            ),
        )


@dataclass(slots=True)
class StepResult:
    """What came of a step once its result was processed.

    Attributes:
        new_tokens: (id, number of output tokens after it) in processing order; only tokens that were kept.
        finished: (id, reason), in order.
        left: members of the crowd (see `Leaping`) that get no token of this result and did not finish.
        regrouped: `new_tokens` names everybody, in a new order: the crowd has formed anew.
    """

    new_tokens: list[tuple[str, int]] = field(default_factory=list)
    finished: list[tuple[str, FinishReason]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    regrouped: bool = False


class QueueState(NamedTuple):
    """Queue lengths and KV occupancy right after a call.

    `kv_used_tokens` counts tokens (vLLM: blocks x block size) that are held by requests; cached but
    unreferenced ones count as free, as in both engines' own gauges.
    """

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int


class Scheduler(Protocol):
    """An engine's scheduler, driven step by step.

    `pipeline_depth` is 1 when a step's result is processed before the next scheduling call, 2 when the
    next call comes first (vLLM `async_scheduling`, SGLang's overlap schedule).
    """

    pipeline_depth: int

    def add_request(self, request: Request) -> None:
        """Take a request in. Raises EngineStuck or BadInput if the engine would refuse it."""

    def schedule(self) -> StepPlan:
        """Decide the next batch. Raises EngineStuck where the real engine hangs or dies."""

    def update(self, plan: StepPlan) -> StepResult:
        """Process the result of a plan that was run; plans come back in the order they were made."""

    def has_work(self) -> bool:
        """Whether a further `schedule` call can do anything without a new request."""

    def queue_state(self) -> QueueState:
        """Queue lengths and KV occupancy now."""

    def running_ids(self) -> Sequence[str]:
        """Ids in the engine's running list, in its order."""

    def waiting_ids(self) -> Sequence[str]:
        """Ids of waiting requests in the order in which the scheduler will look at them."""


class Leapt(NamedTuple):
    """What came of a leap.

    Attributes:
        plan: the plan whose result is still due, if `pipeline_depth` leaves one in flight.
        blocks: how many KV blocks were begun by each of the calls and those before it.
        prefill: what came of the plan in flight, if it was of kind "prefill"; it is the first result then.
        joined: ids of those who joined the crowd with the first result, a prefill's aside.
        finished: (id, reason) of those whom the last result ended, in order.
    """

    plan: StepPlan | None
    blocks: list[int]
    prefill: StepResult | None
    joined: list[str]
    finished: list[tuple[str, FinishReason]]


@runtime_checkable
class Leaping(Scheduler, Protocol):
    """A scheduler that decides the same, but counts its decoding requests instead of listing them.

    Requests that get one token in every call form the crowd. Plans and results tell it by its size and by who
    joins and leaves: a request that `new_tokens` of a result names belongs to the crowd's end from then on,
    until it finishes or `left` names it. (Results of kind "prefill" leave the crowd alone.)

    Attributes:
        block_size: tokens per KV block.
    """

    block_size: int

    def steady_calls(self) -> int:
        """How many further calls are certain to decode a token for each member of the crowd and nothing else.

        That holds as long as no request is added. The crowd stays as it is until the last of these calls,
        which lacks those whose last token it is known to be; the results that are processed before the call
        after it end nobody, but for the latest of them. 0 or more.
        """

    def steady_shape(self) -> StepShape:
        """The batch of the first of these calls."""

    def leap(self, calls: int) -> Leapt:
        """Make that many calls (1 to `steady_calls`), and process the results due before the next one."""
