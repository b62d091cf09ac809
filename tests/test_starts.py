"""A closed loop of equal outputs keeps the cycle it starts in: intervals reach what other starts lead to."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from calibration.evidence import ClientRun
from calibration.parameters import Prior, Space
from calibration.search import WAVES, _in_waves, search
from calibration.validate.foresee import foresee
from sim.build import build_scenario
from sim.engines.glue import Limits
from sim.figures.intervals import Interval, reaching
from sim.forecast import forecast
from sim.loop.run import run
from sim.simulate import ENGINES, roofline, simulate
from sim.workload.generate import generate_load
from sim.workload.starts import STARTS, WITHIN, other_starts
from tests.leap_workloads import differences

LOOP = "--random-input-len 1024 --random-output-len 256 --num-prompts 80 --max-concurrency 8"
SERVE = {"vllm": "vllm serve {}", "sglang": "python -m sglang.launch_server --model-path {}"}


def loop(flags=LOOP, engine="vllm"):
    serve = SERVE[engine].format("Qwen/Qwen2.5-7B-Instruct")
    bench = f"vllm bench serve --dataset-name random --ignore-eos {flags}"
    return build_scenario(serve=serve, bench=bench, gpu="H100")


def starts_of(scenario, rate=1.0):
    spec = scenario.workload
    return other_starts(spec, generate_load(spec).requests, rate)


def test_only_the_first_requests_are_sent_apart_and_ever_further():
    scenario = loop()
    starts = starts_of(scenario)
    assert len(starts) == STARTS
    for k, start in enumerate(starts, start=1):
        first, others = start.arrivals[:8], start.arrivals[8:]
        assert first[0] == 0.0
        assert (np.diff(first) > 0).all()
        assert 0.0 < first[-1] <= WITHIN * k / STARTS
        assert (others == first[-1]).all()
        together = [replace(request, arrival=0.0) for request in start]
        assert together == list(generate_load(scenario.workload).requests)
    assert starts[-1].arrivals[7] > 3 * starts[0].arrivals[7]


def test_the_seed_decides_and_a_short_cycle_is_not_exceeded():
    scenario = loop()
    other = replace(scenario, workload=replace(scenario.workload, seed=1))
    arrivals = [[start.arrivals.tolist() for start in starts_of(s)] for s in (scenario, scenario, other)]
    assert arrivals[0] == arrivals[1] != arrivals[2]
    rate = 80.0  # eight in flight: a cycle of 0.1 s
    assert 0.02 < starts_of(scenario, rate)[-1].arrivals[7] <= 0.1


def test_of_a_long_load_the_beginning_is_enough():
    scenario = loop("--random-input-len 64 --random-output-len 16 --num-prompts 3000 --max-concurrency 4")
    spec, requests = scenario.workload, generate_load(scenario.workload).requests
    whole, part = other_starts(spec, requests, 9.0), other_starts(spec, requests, 9.0, whole=False)
    assert [len(start) for start in (whole[0], part[0])] == [3000, 1000]
    assert list(part[2]) == list(whole[2])[:1000]
    told, nominal = (forecast(scenario, draws=draws).result for draws in (None, 0))
    assert told.aggregates == nominal.aggregates
    low, high = told.extra["intervals"]["figures"]["mean_ttft_ms"]
    starts = other_starts(spec, requests, nominal.aggregates["request_throughput"])
    for start in starts[::2]:
        assert low < simulate(scenario, requests=start).result.aggregates["mean_ttft_ms"] < high


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(LOOP + " --random-range-ratio 0.1", id="outputs differ"),
        pytest.param(LOOP + " --request-rate 5", id="a schedule"),
        pytest.param(LOOP.replace("--max-concurrency 8", ""), id="all at once"),
        pytest.param(LOOP.replace("--max-concurrency 8", "--max-concurrency 80"), id="no successors"),
        pytest.param(LOOP.replace("--max-concurrency 8", "--max-concurrency 1"), id="one at a time"),
    ],
)
def test_a_run_that_forgets_its_start_has_no_other(flags):
    scenario = loop(flags)
    assert starts_of(scenario) == []
    result = forecast(scenario).result
    assert "starts" not in result.extra["intervals"]["from"]
    assert not [note for note in result.notes if note.subject == "mean TTFT"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_path_simulates_a_start_alike(engine):
    scenario = loop(engine=engine)
    step_time, glue = roofline(scenario), ENGINES[engine]
    account = glue.account(
        scenario.model, scenario.gpu, scenario.gpu_count, scenario.engine, scenario.observed
    )
    paths = [{"leap": False}, {"fast": False}] + [{"fast": True}] * (find_spec("numba") is not None)
    for start in starts_of(scenario)[::2]:
        outcomes = [
            run(
                glue.make_scheduler(scenario.engine, account, start, 0),
                start,
                step_time,
                max_concurrency=8,
                limits=Limits(),
                **path,
            )
            for path in paths
        ]
        assert [outcome.path for outcome in outcomes] == ["steps", "leaps", "compiled"][: len(paths)]
        assert not any(differences(outcomes[0], outcome) for outcome in outcomes[1:])
        sent = np.sort(outcomes[0].records.sent)
        assert sent[:8] == pytest.approx(start.arrivals[:8])
        assert sent[8] > start.arrivals[7]


def test_a_prediction_reaches_its_starts_and_stays_where_it_is():
    scenario = loop()
    told = forecast(scenario).result
    nominal = forecast(scenario, draws=0).result
    assert told.aggregates == nominal.aggregates
    assert np.array_equal(told.records.first_token, nominal.records.first_token)
    means = [
        simulate(scenario, requests=start).result.aggregates["mean_ttft_ms"]
        for start in starts_of(scenario, nominal.aggregates["request_throughput"])
    ]
    assert max(means) / min(means) > 1.1
    low, high = told.extra["intervals"]["figures"]["mean_ttft_ms"]
    assert low < min(means) <= max(means) < high
    assert f"{STARTS} starts" in told.extra["intervals"]["from"]
    (note,) = (note for note in told.notes if note.subject == "mean TTFT")
    everything = [*means, nominal.aggregates["mean_ttft_ms"]]
    assert note.kind == "warning"
    assert note.text.endswith(f": {min(everything):.0f} to {max(everything):.0f} ms")
    assert not [note for note in nominal.notes if note.subject == "mean TTFT"]


def test_a_start_that_changes_little_is_not_worth_a_warning():
    decodes = loop("--random-input-len 16 --random-output-len 256 --num-prompts 40 --max-concurrency 2")
    result = forecast(decodes).result
    assert f"{STARTS} starts" in result.extra["intervals"]["from"]
    assert not [note for note in result.notes if note.subject == "mean TTFT"]


def test_a_fit_foresees_other_starts_of_figures_alone():
    scenario = loop()
    efficiencies = roofline(scenario).efficiencies
    figures = simulate(scenario).result.aggregates
    found = foresee(ClientRun("loop", scenario, figures), [efficiencies])["mean_ttft_ms"]
    spread = loop(LOOP + " --random-range-ratio 0.1")
    forgets = foresee(ClientRun("spread", spread, figures), [efficiencies])["mean_ttft_ms"]
    assert found.centre / found.low > 1.2
    assert forgets.centre / forgets.low < 1.05


def test_what_another_start_explains_widens_no_fit():
    scenario, model = loop(), roofline(loop())
    rate = simulate(scenario).result.aggregates["request_throughput"]
    apart = simulate(scenario, requests=starts_of(scenario, rate)[3]).result.aggregates
    shown = {key: apart[key] for key in ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms")}
    space = Space(("weight_bandwidth",), Prior(model.efficiencies, {"weight_bandwidth": 0.02}, {}))
    found = search([ClientRun("apart", scenario, shown)], space)
    assert found.residuals["apart"]["mean_ttft_ms"] > 2 * WAVES
    assert found.first_token == WAVES
    never = {**shown, "mean_ttft_ms": 0.5 * shown["mean_ttft_ms"]}
    assert search([ClientRun("never", scenario, never)], space).first_token > 2 * WAVES


def test_only_loops_of_several_come_in_waves():
    loops = [(LOOP, True), (LOOP.replace("--max-concurrency 8", "--max-concurrency 1"), False)]
    loops.append((LOOP + " --request-rate 3", False))  # its cap bounds a schedule, it does not make one
    for load, waves in loops:
        assert _in_waves(ClientRun("r.json", loop(load), {})) is waves


def test_ends_move_each_by_its_own_side():
    found = {"mean_ttft_ms": Interval(100.0, 80.0, 125.0), "mean_tpot_ms": Interval(10.0, 9.0, 11.0)}
    nominal = {"mean_ttft_ms": 200.0, "mean_tpot_ms": 10.0}
    starts = [{"mean_ttft_ms": 200.0 * factor} for factor in (0.8, 0.9, 1.0)]
    wider = reaching(found, nominal, starts)
    assert wider["mean_ttft_ms"].high == pytest.approx(125.0)
    assert wider["mean_ttft_ms"].low == pytest.approx(100.0 * 0.8 ** (2**0.5))
    assert wider["mean_tpot_ms"] == found["mean_tpot_ms"]  # the starts do not tell
    assert reaching(found, nominal, []) == found
