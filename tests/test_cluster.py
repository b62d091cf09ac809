"""Replicas behind a router: one is like no router at all, several share, split ones hand over."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import cli
from sim.build import read_source
from sim.cli.cluster import split_members
from sim.errors import BadInput
from sim.planning.cluster import Link, LoadedPrompts, Member, run_cluster
from sim.planning.cluster_text import about_client, about_traffic, figures_of, render_clusters
from sim.planning.mix import parse_traffic
from sim.planning.router import (
    BALANCE_ABS,
    LeastKv,
    LeastRequests,
    NodeView,
    PrefixAffinity,
    RoundRobin,
    make_router,
)
from sim.planning.sessions import Session, singles
from sim.request import Request
from sim.simulate import simulate
from sim.steptime.gate import decodes_of, prefill
from sim.workload.generate import generate
from tests.engines_for_tests import FixedSteps

SERVE = {
    "vllm": "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 2048 --max-num-seqs 8",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen2.5-0.5B-Instruct --context-length 2048",
}
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 128 --random-output-len 16 "
    "--random-range-ratio 0.5 --request-rate 60 --num-prompts 60"
)


def scenario(engine="vllm", bench=BENCH):
    return read_source(serve=SERVE[engine], bench=bench, gpu="L4").build()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_replica_behind_any_router_is_the_replica(engine):
    what = scenario(engine)
    alone = simulate(what).result
    behind = run_cluster([Member(what)], singles(generate(what.workload)), LeastKv())
    for name in ("sent", "first_token", "last_token", "queue", "prefill"):
        assert getattr(behind.records, name) == pytest.approx(getattr(alone.records, name), nan_ok=True)
    assert behind.records.itls == pytest.approx(alone.records.itls)
    assert behind.duration == pytest.approx(alone.duration)


def test_a_cap_on_concurrency_holds_requests_back_alike():
    what = scenario(bench=BENCH + " --max-concurrency 3")
    alone = simulate(what).result.records
    sessions = singles(generate(what.workload))
    behind = run_cluster([Member(what)], sessions, RoundRobin(), max_concurrency=3).records
    assert behind.sent == pytest.approx(alone.sent)
    assert behind.last_token == pytest.approx(alone.last_token)


def test_round_robin_deals_out_evenly_and_everyone_is_answered():
    what = scenario()
    outcome = run_cluster([Member(what)] * 3, singles(generate(what.workload)), RoundRobin())
    assert [node.requests for node in outcome.nodes] == [20, 20, 20]
    assert outcome.node_of[:4] == (0, 1, 2, 0)
    assert set(outcome.records.status) == {"ok"}
    assert sorted(outcome.records.request_id, key=int) == [str(i) for i in range(60)]
    assert np.all(np.diff(outcome.records.sent) >= 0)
    assert outcome.records.itl_offsets[-1] == len(outcome.records.itls)


def test_replicas_of_half_the_load_are_each_like_one_at_half_the_rate():
    # Requests dealt out in turn: replica 0 sees just the even ones.
    what = scenario()
    requests = generate(what.workload)
    both = run_cluster([Member(what)] * 2, singles(requests), RoundRobin())
    alone = simulate(what, requests=requests[::2]).result.records
    mine = np.array(both.node_of) == 0
    assert both.records.last_token[mine] == pytest.approx(alone.last_token)


def test_a_slow_replica_gets_less_from_a_router_that_looks():
    fast, slow = (Member(scenario(), step_time=FixedSteps(t)) for t in (0.01, 0.05))
    sessions = singles(generate(scenario().workload))
    blind = run_cluster([fast, slow], sessions, RoundRobin())
    looking = run_cluster([fast, slow], sessions, LeastRequests())
    assert [n.requests for n in blind.nodes] == [30, 30]
    assert looking.nodes[0].requests > looking.nodes[1].requests
    p99 = [figures_of(o.records, o.duration)["p99_e2el_ms"] for o in (looking, blind)]
    assert p99[0] < p99[1]


def request(rid, *prompt):
    return Request(rid, prompt, 4)


def test_routers_choose_by_what_they_look_at():
    nodes = [NodeView(5, 0.1), NodeView(2, 0.9), NodeView(2, 0.5)]
    assert LeastRequests().choose(request("a", ("x", 10)), nodes) == 1
    assert LeastKv().choose(request("a", ("x", 10)), nodes) == 0
    turns = RoundRobin()
    assert [turns.choose(request("a", ("x", 10)), nodes) for _ in range(4)] == [0, 1, 2, 0]


def test_affinity_follows_the_longest_known_beginning():
    router, idle = PrefixAffinity(), [NodeView(0, 0.0), NodeView(0, 0.0)]
    assert router.choose(request("a", ("shared", 100), ("a", 10)), idle) == 0
    busier = [NodeView(3, 0.0), NodeView(0, 0.0)]
    assert router.choose(request("b", ("shared", 100), ("b", 10)), busier) == 0
    assert router.choose(request("c", ("other", 100), ("c", 10)), busier) == 1
    # A shared beginning that is a small part of the prompt is not worth it.
    assert router.choose(request("d", ("shared", 100), ("d", 900)), busier) == 1
    # A follow-up turn quotes the answer.
    follow_up = request("a2", ("shared", 100), ("a", 10), ("out:a", 4), ("a2", 5))
    assert router.choose(follow_up, busier) == 0


def test_affinity_gives_way_where_the_load_is_out_of_balance():
    router = PrefixAffinity()
    router.choose(request("a", ("shared", 100)), [NodeView(0, 0.0), NodeView(0, 0.0)])
    swamped = [NodeView(BALANCE_ABS + 2, 0.0), NodeView(1, 0.0)]
    assert router.choose(request("b", ("shared", 100)), swamped) == 1


def test_affinity_finds_more_in_the_prefix_cache():
    sessions = []
    for i in range(40):
        group, arrival = i * 7 % 5, 0.05 * i
        prompt = ((f"system:{group}", 512), (f"own:{i}", 32))
        sessions.append(Session((Request(str(i), prompt, 8, arrival),)))
    members = [Member(scenario())] * 2

    def hits(router):
        return sum(n.usage.prefix_hits for n in run_cluster(members, sessions, router).nodes)

    assert hits(PrefixAffinity()) > hits(RoundRobin())


# Prefill here, decode there.


def split(link=None, step=0.1):
    what = scenario(bench=BENCH.replace("rate 60", "rate 1").replace("num-prompts 60", "num-prompts 5"))
    members = [Member(what, role, FixedSteps(step)) for role in ("prefill", "decode")]
    return what, run_cluster(members, singles(generate(what.workload)), RoundRobin(), link=link)


def test_disaggregated_requests_pass_through_both():
    what, outcome = split()
    assert [node.requests for node in outcome.nodes] == [5, 5]
    lengths = [r.max_tokens for r in generate(what.workload)]
    assert outcome.records.output_len.tolist() == lengths
    assert outcome.nodes[0].usage.steps >= 5
    assert outcome.node_of == (1,) * 5


def test_time_of_a_lone_request_is_prefill_transfer_decode():
    link = Link(bandwidth=1e6, latency=0.5)
    what, outcome = split(link)
    account_bytes = simulate(what).account.kv_bytes_per_token
    first = generate(what.workload)[0]
    moved = first.prompt_len * account_bytes / link.bandwidth + link.latency
    ttft = outcome.records.first_token[0] - outcome.records.sent[0]
    # One step on the prefill replica, the transfer, one step on the decode replica.
    assert ttft == pytest.approx(0.1 + moved + 0.1, abs=1e-3)


def test_a_slower_link_never_helps():
    fast, slow = (split(Link(bandwidth=b))[1] for b in (1e12, 1e6))
    assert np.all(slow.records.last_token >= fast.records.last_token - 1e-9)


def test_loaded_prompts_are_not_computed_again():
    model = LoadedPrompts(FixedSteps(0.0, per_token=1.0))
    assert model.gpu(prefill(500)) == 1.0
    assert model.gpu(decodes_of(4, 100)) == 4.0


def test_what_makes_no_cluster_is_refused():
    what = scenario()
    with pytest.raises(BadInput, match="at least 1"):
        run_cluster([], [], RoundRobin())
    with pytest.raises(BadInput, match="both prefill and decode"):
        run_cluster([Member(what, "prefill")], [], RoundRobin())
    with pytest.raises(BadInput, match="round-robin"):
        make_router("random")


def test_command_compares_routers_on_mixed_replicas(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"serve: {SERVE['vllm']} --max-num-batched-tokens 512\nbench: {BENCH}\ngpu: L4\n")
    first = tmp_path / "first.yaml"
    first.write_text(f"serve: {SERVE['vllm']}\nbench: {BENCH}\ngpu: L4\n")
    args = ["cluster", str(first), str(other), "--replicas", "2,1", "--router", "round-robin,least-requests"]
    done = CliRunner().invoke(cli.servecast, args)
    assert done.exit_code == 0, done.output
    assert done.output.count("replica-2") == 2
    assert max(map(len, done.output.splitlines())) <= 110
    split_up = CliRunner().invoke(cli.servecast, ["cluster", str(first), "--prefill", "1", "--decode", "1"])
    assert "decode-1" in split_up.output
    for bad in (["--replicas", "1,1,1"], ["--prefill", "1"], ["--traffic-rate", "3"], ["--router", "any"]):
        assert isinstance(
            CliRunner().invoke(cli.servecast, ["cluster", str(first), *bad]).exception, BadInput
        )


def test_tenants_are_told_apart():
    sessions = [
        Session((replace(r, request_id=f"{'chat' if i % 2 else 'batch'}:{i}"),))
        for i, r in enumerate(generate(scenario().workload))
    ]
    text = render_clusters([("any", run_cluster([Member(scenario())], sessions, RoundRobin()))])
    assert "  chat" in text
    assert "  batch" in text


def cluster_command(tmp_path, *more):
    path = tmp_path / "s.yaml"
    path.write_text(f"serve: {SERVE['vllm']}\nbench: {BENCH}\ngpu: L4\n")
    return CliRunner().invoke(cli.servecast, ["cluster", str(path), *more])


def test_beyond_capacity_the_verdict_stands_beside_the_percentiles(tmp_path):
    flood = ("--set", "request-rate=400", "--set", "num-prompts=600", "--replicas", "2", "--json", "-")
    told = json.loads(cluster_command(tmp_path, *flood).output)["least-requests"]["regime"]
    assert told["state"] == "saturated"
    text = cluster_command(tmp_path, *flood[:-2]).output
    assert f"about {told['sustainable_rate']:.3g} sustained" in text
    assert "saturated" not in cluster_command(tmp_path, "--replicas", "2").output


@pytest.mark.parametrize(
    "given",
    [
        ("--replicas", "1000000"),
        ("--prefill", "1000000", "--decode", "1"),
        ("--traffic-rate", "1e308", "--traffic", "t.yaml"),
    ],
)
def test_more_than_can_be_simulated_is_refused(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    shape = "{turns: 2, output: 8}"
    (tmp_path / "t.yaml").write_text(f"rate: 1\ntenants:\n- name: a\n  share: 1\n  sessions: {shape}\n")
    refused = cluster_command(tmp_path, *given).exception
    assert isinstance(refused, BadInput)
    assert refused.field == given[0]
    assert "at most" in refused.hint


def test_a_traffic_file_without_content_says_what_it_needs(tmp_path):
    traffic = tmp_path / "t.yaml"
    for text, word in (("{}", "rate:"), ("[]", "rate:"), ("rate: 1\ntenants: []", "at least one")):
        traffic.write_text(text)
        refused = cluster_command(tmp_path, "--traffic", str(traffic)).exception
        assert isinstance(refused, BadInput)
        assert word in refused.hint


def test_the_command_says_what_its_figures_rest_on(tmp_path):
    text = cluster_command(tmp_path, "--replicas", "2").output
    head = text.splitlines()
    assert "1 x L4 each" in head[0]
    assert head[0].startswith("2 replicas of vllm")
    assert head[1] == "GPUs: 2"
    assert "requests/s offered: 60 requests" in text
    assert "step times 28% longer and shorter" in text
    assert "assumed: step time" in text
    assert "--engine-version: not named" in text
    told = json.loads(cluster_command(tmp_path, "--replicas", "2", "--json", "-").output)["least-requests"]
    for key, (low, high) in told["ranges"].items():
        assert low <= told[key] <= high
    low, high = told["ranges"]["mean_tpot_ms"]
    assert low < told["mean_tpot_ms"] < high
    assert told["gpus"] == 2
    assert told["offered_request_rate"] == pytest.approx(60, rel=0.5)
    alone = cluster_command(tmp_path, "--no-model-error").output
    assert "  from" not in alone
    assert "not in these figures" in alone


def test_a_scenario_between_prefill_and_decode_has_no_part(tmp_path):
    with pytest.raises(BadInput, match="3 were given"):
        split_members([scenario()] * 3, 1, 1, None)


def test_replicas_and_roles_exclude_each_other(tmp_path):
    given = ("--replicas", "4", "--prefill", "1", "--decode", "1")
    refused = cluster_command(tmp_path, *given).exception
    assert isinstance(refused, BadInput)
    assert refused.field == "--replicas"


def test_the_offered_rate_counts_every_turn_while_arrivals_last():
    turns = tuple(Request(f"a:{i}.{t}", (("x", 5),), 4, i * 1.0) for i in range(1) for t in range(3))
    sessions = [Session(turns, (1.0, 1.0)), Session(turns[:1])]
    mix = {"rate": 1, "duration": 8, "tenants": [{"name": "a", "share": 1, "sessions": {}}]}
    offered, words = about_traffic(parse_traffic(mix, "here"), sessions)
    assert offered == pytest.approx(0.5)
    assert "2 requests each" in words


def test_the_drain_of_a_traffic_file_is_told_apart_from_its_time(tmp_path):
    """Sessions end long after the last one came: what is answered then dilutes the rates."""
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        "rate: 4\nduration: 20\ntenants:\n  - name: chat\n    share: 1\n"
        "    sessions: {turns: 4, think_time: 20, first_prompt: 20, follow_up: 5, output: 5}\n",
        encoding="utf-8",
    )
    args = ["cluster", "--serve", SERVE["vllm"], "--bench", BENCH, "--gpu", "L4"]
    args += ["--no-model-error", "--traffic", str(mix)]
    done = CliRunner().invoke(cli.servecast, args)
    assert done.exit_code == 0, done.output
    rows = {line[:22].strip(): line[22:].split() for line in done.output.splitlines() if line[22:].strip()}
    whole, within = float(rows["least-requests"][0]), float(rows["within 20 s"][0])
    assert within > 2 * whole
    assert "still rising" in done.output
    told = json.loads(CliRunner().invoke(cli.servecast, [*args, "--json", "-"]).stdout)["least-requests"]
    assert told["while_arriving"]["request_throughput"] == pytest.approx(within, abs=0.01)
    assert told["while_arriving"]["completed"] == pytest.approx(20 * within, abs=0.2)
    assert told["while_arriving"]["completed"] < told["completed"]


def test_requests_sent_at_once_have_no_rate():
    spec = scenario(bench=BENCH.replace("--request-rate 60", "--max-concurrency 4")).workload
    offered, words = about_client(spec, generate(spec))
    assert offered is None
    assert "at most 4 at a time" in words


def test_a_link_belongs_to_two_kinds_of_replicas(tmp_path):
    for words in (("--link-latency", "5"), ("--link", "25")):
        refused = cluster_command(tmp_path, "--replicas", "2", *words)
        assert isinstance(refused.exception, BadInput)
        assert "belongs to --prefill and --decode" in str(refused.exception)
    split = ("--prefill", "1", "--decode", "1")
    assert cluster_command(tmp_path, *split, "--link-latency", "0", "--no-model-error").exit_code == 0
