"""Our vLLM scheduler against the scheduler classes of the vLLM that is installed here, run side by side."""

from __future__ import annotations

import pytest

from sim.engines.vllm.parity import replay
from tests.vllm_scenarios import draw

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm", reason="needs an environment with vLLM", exc_type=ImportError)


@pytest.mark.parametrize("batch", range(6))
def test_every_call_is_the_same(batch: int) -> None:
    from tests.real.vllm_recorder import VERSION, record

    for number in range(20 * batch, 20 * (batch + 1)):
        scenario = draw("live", number)
        header, *lines = record(scenario)
        ours, facts = replay(scenario, VERSION)
        assert ours == lines, scenario
        assert facts == {key: header[key] for key in facts}, scenario


def test_stale_output_is_waited_for_in_a_deeper_pipeline() -> None:
    from tests.real.vllm_recorder import VERSION, record

    for number in range(60):
        scenario = draw("live-deep", number)
        if scenario["args"]["async_scheduling"]:
            header, *lines = record(scenario, pipeline_depth=3)
            ours, facts = replay(scenario, VERSION, pipeline_depth=3)
            assert ours == lines, scenario
            assert facts == {key: header[key] for key in facts}, scenario
