"""Predicted beside measured: what decides, what is only shown, what must not be compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.comparison.compare import Comparison, MetricRow, compare, exceeds, figure, samples
from sim.comparison.identity import differences
from sim.comparison.noise import Noise
from sim.comparison.regimes import judge
from sim.comparison.text import format_comparison
from sim.errors import NotComparable
from sim.figures.metrics import latencies
from sim.provenance import Note
from sim.results import BenchResult, Verdict
from tests.made_results import SUBJECT, aggregates_of, noisy, pair, poisson_load, records_of, result_of


def row(comparison: Comparison, key: str) -> MetricRow:
    return next(r for r in comparison.rows if r.key == key)


def test_errors_that_cancel_in_e2e_do_not_hide() -> None:
    measured = aggregates_of({"mean_ttft_ms": 58000, "mean_tpot_ms": 35, "mean_e2el_ms": 80400})
    predicted = aggregates_of(
        {"mean_ttft_ms": 7250, "mean_tpot_ms": 95.7, "mean_e2el_ms": 68570}, "predicted"
    )
    found = compare(predicted, measured)
    errors = {
        r.key: round(100 * r.error, 1) for r in found.rows if r.error is not None and r.key != "duration"
    }
    assert errors == {"mean_ttft_ms": -87.5, "mean_tpot_ms": 173.4, "mean_e2el_ms": -14.7}
    assert found.worst is not None
    assert found.worst.key == "mean_tpot_ms"
    assert found.verdict(0.5) == "FAIL"
    assert any(note.subject == "cancellation" for note in found.notes)
    # 641 output tokens follow from either side's figures: they do add up.
    assert not any(note.subject == "identity" for note in found.notes)


def test_figures_of_different_requests_are_told_by_what_does_not_add_up() -> None:
    measured = aggregates_of({"mean_ttft_ms": 100, "mean_tpot_ms": 10, "mean_e2el_ms": 1090})
    predicted = aggregates_of({"mean_ttft_ms": 100, "mean_tpot_ms": 10, "mean_e2el_ms": 2090}, "predicted")
    notes = [note.text for note in compare(predicted, measured).notes if note.subject == "identity"]
    assert len(notes) == 1
    assert "200" in notes[0]
    assert "100" in notes[0]


@pytest.mark.parametrize(
    ("rate", "verdict"),
    [(3, "comparable"), (4.9, "near saturation"), (6.0, "regime mismatch"), (8, "overloaded")],
)
def test_the_regime_follows_from_both_capacities(rate: float, verdict: str) -> None:
    sides = [aggregates_of({"mean_ttft_ms": 1.0}, identity={"request_rate": rate}) for _ in range(2)]
    found = judge(sides[0], sides[1], 6.1, 5.0)
    assert found.verdict == verdict
    assert found.capacity_error == pytest.approx(0.22)
    assert found.scores("mean_ttft_ms") == (verdict == "comparable")
    assert found.scores("capacity") == (verdict != "comparable")


def overloaded(n: int = 200, rate: float = 8.0, capacity: float = 5.0) -> BenchResult:
    """A server that completes `capacity` requests a second in their order."""
    sent = np.arange(n) / rate
    first = (np.arange(n) + 1) / capacity
    return result_of(records_of(sent, first - sent, np.full(n, 0.001)), rate=rate)


def test_a_mismatch_compares_capacity_and_not_ttft() -> None:
    sent = np.arange(200) / 8.0
    easy = result_of(records_of(sent, np.full(200, 0.05), np.full(200, 0.001)), "predicted", rate=8.0)
    found = compare(easy, overloaded(), force=True)
    assert found.regimes.verdict == "regime mismatch"
    worst = found.worst
    assert worst is not None
    assert worst.key == "capacity"
    # The prediction keeps up with 8 a second, the server did 5: at least 60 % too much.
    assert worst.error == pytest.approx(0.6, abs=0.02)
    assert found.regimes.bound
    assert "at least +6" in format_comparison(found)
    assert exceeds([found], 0.05) == [f"capacity {worst.error:+.1%}"]


def test_a_mismatch_of_at_least_a_little_passes_no_gate() -> None:
    """The server did 7.9 of 8 a second for minutes; what the prediction could do nobody knows."""
    n = 4000
    sent = np.arange(n) / 8.0
    easy = result_of(records_of(sent, np.full(n, 0.05), np.full(n, 0.001)), "predicted", rate=8.0)
    found = compare(easy, overloaded(n, capacity=7.5), force=True)
    assert found.regimes.bound
    error = row(found, "capacity").error
    assert error is not None
    limit = abs(error) + 0.01
    assert found.verdict(limit) == "UNDECIDED"
    assert "UNDECIDED" in format_comparison(found, limit)
    assert "at least" in exceeds([found], limit)[0]


def test_two_overloaded_sides_are_judged_by_throughput() -> None:
    slow = replace(overloaded(capacity=4.9), origin="predicted")
    found = compare(slow, overloaded())
    assert found.regimes.verdict == "overloaded"
    deciding = {r.key for r in found.rows if r.scored}
    assert deciding == {"capacity", "request_throughput", "output_throughput", "total_token_throughput"}
    assert row(found, "capacity").error == pytest.approx(-0.02, abs=0.005)


def test_aggregates_alone_show_an_overload() -> None:
    figures = {"completed": 600.0, "request_throughput": 4.0, "mean_ttft_ms": 30e3, "mean_e2el_ms": 31e3}
    served = aggregates_of({**figures, "duration": 150.0}, identity={"request_rate": 8.0})
    calm = aggregates_of(
        {**figures, "request_throughput": 7.9, "mean_e2el_ms": 500.0}, identity={"request_rate": 8.0}
    )
    assert judge(calm, served).verdict == "regime mismatch"
    assert judge(served, served).verdict == "overloaded"
    assert judge(calm, calm).verdict == "comparable"


def test_other_model_and_engine_version_are_not_comparable() -> None:
    ours = {"inputs_sha": "aa11", "model_sha": "m1", "engine_version": "0.9.1", "seed": 42}
    theirs = {"inputs_sha": "aa11", "model_sha": "m2", "engine_version": "0.12.0", "seed": 42}
    found = differences(ours, theirs)
    assert [d.key for d in found] == ["engine_version", "model_sha"]
    assert all(d.fatal for d in found)
    predicted = aggregates_of({"mean_ttft_ms": 20.0}, "predicted", ours)
    measured = aggregates_of({"mean_ttft_ms": 2700.0}, "measured", theirs)
    with pytest.raises(NotComparable, match=r"model_sha is m1 predicted but m2 measured"):
        compare(predicted, measured)
    assert len(compare(predicted, measured, force=True).notes) >= 2


@pytest.mark.parametrize(
    ("change", "fatal"),
    [
        ({"engine": "sglang"}, True),
        ({"gpu": "A100-SXM-80GB"}, True),
        ({"model": "meta-llama/Llama-3.1-8B"}, True),
        ({"model": "served-as-this"}, False),
        ({"engine_version": "0.28.1"}, False),
        ({"engine_version": "0.28.0+cpu"}, None),
        ({"flags": [["--max-num-seqs", "64"]]}, False),
        ({"flags": [["--max-num-seqs", "256"], ["--no-enable-prefix-caching", None]]}, None),
        ({"flags": [["--enable-prefix-caching", None]]}, False),
        ({"engine_version": "0.33.0"}, True),
        ({"request_rate": 4.0}, True),
        ({"request_rate": 5.0}, None),
        ({"request_rate": 5.0, "max_concurrency": 8}, True),
        ({"model": "qwen3_14b"}, None),
        ({"gpu": "h100 sxm 80gb"}, None),
    ],
)
def test_what_must_agree(change: dict[str, object], fatal: bool | None) -> None:
    args = {"max_num_seqs": 256, "enable_prefix_caching": False}
    ours = {**SUBJECT, "engine_args": args, "workload": {"request_rate": 5.0, "max_concurrency": None}}
    found = differences(ours, {**SUBJECT, **change})
    assert [d.fatal for d in found] == ([] if fatal is None else [fatal])


def test_both_sides_follow_one_definition() -> None:
    predicted, measured = pair()
    # What a tool reports by a rule of its own is not believed where records exist.
    wrong = replace(measured, aggregates={**measured.aggregates, "mean_e2el_ms": 1.0, "p99_ttft_ms": 7.0})
    for r in compare(predicted, wrong).rows:
        assert r.error is None or abs(r.error) < 1e-9


def test_samples_are_those_of_the_metrics_module() -> None:
    _, measured = pair(n=30)
    assert measured.records is not None
    records = replace(measured.records, output_len=np.where(np.arange(30) == 3, 1, 11))
    assert len(samples(records, "tpot")) == 29
    np.testing.assert_array_equal(samples(records, "ttft"), latencies(records).ttft)


def test_a_percentile_beyond_the_sample_is_shown_and_does_not_decide() -> None:
    predicted, measured = pair(n=30)
    found = compare(predicted, measured)
    p99 = row(found, "p99_ttft_ms")
    assert not p99.scored
    assert p99.unscored == "beyond 30 samples"
    assert row(found, "p95_ttft_ms").scored


def test_the_interval_holds_the_error_and_names_its_parts() -> None:
    predicted, measured = pair(ttft=1.2)
    mean = figure(predicted, "mean_ttft_ms") or 0.0
    told = {"intervals": {"figures": {"mean_ttft_ms": [0.9 * mean, 1.1 * mean]}}}
    bare = row(compare(predicted, measured), "mean_ttft_ms").interval
    full = row(compare(replace(predicted, extra=told), measured), "mean_ttft_ms").interval
    assert bare is not None
    assert full is not None
    assert bare.low < 0.2 < bare.high
    assert full.low < bare.low < bare.high < full.high
    assert set(bare.parts) == {"sampling", "repeats"}
    # Other seeds are in the prediction's own interval already, and so is an assumed repeat noise: not twice.
    assert set(full.parts) == {"prediction", "repeats"}
    assert full.low == pytest.approx(1.2 * 0.9 - 1, abs=0.002)


def test_a_figure_that_the_prediction_gives_no_interval_has_none() -> None:
    predicted, measured = pair(ttft=1.2)
    told = {"intervals": {"figures": {"mean_ttft_ms": [100.0, 200.0]}}}
    found = compare(replace(predicted, extra=told), measured)
    assert row(found, "mean_ttft_ms").interval is not None
    assert row(found, "p90_ttft_ms").interval is None
    assert row(compare(predicted, measured), "p90_ttft_ms").interval is not None


def test_repeats_measure_the_noise_that_is_assumed_otherwise() -> None:
    predicted, measured = pair()
    alone = row(compare(predicted, measured), "mean_ttft_ms").noise
    assert alone.repeats == 0
    assert "assumed" in alone.source
    assert measured.records is not None
    later = [
        result_of(replace(measured.records, first_token=measured.records.first_token + shift), rate=5.0)
        for shift in (0.0, 0.01, 0.02)
    ]
    found = compare(predicted, later)
    noise = row(found, "mean_ttft_ms").noise
    assert noise.repeats == found.runs == 3
    mean = np.mean([figure(run, "mean_ttft_ms") for run in later])
    assert noise.share == pytest.approx(10.0 / mean, rel=0.01)
    assert row(found, "mean_ttft_ms").measured == pytest.approx(mean)


def test_the_gate_excuses_noise_only_if_it_was_measured() -> None:
    predicted, measured = pair(ttft=1.03)
    assert measured.records is not None
    shaky = [
        result_of(replace(measured.records, first_token=measured.records.first_token + shift), rate=5.0)
        for shift in (-0.005, 0.0, 0.005)
    ]
    over = exceeds([compare(predicted, shaky)], 0.02)
    assert any(text.startswith("mean_ttft_ms") for text in over)
    assert not any(
        t.startswith("mean_ttft") for t in exceeds([compare(predicted, shaky)], 0.02, allow_noise=True)
    )
    assert exceeds([compare(predicted, measured)], 0.02, allow_noise=True) == exceeds(
        [compare(predicted, measured)], 0.02
    )


def test_with_noise_allowed_the_worst_is_what_noise_does_not_explain() -> None:
    noisy_row = MetricRow("p99_itl_ms", 27.0, 100.0, 50, noise=Noise(0.5, 3, "measured"))
    clear = MetricRow("mean_ttft_ms", 77.0, 100.0, 50, noise=Noise(0.01, 3, "measured"))
    found = replace(compare(*pair()), rows=(noisy_row, clear))
    assert "worst: p99_itl_ms -73.0%, within twice its repeat noise: FAIL at 10%" in format_comparison(
        found, 0.1
    )
    told = format_comparison(found, 0.1, allow_noise=True)
    assert "worst: mean_ttft_ms -23.0%: FAIL at 10%" in told
    alone = replace(found, rows=(noisy_row,))
    told = format_comparison(alone, 0.1, allow_noise=True)
    assert "worst: p99_itl_ms -73.0%, within twice its repeat noise: PASS at 10%" in told
    assert exceeds([alone], 0.1, allow_noise=True) == []


def test_times_of_sending_that_differ_are_no_error_of_the_engine() -> None:
    """Two draws of one rate; the runs took as long as the requests needed to be sent."""
    predicted, measured = pair(rate=5.0)
    again = result_of(
        records_of(poisson_load(200, 5.0, 9), noisy(0.1, 200, 2), noisy(0.02, 200, 3)), rate=5.0
    )
    found = compare(predicted, [again, replace(again, aggregates={**again.aggregates})])
    interval = row(found, "duration").interval
    assert interval is not None
    assert interval.parts["schedule"] > 0.01
    assert interval.low <= 0.0 <= interval.high
    assert any(note.subject == "schedule" for note in found.notes)
    same = compare(predicted, measured)
    assert not any(note.subject == "schedule" for note in same.notes)
    heads = row(found, "mean_ttft_ms").interval
    assert heads is not None
    assert "schedule" not in heads.parts


def test_the_steady_window_is_the_same_on_both_sides() -> None:
    sent = np.arange(300) / 10.0
    filling = np.where(np.arange(300) < 60, 2.0, 0.1)
    measured = result_of(records_of(sent, filling, np.full(300, 0.02)), rate=10.0)
    predicted = result_of(records_of(sent, np.full(300, 0.1), np.full(300, 0.02)), "predicted", rate=10.0)
    whole, steady = compare(predicted, measured), compare(predicted, measured, window="steady")
    assert row(whole, "mean_ttft_ms").error < -0.5
    assert row(steady, "mean_ttft_ms").error == pytest.approx(0.0, abs=1e-9)
    assert row(steady, "mean_ttft_ms").n < 300
    # An interval of the whole run is as wide about the window's figure, not where it was.
    told = {"figures": {"mean_tpot_ms": [19.0, 21.0], "duration": [29.0, 31.0]}, "level": 0.9}
    slower = replace(result_of(records_of(sent, filling, np.full(300, 0.02)), "predicted", rate=10.0))
    whole_ttft = float(figure(slower, "mean_ttft_ms") or 0.0)
    told["figures"]["mean_ttft_ms"] = [0.9 * whole_ttft, 1.1 * whole_ttft]
    found = compare(replace(slower, extra={"intervals": told}), measured, window="steady")
    interval = row(found, "mean_ttft_ms").interval
    assert interval is not None
    assert interval.low > -0.2


def test_a_closed_loop_has_a_steady_window_too() -> None:
    n, cap = 300, 8
    sent = np.concatenate((np.zeros(cap), np.sort(noisy(20.0, n - cap, 4))))
    found = []
    for scheduled in (np.zeros(n), np.full(n, np.nan)):
        records = records_of(sent, noisy(0.1, n, 2), noisy(0.02, n, 3), scheduled=scheduled)
        runs = [result_of(records, origin, cap=cap) for origin in ("predicted", "measured")]
        (note,) = [n for n in compare(*runs, window="steady").notes if n.subject == "window"]
        found.append(note)
    assert [note.kind for note in found] == ["info", "info"]
    assert found[0].text.startswith("requests sent ")


def test_what_either_side_says_against_itself_is_said_again() -> None:
    predicted, measured = pair()
    carried = Note("warning", "--profile", "model A measured, B asked: what carries over is used")
    start = Note("warning", "mean TTFT", "equal output lengths in a closed loop")
    far = Verdict("SUSPECT", (Note("warning", "step time", "9 of 10 steps: beyond the calibration"),))
    lag = Verdict("SUSPECT", (Note("warning", "client_lag", "40 ms late"),))
    harmless = Note("info", "--profile", "assumed values")
    found = compare(
        replace(predicted, notes=(carried, start, harmless), verdict=far),
        [replace(measured, verdict=lag), replace(measured, verdict=lag)],
    )
    texts = [note.text for note in found.notes if note.kind == "warning"]
    assert [text.split(":")[0] for text in texts[:4]] == ["predicted"] * 3 + ["measured"]
    assert "model A measured" in texts[0]
    assert texts[3] == "measured: client_lag: 40 ms late (and 1 more of the runs)"
    assert not any("assumed values" in text for text in texts)


def test_nothing_decides_where_nothing_is_known() -> None:
    nothing = aggregates_of({"duration": 0.0})
    found = compare(replace(nothing, origin="predicted"), nothing)
    assert found.worst is None
    assert found.verdict() == "UNDECIDED"
    assert "no figure decides" in format_comparison(found)


def test_a_release_may_be_spelled_without_its_last_zero() -> None:
    ours = {"engine_version": "0.28"}
    assert not differences(ours, {"engine_version": "v0.28.0+cu130"})
    assert [d.fatal for d in differences(ours, {"engine_version": "0.28.1"})] == [False]
    assert [d.fatal for d in differences(ours, {"engine_version": "0.33.0"})] == [True]
