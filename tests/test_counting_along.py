"""What is counted while scheduling and leaping must be what one would count afterwards."""

import random

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.base import ScheduledChunk, StepPlan
from sim.engines.crowd import Crowd
from sim.engines.vllm.request import EngineRequest
from sim.engines.vllm.scheduler import VllmScheduler
from sim.loop import tokens
from sim.loop.moments import Clock, at
from sim.loop.run import run
from sim.request import Request
from tests.engines_for_tests import VLLM, FixedSteps, vllm
from tests.leap_workloads import draw


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 60), st.integers(0, 30), st.integers(1, 90))
@settings(max_examples=200, deadline=None)
def test_a_crowd_counts_blocks_as_one_would_member_by_member(anchors, call, blocks, most):
    crowd: Crowd[int] = Crowd(16)
    for anchor in anchors:
        crowd.join(anchor)
    begun = [sum((anchor + c - 1) % 16 == 0 for anchor in anchors) for c in range(call, call + most)]
    for calls in range(1, most + 1):
        assert crowd.new_blocks(call, calls) == sum(begun[:calls])
    fits = next((n for n in range(most) if sum(begun[: n + 1]) > blocks), most)
    assert crowd.calls_within(blocks, call, most) == fits


def test_a_plan_lists_the_decodes_at_its_head_once_somebody_asks():
    requests = [Request(str(i), ((i, 20),), 9) for i in range(3)]
    table = vllm().block_pool.new_table("0", ())
    held = [EngineRequest(request, 0, 100, table) for request in requests]
    listed = StepPlan(0, "mixed", [ScheduledChunk(r, 20 + i, 1, True) for i, r in enumerate(requests[:2])])
    counted = StepPlan(0, "mixed")
    counted.decode_first(held[:2], [20, 21])
    assert counted.shape() == listed.shape()
    more = ScheduledChunk(requests[2], 0, 20, True)
    listed.add(more)
    counted.add(more)
    shape = counted.shape()
    assert shape == listed.shape()
    assert counted.behind_head() == [more]
    assert counted.scheduled == listed.scheduled
    assert counted.behind_head() == [more]
    assert counted.shape() == shape


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steady_decodes_are_scheduled_at_the_head_of_the_plan(asynchronous):
    scheduler = VllmScheduler(vllm(async_scheduling=asynchronous).config, shares_prefixes=False)
    for i in range(4):
        scheduler.add_request(Request(str(i), ((i, 10 + i),), 60))
    plans = []
    heads = []
    for _ in range(50):
        plans.append(scheduler.schedule())
        heads.append(plans[-1].head)
        if len(plans) == scheduler.pipeline_depth:
            scheduler.update(plans.pop(0))
    assert heads[1:] == [4] * 49
    assert VLLM.max_num_seqs == 8


def test_a_clock_skips_only_what_nobody_else_is_due_in():
    seen = []

    def process(env):
        assert env.skip(1.5)
        assert env.now == 1.5
        assert not env.skip(2.5)  # something else is due at that very moment
        yield env.timeout(2.5)
        seen.append(env.now)

    env = Clock()
    env.process(process(env))
    at(env, 4.0, lambda: seen.append("event"))
    assert isinstance(env, simpy.Environment)
    env.run()
    assert seen == ["event", 4.0]
    assert env.peek() == float("inf")


def test_emissions_expand_alike_in_pieces_of_any_number(monkeypatch):
    outcome = draw("vllm", 3).outcome(leap=True)
    table = outcome.records.emissions
    assert len(table.leap_piece) > 3
    whole = table._bases()
    monkeypatch.setattr(tokens, "LEAPS_AT_ONCE", 2)
    assert np.array_equal(table._bases(), whole)
    by_hand = []
    leaps = {
        p: (c, g, s)
        for p, c, g, s in zip(
            table.leap_piece, table.leap_count, table.leap_gap, table.leap_slope, strict=True
        )
    }
    for piece, base in enumerate(table.base):
        count, gap, slope = leaps.get(piece, (1, 0.0, 0.0))
        by_hand += [base + (gap * k + slope * (k * (k - 1) // 2)) for k in range(int(count))]
    assert whole.tolist() == by_hand


def test_samples_are_thinned_alike_step_by_step_and_in_leaps():
    requests = [Request(str(i), ((i, 20),), random.Random(i).randint(900, 3000)) for i in range(4)]
    plain, leapt = (run(vllm(), requests, FixedSteps(), leap=leap) for leap in (False, True))
    assert (plain.path, leapt.path) == ("steps", "leaps")
    assert len(plain.series.time) == len(leapt.series.time) > 100
    for name in ("time", "running", "waiting", "kv_usage"):
        assert getattr(leapt.series, name) == pytest.approx(getattr(plain.series, name), rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_latencies_read_off_the_emissions_are_those_of_the_requests(seed):
    records = draw("vllm", seed).outcome(leap=True).records
    shared = records.emissions.spans(len(records))
    if shared is None:
        assert records.emissions.cost or records.emissions.interval > 1 or records.preemptions.any()
        return
    gaps, spans = shared
    assert np.array_equal(np.concatenate([gaps[a:b] for a, b in spans]), records.itls)
