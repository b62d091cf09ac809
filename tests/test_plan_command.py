"""`servecast plan` as people use it: what it prints, what it refuses."""

import json
import math
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner

import cli
from sim.build import read_source
from sim.errors import BadInput
from sim.planning.capacity import Capacity, capacity
from sim.planning.daily import DailyProfile, day_of_replicas
from sim.planning.hardware import Candidate, operating_points
from sim.planning.load_curve import Effort
from sim.planning.plan_text import render_capacity, render_day, render_points, render_sizing
from sim.planning.prices import Prices
from sim.planning.sizing import size
from sim.planning.slo import parse_slos

SCENARIO = [
    "--serve",
    "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 2048 --max-num-seqs 8 "
    "--no-async-scheduling --no-enable-prefix-caching",
    "--bench",
    "vllm bench serve --dataset-name random --random-input-len 100 --random-output-len 8 "
    "--request-rate 1 --num-prompts 100",
    "--gpu",
    "L4",
]


def run_plan(*words: str):
    return CliRunner().invoke(cli.servecast, ["plan", *SCENARIO, "--jobs", "1", *words])


QUICK = ("--slo", "p95 ttft <= 400ms", "--prompts", "100", "--seeds", "2", "--no-model-error")


@pytest.fixture(scope="module")
def found() -> Capacity:
    source = read_source(serve=SCENARIO[1], bench=SCENARIO[3], gpu="L4")
    slos = parse_slos(["p95 ttft <= 30ms", "mean tpot <= 1s"])
    return capacity(source.build(), slos, effort=Effort(100, 3))


def test_the_command_says_capacity_replicas_and_cost(tmp_path):
    prices, page = tmp_path / "prices.yaml", tmp_path / "plan.json"
    prices.write_text("L4: 0.7\n", encoding="utf-8")
    done = run_plan(*QUICK, "--rate", "100", "--price", str(prices), "--json", str(page))
    assert done.exit_code == 0, done.output
    for word in ("capacity:", "one replica down", "per million output tokens", "--request-rate "):
        assert word in done.output
    assert '"capacity"' in page.read_text(encoding="utf-8")


def test_what_gives_way_is_shown_on_either_side_of_the_answer(found):
    text = "\n".join(render_capacity(found))
    below, above = text.split("just above it")
    assert "P95 TTFT" in below.split("just below it")[1]
    assert above.splitlines()[1].split()[:2] == ["P95", "TTFT"]
    assert "TPOT" not in above.splitlines()[1]
    just_below, just_above = found.promises[0].used, found.beyond[0].used
    assert just_below <= 1.0 < just_above
    assert found.kept.value < found.level.value < found.missed.value


def test_a_load_that_outgrows_the_engine_before_any_objective_is_said_to(found):
    outgrown = replace(found, binding="stability")
    assert "more comes in than is answered" in "\n".join(render_capacity(outgrown))


def test_levels_tried_with_fewer_seeds_are_not_mixed_with_those_of_all(found):
    sure = [r.load for r in found.readings if r.seeds == 3]
    assert len(sure) >= 2
    assert not [r for r in found.readings if r.seeds < 3 and min(sure) < r.load < max(sure)]


def test_intervals_say_what_they_cover(found):
    wanted = 10 * found.level.value
    both = size(found, wanted)
    alone = size(replace(found, model_low=None, model_high=None), wanted)
    assert "within the intervals of seeds and model it is" in "\n".join(render_sizing(both))
    assert (both.covers, alone.covers) == ("seeds and model", "seeds")
    assert "of seeds it is" in "\n".join(render_sizing(replace(alone, pessimistic=None)))


def test_few_seeds_are_said_to_say_little(found):
    few = replace(found, low=found.level.value * 0.99, high=found.level.value * 1.01)
    assert "3 seeds say little" in " ".join(" ".join(render_capacity(few)).split())
    assert "say little" not in " ".join(render_capacity(replace(few, replications=5)))


def test_ways_to_run_that_the_intervals_do_not_hold_are_marked(found):
    least = found.certain[0]
    sizing = size(found, 10 * found.level.value)
    one = Candidate("L4", "L4", 1, found, sizing=sizing)
    points = operating_points([one], Prices({}, any_gpu=1.0))
    assert [p.sure for p in points] == [p.load <= least for p in points]
    assert not points[0].sure
    lines = render_points(points, "USD")
    assert "not beaten" not in "\n".join(lines)  # there is nothing else to be beaten by
    marked = [line for line in lines if line.startswith("L4") and "%?" in line]
    assert len(marked) == sum(not p.sure for p in points)
    other = replace(one, name="other")
    assert "not beaten" in "\n".join(
        render_points(operating_points([one, other], Prices({}, any_gpu=1.0)), "USD")
    )


def test_the_shares_of_use_say_what_they_are_shares_of(found):
    sizing = size(found, 40.0)
    assert sizing.use_at_mean == pytest.approx(40 / (sizing.recommended * sizing.per_replica))
    assert sizing.at_mean == math.ceil(40 / found.low)
    assert f"each trusted with {found.low:.3g}" in render_sizing(sizing)[0]


@pytest.mark.parametrize("more", [[], ["--gpus", "L4,H100"], ["--rate", "5"]])
def test_objectives_that_no_load_keeps_fail_with_the_best_that_can_be_reached(more):
    done = run_plan("--slo", "p99 ttft <= 10us", "--prompts", "100", "--seeds", "1", *more)
    assert done.exit_code == 1
    assert "a request alone spends" in " ".join(done.output.split())
    assert ("best that can be reached" in done.output) == ("--gpus" not in more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "at least one"),
        (["--slo", "p99 ttft <= 1s", "--rate", "none"], "must be a number"),
        (["--slo", "p99 ttft <= 1s", "--rate", "0"], "greater than 0"),
        (["--slo", "p99 ttft <= 1s", "--rate", "1e308"], "at most 1,000,000"),
        (["--slo", "p99 ttft <= 1s", "--rate", "1", "--peak-factor", "1e9"], "at most 1,000"),
        (["--slo", "p99 ttft <= 1s", "--rate", "1", "--peak-factor", "0.5"], "at least 1"),
        (
            ["--slo", "p99 ttft <= 1s", "--rate", "1", "--peak-factor", "2", "--daily", ",".join("1" * 24)],
            "follows from --daily",
        ),
        (["--slo", "p99 ttft <= 1s", "--utilisation", "50%"], "give a --price"),
        (["--slo", "p99 ttft <= 1s", "--gpus", "H100,H100"], "distinct"),
        (["--slo", "p99 ttft <= 1s", "--tp", "1,x"], "whole numbers"),
        (["--slo", "p99 ttft <= 1s", "--gpus", "H999"], "H999"),
        (["--slo", "p99 ttft <= 1s", "--gpus", "L4,l4"], "named already"),
        (["--slo", "p99 ttft <= 1s", "--rate", "4", "--load", "concurrency"], "leave out"),
        (["--slo", "p99 ttft <= 1s", "--tp", "1,2", "--load", "concurrency"], "compared by rate"),
        (["--slo", "p99 ttft <= 1s", "--rate", "4", "--tp", "1,2", "--daily", ",".join("1" * 24)], "--daily"),
        (["--slo", "p99 ttft <= 1s", "--price", "/none.yaml"], "no such file"),
    ],
)
def test_bad_questions_are_told_in_one_line(more, says):
    done = run_plan(*more)
    assert isinstance(done.exception, BadInput)
    assert says in str(done.exception)


@pytest.mark.parametrize(("gpus", "says"), [("L4,H999", "H999"), ("L4,H100", "no price for H100")])
def test_what_is_misspelt_or_unpriced_is_said_before_anything_is_simulated(monkeypatch, tmp_path, gpus, says):
    def never(*args, **more):
        raise AssertionError

    monkeypatch.setattr("sim.planning.plan.candidates", never)
    prices = tmp_path / "prices.yaml"
    prices.write_text("L4: 0.7\n", encoding="utf-8")
    done = run_plan(*QUICK, "--gpus", gpus, "--price", str(prices))
    assert isinstance(done.exception, BadInput)
    assert says in str(done.exception)


def test_a_gpu_file_of_ones_own_is_named_as_it_was_given(tmp_path):
    cards = tmp_path / "my cards.yaml"
    card = "{memory_gib: 24, bandwidth: 300, tflops: {bf16: 120}}"
    cards.write_text(f"small: {card}\nbig: {card}\n", encoding="utf-8")
    own = f"{cards}:small"
    done = CliRunner().invoke(cli.servecast, ["plan", *SCENARIO[:4], "--gpu", own, "--jobs", "1", *QUICK])
    assert done.exit_code == 0, done.output
    (line, _) = [line for line in done.output.splitlines() if line.startswith("  servecast bench")]
    words = shlex.split(line)
    assert words[words.index("--gpu") + 1] == own


def test_a_day_of_replicas():
    wanted = (*QUICK, "--rate", "100")
    done = run_plan(*wanted, "--daily", ",".join(["1"] * 12 + ["3"] * 12))
    assert done.exit_code == 0, done.output
    assert "peak 150" in done.output
    assert "replica hours a day" in done.output
    for bad in ("1,2", "x"):
        assert isinstance(run_plan(*wanted, "--daily", bad).exception, BadInput)


def test_of_compared_hardware_the_cheapest_one_is_billed(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("L4: 0.7\nH100: 2.5\n", encoding="utf-8")
    words = (*QUICK, "--gpus", "H100,L4", "--rate", "100", "--price", str(prices))
    told = json.loads(run_plan(*words, "--json", "-").output)
    by_name = {c["name"]: c["sizing"]["recommended"] for c in told["candidates"]}
    bills = {"H100": 2.5 * by_name["H100"], "L4": 0.7 * by_name["L4"]}
    assert told["cost_of"] == min(bills, key=bills.get)
    assert told["cost"]["per_hour"] == pytest.approx(min(bills.values()))
    assert told["cost"]["per_1k_requests"] == pytest.approx(min(bills.values()) / (100 * 3.6))
    assert "the cheapest of these" in run_plan(*words).output


def test_without_a_rate_every_candidate_has_ways_to_run():
    told = json.loads(run_plan(*QUICK, "--gpus", "H100,L4", "--price", "2.5", "--json", "-").output)
    points = told["operating_points"]
    assert {p["name"] for p in points} == {"H100", "L4"}
    alone = json.loads(run_plan(*QUICK, "--gpus", "L4", "--price", "2.5", "--json", "-").output)
    loads = [p["load"] for p in points if p["name"] == "L4"]
    assert loads == [p["load"] for p in alone["operating_points"]]


def test_one_seed_has_no_interval():
    words = ("--slo", "p95 ttft <= 400ms", "--prompts", "100", "--seeds", "1", "--no-model-error")
    told = json.loads(run_plan(*words, "--json", "-").output)["capacity"]
    assert told["value"] > 0
    assert (told["low"], told["high"]) == (None, None)


def test_a_goodput_out_of_reach_is_blocked_by_the_latency_that_misses_it():
    done = run_plan("--slo", "ttft <= 10us", "--slo", "tpot <= 1s", "--goodput", "99%", "--prompts", "100")
    assert done.exit_code == 1
    assert "a request alone spends" in " ".join(done.output.split())


def test_a_weak_candidate_does_not_end_the_comparison(monkeypatch):
    monkeypatch.setattr("sim.planning.sizing.MAX_REPLICAS", 1)
    found = json.loads(run_plan(*QUICK, "--gpus", "H100,L4", "--rate", "200", "--json", "-").output)
    by_name = {c["name"]: c for c in found["candidates"]}
    assert by_name["H100"]["sizing"]["recommended"] == 2
    assert "replicas of" in by_name["L4"]["failure"]


def test_large_rates_of_a_day_stand_apart():
    day = day_of_replicas(5.0, 40_000.0, DailyProfile((1.0,) * 23 + (2.0,)))
    (rates, *_) = [line for line in render_day(day) if "requests/s" in line]
    assert rates.split()[1:] == ["38,400"] * 8
    assert max(map(len, render_day(day)[:-1])) <= 100


def test_a_load_that_traffic_replaces_is_named(tmp_path):
    traffic = tmp_path / "t.yaml"
    traffic.write_text("rate: 5\nduration: 20\ntenants: [{name: a, share: 1, dataset: {kind: random}}]\n")
    done = run_plan(*QUICK, "--traffic", str(traffic), "--set", "request-rate=9", "--set", "max-num-seqs=4")
    assert "info: --bench, --set request-rate=9: --traffic replaces" in done.stderr


def test_the_page_shows_the_day(tmp_path):
    page = tmp_path / "plan.html"
    day = ",".join(["1"] * 12 + ["3"] * 12)
    assert run_plan(*QUICK, "--rate", "100", "--daily", day, "--html", str(page)).exit_code == 0
    assert "Replicas by the hour" in page.read_text(encoding="utf-8")


def test_the_bill_and_the_ways_to_run_agree():
    args = (*QUICK, "--price", "2.5", "--json", "-")
    wanted = json.loads(run_plan(*args, "--rate", "100").output)
    bill, replicas = wanted["cost"], wanted["sizing"]["recommended"]
    # 100 requests/s of 8 tokens are sold in either account, whatever a replica is trusted with.
    assert bill["per_hour"] == 2.5 * replicas
    assert bill["per_1m_output"] == pytest.approx(bill["per_hour"] / (100 * 8 * 3600 / 1e6), rel=1e-9)
    assert bill["per_1k_requests"] == pytest.approx(bill["per_hour"] / (100 * 3.6), rel=1e-9)
    point = next(p for p in wanted["operating_points"] if p["replicas"] == replicas)
    assert point["per_1m_output"] == pytest.approx(bill["per_1m_output"], rel=1e-9)
    half = json.loads(run_plan(*args, "--utilisation", "50%").output)
    full = json.loads(run_plan(*args).output)
    assert half["cost"]["per_1m_output"] == pytest.approx(2 * full["cost"]["per_1m_output"])
    point = full["operating_points"][-1]
    sold = point["per_1m_output"] * point["load"]  # the same bill for each token that is sold
    assert sold == pytest.approx(full["cost"]["per_1m_output"] * full["capacity"]["value"])
    assert isinstance(run_plan(*args, "--rate", "100", "--utilisation", "50%").exception, BadInput)
