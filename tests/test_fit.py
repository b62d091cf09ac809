from dataclasses import replace

import numpy as np
import pytest

from calibration.evidence import ClientRun, StepRun
from calibration.fit import default_free, first_part, fit
from calibration.parameters import default_prior, space_of
from calibration.result import unexplained
from calibration.search import (
    FIGURES_FLOOR,
    NOISE,
    WAVES,
    Objective,
    cma,
    minimise,
    precision_of,
    search,
    simulated_figures,
    targets,
)
from calibration.validate.truth import (
    CLIENT_COEFFICIENTS,
    STEP_COEFFICIENTS,
    measured_run,
    measured_steps,
    prior,
    recovered,
    scenario,
    truth_near,
)
from sim.build import build_scenario
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.simulate import roofline, simulate
from sim.steptime.efficiencies import BOUNDS


def share(found):
    inside, count = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    return inside / count, count


def test_timed_steps_give_back_the_coefficients_that_made_them():
    inside, count = share(recovered("steps", STEP_COEFFICIENTS, range(12)))
    assert count > 30
    assert inside > 0.8


def test_client_latencies_give_back_the_coefficients_that_made_them():
    inside, count = share(recovered("client", CLIENT_COEFFICIENTS, range(2)))
    assert count >= 4
    assert inside >= 0.6


def test_token_times_are_used():
    truth = truth_near(prior(), CLIENT_COEFFICIENTS, 3)
    whole = fit([measured_run(truth, 3, count=60)], prior(), CLIENT_COEFFICIENTS)
    pieces = fit([measured_run(truth, 3, count=60, token_times=True)], prior(), CLIENT_COEFFICIENTS)
    assert pieces.rows > whole.rows


def test_what_the_data_do_not_show_keeps_its_prior():
    believed = prior()
    truth = truth_near(believed, ("gemm_flops",), 1)
    steps = measured_steps(truth, 1)
    decodes = tuple(s for s in steps.shapes if not s.num_prefill_seqs)
    keep = np.array([not s.num_prefill_seqs for s in steps.shapes])
    evidence = StepRun(steps.name, steps.scenario, decodes, steps.seconds[keep], steps.start[keep])
    found = fit([evidence], believed, ("kv_bandwidth", "weight_bandwidth", "attention_flops"))
    assert found.status["attention_flops"] == "prior"
    assert found.value("attention_flops") == pytest.approx(believed.efficiencies.attention_flops)
    assert found.status["kv_bandwidth"] == "fitted"


def test_every_coefficient_stays_within_physics():
    truth = truth_near(prior(), STEP_COEFFICIENTS, 4)
    evidence = measured_steps(truth, 4)
    impossible = StepRun(
        evidence.name, evidence.scenario, evidence.shapes, evidence.seconds / 2.5, evidence.start
    )
    found = fit([impossible], prior(), STEP_COEFFICIENTS)
    for name in STEP_COEFFICIENTS:
        assert BOUNDS[name].low <= found.value(name) <= BOUNDS[name].high
        low, high = found.interval(name)
        assert BOUNDS[name].low <= low <= high <= BOUNDS[name].high


def test_outliers_pull_little():
    truth = truth_near(prior(), STEP_COEFFICIENTS, 5)
    clean = measured_steps(truth, 5)
    seconds = clean.seconds.copy()
    seconds[::20] *= 8.0
    dirty = StepRun(clean.name, clean.scenario, clean.shapes, seconds, clean.start)
    a = fit([clean], prior(), STEP_COEFFICIENTS)
    b = fit([dirty], prior(), STEP_COEFFICIENTS)
    assert b.value("gemm_flops") == pytest.approx(a.value("gemm_flops"), rel=0.03)


def test_a_machine_of_two_speeds_is_fitted_by_its_mean():
    truth = truth_near(prior(), STEP_COEFFICIENTS, 5)
    clean = measured_steps(truth, 5, count=1500)
    slow = np.random.default_rng(5).random(len(clean.seconds)) < 0.3
    turns = replace(clean, seconds=np.where(slow, 1.6, 1.0) * clean.seconds)
    model = roofline(clean.scenario)
    found = replace(model, efficiencies=fit([turns], prior(), STEP_COEFFICIENTS).efficiencies)
    predicted = sum(found.gpu(shape) for shape in turns.shapes)
    assert predicted == pytest.approx(float(turns.seconds.sum()), rel=0.02)


def test_a_cpu_is_believed_to_be_any_cpu():
    cpu, card = (default_prior(find_gpu(name)[0]).deviations for name in ("cpu", "H100"))
    assert cpu["gemm_flops"] >= 0.5
    assert card["gemm_flops"] <= 0.2


def test_fewer_points_than_coefficients_are_refused():
    steps = measured_steps(prior().efficiencies, 0, count=3)
    with pytest.raises(BadInput, match=r"steps-0.*3 measured points for 5 coefficients"):
        fit([steps], prior(), STEP_COEFFICIENTS)


def test_unknown_coefficients_are_refused():
    with pytest.raises(BadInput, match="tile"):
        space_of(default_prior(scenario().gpu), ["tile"])


def test_free_coefficients_follow_the_scenario():
    assert "allreduce_latency" not in default_free(scenario())
    assert "throttle" in default_free(scenario())


def test_the_first_part_of_a_run_leaves_out_what_later_requests_touched():
    run = measured_run(prior().efficiencies, 7, count=400, rate=20.0)
    assert run.requests is not None
    part = first_part(run.requests, 0.25)
    assert len(part) == 300
    cut = run.requests.requests[300].arrival
    ends = np.array([r.arrival for r in part.requests]) + part.ttft + part.decode
    assert np.nanmax(ends) < cut
    assert np.isnan(part.decode).any()


def test_figures_alone_are_fitted_by_search():
    believed = prior()
    names = ("gemm_flops", "step_overhead")
    truth = truth_near(believed, names, 2)
    run = measured_run(truth, 2, count=60, noise=0.0)

    def simulate(_, model):
        ours = measured_run(model.efficiencies, 2, count=60, noise=0.0).requests
        return {
            "mean_ttft_ms": float(ours.ttft.mean() * 1e3),
            "mean_tpot_ms": float((ours.decode / (ours.output_len - 1)).mean() * 1e3),
        }

    figures = simulate(run, type("M", (), {"efficiencies": truth}))
    bare = type(run)(run.name, run.scenario, figures)
    space = space_of(believed, names)
    found, _ = minimise(Objective([bare], space, simulate), space.start())
    got = space.unpack(found)
    assert got.gemm_flops == pytest.approx(truth.gemm_flops, rel=0.06)
    assert set(targets(bare)) == {"mean_ttft_ms", "mean_tpot_ms"}


def test_a_fit_to_figures_says_what_steps_it_has_seen():
    subject = build_scenario(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 64",
        bench="vllm bench serve --random-input-len 100 --random-output-len 20 --num-prompts 16 "
        "--max-concurrency 4",
        gpu="L40S",
        engine_version="0.28.0",
        kv_cache_tokens=200_000,
    )
    truth = replace(roofline(subject), efficiencies=replace(prior().efficiencies, weight_bandwidth=0.7))
    figures = simulated_figures(ClientRun("r.json", subject, {}), truth)
    found = search([ClientRun("r.json", subject, figures)], space_of(prior(), ("weight_bandwidth",)))
    assert found.value("weight_bandwidth") == pytest.approx(0.7, rel=0.02)
    # Three prompts come together, as those of a wave do.
    assert (found.valid.decode_seqs, found.valid.prefill_tokens, found.valid.context) == (4, 300, 119)
    again = replace(truth, efficiencies=found.efficiencies, valid=found.valid)
    assert simulate(subject, step_time=again).result.verdict.status == "VALID"
    narrower = replace(again, valid=found.valid._replace(prefill_tokens=100))
    assert simulate(subject, step_time=narrower).result.verdict.status == "SUSPECT"
    # Four requests in flight come in waves, and few figures hide what the formula lacks.
    assert found.first_token == WAVES
    assert found.structure == FIGURES_FLOOR


def test_figures_that_a_client_was_not_to_print_are_met_too():
    subject = build_scenario(
        serve="vllm serve Qwen/Qwen2.5-7B-Instruct",
        bench="vllm bench serve --num-prompts 12 --metric-percentiles 50,90 --percentile-metrics ttft",
        gpu="L40S",
        engine_version="0.28.0",
        kv_cache_tokens=200_000,
    )
    figures = simulated_figures(ClientRun("r.json", subject, {}), roofline(subject))
    assert set(targets(ClientRun("r.json", subject, figures))) == set(NOISE)
    found = search([ClientRun("r.json", subject, figures)], space_of(prior(), ("weight_bandwidth",)))
    assert set(found.residuals["r.json"]) == set(NOISE)
    assert np.isfinite(list(found.residuals["r.json"].values())).all()


def test_what_steps_have_shown_counts_beside_figures():
    truth = truth_near(prior(), STEP_COEFFICIENTS, 4)
    steps = measured_steps(truth, 4)
    run = measured_run(truth, 4, count=20)
    figures = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0}
    bare = replace(run, figures=figures, requests=None)
    space = space_of(prior(), STEP_COEFFICIENTS)
    before = replace(fit([steps], prior(), STEP_COEFFICIENTS), structure=0.06)
    assert search([bare], space, before).structure >= 0.06
    # Of the first two their sum is known: moving one against the other costs little.
    deviations = np.sqrt(np.diag(before.covariance))
    correlated = np.eye(5)
    correlated[0, 1] = correlated[1, 0] = -0.9
    covariance = correlated * np.outer(deviations, deviations)
    precision = precision_of(covariance)
    assert precision.T @ precision @ covariance == pytest.approx(np.eye(5), abs=1e-6)
    belief = Objective([], space, lambda *_: {}, precision).misses
    against, along = deviations * [1, -1, 0, 0, 0], deviations * [1, 1, 0, 0, 0]
    start = space.start()
    assert np.sum(belief(start + against) ** 2) < 0.2 * np.sum(belief(start + along) ** 2)


def test_a_long_fit_shows_that_it_is_alive():
    truth = truth_near(prior(), CLIENT_COEFFICIENTS, 3)
    run, done = measured_run(truth, 3, count=20), []
    fit([run], prior(), CLIENT_COEFFICIENTS, lambda: done.append("replayed"))
    figures = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0, "median_ttft_ms": 90.0}
    fit([replace(run, figures=figures, requests=None)], prior(), ("gemm_flops",), lambda: done.append("seen"))
    assert done.count("replayed") > 1
    assert done.count("seen") > 1


def test_what_a_fit_leaves_unexplained_counts_its_coefficients():
    assert unexplained([], 3) == 0.0
    assert unexplained([0.02, -0.02], 0) == pytest.approx(0.02)
    assert unexplained([0.02, -0.02, 0.02, -0.02], 1) == pytest.approx(0.02 * (4 / 3) ** 0.5)
    assert unexplained([0.02, -0.02], 9) == pytest.approx(0.02 * 2**0.5)


def test_cma_finds_the_minimum_of_a_jagged_bowl():
    goal = np.array([0.7, -1.2, 0.4])

    def jagged(x):
        return float(np.sum((x - goal) ** 2) + 0.05 * np.sum(np.floor(8 * x) % 2))

    bounds = (np.full(3, -3.0), np.full(3, 3.0))
    best = cma(jagged, np.zeros(3), np.ones(3), bounds, generations=60)
    assert np.abs(best - goal).max() < 0.3
