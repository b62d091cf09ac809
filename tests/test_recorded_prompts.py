"""What recorded prompts shared: by their requests' ids, with a template, and where it cannot be known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.evidence import client_run
from calibration.prompts import recorded_prompts
from sim.build import build_scenario
from sim.results import RequestRecords
from sim.scenario import Scenario
from sim.workload.generate import generate
from tests.made_results import records_of, result_of

SERVE = "vllm serve Qwen/Qwen3-14B --enable-prefix-caching"
REPEATED = (
    "--dataset-name prefix_repetition --prefix-repetition-prefix-len 64 --prefix-repetition-suffix-len 16 "
    "--prefix-repetition-num-prefixes 4 --prefix-repetition-output-len 11"
)
SHARED = "--dataset-name random --random-input-len 60 --random-range-ratio 0.5 --random-prefix-len 40"


def asked(dataset: str) -> Scenario:
    bench = f"vllm bench serve {dataset} --num-prompts 20 --max-concurrency 4"
    return build_scenario(serve=SERVE, bench=bench, gpu="H100", engine_version="0.28.0")


def recorded(scenario: Scenario, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> RequestRecords:
    """What a client that writes requests down as they end has of the scenario's load."""
    made = generate(scenario.workload)
    records = records_of(0.1 * np.arange(20), np.full(20, 0.05), np.full(20, 0.01))
    lengths = np.array([made[i].prompt_len for i in order])
    return replace(records, request_id=tuple(made[i].request_id for i in order), prompt_len=lengths)


@pytest.mark.parametrize("dataset", [REPEATED, SHARED])
def test_prompts_are_told_by_their_requests_whatever_their_order(dataset: str) -> None:
    scenario = asked(dataset)
    order = np.random.default_rng(0).permutation(20)
    prompts, unshared = recorded_prompts(recorded(scenario, order), scenario.workload)
    made = generate(scenario.workload)
    assert unshared is None
    assert prompts == [made[i].prompt for i in order]


def test_a_template_and_a_tokenizer_change_the_end_of_a_prompt() -> None:
    scenario = asked(REPEATED)
    records = recorded(scenario, np.arange(20))
    counted = records.prompt_len + np.where(np.arange(20) % 2, 39, -3)
    prompts, unshared = recorded_prompts(replace(records, prompt_len=counted), scenario.workload)
    assert unshared is None
    assert [sum(length for _, length in prompt) for prompt in prompts] == counted.tolist()
    made = generate(scenario.workload)
    assert [prompt[0] for prompt in prompts] == [request.prompt[0] for request in made]
    assert len({prompt[-1][0] for prompt in prompts}) == 20  # no template is found in the cache


def test_a_failed_request_need_not_tell_its_length() -> None:
    scenario = asked(REPEATED)
    records = recorded(scenario, np.arange(20))
    unknown = np.where(np.arange(20) == 3, -1, records.prompt_len)
    prompts, unshared = recorded_prompts(replace(records, prompt_len=unknown), scenario.workload)
    assert (unshared, len(prompts)) == (None, 20)


def test_what_cannot_be_known_is_said() -> None:
    scenario = asked(REPEATED)
    records = recorded(scenario, np.arange(20))
    others = replace(records, prompt_len=records.prompt_len + 5000)
    prompts, unshared = recorded_prompts(others, scenario.workload)
    assert all(len(prompt) == 1 for prompt in prompts)
    assert unshared is not None
    assert "makes prompts of other lengths" in unshared
    alone = asked("--dataset-name random --random-input-len 80")
    assert recorded_prompts(others, alone.workload)[1] is None  # nobody shared anything
    hits = replace(others, cached_tokens=np.full(20, 16))
    _, unshared = recorded_prompts(hits, alone.workload)
    assert unshared is not None
    assert "found some of them in its prefix cache" in unshared
    run = client_run(result_of(others, cap=4), "run.json", scenario)
    assert [note.subject for note in run.notes] == ["prefixes"]
