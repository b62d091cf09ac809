"""Requests that a server turns away for their length: they fail, and the others are served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.build import build_scenario
from sim.results import BenchResult
from sim.simulate import simulate

ROOM = 8192  # tokens of the pool
MODEL = "Qwen/Qwen2.5-7B-Instruct"
SERVE = {
    "sglang": f"python -m sglang.launch_server --model-path {MODEL} --max-total-tokens {ROOM}",
    "vllm": f"vllm serve {MODEL} --max-model-len -1 --num-gpu-blocks-override {ROOM // 16}",
}


def predicted(engine: str, prompts: list[int], folder: Path) -> BenchResult:
    path = folder / "load.jsonl"
    rows = [{"input_length": prompt, "output_length": 16} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench = f"vllm bench serve --dataset-name lengths --dataset-path {path} --request-rate 4"
    return simulate(build_scenario(serve=SERVE[engine], bench=bench, gpu="H100")).result


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_prompt_that_the_pool_cannot_hold_fails_alone(engine: str, tmp_path: Path) -> None:
    result = predicted(engine, [500, ROOM + 100, 700], tmp_path)
    assert (result.aggregates["completed"], result.aggregates["failed"]) == (2, 1)
    (note,) = [n for n in result.notes if "count as failed" in n.text]
    assert note.text.startswith("1 of 3 requests ask for more than 8,")


def test_sglang_cuts_the_output_to_its_pool_and_leaves_a_prompt_seven_tokens(tmp_path: Path) -> None:
    result = predicted("sglang", [ROOM - 7, ROOM - 6], tmp_path)
    assert (result.aggregates["completed"], result.aggregates["failed"]) == (1, 1)
