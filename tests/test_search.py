"""Searching flags: what is tried, what wins, what matters."""

import math
import shlex
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner

import cli
from sim.build import build_scenario, read_source
from sim.commands.bench import parse_bench_command
from sim.errors import BadInput
from sim.planning.load_curve import Effort
from sim.planning.search import Sensitivity, search, words_of
from sim.planning.search_space import draw_candidates, parse_space
from sim.planning.search_text import render_search
from sim.planning.slo import parse_slos

SERVE = "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024 --max-num-seqs 4"
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 128 --random-output-len 32 "
    "--request-rate 10 --num-prompts 50"
)


def source():
    return read_source(serve=SERVE, bench=BENCH, gpu="L4")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max-num-seqs=16..256", ("16", "32", "64", "128", "256")),
        ("max-num-seqs=10..100", ("10", "16", "32", "64", "100")),
        ("tensor-parallel-size=1..3", ("1", "2", "3")),
        ("gpu-memory-utilization=0.80..0.95", ("0.8", "0.83", "0.86", "0.89", "0.92", "0.95")),
        ("scheduling-policy=fcfs,priority", ("fcfs", "priority")),
    ],
)
def test_bounds_become_values(text, values):
    assert parse_space([text])[0].values == values


@pytest.mark.parametrize(
    "texts",
    [[], ["max-num-seqs"], ["max-num-seqs=8..2"], ["a=1..x"], ["a=1,1"], ["a=1,"], ["a=1..2", "a=3..4"]],
)
def test_bad_bounds(texts):
    with pytest.raises(BadInput, match="--over"):
        parse_space(texts)


def test_a_small_space_is_tried_in_full():
    space = parse_space(["a=1,2,3", "b=x,y"])
    assert len(draw_candidates(space, 10, 0)) == 6


def test_a_large_space_is_sampled_evenly():
    space = parse_space(["a=1..8", "b=1,2,3,4", "c=1,2,3,4"])
    drawn = draw_candidates(space, 16, 0)
    assert len(drawn) == len(set(drawn)) == 16
    for i, dimension in enumerate(space):
        counts = [sum(s[i][1] == v for s in drawn) for v in dimension.values]
        assert min(counts) >= math.floor(16 / len(dimension.values)) - 1
    assert draw_candidates(space, 16, 0) == drawn
    assert draw_candidates(space, 16, 1) != drawn


@pytest.fixture(scope="module")
def result():
    space = parse_space(["max-num-seqs=1,32", "block-size=16,32"])
    slos = parse_slos(["p90 ttft <= 300ms"])
    return search(source(), space, slos, effort=Effort(100, 1), candidates=4)


def test_more_slots_win_and_matter(result):
    assert dict(result.best.settings)["max-num-seqs"] == "32"
    assert result.best.score > 1.2 * result.given.score
    ranked = {r.name: r for r in result.ranking}
    assert result.ranking[0].name == "max-num-seqs"
    assert ranked["max-num-seqs"].matters
    assert not ranked["block-size"].matters


def test_the_scenario_as_it_stands_is_among_the_finalists(result):
    assert result.given in result.finalists
    assert result.given.settings == ()
    scores = [t.score for t in result.finalists]
    assert scores == sorted(scores, reverse=True)
    assert result.best.found.model_low < result.best.score < result.best.found.model_high


def test_load_is_counted_per_gpu_and_what_cannot_run_is_left_out():
    space = parse_space(["tensor-parallel-size=1,2,3"])  # 3 does not divide 14 heads
    found = search(source(), space, parse_slos(["p90 ttft <= 300ms"]), effort=Effort(100, 1))
    two = next(t for t in found.finalists if dict(t.settings).get("tensor-parallel-size") == "2")
    assert two.score == pytest.approx(two.found.level.value / 2)
    assert [dict(t.settings)["tensor-parallel-size"] for t in found.refused] == ["3"]
    assert found.refused[0].failure
    with pytest.raises(BadInput, match="no combination can run"):
        search(source(), parse_space(["tensor-parallel-size=3,5"]), parse_slos(["p90 ttft <= 1s"]))


def test_effect_is_the_loss_from_best_to_worst():
    assert Sensitivity("x", (("1", 10.0), ("2", 8.0))).effect == pytest.approx(0.2)
    assert not Sensitivity("x", (("1", 10.0), ("2", 9.9))).matters
    assert Sensitivity("x", (("1", 0.0), ("2", 0.0))).effect == 0.0


def test_a_value_that_cannot_run_says_nothing_of_its_flag():
    one = Sensitivity("x", (("0.9", 10.0), ("0.5", 10.0), ("1.5", None)))
    assert one.effect == 0.0
    assert not one.matters
    assert one.losses == (("0.9", 0.0), ("0.5", 0.0), ("1.5", None))
    assert Sensitivity("x", (("1.5", None),)).effect == 0.0


def test_a_search_names_its_own_option():
    slos = parse_slos(["p90 ttft <= 300ms"])
    with pytest.raises(BadInput, match=r"--over: 'request-rate': is what is searched for"):
        search(source(), parse_space(["request-rate=1,2"]), slos)
    with pytest.raises(BadInput, match="--over: 'foo': neither"):
        search(source(), parse_space(["foo=1,2"]), slos)


@pytest.mark.parametrize("name", ["max-concurrency", "num-prompts", "rate-scale"])
def test_what_the_search_sets_itself_is_refused(name):
    space = parse_space([f"{name}=16,64"])
    with pytest.raises(BadInput, match="set by the search itself"):
        search(source(), space, parse_slos(["p99 ttft <= 1s"]), effort=Effort(100, 1))


def test_standard_output_is_no_place_to_save():
    done = CliRunner().invoke(cli.servecast, ["search", "--save", "-", "--over", "max-num-seqs=4,8"])
    assert isinstance(done.exception, BadInput)
    assert "name a file" in str(done.exception)


def test_nothing_to_save_is_no_bad_input(tmp_path):
    args = ["search", "--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--over", "max-num-seqs=4,32"]
    args += ["--slo", "p90 ttft <= 1us", "--prompts", "100", "--seeds", "1", "--jobs", "1"]
    done = CliRunner().invoke(cli.servecast, [*args, "--save", str(tmp_path / "best.yaml")])
    assert done.exit_code == 1
    assert "is not written" in done.output
    assert not list(tmp_path.iterdir())


def test_a_gain_within_the_intervals_is_called_noise(result):
    found = replace(result.best.found, low=6.46, high=7.47, replications=5, left_out=())
    result = replace(result, best=replace(result.best, score=6.97, found=found))
    given = replace(result.given, score=6.85, found=replace(result.best.found, low=6.04, high=7.65))
    noisy = replace(result, given=given)
    assert noisy.clearly_better is False
    text = render_search(noisy, "any")
    assert "+1.8% per GPU: within noise" in text
    assert "as given: as given" not in text
    assert f"as given: {words_of(result.held)}" in text
    clear = replace(result, given=replace(given, score=5.0, found=replace(given.found, high=6.0)))
    assert clear.clearly_better
    assert "clear of chance" in render_search(clear, "any")


def test_a_gain_is_judged_seed_by_seed(result):
    """Seeds that move both alike leave the gain clear, though the intervals overlap."""
    shares = (0.97, 0.99, 1.0, 1.01, 1.03)
    found = replace(result.best.found, low=6.0, high=8.0, replications=5, left_out=shares)
    best = replace(result.best, score=7.0, found=found)
    given = replace(result.given, score=6.6, found=found)
    clear = replace(result, best=best, given=given)
    assert clear.clearly_better
    assert clear.gain.half == pytest.approx(0.0, abs=1e-12)
    assert "+6.1% to +6.1%, seed by seed" in " ".join(render_search(clear, "any").split())
    against = replace(given, found=replace(found, left_out=shares[::-1]))
    noisy = replace(result, best=best, given=against)
    assert noisy.clearly_better is False
    assert noisy.gain.half > math.log(7.0 / 6.6)


def test_the_ranking_tells_losses_so_that_no_point_has_two_loads(result):
    text = render_search(result, "any")
    ranking = text[text.index("which flag matters") : text.index("to start the best")]
    first = result.ranking[0]
    assert dict(first.losses)["32"] == 0.0
    assert "32: 0%" in ranking
    assert f"1: -{dict(first.losses)['1']:.0%}" in ranking
    assert words_of(result.centre) in " ".join(ranking.split())
    assert "(one seed: no interval), 1 GPU\n" in text
    assert "instead of the scenario's 50" in " ".join(text.split())


def test_command_gives_commands_and_a_scenario(tmp_path):
    saved, answer = tmp_path / "best.yaml", tmp_path / "best.json"
    args = ["search", "--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--over", "max-num-seqs=4,32"]
    args += ["--slo", "p90 ttft <= 300ms", "--prompts", "100", "--seeds", "1", "--jobs", "1"]
    done = CliRunner().invoke(cli.servecast, [*args, "--save", str(saved), "--json", str(answer)])
    assert done.exit_code == 0, done.output
    assert "--max-num-seqs 32" in done.output
    assert "servecast bench" in done.output
    rebuilt = build_scenario(file=saved)
    assert rebuilt.engine["max_num_seqs"] == 32
    confirm = next(line for line in done.output.splitlines() if line.startswith("  servecast bench"))
    words = shlex.split(confirm)
    printed = parse_bench_command(words[words.index("--bench") + 1]).spec
    assert printed.num_prompts == rebuilt.workload.num_prompts
    assert printed.request_rate == rebuilt.workload.request_rate
    assert yaml.safe_load(saved.read_text(encoding="utf-8"))["gpu"]
    assert '"ranking"' in answer.read_text(encoding="utf-8")
