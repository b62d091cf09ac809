"""Which runs belong together, and which prediction belongs to which run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sim.build import build_scenario
from sim.cli.compare import compare as compare_command
from sim.comparison.compare import compare
from sim.comparison.identity import differences
from sim.comparison.loads import grouped, matching, named, scenario_for
from sim.comparison.text import format_comparison
from sim.errors import BadInput, NotComparable
from sim.provenance import Note
from sim.results import Verdict
from sim.results_io.files import write_result
from tests.made_results import (
    SMALL_SCENARIO,
    SUBJECT,
    aggregates_of,
    noisy,
    pair,
    poisson_load,
    records_of,
    result_of,
)


def test_runs_that_do_not_say_their_load_are_repeats_with_a_warning() -> None:
    measured = [aggregates_of({"mean_ttft_ms": value}) for value in (50.0, 51.0)]
    found = compare(aggregates_of({"mean_ttft_ms": 50.0}, "predicted"), measured)
    assert any("do not say their load" in note.text for note in found.notes)


def test_invalid_runs_and_other_work_are_refused() -> None:
    predicted, measured = pair()
    bad = replace(measured, verdict=Verdict("INVALID", (Note("warning", "failures", "half failed"),)))
    with pytest.raises(NotComparable, match="half failed"):
        compare(predicted, bad)
    less = replace(measured, aggregates={**measured.aggregates, "completed": 100})
    with pytest.raises(NotComparable, match="completed is 200 predicted but 100 measured"):
        compare(predicted, less)


def test_runs_of_other_engines_or_gpus_are_no_repeats() -> None:
    _, measured = pair()
    other = replace(measured, identity={**measured.identity, **SUBJECT, "gpu": "H200"})
    first = replace(measured, identity={**measured.identity, **SUBJECT})
    records = measured.records
    assert records is not None
    other = replace(other, records=replace(records, sent=records.sent + 1e-6))
    assert len(grouped([("a", first), ("b", other)])) == 2


def test_runs_of_one_load_are_repeats() -> None:
    (a, again), (b, later) = (
        [
            result_of(records_of(sent, noisy(0.1, 200, 2), noisy(0.02, 200, 3)), rate=rate)
            for sent in (poisson_load(200, rate, 1), poisson_load(200, rate, 2))
        ]
        for rate in (5.0, 4.0)
    )
    names = [[n for n, _ in group] for group in grouped([("1", a), ("2", b), ("3", again), ("4", later)])]
    assert names == [["1", "3"], ["2", "4"]]


def test_a_run_is_no_repeat_of_itself() -> None:
    run = pair()[1]
    with pytest.raises(BadInput, match=r"'again\.json': is the same run as once\.json"):
        grouped([("once.json", run), ("again.json", pair()[1])])
    figures = {"mean_ttft_ms": 58.0, "completed": 20}
    with pytest.raises(BadInput, match="same run"):
        grouped([("1", aggregates_of(figures)), ("2", aggregates_of(figures))])


def test_a_printed_report_of_a_run_is_that_run() -> None:
    run = pair()[1]
    report = aggregates_of({k: round(float(v), 2) for k, v in run.aggregates.items() if v is not None})
    report = replace(report, identity=run.identity)
    with pytest.raises(BadInput, match="is the same run as run"):
        grouped([("run.json", run), ("report.txt", report)])


def test_a_served_name_stands_for_the_model(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SMALL_SCENARIO.replace("--max-model-len", "--served-model-name m --max-model-len"))
    scenario = build_scenario(file=file)
    run = replace(pair()[1], identity={**pair()[1].identity, "model": "m"})
    assert named(run, scenario).identity["model"] == scenario.model.name
    assert named(pair()[1], scenario).identity == pair()[1].identity


def test_flags_of_two_predictions_are_held_against_each_other() -> None:
    sides = [{"engine_args": {"max_num_seqs": n, "block_size": 16, "seed": None}} for n in (256, 2)]
    (found,) = differences(*sides)
    assert found.told() == "max_num_seqs is 256 predicted but 2 measured"
    assert not found.fatal


def test_a_long_list_that_differs_is_told_by_its_ends() -> None:
    sides = [{"engine_args": {"cudagraph_capture_sizes": [1, 2, *range(8, n, 8)]}} for n in (513, 129)]
    (found,) = differences(*sides)
    assert found.told("in a", "in b") == (
        "cudagraph_capture_sizes is [1, 2, 8, … 512] (66 values) in a but [1, 2, 8, … 128] (18 values) in b"
    )


def test_of_two_predictions_none_is_called_measured() -> None:
    first, second = pair(rate=5.0)[0], replace(pair(rate=5.0)[1], origin="predicted")
    one, two = ({"engine_args": {"max_num_seqs": n}} for n in (256, 2))
    first = replace(first, identity={**first.identity, **one})
    second = replace(second, identity={**second.identity, **two})
    found = compare(first, second)
    text = format_comparison(found)
    assert "measured" not in text
    assert "max_num_seqs is 256 in the first but 2 in the second" in text
    assert "whatif" in text
    # One step-time model is behind both: its error is no interval of their difference.
    assert all(row.interval is None and row.noise is None for row in found.rows)
    assert all(test.equivalence is None for test in found.tests)


def test_a_prediction_is_not_compared_with_itself(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_result(pair()[0], path)
    for other in (path, tmp_path / "." / "p.json"):
        done = CliRunner().invoke(compare_command, [str(path), str(other)])
        assert isinstance(done.exception, BadInput)
        assert "is PREDICTION itself" in str(done.exception)


def test_the_prediction_of_the_same_load_is_taken() -> None:
    fast, slow = pair(rate=5.0), pair(rate=4.0)
    assert matching([fast[0], slow[0]], slow[1]) is slow[0]
    with pytest.raises(NotComparable, match="2 requests/s: no one prediction"):
        matching([fast[0], slow[0]], pair(rate=2.0)[1])


def test_a_cap_without_a_rate_is_a_closed_loop(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("serve: vllm serve Qwen/Qwen3-14B\nbench: vllm bench serve --request-rate 4\ngpu: H100\n")
    scenario = build_scenario(file=path)
    closed = scenario_for(scenario, aggregates_of({"mean_ttft_ms": 5.0}, identity={"max_concurrency": 16}))
    assert (closed.workload.request_rate, closed.workload.max_concurrency) == (math.inf, 16)
    silent = scenario_for(scenario, aggregates_of({"mean_ttft_ms": 5.0}))
    assert silent.workload.request_rate == 4
    ramp = replace(
        scenario, workload=replace(scenario.workload, request_rate=math.inf, ramp_up=("linear", 1.0, 9.0))
    )
    told = scenario_for(ramp, aggregates_of({"mean_ttft_ms": 5.0}, identity={"request_rate": 3.0}))
    assert (told.workload.request_rate, told.workload.ramp_up) == (3.0, None)


def test_a_scenario_takes_on_the_measured_load(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SMALL_SCENARIO)
    measured = result_of(records_of(np.arange(5) * 1.0, np.full(5, 0.1), np.full(5, 0.01)), rate=1.5)
    measured = replace(measured, identity={**measured.identity, "num_prompts": 5})
    spec = scenario_for(build_scenario(file=path), measured).workload
    assert (spec.request_rate, spec.max_concurrency, spec.num_prompts) == (1.5, None, 5)


@pytest.mark.parametrize(("cap", "timed"), [(None, True), (40, True), (2, False)])
def test_a_replay_keeps_the_times_unless_the_cap_made_them(
    tmp_path: Path, cap: int | None, timed: bool
) -> None:
    """Ten requests, 0.1 s apart, of 1 s each: all of them are out at once unless two may be."""
    file = tmp_path / "s.yaml"
    file.write_text(SMALL_SCENARIO)
    waits = 0.1 * np.arange(10) if cap != 2 else np.repeat(np.arange(5) * 1.0, 2)
    records = records_of(waits, np.full(10, 0.5), np.full(10, 0.05))
    measured = result_of(records, rate=10.0, cap=cap)
    scenario = scenario_for(build_scenario(file=file), measured, tmp_path / "m.json")
    assert scenario.workload.use_trace_arrivals == timed
    assert scenario.workload.max_concurrency == cap
    told = [note.text for note in scenario.notes if note.subject == "--replay"]
    assert bool(told) != timed
    if told:
        predicted = replace(pair()[0], notes=scenario.notes)
        assert told[0] in format_comparison(compare(predicted, pair()[1]))


def test_a_replay_of_a_trace_keeps_its_times(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SMALL_SCENARIO)
    records = records_of(0.1 * np.arange(10), np.full(10, 0.5), np.full(10, 0.05))
    measured = result_of(records)
    told = {"request_rate": "inf", "use_trace_arrivals": True}
    measured = replace(measured, identity={**measured.identity, "workload": told})
    flood = replace(measured, identity={**measured.identity, "workload": {"request_rate": "inf"}})
    subject = build_scenario(file=file)
    assert scenario_for(subject, measured, tmp_path / "m.json").workload.use_trace_arrivals
    assert not scenario_for(subject, flood, tmp_path / "m.json").workload.use_trace_arrivals
