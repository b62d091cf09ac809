"""The load generator against a fake server: who is sent when, what is reported, what is left out."""

import asyncio
import json
import os
import signal
import threading

import pytest

from bench.driver import Outcome, Plan, drive
from bench.loadgen import (
    Progress,
    Target,
    Timeouts,
    expected_streams,
    fits_context,
    run_load,
    shapes,
    steady_span,
)
from bench.rows import Row, read_rows, records_of, write_rows
from bench.workers import WorkerLost, processes_for, run_workers, split
from sim.errors import BadInput
from sim.request import Request
from sim.workload.spec import RandomDataset, WorkloadSpec
from tests.fakes.fault_server import FaultServer, fault_server_thread


def spec(count: int = 20, **options) -> WorkloadSpec:
    options.setdefault("percentiles", (50.0,))
    return WorkloadSpec(RandomDataset(16, 4), num_prompts=count, **options)


def load(workload: WorkloadSpec, server=None, seed: int = 1, endpoint: str = "/v1/completions", **options):
    limits = Timeouts(5.0, 20.0, 20.0, 30.0)
    with fault_server_thread(**(server or {})) as url:
        return run_load(Target(url, "m", endpoint, timeouts=limits), workload, seed=seed, **options)


def drive_here(plan: Plan, server: FaultServer) -> Outcome:
    outcome = Outcome()

    async def run() -> None:
        async with server:
            await drive(Target(server.url, "m"), plan, outcome)

    asyncio.run(run())
    return outcome


# What comes out


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_closed_loop_on_every_endpoint(endpoint):
    got = load(spec(max_concurrency=4), {"interval": 0.002}, endpoint=endpoint)
    assert got.origin == "measured"
    assert got.records is not None
    assert got.records.status == ("ok",) * 20
    assert set(got.records.output_len.tolist()) == {4}
    assert set(got.records.prompt_len.tolist()) == {24 if "chat" in endpoint else 16}
    assert got.aggregates["total_output_tokens"] == 80
    assert got.aggregates["n_itl"] == 60
    assert got.extra["template_overhead"] == (8 if "chat" in endpoint else None)
    assert got.aggregates["max_concurrent_requests"] <= 4
    assert not {"prompt_lengths", "output_lengths", "failures", "warm_cache"} & {
        note.subject for note in got.verdict.reasons
    }


def test_a_result_is_json_ready_and_holds_no_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    got = load(spec(6, max_concurrency=3), {"fault": "echoes_key", "every": 2})
    assert got.records is not None
    assert got.records.status.count("refused") >= 2
    text = json.dumps([got.extra, dict(got.identity), dict(got.aggregates)])
    assert "sk-very-secret" not in text + repr(got)
    assert got.verdict.status == "INVALID"


def test_open_loop_times_are_those_of_the_plan():
    got = load(spec(30, request_rate=200.0, burstiness=float("inf")))
    records = got.records
    assert records is not None
    assert records.scheduled[-1] == pytest.approx(30 / 200)
    assert (records.sent >= records.scheduled).all()
    assert (records.first_token >= records.sent).all()
    figures = got.aggregates
    assert figures["mean_ttft_from_schedule_ms"] >= figures["mean_ttft_ms"]


def test_a_cap_under_a_rate_shows_in_the_figures_from_schedule():
    got = load(
        spec(12, request_rate=200.0, burstiness=float("inf"), max_concurrency=1), {"first_delay": 0.02}
    )
    figures = got.aggregates
    assert figures["mean_e2el_from_schedule_ms"] > 2 * figures["mean_e2el_ms"]
    assert got.extra["client_limited"] is not None
    assert "client_limited" in {note.subject for note in got.verdict.reasons}


def test_the_same_seed_sends_the_same_and_another_sends_none_of_it():
    def prompts(seed: int) -> list[tuple[int, ...]]:
        server = FaultServer()

        async def run() -> None:
            async with server:
                await asyncio.to_thread(
                    run_load, Target(server.url, "m"), spec(8, max_concurrency=1), seed=seed
                )

        asyncio.run(run())
        return [tuple(asked.body["prompt"]) for asked in server.asked]

    first = prompts(1)
    assert first == prompts(1)
    assert len(set(first)) == 8
    assert not {p[:4] for p in first} & {p[:4] for p in prompts(2)}


def test_failures_are_counted_and_do_not_end_the_run():
    got = load(spec(20, max_concurrency=2), {"fault": "error_after_tokens", "every": 5})
    assert got.records is not None
    assert got.records.status.count("server_error") == 4
    assert got.records.status.count("ok") == 16
    assert (got.aggregates["completed"], got.aggregates["failed"]) == (16, 4)
    assert got.verdict.status == "INVALID"
    details = got.extra["requests"]["detail"]
    assert sum("engine died" in detail for detail in details) == 4


def test_a_warm_cache_is_noticed():
    got = load(spec(10, max_concurrency=2), {"cached_tokens": 8})
    assert got.verdict.status == "INVALID"
    assert "warm_cache" in {note.subject for note in got.verdict.reasons}


def test_gaps_of_bundles_are_not_called_itl():
    got = load(spec(6, max_concurrency=2), {"tokens_per_chunk": 2, "fault": "none"})
    assert not [note for note in got.notes if note.subject == "itl"]
    with fault_server_thread(tokens_per_chunk=2) as url:
        target = Target(url, "m", continuous_usage=False)
        got = run_load(target, spec(6, max_concurrency=2), seed=1)
    assert [note for note in got.notes if note.subject == "itl"]
    assert got.records is not None
    assert set(got.records.output_len.tolist()) == {4}


def test_progress_is_told():
    told = []
    load(spec(40, max_concurrency=2), {"interval": 0.02}, on_progress=told.append)
    assert told
    assert told[-1].planned == 40
    assert all(p.done <= p.sent <= 40 and p.in_flight <= 2 for p in told)


# What does not go out


def test_what_cannot_fit_is_refused_before_anything_is_sent():
    server = FaultServer(max_model_len=19)

    async def run() -> None:
        async with server:
            await asyncio.to_thread(run_load, Target(server.url, "m"), spec(4), seed=1)

    with pytest.raises(BadInput, match="at most 3 output tokens"):
        asyncio.run(run())
    assert server.asked == []


def test_the_chat_template_counts_against_the_context():
    with pytest.raises(BadInput, match="16 \\+ 8 template \\+ 4 output"):
        load(spec(4), {"max_model_len": 27}, endpoint="/v1/chat/completions")
    load(spec(4), {"max_model_len": 28}, endpoint="/v1/chat/completions")


@pytest.mark.parametrize(
    ("user", "overhead", "out", "limit", "expected"),
    [(500, 12, 20, 512, (False, 0)), (500, 12, 20, 540, (True, 28)), (500, 12, 20, 530, (False, 18))],
)
def test_fits_context(user, overhead, out, limit, expected):
    assert fits_context(user, overhead, out, limit) == expected


def test_duration_ends_the_sending():
    got = load(spec(1000, max_concurrency=2, duration=0.3), {"first_delay": 0.02})
    assert got.records is not None
    assert 0 < len(got.records) <= 2 * (0.3 / 0.02 + 1)
    assert set(got.records.status) == {"ok"}


def test_a_stop_from_outside_keeps_what_was_measured():
    stop = threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.done > 3:
            stop.set()

    got = load(spec(1000, max_concurrency=2), {"first_delay": 0.05}, stop=stop, on_progress=on_progress)
    assert got.records is not None
    assert 3 < got.records.status.count("ok") < 1000
    assert got.verdict.status == "INVALID"
    assert "interrupted" in {note.subject for note in got.verdict.reasons}


def test_ctrl_c_keeps_what_was_measured():
    def on_progress(progress: Progress) -> None:
        if progress.done > 3:
            os.kill(os.getpid(), signal.SIGINT)

    got = load(spec(1000, max_concurrency=3), {"first_delay": 0.05}, on_progress=on_progress)
    assert got.records is not None
    assert 3 < got.records.status.count("ok") < 1000
    assert got.records.status.count("unfinished") <= 3
    assert got.extra["interrupted"] is True
    assert got.verdict.status == "INVALID"


# Warm-ups


def request(i: int, prompt: int, out: int) -> Request:
    return Request(str(i), ((i, prompt),), out)


def test_warmups_cover_the_shapes():
    load_of = [request(i, 10 * (i % 3 + 1), 5) for i in range(9)]
    assert [w.prompt_len for w in shapes(load_of, 3)] == [10, 20, 30]
    assert [w.prompt_len for w in shapes(load_of, 2)] == [10, 30]
    assert [w.prompt_len for w in shapes(load_of, 5)] == [10, 20, 30, 10, 20]
    assert shapes(load_of, 0) == []
    assert shapes([], 3) == []


def test_warmups_come_first_and_share_no_tokens_with_the_run():
    server = FaultServer()
    requests = [request(i, 16, 2) for i in range(6)]
    outcome = drive_here(Plan(requests, warmups=shapes(requests, 4), seed=5, max_concurrency=2), server)
    prompts = [tuple(asked.body["prompt"]) for asked in server.asked]
    assert len(prompts) == 10
    assert len(outcome.rows) == 6
    assert not {p[:4] for p in prompts[:4]} & {p[:4] for p in prompts[4:]}
    assert server.in_flight_peak <= 2


def test_failed_warmups_are_told():
    requests = [request(0, 8, 2)]
    outcome = drive_here(Plan(requests, warmups=shapes(requests, 2)), FaultServer("http_500"))
    assert len(outcome.warmup_failures) == 2
    assert "500" in outcome.warmup_failures[0]


# Steady state


def test_a_closed_loop_is_steady_once_requests_replace_each_other():
    rows = [Row(str(i), 0.0, 1, 1, sent=float(i // 2)) for i in range(8)]
    assert steady_span(records_of(rows), spec(8, max_concurrency=2)) == (1.0, 3.0)
    assert steady_span(records_of(rows), spec(8)) is None


# Several processes


def test_a_plan_is_split_without_loss():
    requests = [request(i, 4, 1) for i in range(11)]
    parts = split(Plan(requests, max_concurrency=5), 3)
    assert [p.max_concurrency for p in parts] == [2, 2, 1]
    sent = sorted((r.request_id for p in parts for r in p.requests), key=int)
    assert sent == [r.request_id for r in requests]
    assert len(split(Plan(requests, max_concurrency=2), 8)) == 2
    assert [p.max_concurrency for p in split(Plan(requests), 2)] == [None, None]


@pytest.mark.parametrize(
    ("streams", "cpus", "expected"), [(1, 2, 1), (5000, 2, 1), (5000, 8, 7), (250, 8, 1)]
)
def test_how_many_processes(streams, cpus, expected):
    assert processes_for(streams, cpus) == expected


def test_streams_to_expect():
    assert expected_streams(spec(), [request(0, 1, 100)] * 50) == 50
    assert expected_streams(spec(max_concurrency=7), [request(0, 1, 100)] * 50) == 7
    timed = [Request(str(i), ((i, 4),), 100, arrival=0.1 * i) for i in range(101)]
    assert expected_streams(spec(), timed) == pytest.approx(25.25)


def test_two_processes_report_as_one():
    with fault_server_thread(interval=0.002, cached_tokens=0) as url:
        got = run_load(Target(url, "m"), spec(30, max_concurrency=4, num_warmups=2), seed=3, processes=2)
    assert got.records is not None
    assert sorted(got.records.request_id, key=int) == [str(i) for i in range(30)]
    assert set(got.records.status) == {"ok"}
    assert got.extra["client"]["processes"] == 2
    assert got.aggregates["max_concurrent_requests"] <= 4


def test_a_process_that_dies_is_not_passed_over(monkeypatch):
    monkeypatch.setattr("bench.workers.sys.executable", "/bin/false")
    with pytest.raises(WorkerLost):
        run_workers(Target("http://127.0.0.1:9", "m"), Plan([request(0, 4, 1)] * 2), Outcome(), 2)


def test_rows_survive_their_file(tmp_path):
    rows = [
        Row("a", 0.5, 10, 5, status="ok", sent=0.6, gaps=(0.1, 0.2), chunk_tokens=(1, 2), warnings=("w",)),
        Row("b", 1.0, 10, 5),
    ]
    write_rows(tmp_path / "rows", rows)
    assert read_rows(tmp_path / "rows") == rows


def test_quoted_outputs_ask_for_token_ids():
    server = FaultServer(first_delay=0.01)
    first = Request("1", (("p", 8),), 4, arrival=0.0)
    second = Request("2", (("p", 8), ("out:1", 4)), 4, arrival=0.3)
    drive_here(Plan([first, second]), server)
    assert all(asked.body["return_token_ids"] for asked in server.asked)
    assert server.asked[1].body["prompt"][:8] == server.asked[0].body["prompt"]
