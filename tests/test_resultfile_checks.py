"""What a result file may not hold, of what a comparison would trip over later."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sim.comparison.compare import compare
from sim.comparison.facts import fact
from sim.errors import BadInput
from sim.results import BenchResult
from sim.results_io.files import read_result, result_text
from tests.made_results import pair
from tests.test_resultfile import vllm_document

THREE = {"errors": ["", "", ""], "output_lens": [4, 1, 2], "completed": 3, "failed": 0, "mean_ttft_ms": None}


def reading(tmp_path: Path, document: dict[str, Any]) -> BenchResult:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    return read_result(path)


def own(extra: dict[str, Any] | None = None, workload: dict[str, Any] | None = None) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result_text(pair()[0]))
    document["servecast"]["extra"] |= extra or {}
    document["servecast"]["identity"]["workload"] = workload or {}
    return document


@pytest.mark.parametrize("key", ["latencies", "queue_times"])
@pytest.mark.parametrize("values", [[0.9], [0.9, 0.4, 0.5, 0.6], []])
def test_times_of_other_requests_than_there_are_are_refused(
    tmp_path: Path, key: str, values: list[float]
) -> None:
    with pytest.raises(BadInput, match=rf"r\.json {key}: has {len(values)} entries, start_times has 3"):
        reading(tmp_path, vllm_document(**THREE, **{key: values}))


def test_times_that_are_null_are_not_told(tmp_path: Path) -> None:
    document = vllm_document(**THREE, latencies=None, queue_times=None)
    assert reading(tmp_path, document).records is not None


def test_a_ramp_of_the_client_is_no_burst(tmp_path: Path) -> None:
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    records = reading(tmp_path, vllm_document(**THREE, request_rate="inf", **ramp)).records
    assert records is not None
    assert records.scheduled.tolist() == records.sent.tolist()


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ({"mean_ttft_ms": ["a", "b"]}, "figures.mean_ttft_ms end: must be a number, is str"),
        ({"mean_ttft_ms": [90.0, 0.0]}, "figures.mean_ttft_ms: '90 to 0': the low end must not lie above"),
        ({"mean_ttft_ms": [-1.0, 90.0]}, "must be finite and not negative"),
        ({"mean_ttft_ms": 90.0}, r"figures.mean_ttft_ms: must be \[low, high\]"),
        ([1.0], "extra.intervals: must be an object with the object figures"),
    ],
)
def test_intervals_that_are_none_are_refused(tmp_path: Path, intervals: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        reading(tmp_path, own(extra={"intervals": {"figures": intervals, "level": 0.9, "from": "a test"}}))


def test_an_interval_may_be_unknown(tmp_path: Path) -> None:
    told = {"mean_ttft_ms": None, "mean_tpot_ms": [None, 30.0], "mean_e2el_ms": [0.0, 0.0]}
    document = own(extra={"intervals": {"figures": told, "level": 0.9, "from": "a test"}})
    assert compare(reading(tmp_path, document), pair()[1]).worst is not None


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"rate_scale": 0.0}, "identity.workload.rate_scale: 0.0: must be a number above 0"),
        ({"rate_scale": "inf"}, "identity.workload.rate_scale: 'inf'"),
        ({"ramp_up": ["linear", 1.0]}, "identity.workload.ramp_up: must be linear or exponential, with"),
        ({"ramp_up": ["linear", 1.0, "fast"]}, "identity.workload.ramp_up: 'fast': must be a number"),
        ({"ramp_up_strategy": "linear"}, "identity.workload.ramp_up_strategy: 'linear': must be"),
        ({"seed": 1.5}, "identity.workload.seed: 1.5: must be a whole number"),
        ({"seed": -1}, "identity.workload.seed: '-1'"),
    ],
)
def test_what_a_load_cannot_be_is_refused_by_name(
    tmp_path: Path, workload: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        reading(tmp_path, own(workload=workload))


def test_a_burstiness_without_bound_stands_as_text_and_is_a_number(tmp_path: Path) -> None:
    document = own(workload={"burstiness": "inf", "num_prompts": 100.0})
    document["servecast"]["identity"].pop("burstiness", None)
    identity = reading(tmp_path, document).identity
    assert fact(identity, "burstiness") == math.inf
    assert fact(identity, "num_prompts") == 100
