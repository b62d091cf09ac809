"""What a gate makes of a comparison: repeats that disagree, figures that cannot tell, failures, doubts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sim.cli.compare import compare as compare_command
from sim.comparison.compare import BLIND, compare, exceeds
from sim.comparison.regimes import judge, state_of
from sim.comparison.text import comparison_json, format_comparison, undecided
from sim.errors import NotComparable
from sim.provenance import Note
from sim.results import BenchResult, Verdict
from sim.results_io.files import write_result
from tests.made_results import SUBJECT, aggregates_of, noisy, pair, poisson_load, records_of, result_of


def gated(tmp_path: Path, predicted: BenchResult, measured: BenchResult, *more: str) -> tuple[int, str]:
    write_result(predicted, tmp_path / "p.json")
    write_result(measured, tmp_path / "m.json")
    words = [str(tmp_path / "p.json"), str(tmp_path / "m.json"), *more]
    done = CliRunner().invoke(compare_command, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def lossy(failed: int, n: int = 200, extra: int = 0) -> BenchResult:
    """An aggregate run of `n` requests, of which some failed, and `extra` more than that."""
    done = n - failed
    figures = {"completed": done, "failed": failed + extra, "mean_ttft_ms": 50.0, "mean_tpot_ms": 10.0}
    return aggregates_of({**figures, "total_input_tokens": 100 * done, "total_output_tokens": 10 * done})


def test_a_gate_does_not_pass_what_no_figure_decides(tmp_path: Path) -> None:
    nothing = aggregates_of({"duration": 0.0})
    out = tmp_path / "c.json"
    sides = replace(nothing, origin="predicted"), nothing
    code, text = gated(tmp_path, *sides, "--fail-above", "5%", "--json", str(out))
    assert code == 1
    assert "worst: no figure decides: UNDECIDED at 5%" in text
    assert "undecided at 5%: load unknown: no figure decides" in text
    (told,) = json.loads(out.read_text())
    assert (told["verdict"], told["doubt"]) == ("UNDECIDED", "no figure decides")
    assert gated(tmp_path, *sides)[0] == 0


def test_throughput_alone_passes_nothing_near_a_capacity_that_only_the_prediction_tells() -> None:
    predicted, measured = pair(ttft=3.0)
    rate = judge(predicted, measured).rate
    assert rate is not None
    found = compare(predicted, measured, capacities=(1.05 * rate, None))
    assert found.regimes.verdict == "near saturation"
    assert exceeds([found], 0.05) == []
    assert found.verdict(0.05) == "UNDECIDED"
    assert undecided([found], 0.05) == [f"5 requests/s: {BLIND}"]
    assert BLIND in format_comparison(found, 0.05)
    assert comparison_json(found, 0.05)["doubt"] == BLIND
    both = compare(predicted, measured, capacities=(1.05 * rate, 1.06 * rate))
    assert both.regimes.verdict == "near saturation"
    assert both.verdict(0.05) == "PASS"
    assert undecided([both], 0.05) == []
    # What is off all the same is off.
    wrong = compare(predicted, measured, capacities=(1.05 * rate, 1.2 * rate))
    assert (wrong.verdict(0.05), undecided([wrong], 0.05)) == ("FAIL", [])


def test_repeats_are_judged_by_what_lets_the_least_pass_in_any_order() -> None:
    n = 200
    sent = np.arange(n) / 8.0
    predicted = result_of(records_of(sent, np.full(n, 0.05), np.full(n, 0.001)), "predicted", rate=8.0)
    calm = result_of(records_of(sent, np.full(n, 0.05), np.full(n, 0.0011)), rate=8.0)
    late = result_of(records_of(sent, (np.arange(n) + 1) / 5.0 - sent, np.full(n, 0.001)), rate=8.0)
    found = [compare(predicted, runs) for runs in ([calm, late], [late, calm])]
    assert {c.regimes.verdict for c in found} == {"regime mismatch"}
    assert found[0].regimes == found[1].regimes
    assert {c.verdict(0.05) for c in found} == {"FAIL"}
    told = [note.text for note in found[0].notes if note.subject == "load"]
    assert told == [
        "the runs do not agree on the load: 1 comparable, 1 regime mismatch; the verdict that lets the least "
        "pass is taken"
    ]
    assert not any(note.subject == "load" for note in compare(predicted, calm).notes)


def test_distributions_and_parts_say_of_which_run_they_are() -> None:
    predicted, measured = pair()
    again = result_of(
        records_of(poisson_load(200, 5.0, 9), noisy(0.1, 200, 2), noisy(0.02, 200, 3)), rate=5.0
    )
    assert "of the first" not in format_comparison(compare(predicted, measured, name="a.json"))
    found = compare(predicted, [measured, again], name="a.json")
    assert "  of the first of the 2 runs (a.json):\n  TTFT" in format_comparison(found)
    assert comparison_json(found)["first_run"] == "a.json"


def test_the_smallest_sample_of_the_repeats_says_which_percentiles_decide() -> None:
    predicted, measured = pair(n=120)
    few = {f"n_{metric}": 50 for metric in ("ttft", "tpot", "e2el")}
    figures = {**measured.aggregates, **few, "request_throughput": 5.0}
    short = replace(measured, records=None, aggregates=figures)
    for runs in ([measured, short], [short, measured]):
        rows = {row.key: row for row in compare(predicted, runs).rows}
        assert rows["p99_ttft_ms"].unscored == "beyond 50 samples"


@pytest.mark.parametrize(
    ("measured", "refused"),
    [
        (lossy(0), ""),
        (lossy(1), ""),
        (lossy(2), ""),
        (lossy(3), "completed is 200 predicted but 197 measured"),
        (lossy(0, extra=1), r"requests sent \(completed and failed\) is 200 predicted but 201 measured"),
        (lossy(0, n=199), "completed is 200 predicted but 199 measured"),
    ],
)
def test_a_request_that_failed_is_no_other_work(measured: BenchResult, refused: str) -> None:
    predicted = replace(lossy(0), origin="predicted")
    if refused:
        with pytest.raises(NotComparable, match=refused):
            compare(predicted, measured)
        return
    notes = [note.text for note in compare(predicted, measured).notes if note.subject == "failures"]
    failed = measured.aggregates["failed"]
    said = f"measured: failures: {failed} of 200 requests failed; the figures are those of the others"
    assert notes == ([said] if failed else [])


def test_warnings_of_a_measured_run_and_an_invalid_prediction_are_told() -> None:
    predicted, measured = pair()
    doubt = Note("warning", "mean_ttft_ms", "the file reports 400, its requests give 375")
    aside = Note("info", "load", "told nowhere")
    bad = Verdict("INVALID", (Note("warning", "failures", "30 of 200 requests failed"),))
    runs = [replace(measured, notes=notes) for notes in ((doubt, aside), (doubt,))]
    found = compare(replace(predicted, verdict=bad), runs)
    texts = [note.text for note in found.notes if note.kind == "warning"]
    assert texts[0] == "predicted: INVALID: failures: 30 of 200 requests failed"
    assert f"measured: mean_ttft_ms: {doubt.text} (and 1 more of the runs)" in texts
    assert not any("told nowhere" in note.text for note in found.notes)


def test_a_metric_of_another_definition_does_not_decide() -> None:
    figures = {"mean_ttft_ms": 50.0, "mean_tpot_ms": 10.0}
    measured = aggregates_of({**figures, "mean_tpot_ms": 20.0})
    measured = replace(measured, notes=(Note("warning", "tpot", "weights requests by their tokens"),))
    found = compare(aggregates_of(figures, "predicted"), measured)
    rows = {row.key: row for row in found.rows}
    assert rows["mean_tpot_ms"].unscored == "another definition"
    assert rows["mean_ttft_ms"].scored
    assert found.verdict(0.05) == "PASS"


def test_an_invalid_run_is_refused_without_a_reason_as_well() -> None:
    predicted, measured = pair()
    with pytest.raises(NotComparable, match=r"the measured run is INVALID$"):
        compare(predicted, replace(measured, verdict=Verdict("INVALID")))


def test_flags_of_any_of_the_runs_are_held_against_the_prediction() -> None:
    predicted, measured = pair()
    ours = {**SUBJECT, "engine_args": {"max_num_seqs": 256}}
    runs = [
        replace(measured, identity={**measured.identity, **SUBJECT, "flags": [["--max-num-seqs", n]]})
        for n in ("256", "64")
    ]
    for order in (runs, runs[::-1]):
        found = compare(replace(predicted, identity={**predicted.identity, **ours}), order)
        assert [d.told() for d in found.differs] == ["max_num_seqs is 256 predicted but 64 measured"]
        assert any(note.subject == "max_num_seqs" for note in found.notes)


def test_of_a_ramp_behind_a_cap_figures_do_not_tell_the_regime() -> None:
    ramp = {"request_rate": "inf", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    figures = {"completed": 100, "mean_ttft_ms": 50.0}
    assert state_of(aggregates_of(figures, identity={**ramp, "max_concurrency": 8})).state == "unknown"
    assert state_of(aggregates_of(figures, identity={"max_concurrency": 8})).state == "closed-loop"
    records = pair()[1].records
    assert records is not None
    assert state_of(result_of(records, identity=ramp)).state == "stable"
