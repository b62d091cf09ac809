"""Planned capacity: equal to formulas where there are some, monotone where it must be, honest elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import read_source
from sim.errors import BadInput
from sim.figures.regime import comparability
from sim.planning.admission import admission
from sim.planning.bracket import Reading, find_crossing
from sim.planning.capacity import capacity, flips
from sim.planning.hardware import Candidate, operating_points
from sim.planning.load_curve import Effort
from sim.planning.margin import ModelError, ScaledStepTime, model_error
from sim.planning.plan import Plan, Question
from sim.planning.plan_report import confirming_load, confirming_words, render_plan
from sim.planning.plan_text import render_candidates
from sim.planning.prices import Prices
from sim.planning.probe import Level, at_level
from sim.planning.report_html import plan_page
from sim.planning.resources import utilisation
from sim.planning.sizing import size, unsized_words
from sim.planning.slo import parse_slos
from sim.workload.spec import FileDataset
from tests.engines_for_tests import FixedSteps

SERVE = (
    "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 2048 --max-num-seqs {slots} "
    "--no-async-scheduling --no-enable-prefix-caching"
)
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 100 --random-output-len {output} "
    "--request-rate 1 --num-prompts 100"
)
NONE = ModelError(0.0, "exact")


def scenario(slots=1, output=1, **more):
    return read_source(
        serve=SERVE.format(slots=slots), bench=BENCH.format(output=output), gpu="L4", **more
    ).build()


def planned(what, objectives, model, effort, goodput=None, **more):
    slos = parse_slos(objectives, goodput)
    return capacity(what, slos, step_time=model, effort=effort, error=NONE, with_error=False, **more)


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_md1_capacity_equals_the_formula(rho):
    # Pollaczek and Khinchine: mean time in system s + rho s / (2 (1 - rho)); one step serves one request.
    step = 0.1
    limit = step + rho * step / (2 * (1 - rho))
    found = planned(scenario(), [f"mean ttft <= {limit}s"], FixedSteps(step), Effort(800, 5))
    assert found.low <= rho / step <= found.high
    assert found.high - found.low < 0.3 * rho / step
    assert found.binding == "mean TTFT"


def erlang_c(servers, load):
    top = load**servers / math.factorial(servers) * servers / (servers - load)
    return top / (sum(load**k / math.factorial(k) for k in range(servers)) + top)


def test_mmc_capacity_equals_the_formula(tmp_path):
    # c slots, each request holds one for a geometric number of steps: M/M/c in steps of 2 % of the mean.
    servers, rho, mean_steps, step = 4, 0.75, 50, 0.02
    rng = np.random.default_rng(5)
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        "".join(f'{{"input_len": 4, "output_len": {n}}}\n' for n in rng.geometric(1 / mean_steps, 6000)),
        encoding="utf-8",
    )
    what = scenario(slots=servers)
    load = replace(
        what.workload, dataset=FileDataset("lengths", str(path)), use_trace_arrivals=False, ignore_eos=True
    )
    what = replace(what, workload=load)
    service = mean_steps * step
    rate = rho * servers / service
    wait = erlang_c(servers, rho * servers) / (servers / service - rate)
    # A first token waits for its slot, for half of the step in progress, and for its own step.
    found = planned(what, [f"mean ttft <= {wait + 1.5 * step}s"], FixedSteps(step), Effort(600, 6))
    assert found.low <= rate <= found.high
    assert found.high - found.low < 0.3 * rate
    assert found.cause.cause == "slots"


def test_goodput_capacity_of_a_queue_whose_waits_are_known():
    # D/D/1: with constant gaps nobody waits below capacity, everybody above it.
    what = scenario()
    what = replace(what, workload=replace(what.workload, burstiness=math.inf))
    found = planned(what, ["ttft <= 150ms"], FixedSteps(0.1), Effort(300, 2), goodput="99%")
    assert found.level.value == pytest.approx(10.0, rel=0.05)


def test_objectives_that_no_load_can_meet_show_the_best_and_what_blocks():
    found = planned(
        scenario(output=10), ["p99 tpot <= 50ms", "p99 ttft <= 1s"], FixedSteps(0.1), Effort(200, 2)
    )
    assert found.level is None
    assert found.binding == "P99 TPOT"
    assert next(p for p in found.promises if p.what == "P99 TPOT").value == pytest.approx(0.1)
    assert "one token per 100 ms" in found.cause.text
    assert size(found, 5.0) is None


def test_loose_objectives_leave_the_load_itself_as_the_limit():
    found = planned(scenario(), ["mean ttft <= 1000s"], FixedSteps(0.1), Effort(600, 3))
    assert found.binding == "stability"
    assert found.level.value == pytest.approx(10.0, rel=0.1)


def test_concurrency_under_an_objective():
    # n requests in flight, one slot, steps of 0.1 s: each waits for the n - 1 before it.
    found = planned(scenario(), ["mean ttft <= 850ms"], FixedSteps(0.1), Effort(200, 2), kind="concurrency")
    assert found.level == Level("concurrency", 8.0)


def test_same_question_same_answer_and_seeds_agree():
    objectives = parse_slos(["mean ttft <= 200ms"])
    answers = []
    for seed in (0, 0, 100):
        what = replace(scenario(), seed=seed)
        answers.append(
            capacity(what, objectives, step_time=FixedSteps(0.1), effort=Effort(300, 4), error=NONE)
        )
    assert answers[0] == answers[1]
    assert answers[2] != answers[0]
    assert answers[2].low <= answers[0].high
    assert answers[0].low <= answers[2].high


def test_model_error_moves_the_answer_by_as_much():
    found = capacity(
        scenario(),
        parse_slos(["mean ttft <= 200ms"]),
        step_time=FixedSteps(0.1),
        effort=Effort(400, 2),
        error=ModelError(0.1, "a guess"),
    )

    # With steps 10 % longer the same limit leaves less room: (l, s) -> rho / s with rho from l / s.
    def formula(step):
        x = (0.2 - step) / step
        return 2 * x / (1 + 2 * x) / step

    value = found.level.value
    assert found.model_low / value == pytest.approx(formula(0.11) / formula(0.1), rel=0.05)
    assert found.model_high / value == pytest.approx(formula(0.09) / formula(0.1), rel=0.05)
    assert flips(found, value * 0.95)
    assert not flips(found, value * 0.3)


# Monotone where it must be.


def kv_capacity(tokens, limit, bandwidth=1.0):
    what = read_source(
        serve="vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 512 --max-num-seqs 64",
        bench="vllm bench serve --random-input-len 200 --random-output-len 60 --request-rate 1",
        gpu="L4",
        kv_cache_tokens=tokens,
    ).build()
    gpu = replace(what.gpu, memory_bandwidth=what.gpu.memory_bandwidth * bandwidth)
    slos = parse_slos([f"p90 ttft <= {limit}ms"])
    return capacity(replace(what, gpu=gpu), slos, effort=Effort(100, 1), error=NONE).level.value


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.integers(600, 3000), st.integers(150, 600), st.integers(0, 2))
def test_more_of_anything_never_lowers_the_answer(tokens, limit, which):
    more = [(2 * tokens, limit, 1.0), (tokens, 2 * limit, 1.0), (tokens, limit, 2.0)][which]
    # One seed of 100 requests resolves levels to 3 %.
    assert kv_capacity(*more) >= kv_capacity(tokens, limit) * 0.97


# The search itself, on curves that are known.


@given(st.floats(0.5, 200.0), st.floats(1.2, 6.0))
@settings(max_examples=40, deadline=None)
def test_crossing_of_a_power_curve(where, steepness):
    calls = []

    def read(value, n):
        calls.append(value)
        ratio = (value / where) ** steepness
        return Reading(ratio, (ratio,) * n if n > 1 else ())

    found = find_crossing(read, 1.0, 10.0, replications=3)
    assert found.value == pytest.approx(where, rel=0.01)
    assert found.low <= found.value <= found.high
    assert len(calls) < 40


def test_crossing_interval_covers_what_replications_say():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(40):
        places = rng.normal(10.0, 0.5, 5)

        def read(value, n, places=places):
            each = value / places[:n]
            out = tuple(float(np.mean(np.delete(each, j))) for j in range(n)) if n > 1 else ()
            return Reading(float(each.mean()), out)

        found = find_crossing(read, 2.0, 30.0, replications=5)
        inside += found.low <= 10.0 <= found.high
    assert inside >= 35


def test_noise_of_single_levels_does_not_blow_the_interval_up():
    """Two levels 3 % apart say little of the slope if each has noise of its own."""
    found = []
    for seed in range(200):
        own = np.random.default_rng(seed).normal(0.0, 0.15, 5)

        def read(value, n, seed=seed, own=own):
            each = (value / 7.0) ** 2 * np.exp(
                own + np.random.default_rng([seed, int(1000 * value)]).normal(0.0, 0.05, 5)
            )
            if n == 1:
                return Reading(float(each[0]))
            return Reading(float(each.mean()), tuple(float(np.delete(each, j).mean()) for j in range(5)))

        found.append(find_crossing(read, 1.0, 30.0))
    middle = float(np.mean([crossing.value for crossing in found]))
    assert sum(crossing.low <= middle <= crossing.high for crossing in found) >= 184
    assert max(crossing.high - crossing.value for crossing in found) < 0.3 * middle


def test_crossing_of_a_curve_that_jumps_keeps_its_bracket():
    found = find_crossing(lambda v, n: Reading(0.2, stable=v <= 7.0), 1.0, 20.0, replications=2)
    assert found.kept <= 7.0 <= found.missed
    assert found.low <= 7.0 <= found.high


def test_crossing_in_whole_numbers_and_beyond_the_ends():
    found = find_crossing(lambda v, n: Reading(v / 8.5), 1.0, 4.0, replications=1, whole=True)
    assert (found.value, found.missed) == (8.0, 9.0)
    assert find_crossing(lambda v, n: Reading(2.0), 1.0, 4.0, replications=1).value is None
    never = find_crossing(lambda v, n: Reading(0.5), 1.0, 4.0, replications=1)
    assert never.missed is None


# What the answer is made of.


def test_kv_admits_fewer_than_the_cap_says():
    # 100,000 tokens, requests of 3,000 + 600: 27 at full length, 30 half way; the others of 200 wait.
    found = admission(100_000, 3000, 600, block_size=16, concurrency=200)
    assert (found.at_full_length, found.on_average) == (27, 30)
    assert found.waiting == 170
    assert found.kv_bound
    assert not admission(100_000, 3000, 600, concurrency=20).kv_bound


def test_admission_of_an_oversubscribed_recommendation():
    found = admission(320_000, 8192, 1024, block_size=16, concurrency=384)
    assert (found.at_full_length, found.on_average, found.waiting) == (34, 36, 348)


def test_headroom_is_judged_by_the_fullest_resource_and_by_the_queue():
    use = utilisation({"prefill": 0.984, "decode": 0.133, "kv": 0.162}, waiting=37)
    assert use.binding == "prefill"
    assert not use.headroom
    assert not utilisation({"prefill": 0.2, "kv": 0.162}, waiting=37).headroom
    assert utilisation({"prefill": 0.2, "kv": 0.162}, waiting=0).headroom


def test_points_past_saturation_are_not_compared_by_latency():
    # 18 % more predicted than measured capacity.
    verdicts = [comparability(rate, 11.8, 10.0) for rate in (5.0, 9.5, 11.0, 14.0)]
    assert verdicts == ["comparable", "near saturation", "regime mismatch", "overloaded"]


def test_replicas_with_one_down():
    found = planned(scenario(), ["mean ttft <= 200ms"], FixedSteps(0.1), Effort(400, 3))
    sizing = size(found, 40.0, peak_factor=1.5)
    each = found.low
    assert sizing.at_mean == math.ceil(40 / each)
    assert sizing.at_peak == math.ceil(60 / each)
    assert sizing.recommended == sizing.at_peak + 1
    assert sizing.use_one_down == pytest.approx(60 / ((sizing.recommended - 1) * each))
    assert sizing.use_one_down <= 1.0
    for rate, factor in ((0.0, 1.0), (math.inf, 1.0), (1.0, 0.5)):
        with pytest.raises(BadInput):
            size(found, rate, factor)


def test_a_number_of_replicas_that_the_model_cannot_bound_is_marked():
    found = planned(scenario(), ["mean ttft <= 200ms"], FixedSteps(0.1), Effort(200, 2))
    known = size(found, 40.0)
    for sizing, cell in ((known, f" {known.recommended}  "), (replace(known, pessimistic=None), "?  ")):
        lines = render_candidates([Candidate("L4", "L4", 1, found, sizing=sizing)], sized=True)
        assert lines[0].index("replicas  ") + len("replicas") == len(lines[1])
        assert lines[1].strip() == "(peak, one down)"
        assert cell in lines[2]
        assert ("at most unknown" in "\n".join(lines)) == (cell == "?  ")


def test_an_interval_that_begins_at_nothing_gives_no_number_of_replicas():
    found = planned(scenario(), ["mean ttft <= 200ms"], FixedSteps(0.1), Effort(200, 2))
    unsure = replace(found, low=0.0)
    assert size(unsure, 40.0) is None
    assert "no number" in unsized_words(unsure)
    assert not unsized_words(found)
    unsized = [Candidate("L4", "L4", 1, unsure)]
    assert operating_points(unsized, Prices({"L4": 1.0}), 40.0) == []
    text = "\n".join(render_candidates(unsized, sized=True))
    assert " ?  " in text
    assert "at most unknown" in text
    question = Question(found.slos, rate=40.0, prices=Prices({"L4": 1.0}))
    plan = Plan(question, read_source(serve=SERVE.format(slots=1), gpu="L4"), unsure, None, None)
    assert "replicas: no number" in render_plan(plan)
    assert "begins at 0" in plan_page(plan)


@pytest.mark.parametrize(("level", "low", "high"), [(1, 1, 2), (2, 1, 3), (10, 8, 12)])
def test_requests_in_flight_are_confirmed_by_whole_ones_on_either_side(level, low, high):
    found = planned(scenario(), ["mean ttft <= 200ms"], FixedSteps(0.1), Effort(200, 2))
    found = replace(
        found, level=Level("concurrency", level), kept=Level("concurrency", level), request_rate=50.0
    )
    below, above = (confirming_load(found, share).workload for share in (0.85, 1.15))
    assert (below.max_concurrency, above.max_concurrency) == (low, high)
    # At 50 requests/s per level in flight, two minutes are more than a thousand requests.
    assert below.num_prompts == max(1000, round(120 * 50 * low / level))
    assert f"with {low} in flight and missed with {high}" in confirming_words(found)


def test_an_offered_rate_drops_the_clients_cap():
    what = replace(scenario(), workload=replace(scenario().workload, max_concurrency=4))
    assert at_level(what, Level("rate", 3.0), 10).workload.max_concurrency is None
    found = planned(what, ["mean ttft <= 200ms"], FixedSteps(0.1), Effort(200, 2))
    assert any("cap of 4 is dropped" in n.text for n in found.notes)


def test_scaled_step_time_scales_everything_but_the_front_end():
    model = ScaledStepTime(FixedSteps(0.1, before=0.01, after=0.02), 1.5)
    from sim.steptime.gate import decodes_of

    shape = decodes_of(4, 100)
    assert (model.gpu(shape), model.host_before(shape), model.host_after(shape)) == pytest.approx(
        (0.15, 0.015, 0.03)
    )
    assert model.out_of_range(shape) is None


def test_assumed_efficiencies_are_trusted_less():
    assert model_error(scenario()).share > 0.02
    assert "assumed" in model_error(scenario()).source
