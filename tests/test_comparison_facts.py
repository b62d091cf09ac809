"""What makes two loads the same: rate and cap, ramp and trace, flags and environment; and what is one run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.build import build_scenario
from sim.comparison.compare import compare
from sim.comparison.facts import RATE_WITHIN, fact, load_of, same_load
from sim.comparison.identity import differences, setup_differences
from sim.comparison.loads import grouped, load_name, matching, same_run, scenario_for
from sim.comparison.sources import error_sources
from sim.comparison.text import format_comparison
from sim.errors import NotComparable
from sim.results import BenchResult
from sim.scenario import Scenario
from tests.made_results import (
    SMALL_SCENARIO,
    SUBJECT,
    aggregates_of,
    pair,
    poisson_load,
    records_of,
    result_of,
)

Identity = Mapping[str, Any]

RAMP: Identity = {
    "request_rate": "inf",
    "ramp_up_strategy": "linear",
    "ramp_up_start_rps": 1,
    "ramp_up_end_rps": 9,
}
OWN_RAMP: Identity = {"workload": {"request_rate": "inf", "ramp_up": ["linear", 1.0, 9.0]}}
BURST: Identity = {"request_rate": "inf"}
AT_ONCE: Identity = {"workload": {"request_rate": "inf", "use_trace_arrivals": False}}
TRACE: Identity = {"workload": {"request_rate": "inf", "use_trace_arrivals": True, "rate_scale": 1.0}}
FASTER: Identity = {"workload": {"request_rate": "inf", "use_trace_arrivals": True, "rate_scale": 2.0}}


def measured(identity: Identity, ttft: float = 50.0) -> BenchResult:
    return aggregates_of({"mean_ttft_ms": ttft, "mean_tpot_ms": 10.0}, identity=identity)


def predicted(identity: Identity) -> BenchResult:
    return aggregates_of({"mean_ttft_ms": 50.0}, "predicted", identity)


def scenario_of(tmp_path: Path, bench: str = "--request-rate 4") -> Scenario:
    path = tmp_path / "s.yaml"
    path.write_text(f"serve: vllm serve Qwen/Qwen3-14B\nbench: vllm bench serve {bench}\ngpu: H100\n")
    return build_scenario(file=path)


def in_one_group(*identities: Identity) -> bool:
    runs = [(str(i), measured(identity, 50.0 + i)) for i, identity in enumerate(identities)]
    return len(grouped(runs)) == 1


# -- flags


def flags(*given: tuple[str, str | None], **more: Any) -> Identity:
    return {**SUBJECT, "request_rate": 4.0, "flags": [list(flag) for flag in given], "env": {}, **more}


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (flags(("--max-num-seqs", "64")), flags(("--max-num-seqs", "64")), ""),
        (flags(("--max-num-seqs", "64")), flags(("--max-num-seqs", "128")), "max_num_seqs is 64 a but 128 b"),
        (flags(("--max-num-seqs", "64")), flags(), "max_num_seqs is 64 a but not given b"),
        (
            flags(("--enable-prefix-caching", None)),
            flags(("--no-enable-prefix-caching", None)),
            "enable_prefix_caching is True a but False b",
        ),
        (flags(("--port", "8000")), flags(("--port", "8001")), ""),
        (
            flags(env={"OMP_NUM_THREADS": "1"}),
            flags(env={"OMP_NUM_THREADS": "2"}),
            "OMP_NUM_THREADS is 1 a but 2 b",
        ),
        (flags(env={"HF_TOKEN": "one"}), flags(env={"HF_TOKEN": "two"}), ""),
    ],
)
def test_runs_under_other_flags_are_no_repeats(one: Identity, other: Identity, says: str) -> None:
    told = "; ".join(difference.told("a", "b") for difference in setup_differences(one, other))
    assert told.removeprefix("env ") == says
    assert in_one_group(one, other) == (not says)


def test_a_run_that_does_not_tell_its_flags_is_not_held_to_them() -> None:
    silent = {key: value for key, value in flags().items() if key not in ("flags", "env")}
    assert in_one_group(flags(("--max-num-seqs", "64")), silent)


def test_resolved_arguments_are_held_against_flags_on_either_side() -> None:
    resolved = {"engine_args": {"max_num_seqs": 256, "no_such": None}}
    given = flags(("--max-num-seqs", "64"), ("--unheard-of", None))
    assert [d.told() for d in setup_differences(resolved, given)] == [
        "max_num_seqs is 256 predicted but 64 measured"
    ]
    assert [d.told() for d in setup_differences(given, resolved)] == [
        "max_num_seqs is 64 predicted but 256 measured"
    ]


def test_a_prediction_is_no_repeat_of_a_measurement() -> None:
    same = {"request_rate": 4.0}
    assert len(grouped([("m", measured(same)), ("p", predicted(same))])) == 2


# -- ramps and traces


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (RAMP, RAMP, True),
        (RAMP, OWN_RAMP, True),
        (RAMP, {**RAMP, "ramp_up_end_rps": 12}, False),
        (RAMP, BURST, False),
        (TRACE, TRACE, True),
        (TRACE, FASTER, False),
        (TRACE, AT_ONCE, False),
        (TRACE, {"use_trace_arrivals": True}, True),  # sglang's client tells of no scale
        (RAMP, {**RAMP, "max_concurrency": 8}, False),
    ],
)
def test_ramps_and_traces_make_loads_of_their_own(one: Identity, other: Identity, alike: bool) -> None:
    assert in_one_group(one, other) == same_load(one, other) == alike
    fatal = [difference.key for difference in differences(one, other) if difference.fatal]
    assert bool(fatal) != alike


def test_a_client_that_calls_the_rate_inf_may_have_followed_a_trace() -> None:
    assert not same_load(TRACE, BURST)
    assert not [difference for difference in differences(TRACE, BURST) if difference.fatal]


def test_a_ramp_has_no_one_rate_and_a_name() -> None:
    assert load_of(RAMP) == load_of(OWN_RAMP) == (None, None)
    assert load_name(measured(RAMP)) == "linear ramp from 1 to 9 requests/s"
    assert load_name(measured({**FASTER, "max_concurrency": 8})) == (
        "the trace's times, 2 times as fast, concurrency 8"
    )
    assert load_name(measured(TRACE)) == "the trace's times"


def test_a_prediction_at_a_rate_is_not_one_of_a_ramp() -> None:
    with pytest.raises(
        NotComparable, match="arrivals is by rate and cap predicted but linear ramp from 1 to 9"
    ):
        compare(predicted({"request_rate": 4.0}), measured(RAMP))
    replayed = {
        "workload": {"use_trace_arrivals": True, "dataset": {"kind": "vllm-result", "path": "m.json"}}
    }
    assert not differences(replayed, RAMP)
    # A cap alone does not say whether there was a ramp.
    assert not differences({**OWN_RAMP, "max_concurrency": 8}, {"max_concurrency": 8})


def test_of_several_predictions_that_of_the_ramp_is_taken() -> None:
    ours = [predicted(identity) for identity in (BURST, OWN_RAMP, TRACE, FASTER)]
    assert matching(ours, measured(RAMP)) is ours[1]
    assert matching(ours, measured(FASTER)) is ours[3]
    with pytest.raises(NotComparable, match="linear ramp from 2 to 9 requests/s: no one prediction"):
        matching(ours, measured({**RAMP, "ramp_up_start_rps": 2}))


def test_a_scenario_takes_on_ramp_trace_and_scale(tmp_path: Path) -> None:
    rated = scenario_of(tmp_path)
    ramped = scenario_for(rated, measured({**RAMP, "max_concurrency": 8})).workload
    assert (ramped.request_rate, ramped.ramp_up, ramped.max_concurrency) == (
        math.inf,
        ("linear", 1.0, 9.0),
        8,
    )
    followed = scenario_for(rated, measured(FASTER)).workload
    assert (followed.use_trace_arrivals, followed.rate_scale, followed.ramp_up) == (True, 2.0, None)
    ramp = replace(rated, workload=ramped)
    burst = scenario_for(ramp, measured(BURST)).workload
    assert (burst.request_rate, burst.ramp_up, burst.max_concurrency) == (math.inf, None, None)
    # A report that tells no more than its cap does not say that there was no ramp.
    assert scenario_for(ramp, measured({"max_concurrency": 8})).workload.ramp_up == ("linear", 1.0, 9.0)
    trace = replace(rated, workload=replace(rated.workload, use_trace_arrivals=True, request_rate=math.inf))
    assert scenario_for(trace, measured(BURST)).workload.use_trace_arrivals  # clients call a trace's rate inf
    assert not scenario_for(trace, measured(AT_ONCE)).workload.use_trace_arrivals


def test_a_ramp_that_the_cap_held_back_is_replayed_as_a_ramp(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SMALL_SCENARIO)
    records = records_of(np.repeat(np.arange(5) * 1.0, 2), np.full(10, 0.5), np.full(10, 0.05))
    held = result_of(records, identity={**RAMP, "max_concurrency": 2})
    spec = scenario_for(build_scenario(file=file), held, tmp_path / "m.json").workload
    assert (spec.ramp_up, spec.use_trace_arrivals) == (("linear", 1.0, 9.0), False)


# -- numbers as files write them


def test_facts_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    told = {
        "workload": {"burstiness": "inf", "num_prompts": 100.0, "max_concurrency": 8.0, "request_rate": 4.0}
    }
    assert fact(told, "burstiness") == math.inf
    spec = scenario_for(scenario_of(tmp_path), measured(told)).workload
    assert (spec.burstiness, spec.num_prompts, spec.max_concurrency) == (math.inf, 100, 8)
    assert isinstance(spec.num_prompts, int)


def test_a_printed_rate_is_as_good_as_its_digits(tmp_path: Path) -> None:
    printed = {"request_rate": 0.33, RATE_WITHIN: 0.005}
    assert in_one_group(printed, {"request_rate": 1 / 3})
    assert not in_one_group(printed, {"request_rate": 0.34})
    assert not differences({"request_rate": 1 / 3}, printed)
    assert [d.key for d in differences({"request_rate": 0.4}, printed)] == ["request_rate"]
    exact = scenario_of(tmp_path, "--request-rate 0.3333")
    assert scenario_for(exact, measured(printed)).workload.request_rate == 0.3333
    assert scenario_for(scenario_of(tmp_path), measured(printed)).workload.request_rate == 0.33
    assert load_of({"max_concurrency": 8, RATE_WITHIN: 0.005}) == (None, 8)  # printed as 0.00


def test_a_report_counts_peaks_otherwise_and_is_the_same_run() -> None:
    run = pair()[1]
    rounded = {key: round(float(v), 2) for key, v in run.aggregates.items() if v is not None}
    report = aggregates_of({**rounded, "max_concurrent_requests": rounded["max_concurrent_requests"] + 1})
    assert same_run(run, report)
    assert not same_run(run, aggregates_of({**rounded, "mean_ttft_ms": rounded["mean_ttft_ms"] + 1.0}))


# -- the client's wait


@pytest.mark.parametrize("known", [True, False])
def test_the_wait_in_the_client_is_a_part_where_both_schedules_are_known(known: bool) -> None:
    n = 50
    plan = poisson_load(n, 5.0, 1)
    late = records_of(plan + 0.3, np.full(n, 0.1), np.full(n, 0.01), scheduled=plan)
    unknown = replace(late, scheduled=np.full(n, np.nan))
    ours = result_of(late, "predicted", rate=5.0)
    theirs = result_of(late if known else unknown, rate=5.0)
    found = error_sources(ours, theirs)
    assert found is not None
    assert ("client" in [part.name for part in found.parts]) == found.from_schedule == known
    assert ("latency from schedule by part" in format_comparison(compare(ours, theirs))) == known
    # Without the wait on either side, what is left is alike on both.
    assert all(part.share == pytest.approx(0.0) for part in found.parts)
