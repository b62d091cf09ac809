"""Everything at once: the load that shows what an engine can sustain."""

from __future__ import annotations

import math
from dataclasses import replace

from sim.carry import account_of
from sim.scenario import Scenario
from sim.simulate import ENGINES
from sim.workload.spec import WorkloadSpec

ENOUGH_FOR_CAPACITY = 50
MOST = 3000


def at_once(spec: WorkloadSpec) -> WorkloadSpec | None:
    """The same requests sent at once, which shows the capacity; None: a closed loop, or too few to tell."""
    if spec.closed_loop or spec.num_prompts < ENOUGH_FOR_CAPACITY:
        return None
    return replace(
        spec,
        request_rate=math.inf,
        use_trace_arrivals=False,
        ramp_up=None,
        max_concurrency=None,
        duration=None,
    )


def flood_size(scenario: Scenario) -> int:
    """Requests that, sent at once, fill the engine's batch three times: fewer show a batch that fills."""
    limits = ENGINES[scenario.engine.name].limits(scenario.engine, account_of(scenario))
    return min(MOST, max(ENOUGH_FOR_CAPACITY, 3 * (limits.max_num_seqs or MOST)))
