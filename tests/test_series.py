"""Queue states that are taken in runs are those taken one by one."""

from __future__ import annotations

import random

import pytest

from sim.loop.leap import Stretch
from sim.loop.series import SeriesBuffer


@pytest.mark.parametrize("limit", [8, 50, 4096])
def test_runs_of_samples_are_the_samples(limit: int) -> None:
    rng = random.Random(limit)
    by_run, one_by_one = SeriesBuffer(limit), SeriesBuffer(limit)
    now, held = 0.0, 0
    for _ in range(80):
        running, waiting, period, growth = rng.randrange(9), rng.randrange(3), rng.random(), rng.random()
        stretch = Stretch(now, now + 0.1, now + 0.3, period, growth)
        begun = sorted(rng.randrange(5) for _ in range(rng.choice((1, 1, 2, 3, 40))))
        by_run.add_run(stretch, begun, 16, (running, waiting, held, 9000))
        for call, blocks in enumerate(begun):
            one_by_one.add(stretch.call(call), running, waiting, held + 16 * blocks, 9000)
        now, held = stretch.call(len(begun)), held + 16 * begun[-1]
        by_run.add(now, 1, 2, held, 9000)
        one_by_one.add(now, 1, 2, held, 9000)
    told, expected = by_run.since(0.25), one_by_one.since(0.25)
    assert 0 < len(expected.time) == len(told.time) < limit
    for name in ("time", "running", "waiting", "kv_usage"):
        assert getattr(told, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_no_samples_are_an_empty_series() -> None:
    assert len(SeriesBuffer().since(0.0).time) == 0
