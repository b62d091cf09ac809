"""Who is looked at first, who makes way, and who is retracted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang_by_hand import ask, outcome, play, told


def first_batch(*requests: dict[str, Any], at: int = 0, **args: Any) -> str:
    return told([line for line in play(*requests, **args) if line["step"] == at])[0]


def test_lpm_takes_the_longest_hit_first() -> None:
    args = {"schedule_policy": "lpm", "max_running_requests": 1, "max_total_tokens": 400}
    lines = play(
        ask("X", [(7, 40)], 1),
        ask("A", 10, 1, arrival_step=2),
        ask("B", [(7, 20), (8, 9)], 1, arrival_step=2),
        ask("C", [(7, 40), (9, 9)], 1, arrival_step=2),
        **args,
    )
    assert told(lines)[2:6] == ["prefill C[40:49]", "prefill B[20:29]", "prefill A[0:10]", "idle"]
    assert lines[2]["waiting"] == ["B", "A"]  # the sorted order stays


def test_lpm_lets_an_uncached_duplicate_go_last_but_not_wait() -> None:
    shared = [(7, 33)]
    trio = [ask("A", [*shared, (8, 2)], 1), ask("B", [*shared, (9, 2)], 1), ask("C", 10, 1)]
    args = {"schedule_policy": "lpm", "chunked_prefill_size": 256}
    assert first_batch(*trio, **args) == "prefill A[0:35] C[0:10] B[0:35]"
    # 31 shared tokens are too few to bother.
    trio = [ask("A", [(7, 31), (8, 2)], 1), ask("B", [(7, 31), (9, 2)], 1), ask("C", 10, 1)]
    assert first_batch(*trio, **args) == "prefill A[0:33] B[0:33] C[0:10]"


@pytest.mark.parametrize(("shared", "order"), [(32, "A C B"), (31, "A B C")])
def test_lpm_calls_32_shared_tokens_a_duplicate_whatever_the_page_size(shared: int, order: str) -> None:
    trio = [ask("A", [(7, shared), (8, 2)], 1), ask("B", [(7, shared), (9, 2)], 1), ask("C", 10, 1)]
    for page_size in (1, 16, 64):
        batch = play(
            *trio,
            schedule_policy="lpm",
            chunked_prefill_size=256,
            max_total_tokens=1280,
            page_size=page_size,
        )[0]
        assert " ".join(name for name, _, _ in batch["scheduled"]) == order


def test_lpm_does_not_count_the_last_token_which_is_always_computed() -> None:
    lines = play(
        ask("X", [(7, 20)], 1),
        ask("A", [(7, 20)], 1, arrival_step=2),
        ask("B", [(7, 20), (8, 5)], 1, arrival_step=2),
        schedule_policy="lpm",
    )
    assert told(lines)[2] == "prefill B[20:25] A[19]"


@pytest.mark.parametrize(("waiting", "first"), [(128, "W127[40]"), (129, "W0[0:2]")])
def test_lpm_gives_up_above_128_waiting_requests(waiting: int, first: str) -> None:
    """The last one in the queue has the only hit."""
    crowd = [ask(f"W{i}", [(500 + i, 2)], 1, arrival_step=2) for i in range(waiting)]
    crowd[-1]["prompt"] = [[7, 40], [9, 1]]
    batch = first_batch(
        ask("X", [(7, 40)], 1),
        *crowd,
        at=2,
        schedule_policy="lpm",
        max_total_tokens=900,
        max_running_requests=1,
    )
    assert batch == f"prefill {first}"


def test_lpm_without_radix_cache_is_fcfs() -> None:
    trio = [ask("A", 5, 1), ask("B", [(7, 40)], 1), ask("C", [(7, 40)], 1)]
    args = {"disable_radix_cache": True, "chunked_prefill_size": 256}
    assert first_batch(*trio, schedule_policy="lpm", **args) == first_batch(*trio, **args)


def test_lof_takes_the_longest_output_first() -> None:
    trio = [ask("A", 5, 3), ask("B", 6, 9), ask("C", 7, 9)]
    assert first_batch(*trio, schedule_policy="lof") == "prefill B[0:6] C[0:7] A[0:5]"


def test_dfs_weight_serves_the_heavier_subtree_together() -> None:
    lines = play(
        ask("X", [(7, 20)], 1),
        ask("Y", [(8, 20)], 1, arrival_step=2),
        ask("A", [(7, 20), (1, 3)], 1, arrival_step=5),
        ask("B", [(8, 20), (2, 3)], 1, arrival_step=5),
        ask("C", 4, 1, arrival_step=5),
        ask("D", [(8, 20), (3, 3)], 1, arrival_step=5),
        schedule_policy="dfs-weight",
    )
    # Two wait below 8, one below 7, and C, which hits nothing, hangs at the root, visited last.
    assert told([line for line in lines if line["step"] == 5]) == [
        "prefill B[20:23] D[20:23] A[20:23] C[0:4]"
    ]


def test_random_order_follows_the_seed() -> None:
    crowd = [ask(chr(65 + i), 3, 1) for i in range(12)]
    orders = {first_batch(*crowd, schedule_policy="random", seed=seed) for seed in (1, 1, 2, 3)}
    assert len(orders) == 3


def test_priority_orders_the_queue_and_larger_is_sooner() -> None:
    trio = [ask("A", 5, 1, priority=1), ask("B", 6, 1, priority=3), ask("C", 7, 1, priority=3)]
    args = {"enable_priority_scheduling": True}
    assert first_batch(*trio, **args) == "prefill B[0:6] C[0:7] A[0:5]"
    low_first = {**args, "schedule_low_priority_values_first": True}
    assert first_batch(*trio, **low_first) == "prefill A[0:5] B[0:6] C[0:7]"
    assert first_batch(*trio) == "prefill A[0:5] B[0:6] C[0:7]"


def test_priority_preempts_the_lowest_when_slots_are_short() -> None:
    lines = play(
        ask("A", 5, 9, priority=2),
        ask("B", 6, 9, priority=1),
        ask("C", 7, 2, priority=20, arrival_step=3),
        max_running_requests=2,
        enable_priority_scheduling=True,
    )
    assert lines[3]["retracted"] == ["B"]
    assert told(lines)[3:5] == ["prefill C[0:7]", "decode A[7] C[7]"]
    # B comes back with its outputs as part of its prompt, and what the tree kept of it is a hit.
    resumed = next(line for line in lines[4:] if any(entry[0] == "B" for entry in line["scheduled"]))
    assert resumed["cached"] == [["B", 6]]
    assert resumed["scheduled"] == [["B", 6, 3]]


@pytest.mark.parametrize(("threshold", "preempted"), [(4, ["A"]), (5, [])])
def test_preemption_takes_a_difference_above_the_threshold(threshold: int, preempted: list[str]) -> None:
    lines = play(
        ask("A", 5, 9, priority=1),
        ask("B", 7, 2, priority=6, arrival_step=3),
        max_running_requests=1,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=threshold,
    )
    assert lines[3]["retracted"] == preempted


# -- retraction ----------------------------------------------------------------------------------------------


def test_retraction_takes_the_one_with_fewest_outputs_and_raises_the_ratio() -> None:
    lines = play(
        ask("A", 10, 50),
        ask("B", 12, 50, arrival_step=2),
        schedule_conservativeness=0.1,
        max_total_tokens=80,
    )
    at = next(i for i, line in enumerate(lines) if line["retracted"])
    line = lines[at]
    assert line["retracted"] == ["B"]
    assert line["waiting"] == ["B"]
    # A is fed its position 39 (its 30th output), so A held 39 tokens and B, one output behind, 40: one left.
    assert line["scheduled"] == [["A", 39, 1]]
    assert line["new_token_ratio"] == round((30 + 20) / (50 + 1), 6)
    # B's prompt stays in the tree; its outputs' KV is free at once.
    assert line["evictable"] == 12
    resumed = next(entry for later in lines[at + 1 :] for entry in later["cached"])
    assert resumed == ["B", 12]
    assert outcome(
        ask("A", 10, 50), ask("B", 12, 50, arrival_step=2), schedule_conservativeness=0.1, max_total_tokens=80
    ) == {"A": ["length", 50, 0], "B": ["length", 50, 1]}


def test_among_equal_outputs_the_longest_prompt_is_retracted_first() -> None:
    """The rest runs on in the order of preference: most outputs first, then the shortest prompt."""
    three = [ask("A", 20, 40), ask("B", 9, 40), ask("C", 14, 40)]
    lines = play(*three, schedule_conservativeness=0.01, max_total_tokens=145, max_prefill_tokens=9)
    at = next(i for i, line in enumerate(lines) if line["retracted"])
    assert told(lines)[:4] == [
        "prefill A[0:20]",
        "prefill B[0:9]",
        "prefill C[0:14]",
        "decode A[20] B[9] C[14]",
    ]
    assert lines[at - 1]["running"] == ["A", "B", "C"]
    assert (lines[at]["retracted"], lines[at]["running"]) == (["A"], ["B", "C"])
