"""What can be sustained, from requests sent all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibration.candidates import capacity
from sim.build import build_scenario
from sim.flood import at_once, flood_size
from sim.simulate import roofline, simulate

SERVE = "vllm serve Qwen/Qwen3-14B --max-num-seqs 64"
BENCH = "vllm bench serve --random-input-len 1024 --random-output-len 256 --request-rate 5 --num-prompts 60"


def test_a_batch_that_only_fills_shows_no_capacity() -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="H100")
    flood = at_once(scenario.workload)
    assert flood is not None
    result = simulate(replace(scenario, workload=flood)).result
    # All 60 run at once: until the last first token the engine has hardly done anything but prefill.
    assert result.extra["regime"]["sustainable_rate"] is None


def test_the_capacity_is_what_an_endless_load_gets() -> None:
    scenario = build_scenario(serve=SERVE, bench=BENCH, gpu="H100")
    assert flood_size(scenario) == 192
    told = capacity(scenario, roofline(scenario))
    spec = replace(scenario.workload, request_rate=1000.0, num_prompts=3000)
    endless = simulate(replace(scenario, workload=spec)).result
    assert told == pytest.approx(endless.extra["regime"]["sustainable_rate"], rel=0.08)
