"""What holds in every SGLang scenario."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engines.sglang.parity import replay
from sim.errors import EngineStuck
from tests.sglang_scenarios import draw


@settings(max_examples=60, deadline=None)
@given(number=st.integers(0, 100_000))
def test_tokens_slots_and_requests_are_conserved(number: int) -> None:
    spec = draw("property", number)
    args, requests = spec["args"], {request["id"]: request for request in spec["requests"]}
    try:
        lines, facts = replay(spec, "0.5.21")
    except EngineStuck:
        return
    at: dict[str, int] = {}
    outputs: Counter[str] = Counter()
    for line in lines:
        assert line["available"] >= 0
        assert 0 <= line["evictable"] <= args["max_total_tokens"] - line["available"]
        assert len(line["running"]) <= args["max_running_requests"]
        names = [name for name, _, _ in line["scheduled"]]
        assert len(set(names)) == len(names)
        at.update((name, hit) for name, hit in line["cached"])
        for name, start, n in line["scheduled"]:
            assert start == at[name]
            at[name] = start + n
        for name, count in line["new_tokens"]:
            assert count == outputs[name] + 1
            outputs[name] = count
    # Everything is given back, and everybody got an answer.
    assert lines[-1]["available"] + lines[-1]["evictable"] == args["max_total_tokens"]
    assert facts["outcome"].keys() == requests.keys()
    for name, (reason, count, _) in facts["outcome"].items():
        assert count == outputs[name] >= 1
        assert (reason == "stop") == (count == requests[name]["stop_after"])


@settings(max_examples=25, deadline=None)
@given(number=st.integers(0, 100_000))
def test_the_same_scenario_gives_the_same_trace(number: int) -> None:
    spec = draw("again", number)

    def told() -> object:
        try:
            return replay(spec, "0.5.21")
        except EngineStuck as stuck:
            return str(stuck)

    assert told() == told()


@settings(max_examples=40, deadline=None)
@given(number=st.integers(0, 100_000))
def test_nobody_knows_a_stop_before_it_comes(number: int) -> None:
    """Runs that differ only in when requests stop are identical up to the first stop of either."""
    spec = draw("cause", number)
    for request in spec["requests"]:
        request["prompt"] = [part for part in request["prompt"] if not isinstance(part[0], str)]

    def until_stop(shift: int) -> tuple[list[dict[str, Any]], int]:
        """Lines of a run, and the index of the first in which somebody finished."""
        requests = [
            {**r, "stop_after": min(r["max_tokens"], 1 + (i + shift) % 7)}
            for i, r in enumerate(spec["requests"])
        ]
        try:
            lines = replay({**spec, "requests": requests}, "0.5.21")[0]
        except EngineStuck:
            return [], 0
        return lines, next(i for i, line in enumerate(lines) if line["finished"])

    (one, stop_one), (two, stop_two) = until_stop(2), until_stop(5)
    first = min(stop_one, stop_two)
    assert one[:first] == two[:first]
    if one and two:
        assert [one[first][key] for key in ("scheduled", "waiting", "available")] == [
            two[first][key] for key in ("scheduled", "waiting", "available")
        ]
