"""The comparison itself: what counts as identical, what it prints, and how it refuses unusable files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.parity import load_traces, main, replay

SCENARIO: dict[str, Any] = {
    "id": "two",
    "engine": "vllm",
    "engine_version": "0.28.0",
    "args": {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_gpu_blocks": 20,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduling_policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "scheduler_reserve_full_isl": True,
        "watermark": 0.0,
        "max_model_len": 64,
        "enable_chunked_prefill": True,
    },
    "requests": [
        {
            "id": "a",
            "arrival_step": 0,
            "prompt": [[1, 9]],
            "max_tokens": 3,
            "stop_after": None,
            "priority": 0,
        },
        {"id": "b", "arrival_step": 1, "prompt": [[1, 9]], "max_tokens": 3, "stop_after": 2, "priority": 0},
    ],
}


def _trace(**header: Any) -> list[dict[str, Any]]:
    lines, facts = replay(SCENARIO, "0.28.0")
    first = {"scenario": "two", "engine_version": "0.28.0", "steps": len(lines), **facts, **header}
    return [first, *lines]


def _write(path: Path, objects: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(item) + "\n" for item in objects)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.fixture
def scenarios(tmp_path: Path) -> str:
    return _write(tmp_path / "scenarios.jsonl.gz", [SCENARIO])


def test_identical_files(scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = _write(tmp_path / "traces.jsonl", _trace())
    assert main([scenarios, traces]) == 0
    assert capsys.readouterr().out == "identical steps 4/4, scenarios 1/1 (runs 1/1)\n"


def test_same_on_makes_a_trace_the_expectation_of_further_versions(
    scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = _write(tmp_path / "traces.jsonl", _trace(same_on=["0.33.0"]))
    assert main([scenarios, traces]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0.28.0: identical steps 4/4, scenarios 1/1",
        "0.33.0: identical steps 4/4, scenarios 1/1",
        "identical steps 8/8, scenarios 1/1 (runs 2/2)",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "step",
        "scheduled",
        "kind",
        "preempted",
        "new_tokens",
        "finished",
        "running",
        "waiting",
        "free_blocks",
        "cached",
    ],
)
def test_a_difference_in_any_key_is_found_and_shown(
    key: str, scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace()
    trace[3][key] = "something else"
    assert main([scenarios, _write(tmp_path / "traces.jsonl", trace)]) == 1
    out = capsys.readouterr().out
    assert f'{key}:\n    engine: "something else"' in out
    assert out.endswith("identical steps 2/4, scenarios 0/1 (runs 0/1)\n")


def test_differences_in_the_totals_are_found(
    scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(evicted_blocks=7)
    trace[0]["outcome"] = {**trace[0]["outcome"], "b": ["length", 2, 0]}
    assert main([scenarios, _write(tmp_path / "traces.jsonl", trace)]) == 1
    out = capsys.readouterr().out
    assert '{"b": ["length", 2, 0]}' in out
    assert '"a"' not in out  # the request that agrees is left out
    assert "evicted_blocks:\n    engine: 7" in out


@pytest.mark.parametrize("change", [1, -1])
def test_one_call_more_or_fewer_is_a_difference(
    change: int, scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(steps=4 + change)
    trace = trace[:change] if change < 0 else [*trace, {**trace[-1], "step": 4}]
    assert main([scenarios, _write(tmp_path / "traces.jsonl", trace)]) == 1
    assert f"the engine made {4 + change} scheduling calls, we made 4" in capsys.readouterr().out


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_unusable_trace_files(scenarios: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(name: str, objects: list[dict[str, Any]]) -> str:
        return _refused([scenarios, _write(tmp_path / name, objects)], capsys)

    assert "3 of 4 lines: truncated?" in refusal("t1", _trace()[:-1])
    assert "does not begin with a header" in refusal("t2", _trace()[1:])
    assert "holds no trace" in refusal("t3", [])
    assert "holds no scenario three" in refusal("t4", _trace(scenario="three"))
    assert "header without" in refusal("t5", [{"scenario": "two", "error": "crashed"}])
    assert "cannot be read" in _refused([scenarios, str(tmp_path / "nowhere")], capsys)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in _trace()).encode())[:-20])
    assert "cannot be read" in _refused([scenarios, str(cut)], capsys)
    (tmp_path / "half.jsonl").write_text('{"scenario": "tw')
    assert "not JSON lines, or truncated" in _refused([scenarios, str(tmp_path / "half.jsonl")], capsys)


def test_unusable_scenario_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = _write(tmp_path / "traces.jsonl", _trace())

    def refusal(*objects: dict[str, Any]) -> str:
        return _refused([_write(tmp_path / "s", list(objects)), traces], capsys)

    without = {**SCENARIO["args"]}
    del without["watermark"]
    twice = [SCENARIO["requests"][0], SCENARIO["requests"][0]]
    quoting = [{**SCENARIO["requests"][0], "prompt": [["out:nobody", 3]]}]
    assert "holds no scenario" in refusal()
    assert "repeats the scenario two" in refusal(SCENARIO, SCENARIO)
    assert "holds no trace of the scenario three" in refusal(SCENARIO, {**SCENARIO, "id": "three"})
    assert "unknown engine; known: vllm, sglang" in refusal({**SCENARIO, "engine": "tgi"})
    assert "'watermark': argument is missing" in refusal({**SCENARIO, "args": without})
    assert "'colour': unknown argument" in refusal({**SCENARIO, "args": {**SCENARIO["args"], "colour": 1}})
    assert "requests: Field required" in refusal({k: v for k, v in SCENARIO.items() if k != "requests"})
    assert "two requests have the same id" in refusal({**SCENARIO, "requests": twice})
    assert "quotes 'out:nobody'" in refusal({**SCENARIO, "requests": quoting})


def test_gzip_members_may_be_concatenated(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl.gz"
    parts = [_trace(), _trace(engine_version="0.33.0")]
    path.write_bytes(
        b"".join(gzip.compress("\n".join(map(json.dumps, part)).encode() + b"\n") for part in parts)
    )
    assert [trace.versions for trace in load_traces(path)] == [["0.28.0"], ["0.33.0"]]
