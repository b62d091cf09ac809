"""Our SGLang scheduler against the scheduler classes of the SGLang that is installed here, side by side."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sim.engines.sglang.config import VERSIONS
from sim.engines.sglang.parity import replay
from sim.errors import EngineStuck
from sim.parity import load_scenarios, load_traces
from tests.sglang_scenarios import draw

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
if find_spec("sglang") is None or find_spec("torch") is None:
    pytest.skip("needs an environment with SGLang", allow_module_level=True)

DATA = Path(__file__).parents[1] / "data" / "parity"


@pytest.mark.parametrize("batch", range(6))
def test_every_call_is_the_same(batch: int) -> None:
    from tests.real.sglang_recorder import load

    driver = load()
    if driver.VERSION not in VERSIONS:
        pytest.skip(f"no rules for SGLang {driver.VERSION}")
    for number in range(25 * batch, 25 * (batch + 1)):
        scenario = draw("live", number)
        try:
            header, *lines = driver.record(scenario)
        except driver.Stuck as stuck:
            with pytest.raises(EngineStuck, match=str(stuck)):
                replay(scenario, driver.VERSION)
        else:
            ours, facts = replay(scenario, driver.VERSION)
            assert ours == lines, scenario
            assert facts == {key: header[key] for key in facts}, scenario


@pytest.mark.parametrize("name", ["sglang.policies", "sglang.rules"])
def test_the_recordings_are_what_this_engine_decides(name: str) -> None:
    from tests.real.sglang_recorder import load

    driver = load()
    if driver.VERSION not in VERSIONS:
        pytest.skip(f"no rules for SGLang {driver.VERSION}")
    scenarios = load_scenarios(DATA / f"{name}.scenarios.jsonl.gz")
    for trace in load_traces(DATA / f"{name}.traces.jsonl.gz"):
        header, *lines = driver.record(scenarios[trace.scenario_id])
        assert lines == trace.lines
        assert header["outcome"] == trace.header["outcome"]
