"""Timing of the replica, worked out by hand on tiny schedules."""

from dataclasses import replace

import numpy as np
import pytest

from sim.build import build_scenario
from sim.engines.glue import Limits
from sim.errors import BadInput, EngineStuck
from sim.loop.run import run
from sim.loop.series import SeriesBuffer
from sim.request import Request
from sim.simulate import simulate
from sim.steptime.base import FrontEnd
from tests.engines_for_tests import FixedSteps, NeverFinishes, NeverSchedules, sglang, vllm


def request(name, prompt=4, output=3, arrival=0.0, key=None):
    return Request(str(name), ((key if key is not None else f"p{name}", prompt),), output, arrival)


def token_times(outcome, row=0):
    records = outcome.records
    itls = records.itls[records.itl_offsets[row] : records.itl_offsets[row + 1]]
    return [records.first_token[row], *(records.first_token[row] + np.cumsum(itls)).tolist()]


def test_synchronous_steps_follow_each_other():
    outcome = run(vllm(), [request(0)], FixedSteps())
    assert token_times(outcome) == pytest.approx([1.0, 2.0, 3.0])
    assert outcome.duration == pytest.approx(3.0)
    assert outcome.usage.steps == 3


def test_synchronous_host_work_is_paid_in_every_step():
    outcome = run(vllm(), [request(0)], FixedSteps(before=0.1, after=0.2))
    assert token_times(outcome) == pytest.approx([1.3, 2.6, 3.9])
    assert outcome.usage.device["host"] == pytest.approx(0.1 + 2 * 0.3)


def test_host_overhead_is_a_term_of_its_own():
    model = FixedSteps(step=8.8e-3, per_token=0.1e-3, before=0.5e-3, after=1.0e-3)
    requests = [request(i, prompt=2, output=20) for i in range(32)]
    outcome = run(vllm(max_num_seqs=32), requests, model)
    assert np.median(outcome.records.itls) == pytest.approx(13.5e-3)


def test_asynchronous_scheduling_hides_the_host():
    outcome = run(vllm(async_scheduling=True), [request(0)], FixedSteps(before=0.1, after=0.2))
    # Launched at 0.1 and 0.2; results at 1.1, 2.1, 3.1; each processed 0.2 later.
    assert token_times(outcome) == pytest.approx([1.3, 2.3, 3.3])


def test_host_work_longer_than_the_step_shows_even_when_asynchronous():
    outcome = run(vllm(async_scheduling=True), [request(0, output=6)], FixedSteps(before=0.8, after=0.7))
    assert np.diff(token_times(outcome))[2:] == pytest.approx([1.5, 1.5, 1.5])


def test_an_arrival_during_a_step_waits_one_step_more_when_asynchronous():
    requests = [request(0, output=9), request(1, arrival=2.5)]
    sync = run(vllm(), requests, FixedSteps())
    overlapped = run(vllm(async_scheduling=True), requests, FixedSteps())
    assert sync.records.first_token[1] == pytest.approx(4.0)
    assert overlapped.records.first_token[1] == pytest.approx(5.0)


def test_the_pipeline_drains_with_a_pause_where_a_slot_frees_late():
    requests = [request(0, output=1), request(1, output=1)]
    sync = run(vllm(max_num_seqs=1), requests, FixedSteps(), idle_poll=0.001)
    overlapped = run(vllm(max_num_seqs=1, async_scheduling=True), requests, FixedSteps(), idle_poll=0.001)
    assert sync.records.first_token.tolist() == pytest.approx([1.0, 2.0])
    assert overlapped.records.first_token.tolist() == pytest.approx([1.0, 2.001])


def test_overlapped_sglang_runs_a_finished_request_once_more():
    requests = [request(0, output=3)]
    plain = run(sglang(), requests, FixedSteps())
    overlap = run(sglang(disable_overlap_schedule=False), requests, FixedSteps())
    assert plain.usage.steps == 3
    assert overlap.usage.steps == 4
    assert token_times(plain) == pytest.approx(token_times(overlap))


def test_a_step_is_launched_behind_the_one_before_it():
    steps = []
    run(vllm(async_scheduling=True), [request(0)], FixedSteps(before=0.1), steps=steps.append)
    assert [s["start"] for s in steps] == pytest.approx([0.1, 1.1, 2.1])
    assert [s["duration"] for s in steps] == pytest.approx([1.0, 1.0, 1.0])
    assert steps[0]["scheduled"] == [["0", 0, 4]]


def test_requests_queue_for_the_serial_front_end():
    model = FixedSteps(front_end=FrontEnd(request=0.4, prompt_token=0.025))
    outcome = run(vllm(), [request(i, output=1) for i in range(3)], model)
    assert outcome.ttft_parts.front_end.tolist() == pytest.approx([0.5, 1.0, 1.5])
    # The second and third arrive while the first step runs and join the one after it.
    assert outcome.records.first_token.tolist() == pytest.approx([1.5, 2.5, 2.5])


def test_chunks_leave_one_after_the_other():
    model = FixedSteps(front_end=FrontEnd(output_delay=0.5, output_token=0.01))
    outcome = run(vllm(), [request(i, output=2) for i in range(3)], model)
    assert outcome.records.first_token.tolist() == pytest.approx([1.51, 1.52, 1.53])
    assert outcome.records.itls.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_slow_streamer_falls_behind():
    model = FixedSteps(front_end=FrontEnd(output_token=2.0))
    outcome = run(vllm(), [request(0, output=3)], model)
    assert token_times(outcome) == pytest.approx([3.0, 5.0, 7.0])


def test_streaming_intervals_bundle_tokens():
    even = run(vllm(), [request(0, output=7)], FixedSteps(), stream_interval=3)
    assert token_times(even) == pytest.approx([1.0, 4.0, 7.0])
    outcome = run(vllm(), [request(0, output=8)], FixedSteps(), stream_interval=3)
    assert token_times(outcome) == pytest.approx([1.0, 4.0, 7.0, 8.0])
    assert outcome.records.output_len.tolist() == [8]


def test_a_concurrency_cap_holds_requests_back_and_starts_their_clock_late():
    outcome = run(vllm(), [request(i) for i in range(3)], FixedSteps(), max_concurrency=1)
    records = outcome.records
    assert records.sent.tolist() == pytest.approx([0.0, 3.0, 6.0])
    assert records.scheduled.tolist() == [0.0, 0.0, 0.0]
    assert (records.first_token - records.sent).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert outcome.ttft_parts.client_wait.tolist() == pytest.approx([0.0, 3.0, 6.0])


def test_a_closed_loop_sends_nothing_after_its_duration():
    # Three seconds each, one after the other: the third could go out at 6 s.
    requests = [request(i) for i in range(5)]
    for duration, sent in ((5.0, [0.0, 3.0]), (6.0, [0.0, 3.0, 6.0]), (99.0, [0.0, 3.0, 6.0, 9.0, 12.0])):
        outcome = run(vllm(), requests, FixedSteps(), max_concurrency=1, duration=duration)
        assert outcome.records.sent.tolist() == pytest.approx(sent)
        assert outcome.records.request_id == tuple(map(str, range(len(sent))))
        assert set(outcome.records.status) == {"ok"}
        assert outcome.duration == pytest.approx(sent[-1] + 3.0)
        assert len(outcome.ttft_parts.queue) == len(sent)


def test_what_is_under_way_when_the_time_is_up_is_waited_for():
    requests = [request(0, output=2), request(1, output=6), request(2), request(3)]
    outcome = run(vllm(), requests, FixedSteps(), max_concurrency=2, duration=1.5)
    assert outcome.records.sent.tolist() == pytest.approx([0.0, 0.0])
    assert outcome.duration == pytest.approx(6.0)


def test_the_duration_counts_from_the_end_of_the_warm_up():
    warm = [request("warmup-0", output=9)]
    requests = [request(i) for i in range(3)]
    outcome = run(vllm(), requests, FixedSteps(), max_concurrency=1, duration=4.0, warmups=warm)
    assert outcome.records.sent.tolist() == pytest.approx([0.0, 3.0])


@pytest.mark.parametrize("leap", [True, False])
def test_a_duration_is_no_matter_of_how_a_load_is_simulated(leap):
    bench = "vllm bench serve --random-input-len 64 --random-output-len 32 --num-prompts 200"
    scenario = build_scenario(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct", bench=f"{bench} --max-concurrency 4", gpu="H100"
    )
    whole = simulate(scenario, leap=leap).result
    half = replace(scenario, workload=replace(scenario.workload, duration=whole.duration / 2))
    cut = simulate(half, leap=leap).result
    assert 90 < cut.aggregates["completed"] < 115
    assert float(cut.records.sent.max()) <= half.workload.duration
    sent = cut.records.sent.tolist()
    assert sent == pytest.approx(whole.records.sent.tolist()[: len(sent)])


def test_a_send_comes_before_the_engine_acts_at_the_same_instant():
    # Request 1 is due in the very moment that the first step ends, and joins the next one.
    outcome = run(vllm(), [request(0), request(1, arrival=1.0)], FixedSteps())
    assert outcome.records.first_token[1] == pytest.approx(2.0)


def test_an_answer_frees_its_place_before_the_next_scheduling_call():
    requests = [request(0, output=1), request(1, output=5), request(2, output=1)]
    outcome = run(vllm(), requests, FixedSteps(), max_concurrency=2)
    assert outcome.records.sent.tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert outcome.records.first_token[2] == pytest.approx(2.0)


def test_the_engine_sleeps_until_work_arrives():
    outcome = run(vllm(), [request(0, output=1), request(1, output=1, arrival=10.25)], FixedSteps())
    assert outcome.records.first_token.tolist() == pytest.approx([1.0, 11.25])
    assert sum(outcome.usage.device.values(), 0.0) == 0.0


def test_a_preempted_request_keeps_its_tokens_and_its_count():
    requests = [request(i, prompt=30, output=40) for i in range(3)]
    outcome = run(vllm(num_gpu_blocks=9), requests, FixedSteps())
    assert outcome.usage.preemptions == outcome.records.preemptions.sum() > 0
    assert outcome.records.output_len.tolist() == [40, 40, 40]
    assert np.all(outcome.records.itls >= 1.0 - 1e-9)


def test_what_requests_wait_for_is_told():
    slots = run(vllm(max_num_seqs=1), [request(0), request(1)], FixedSteps(), limits=Limits(1, 64))
    assert slots.usage.waiting == pytest.approx({"slots": 3.0})
    budget = run(vllm(), [request(0, prompt=96), request(1)], FixedSteps(), limits=Limits(8, 64))
    assert budget.usage.waiting == pytest.approx({"budget": 1.0})
    requests = [request(0, prompt=60, output=5), request(1, prompt=60, output=5)]
    pool = run(vllm(num_gpu_blocks=6), requests, FixedSteps(), limits=Limits(8, 64))
    assert pool.usage.waiting["kv"] == pytest.approx(5.0)


def test_prefix_hits_are_counted_in_tokens():
    requests = [request(0, prompt=48, key="same"), request(1, prompt=48, key="same", arrival=5.0)]
    outcome = run(vllm(), requests, FixedSteps())
    assert outcome.usage.prefix_queries == 96
    assert outcome.usage.prefix_hits == 32
    assert outcome.records.cached_tokens.tolist() == [0, 32]


def test_warm_ups_fill_the_cache_and_leave_no_records():
    warm = [request("w", prompt=48, key="same", output=1)]
    outcome = run(vllm(), [request(0, prompt=48, key="same")], FixedSteps(), warmups=warm)
    assert outcome.records.request_id == ("0",)
    assert outcome.records.sent.tolist() == pytest.approx([0.0])
    assert outcome.records.cached_tokens.tolist() == [32]
    assert outcome.usage.prefix_queries == 48
    assert token_times(outcome) == pytest.approx([1.0, 2.0, 3.0])
    assert outcome.duration == pytest.approx(3.0)


@pytest.mark.parametrize("idle_poll", [0.0, 0.001])
def test_an_engine_that_never_schedules_is_called_stuck(idle_poll):
    with pytest.raises(EngineStuck, match=r"request 0: can never be scheduled .*1 waiting"):
        run(NeverSchedules(), [request(0)], FixedSteps(), idle_poll=idle_poll)


def test_a_livelock_names_the_request():
    with pytest.raises(EngineStuck, match="request 0: computed and preempted over and over"):
        run(NeverFinishes(), [request(0)], FixedSteps())


def test_a_request_that_can_never_fit_is_refused_with_the_reason():
    with pytest.raises(BadInput, match="126 KV blocks of 100"):
        run(vllm(num_gpu_blocks=101), [request(0, prompt=2010, output=10)], FixedSteps())


def test_four_requests_in_a_pool_for_one_all_finish():
    requests = [request(i, prompt=700, output=200) for i in range(4)]
    outcome = run(vllm(num_gpu_blocks=101, max_num_batched_tokens=2048), requests, FixedSteps())
    assert outcome.records.status == ("ok",) * 4
    assert outcome.records.output_len.tolist() == [200] * 4
    assert 0 < outcome.usage.preemptions < 20


def test_an_empty_load_ends_at_once():
    outcome = run(vllm(), [], FixedSteps())
    assert len(outcome.records) == 0
    assert outcome.duration == 0.0


def test_series_are_thinned_but_keep_the_first_sample():
    buffer = SeriesBuffer(limit=16)
    state = vllm().queue_state()
    for moment in range(1000):
        buffer.add(float(moment), *state)
    times = buffer.since(0.0).time
    assert len(times) < 16
    assert times[0] == 0.0
    assert len(set(np.diff(times))) == 1
