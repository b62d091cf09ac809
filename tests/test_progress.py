"""Progress: on standard error, sparing where nobody watches."""

import sys
from functools import partial

from sim.cli.progress import ShownCount, ShownProgress
from sim.planning.pool import Cores


def test_progress_off_a_terminal_is_a_line_every_few_seconds(capsys):
    now = [0.0]
    progress = ShownProgress(lambda: now[0])
    for done in range(1, 101):
        now[0] += 0.125
        progress(done, 100, 10.0)
    told = capsys.readouterr().err.splitlines()
    assert told == ["40/100 runs, about 10 s left", "80/100 runs, about 10 s left"]
    now[0] = 0.0
    quick = ShownProgress(lambda: now[0])
    quick(1, 1, 0.0)
    assert capsys.readouterr().err == ""


def test_a_count_without_a_total_says_how_long_it_takes(capsys):
    now = [0.0]
    with ShownCount(clock=lambda: now[0]) as count:
        for _ in range(100):
            now[0] += 0.125
            count()
    assert capsys.readouterr().err.splitlines() == ["40 simulations, 5 s", "80 simulations, 10 s"]


def test_on_a_terminal_the_line_is_taken_back(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ShownCount("tries", lambda: 1.0) as count:
        count()
        count()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.split("\r")[1].strip() == "1 tries, 0 s"
    assert told.err.endswith(" \r")
    assert "\n" not in told.err


def double(value: int) -> int:
    return 2 * value


def test_a_pool_tells_of_every_job():
    for workers in (1, 2):
        seen: list[int] = []
        found = Cores(workers, partial(seen.append, 1))(double, [1, 2, 3])
        assert found == [2, 4, 6]
        assert len(seen) == 3
