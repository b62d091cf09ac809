"""Leaps where SGLang admits more than can stay, so that requests are retracted over and over."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sim.engines.sglang.scheduler import SglangScheduler
from sim.request import Request
from sim.steptime.base import FrontEnd
from tests.engines_for_tests import SGLANG
from tests.leap_workloads import BentSteps, Case, differences


def crowded(seed: int) -> Case:
    """Short prompts, long outputs, a small pool, and a reserve that is soon forgotten."""
    rng = random.Random(f"crowded/{seed}")
    longest, rate = rng.choice((60, 200)), rng.choice((math.inf, 20.0, 3.0))
    hot, stopping, page = rng.choice((0.0, 0.5)), rng.choice((0.0, 0.0, 0.4)), rng.choice((1, 1, 4, 16))
    arrival, requests = 0.0, []
    for number in range(rng.randint(5, 50)):
        if rate < math.inf:
            arrival += rng.expovariate(rate)
        output = rng.randint(longest // 2, longest)
        family = ((f"family{rng.randrange(2)}", 9),) if rng.random() < hot else ()
        stop = rng.randint(1, output) if rng.random() < stopping else None
        prompt = (*family, (f"own{number}", rng.randint(1, 20)))
        requests.append(Request(str(number), prompt, output, arrival, stop))
    tokens = int((longest + 40) * rng.choice((1.3, 2.0, 4.0))) + 4 * page
    config = replace(
        SGLANG,
        max_running_requests=rng.choice((8, 64)),
        chunked_prefill_size=rng.choice((64, 2048, -1)),
        max_total_tokens=-(-tokens // page) * page,
        page_size=page,
        disable_overlap_schedule=rng.random() < 0.4,
        init_new_token_ratio=rng.choice((0.05, 0.3)),
        min_new_token_ratio=0.001,
        new_token_ratio_decay=rng.choice((0.01, 1.0)),
        prefill_max_requests=rng.choice((None, 1)),
        prefill_decode_interval=rng.choice((0, 0, 2)),
        context_length=8192,
    )
    model = BentSteps(
        step=rng.uniform(1e-3, 3e-2),
        before=rng.choice((0.0, 1e-2)),
        after=rng.choice((0.0, 5e-3)),
        front_end=FrontEnd(output_token=rng.choice((0.0, 1e-4, 2e-3))),
    )
    options = {"stream_interval": rng.choice((1, 3)), "max_concurrency": rng.choice((None, 20))}
    return Case(lambda: SglangScheduler(config), requests, model, options)


@pytest.mark.parametrize("group", range(2))
def test_retractions_leave_the_same_records(group: int) -> None:
    retractions = 0
    for seed in range(20 * group, 20 * group + 20):
        case = crowded(seed)
        plain, leapt = case.outcome(leap=False), case.outcome(leap=True)
        assert not differences(plain, leapt), seed
        retractions += 0 if isinstance(leapt, str) else leapt.usage.preemptions
    assert retractions > 50
