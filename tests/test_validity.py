"""Verdicts: each reason on its own, and what a clean run looks like."""

import math

import numpy as np
import pytest

from bench.overhead import Overhead, achieved_rate, judge_client
from bench.rows import Row, records_of
from bench.validity import Evidence, intended_prefix_hits, judge, shares_prefixes
from sim.figures.metrics import summarise
from sim.provenance import Note
from sim.request import Request
from sim.results import BenchResult, Verdict
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

CLOSED = WorkloadSpec(RandomDataset(100, 5), num_prompts=200, max_concurrency=4)


def row(i: int, sent: float, ttft: float = 0.1, status: str = "ok", **more) -> Row:
    """A request of 100 prompt and 5 output tokens, 20 ms each."""
    first = sent + ttft
    values = {
        "request_id": str(i),
        "scheduled": 0.0,
        "asked_prompt": 100,
        "asked_output": 5,
        "status": status,
        "sent": sent,
        "first_token": first,
        "last_token": first + 0.08,
        "ended": first + 0.081,
        "prompt_tokens": 100,
        "output_tokens": 5,
        "cached_tokens": 0,
        "itl_source": "usage_deltas",
        "gaps": (0.02,) * 4,
    }
    return Row(**{**values, **more})


def steady(count: int = 200) -> list[Row]:
    return [row(i, 0.05 * i) for i in range(count)]


def result(rows: list[Row], spec: WorkloadSpec = CLOSED, **extra) -> BenchResult:
    records = records_of(rows)
    duration = max((r.ended or r.sent or 0.0) for r in rows)
    extra.setdefault(
        "requests",
        {name: [getattr(r, name) for r in rows] for name in ("asked_prompt", "asked_output")},
    )
    return BenchResult(
        "measured", "servecast bench", {}, duration, summarise(records, spec, duration), records, extra=extra
    )


def verdict(
    rows: list[Row], spec: WorkloadSpec = CLOSED, evidence: Evidence | None = None, **extra
) -> Verdict:
    return judge(result(rows, spec, **extra), spec, evidence or Evidence()).verdict


def subjects(found: Verdict) -> set[str]:
    return {note.subject for note in found.reasons}


def test_a_clean_run_is_valid():
    assert verdict(steady()) == Verdict("VALID", ())


# Failures


def test_a_few_failures_are_suspect_and_more_are_invalid():
    rows = steady()
    rows[7] = row(7, 0.35, status="server_error", first_token=None, last_token=None)
    assert verdict(rows).status == "SUSPECT"
    for i in range(20, 23):
        rows[i] = row(i, 0.05 * i, status="timeout", first_token=None, last_token=None)
    found = verdict(rows)
    assert found.status == "INVALID"
    assert "1 server_error, 3 timeout" in found.reasons[0].text
    assert "at least as slow" in found.reasons[0].text


def test_failures_are_told_in_the_servers_words_without_secrets():
    rows = steady()
    for i in (3, 4, 5):
        said = "400: max_tokens is too\nlarge" if i != 5 else "another"
        rows[i] = row(i, 0.05 * i, status="server_error", first_token=None, last_token=None, detail=said)
    said = "Authorization: Bearer abc.def, key sk-0123456789abcdef " + "x" * 500
    rows[9] = row(9, 0.45, status="refused", first_token=None, last_token=None, detail=said)
    rows[10] = row(10, 0.5, status="timeout", first_token=None, last_token=None)
    text = verdict(rows, requests={"detail": [r.detail for r in rows]}).reasons[0].text
    assert 'server_error: "400: max_tokens is too large" (2 times)' in text
    assert "another" not in text
    assert "abc.def" not in text
    assert "0123456789abcdef" not in text
    assert len(text) < 600
    assert "timeout:" not in text


def test_the_gate_for_failures_can_be_lowered():
    rows = steady(20)
    rows[3] = row(3, 0.15, status="refused", first_token=None, last_token=None)
    assert verdict(rows).status == "INVALID"
    assert verdict(rows, evidence=Evidence(min_success=0.9)).status == "SUSPECT"


def test_failures_enter_no_latency():
    rows = [row(0, 0.0, 0.2), row(1, 0.1, 0.4)]
    rows.append(row(2, 0.2, 99.0, status="server_error", output_tokens=2, gaps=(5.0,)))
    figures = result(rows).aggregates
    assert figures["mean_ttft_ms"] == pytest.approx(300.0)
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (2, 1, 10)
    assert figures["success_rate"] == pytest.approx(2 / 3)
    assert figures["n_itl"] == 8


# Lengths


def test_one_prompt_far_off_is_suspect_though_the_mean_is_fine():
    rows = steady()
    rows[5] = row(5, 0.25, prompt_tokens=108)
    found = verdict(rows)
    assert found.status == "SUSPECT"
    assert subjects(found) == {"prompt_lengths"}


def test_a_small_mean_drift_is_suspect():
    assert subjects(verdict([row(i, 0.05 * i, prompt_tokens=102) for i in range(200)])) == {"prompt_lengths"}
    assert verdict([row(i, 0.05 * i, prompt_tokens=101) for i in range(200)]).status == "VALID"


def test_a_known_template_is_no_drift():
    rows = [row(i, 0.05 * i, prompt_tokens=112) for i in range(200)]
    assert verdict(rows, template_overhead=12).status == "VALID"


def test_outputs_must_be_as_long_as_asked_if_eos_is_ignored():
    rows = [row(i, 0.05 * i, output_tokens=4, gaps=(0.02,) * 3) for i in range(200)]
    assert subjects(verdict(rows)) == {"output_lengths"}
    may_stop = WorkloadSpec(RandomDataset(100, 5), num_prompts=200, max_concurrency=4, ignore_eos=False)
    assert verdict(rows, may_stop).status == "VALID"


def test_an_uncounted_output_is_no_drift():
    rows = [row(i, 0.05 * i, prompt_tokens=None) for i in range(200)]
    assert verdict(rows).status == "VALID"


# Prefix cache


def test_hits_that_nobody_intended_invalidate():
    found = verdict(steady(), evidence=Evidence(prefix_queries=20_000, prefix_hits=18_500))
    assert found.status == "INVALID"
    assert subjects(found) == {"warm_cache"}
    assert "92.5%" in found.reasons[0].text


def test_a_trace_of_hits_is_tolerated():
    assert verdict(steady(), evidence=Evidence(prefix_queries=20_000, prefix_hits=199)).status == "VALID"


def test_hits_are_taken_from_the_answers_where_counters_are_unknown():
    rows = [row(i, 0.05 * i, cached_tokens=16) for i in range(200)]
    assert subjects(verdict(rows)) == {"warm_cache"}


def test_intended_hits_are_fine_and_more_than_those_are_not():
    spec = WorkloadSpec(RandomDataset(50, 5, prefix_len=50), num_prompts=200, max_concurrency=4)
    evidence = Evidence(prefix_queries=20_000, prefix_hits=9_900)
    assert verdict(steady(), spec, evidence, intended_prefix_hits=9_950).status == "VALID"
    evidence = Evidence(prefix_queries=20_000, prefix_hits=19_900)
    assert verdict(steady(), spec, evidence, intended_prefix_hits=9_950).status == "INVALID"


def test_template_tokens_may_be_cached():
    rows = [row(i, 0.05 * i, prompt_tokens=116, cached_tokens=16) for i in range(200)]
    assert verdict(rows, template_overhead=16).status == "VALID"


def test_intended_hits_follow_shared_beginnings():
    def prompts(*segments: tuple[tuple[str, int], ...]) -> int:
        return intended_prefix_hits([Request(str(i), s, 1) for i, s in enumerate(segments)])

    assert prompts((("a", 9),), (("b", 9),)) == 0
    assert prompts((("p", 9), ("a", 5)), (("p", 9), ("b", 5))) == 9
    assert prompts((("p", 9), ("a", 5)), (("p", 6), ("a", 5))) == 6
    assert prompts((("p", 4), ("a", 5)), (("p", 4), ("a", 7)), (("p", 4), ("a", 6))) == 9 + 10
    assert prompts((("a", 5), ("p", 9)), (("b", 5), ("p", 9))) == 0


def test_which_loads_share_prefixes():
    assert not shares_prefixes(CLOSED)
    assert shares_prefixes(WorkloadSpec(PrefixRepetitionDataset()))
    assert not shares_prefixes(WorkloadSpec(FileDataset("sharegpt", "x.json")))
    assert shares_prefixes(WorkloadSpec(FileDataset("mooncake", "x.jsonl")))


# Server and run


@pytest.mark.parametrize(
    ("evidence", "grade", "subject"),
    [
        (Evidence(engine_died="killed by signal 9"), "INVALID", "engine_died"),
        (Evidence(engine_restarted=True), "INVALID", "engine_restarted"),
        (Evidence(interrupted=True), "INVALID", "interrupted"),
        (Evidence(warmup_failures=("refused: no",)), "SUSPECT", "warmups"),
        (Evidence(server_notes=(Note("warning", "x", "odd"),)), "SUSPECT", "x"),
        (Evidence(server_notes=(Note("invalid", "x", "bad"),)), "INVALID", "x"),
    ],
)
def test_what_happened_outside(evidence, grade, subject):
    found = verdict(steady(), evidence=evidence)
    assert (found.status, subjects(found)) == (grade, {subject})


def test_a_cold_start_shows_as_an_early_silence():
    rows = [row(i, 0.0, 8.0 + 0.1 * i) for i in range(4)] + [row(i, 8.4 + 0.05 * i) for i in range(4, 200)]
    found = verdict(rows)
    assert (found.status, subjects(found)) == ("SUSPECT", {"cold_start"})
    assert "8.00 s" in found.reasons[0].text


def test_a_burst_that_queues_is_no_cold_start():
    rows = [row(i, 0.0, 1.0 + 0.001 * i) for i in range(8)] + [row(i, 1.1 + 0.05 * i) for i in range(8, 200)]
    assert "cold_start" not in subjects(verdict(rows))


def test_percentiles_beyond_the_sample_are_suspect():
    found = verdict(steady(99))
    assert (found.status, subjects(found)) == ("SUSPECT", {"small_sample"})
    assert "at least 100" in found.reasons[0].text
    median = WorkloadSpec(RandomDataset(100, 5), num_prompts=5, max_concurrency=4, percentiles=(50.0,))
    assert verdict(steady(5), median).status == "VALID"


def test_a_load_above_capacity_is_not_steady():
    spec = WorkloadSpec(RandomDataset(100, 5), num_prompts=300, request_rate=20.0)
    rows = [row(i, 0.05 * i, 0.1 + 0.03 * i, scheduled=0.05 * i) for i in range(300)]
    assert "saturated" in subjects(verdict(rows, spec))
    rows = [row(i, 0.05 * i, 0.1, scheduled=0.05 * i) for i in range(300)]
    assert verdict(rows, spec).status == "VALID"


def test_a_peak_below_the_average_is_never_believed():
    clean = result(steady())
    figures = {**clean.aggregates, "max_output_tokens_per_s": 1.0}
    odd = BenchResult("measured", "x", {}, clean.duration, figures, clean.records, extra=clean.extra)
    assert subjects(judge(odd, CLOSED, Evidence()).verdict) == {"peak"}


def test_peak_counts_tokens_not_messages():
    bundles = [
        row(0, 0.0, 0.05, last_token=9.95, ended=10.1, output_tokens=400, asked_output=400, gaps=(0.1,) * 99)
    ]
    figures = result(bundles).aggregates
    assert figures["max_output_tokens_per_s"] == pytest.approx(40.0)
    assert figures["max_output_tokens_per_s"] >= figures["output_throughput"]


def test_verdicts_only_get_worse_and_say_a_thing_once():
    first = judge(result(steady(50)), CLOSED, Evidence())
    again = judge(first, CLOSED, Evidence(engine_restarted=True))
    assert again.verdict.status == "INVALID"
    assert [note.subject for note in again.verdict.reasons] == ["engine_restarted", "small_sample"]
    assert judge(again, CLOSED, Evidence()).verdict.status == "INVALID"


def test_without_records_nothing_can_be_vouched_for():
    bare = BenchResult("measured", "x", {}, 1.0, {})
    assert judge(bare, CLOSED, Evidence()).verdict.status == "SUSPECT"


# The client's own part


def overhead(slip: float = 0.0, cpu: float = 0.2) -> Overhead:
    return Overhead(0.0, 0.0, 0.0, cpu, 1, (slip,) * 100)


def test_sends_that_drift_are_the_clients_fault():
    scheduled = [0.02 * i for i in range(30)]
    sent = [max(s, 0.05 * i) for i, s in enumerate(scheduled)]
    found = judge_client(scheduled, sent, [s + 0.5 for s in sent], median_ttft=0.1)
    assert found.cause == "client"
    assert achieved_rate(sent) == pytest.approx(20.0)
    assert achieved_rate(scheduled) == pytest.approx(50.0)


def test_a_cap_under_an_open_loop_hides_what_users_wait():
    scheduled = [0.1 * i for i in range(8)]
    sent = [0.5 * i for i in range(8)]
    ended = [s + 0.5 for s in sent]
    found = judge_client(scheduled, sent, ended, median_ttft=0.49, overhead=overhead())
    assert found.cause == "cap"
    assert "74% of the latency" in found.notes[-1].text
    assert found.notes[0].subject == "client_limited"


def test_a_closed_loop_has_no_schedule_to_miss():
    sent = [0.5 * i for i in range(8)]
    ended = [s + 0.5 for s in sent]
    found = judge_client([0.0] * 8, sent, ended, median_ttft=0.1, overhead=overhead(), is_open_loop=False)
    assert found.cause is None


@pytest.mark.parametrize(
    ("slip", "median_ttft", "cause"),
    [(0.009, 0.01, None), (0.011, 0.01, "client"), (0.040, 1.0, None), (0.060, 1.0, "client")],
)
def test_how_late_is_too_late(slip, median_ttft, cause):
    times = [0.1 * i for i in range(100)]
    ended = [t + 1.0 for t in times]
    got = judge_client(times, times, ended, median_ttft=median_ttft, overhead=overhead(slip))
    assert got.cause == cause


def test_a_busy_loop_is_client_limited():
    times = [0.1 * i for i in range(100)]
    got = judge_client(times, times, times, median_ttft=None, overhead=overhead(cpu=0.97))
    assert got.cause == "client"


@pytest.mark.parametrize(("cause", "grade"), [("client", "INVALID"), ("cap", "SUSPECT")])
def test_grades_of_client_limits(cause, grade):
    times = [0.1 * i for i in range(200)]
    limit = judge_client(times, times, [t + 1 for t in times], median_ttft=0.1, overhead=overhead(0.05))
    assert limit.cause == "client"
    limit = type(limit)(cause, limit.notes)
    assert verdict(steady(), evidence=Evidence(client_limit=limit)).status == grade


def test_overheads_of_processes_add_up_to_the_worse():
    both = Overhead(0.1, 0.2, 0.3, 0.5, 1, (0.1,)).merged(Overhead(0.0, 0.4, 0.2, 0.6, 1, (0.2,)))
    assert both == Overhead(0.1, 0.4, 0.3, 0.6, 2, (0.1, 0.2))


def test_unknown_is_nan_or_minus_one_in_records():
    records = records_of([Row("a", 0.0, 10, 5), row(1, 0.5)])
    assert math.isnan(records.sent[0])
    assert math.isnan(records.first_token[0])
    assert records.prompt_len.tolist() == [10, 100]
    assert records.output_len.tolist() == [-1, 5]
    assert records.status == ("unfinished", "ok")
    assert records.itl_offsets.tolist() == [0, 0, 4]
    assert np.all(records.preemptions == -1)
