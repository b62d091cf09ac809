"""Evidence for a fit: what is taken as it is, and what is refused with its file and field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.evidence import (
    ClientRun,
    StepRun,
    check_together,
    check_work,
    client_run,
    per_request,
)
from calibration.from_files import evidence_files
from calibration.steps import step_run
from calibration.told import scenario_of
from sim.build import build_scenario
from sim.errors import BadInput
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords, Verdict
from sim.results_io.files import write_result
from sim.results_io.writing import workload_identity
from sim.scenario import Scenario
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset, WorkloadSpec
from tests.made_results import aggregates_of, poisson_load, records_of, result_of


def scenario(
    serve: str = "vllm serve Qwen/Qwen3-14B",
    gpu: str = "H100",
    version: str = "0.28.0",
    gpu_count: int | None = None,
) -> Scenario:
    return build_scenario(
        serve=serve,
        bench="vllm bench serve --num-prompts 20",
        gpu=gpu,
        gpu_count=gpu_count,
        engine_version=version,
    )


def measured(count: int = 20) -> BenchResult:
    made = records_of(poisson_load(count, 4.0, 0), np.full(count, 0.05), np.full(count, 0.01))
    return result_of(made, rate=4.0)


def refused(result: BenchResult, name: str = "run.json") -> str:
    with pytest.raises(BadInput) as found:
        client_run(result, name, scenario())
    text = str(found.value)
    assert name in text
    assert "\n" not in text
    return text


def test_a_result_becomes_requests_in_the_order_of_sending() -> None:
    made = measured()
    back = np.arange(len(made.records or ()))[::-1]
    assert made.records is not None
    records = made.records
    shuffled = replace(
        records,
        request_id=tuple(records.request_id[i] for i in back),
        scheduled=records.scheduled[back],
        sent=records.sent[back],
        first_token=records.first_token[back],
        last_token=records.last_token[back],
    )
    run = client_run(replace(made, records=shuffled), "run.json", scenario())
    assert run.requests is not None
    arrivals = [r.arrival for r in run.requests.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert [r.request_id for r in run.requests.requests] == [str(i) for i in range(20)]
    assert run.requests.ttft == pytest.approx(np.full(20, 0.05))
    assert run.requests.decode == pytest.approx(np.full(20, 0.1))
    # One time per token, from the request's sending.
    assert run.requests.token_times[0] == pytest.approx(0.05 + 0.01 * np.arange(11))


def test_failed_requests_are_left_out() -> None:
    made = measured()
    assert made.records is not None
    status = ("timeout", *made.records.status[1:])
    first = made.records.first_token.copy()
    first[0] = np.nan
    run = client_run(
        replace(made, records=replace(made.records, status=status, first_token=first)), "r", scenario()
    )
    assert run.requests is not None
    assert len(run.requests) == 19


def test_gaps_that_are_not_one_per_token_are_not_taken_for_token_times() -> None:
    made = measured()
    assert made.records is not None
    fewer = replace(made.records, itls=made.records.itls[:-1], itl_offsets=made.records.itl_offsets.copy())
    fewer.itl_offsets[-1] -= 1
    requests = per_request(fewer, scenario().workload, "run.json")
    assert len(requests.token_times[-1]) == 0
    assert len(requests.token_times[0]) == 11


def test_prompts_share_what_the_load_says_they_share() -> None:
    shared = build_scenario(
        serve="vllm serve Qwen/Qwen3-14B",
        bench="vllm bench serve --dataset-name random --random-input-len 68 --random-output-len 11 "
        "--random-prefix-len 32 --num-prompts 20",
        gpu="H100",
        engine_version="0.28.0",
    )
    made = measured()
    assert made.records is not None
    prompts = [r.prompt for r in per_request(made.records, shared.workload, "r").requests]
    assert len({prompt[0] for prompt in prompts}) == 1
    assert len({prompt[1:] for prompt in prompts}) == 20
    # Lengths that the load would not have made: nobody is taken to share.
    others = per_request(replace(made.records, prompt_len=np.arange(90, 110)), shared.workload, "r").requests
    assert len({r.prompt[0][0] for r in others}) == 20


def test_figures_alone_are_evidence_too() -> None:
    run = client_run(aggregates_of({"mean_ttft_ms": 60.0, "mean_tpot_ms": 9.0}), "report.txt", scenario())
    assert run.requests is None
    assert run.figures["mean_tpot_ms"] == 9.0
    with pytest.raises(BadInput, match=r"report\.txt.*holds none of mean_ttft_ms"):
        client_run(aggregates_of({"total_input_tokens": 100.0}), "report.txt", scenario())


def test_predictions_and_invalid_runs_do_not_calibrate() -> None:
    assert "is a prediction" in refused(replace(measured(), origin="predicted"))
    invalid = Verdict("INVALID", (Note("error", "client", "it was late"),))
    assert "it was late" in refused(replace(measured(), verdict=invalid))


def nothing(records: RequestRecords) -> RequestRecords:
    return replace(records, status=("timeout",) * len(records))


def no_prompts(records: RequestRecords) -> RequestRecords:
    return replace(records, prompt_len=np.zeros(len(records), dtype=np.int64))


def no_outputs(records: RequestRecords) -> RequestRecords:
    return replace(records, output_len=np.full(len(records), -1))


def early(records: RequestRecords) -> RequestRecords:
    return replace(records, first_token=records.sent - 0.1)


def backwards(records: RequestRecords) -> RequestRecords:
    return replace(records, last_token=records.first_token - 0.1)


def negative_gaps(records: RequestRecords) -> RequestRecords:
    return replace(records, itls=-records.itls)


def in_milliseconds(records: RequestRecords) -> RequestRecords:
    times = {
        name: records.sent + 1e3 * (getattr(records, name) - records.sent)
        for name in ("first_token", "last_token")
    }
    return replace(records, **times, itls=1e3 * records.itls)


def gaps_in_milliseconds(records: RequestRecords) -> RequestRecords:
    return replace(records, itls=1e3 * records.itls)


def twice_one_name(records: RequestRecords) -> RequestRecords:
    return replace(records, request_id=("0",) * len(records))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (nothing, "status"),
        (no_prompts, "input_lens/output_lens"),
        (no_outputs, "input_lens/output_lens"),
        (early, "first_token"),
        (backwards, "last_token"),
        (negative_gaps, "itls"),
        (in_milliseconds, "latencies"),
        (gaps_in_milliseconds, "itls"),
        (twice_one_name, "request_id"),
    ],
)
def test_records_that_cannot_be_right_are_refused(
    change: Callable[[RequestRecords], RequestRecords], field: str
) -> None:
    made = measured()
    assert made.records is not None
    assert f"run.json {field}" in refused(replace(made, records=change(made.records)))


def test_a_result_must_come_from_what_the_scenario_says() -> None:
    for key, value in (("engine", "sglang"), ("model", "Qwen/Qwen3-8B"), ("gpu", "A100-SXM-80GB")):
        made = measured()
        text = refused(replace(made, identity={**made.identity, key: value}))
        assert f"identity.{key}" in text


def test_a_bench_result_says_itself_what_ran() -> None:
    identity: Mapping[str, Any] = {
        "engine": "vllm",
        "engine_version": "0.28.0",
        "model": "Qwen/Qwen3-14B",
        "gpu": "H100-SXM-80GB",
        "flags": [["--max-num-seqs", "64"], ["--enable-prefix-caching", None]],
    }
    built = scenario_of(identity, "run.json")
    assert built.engine["max_num_seqs"] == 64
    assert built.gpu.name == "H100-SXM-80GB"
    with pytest.raises(BadInput, match=r"run\.json identity.*model and gpu"):
        scenario_of({"engine": "vllm"}, "run.json")


def test_a_bench_result_tells_the_lengths_that_it_sent() -> None:
    """Without them the client's defaults would be taken, which a short `--max-model-len` cannot even hold."""
    made = RandomDataset(input_len=224, output_len=96, range_ratio=0.25)
    identity: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": "0.28.0",
        "model": "Qwen/Qwen3-14B",
        "gpu": "H100-SXM-80GB",
        "flags": [["--max-model-len", "1024"]],
        "workload": workload_identity(WorkloadSpec(dataset=made, num_prompts=40, seed=7)),
    }
    built = scenario_of(identity, "run.json")
    assert (built.workload.dataset, built.workload.num_prompts, built.seed) == (made, 40, 7)
    repeated = PrefixRepetitionDataset(prefix_len=64, num_prefixes=3)
    identity["workload"] = workload_identity(WorkloadSpec(dataset=repeated))
    assert scenario_of(identity, "run.json").workload.dataset == repeated
    identity["workload"]["dataset"]["prefix_len"] = "long"
    with pytest.raises(BadInput, match=r"run\.json identity\.workload\.dataset\.prefix_len.*long"):
        scenario_of(identity, "run.json")
    identity["workload"]["dataset"] = {"suffix": 3}
    with pytest.raises(BadInput, match=r"run\.json identity\.workload\.dataset\.suffix"):
        scenario_of(identity, "run.json")


def runs_of(*scenarios: Scenario) -> list[ClientRun]:
    return [ClientRun(f"{i}.json", s, {"mean_tpot_ms": 10.0}) for i, s in enumerate(scenarios)]


def test_one_fit_takes_one_engine_model_and_gpu() -> None:
    plain = scenario()
    check_together(runs_of(plain, scenario("vllm serve Qwen/Qwen3-14B --max-num-seqs 8")))
    with pytest.raises(BadInput, match="no measurement"):
        check_together([])
    for other, what in (
        (scenario("python -m sglang.launch_server --model-path Qwen/Qwen3-14B", version="0.5.21"), "engine"),
        (scenario(version="0.33.0"), "engine version"),
        (scenario("vllm serve Qwen/Qwen3-8B"), "model"),
        (scenario("vllm serve Qwen/Qwen3-14B --quantization fp8"), "quantisation"),
        (scenario(gpu="A100-80GB"), "GPU"),
        (scenario("vllm serve Qwen/Qwen3-14B -tp 2", gpu_count=2), "tensor-parallel size"),
    ):
        with pytest.raises(BadInput, match=rf"1\.json {what}.*0\.json has"):
            check_together(runs_of(plain, other))


def steps_file(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def step(
    number: int, t: float, scheduled: dict[str, int], computed: dict[str, int], **more: Any
) -> dict[str, Any]:
    return {
        "ev": "step",
        "step": number,
        "t": t,
        "dt_ms": 5.0,
        "scheduled": scheduled,
        "computed": computed,
        **more,
    }


def test_steps_of_the_probe_become_shapes(tmp_path: Path) -> None:
    path = steps_file(
        tmp_path / "steps.jsonl",
        [
            {"ev": "add", "id": "a", "prompt_len": 100},
            step(0, 1.0, {"a": 60}, {"a": 0}, end=1.006),
            step(1, 1.01, {"a": 40}, {"a": 60}, end=1.016),
            step(2, 1.02, {"a": 1}, {"a": 100}, end=1.026),
        ],
    )
    run = step_run(path, scenario())
    assert [s.num_prefill_tokens for s in run.shapes] == [60, 40, 0]
    assert [s.num_sampled for s in run.shapes] == [0, 1, 1]
    assert [s.num_decode_seqs for s in run.shapes] == [0, 0, 1]
    assert run.shapes[2].decode_context == 101
    assert run.seconds == pytest.approx([0.005] * 3)
    # A step lasts until its end, and began its own time before.
    assert run.start == pytest.approx([1.001, 1.011, 1.021])


def test_a_step_that_may_contain_an_idle_pause_is_left_out(tmp_path: Path) -> None:
    lines = [
        step(0, 1.0, {"a": 10}, {"a": 0}),
        step(1, 1.01, {"a": 1}, {"a": 10}),
        step(2, 9.0, {"b": 10}, {"b": 0}),
        step(3, 9.01, {"b": 1}, {"b": 10}),
    ]
    assert len(step_run(steps_file(tmp_path / "s.jsonl", lines), scenario()).shapes) == 2


def test_a_last_line_cut_short_is_no_fault(tmp_path: Path) -> None:
    path = steps_file(tmp_path / "s.jsonl", [step(0, 1.0, {"a": 3}, {}, end=1.005)])
    path.write_text(path.read_text() + '{"ev": "st')
    assert len(step_run(path, scenario()).shapes) == 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"ev": "step", "t": 0.0, "scheduled": {}, "computed": {}}], "line 1 dt_ms"),
        ([step(0, 2.0, {"a": 3}, {}, end=2.1), step(1, 1.0, {"a": 1}, {}, end=1.1)], "line 2 t"),
        ([step(0, 1.0, {"a": 3}, {}) | {"dt_ms": -1.0}], "line 1 dt_ms"),
        ([step(0, 1.0, {"a": 3}, {}) | {"dt_ms": 1e12}], "line 1 dt_ms"),
        ([step(0, 1.0, {}, {})], "holds no timed step"),
        ([step(0, 1.0, {"a": 3}, {}) | {"dt_ms": None}], "line 1 dt_ms"),
        ([step(0, 1.0, {"a": 3}, {}) | {"t": "x"}], "line 1 t"),
        ([step(0, 1.0, {"a": 3}, {}) | {"scheduled": ["a"]}], "line 1 scheduled"),
        ([step(0, 1.0, {"a": "b"}, {})], "line 1 scheduled a"),
        ([{"ev": "add", "prompt_len": 5}], "line 1 id"),
    ],
)
def test_step_files_that_cannot_be_right_are_refused(
    lines: list[dict[str, Any]], told: str, tmp_path: Path
) -> None:
    path = steps_file(tmp_path / "s.jsonl", lines)
    with pytest.raises(BadInput) as found:
        step_run(path, scenario())
    assert str(path) in str(found.value)
    assert told in str(found.value)


def test_runs_of_another_version_or_size_are_not_fitted_under_a_scenario(tmp_path: Path) -> None:
    path, subject = tmp_path / "run.json", scenario()
    for told, says in (
        ({"engine_version": "0.33.0"}, "--engine-version 0.33.0"),
        ({"gpu_count": 8}, "has 1"),
    ):
        made = measured()
        write_result(replace(made, identity={**made.identity, **told}), path)
        with pytest.raises(BadInput, match=says):
            evidence_files([path], subject)


def test_figures_of_other_lengths_are_not_fitted_under_a_scenario() -> None:
    subject = scenario()
    figures = {"completed": 20, "total_input_tokens": 20 * 1024, "total_output_tokens": 20 * 128}
    check_work(ClientRun("r.json", subject, figures))
    longer = ClientRun("r.json", subject, {**figures, "total_input_tokens": 20 * 4096})
    with pytest.raises(BadInput, match=r"r.json total_input_tokens.*4096 tokens a request.*makes 1024"):
        check_work(longer)


def test_damage_within_a_step_file_is_named_by_line(tmp_path: Path) -> None:
    path = steps_file(tmp_path / "s.jsonl", [step(0, 1.0, {"a": 3}, {}, end=1.005)])
    path.write_text("no json\n" + path.read_text())
    with pytest.raises(BadInput, match=r"s\.jsonl line 1"):
        step_run(path, scenario())
    path.write_text("[1]\n")
    with pytest.raises(BadInput, match="must be a JSON object"):
        step_run(path, scenario())


def test_files_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    subject = scenario()
    result = tmp_path / "run.json"
    write_result(measured(), result)
    steps = steps_file(
        tmp_path / "run.steps.jsonl",
        [step(i, 1.0 + 0.01 * i, {"a": 1}, {"a": i}, end=1.005 + 0.01 * i) for i in range(4)],
    )
    found = evidence_files([steps, result], subject)
    assert [type(item) for item in found] == [ClientRun, StepRun]
    # Without a scenario, and with a result that does not say what ran, nothing is guessed.
    with pytest.raises(BadInput, match="does not say its"):
        evidence_files([steps, result])
