"""Our SGLang scheduler against decisions recorded from the real one (0.5.21).

`sglang.*` are drawn at random, `sglang.policies.*` have less usual options, and the few of `sglang.rules.*`
were found by a search for scenarios that tell a rule from the one that comes to mind first.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.engines.sglang.parity import replay
from sim.errors import BadInput
from sim.parity import compare_files, load_scenarios, load_traces

DATA = Path(__file__).parent / "data" / "parity"
FILES = {
    name: (DATA / f"{name}.scenarios.jsonl.gz", DATA / f"{name}.traces.jsonl.gz")
    for name in ("sglang", "sglang.policies", "sglang.rules")
}


@pytest.mark.parametrize(("name", "runs"), [("sglang", 30), ("sglang.policies", 40), ("sglang.rules", 15)])
def test_every_recorded_call_is_reproduced(name: str, runs: int) -> None:
    comparisons = compare_files(*FILES[name])
    assert [c for c in comparisons if c.difference] == []
    assert len(comparisons) == runs
    assert sum(c.identical_steps for c in comparisons) == sum(c.steps for c in comparisons) > 0


def test_the_recordings_exercise_the_rules() -> None:
    seen: Counter[str] = Counter()
    for scenarios_path, traces_path in FILES.values():
        scenarios = load_scenarios(scenarios_path)
        for trace in load_traces(traces_path):
            args = scenarios[trace.scenario_id]["args"]
            seen["overlap off" if args["disable_overlap_schedule"] else "overlap on"] += 1
            seen["radix off"] += args["disable_radix_cache"]
            seen["chunking off"] += args["chunked_prefill_size"] < 0
            seen[args["schedule_policy"]] += 1
            seen[f"page {args['page_size']}"] += 1
            seen["decode interval"] += args.get("prefill_decode_interval", 0) > 0
            prioritized = args.get("enable_priority_scheduling", False)
            seen["evicted tokens"] += trace.header["evicted_tokens"]
            seen["early stops"] += sum(reason == "stop" for reason, _, _ in trace.header["outcome"].values())
            for line in trace.lines:
                seen["mixed batches"] += line["kind"] == "mixed"
                seen["preempted" if prioritized else "retracted"] += len(line["retracted"])
                seen["hits"] += sum(hit > 0 for _, hit in line["cached"])
                seen["idle calls with work left"] += line["kind"] == "idle" and bool(line["waiting"])
    assert {name: seen[name] for name in seen if seen[name] == 0} == {}
    assert {"lof", "dfs-weight", "random", "page 1", "page 4", "page 16", "chunking off"} <= seen.keys()
    assert seen["retracted"] >= 5
    assert seen["preempted"] >= 10
    assert seen["mixed batches"] > 50
    assert seen["hits"] > 100


CHANGES: dict[str, dict[str, Any]] = {
    "other policy": {"schedule_policy": "random", "seed": 5},
    "other conservativeness": {"schedule_conservativeness": 0.9},
    "overlap turned round": {"disable_overlap_schedule": None},
    "smaller chunks": {"chunked_prefill_size": 16},
    "radix cache off": {"disable_radix_cache": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_recordings_tell_other_schedulers_apart(change: str) -> None:
    """A scheduler that ignored the argument would not pass."""
    differing = 0
    for scenario in load_scenarios(FILES["sglang"][0]).values():
        args = scenario["args"]
        other = {k: not args[k] if v is None else v for k, v in CHANGES[change].items()}
        changed = {**scenario, "args": {**args, **other, "enable_mixed_chunk": False}}
        usual = {**scenario, "args": {**args, "enable_mixed_chunk": False}}
        differing += replay(usual, "0.5.21") != replay(changed, "0.5.21")
    assert differing > 5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tp_size": 2}, "unknown argument"),
        ({"page_size": None}, "argument is missing"),
        ({"schedule_policy": "hrrn"}, "not modelled"),
    ],
)
def test_a_malformed_scenario_is_refused(args: dict[str, Any], says: str) -> None:
    scenario = dict(next(iter(load_scenarios(FILES["sglang"][0]).values())))
    merged = {**scenario["args"], **args}
    scenario["args"] = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(BadInput, match=says):
        replay(scenario, "0.5.21")


def test_a_version_without_rules_is_refused() -> None:
    scenario = next(iter(load_scenarios(FILES["sglang"][0]).values()))
    with pytest.raises(BadInput, match=r"version: '0\.5\.23': .* 0\.5\.21 only"):
        replay(scenario, "0.5.23")
