"""What a calibration says of its own fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.from_files import loaded
from calibration.parameters import default_prior, space_of
from calibration.plan_run import coefficients_text
from calibration.result import FitResult
from sim.build import build_scenario
from sim.errors import BadInput
from sim.simulate import simulate
from sim.steptime.roofline import ValidRange

SCENARIO = build_scenario(
    serve="vllm serve Qwen/Qwen3-14B", bench="vllm bench serve --num-prompts 5", gpu="H100"
)


def fitted(status: str, error: float) -> FitResult:
    prior = default_prior(SCENARIO.gpu)
    space = space_of(prior, ("gemm_flops",))
    return FitResult(
        efficiencies=prior.efficiencies,
        space=space,
        vector=space.start(),
        covariance=np.diag([0.01**2]),
        status={"gemm_flops": status},
        structure=0.01,
        residuals={"a.json": {"mean_ttft_ms": error, "mean_tpot_ms": float("nan")}},
        rows=9,
        rounds=2,
        valid=ValidRange(),
    )


def test_a_good_fit_says_how_well_it_reproduces_its_runs() -> None:
    text = coefficients_text(fitted("fitted", -0.017))
    assert "reproduces a.json: mean_ttft_ms -1.7%" in text
    assert "nan" not in text
    assert "WARNING" not in text


def test_bounds_and_figures_that_are_missed_are_warned_of() -> None:
    text = coefficients_text(fitted("at bound", 0.42))
    assert "WARNING: gemm_flops would leave what physics allows" in text
    assert "still 42% off" in text


@pytest.mark.parametrize(("name", "value"), [("throttle", 0.0), ("front_request", 0.0)])
def test_what_a_card_or_a_client_does_not_do_is_no_warning(name: str, value: float) -> None:
    prior = default_prior(SCENARIO.gpu)
    space = space_of(prior, (name,))
    found = replace(
        fitted("fitted", 0.0),
        efficiencies=replace(prior.efficiencies, **{name: value}),
        space=space,
        vector=np.array([value]),
        status={name: "at bound"},
    )
    text = coefficients_text(found)
    assert f"nothing of {name}" in text
    assert "WARNING" not in text


def test_a_bound_that_the_runs_hardly_tell_from_the_middle_is_no_alarm() -> None:
    told = replace(fitted("at bound", 0.0), covariance=np.diag([0.5**2]))
    text = coefficients_text(told)
    assert "note: gemm_flops came out at the end" in text
    assert "WARNING" not in text


def test_a_deviation_that_is_only_assumed_is_said_to_be() -> None:
    assert "1.0% beyond what the coefficients explain, which is assumed" in coefficients_text(
        fitted("fitted", 0.0)
    )
    seen = replace(fitted("fitted", 0.0), structure=0.034)
    assert coefficients_text(seen).splitlines()[2].endswith("3.4% beyond what the coefficients explain")


def test_a_run_of_another_engine_is_no_evidence() -> None:
    result = simulate(SCENARIO).result
    theirs = replace(result, identity={**result.identity, "engine": "sglang"})
    with pytest.raises(BadInput, match=r"a\.json.*sglang.*vllm"):
        loaded(theirs, "a.json", SCENARIO)
