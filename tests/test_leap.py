"""Leaping is an optimisation: the plain schedulers, step by step, must leave the same records."""

import gzip
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import build_scenario
from sim.engines.base import Leaping
from sim.engines.replay import arrivals
from sim.engines.sglang import parity as sglang_parity
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.vllm import parity as vllm_parity
from sim.engines.vllm.scheduler import VllmScheduler
from sim.figures.metrics import summarise
from sim.loop.leap import LeapingReplica, Stretch
from sim.loop.pricing import DecodePrices
from sim.loop.run import run
from sim.request import Request, can_share_prefixes
from sim.results import RequestRecords
from sim.simulate import roofline, simulate
from sim.steptime.base import FrontEnd
from sim.steptime.gate import decodes_of
from tests.engines_for_tests import FixedSteps, sglang, vllm
from tests.leap_workloads import BentSteps, Case, differences, draw

PARITY = Path(__file__).parent / "data" / "parity"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("group", range(6))
def test_random_workloads_leave_the_same_records(engine, group):
    for seed in range(10 * group, 10 * group + 10):
        case = draw(engine, seed)
        assert not differences(case.outcome(leap=False), case.outcome(leap=True)), seed


def parity_cases(name):
    with gzip.open(PARITY / f"{name}.scenarios.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            scenario = json.loads(line)
            yield scenario, [replace(r, arrival=0.01 * step) for step, r in arrivals(scenario)]


@pytest.mark.parametrize("name", ["vllm", "sglang", "sglang.policies"])
def test_recorded_scenarios_leave_the_same_records(name):
    leapt = 0
    for scenario, requests in parity_cases(name):
        if name == "vllm":
            config = vllm_parity._config(scenario, scenario["engine_version"])
            shares = can_share_prefixes(requests)
            case = Case(lambda c=config, s=shares: VllmScheduler(c, shares_prefixes=s), requests, MODEL, {})
        else:
            config = sglang_parity._config(scenario, scenario["engine_version"])
            case = Case(lambda c=config: SglangScheduler(c), requests, MODEL, {})
        leapt += case.scheduler().leaping(requests) is not None
        assert not differences(case.outcome(leap=False), case.outcome(leap=True)), scenario["id"]
    assert leapt >= 5


MODEL = BentSteps(
    step=8e-3, before=1e-3, after=1e-3, seq=3e-4, bend=90.0, front_end=FrontEnd(output_token=1e-4)
)


def count_leaps(monkeypatch):
    steps = []
    leap = LeapingReplica._leap

    def counting(self, *arguments):
        before = self.usage.steps
        landed = leap(self, *arguments)
        steps.append(self.usage.steps - before)
        return landed

    monkeypatch.setattr(LeapingReplica, "_leap", counting)
    return steps


@pytest.mark.parametrize(
    "scheduler",
    [
        vllm(),
        vllm(async_scheduling=True),
        sglang(),
        sglang(disable_overlap_schedule=False),
        sglang(disable_radix_cache=True),
    ],
)
@pytest.mark.parametrize("host", [0.0, 2.0])
def test_a_lone_request_decodes_in_few_leaps(monkeypatch, scheduler, host):
    steps = count_leaps(monkeypatch)
    request = Request("0", (("p", 20),), 500)
    outcome = run(scheduler, [request], FixedSteps(before=host))
    assert len([n for n in steps if n]) <= 3
    assert sum(steps) >= 490
    assert outcome.records.output_len.tolist() == [500]


def test_an_arrival_cuts_a_leap_at_the_step_after_it(monkeypatch):
    steps = count_leaps(monkeypatch)
    requests = [Request("0", (("p", 8),), 100), Request("1", (("q", 8),), 1, arrival=50.5)]
    outcome = run(vllm(), requests, FixedSteps())
    assert outcome.records.first_token[1] == pytest.approx(52.0)
    assert len([n for n in steps if n]) == 2


def test_where_the_crowd_cannot_stand_for_the_requests_nothing_leaps():
    plain = [Request("0", (("p", 8),), 9)]
    quoting = [*plain, Request("1", (("p", 8), ("out:0", 4)), 9)]
    assert isinstance(vllm().leaping(plain), Leaping)
    assert isinstance(sglang().leaping(plain), Leaping)
    assert vllm().leaping(quoting) is None
    assert isinstance(sglang().leaping(quoting), Leaping)
    assert vllm(scheduling_policy="priority").leaping(plain) is None
    assert vllm(long_prefill_token_threshold=32).leaping(plain) is None
    assert vllm(max_num_scheduled_tokens=4).leaping(plain) is None
    assert sglang(enable_mixed_chunk=True).leaping(plain) is None
    assert sglang(enable_mixed_chunk=True, chunked_prefill_size=-1).leaping(plain) is not None
    assert sglang(enable_priority_scheduling=True).leaping(plain) is None


def test_steps_are_told_one_by_one_although_leaps_are_allowed():
    requests = [Request(str(i), ((f"p{i}", 20),), 30, 3.0 * i) for i in range(3)]
    steps = []
    outcome = run(vllm(), requests, FixedSteps(), steps=steps.append)
    assert len(steps) == outcome.usage.steps
    assert not differences(outcome, run(vllm(), requests, FixedSteps()))


@pytest.mark.parametrize("serve", ["vllm serve {}", "python -m sglang.launch_server --model-path {}"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "openai/gpt-oss-20b", "Qwen/Qwen3-0.6B"])
def test_whole_predictions_are_the_same(serve, model):
    bench = (
        "vllm bench serve --dataset-name random --random-input-len 300 --random-output-len 120 "
        "--random-range-ratio 0.5 --num-prompts 60 --request-rate 30"
    )
    scenario = build_scenario(serve=serve.format(model), bench=bench, gpu="H100")
    plain, leapt = simulate(scenario, leap=False).result, simulate(scenario).result
    assert plain.extra["steps"] == leapt.extra["steps"]
    for key, value in plain.aggregates.items():
        assert leapt.aggregates[key] == (None if value is None else pytest.approx(value, rel=1e-9)), key


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_figures_from_runs_of_latencies_are_those_of_the_latencies(engine):
    for seed in range(20):
        outcome = draw(engine, seed).outcome(leap=True)
        records = outcome.records
        expanded = RequestRecords(**{f.name: getattr(records, f.name) for f in fields(RequestRecords)})
        compact = summarise(records, None, outcome.duration)
        for key, value in summarise(expanded, None, outcome.duration).items():
            assert compact[key] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)), key
        if records.itl_runs is not None:
            assert np.sort(records.itl_runs.expand()) == pytest.approx(np.sort(records.itls), abs=1e-9)


@given(
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.5),
    st.integers(1, 200),
    st.floats(0.0, 150.0),
)
@settings(max_examples=200, deadline=None)
def test_a_stretch_counts_the_calls_before_an_event(period, growth, most, moment):
    for first in (0.7, 0.6, 0.7 + period / 2):
        stretch = Stretch(0.0, first, 0.7, period, growth)
        calls = stretch.calls_before(moment + 1e-9, most)
        made = sum(stretch.call(i) < moment + 1e-9 for i in range(most))
        assert calls == max(1, made)


def test_prices_on_a_line_are_the_model_s_own():
    model = roofline(
        build_scenario(serve="vllm serve openai/gpt-oss-20b", bench="vllm bench serve", gpu="H100")
    )
    assert model.cost.sliding_window
    bent = BentSteps(bend=20_000.0, range_end=50_000.0)
    for priced in (model, bent):
        prices = DecodePrices(priced)
        for context in [*range(64, 4000, 97), *range(4000, 300_000, 1013)]:
            shape = decodes_of(8, 1)._replace(decode_context=context)
            seconds, resource, reason, before, after = prices.price(shape)
            expected, bound = priced.assess(shape)
            assert seconds == pytest.approx(expected, rel=1e-11)
            assert (resource, reason) == (bound, priced.out_of_range(shape))
            assert (before, after) == (priced.host_before(shape), priced.host_after(shape))


def test_a_model_that_never_is_affine_is_asked_for_every_step():
    class Curved(FixedSteps):
        def gpu(self, shape):
            return 1.0 + math.sqrt(shape.decode_context) if shape.num_tokens else 0.0

    requests = [Request("0", (("p", 8),), 40), Request("1", (("q", 30),), 40, 3.0)]
    assert not differences(
        run(vllm(async_scheduling=True), requests, Curved(), leap=False),
        run(vllm(async_scheduling=True), requests, Curved()),
    )
