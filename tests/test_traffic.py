"""Traffic: traces at a wanted rate, days, tenants, conversations."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.build import read_source
from sim.errors import BadInput
from sim.planning.capacity import capacity
from sim.planning.cluster import Member, run_cluster
from sim.planning.daily import DailyProfile, arrivals, day_of_replicas, time_for
from sim.planning.hardware import Candidate, operating_points
from sim.planning.load_curve import Effort, LevelReading, LoadCurve
from sim.planning.mix import parse_traffic, read_traffic, tenant_of
from sim.planning.plan_report import confirming_commands
from sim.planning.pool import run_here
from sim.planning.prices import Prices
from sim.planning.router import PrefixAffinity, RoundRobin
from sim.planning.sessions import SessionShape, draw_sessions, lasting
from sim.planning.slo import parse_slos
from sim.planning.traffic import requests_at
from sim.workload.spec import FileDataset, WorkloadSpec
from tests.engines_for_tests import FixedSteps

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path):
    """200 requests, one every 0.5 s, prompts of 100 + i tokens."""
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{i // 120:02}:{i / 2 % 60:09.6f},{100 + i},{10 + i % 7}\n" for i in range(200)]
    path.write_text(AZURE + "".join(rows), encoding="utf-8")
    return FileDataset("azure", str(path))


def spec(trace, rate=4.0, n=50, **more):
    return WorkloadSpec(trace, num_prompts=n, request_rate=rate, use_trace_arrivals=True, **more)


def test_a_trace_is_stretched_to_the_wanted_rate(trace):
    requests = requests_at(spec(trace, rate=8.0), seed=3)
    times = [r.arrival for r in requests]
    assert times[0] == 0.0
    assert (len(times) - 1) / times[-1] == pytest.approx(8.0)
    assert requests_at(spec(trace, rate=8.0), seed=3) == requests


def test_blocks_of_neighbours_come_from_all_parts_of_a_trace(trace):
    requests = requests_at(spec(trace, n=100), seed=1)
    rows = [r.prompt_len - 100 for r in requests]
    steps = [(b - a) % 200 for a, b in pairwise(rows)]
    assert steps.count(1) == 98  # two blocks of 50, half of the trace apart
    assert (rows[50] - rows[0]) % 200 == 100
    assert all(r.max_tokens == 10 + row % 7 for r, row in zip(requests, rows, strict=True))


def test_replications_lie_in_each_others_gaps(trace):
    both = [requests_at(spec(trace, n=100), seed=1, part=p, parts=2) for p in range(2)]
    rows = [{r.prompt_len for r in requests} for requests in both]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == 200


def test_a_trace_is_sent_once_at_most(trace):
    assert len(requests_at(spec(trace, n=5000), seed=0)) == 200


def test_lengths_of_a_trace_with_arrivals_of_a_client(trace):
    load = WorkloadSpec(trace, num_prompts=50, request_rate=4.0)
    requests = requests_at(load, seed=1)
    assert requests[-1].arrival == pytest.approx(50 / 4.0)
    assert requests[0].prompt_len >= 100


def test_a_trace_without_times_has_none_to_send_at(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_len": 5, "output_len": 5}\n' * 3, encoding="utf-8")
    with pytest.raises(BadInput, match="no arrival times"):
        requests_at(spec(FileDataset("lengths", str(path))), seed=0)


def test_shared_prefixes_of_a_trace_survive(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {i}, "input_length": 1000, "output_length": 5, "hash_ids": [7, {i + 10}]}}\n'
            for i in range(300)
        ),
        encoding="utf-8",
    )
    requests = requests_at(spec(FileDataset("mooncake", str(path)), n=100), seed=0)
    assert {r.prompt[0] for r in requests} == {(7, 512)}
    own = [r.prompt[1][0] for r in requests]
    assert all((b - a) % 300 == 1 for a, b in pairwise(own))  # one window, so that reuse survives


# Days.


def test_rates_of_a_day():
    profile = DailyProfile((1.0,) * 12 + (3.0,) * 12)
    assert profile.peak_factor == 1.5
    assert profile.rates(10.0) == (5.0,) * 12 + (15.0,) * 12


def test_arrivals_follow_the_hours():
    profile = DailyProfile((1.0, 0.0) * 12)
    times = arrivals(2.0, profile, 3600.0, np.random.default_rng(0), compress=2.0, from_hour=0.0)
    # Half an hour of an hour at 4/s, half an hour of silence.
    assert len(times) == pytest.approx(7200, rel=0.05)
    assert times.max() < 1800.0
    assert np.all(np.diff(times) >= 0)
    late = arrivals(2.0, profile, 600.0, np.random.default_rng(0), from_hour=1.5)
    assert not len(late)


def test_burstiness_shows_in_the_gaps():
    def cv(burstiness):
        gaps = np.diff(arrivals(5.0, DailyProfile(), 4000.0, np.random.default_rng(1), burstiness=burstiness))
        return gaps.std() / gaps.mean()

    assert cv(1.0) == pytest.approx(1.0, abs=0.05)
    assert cv(0.25) == pytest.approx(2.0, abs=0.15)
    assert cv(math.inf) == pytest.approx(0.0, abs=1e-6)


@given(st.integers(0, 23), st.floats(1.0, 50.0))
@settings(max_examples=15, deadline=None)
def test_a_constant_day_has_the_mean_rate_at_any_hour(hour, rate):
    times = arrivals(rate, DailyProfile(), 500.0, np.random.default_rng(hour), from_hour=hour)
    assert len(times) == pytest.approx(500 * rate, abs=6 * math.sqrt(500 * rate))


def test_replicas_by_the_hour():
    day = day_of_replicas(5.0, 10.0, DailyProfile((1.0,) * 12 + (3.0,) * 12))
    assert day.by_hour == (2,) * 12 + (4,) * 12
    assert (day.constant, day.replica_hours, day.constant_hours) == (4, 72, 96)


@pytest.mark.parametrize("factors", [(1.0,) * 23, (0.0,) * 24, (math.nan,) * 24, (-1.0,) + (1.0,) * 23])
def test_bad_days(factors):
    with pytest.raises(BadInput, match="daily"):
        DailyProfile(factors)


# Conversations.


def sessions(count=200, seed=0, **more):
    shape = SessionShape(turns=3, system_prompt=64, first_prompt=40, follow_up=20, output=30, **more)
    return draw_sessions(shape, np.linspace(0, 10, count).tolist(), "chat", np.random.default_rng(seed))


def test_each_turn_quotes_all_that_was_said():
    for session in sessions():
        for before, after in pairwise(session.turns):
            said = (*before.prompt, (f"out:{before.request_id}", before.max_tokens))
            assert after.prompt[: len(said)] == said
            assert after.session == before.session
        assert len(session.pauses) == len(session.turns) - 1
        assert session.turns[0].prompt[0] == ("chat:system", 64)


def test_conversations_have_the_asked_means():
    found = sessions(2000, max_context=100_000)
    assert np.mean([len(s.turns) for s in found]) == pytest.approx(3.0, rel=0.1)
    assert np.mean([t.max_tokens for s in found for t in s.turns]) == pytest.approx(30, rel=0.1)
    assert np.mean([p for s in found for p in s.pauses]) == pytest.approx(10.0, rel=0.1)


def test_conversations_end_before_the_context_does():
    longest = max(t.prompt_len + t.max_tokens for s in sessions(max_context=300) for t in s.turns)
    assert longest <= 300


@pytest.mark.parametrize("limit", [200, 600, 100_000])
def test_turns_that_the_context_leaves_are_known_without_sending_them(limit):
    shape = SessionShape(
        turns=6, system_prompt=64, first_prompt=40, follow_up=20, output=30, max_context=limit
    )
    drawn = draw_sessions(shape, [0.0] * 20_000, "chat", np.random.default_rng(3))
    turns, early = lasting(shape)
    assert turns == pytest.approx(sum(len(s.turns) for s in drawn) / 20_000, rel=0.02)
    assert (early == 0.0) == (limit == 100_000)
    assert lasting(replace(shape, turns=1.0, max_context=100_000)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"turns": 0.5},
        {"turns": math.inf},
        {"think_time": -1.0},
        {"output": 0},
        {"max_context": 10},
        {"system_prompt": -1},
    ],
)
def test_bad_conversations(fields):
    with pytest.raises(BadInput, match="here"):
        SessionShape(**fields).check("here")


SERVE = "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 8192 --max-num-seqs 64"


def cluster(router, count=2):
    scenario = read_source(
        serve=SERVE, bench="vllm bench serve --random-input-len 10 --random-output-len 5", gpu="L4"
    ).build()
    return run_cluster([Member(scenario, step_time=FixedSteps(0.02))] * count, sessions(30), router)


def test_a_turn_waits_for_the_answer_and_for_its_user():
    outcome = cluster(RoundRobin())
    at = {rid: i for i, rid in enumerate(outcome.records.request_id)}
    for session in sessions(30):
        for before, after, pause in zip(session.turns, session.turns[1:], session.pauses, strict=False):
            done = outcome.records.last_token[at[before.request_id]]
            assert outcome.records.scheduled[at[after.request_id]] == pytest.approx(done + pause)
    assert len(outcome.records) == sum(len(s.turns) for s in sessions(30))


def test_follow_ups_find_their_history_in_the_cache():
    one, two = cluster(RoundRobin(), 1), cluster(PrefixAffinity(), 2)
    blind = cluster(RoundRobin(), 2)
    share = [sum(n.usage.prefix_hits for n in o.nodes) for o in (one, two, blind)]
    assert share[0] > 0
    assert share[1] > share[2]


# Tenants.

MIX = {
    "rate": 20,
    "duration": 60,
    "tenants": [
        {"name": "chat", "share": 3, "sessions": {"turns": 2, "output": 20}},
        {"name": "batch", "share": 1, "priority": 5, "dataset": {"kind": "random", "input_len": 100}},
    ],
}


def test_tenants_share_the_rate():
    found = parse_traffic(MIX, "here").generate(seed=0)
    names = [tenant_of(s.turns[0].request_id) for s in found]
    assert names.count("chat") / len(names) == pytest.approx(0.75, abs=0.03)
    assert len(names) == pytest.approx(1200, rel=0.1)
    starts = [s.turns[0].arrival for s in found]
    assert starts == sorted(starts)
    assert {s.turns[0].priority for s in found if tenant_of(s.turns[0].request_id) == "batch"} == {5}


def test_one_tenants_draws_do_not_depend_on_the_others():
    both = parse_traffic(MIX, "here").generate(seed=0)
    more = {**MIX, "tenants": [*MIX["tenants"], {"name": "new", "share": 0.001, "sessions": {}}]}
    # The shares change a little; the conversations of the first tenant are drawn from its own stream.
    with_new = parse_traffic(more, "here").generate(seed=0)
    first = [next(s for s in found if s.turns[0].request_id == "chat:0.0") for found in (both, with_new)]
    assert first[0].turns[0].prompt == first[1].turns[0].prompt


def test_a_short_trace_of_a_tenant_begins_again(trace):
    mix = {"rate": 10, "duration": 60, "tenants": [{"name": "t", "share": 1, "dataset": vars_of(trace)}]}
    found = parse_traffic(mix, "here").generate(seed=0)
    assert len(found) > 200
    prompts = [s.turns[0].prompt for s in found]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("arriving", [3.0, 0.2])
def test_a_tenant_of_prefixes_may_send_fewer_requests_than_there_are_prefixes(arriving):
    dataset = {"kind": "prefix_repetition", "num_prefixes": 20, "prefix_len": 64, "suffix_len": 8}
    mix = {"rate": arriving, "duration": 30, "tenants": [{"name": "p", "share": 1, "dataset": dataset}]}
    found = parse_traffic(mix, "here").generate(seed=0)
    beginnings = {s.turns[0].prompt[0] for s in found}
    assert len(found) == pytest.approx(30 * arriving, abs=25)
    assert len(beginnings) == (20 if len(found) > 60 else len(beginnings))
    assert len(found) < 20 or len(beginnings) < len(found)


def test_sessions_that_the_context_ends_are_said_and_counted():
    cut = {"name": "chat", "share": 1, "sessions": {"turns": 20, "output": 500, "max_context": 4000}}
    traffic = parse_traffic({**MIX, "tenants": [cut]}, "here")
    (note,) = traffic.notes
    assert (note.kind, note.subject) == ("warning", "tenant chat")
    assert "4,000" in note.text
    sent = traffic.generate(seed=1, prompts=8000)
    assert traffic.mean_turns < 7
    assert sum(len(s.turns) for s in sent) == pytest.approx(8000, rel=0.06)
    assert not parse_traffic({**MIX, "tenants": [{**cut, "sessions": {"turns": 2}}]}, "here").notes


def test_a_load_that_cannot_be_made_at_some_level_is_no_missed_objective():
    night = {
        "rate": 2,
        "duration": 60,
        "daily": [0.0] * 12 + [1.0] * 12,
        "from_hour": 11.99,
        "tenants": MIX["tenants"],
    }
    what = read_source(serve=SERVE, bench="vllm bench serve", gpu="L4").build()
    curve = LoadCurve(
        what, parse_slos(["p99 ttft <= 1s"]), "rate", Effort(100, 1), run_here, FixedSteps(0.02), 1.0,
        parse_traffic(night, "here"),
    )  # fmt: skip
    assert curve.read(2.0, 1).kept
    with pytest.raises(BadInput, match=r"cannot run at 0.001 requests/s.*nothing arrives"):
        curve.read(0.001, 1)


def test_the_capacity_under_a_day_is_that_of_one_rate():
    tenants = [{"name": "t", "share": 1, "dataset": {"kind": "random", "input_len": 100, "output_len": 1}}]
    quiet = {"rate": 1, "duration": 60, "daily": [0.1] * 12 + [1.9] * 12, "tenants": tenants}
    what = read_source(serve=SERVE + " --max-num-seqs 1", bench="vllm bench serve", gpu="L4").build()
    answers = [
        capacity(
            what, parse_slos(["mean ttft <= 1s"]), step_time=FixedSteps(0.1), effort=Effort(300, 2),
            with_error=False, traffic=parse_traffic(content, "here"),
        )
        for content in (quiet, {k: v for k, v in quiet.items() if k != "daily"})
    ]  # fmt: skip
    assert answers[0].level == answers[1].level
    assert [n.text for n in answers[0].notes if "peak at 1.9 times" in n.text]


def vars_of(trace):
    return {"kind": trace.kind, "path": trace.path}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rate": 0}, "rate"),
        ({"tenants": []}, "tenants"),
        ({"surprise": 1}, "surprise.*known are rate"),
        ({"durations": 9}, "durations.*nearest is duration"),
        ({"tenants": [{"name": "a", "share": 1, "lengths": {}}]}, r"tenants\.0\.lengths.*known are name"),
        ({"tenants": [{"name": "a", "share": 1, "sessions": {"turn": 2}}]}, "turn.*nearest is turns"),
        ({"daily": [1, 2]}, "24"),
        ({"tenants": [{"name": "a", "share": 1}]}, "either sessions or dataset"),
        ({"tenants": [{"name": "a:b", "share": 1, "sessions": {}}]}, "without a colon"),
        ({"tenants": [{"name": "a", "share": 1, "sessions": {"turns": 0}}]}, "turns"),
        ({"tenants": [{"name": "a", "share": -1, "sessions": {}}]}, "share"),
    ],
)
def test_bad_traffic_files_name_the_field(change, says):
    with pytest.raises(BadInput, match=says):
        parse_traffic({**MIX, **change}, "here")


def test_traffic_files_are_read_by_line(tmp_path):
    path = tmp_path / "traffic.yaml"
    path.write_text("rate: 5\ntenants:\n  - name: a\n    share: [\n", encoding="utf-8")
    with pytest.raises(BadInput, match="line"):
        read_traffic(path)
    path.write_text("- a\n", encoding="utf-8")
    with pytest.raises(BadInput, match="must hold"):
        read_traffic(path)
    path.write_text(
        "rate: 0.001\nduration: 1\ntenants: [{name: a, share: 1, sessions: {}}]\n", encoding="utf-8"
    )
    with pytest.raises(BadInput, match="nothing arrives") as refused:
        read_traffic(path).generate(seed=0)
    duration = float(re.search(r"duration: (\S+)`", refused.value.hint)[1])
    found = replace(read_traffic(path), duration=duration).generate(seed=0)
    assert 70 <= len(found) <= 130


def test_a_duration_is_found_across_hours_of_nothing():
    quiet_night = DailyProfile((0.0,) * 12 + (1.0,) * 12)
    rng = np.random.default_rng(0)
    lasts = time_for(50.0, 0.01, quiet_night)
    assert lasts > 12 * 3600
    assert len(arrivals(0.01, quiet_night, lasts, rng)) == pytest.approx(50, abs=25)
    assert time_for(50.0, 1e-12, quiet_night) is None


def test_shares_that_are_no_parts_of_one_are_told():
    notes = parse_traffic(MIX, "here").notes
    assert [n.subject for n in notes] == ["tenants"]
    assert "add up to 4" in notes[0].text
    assert "chat 0.75, batch 0.25" in notes[0].text
    even = {**MIX, "tenants": [{**t, "share": 0.5} for t in MIX["tenants"]]}
    assert parse_traffic(even, "here").notes == ()


def test_capacity_under_conversations():
    scenario = read_source(
        serve=SERVE, bench="vllm bench serve --random-input-len 10 --random-output-len 5", gpu="L4"
    ).build()
    shape = {"turns": 2, "think_time": 0.5, "first_prompt": 20, "follow_up": 10, "output": 8}
    chats = parse_traffic({"rate": 1, "tenants": [{"name": "a", "share": 1, "sessions": shape}]}, "here")
    found = capacity(
        scenario,
        parse_slos(["p90 ttft <= 150ms"]),
        effort=Effort(300, 2),
        step_time=FixedSteps(0.02, per_token=0.0005),
        traffic=chats,
        with_error=False,
    )
    assert found.traffic
    assert found.level.value > 0.5
    # Two requests per arrival, so twice as many requests as arrivals.
    assert found.request_rate == pytest.approx(2 * found.kept.value, rel=0.25)
    assert not any("request-rate" in c for c in confirming_commands(found))
    assert any("arrivals of sessions" in n.text for n in found.notes)
    # At the load that was read, an hour of it costs as much per token whichever way it is counted.
    used = tuple(LevelReading(k * found.kept.value, 0.1 * k, 2) for k in (0.1, 0.5, 1.0, 1.5, 2.0))
    only = Candidate("L4", "L4", 1, replace(found, level=found.kept, readings=used))
    full = operating_points([only], Prices({}, any_gpu=2.0))[-1]
    assert full.load == found.kept.value
    assert full.per_1m_output == pytest.approx(2.0 / (found.output_rate * 3600 / 1e6))


def test_a_day_too_short_for_a_lone_request_can_be_planned():
    """The lightest load is that of one request at a time, whatever hours the file simulates."""
    scenario = read_source(
        serve=SERVE, bench="vllm bench serve --random-input-len 10 --random-output-len 5", gpu="L4"
    ).build()
    shape = {"turns": 1, "first_prompt": 20, "output": 8}
    day = {"rate": 10, "duration": 20, "compress": 360, "daily": [0.5] * 12 + [1.0] * 12}
    chats = parse_traffic({**day, "tenants": [{"name": "a", "share": 1, "sessions": shape}]}, "here")
    found = capacity(scenario, parse_slos(["p90 ttft <= 10us"]), effort=Effort(100, 1), traffic=chats)
    assert found.level is None
    assert found.promises[0].value > 1e-5
