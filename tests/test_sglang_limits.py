"""Where SGLang dies, hangs or refuses, and what its scheduler promises to a replica."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.engines.sglang.config import SglangSchedulerConfig
from sim.engines.sglang.engine import refuse_hopeless
from sim.engines.sglang.scheduler import SglangScheduler
from sim.errors import BadInput, EngineStuck
from sim.request import Request
from tests.sglang_by_hand import ARGS, ask, outcome, play


def test_a_refusal_with_nothing_running_hangs() -> None:
    """Clipped to all that the pool holds, A still lacks the one token that playing it through must leave."""
    args = {"disable_radix_cache": True, "max_total_tokens": 200}
    with pytest.raises(
        EngineStuck, match=r"hangs: nothing runs, yet request A .* batch_is_full .* raise --max"
    ):
        play(ask("A", 150, 100), **args)
    assert outcome(ask("A", 150, 47), **args)["A"] == ["length", 47, 0]


@settings(max_examples=100, deadline=None)
@example(225, 1, 16, False)
@given(st.integers(1, 250), st.integers(1, 150), st.sampled_from([1, 4, 16]), st.booleans())
def test_what_can_never_be_admitted_is_refused_before_anything_runs(
    prompt_len: int, max_tokens: int, page: int, ends: bool
) -> None:
    args = {"disable_radix_cache": True, "max_total_tokens": 256, "page_size": page}
    stop = {"stop_after": 1} if ends else {}
    asked = ask("A", prompt_len, max_tokens, **stop)
    config = SglangSchedulerConfig(**{**ARGS, **args})
    request = Request("A", ((1, prompt_len),), max_tokens, stop_after=1 if ends else None)
    hopeless = False
    with suppress(EngineStuck):
        hopeless = True
        refuse_hopeless(config, [request])
        hopeless = False
    if hopeless:
        with pytest.raises(EngineStuck, match=r"hangs: nothing runs, yet request A"):
            play(asked, **args)
        return
    if not ends and prompt_len < 256 - 6:
        assert outcome(asked, **args)["A"][0] == "length"


def test_a_chunk_below_a_page_hangs() -> None:
    with pytest.raises(EngineStuck, match=r"request A .* less than a page; raise --chunked-prefill-size"):
        play(ask("A", 40, 5), page_size=16, chunked_prefill_size=8)


OUT_OF_MEMORY = {
    "chunked_prefill_size": 4,
    "schedule_conservativeness": 0.05,
    "max_total_tokens": 100,
}


def test_a_mixed_batch_out_of_memory_dies() -> None:
    three = [ask("A", 10, 60), ask("B", 8, 50, arrival_step=1), ask("C", 50, 1, arrival_step=8)]
    with pytest.raises(
        EngineStuck, match=r"dies with 'Out of memory' in the decode .*drop --enable-mixed-chunk"
    ):
        play(*three, **{**OUT_OF_MEMORY, "enable_mixed_chunk": True})


def test_a_last_request_that_does_not_fit_is_aborted() -> None:
    """B's carried chunks hold the pool while A, alone in the running list, decodes in between."""
    two = [ask("A", 10, 60), ask("B", 60, 1, arrival_step=4)]
    with pytest.raises(EngineStuck, match=r"aborts request A: nothing else is left to retract"):
        play(*two, **OUT_OF_MEMORY, prefill_decode_interval=3)


def test_a_preempted_request_can_get_lost() -> None:
    """What B needs is judged before its prompt is looked at, so A makes way for nothing."""
    three = [
        ask("A", 10, 60, priority=1),
        ask("C", 10, 60, priority=3),
        ask("B", 85, 20, priority=9, arrival_step=5),
    ]
    with pytest.raises(EngineStuck, match=r"loses request A: it was preempted for request B"):
        play(
            *three,
            max_running_requests=2,
            enable_priority_scheduling=True,
            priority_scheduling_preemption_threshold=5,
            max_total_tokens=110,
            schedule_conservativeness=0.1,
        )


@pytest.mark.parametrize(
    ("prompt", "outputs", "says"), [(194, 2, "takes less than 194"), (100, 301, "--context-length 400")]
)
def test_what_the_server_would_refuse_is_refused(prompt: int, outputs: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        play(ask("A", prompt, outputs))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_running_requests", 0, "--max-running-requests: 0: must be at least 1"),
        ("page_size", 0, "--page-size: 0"),
        ("max_total_tokens", 1, "--max-total-tokens: 1: must be at least two pages"),
        ("schedule_policy", "hrrn", "--schedule-policy: 'hrrn': is not modelled"),
        ("prefill_decode_interval", -1, "--prefill-decode-interval: -1"),
        ("prefill_max_requests", 0, "--prefill-max-requests: 0"),
        ("priority_scheduling_preemption_threshold", -1, "--priority-scheduling-preemption-threshold: -1"),
        ("schedule_conservativeness", -0.1, "--schedule-conservativeness: -0.1"),
    ],
)
def test_an_impossible_configuration_is_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        SglangSchedulerConfig(**{**ARGS, field: value})
    assert str(caught.value).startswith(says)


def test_plans_come_back_in_order_and_idle_ones_need_not() -> None:
    scheduler = SglangScheduler(SglangSchedulerConfig(**{**ARGS, "disable_overlap_schedule": False}))
    assert (scheduler.pipeline_depth, scheduler.has_work()) == (2, False)
    scheduler.add_request(Request("A", ((1, 5),), 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="plan 1 handed back while 0 is due"):
        scheduler.update(second)
    scheduler = SglangScheduler(SglangSchedulerConfig(**ARGS))
    scheduler.add_request(Request("A", ((1, 5),), 2))
    first = scheduler.schedule()
    assert scheduler.update(first).new_tokens == [("A", 1)]
    assert scheduler.update(scheduler.schedule()).finished == [("A", "length")]
    idle = scheduler.schedule()
    assert (idle.kind, scheduler.has_work()) == ("idle", False)
    assert scheduler.update(idle).new_tokens == []


def test_chunks_that_end_a_sequence_sample_and_others_do_not() -> None:
    scheduler = SglangScheduler(SglangSchedulerConfig(**{**ARGS, "chunked_prefill_size": 8}))
    scheduler.add_request(Request("A", ((1, 12),), 2))
    samples = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        samples += [chunk.samples for chunk in plan.scheduled]
        scheduler.update(plan)
    assert samples == [False, True, True]


def test_queue_state_counts_slots_and_used_kv() -> None:
    scheduler = SglangScheduler(SglangSchedulerConfig(**{**ARGS, "max_running_requests": 1}))
    for name in "AB":
        scheduler.add_request(Request(name, ((name, 30),), 3))
    plan = scheduler.schedule()
    state = scheduler.queue_state()
    assert (state.num_running, state.num_waiting) == (1, 1)
    assert (state.kv_used_tokens, state.kv_total_tokens) == (30, 200)
    assert scheduler.waiting_ids() == ["B"]
    scheduler.update(plan)
    scheduler.update(scheduler.schedule())
    scheduler.update(scheduler.schedule())
    state = scheduler.queue_state()
    assert (state.num_running, state.num_waiting, state.kv_used_tokens) == (0, 1, 0)  # cached KV is not used
