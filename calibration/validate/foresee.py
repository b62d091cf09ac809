"""Figures of a recorded run as a fit predicts them, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibration.evidence import ClientRun, PerRequest
from calibration.replay import account_of, run_once
from calibration.result import FitResult
from sim.figures.intervals import Interval, intervals, reaching
from sim.figures.metrics import Figures, distribution, summarise
from sim.request import Request
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.scale import draw, slowed

DRAWS = 6
HAIR = (0.998, 1.002)
QUANTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "e2el")


def possible(fit: FitResult, draws: int = DRAWS, seed: int = 0) -> list[Efficiencies]:
    """The most likely coefficients, and `draws` others that the evidence allows."""
    names, covariance = fit.space.names, fit.covariance
    return [fit.efficiencies, *draw(fit.efficiencies, names, covariance, fit.structure, draws, seed)]


def figures_of(scenario: Scenario, requests: Sequence[Request], efficiencies: Efficiencies) -> Figures:
    """Simulated figures of `requests`, at their arrivals, or as the workload's closed loop sends them."""
    outcome = run_once(
        scenario,
        requests,
        replace(roofline(scenario), efficiencies=efficiencies),
        account_of(scenario),
        max_concurrency=scenario.workload.max_concurrency,
    )
    spec = replace(
        scenario.workload, percentiles=QUANTILES, percentile_metrics=("ttft", "tpot", "itl", "e2el")
    )
    return {**summarise(outcome.records, spec, outcome.duration), "duration": outcome.duration}


def foresee(
    run: ClientRun, models: Sequence[Efficiencies], seeds: bool = False, first_token: float = 0.0
) -> dict[str, Interval]:
    """Intervals of a run's figures.

    Args:
        run: its requests are sent as recorded; where only figures are known, its load is generated.
        models: the most likely coefficients first.
        seeds: with another seed of a generated load for every further one.
        first_token: see `FitResult`.
    """
    found = [
        figures_of(run.scenario, run.sent(index if seeds else 0), efficiencies)
        for index, efficiencies in enumerate(models)
    ]
    beside = [figures_of(run.scenario, run.sent(), slowed(models[0], factor)) for factor in HAIR]
    own = intervals(found[0], found[1:], beside=beside, first_token=first_token)
    apart = run.other_starts(found[0].get("request_throughput"))
    return reaching(own, found[0], [figures_of(run.scenario, sent, models[0]) for sent in apart])


def measured_figures(requests: PerRequest) -> Figures:
    """The figures of a recorded run, by the definitions of `sim.figures.metrics` (ms)."""
    tpot = requests.decode[requests.output_len > 1] / (requests.output_len[requests.output_len > 1] - 1)
    samples = {"ttft": requests.ttft, "tpot": tpot, "e2el": requests.ttft + requests.decode}
    found: Figures = {}
    for name in METRICS:
        found.update(distribution(name, samples[name], QUANTILES))
    return found
