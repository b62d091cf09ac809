"""Kernel tables as a prior: only for what the shipped table assumes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration import kernels
from calibration.parameters import Prior, default_prior
from calibration.plan_run import prior_of
from sim.build import build_scenario
from sim.errors import BadInput
from sim.scenario import Scenario

TABLED = ("weight_bandwidth", "gemm_flops", "kv_bandwidth")


def asked(gpu: str) -> Scenario:
    return build_scenario(serve="vllm serve Qwen/Qwen3-14B", bench="vllm bench serve", gpu=gpu)


def tables(scenario: Scenario) -> Prior:
    """Kernels at rates of their own."""
    shipped = default_prior(scenario.gpu)
    return Prior(
        replace(shipped.efficiencies, tile=256.0, **dict.fromkeys(TABLED, 0.5)),
        {**shipped.deviations, **{name: kernels.DEVIATIONS[name] for name in TABLED}},
        {**shipped.sources, **dict.fromkeys(TABLED, "AIConfigurator operator tables")},
    )


@pytest.mark.parametrize(
    ("gpu", "assumed"),
    [("B200", set(TABLED)), ("H100", {"kv_bandwidth"}), ("RTX-PRO-6000-Server", set())],
)
def test_tables_take_the_place_of_what_is_assumed(
    gpu: str, assumed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = asked(gpu)
    shipped = default_prior(scenario.gpu)
    monkeypatch.setattr(kernels, "installed", lambda: True)
    monkeypatch.setattr(kernels, "kernel_prior", tables)
    prior = prior_of(None, scenario)
    for name in TABLED:
        believed = 0.5 if name in assumed else getattr(shipped.efficiencies, name)
        assert getattr(prior.efficiencies, name) == believed
        assert prior.sources[name].startswith("AIConfigurator") == (name in assumed)
    assert prior.efficiencies.step_overhead == shipped.efficiencies.step_overhead


def test_without_tables_for_a_card_the_shipped_prior_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(scenario: Scenario) -> Prior:
        raise BadInput("kernel tables", scenario.gpu.name, "cover no such card")

    scenario = asked("B200")
    monkeypatch.setattr(kernels, "installed", lambda: True)
    monkeypatch.setattr(kernels, "kernel_prior", none)
    assert prior_of(None, scenario) == default_prior(scenario.gpu)


@pytest.mark.skipif(not kernels.installed(), reason="the extra `kernels` is not installed")
def test_the_tables_themselves_are_read() -> None:
    prior = kernels.best_prior(asked("B200"))
    assert prior.sources["gemm_flops"].startswith("AIConfigurator operator tables (b200_sxm, vllm)")
