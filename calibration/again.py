"""A fit's own runs predicted as `predict` would: without being held to anything that was recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibration.evidence import ClientRun, Evidence
from calibration.replay import account_of, run_once
from calibration.validate.foresee import measured_figures
from sim.figures.metrics import summarise
from sim.profile import AGAIN_POOR, worst_again
from sim.simulate import roofline
from sim.steptime.efficiencies import Efficiencies

MEANS = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT", "mean_e2el_ms": "E2E"}


def predicted_again(run: ClientRun, efficiencies: Efficiencies) -> Mapping[str, float]:
    """Signed relative errors of a run's means; its answers set their own pace.

    Recorded requests are sent at their recorded times, or again by the cap where a cap alone held them.
    """
    scenario, cap = run.scenario, run.scenario.workload.max_concurrency
    requests = run.sent()
    if run.requests is not None and scenario.workload.closed_loop and cap is not None:
        requests = [replace(request, arrival=0.0) for request in requests]
    outcome = run_once(
        scenario,
        requests,
        replace(roofline(scenario), efficiencies=efficiencies),
        account_of(scenario),
        max_concurrency=cap,
    )
    figures = summarise(outcome.records, scenario.workload, outcome.duration)
    measured = run.figures if run.requests is None else measured_figures(run.requests)
    found = {}
    for key in MEANS:
        ours, theirs = figures.get(key), measured.get(key)
        if ours and theirs and math.isfinite(ours / theirs):
            found[key] = float(ours / theirs) - 1.0
    return found


def all_again(evidence: Sequence[Evidence], efficiencies: Efficiencies) -> dict[str, dict[str, float]]:
    """By the name of each run of a client that can be predicted: signed relative errors of its means."""
    clients = [run for run in evidence if isinstance(run, ClientRun)]
    found = {run.name: dict(predicted_again(run, efficiencies)) for run in clients}
    return {name: errors for name, errors in found.items() if errors}


def again_text(again: Mapping[str, Mapping[str, float]]) -> str:
    """A line per run, then what its reader should know of lines far off; "" without any."""
    lines = [
        f"predicted again {name}: mean {', '.join(f'{MEANS[key]} {e:+.1%}' for key, e in errors.items())}"
        for name, errors in again.items()
    ]
    worst = worst_again(again)
    if worst > AGAIN_POOR:
        lines.append(
            f"WARNING: a run that was fitted is {worst:.0%} off when it is predicted: its load may not be "
            "the scenario's, or the formula is not its engine's"
        )
    return "\n".join(lines)
