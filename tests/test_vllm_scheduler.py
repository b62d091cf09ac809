"""The vLLM scheduler: hand-made cases, one rule each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.engines.base import Scheduler
from sim.engines.vllm.scheduler import VllmScheduler
from sim.request import Request
from tests.vllm_play import ROOMY, TIGHT, Play, ask, two_that_outgrow_the_pool


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


def test_the_latest_gives_way_and_resumes_with_what_is_still_cached() -> None:
    calls, play = two_that_outgrow_the_pool(TIGHT)
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
    calls, _ = two_that_outgrow_the_pool(replace(TIGHT, enable_prefix_caching=False))
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
