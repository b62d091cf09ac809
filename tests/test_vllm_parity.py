"""Our vLLM scheduler against decisions recorded from the real one (0.28.0 and 0.33.0)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sim.engines.vllm.parity import replay
from sim.parity import compare_files, load_scenarios, load_traces

DATA = Path(__file__).parent / "data" / "parity"
SCENARIOS, TRACES = DATA / "vllm.scenarios.jsonl.gz", DATA / "vllm.traces.jsonl.gz"
DEEP_SCENARIOS, DEEP_TRACES = DATA / "vllm.depth4.scenarios.jsonl.gz", DATA / "vllm.depth4.traces.jsonl.gz"


def test_every_recorded_call_is_reproduced() -> None:
    comparisons = compare_files(SCENARIOS, TRACES)
    assert [c for c in comparisons if c.difference] == []
    assert Counter(c.version for c in comparisons) == {"0.28.0": 36, "0.33.0": 36}
    assert sum(c.identical_steps for c in comparisons) == sum(c.steps for c in comparisons) > 5000


def test_the_recordings_exercise_the_rules() -> None:
    seen: Counter[str] = Counter()
    scenarios = load_scenarios(SCENARIOS)
    lines = {}
    for trace in load_traces(TRACES):
        lines[trace.scenario_id, trace.header["engine_version"]] = trace.lines
        args = scenarios[trace.scenario_id]["args"]
        seen["asynchronous" if args["async_scheduling"] else "synchronous"] += 1
        seen[args["scheduling_policy"]] += 1
        seen["evictions"] += trace.header["evicted_blocks"]
        seen["early stops"] += sum(reason == "stop" for reason, _, _ in trace.header["outcome"].values())
        for line in trace.lines:
            seen["preemptions"] += len(line["preempted"])
            seen["several victims"] += len(line["preempted"]) > 1
            seen["hits"] += sum(hit > 0 for _, hit in line["cached"])
            seen["empty calls with work left"] += not line["scheduled"] and bool(line["running"])
    seen["version differences"] = sum(
        calls != lines[scenario, "0.33.0"]
        for (scenario, version), calls in lines.items()
        if version == "0.28.0"
    )
    assert {name: seen[name] for name in seen if seen[name] == 0} == {}
    assert seen["preemptions"] > 100
    assert seen["hits"] > 100
    assert seen["version differences"] > 5


def test_a_deeper_pipeline_makes_preempted_requests_wait_for_their_stale_output() -> None:
    """Recorded with four steps in flight; no single-GPU engine has more than two."""
    scenarios, waits = load_scenarios(DEEP_SCENARIOS), 0
    for trace in load_traces(DEEP_TRACES):
        ours, facts = replay(scenarios[trace.scenario_id], trace.versions[0], pipeline_depth=4)
        assert ours == trace.lines, trace.scenario_id
        assert facts["outcome"] == trace.header["outcome"]
        assert facts["evicted_blocks"] == trace.header["evicted_blocks"]
        waits += sum(bool(line["preempted"]) for line in ours)
    assert waits > 10


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_recordings_tell_the_policies_apart(policy: str) -> None:
    """A scheduler with the wrong policy would not pass."""
    scenarios = load_scenarios(SCENARIOS)
    wrong = {"fcfs": "priority", "priority": "fcfs"}[policy]
    differing = 0
    for scenario in scenarios.values():
        if scenario["args"]["scheduling_policy"] == policy:
            changed = {**scenario, "args": {**scenario["args"], "scheduling_policy": wrong}}
            differing += replay(scenario, "0.28.0") != replay(changed, "0.28.0")
    assert differing > 3
