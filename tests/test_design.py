"""The plan of a calibration: what it measures, what it leaves out, what it says it will not know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.candidates import Room, capacity, isolated, mixed
from calibration.design import Plan, design, mixed_again, plan_text
from calibration.fit import default_free
from calibration.information import forecast, shares
from calibration.parameters import Space, default_prior, space_of
from sim.build import build_scenario
from sim.command_text import load_line
from sim.commands.bench import parse_bench_command
from sim.errors import BadInput
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

LOAD = "vllm bench serve --random-input-len 512 --random-output-len 64 --request-rate 4 --num-prompts 200"


def scenario_of(
    flags: str = "--max-model-len 8192 --max-num-seqs 64", gpu: str = "H100", load: str = LOAD
) -> Scenario:
    return build_scenario(serve=f"vllm serve Qwen/Qwen2.5-7B-Instruct {flags}", bench=load, gpu=gpu)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return scenario_of()


@pytest.fixture(scope="module")
def plan(scenario: Scenario) -> Plan:
    return design(scenario)


def space_for(scenario: Scenario) -> Space:
    return space_of(default_prior(scenario.gpu), default_free(scenario))


def labels(plan: Plan) -> list[str]:
    return [run.label for run in plan.runs]


def test_a_fresh_profile_gets_every_kind_of_run_within_five_minutes(plan: Plan) -> None:
    assert plan.seconds <= plan.budget == 300.0
    found = labels(plan)
    assert "idle-short" in found
    assert any(label.startswith("decode-") for label in found)
    assert "kv-full" in found
    assert found[-2:] == ["mixed-45", "mixed-70"]
    assert [run.label for run in plan.runs if run.held_out] == ["mixed-45"]
    pinned = {name for name, share in plan.expected.items() if share < 0.5}
    # What a request costs before the engine and after it is known as a sum: lone requests alone show it.
    assert {"gemm_flops", "kv_bandwidth"} <= pinned


def test_every_run_has_prompts_of_its_own(plan: Plan, scenario: Scenario) -> None:
    seeds = [run.spec.seed for run in plan.runs]
    assert len(set(seeds)) == len(seeds)
    assert scenario.seed not in seeds


def test_mixed_loads_are_shares_of_the_simulated_capacity(plan: Plan, scenario: Scenario) -> None:
    assert plan.capacity == pytest.approx(capacity(scenario, roofline(scenario)))
    rates = {run.label: run.spec.request_rate for run in plan.runs}
    assert plan.capacity is not None
    assert rates["mixed-45"] == pytest.approx(0.45 * plan.capacity, rel=0.01)
    assert rates["mixed-70"] == pytest.approx(0.70 * plan.capacity, rel=0.01)


def test_what_a_profile_pins_already_is_not_measured_again(plan: Plan, scenario: Scenario) -> None:
    only_kv = design(scenario, lacking=["kv_bandwidth"])
    isolated_before = [label for label in labels(plan) if not label.startswith("mixed-")]
    isolated_now = [label for label in labels(only_kv) if not label.startswith("mixed-")]
    assert 0 < len(isolated_now) < len(isolated_before)
    assert only_kv.expected["kv_bandwidth"] < 0.5
    nothing = design(scenario, lacking=[])
    assert labels(nothing) == ["mixed-45", "mixed-70"]
    assert plan.open
    assert nothing.open == ()


def test_a_short_budget_keeps_what_tells_most(scenario: Scenario) -> None:
    short = design(scenario, budget=12.0)
    assert 0 < short.seconds <= 12.0
    assert any(note.subject.startswith("mixed-") or note.subject == "kv-full" for note in short.notes)


@pytest.mark.parametrize("budget", [0.0, -5.0, float("inf"), float("nan")])
def test_budgets_that_are_none(scenario: Scenario, budget: float) -> None:
    with pytest.raises(BadInput, match="--budget"):
        design(scenario, budget=budget)


def test_a_coefficient_that_no_run_shows_is_refused(scenario: Scenario) -> None:
    with pytest.raises(BadInput, match="allreduce_latency"):
        design(scenario, lacking=["allreduce_latency"])


@pytest.mark.parametrize(
    "flags",
    [
        "--max-model-len 8192 --max-num-seqs 64",
        "--max-model-len 600 --max-num-seqs 2",
        "--max-model-len 32768 --max-num-batched-tokens 2048",
        "--max-model-len 2048 --num-gpu-blocks-override 160 --block-size 16",
    ],
)
def test_candidates_fit_into_the_engine(flags: str) -> None:
    scenario = scenario_of(flags)
    room = Room.of(scenario)
    found = list(isolated(scenario))
    assert len({candidate.label for candidate in found}) == len(found)
    for candidate in found:
        dataset = candidate.spec.dataset
        assert isinstance(dataset, RandomDataset)
        longest = np.ceil(dataset.input_len * (1 + dataset.range_ratio)) + dataset.output_len
        assert longest <= room.length
        assert (candidate.spec.max_concurrency or 0) <= room.seqs
        assert (candidate.spec.max_concurrency or 0) * longest <= room.kv_tokens


def test_prompt_lengths_lie_on_both_sides_of_tile_edges(plan: Plan) -> None:
    from sim.workload.generate import generate

    lengths = [r.prompt_len for run in plan.runs if run.label.startswith("idle-") for r in generate(run.spec)]
    phases = {length % 256 // 64 for length in lengths}
    assert phases == {0, 1, 2, 3}


def test_information_adds_up_and_only_narrows(scenario: Scenario) -> None:
    from dataclasses import replace

    space = space_for(scenario)
    runs = [c for c in isolated(scenario) if c.label in ("idle-short", "decode-4")]
    told = [
        forecast(replace(scenario, workload=c.spec), space, space.prior.efficiencies).matrix for c in runs
    ]
    alone = [shares(space, matrix) for matrix in told]
    both = shares(space, told[0] + told[1])
    assert (both <= np.minimum(*alone) + 1e-9).all()
    assert (shares(space, np.zeros_like(told[0])) == 1.0).all()
    # Decodes alone say nothing of prefill attention; idle prompts say nothing of a full batch's price.
    at = space.names.index("attention_flops")
    assert alone[1][at] > 0.9


def test_a_thousand_requests_do_not_average_a_run_s_own_noise_away(scenario: Scenario) -> None:
    from dataclasses import replace

    space = space_for(scenario)
    (few,) = [c for c in isolated(scenario) if c.label == "decode-4"]
    shared = []
    for count in (40, 400):
        spec = replace(few.spec, num_prompts=count)
        matrix = forecast(replace(scenario, workload=spec), space, space.prior.efficiencies).matrix
        shared.append(shares(space, matrix))
    before, after = (values[space.names.index("weight_bandwidth")] for values in shared)
    independent = (1.0 + 10.0 * (before**-2 - 1.0)) ** -0.5
    assert independent * 1.2 < after < before


def test_the_plan_says_commands_that_the_bench_reads_back(plan: Plan) -> None:
    text = plan_text(plan, "servecast bench s.yaml")
    for run in plan.runs:
        assert run.label in text
        back = parse_bench_command(load_line(run.spec)).spec
        assert back.num_prompts == run.spec.num_prompts
        assert back.request_rate == pytest.approx(run.spec.request_rate)
        assert back.max_concurrency == run.spec.max_concurrency
        assert back.seed == run.spec.seed
        one, other = back.dataset, run.spec.dataset
        assert isinstance(one, RandomDataset)
        assert isinstance(other, RandomDataset)
        assert (one.input_len, one.output_len, one.range_ratio) == (
            other.input_len,
            other.output_len,
            other.range_ratio,
        )
    assert "5.0 GPU minutes" in text


@pytest.mark.parametrize(
    "spec",
    [
        WorkloadSpec(dataset=RandomDataset(100, 10, 0.2, prefix_len=64), request_rate=2.5, num_prompts=30),
        WorkloadSpec(dataset=PrefixRepetitionDataset(64, 32, 4, 8), num_prompts=40, max_concurrency=4),
        WorkloadSpec(dataset=FileDataset("lengths", "a b.jsonl"), num_prompts=40, num_warmups=2, seed=7),
    ],
)
def test_other_loads_come_back_from_their_command(spec: WorkloadSpec) -> None:
    back = parse_bench_command(load_line(spec)).spec
    for name in ("num_prompts", "request_rate", "max_concurrency", "seed", "num_warmups"):
        assert getattr(back, name) == getattr(spec, name)
    assert type(back.dataset) is type(spec.dataset)


def test_mixed_loads_follow_what_the_first_runs_showed(plan: Plan, scenario: Scenario) -> None:
    from dataclasses import replace

    prior = default_prior(scenario.gpu).efficiencies
    slow = replace(prior, gemm_flops=prior.gemm_flops / 2, weight_bandwidth=prior.weight_bandwidth / 2)
    again, _ = mixed_again(plan, scenario, slow, 135.0)
    before = {run.label: run.spec.request_rate for run in plan.runs}
    assert [run.label for run in again] == ["mixed-45", "mixed-70"]
    assert all(run.spec.request_rate < 0.75 * before[run.label] for run in again)
    assert not {run.spec.seed for run in again} & {run.spec.seed for run in plan.runs}


@given(share=st.floats(0.2, 0.8), seconds=st.floats(1.0, 200.0), rate=st.floats(0.1, 50.0))
@settings(max_examples=25, deadline=None)
def test_a_mixed_load_lasts_about_as_long_as_asked(share: float, seconds: float, rate: float) -> None:
    found = mixed(scenario_of(), rate, share, seconds)
    if found is None:
        assert seconds * share * rate < 13
    else:
        assert 12 <= found.spec.num_prompts <= 200
        assert found.spec.num_prompts / found.spec.request_rate <= seconds * 1.01
