"""One setting changes, the rest stays: what moved, by how much, and why."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

import cli
from sim.build import read_source
from sim.carry import account_of
from sim.errors import BadInput
from sim.planning.jobs import run_serially
from sim.planning.margin import ModelError
from sim.planning.mechanism import explain, queue_cause, requests_that_fit
from sim.planning.outcome import Outcome, mean_outcome
from sim.planning.stats import estimate, jackknife, paired_difference, paired_ratio
from sim.planning.text import milliseconds
from sim.planning.vary import build, full_grid, one_at_a_time, parse_vary, variant
from sim.planning.whatif import METRICS, changes, count_points, same_prompts, steps_of, what_if
from sim.planning.whatif_text import render_whatif, table_rows
from sim.reference import rtx5090_reference
from sim.scenario import Observed
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset, WorkloadSpec

SERVE = (
    "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024 --max-num-seqs 32 "
    "--max-num-batched-tokens 2048"
)
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 256 --random-output-len 16 "
    "--random-range-ratio 0.5 --request-rate 40 --num-prompts 40"
)


def source(serve=SERVE, bench=BENCH, **more):
    return read_source(serve=serve, bench=bench, gpu="L4", **more)


def small_kv(**more):
    return source(kv_cache_tokens=4096, **more)


@pytest.fixture(scope="module")
def reference():
    """The published run, varied in concurrency as it was measured: on one engine, one after the other."""
    setup = rtx5090_reference()
    base = read_source(
        serve=setup.vllm.serve,
        bench=f"{setup.bench} --max-concurrency 128 --num-prompts 256",
        gpu=setup.gpu,
        engine_version=setup.vllm.version,
        kv_cache_tokens=setup.vllm.kv_cache_tokens,
    )
    return what_if(base, parse_vary(["max-concurrency=16,64,128"]), run_serially)


def test_reference_throughput_peaks_at_64_while_ttft_multiplies(reference):
    low, middle, high = reference.rows[0].points
    assert [p.scenario.workload.num_prompts for p in (low, middle, high)] == [32, 128, 256]
    rate = [p.outcomes[0].get("output_throughput") for p in (low, middle, high)]
    assert rate[0] < rate[1]
    assert rate[2] < 1.02 * rate[1]
    ttft = [p.outcomes[0].get("mean_ttft_ms") for p in (low, middle, high)]
    assert 3.8 <= ttft[2] / ttft[1] <= 5.0  # published: 4.4


def test_reference_names_kv_admission(reference):
    _, middle, high = reference.rows[0].points
    assert queue_cause(high.outcomes[0]).cause == "kv"
    assert requests_that_fit(high.outcomes[0]) == 42
    told = " ".join(explain(middle, high))
    assert "KV admission" in told
    assert "42 requests" in told
    assert "max_num_seqs 128" in told


def test_reference_tells_what_the_cache_of_the_run_before_did(reference):
    middle = reference.rows[0].points[1]
    assert middle.fresh is not None
    assert middle.fresh.get("mean_ttft_ms") > 1.2 * middle.outcomes[0].get("mean_ttft_ms")
    assert "left in the prefix cache" in " ".join(explain(*reference.rows[0].points[:2]))
    assert "on one engine" in render_whatif(reference)


def test_load_without_chance_runs_once(reference):
    assert not reference.random
    assert len(reference.rows[0].points[0].outcomes) == 1
    assert "nothing in this load is random" in render_whatif(reference)


def test_one_setting_at_a_time_locks_the_others_and_says_so():
    answer = what_if(
        source(), parse_vary(["max-num-seqs=4,32", "max-num-batched-tokens=512,2048"]), run_serially
    )
    assert [len(row.points) for row in answer.rows] == [2, 2]
    seqs, budget = answer.rows
    assert {p.scenario.engine["max_num_batched_tokens"] for p in seqs.points} == {2048}
    assert {p.scenario.engine["max_num_seqs"] for p in budget.points} == {32}
    text = render_whatif(answer, explained=True)
    assert "locked: max-num-batched-tokens at 2048" in text
    assert "locked: max-num-seqs at 32" in text
    assert max(map(len, text.splitlines())) <= 100


def test_grid_has_every_combination():
    points = full_grid(source(), parse_vary(["max-num-seqs=4,32", "max-num-batched-tokens=512,2048"]))
    labels = [v.label for v in points]
    assert len(labels) == len(set(labels)) == 4
    assert labels[1] == "max-num-seqs=4, max-num-batched-tokens=2048"


def test_every_point_gets_the_same_requests():
    answer = what_if(source(), parse_vary(["max-num-seqs=2,32"]), run_serially, replications=2)
    few, many = answer.rows[0].points
    for ours, theirs in zip(few.outcomes, many.outcomes, strict=True):
        assert ours.get("total_input_tokens") == theirs.get("total_input_tokens")
    assert few.outcomes[0].get("total_input_tokens") != few.outcomes[1].get("total_input_tokens")


def test_too_few_slots_are_named_as_the_cause_of_the_queue():
    answer = what_if(source(), parse_vary(["max-num-seqs=32,2"]), run_serially)
    before, after = answer.rows[0].points
    assert queue_cause(after.outcomes[0]).cause == "slots"
    assert any("sequence slots" in line for line in explain(before, after))
    ttft = next(c for c in changes(before, after) if c.key == "mean_ttft_ms")
    assert ttft.clear
    assert not ttft.small
    assert ttft.ratio.mean > 1


def test_the_explanation_tells_the_figures_of_the_table():
    answer = what_if(source(), parse_vary(["max-num-seqs=2,32"]), run_serially)
    before, after = answer.rows[0].points
    told = next(line for line in explain(before, after) if line.startswith("mean TTFT"))
    means = [milliseconds(p.estimate("mean_ttft_ms").mean) for p in (before, after)]
    ratio = next(c for c in changes(before, after) if c.key == "mean_ttft_ms").ratio.mean
    assert f"from {means[0]} to {means[1]}, x{ratio:.2f}" in told
    assert means[0] != milliseconds(before.outcomes[0].get("mean_ttft_ms"))
    text = render_whatif(answer, explained=True)
    assert "means over these seeds" in text


def test_a_part_that_moved_by_more_than_all_is_told_with_what_went_against_it():
    base = what_if(source(), parse_vary(["max-num-seqs=32"]), run_serially, replications=1).rows[0]

    def point(ttft, prefill, queue):
        figures = {key: 1.0 for key, _ in METRICS} | {"mean_ttft_ms": ttft}
        parts = {"prefill": prefill, "queue": queue}
        return replace(base.points[0], outcomes=(Outcome(figures=figures, parts_ms=parts),))

    told = " ".join(explain(point(100.0, 80.0, 20.0), point(200.0, 196.0, 4.0)))
    assert "prefill moved by more than the whole change and queue the other way" in told
    assert "116%" not in told
    told = " ".join(explain(point(100.0, 80.0, 20.0), point(200.0, 170.0, 30.0)))
    assert "90% of the change is prefill" in told


def test_seeds_are_pooled_as_means_and_highest_queues_as_the_highest():
    one = Outcome(figures={"a": 1.0, "b": 2}, waiting={"kv": 2.0}, queues={"max_running": 3.0})
    two = Outcome(figures={"a": 2.0, "b": None}, queues={"max_running": 5.0})
    pooled = mean_outcome([one, two])
    assert pooled.figures == {"a": 1.5, "b": None}
    assert pooled.waiting == {"kv": 1.0}
    assert pooled.queues == {"max_running": 5.0}
    assert mean_outcome([one]) is one


def test_too_little_kv_is_named_as_the_cause_of_the_queue():
    busy = source(bench=BENCH.replace("rate 40", "rate 400"))
    answer = what_if(busy, parse_vary(["kv-cache-tokens=200000,1024"]), run_serially)
    assert queue_cause(answer.rows[0].points[1].outcomes[0]).cause == "kv"


def test_nothing_moves_where_a_setting_does_not_bind():
    answer = what_if(source(), parse_vary(["max-num-seqs=256,512"]), run_serially)
    told = explain(*answer.rows[0].points)
    assert len(told) == 1
    assert "nothing moves" in told[0]


def test_observed_kv_pool_moves_by_the_difference_of_the_accounts():
    base = source(kv_cache_tokens=1_000_000)
    scenario = base.build()
    estimated = account_of(replace(scenario, observed=Observed()))
    half, told = build(variant(base, (("gpu-memory-utilization", "0.8"),)), scenario, 0)
    less = account_of(replace(half, observed=Observed()))
    gone = (estimated.kv_pool_bytes - less.kv_pool_bytes) / estimated.kv_bytes_per_token
    assert gone > 100_000
    assert half.observed.kv_cache_tokens == pytest.approx(1_000_000 - gone, abs=32)
    assert "from 1,000,000 to" in told


def test_a_pool_that_a_flag_sets_or_takes_away_is_not_carried():
    base = small_kv()
    scenario = base.build()
    own, told = build(variant(base, (("num-gpu-blocks-override", "500"),)), scenario, 0)
    assert own.observed == Observed()
    assert "says nothing of this one" in told
    with pytest.raises(BadInput, match=r"observed KV pool: its .* are less than the other flags take away"):
        build(variant(base, (("gpu-memory-utilization", "0.45"),)), scenario, 0)


def test_a_load_leaves_the_observed_kv_pool_alone():
    base = small_kv()
    scenario = base.build()
    same, untold = build(variant(base, (("max-concurrency", "8"),)), scenario, 0)
    assert same.observed.kv_cache_tokens == 4096
    assert untold is None


def test_another_gpu_forgets_the_observed_kv_pool():
    base = small_kv()
    moved, _ = build(variant(base, (("gpu", "H100"),)), base.build(), 0)
    assert moved.gpu.name.startswith("H100")
    assert moved.observed.kv_cache_tokens is None


def test_prompts_go_with_concurrency_unless_kept_or_varied():
    base = source()
    assert one_at_a_time(base, parse_vary(["max-concurrency=64"]))[0][0].source.bench.spec.num_prompts == 128
    kept = one_at_a_time(base, parse_vary(["max-concurrency=64"]), scale_prompts=False)
    assert kept[0][0].source.bench.spec.num_prompts == 40
    both = full_grid(base, parse_vary(["max-concurrency=64", "num-prompts=33"]))
    assert both[0].source.bench.spec.num_prompts == 33


def test_shared_prefixes_keep_their_prompts_whatever_the_concurrency():
    gsp = "python -m sglang.bench_serving --dataset-name generated-shared-prefix --gsp-num-groups 64"
    base = read_source(serve="vllm serve Qwen/Qwen3-8B", bench=gsp, gpu="H100")
    changed = variant(base, (("max-concurrency", "1"),))
    assert (changed.source.bench.spec.num_prompts, changed.derived) == (1024, ())
    few = variant(base, (("bench.num-prompts", "10"), ("max-concurrency", "1")))
    assert few.source.bench.spec.num_prompts == 64
    assert [name for name, _, _ in few.derived] == ["num-prompts"]


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (WorkloadSpec(num_prompts=10), WorkloadSpec(num_prompts=20), True),
        (WorkloadSpec(num_prompts=10), WorkloadSpec(num_prompts=10, seed=1), False),
        (
            WorkloadSpec(RandomDataset(range_ratio=0.5), num_prompts=10),
            WorkloadSpec(RandomDataset(range_ratio=0.5), num_prompts=20),
            False,
        ),
        (
            WorkloadSpec(PrefixRepetitionDataset(), num_prompts=10),
            WorkloadSpec(PrefixRepetitionDataset(), num_prompts=20),
            False,
        ),
        (WorkloadSpec(), WorkloadSpec(request_rate=2.0), True),
    ],
)
def test_which_runs_send_the_same_prompts(one, two, same):
    assert same_prompts(one, two) is same


def test_cold_runs_are_the_same_whatever_came_before():
    dims = parse_vary(["max-concurrency=4,8"])
    fresh = what_if(source(), dims, run_serially, fresh=True)
    alone = what_if(source(), parse_vary(["max-concurrency=8"]), run_serially, fresh=True)
    assert not fresh.kept_engine
    assert fresh.rows[0].points[1].outcomes == alone.rows[0].points[0].outcomes


def test_a_value_that_cannot_run_is_told_beside_the_others():
    answer = what_if(source(), parse_vary(["kv-cache-tokens=64,8192"]), run_serially)
    small, enough = answer.rows[0].points
    assert small.failure is not None
    assert enough.failure is None
    assert "cannot run" in render_whatif(answer)
    assert steps_of(answer.rows[0]) == []


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ([], "nothing to vary"),
        (["max-num-seqs"], "KEY=VALUE"),
        (["max-num-seqs="], "empty value"),
        (["max-num-seqs=1,1"], "same value twice"),
        (["max-num-seqs=1", "max_num_seqs=2"], "varied twice"),
    ],
)
def test_bad_vary_is_named(vary, says):
    with pytest.raises(BadInput, match=says):
        parse_vary(vary)


def test_a_secret_is_not_varied():
    with pytest.raises(BadInput, match="is a secret"):
        one_at_a_time(source(), parse_vary(["api-key=a,b"]))


def test_unknown_setting_is_named_with_the_nearest():
    with pytest.raises(BadInput, match="max-num-seqs"):
        one_at_a_time(source(), parse_vary(["max-num-seqz=1"]))


@pytest.mark.parametrize("vary", ["request-rate=20,40", "random-range-ratio=0,0.5"])
def test_chance_that_a_setting_brings_in_is_met_with_several_seeds(vary):
    fixed = (
        "vllm bench serve --dataset-name random --random-input-len 64 --random-output-len 4 --num-prompts 20"
    )
    answer = what_if(source(bench=fixed), parse_vary([vary]), run_serially, replications=2)
    assert answer.random
    assert {len(point.outcomes) for row in answer.rows for point in row.points} == {2}


def test_warnings_of_a_point_name_it():
    answer = what_if(source(), parse_vary(["engine-version=0.28,0.5"]), run_serially, replications=1)
    (note,) = [n for n in answer.notes if n.subject == "--engine-version" and n.kind == "warning"]
    assert note.text.startswith("engine-version=0.5: the scheduling rules")


def test_a_value_is_a_value_however_it_is_written():
    for text in ("request-rate=5,5.0", "gpu=L4,l4"):
        with pytest.raises(BadInput, match="same value twice"):
            parse_vary([text])


def test_seeds_are_no_setting():
    with pytest.raises(BadInput, match="--seeds say which"):
        one_at_a_time(source(), parse_vary(["bench.seed=1,2"]))


def test_a_pool_that_is_varied_beside_the_gpu_is_the_one_that_is_named():
    for texts in (["kv-cache-tokens=5000,9000", "gpu=L4,H100"], ["gpu=L4,H100", "kv-cache-tokens=5000,9000"]):
        for point in full_grid(source(), parse_vary(texts)):
            scenario, _ = build(point, source().build(), 0)
            assert scenario.observed == Observed(int(dict(point.settings)["kv-cache-tokens"]))


def test_a_parallel_size_brings_its_gpus():
    two = source(gpu_count=2)
    (points,) = one_at_a_time(two, parse_vary(["tensor-parallel-size=1,2"]))
    assert [build(p, two.build(), 0)[0].gpu_count for p in points] == [1, 2]
    assert {p.derived for p in points} == {
        (("gpu-count", "as many as it takes", "a replica's parallel sizes say"),)
    }
    grid = full_grid(two, parse_vary(["tensor-parallel-size=1", "gpu-count=2"]))
    assert [build(p, two.build(), 0)[0].gpu_count for p in grid] == [2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--grid", "--explain"], "leave out --grid"),
        (["--backend", "dask", "--address", "localhost:1", "--jobs", "2"], "its own workers"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words, says):
    args = ["whatif", "--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--vary", "max-num-seqs=4,8"]
    done = CliRunner().invoke(cli.servecast, [*args, *words])
    assert isinstance(done.exception, BadInput)
    assert says in str(done.exception)


def test_counting_points():
    dims = parse_vary(["max-num-seqs=1,2,3", "max-num-batched-tokens=512,2048"])
    assert count_points(dims, grid=False) == 5
    assert count_points(dims, grid=True) == 6


@pytest.mark.parametrize(
    ("tails", "difference", "clear"),
    [
        ([125.0, 250.0], False, False),  # the same factor, but +25 and +50 ms: two differences say little
        ([120.0, 220.1], True, False),  # +20 ms twice, but +20 and +10 %
        ([1100.0, 1200.1], True, False),  # x11 and x6
        ([99.0, 201.0], False, False),
    ],
)
def test_a_change_is_clear_only_if_the_factor_that_is_told_is(tails, difference, clear):
    answer = what_if(source(), parse_vary(["max-num-seqs=2,32"]), run_serially)
    before, after = (
        replace(
            point,
            outcomes=tuple(
                replace(outcome, figures={**outcome.figures, "p99_e2el_ms": value})
                for outcome, value in zip(point.outcomes, values, strict=False)
            ),
        )
        for point, values in zip(answer.rows[0].points, ([100.0, 200.0], tails), strict=True)
    )
    found = next(c for c in changes(before, after) if c.key == "p99_e2el_ms")
    assert found.difference.clear_of_zero == difference
    assert found.clear == clear


def test_intervals_of_paired_runs():
    after, before = [11.0, 21.0, 31.0], [10.0, 20.0, 30.0]
    assert not estimate(after).clear_of_zero
    difference = paired_difference(after, before)
    assert (difference.mean, difference.half) == (1.0, 0.0)
    assert difference.clear_of_zero
    assert estimate([1.0]).half is None
    assert paired_ratio([1.0], [0.0]) is None
    # The jackknife of a mean is the standard error of the mean.
    data = [1.0, 2.0, 4.0, 9.0]
    left_out = [(sum(data) - x) / 3 for x in data]
    assert jackknife(4.0, left_out).half == pytest.approx(estimate(data).half)


def test_json_rows_carry_every_outcome():
    answer = what_if(source(), parse_vary(["max-num-seqs=4,32"]), run_serially, replications=2)
    rows = json.loads(json.dumps(table_rows(answer)))
    assert [row["settings"] for row in rows] == [{"max-num-seqs": "4"}, {"max-num-seqs": "32"}]
    assert len(rows[0]["outcomes"]) == 2
    assert rows[0]["figures"]["mean_ttft_ms"]["half"] >= 0


def test_command_draws_and_writes(tmp_path):
    picture, points = tmp_path / "w.svg", tmp_path / "w.json"
    # One slot is too little by so much that two seeds are enough to say so.
    args = ["--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--vary", "max-num-seqs=1,32", "--seeds", "2"]
    done = CliRunner().invoke(
        cli.servecast, ["whatif", *args, "--explain", "--plot", str(picture), "--json", str(points)]
    )
    assert done.exit_code == 0, done.output
    assert "mean TTFT" in done.output
    titles, units = done.output.splitlines()[1:3]
    assert titles.index("TTFT mean") + len("TTFT mean") == units.index("ms") + 2
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert len(json.loads(points.read_text(encoding="utf-8"))["points"]) == 2


def test_what_a_small_change_means_depends_on_calibration():
    dims = parse_vary(["max-num-seqs=4,32"])
    plain = what_if(source(), dims, run_serially, replications=2)
    text = " ".join(render_whatif(plain).split())
    assert "Not calibrated: absolute figures may be off by about" in text
    assert f"{plain.error.share:.0%}" in text
    calibrated = render_whatif(replace(plain, error=ModelError(0.02, "profile p", drawn=True)))
    assert "Not calibrated" not in calibrated
    assert "Changes below 2% are within a calibrated model's error." in " ".join(calibrated.split())


def test_many_points_need_a_yes():
    values = ",".join(str(n) for n in range(1, 300))
    args = ["whatif", "--serve", SERVE, "--bench", BENCH, "--gpu", "L4", "--vary", f"max-num-seqs={values}"]
    done = CliRunner().invoke(cli.servecast, args)
    assert isinstance(done.exception, BadInput)
    assert "--yes" in str(done.exception)


def test_same_question_same_answer():
    dims = parse_vary(["max-num-seqs=4,32"])
    first, second = (what_if(source(), dims, run_serially) for _ in range(2))
    assert table_rows(first) == table_rows(second)
    moved = what_if(replace(source(), seed=7), dims, run_serially)
    assert table_rows(moved) != table_rows(first)
