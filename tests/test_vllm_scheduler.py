"""The vLLM scheduler: hand-made cases, one rule each, and what must hold in every run."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.base import Scheduler, StepPlan, StepResult
from sim.engines.vllm.block_pool import PrefixCachingBlockPool
from sim.engines.vllm.parity import replay
from sim.engines.vllm.queue import FcfsQueue
from sim.engines.vllm.request import EngineRequest
from sim.engines.vllm.scheduler import VllmScheduler, VllmSchedulerConfig
from sim.errors import BadInput, EngineStuck
from sim.request import Request
from tests.vllm_scenarios import draw

ROOMY = VllmSchedulerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=4,
    num_gpu_blocks=101,
    enable_prefix_caching=True,
    async_scheduling=False,
    scheduling_policy="fcfs",
    long_prefill_token_threshold=0,
    scheduler_reserve_full_isl=True,
    watermark=0.0,
    max_model_len=400,
    enable_chunked_prefill=True,
)


def ask(name: str, prompt: int, outputs: int, **more: Any) -> Request:
    """A request whose prompt is its own."""
    return Request(name, ((name, prompt),), outputs, **more)


class Play:
    """Drives a scheduler and writes each call down as `A[0:4] B[7:8] | preempted | waiting | free`."""

    def __init__(self, config: VllmSchedulerConfig, pipeline_depth: int | None = None) -> None:
        self.scheduler = VllmScheduler(config)
        self.depth = pipeline_depth or self.scheduler.pipeline_depth
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def add(self, *requests: Request) -> Play:
        for request in requests:
            self.scheduler.add_request(request)
        return self

    def step(self) -> str:
        """One call and, if the pipeline is full, one result."""
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        scheduled = " ".join(
            f"{c.request.request_id}[{c.start}:{c.start + c.num_tokens}]" for c in plan.scheduled
        )
        waiting = "".join(self.scheduler.waiting_ids())
        shown = [scheduled, "".join(plan.preempted), waiting, str(self.scheduler.block_pool.num_free_blocks)]
        if plan.scheduled:
            self.in_flight.append(plan)
        if self.in_flight and (len(self.in_flight) >= self.depth or not plan.scheduled):
            self.results.append(self.scheduler.update(self.in_flight.popleft()))
        return " | ".join(shown)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def to_the_end(self) -> list[str]:
        calls = []
        while self.scheduler.has_work():
            calls.append(self.step())
        return calls

    @property
    def finished(self) -> dict[str, str]:
        return {name: reason for result in self.results for name, reason in result.finished}


def test_the_interface_is_that_of_every_scheduler() -> None:
    scheduler: Scheduler = VllmScheduler(ROOMY)
    scheduler.add_request(ask("A", 10, 2))
    state = scheduler.queue_state()
    assert (state.num_running, state.num_waiting, state.kv_used_tokens, state.kv_total_tokens) == (
        0,
        1,
        0,
        400,
    )
    plan = scheduler.schedule()
    state = scheduler.queue_state()
    assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (1, 0, 12)
    assert (plan.step, plan.kind, plan.cached, plan.scheduled[0].samples) == (0, "mixed", [("A", 0)], True)


# -- budget and order -------------------------------------------------------------------------------------


def test_running_requests_come_first_and_a_prompt_takes_what_is_left() -> None:
    play = Play(replace(ROOMY, max_num_batched_tokens=10)).add(ask("A", 5, 9))
    play.step()
    play.add(ask("B", 21, 2))
    assert play.steps(4) == [
        "A[5:6] B[0:9] |  |  | 95",
        "A[6:7] B[9:18] |  |  | 93",
        "A[7:8] B[18:21] |  |  | 92",
        "A[8:9] B[21:22] |  |  | 91",
    ]


def test_a_half_read_prompt_stands_before_later_decodes() -> None:
    play = Play(replace(ROOMY, max_num_batched_tokens=8)).add(ask("A", 6, 5), ask("B", 13, 5))
    assert play.steps(3) == [
        "A[0:6] B[0:2] |  |  | 97",
        "A[6:7] B[2:9] |  |  | 95",
        "A[7:8] B[9:13] |  |  | 94",
    ]
    assert [chunk.samples for chunk in play.plans[1].scheduled] == [True, False]


def test_without_chunking_a_prompt_that_does_not_fit_holds_up_those_behind_it() -> None:
    config = replace(ROOMY, enable_chunked_prefill=False, max_num_batched_tokens=20, max_model_len=20)
    play = Play(config).add(ask("A", 12, 2), ask("B", 10, 2), ask("C", 3, 2))
    assert play.steps(2) == ["A[0:12] |  | BC | 97", "A[12:13] B[0:10] C[0:3] |  |  | 92"]


@pytest.mark.parametrize(
    ("version", "adaptive", "first", "second"),
    [
        ("0.28.0", False, "A[0:7]", "A[7:14] B[0:7] C[0:5]"),
        ("0.33.0", False, "A[0:30]", "A[30:31] B[0:7] C[0:5]"),
        ("0.33.1", True, "A[0:30]", "A[30:31] B[0:16] C[0:5]"),  # 50 tokens over three requests
    ],
)
def test_long_prefill_token_threshold(version: str, adaptive: bool, first: str, second: str) -> None:
    config = replace(
        ROOMY,
        max_num_batched_tokens=50,
        long_prefill_token_threshold=7,
        long_prefill_token_threshold_adaptive=adaptive,
        version=version,
    )
    play = Play(config).add(ask("A", 30, 3))
    assert play.step().startswith(first)
    play.add(ask("B", 20, 1), ask("C", 5, 1))
    assert play.step().startswith(second)


def test_slots_bound_what_runs_and_max_num_active_seqs_bounds_it_lower() -> None:
    requests = [ask("A", 4, 2), ask("B", 4, 3), ask("C", 4, 2)]
    assert Play(replace(ROOMY, max_num_seqs=2)).add(*requests).steps(3) == [
        "A[0:4] B[0:4] |  | C | 98",
        "A[4:5] B[4:5] |  | C | 96",
        "B[5:6] C[0:4] |  |  | 97",
    ]
    active = Play(replace(ROOMY, max_num_seqs=8, max_num_active_seqs=1, version="0.33.0")).add(*requests)
    assert active.step() == "A[0:4] |  | BC | 99"


def test_a_lower_budget_per_step_than_max_num_batched_tokens() -> None:
    play = Play(replace(ROOMY, max_num_batched_tokens=64, max_num_scheduled_tokens=9)).add(ask("A", 20, 1))
    assert play.step() == "A[0:9] |  |  | 97"


# -- prefix cache -----------------------------------------------------------------------------------------


def test_the_last_token_is_always_computed() -> None:
    play = Play(ROOMY)
    prompts = {"A": 12, "B": 12, "C": 13}
    for name, length in prompts.items():
        play.add(Request(name, (("same", length),), 1))
    assert play.step() == "A[0:12] B[8:12] C[12:13] |  |  | 95"  # hits within the very same call
    assert play.plans[0].cached == [("A", 0), ("B", 8), ("C", 12)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_later_turn_hits_the_outputs_that_it_quotes_but_not_the_last_one(asynchronous: bool) -> None:
    play = Play(replace(ROOMY, async_scheduling=asynchronous)).add(ask("A", 5, 8))
    play.to_the_end()
    play.add(Request("B", (("A", 5), ("out:A", 8), ("more", 9)), 1))
    assert play.step().startswith("B[12:22]")  # position 12 holds A's last output, which was never fed back


def test_prefix_caching_off() -> None:
    play = Play(replace(ROOMY, enable_prefix_caching=False))
    play.add(Request("A", (("same", 12),), 1), Request("B", (("same", 12),), 1))
    assert play.step() == "A[0:12] B[0:12] |  |  | 94"


# -- admission --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserve", "second"), [(True, "A[8:9] |  | B | 5"), (False, "A[8:9] B[0:9] |  |  | 2")]
)
def test_full_isl_reserve_asks_for_room_for_the_whole_prompt(reserve: bool, second: str) -> None:
    config = replace(
        ROOMY,
        num_gpu_blocks=9,
        max_num_batched_tokens=10,
        scheduler_reserve_full_isl=reserve,
        max_model_len=32,
    )
    play = Play(config).add(ask("A", 8, 9))
    play.step()
    play.add(ask("B", 24, 1))
    assert play.step() == second


def test_the_watermark_holds_only_while_something_runs() -> None:
    play = Play(replace(ROOMY, num_gpu_blocks=11, watermark=0.29, max_model_len=40))
    play.add(ask("A", 28, 1), ask("B", 4, 1))  # 7 of 10 blocks: no watermark for A; B would leave 2, not 3
    assert play.step() == "A[0:28] |  | B | 3"
    assert play.step() == "B[0:4] |  |  | 9"


def test_a_blocked_head_holds_up_small_requests_behind_it() -> None:
    play = Play(replace(ROOMY, num_gpu_blocks=9, max_model_len=32)).add(ask("A", 16, 3))
    play.step()
    play.add(ask("B", 20, 1), ask("C", 2, 1))
    assert play.step() == "A[16:17] |  | BC | 3"


# -- preemption -------------------------------------------------------------------------------------------

TIGHT = replace(ROOMY, num_gpu_blocks=7, max_model_len=24)


def _two_that_outgrow_the_pool(config: VllmSchedulerConfig) -> tuple[list[str], Play]:
    play = Play(config).add(ask("A", 8, 8), ask("B", 8, 8))
    return play.to_the_end(), play


def test_the_latest_gives_way_and_resumes_with_what_is_still_cached() -> None:
    calls, play = _two_that_outgrow_the_pool(TIGHT)
    assert calls[4:9] == [
        "A[11:12] B[11:12] |  |  | 0",
        "A[12:13] | B | B | 2",
        "A[13:14] |  | B | 2",
        "A[14:15] |  | B | 2",
        "B[8:13] |  |  | 2",  # its third block went to A
    ]
    assert play.plans[8].cached == [("B", 8)]
    assert play.finished == {"A": "length", "B": "length"}


def test_without_a_cache_everything_is_computed_again() -> None:
    calls, _ = _two_that_outgrow_the_pool(replace(TIGHT, enable_prefix_caching=False))
    assert calls[8] == "B[0:13] |  |  | 2"


def test_a_call_that_preempts_admits_nobody_and_the_victim_comes_first() -> None:
    play = Play(TIGHT).add(ask("A", 8, 8), ask("B", 8, 8))
    play.steps(5)
    play.add(ask("C", 2, 2))
    assert play.step() == "A[12:13] | B | BC | 2"


def test_priority_takes_the_least_important_wherever_it_stands() -> None:
    config = replace(TIGHT, scheduling_policy="priority")
    play = Play(config).add(ask("A", 8, 8, priority=4), ask("B", 8, 8, priority=1))
    assert play.steps(6)[5] == "B[12:13] | A | A | 2"
    ties = Play(config).add(ask("A", 8, 8, priority=1), ask("B", 8, 8, priority=1))
    assert ties.steps(6)[5] == "A[12:13] | B | B | 2"


def test_priority_does_not_preempt_for_a_slot() -> None:
    play = Play(replace(ROOMY, scheduling_policy="priority", max_num_seqs=1)).add(ask("A", 4, 3, priority=5))
    play.step()
    play.add(ask("B", 4, 1, priority=5), ask("C", 4, 1, priority=0))
    assert play.step() == "A[4:5] |  | CB | 98"


@pytest.mark.parametrize(
    ("version", "sixth"), [("0.28.0", " | L | L | 3"), ("0.33.0", "H[11:12] | L | L | 3")]
)
def test_after_preempting_itself_under_priority(version: str, sixth: str) -> None:
    play = Play(replace(TIGHT, scheduling_policy="priority", version=version)).add(ask("L", 8, 8, priority=9))
    play.step()
    play.add(ask("H", 8, 8, priority=0))
    assert play.steps(5)[4] == sixth


def test_tokens_of_a_victim_that_was_already_scheduled_go_back_to_the_budget() -> None:
    config = replace(
        ROOMY,
        scheduling_policy="priority",
        num_gpu_blocks=14,
        max_num_batched_tokens=11,
        max_model_len=48,
        long_prefill_token_threshold=9,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    play = Play(config).add(ask("V", 44, 1, priority=9))
    play.step()
    play.add(ask("R", 2, 20, priority=0))
    assert play.step() == "V[9:18] R[0:2] |  |  | 7"
    play.add(ask("S", 40, 1, priority=1))
    assert play.steps(2) == ["V[18:27] R[2:3] S[0:1] |  |  | 4", "V[27:36] R[3:4] S[1:2] |  |  | 2"]
    # V is given its last 8 tokens and both free blocks, then R lacks a block. Without the refund S gets 2.
    assert play.step() == "R[4:5] S[2:11] | V | V | 8"


# -- asynchronous scheduling ------------------------------------------------------------------------------

ASYNC = replace(ROOMY, async_scheduling=True)


def test_a_request_is_not_scheduled_beyond_max_tokens_but_keeps_its_slot_one_call_longer() -> None:
    play = Play(replace(ASYNC, max_num_seqs=1)).add(ask("A", 4, 2), ask("B", 4, 1))
    assert play.to_the_end() == [
        "A[0:4] |  | B | 99",
        "A[4:5] |  | B | 98",
        " |  | B | 98",
        "B[0:4] |  |  | 99",
        " |  |  | 99",
        " |  |  | 100",
    ]
    assert play.finished == {"A": "length", "B": "length"}


def test_a_stop_token_wastes_the_step_that_is_already_in_flight() -> None:
    play = Play(ASYNC).add(ask("A", 4, 10, stop_after=2))
    assert play.to_the_end() == [
        "A[0:4] |  |  | 99",
        "A[4:5] |  |  | 98",
        "A[5:6] |  |  | 98",
        " |  |  | 100",
    ]
    assert [result.new_tokens for result in play.results] == [[("A", 1)], [("A", 2)], []]
    assert play.finished == {"A": "stop"}


def test_a_prompt_is_read_chunk_after_chunk_without_waiting_for_results() -> None:
    play = Play(replace(ASYNC, max_num_batched_tokens=8)).add(ask("A", 18, 2))
    assert [call.split(" ")[0] for call in play.steps(4)] == ["A[0:8]", "A[8:16]", "A[16:18]", "A[18:19]"]


def test_tokens_in_flight_at_preemption_are_delivered_and_computed_again() -> None:
    calls, play = _two_that_outgrow_the_pool(replace(TIGHT, async_scheduling=True))
    assert calls[5] == "A[12:13] | B | B | 2"
    assert play.results[4].new_tokens == [("A", 5), ("B", 5)]  # B's fifth, from before its preemption
    assert "B[8:13] |  |  | 2" in calls


def test_a_preempted_request_can_finish_by_a_token_that_was_in_flight() -> None:
    play = Play(replace(TIGHT, async_scheduling=True)).add(ask("A", 8, 8), ask("B", 8, 8, stop_after=5))
    assert play.steps(7)[5:] == ["A[12:13] | B | B | 2", "A[13:14] |  |  | 2"]
    assert play.finished == {"B": "stop"}
    play.to_the_end()
    assert play.finished == {"B": "stop", "A": "length"}
    assert play.scheduler.block_pool.num_free_blocks == 6


def test_a_victim_waits_until_its_stale_output_has_drained_while_others_pass() -> None:
    """With up to four steps in flight, results of B are outstanding when it would be its turn again."""
    play = Play(replace(ASYNC, num_gpu_blocks=8, max_model_len=24), pipeline_depth=4)
    play.add(ask("A", 8, 12), ask("B", 8, 12)).steps(5)
    play.add(ask("C", 2, 1), ask("D", 2, 1))
    assert play.steps(4) == [
        "A[12:13] | B | BCD | 3",
        "A[13:14] C[0:2] D[0:2] |  | B | 1",  # nothing but its stale output keeps B from these blocks
        "A[14:15] |  | B | 1",
        "A[15:16] |  | B | 1",
    ]
    delivered = [new for result in play.results for new in result.new_tokens if new[0] == "B"]
    assert delivered == [("B", n) for n in range(1, 6)]  # the last three after its preemption
    play.to_the_end()
    assert play.finished == dict.fromkeys("ABCD", "length")


@pytest.mark.parametrize(("separate", "order"), [(True, "bdca"), (False, "dbca")], ids=["0.28", "0.33"])
def test_where_requests_that_were_passed_over_stand(separate: bool, order: str) -> None:
    pool = PrefixCachingBlockPool(9, 4, True)
    a, b, c, d = (
        EngineRequest(ask(name, 4, 1), place, 99, pool.new_table(name, ((name, 4),)))
        for place, name in enumerate("abcd")
    )
    queue = FcfsQueue(separate)
    for request in (b, c, a):
        queue.add(request)
    queue.put_back([queue.pop()])
    queue.add_preempted(d)
    assert "".join(request.request_id for request in queue.in_order()) == order
    queue.remove(b)
    assert [queue.pop(), queue.pop(), queue.pop(), queue.size] == [d, c, a, 0]


# -- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_max_model_len_ends_a_request(asynchronous: bool) -> None:
    play = Play(replace(ROOMY, max_model_len=15, async_scheduling=asynchronous)).add(ask("A", 11, 100))
    play.to_the_end()
    assert [result.new_tokens for result in play.results if result.new_tokens] == [
        [("A", n)] for n in range(1, 5)
    ]
    assert play.finished == {"A": "length"}


def test_a_stop_token_counts_before_a_length_limit() -> None:
    play = Play(ROOMY).add(ask("A", 4, 3, stop_after=3))
    play.to_the_end()
    assert play.finished == {"A": "stop"}


def test_one_more_call_follows_the_last_finish() -> None:
    play = Play(ROOMY).add(ask("A", 4, 1))
    assert play.to_the_end() == ["A[0:4] |  |  | 99", " |  |  | 100"]


# -- dead ends --------------------------------------------------------------------------------------------


def test_a_prompt_that_no_pool_state_can_hold_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"request big.*1500 tokens.*94 KV blocks of 90.*--gpu-memory-utilization"
    ):
        VllmScheduler(replace(ROOMY, block_size=16, num_gpu_blocks=91, max_model_len=1600)).add_request(
            ask("big", 1500, 20)
        )


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    with pytest.raises(BadInput, match=r"request long.*--max-model-len 40"):
        VllmScheduler(replace(ROOMY, max_model_len=40)).add_request(ask("long", 40, 1))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_outgrows_the_pool_is_named_instead_of_looping(
    asynchronous: bool, reserve: bool, policy: str
) -> None:
    """The engine's start-up check counts the null block, so this configuration starts, and then hangs."""
    config = replace(
        ROOMY,
        num_gpu_blocks=8,
        max_model_len=32,
        async_scheduling=asynchronous,
        scheduler_reserve_full_isl=reserve,
        scheduling_policy=policy,
    )
    play = Play(config).add(ask("A", 6, 2), ask("grows", 26, 6), ask("C", 3, 3))
    with pytest.raises(
        EngineStuck, match=r"request grows: grew to 29 tokens.* 8 KV blocks of 7.*--max-model-len"
    ):
        play.to_the_end()


def test_a_request_that_may_stop_in_time_is_given_the_chance() -> None:
    play = Play(replace(ROOMY, num_gpu_blocks=8, max_model_len=32)).add(ask("A", 26, 6, stop_after=3))
    play.to_the_end()
    assert play.finished == {"A": "stop"}


def test_four_requests_that_fit_only_one_at_a_time_all_finish() -> None:
    config = replace(ROOMY, block_size=16, num_gpu_blocks=91, max_num_batched_tokens=2048, max_model_len=900)
    play = Play(config).add(*(ask(name, 640, 180) for name in "ABCD"))
    play.to_the_end()
    assert play.finished == dict.fromkeys("ABCD", "length")
    assert 0 < sum(len(plan.preempted) for plan in play.plans) <= 12
    assert len(play.plans) < 4 * 180 + 20


def test_results_have_to_come_in_order() -> None:
    scheduler = VllmScheduler(ASYNC)
    scheduler.add_request(ask("A", 4, 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 0 is due before that of step 1"):
        scheduler.update(second)
    del first


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("max_num_seqs", 0, "--max-num-seqs"),
        ("max_num_batched_tokens", 7, "--max-num-batched-tokens"),
        ("block_size", -1, "--block-size"),
        ("num_gpu_blocks", 1, "--num-gpu-blocks-override"),
        ("scheduling_policy", "lifo", "--scheduling-policy"),
        ("long_prefill_token_threshold", 401, "--long-prefill-token-threshold"),
        ("watermark", 1.0, "--watermark"),
        ("enable_chunked_prefill", False, "--max-num-batched-tokens"),
        ("max_num_active_seqs", 0, "--max-num-active-seqs"),
        ("version", "latest", "--engine-version"),
    ],
)
def test_configurations_with_which_the_engine_does_not_start(field: str, value: object, flag: str) -> None:
    with pytest.raises(BadInput, match=flag):
        replace(ROOMY, **{field: value})


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.23.0", False), ("0.28.1", False), ("0.30.9", False), ("0.31.0", True), ("1.0", True)],
)
def test_other_versions_follow_the_nearer_rules(version: str, newer: bool) -> None:
    assert replace(ROOMY, version=version).follows_0_33 is newer


# -- in every run -----------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 10**6)
VERSIONS = st.sampled_from(("0.28.0", "0.33.0"))


def _expected_outcome(spec: dict[str, Any], max_model_len: int) -> list[Any]:
    limit = min(spec["max_tokens"], max_model_len - sum(length for _, length in spec["prompt"]))
    stop = spec["stop_after"]
    return ["stop", stop] if stop is not None and stop <= limit else ["length", limit]


@given(NUMBERS, VERSIONS, st.sampled_from((None, 3)))
@settings(max_examples=60, deadline=None)
def test_every_request_is_served_within_every_limit(number: int, version: str, depth: int | None) -> None:
    scenario = draw("invariants", number)
    args = scenario["args"]
    lines, facts = replay(scenario, version, depth if args["async_scheduling"] else None)
    for spec in scenario["requests"]:
        assert facts["outcome"][spec["id"]][:2] == _expected_outcome(spec, args["max_model_len"])
    preempted = [victim for line in lines for victim in line["preempted"]]
    position: dict[str, int] = {}
    for line in lines:
        position.update(dict.fromkeys(line["preempted"], -1))
        position.update(line["cached"])
        for name, start, count in line["scheduled"]:
            assert position[name] == start
            assert count > 0
            position[name] = start + count
        assert sum(count for _, _, count in line["scheduled"]) <= args["max_num_batched_tokens"]
        assert len(line["running"]) <= args["max_num_seqs"]
        assert not (line["preempted"] and line["cached"])
        assert not set(line["running"]) & set(line["waiting"])
        held = sum(-(-position[name] // args["block_size"]) for name in line["running"])
        assert 0 <= line["free_blocks"] <= args["num_gpu_blocks"] - 1
        if not args["enable_prefix_caching"]:
            assert line["free_blocks"] == args["num_gpu_blocks"] - 1 - held
            assert all(hit == 0 for _, hit in line["cached"])
        else:
            assert line["free_blocks"] >= args["num_gpu_blocks"] - 1 - held
    assert lines[-1]["free_blocks"] == args["num_gpu_blocks"] - 1
    assert {name: preempted.count(name) for name in preempted} == {
        name: times for name, (_, _, times) in facts["outcome"].items() if times
    }


@given(NUMBERS, VERSIONS)
@settings(max_examples=20, deadline=None)
def test_the_same_scenario_gives_the_same_run(number: int, version: str) -> None:
    assert replay(draw("again", number), version) == replay(draw("again", number), version)


@given(NUMBERS, VERSIONS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_stop_to_come_changes_nothing_that_was_decided_before(
    number: int, version: str, data: st.DataObject
) -> None:
    scenario = draw("causal", number)
    specs = scenario["requests"]
    quoted = {key.removeprefix("out:") for spec in specs for key, _ in spec["prompt"] if isinstance(key, str)}
    free = [place for place, spec in enumerate(specs) if spec["id"] not in quoted]
    place = data.draw(st.sampled_from(free))
    early = data.draw(st.integers(1, specs[place]["max_tokens"]))
    later = data.draw(st.none() | st.integers(early, specs[place]["max_tokens"]))
    runs = []
    for stop in (early, later):
        changed = [dict(spec) for spec in specs]
        changed[place]["stop_after"] = stop
        runs.append(replay({**scenario, "requests": changed}, version)[0])
    for one, other in zip(*runs, strict=False):
        assert {**one, "finished": 0, "new_tokens": 0} == {**other, "finished": 0, "new_tokens": 0}
        if [specs[place]["id"], early] in one["new_tokens"]:
            break


class Sealed:
    """A request that lets nobody see how long its output will be before it is there."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.sampled = 0
        for name in ("request_id", "prompt", "max_tokens", "arrival", "priority", "session", "prompt_len"):
            setattr(self, name, getattr(request, name))

    def samples_stop(self, num_output_tokens: int) -> bool:
        assert num_output_tokens == self.sampled + 1
        self.sampled += 1
        return self._request.samples_stop(num_output_tokens)


@pytest.mark.parametrize("number", range(20))
def test_a_scheduler_never_sees_where_an_output_ends(number: int) -> None:
    scenario = draw("sealed", number)
    scheduler = VllmScheduler(VllmSchedulerConfig(**scenario["args"]))
    sealed = []
    for spec in scenario["requests"]:
        prompt = tuple((key, length) for key, length in spec["prompt"])
        request = Request(spec["id"], prompt, spec["max_tokens"], 0.0, spec["stop_after"], spec["priority"])
        sealed.append(Sealed(request))
        scheduler.add_request(cast(Request, sealed[-1]))
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work() or in_flight:
        if scheduler.has_work():
            in_flight.append(scheduler.schedule())
            if len(in_flight) < scheduler.pipeline_depth and in_flight[-1].scheduled:
                continue
        scheduler.update(in_flight.popleft())
    for spec, request in zip(scenario["requests"], sealed, strict=True):
        assert request.sampled == _expected_outcome(spec, scenario["args"]["max_model_len"])[1]


@pytest.mark.parametrize("number", range(40))
def test_counting_blocks_changes_no_decision(number: int) -> None:
    scenario = draw("counting", number)
    args = {**scenario["args"], "scheduling_policy": "fcfs"}
    runs = []
    for shares in (True, False):
        scheduler = VllmScheduler(VllmSchedulerConfig(**args), shares_prefixes=shares)
        in_flight: deque[StepPlan] = deque()
        seen: list[Any] = []
        for place, spec in enumerate(scenario["requests"]):
            length = sum(length for _, length in spec["prompt"])
            scheduler.add_request(Request(spec["id"], ((place, length),), spec["max_tokens"]))
        while scheduler.has_work() or in_flight:
            if scheduler.has_work():
                plan = scheduler.schedule()
                pool = scheduler.block_pool
                seen.append((plan.scheduled, plan.preempted, plan.cached, pool.num_free_blocks))
                seen.append(pool.num_evicted_blocks)
                in_flight.append(plan)
                if plan.scheduled and len(in_flight) < scheduler.pipeline_depth:
                    continue
            seen.append(scheduler.update(in_flight.popleft()))
        runs.append([str(entry) for entry in seen])
    assert runs[0] == runs[1]
