import csv
import json
import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import BadInput
from sim.figures.metrics import summarise
from sim.figures.regime import Regime
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords, ServerSeries, Verdict
from sim.results_io.files import (
    read_result,
    read_results,
    result_text,
    workload_identity,
    write_requests_csv,
    write_result,
)
from sim.workload.spec import RandomDataset, WorkloadSpec

NAN = math.nan


def run(n=6, failed=1, seed=0):
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(0.3, n))
    output = rng.integers(2, 9, n)
    ok = np.arange(n) >= failed
    first = np.where(ok, due + 0.1 + rng.uniform(0, 0.2, n), NAN)
    itls = [
        rng.uniform(0.01, 0.03, k - 1) if good else np.zeros(0) for k, good in zip(output, ok, strict=True)
    ]
    records = RequestRecords(
        request_id=tuple(f"r{i}" for i in range(n)),
        scheduled=due,
        sent=due + 0.01,
        first_token=first,
        last_token=first + np.array([gaps.sum() for gaps in itls]),
        prompt_len=rng.integers(10, 99, n),
        output_len=np.where(ok, output, -1),
        cached_tokens=np.where(ok, 0, -1),
        status=tuple("ok" if good else "timeout" for good in ok),
        itls=np.concatenate(itls),
        itl_offsets=np.cumsum([0, *map(len, itls)]),
        queue=np.where(ok, 0.05, NAN),
        prefill=np.where(ok, 0.04, NAN),
        preemptions=np.where(ok, 1, -1),
    )
    spec = WorkloadSpec(
        dataset=RandomDataset(64, 8), num_prompts=n, request_rate=3.0, goodput=(("ttft", 200.0),)
    )
    return BenchResult(
        origin="predicted",
        tool="servecast predict",
        identity={"engine": "vllm", "model": "m/x", "workload": workload_identity(spec)},
        duration=9.5,
        aggregates=summarise(records, spec, 9.5),
        records=records,
        series=ServerSeries(
            np.array([0.0, 1.0]), np.array([1.0, 2.0]), np.array([0.0, NAN]), np.array([0.1, 0.2])
        ),
        server={"num_preemptions": 5, "max_kv_usage": 0.75, "prefix_cache_queries": None},
        verdict=Verdict("SUSPECT", (Note("warning", "failures", "one of them"),)),
        notes=(Note("assumed", "roofline", "ünïcode “quoted” text"),),
        extra={"regime": asdict(Regime("stable", 3.0)), "steps": [1, 2], "device_time": {"compute": 1.5}},
    )


def same(a, b):
    """Equal, where unknown equals unknown."""
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y, err_msg=f.name)
            assert x.dtype == y.dtype
        else:
            assert x == y, f.name


# -- our own files


@pytest.mark.parametrize("failed", [0, 1, 6])
def test_a_result_comes_back_as_it_was(tmp_path, failed):
    result = run(failed=failed)
    path = tmp_path / "r.json"
    write_result(result, path)
    back = read_result(path)
    same(result.records, back.records)
    same(result.series, back.series)
    for name in ("origin", "tool", "duration", "verdict", "notes", "server", "identity"):
        assert getattr(back, name) == getattr(result, name), name
    assert back.aggregates == dict(result.aggregates)
    assert result_text(back) == path.read_text()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 1000))
def test_any_run_survives_the_file(tmp_path_factory, n, failed, seed):
    result = run(n, min(failed, n), seed)
    path = tmp_path_factory.mktemp("r") / "r.json"
    write_result(result, path)
    same(result.records, read_result(path).records)


def test_identical_results_give_identical_bytes_without_nan():
    assert result_text(run()) == result_text(run())
    text = result_text(run())
    assert json.loads(text, parse_constant=lambda c: pytest.fail(c))
    assert text.endswith("}\n")
    assert text.count("\n") == 1


def test_the_file_is_vllm_bench_serves_plus_one_key():
    document = json.loads(result_text(run()))
    # Keys that vllm bench serve 0.28.0 writes with --save-result --save-detailed.
    theirs = [
        "date",
        "endpoint_type",
        "backend",
        "label",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "start_times",
        "generated_texts",
        "errors",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "rtfx",
    ]
    statistics = [
        f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p99")
    ]
    assert set(document) == {*theirs, *statistics, "servecast"}
    assert list(document)[: len(theirs)] == theirs
    assert document["model_id"] == "m/x"
    assert document["request_rate"] == 3.0
    assert document["errors"] == ["timeout", "", "", "", "", ""]
    assert document["ttfts"][0] == 0.0
    assert len(document["itls"][1]) == document["output_lens"][1] - 1
    assert (
        json.loads(result_text(replace(run(), identity={"request_rate": math.inf})))["request_rate"] == "inf"
    )


def test_vllms_reading_of_our_file_is_ours(tmp_path):
    result = run(failed=0)
    document = json.loads(result_text(result))
    del document["servecast"]
    path = tmp_path / "v.json"
    path.write_text(json.dumps(document))
    back = read_result(path)
    assert back.tool == "vllm bench serve"
    assert back.notes == ()
    for key in ("mean_ttft_ms", "p99_itl_ms", "median_e2el_ms", "completed", "output_throughput"):
        assert back.aggregates[key] == pytest.approx(result.aggregates[key])
    np.testing.assert_allclose(back.records.itls, result.records.itls)


def test_errors_are_told_in_the_servers_words_where_they_were_kept(tmp_path):
    result = run(n=4, failed=2)
    kept = replace(result, extra={**result.extra, "requests": {"detail": ["no time left", "", "", ""]}})
    path = tmp_path / "r.json"
    write_result(kept, path)
    assert json.loads(path.read_text())["errors"] == ["timeout: no time left", "timeout", "", ""]
    assert read_results(path)[0].records.status == kept.records.status


def test_an_aggregate_file_has_no_lists(tmp_path):
    write_result(run(), tmp_path / "a.json", detailed=False)
    assert "ttfts" not in json.loads((tmp_path / "a.json").read_text())
    back = read_result(tmp_path / "a.json")
    assert back.records is None
    assert back.aggregates["failed"] == 1


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(BadInput, match=r"--json: .*cannot be written"):
        write_result(run(), tmp_path / "none" / "r.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(BadInput, match="cannot be written"):
        write_result(run(), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    path = tmp_path / "kept.json"
    path.write_text("old")
    write_result(run(), path)
    assert path.read_text().startswith("{")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "kept.json"]


def test_requests_go_to_csv_with_unknowns_empty(tmp_path):
    result = run()
    write_requests_csv(result.records, tmp_path / "r.csv")
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert rows[0]["status"] == "timeout"
    assert rows[0]["ttft_ms"] == rows[0]["output_len"] == rows[0]["queue_ms"] == ""
    assert float(rows[1]["queue_ms"]) == 50.0
    assert float(rows[1]["ttft_ms"]) == pytest.approx(
        1e3 * (result.records.first_token[1] - result.records.sent[1])
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("p99_ttft_ms", "NaN", "must be finite"),
        ("mean_tpot_ms", "Infinity", "must be finite"),
        ("std_itl_ms", "-1.0", "must not be negative"),
        ("mean_e2el_ms", "1e40", "beyond what any run can have"),
        ("p99_e2el_ms", "1e9", "longer than the run"),
        ("output_throughput", "1e9", "does not fit"),
        ("total_input_tokens", "1e300", "beyond"),
        ("completed", "true", "must be a number"),
        ("median_ttft_ms", '"fast"', "must be a number"),
    ],
)
def test_figures_that_no_run_can_have_are_refused_by_name(tmp_path, key, value, words):
    document = json.loads(result_text(run()))
    document[key] = json.loads(value)
    own = tmp_path / "own.json"
    own.write_text(json.dumps(document))
    with pytest.raises(BadInput, match=rf"own\.json servecast {key}:.*{words}"):
        read_result(own)
    if value in ("true", '"fast"', "-1.0"):
        return
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(vllm_document(mean_tpot_ms=10.0, mean_e2el_ms=800.0) | {key: document[key]}))
    with pytest.raises(BadInput, match=rf"theirs\.json {key}:"):
        read_result(theirs)


def test_the_duration_and_the_columns_of_a_result_are_finite(tmp_path):
    for place in ("duration", "records"):
        document = json.loads(result_text(run()))
        if place == "duration":
            document["servecast"]["duration"] = math.inf
        else:
            document["servecast"]["records"]["sent"][2] = math.inf
        path = tmp_path / "r.json"
        path.write_text(json.dumps(document))
        with pytest.raises(BadInput, match=r"duration: inf: must be finite|sent has an infinite number"):
            read_result(path)


# -- vllm bench serve


def vllm_document(**change):
    document = {
        "backend": "vllm",
        "model_id": "m",
        "num_prompts": 3,
        "request_rate": 2.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 2.5,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 6,
        "request_throughput": 0.8,
        "request_goodput": None,
        "output_throughput": 2.4,
        "total_token_throughput": 14.4,
        "input_lens": [10, 15, 20],
        "output_lens": [4, 0, 2],
        "ttfts": [0.5, 0.0, 0.25],
        "itls": [[0.1, 0.1, 0.1], [], [0.2]],
        "start_times": [1000.0, 1000.5, 1001.0],
        "errors": ["", "TimeoutError", ""],
        "mean_ttft_ms": 375.0,
        "p90_ttft_ms": 475.0,
    }
    return {**document, **change}


def reading(tmp_path, document, name="r.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_result(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration": 0.0}, "duration: 0: cannot be, with 2 requests completed"),
        ({"median_ttft_ms": 500.0}, r"p90_ttft_ms: 475.0: lies below median_ttft_ms \(500\)"),
        ({"completed": 10**400}, "completed: is beyond"),
        ({"ttfts": [1e308, 0.0, 0.25]}, r"ttfts\[0\]: must be a finite number"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(tmp_path, change, words):
    aggregate = {k: v for k, v in vllm_document().items() if "ttfts" in change or not isinstance(v, list)}
    with pytest.raises(BadInput, match=rf"r\.json {words}"):
        reading(tmp_path, {**aggregate, **change})


def test_a_detailed_vllm_file_brings_its_requests(tmp_path):
    result = reading(tmp_path, vllm_document())
    records = result.records
    assert records.sent.tolist() == [0.0, 0.5, 1.0]
    assert records.status == ("ok", "timeout", "ok")
    assert records.first_token.tolist()[::2] == [0.5, 1.25]
    assert records.last_token.tolist()[::2] == pytest.approx([0.8, 1.45])
    assert math.isnan(records.first_token[1])
    assert records.itl_offsets.tolist() == [0, 3, 3, 4]
    assert result.aggregates["p90_ttft_ms"] == pytest.approx(475.0)
    assert result.aggregates["mean_tpot_ms"] == pytest.approx(150.0)
    assert (result.aggregates["completed"], result.aggregates["failed_timeout"]) == (2, 1)
    assert result.verdict.status == "INVALID"
    assert result.identity["model"] == "m"


def test_the_schedule_is_known_only_where_it_is(tmp_path):
    ok = {"errors": ["", "", ""], "output_lens": [4, 1, 2], "ttfts": [0.5, 0.3, 0.25], "mean_ttft_ms": 350.0}
    ok |= {"completed": 3, "failed": 0}
    uncapped = reading(tmp_path, vllm_document(**ok)).records
    # The run starts before the first request goes out: its end less its duration.
    assert uncapped.sent[0] == pytest.approx(2.5 - 1.45)
    assert uncapped.scheduled.tolist() == uncapped.sent.tolist()
    at_once = reading(tmp_path, vllm_document(**ok, request_rate="inf", max_concurrency=2)).records
    assert at_once.scheduled.tolist() == [0.0, 0.0, 0.0]
    capped = reading(tmp_path, vllm_document(**ok, max_concurrency=2))
    assert np.isnan(capped.records.scheduled).all()
    assert capped.aggregates["mean_ttft_from_schedule_ms"] is None
    newer = reading(
        tmp_path,
        vllm_document(**ok, max_concurrency=2, queue_times=[0.0, 0.25, 0.5], latencies=[0.9, 0.4, 0.5]),
    )
    assert np.diff(newer.records.scheduled).tolist() == pytest.approx([0.25, 0.25])
    assert (newer.records.last_token - newer.records.sent).tolist() == pytest.approx([0.9, 0.4, 0.5])


def test_an_aggregate_vllm_file_keeps_what_it_reports(tmp_path):
    document = {k: v for k, v in vllm_document(failed=0).items() if not isinstance(v, list)}
    result = reading(tmp_path, {**document, "median_ttft_ms": 300.0, "spec_decode_acceptance_rate": 61.5})
    assert result.records is None
    assert result.aggregates["median_ttft_ms"] == 300.0
    assert result.extra == {"reported": {"spec_decode_acceptance_rate": 61.5}}
    assert result.verdict.status == "VALID"


def test_a_reported_figure_that_its_requests_contradict_is_noted(tmp_path):
    result = reading(tmp_path, vllm_document(mean_ttft_ms=400.0))
    assert [note.subject for note in result.notes] == ["mean_ttft_ms"]


def test_appended_results_are_counted_from_one(tmp_path):
    path = tmp_path / "two.json"
    path.write_text(json.dumps(vllm_document()) + "\n" + json.dumps(vllm_document(duration=5.0)) + "\n")
    assert [r.duration for r in read_results(path)] == [2.5, 5.0]
    assert read_result(path, 2).duration == read_result(f"{path}#2").duration == 5.0
    with pytest.raises(BadInput, match="holds 2 results; choose one"):
        read_result(path)
    with pytest.raises(BadInput, match="holds 2"):
        read_result(path, 3)


AGGREGATE = {k: v for k, v in vllm_document().items() if not isinstance(v, list)}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "is empty"),
        ('{"a": 1}', "no known format.*its fields: a"),
        ("once upon a time", "no known format"),
        (json.dumps(vllm_document())[:200], "truncated"),
        (vllm_document(duration=None), "lacks the field duration"),
        (vllm_document(duration=-1), "duration: -1: must be finite and not negative"),
        (vllm_document(completed="two"), "completed: must be a number, is str"),
        (vllm_document(ttfts=[0.5]), "ttfts: has 1 entries, start_times has 3"),
        (vllm_document(output_lens=[1.5, 0, 0]), "output_lens: must hold whole numbers"),
        (vllm_document(itls=[[0.1], [], ["x"]]), r"request 2 itls\[0\]"),
        (vllm_document(ttfts=[500.0, 0.0, 250.0]), "ttfts.*wrong unit"),
        (vllm_document(mean_ttft_ms=0.375), "ttfts.*wrong unit"),
        (vllm_document(itls=[[0.1, -5.0, 0.1], [], [0.2]]), r"itls\[0\]\[1\]: -5.0: must not be negative"),
        (vllm_document(ttfts=[0.5, 0.0, -0.01], mean_ttft_ms=None), r"ttfts\[2\]: lies before"),
        (vllm_document(ttfts="abc"), "ttfts: must be a list, is str"),
        (vllm_document(completed=0, failed=3), "completed: 0: does not fit its requests, of which 2"),
        (vllm_document(failed=0), "failed: 0: does not fit its requests, of which 1"),
        (vllm_document(start_times=[-1000.0, -1000.5, -1001.0]), r"start_times\[0\]: -1000.0"),
        (vllm_document(start_times=[1000.0, 1000.5, 9001.0]), "duration: 2.5: must cover the requests"),
        ({**AGGREGATE, "mean_e2el_ms": 9e6}, "mean_e2el_ms.*longer than the run"),
        ({**AGGREGATE, "mean_tpot_ms": 100.0, "mean_e2el_ms": 0.575}, "mean_e2el_ms.*milliseconds"),
        ('{"servecast": {"format": 99}}', "format: '99'"),
        ('{"servecast": {"format": 1, "origin": "guessed"}}', "origin: 'guessed'"),
        ('{"servecast": {"format": 1, "origin": "measured"}}', "lacks the field tool"),
    ],
)
def test_bad_files_name_file_and_field(tmp_path, document, message):
    with pytest.raises(BadInput, match=message) as caught:
        reading(tmp_path, document, "bad.json")
    assert "bad.json" in str(caught.value)


def test_a_damaged_file_of_ours_is_refused(tmp_path):
    document = json.loads(result_text(run()))
    document["servecast"]["records"]["sent"] = [1.0]
    with pytest.raises(BadInput, match="sent has 1 entries for 6 requests"):
        reading(tmp_path, document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, r: d["itls"][3].__setitem__(1, -5.0), r"itls\[3\]\[1\]: -5.0: must not be negative"),
        (lambda d, r: d.update(ttfts="abc"), "ttfts: must be a list"),
        (lambda d, r: d.update(completed=0, failed=6), "completed: 0: does not fit its requests"),
        (
            lambda d, r: r.update(sent=[None if t is None else -t for t in r["sent"]]),
            r"sent\[\d\]: lies before",
        ),
        (lambda d, r: r["last_token"].__setitem__(2, 0.0), r"last_token\[2\]: lies before the first"),
    ],
)
def test_requests_of_ours_that_cannot_have_happened_are_refused(tmp_path, change, message):
    document = json.loads(result_text(run()))
    change(document, document["servecast"]["records"])
    with pytest.raises(BadInput, match=message):
        reading(tmp_path, document)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_concurrency", "many", "identity.max_concurrency: 'many': must be a whole number"),
        ("num_prompts", "100", "identity.num_prompts: '100'"),
        ("gpu_count", 0, "identity.gpu_count: '0'"),
        ("gpu_count", True, "identity.gpu_count: 'True'"),
        ("request_rate", "soon", "identity.request_rate: 'soon': must be a number above 0, or inf"),
        ("burstiness", [1.0], "identity.burstiness: must be a number"),
        ("flags", {"--tp": 2}, "identity.flags: must be a list"),
        ("flags", [["--tp", 2], "--x"], r"identity.flags\[1\]: must be"),
        ("workload", "random", "identity.workload: must be an object"),
        ("workload", {"max_concurrency": 1.5}, "identity.workload.max_concurrency: 1.5"),
        ("env", ["A=1"], "identity.env: must be an object"),
    ],
)
def test_what_a_result_says_of_itself_is_checked_before_anything_relies_on_it(tmp_path, key, value, message):
    document = json.loads(result_text(run()))
    document["servecast"]["identity"][key] = value
    with pytest.raises(BadInput, match=message):
        reading(tmp_path, document)


def test_what_a_result_does_not_say_is_unknown(tmp_path):
    document = json.loads(result_text(run()))
    document["servecast"]["identity"] |= {"flags": None, "request_rate": "inf", "workload": None, "env": None}
    assert reading(tmp_path, document).identity["request_rate"] == "inf"
