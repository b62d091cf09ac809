"""The vLLM scheduler with results in flight, how requests end, and what cannot be served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.engines.vllm.block_pool import PrefixCachingBlockPool
from sim.engines.vllm.queue import FcfsQueue
from sim.engines.vllm.request import EngineRequest
from sim.engines.vllm.scheduler import VllmScheduler
from sim.errors import BadInput, EngineStuck
from tests.vllm_play import ROOMY, TIGHT, Play, ask, two_that_outgrow_the_pool

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
    calls, play = two_that_outgrow_the_pool(replace(TIGHT, async_scheduling=True))
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
