"""Several replicas behind a router, in one simulated time; also with prefill and decode on different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.engines.base import Leaping, QueueState, Scheduler, StepShape
from sim.errors import BadInput, EngineStuck
from sim.loop.collector import collector_off
from sim.loop.leap import LeapingReplica
from sim.loop.moments import Clock, at
from sim.loop.recorder import Recorder
from sim.loop.replica import Replica, Usage
from sim.memory import MemoryAccount
from sim.planning.router import NodeView, Router
from sim.planning.sessions import Session, SessionClient
from sim.request import Request
from sim.results import RequestRecords, ServerSeries
from sim.scenario import Scenario
from sim.simulate import ENGINES, roofline
from sim.steptime.base import FrontEnd, StepTimeModel

MAX_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of a cluster.

    Attributes:
        role: "both"; or "prefill" and "decode", between which KV moves.
        step_time: None is the roofline with the GPU's default efficiencies.
    """

    scenario: Scenario
    role: str = "both"
    step_time: StepTimeModel | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV from prefill to decode replicas: bytes/s and seconds per transfer; one transfer at a time
    leaves each prefill replica.
    """

    bandwidth: float = 50e9
    latency: float = 0.001


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What one replica did."""

    name: str
    role: str
    requests: int
    usage: Usage
    series: ServerSeries
    account: MemoryAccount


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    """What the clients saw, in order of sending, and what each replica did.

    `duration` is the time to the last answer [s], `node_of` the replica that answered each request.
    """

    records: RequestRecords
    nodes: tuple[NodeOutcome, ...]
    duration: float
    node_of: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class LoadedPrompts:
    """Step times of a decode replica: prompts arrive computed, so their tokens cost a decode's KV read.

    What a chunk of a loaded prompt costs is that of one decode at its context.
    """

    model: StepTimeModel
    front_end: FrontEnd = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "front_end", self.model.front_end)

    def gpu(self, shape: StepShape) -> float:
        """As the model prices the step with loaded prompts as decodes [s]."""
        return self.model.gpu(self._loaded(shape))

    def host_before(self, shape: StepShape) -> float:
        """As the model."""
        return self.model.host_before(self._loaded(shape))

    def host_after(self, shape: StepShape) -> float:
        """As the model."""
        return self.model.host_after(self._loaded(shape))

    def out_of_range(self, shape: StepShape) -> str | None:
        """As the model."""
        return self.model.out_of_range(self._loaded(shape))

    def _loaded(self, shape: StepShape) -> StepShape:
        if not shape.num_prefill_seqs:
            return shape
        sequences = shape.num_decode_seqs + shape.num_prefill_seqs
        context = shape.decode_context + shape.prefill_context
        return StepShape(shape.kind, 0, 0, sequences, 0, 0, context, shape.num_sampled)


class Node:
    """A replica with its recorder, and what the router knows of it."""

    def __init__(self, env: Clock, member: Member, name: str, requests: Sequence[Request]) -> None:
        scenario = member.scenario
        engine = ENGINES[scenario.engine.name]
        account = engine.account(
            scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
        )
        model = member.step_time or roofline(scenario)
        if member.role == "decode":
            model = LoadedPrompts(model)
        self.name, self.role = name, member.role
        self.account = account
        self.kv_bytes_per_token = account.kv_bytes_per_token * int(scenario.engine["tensor_parallel_size"])
        self.recorder = Recorder(model.front_end, scenario.engine["stream_interval"])
        self.served: list[Request] = []
        self.outstanding = 0
        self.link_free = 0.0
        self._scheduler: Scheduler = engine.make_scheduler(scenario.engine, account, requests, scenario.seed)
        limits = engine.limits(scenario.engine, account)
        leaper = _leaping(self._scheduler, requests)
        if leaper is None:
            self.replica = Replica(
                env, self._scheduler, model, self.recorder, idle_poll=engine.idle_poll, limits=limits
            )
        else:
            self._scheduler = leaper
            self.replica = LeapingReplica(
                env, leaper, model, self.recorder, idle_poll=engine.idle_poll, limits=limits
            )

    def submit(self, request: Request) -> None:
        """Send a request to this replica now."""
        self.recorder.expect(1)
        self.served.append(request)
        self.outstanding += 1
        self.replica.submit(request)

    def view(self) -> NodeView:
        """What the router knows."""
        state: QueueState = self._scheduler.queue_state()
        usage = state.kv_used_tokens / state.kv_total_tokens if state.kv_total_tokens else 0.0
        return NodeView(self.outstanding, usage)

    def records(self) -> RequestRecords:
        """Records of what this replica served, in the order it got them."""
        self.recorder.flush()
        return self.recorder.records(self.served, self.recorder.ttft_parts(self.served))

    def outcome(self, requests: int) -> NodeOutcome:
        """Counters and series."""
        series = self.replica.series.since(0.0)
        return NodeOutcome(self.name, self.role, requests, self.replica.usage, series, self.account)


def run_cluster(
    members: Sequence[Member],
    sessions: Sequence[Session],
    router: Router,
    *,
    decode_router: Router | None = None,
    link: Link | None = None,
    max_concurrency: int | None = None,
) -> ClusterOutcome:
    """Simulate sessions on replicas behind a router until the last answer.

    With roles, a prefill replica computes the prompt and one token, its KV moves over the link, and a decode
    replica generates the answer; the client's first token is the decode replica's, as in vLLM's
    disaggregated prefill with a connector. KV on the prefill replica is freed when it is done, not when the
    transfer is.

    Raises:
        BadInput: no members, or only one half of prefill and decode.
        EngineStuck: one of the engines would hang or die.
    """
    roles = {member.role for member in members}
    if not members:
        raise BadInput("--replicas", 0, "must be at least 1")
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise BadInput("--prefill", None, "needs both prefill and decode replicas, and no others")
    env = Clock()
    everything = [turn for session in sessions for turn in session.turns]
    if roles == {"both"}:
        first_tokens = everything
    else:
        first_tokens = [replace(r, max_tokens=1, stop_after=None) for r in everything]
    nodes = [
        Node(
            env,
            m,
            f"{m.role}-{i}" if m.role != "both" else f"replica-{i}",
            _share(m, everything, first_tokens),
        )
        for i, m in enumerate(members)
    ]
    flow = _Flow(env, nodes, router, decode_router or router, link or Link())
    client = SessionClient(env, sessions, flow.send, max_concurrency)
    flow.on_delivered = client.delivered
    failures = [node.replica.failed for node in nodes]
    try:
        with collector_off():
            env.run(until=env.any_of([client.done, *failures]))
    except RuntimeError as ran_dry:
        raise EngineStuck("the cluster stopped with requests unanswered") from ran_dry
    for node in nodes:
        if node.replica.failure is not None:
            raise node.replica.failure
    return flow.outcome(client.sent, env.now)


def _share(member: Member, everything: list[Request], first_tokens: list[Request]) -> list[Request]:
    return first_tokens if member.role == "prefill" else everything


def _leaping(scheduler: Scheduler, requests: Sequence[Request]) -> Leaping | None:
    make: Callable[[Sequence[Request]], Leaping | None] | None = getattr(scheduler, "leaping", None)
    return None if make is None else make(requests)


class _Flow:
    """The way of requests through the cluster."""

    def __init__(self, env: Clock, nodes: Sequence[Node], first: Router, second: Router, link: Link) -> None:
        self.on_delivered: Callable[[Request, float], None] | None = None
        self._env = env
        self._nodes = nodes
        self._entry = [i for i, node in enumerate(nodes) if node.role != "decode"]
        self._exit = [i for i, node in enumerate(nodes) if node.role == "decode"]
        self._first, self._second = first, second
        self._link = link
        self._whole: dict[str, Request] = {}
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        for index, node in enumerate(nodes):
            node.replica.on_delivered = self._returned_to(index)

    def send(self, request: Request) -> None:
        """Route a request that a client sends now."""
        index = self._route(self._first, self._entry, request)
        self._entered[request.request_id] = index
        if self._exit:
            self._whole[request.request_id] = request
            request = replace(request, max_tokens=1, stop_after=None)
        self._nodes[index].submit(request)

    def _route(self, router: Router, among: Sequence[int], request: Request) -> int:
        return among[router.choose(request, [self._nodes[i].view() for i in among])]

    def _returned_to(self, index: int) -> Callable[[Request, float], None]:
        def returned(request: Request, when: float) -> None:
            at(self._env, when, lambda: self._count_back(index))
            if self._nodes[index].role == "prefill":
                self._transfer(index, request, when)
            elif self.on_delivered is not None:
                self.on_delivered(request, when)

        return returned

    def _count_back(self, index: int) -> None:
        self._nodes[index].outstanding -= 1

    def _transfer(self, index: int, request: Request, when: float) -> None:
        """Move a prompt's KV, one after the other per prefill replica; then the answer is generated."""
        node = self._nodes[index]
        size = request.prompt_len * node.kv_bytes_per_token
        begin = max(when, node.link_free)
        node.link_free = begin + size / self._link.bandwidth
        arrives = node.link_free + self._link.latency
        whole = self._whole.pop(request.request_id)
        at(self._env, arrives, lambda: self._decode(whole))

    def _decode(self, request: Request) -> None:
        index = self._route(self._second, self._exit, request)
        self._left[request.request_id] = index
        self._nodes[index].submit(request)

    def outcome(self, sent: Sequence[Request], now: float) -> ClusterOutcome:
        """Records of all nodes in the order of sending."""
        place = {request.request_id: i for i, request in enumerate(sent)}
        records = [node.records() for node in self._nodes]
        entered = _ordered([records[i] for i in self._entry], place)
        if self._exit:
            entered = _joined(entered, _ordered([records[i] for i in self._exit], place))
        counts = [len(node.served) for node in self._nodes]
        nodes = tuple(node.outcome(n) for node, n in zip(self._nodes, counts, strict=True))
        where = self._left or self._entered
        return ClusterOutcome(entered, nodes, now, tuple(where[r.request_id] for r in sent))


COLUMNS = (
    "scheduled", "sent", "first_token", "last_token", "prompt_len", "output_len", "cached_tokens", "queue",
    "prefill", "preemptions",
)  # fmt: skip


def _ordered(parts: Sequence[RequestRecords], place: dict[str, int]) -> RequestRecords:
    """Rows of several records as one, in the given order."""
    ids = [rid for part in parts for rid in part.request_id]
    order = np.argsort([place[rid] for rid in ids], kind="stable")
    counts = np.concatenate([np.diff(part.itl_offsets) for part in parts])[order]
    gaps = np.concatenate([part.itls for part in parts])
    starts = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(p.itl_offsets) for p in parts]))])[:-1][
        order
    ]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    take = np.repeat(starts - offsets[:-1], counts) + np.arange(int(counts.sum()))
    columns = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in COLUMNS}
    status = [s for part in parts for s in part.status]
    return RequestRecords(
        request_id=tuple(ids[i] for i in order),
        status=tuple(status[i] for i in order),
        itls=gaps[take],
        itl_offsets=offsets,
        **columns,
    )


def _joined(prefills: RequestRecords, decodes: RequestRecords) -> RequestRecords:
    """Records of disaggregated requests: sent to the one, answered by the other."""
    return replace(
        decodes,
        scheduled=prefills.scheduled,
        sent=prefills.sent,
        cached_tokens=prefills.cached_tokens,
        queue=prefills.queue + decodes.queue,
        prefill=prefills.prefill,
        preemptions=prefills.preemptions + decodes.preemptions,
    )
