"""What must hold in every run of the vLLM scheduler, whatever is asked of it."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.base import StepPlan
from sim.engines.vllm.parity import replay
from sim.engines.vllm.scheduler import VllmScheduler, VllmSchedulerConfig
from sim.request import Request
from tests.vllm_scenarios import draw

NUMBERS = st.integers(0, 10**6)
VERSIONS = st.sampled_from(("0.28.0", "0.33.0"))


def _expected_outcome(spec: dict[str, Any], max_model_len: int) -> list[Any]:
    limit = min(spec["max_tokens"], max_model_len - sum(length for _, length in spec["prompt"]))
    stop = spec["stop_after"]
    return ["stop", stop] if stop is not None and stop <= limit else ["length", limit]


@given(NUMBERS, VERSIONS, st.sampled_from((None, 3)))
@settings(max_examples=60, deadline=None)
def test_every_request_is_served_within_every_limit(number: int, version: str, depth: int | None) -> None:
    scenario = draw("invariants", number)
    args = scenario["args"]
    lines, facts = replay(scenario, version, depth if args["async_scheduling"] else None)
    for spec in scenario["requests"]:
        assert facts["outcome"][spec["id"]][:2] == _expected_outcome(spec, args["max_model_len"])
    preempted = [victim for line in lines for victim in line["preempted"]]
    position: dict[str, int] = {}
    for line in lines:
        position.update(dict.fromkeys(line["preempted"], -1))
        position.update(line["cached"])
        for name, start, count in line["scheduled"]:
            assert position[name] == start
            assert count > 0
            position[name] = start + count
        assert sum(count for _, _, count in line["scheduled"]) <= args["max_num_batched_tokens"]
        assert len(line["running"]) <= args["max_num_seqs"]
        assert not (line["preempted"] and line["cached"])
        assert not set(line["running"]) & set(line["waiting"])
        held = sum(-(-position[name] // args["block_size"]) for name in line["running"])
        assert 0 <= line["free_blocks"] <= args["num_gpu_blocks"] - 1
        if not args["enable_prefix_caching"]:
            assert line["free_blocks"] == args["num_gpu_blocks"] - 1 - held
            assert all(hit == 0 for _, hit in line["cached"])
        else:
            assert line["free_blocks"] >= args["num_gpu_blocks"] - 1 - held
    assert lines[-1]["free_blocks"] == args["num_gpu_blocks"] - 1
    assert {name: preempted.count(name) for name in preempted} == {
        name: times for name, (_, _, times) in facts["outcome"].items() if times
    }


@given(NUMBERS, VERSIONS)
@settings(max_examples=20, deadline=None)
def test_the_same_scenario_gives_the_same_run(number: int, version: str) -> None:
    assert replay(draw("again", number), version) == replay(draw("again", number), version)


@given(NUMBERS, VERSIONS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_stop_to_come_changes_nothing_that_was_decided_before(
    number: int, version: str, data: st.DataObject
) -> None:
    scenario = draw("causal", number)
    specs = scenario["requests"]
    quoted = {key.removeprefix("out:") for spec in specs for key, _ in spec["prompt"] if isinstance(key, str)}
    free = [place for place, spec in enumerate(specs) if spec["id"] not in quoted]
    place = data.draw(st.sampled_from(free))
    early = data.draw(st.integers(1, specs[place]["max_tokens"]))
    later = data.draw(st.none() | st.integers(early, specs[place]["max_tokens"]))
    runs = []
    for stop in (early, later):
        changed = [dict(spec) for spec in specs]
        changed[place]["stop_after"] = stop
        runs.append(replay({**scenario, "requests": changed}, version)[0])
    for one, other in zip(*runs, strict=False):
        assert {**one, "finished": 0, "new_tokens": 0} == {**other, "finished": 0, "new_tokens": 0}
        if [specs[place]["id"], early] in one["new_tokens"]:
            break


class Sealed:
    """A request that lets nobody see how long its output will be before it is there."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.sampled = 0
        for name in ("request_id", "prompt", "max_tokens", "arrival", "priority", "session", "prompt_len"):
            setattr(self, name, getattr(request, name))

    def samples_stop(self, num_output_tokens: int) -> bool:
        assert num_output_tokens == self.sampled + 1
        self.sampled += 1
        return self._request.samples_stop(num_output_tokens)


@pytest.mark.parametrize("number", range(20))
def test_a_scheduler_never_sees_where_an_output_ends(number: int) -> None:
    scenario = draw("sealed", number)
    scheduler = VllmScheduler(VllmSchedulerConfig(**scenario["args"]))
    sealed = []
    for spec in scenario["requests"]:
        prompt = tuple((key, length) for key, length in spec["prompt"])
        request = Request(spec["id"], prompt, spec["max_tokens"], 0.0, spec["stop_after"], spec["priority"])
        sealed.append(Sealed(request))
        scheduler.add_request(cast(Request, sealed[-1]))
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work() or in_flight:
        if scheduler.has_work():
            in_flight.append(scheduler.schedule())
            if len(in_flight) < scheduler.pipeline_depth and in_flight[-1].scheduled:
                continue
        scheduler.update(in_flight.popleft())
    for spec, request in zip(scenario["requests"], sealed, strict=True):
        assert request.sampled == _expected_outcome(spec, scenario["args"]["max_model_len"])[1]


@pytest.mark.parametrize("number", range(40))
def test_counting_blocks_changes_no_decision(number: int) -> None:
    scenario = draw("counting", number)
    args = {**scenario["args"], "scheduling_policy": "fcfs"}
    runs = []
    for shares in (True, False):
        scheduler = VllmScheduler(VllmSchedulerConfig(**args), shares_prefixes=shares)
        in_flight: deque[StepPlan] = deque()
        seen: list[Any] = []
        for place, spec in enumerate(scenario["requests"]):
            length = sum(length for _, length in spec["prompt"])
            scheduler.add_request(Request(spec["id"], ((place, length),), spec["max_tokens"]))
        while scheduler.has_work() or in_flight:
            if scheduler.has_work():
                plan = scheduler.schedule()
                pool = scheduler.block_pool
                seen.append((plan.scheduled, plan.preempted, plan.cached, pool.num_free_blocks))
                seen.append(pool.num_evicted_blocks)
                in_flight.append(plan)
                if plan.scheduled and len(in_flight) < scheduler.pipeline_depth:
                    continue
            seen.append(scheduler.update(in_flight.popleft()))
        runs.append([str(entry) for entry in seen])
    assert runs[0] == runs[1]
