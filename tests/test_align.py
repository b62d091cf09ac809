"""Measured intervals as sums of simulated steps: what is booked where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from calibration.align import APART, PIECE, Rows, align, join, step_rows
from calibration.evidence import PerRequest
from calibration.replay import Pace, Replay, replay
from sim.build import build_scenario
from sim.request import Request
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import RooflineModel


def scenario(flags: str = "") -> Scenario:
    return build_scenario(
        serve=f"vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 8 {flags}",
        bench="vllm bench serve --num-prompts 5",
        gpu="L40S",
        engine_version="0.28.0",
        kv_cache_tokens=50_000,
    )


def model(subject: Scenario, **changes: float) -> RooflineModel:
    base = roofline(subject)
    plain = replace(base.efficiencies, throttle=0.0, output_token=0.0)
    return replace(base, efficiencies=replace(plain, **changes))


def load(count: int = 12, every: float = 0.15, prompt: int = 600, output: int = 40) -> tuple[Request, ...]:
    return tuple(Request(str(i), ((i, prompt + 37 * i),), output, every * i) for i in range(count))


def seen(run: Replay, requests: tuple[Request, ...], token_times: bool = False) -> PerRequest:
    """What a client without noise would have recorded of a replay."""
    records = run.records
    times = tuple(np.empty(0) for _ in requests)
    if token_times:
        ends = records.itl_offsets
        own = records.first_token - records.sent
        times = tuple(
            own[i] + np.concatenate(([0.0], np.cumsum(records.itls[ends[i] : ends[i + 1]])))
            for i in range(len(requests))
        )
    return PerRequest(
        requests,
        records.first_token - records.sent,
        records.last_token - records.first_token,
        records.output_len.copy(),
        times,
    )


def lined_up(
    every: float = 0.15, token_times: bool = False, near: int = APART, **changes: float
) -> tuple[Replay, Rows, Efficiencies]:
    subject, requests = scenario(), load(every=every)
    priced = model(subject, **changes)
    run = replay(subject, requests, priced)
    return run, align(run, seen(run, requests, token_times), priced.front_end, near), priced.efficiencies


@pytest.mark.parametrize("every", [2.0, 0.15, 0.01])
@pytest.mark.parametrize("token_times", [False, True])
def test_at_the_replay_s_own_coefficients_rows_are_what_was_simulated(
    every: float, token_times: bool
) -> None:
    run, rows, efficiencies = lined_up(every, token_times)
    predicted = rows.predicted(run.duration, efficiencies.front_end)
    assert len(rows) > 12
    # The host hands a larger batch over some microseconds later, which rows leave out.
    assert predicted == pytest.approx(rows.measured, abs=1e-4)


def test_slower_steps_lengthen_every_row_by_the_steps_it_holds() -> None:
    run, rows, efficiencies = lined_up()
    slow = rows.predicted(2.0 * run.duration, efficiencies.front_end)
    extra = slow - rows.predicted(run.duration, efficiencies.front_end)
    total = np.concatenate(([0.0], np.cumsum(run.duration)))
    before = np.where(rows.before >= 0, rows.share * run.duration[rows.before], 0.0)
    assert extra == pytest.approx(total[rows.last + 1] - total[rows.first] + before)
    assert (extra > 0).all()


def test_a_request_that_finds_the_engine_idle_waits_for_no_step() -> None:
    _, rows, _ = lined_up(every=3.0)
    assert (rows.before[rows.kind == 0] == -1).all()
    _, busy, _ = lined_up(every=0.05, near=0)
    waited = busy.before[busy.kind == 0] >= 0
    assert waited.sum() >= 8
    shares = busy.share[busy.kind == 0][waited]
    assert ((shares >= 0.0) & (shares <= 1.0)).all()


def test_first_tokens_of_a_busy_engine_are_compared_with_the_ones_before() -> None:
    run, busy, _ = lined_up(every=0.05)
    heads = busy.select(busy.kind == 0)
    later = heads.select(heads.delays == 0)
    # All but the first, who found the engine idle; nothing outside the engine counts in them.
    assert len(later) == 11
    assert (later.before == -1).all()
    assert not later.requests.any()
    own = np.unique([steps[0] for steps in run.token_steps])
    assert set(later.first - 1) <= set(own)
    assert set(later.last) == set(own[1:])


def test_noise_among_tokens_of_one_step_does_not_choose_the_rows() -> None:
    subject = scenario("--max-num-batched-tokens 4096")
    requests = tuple(Request(str(i), ((i, 300),), 30, 2.0 * (i // 3)) for i in range(24))
    priced = model(subject)
    run = replay(subject, requests, priced)
    clean = seen(run, requests)
    rng = np.random.default_rng(1)
    noisy = replace(clean, ttft=clean.ttft + 0.002 * rng.standard_normal(24))
    rows = align(run, noisy, priced.front_end)
    assert (rows.kind == 0).sum() == 24


def test_the_front_end_is_booked_by_request_and_token() -> None:
    _, rows, efficiencies = lined_up(every=3.0, front_request=0.002, front_prompt_token=1e-6)
    heads = rows.select(rows.kind == 0)
    assert heads.requests == pytest.approx(np.ones(12))
    assert heads.prompt_tokens == pytest.approx(600 + 37 * np.arange(12))
    assert heads.delays == pytest.approx(np.ones(12))
    slower = replace(efficiencies, front_request=0.005).front_end
    more = heads.predicted(np.zeros(1000), slower) - heads.predicted(np.zeros(1000), efficiencies.front_end)
    assert more == pytest.approx(np.full(12, 0.003))


def test_requests_that_come_together_queue_for_the_front_end() -> None:
    subject = scenario()
    requests = tuple(Request(str(i), ((i, 300),), 4, 0.0) for i in range(6))
    priced = model(subject, front_request=0.004, front_prompt_token=0.0)
    run = replay(subject, requests, priced)
    rows = align(run, seen(run, requests), priced.front_end, near=0)
    heads = rows.select(rows.kind == 0)
    assert sorted(heads.requests.tolist()) == pytest.approx([1, 2, 3, 4, 5, 6])


def test_token_times_are_cut_into_short_pieces() -> None:
    _, whole, _ = lined_up()
    _, pieces, _ = lined_up(token_times=True)
    bodies = pieces.select(pieces.kind == 1)
    assert (whole.tokens[whole.kind == 1] == 39).all()
    assert bodies.tokens.max() < 2 * PIECE
    # 39 gaps are cut into 16 and 23: a rest too short to stand alone goes with the piece before.
    assert sorted(set(bodies.tokens.tolist())) == [16, 23]
    assert bodies.measured.sum() == pytest.approx(whole.measured[whole.kind == 1].sum())


def test_what_was_not_measured_has_no_row() -> None:
    subject, requests = scenario(), load()
    priced = model(subject)
    run = replay(subject, requests, priced)
    full = seen(run, requests)
    half = np.arange(12) < 6
    part = replace(full, ttft=np.where(half, full.ttft, np.nan), decode=np.where(half, full.decode, np.nan))
    rows = align(run, part, priced.front_end)
    assert (rows.kind == 0).sum() == 6
    assert (rows.kind == 1).sum() == 6


def test_rows_of_steps_hold_one_step_each() -> None:
    seconds, host = np.array([0.01, 0.02, 0.03]), np.array([0.001, 0.0, 0.0])
    rows = step_rows(seconds, host)
    assert (rows.kind == 2).all()
    front = roofline(scenario()).front_end
    assert rows.predicted(seconds - host, front) == pytest.approx(seconds)
    both = join([rows, rows])
    assert len(both) == 6


def test_a_paced_replay_keeps_the_measured_pace_though_its_coefficients_are_wrong() -> None:
    subject, requests = scenario(), load(count=30, every=0.1)
    right = model(subject)
    truth = replay(subject, requests, right)
    first = {r: float(t) for r, t in zip(truth.records.request_id, truth.records.first_token, strict=True)}
    wrong = model(subject, weight_bandwidth=right.efficiencies.weight_bandwidth * 0.8, gemm_flops=0.4)
    free = replay(subject, requests, wrong)
    paced = replay(subject, requests, wrong, pace=Pace({rid: {1: time} for rid, time in first.items()}))

    def error(run: Replay) -> float:
        return float(np.abs(run.records.last_token - truth.records.last_token).mean())

    assert error(paced) < 0.5 * error(free)
