"""The steady window: what it cuts, and what its throughputs count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.comparison.compare import compare
from sim.comparison.window import common_window, in_window
from sim.results import RequestRecords
from tests.made_results import records_of, result_of

BEGIN, END = 5.02, 15.02


def falling_behind(n: int = 200) -> RequestRecords:
    """Ten requests a second, of which the server completes five: the one sent at t has its end at 2 t + 1."""
    sent = np.arange(n) / 10.0
    return records_of(sent, sent + 0.5, np.full(n, 0.05))


def test_throughputs_count_what_came_out_in_the_window() -> None:
    records = falling_behind()
    cut = in_window(result_of(records, rate=10.0), BEGIN, END)
    assert cut.records is not None
    assert len(cut.records) == 100  # as many were sent in these ten seconds
    times = records.first_token[:, None] + 0.05 * np.arange(11)
    tokens = int(((times >= BEGIN) & (times <= END)).sum())
    prompts = 100 * int(((records.first_token >= BEGIN) & (records.first_token <= END)).sum())
    assert cut.aggregates["request_throughput"] == pytest.approx(5.0)
    assert cut.aggregates["output_throughput"] == pytest.approx(tokens / 10.0)
    assert cut.aggregates["total_token_throughput"] == pytest.approx((prompts + tokens) / 10.0)


def test_tokens_of_a_message_and_those_without_times_are_spread() -> None:
    records = falling_behind()
    whole = in_window(result_of(records, rate=10.0), BEGIN, END).aggregates["output_throughput"]
    double = replace(records, output_len=2 * records.output_len)
    found = in_window(result_of(double, rate=10.0), BEGIN, END)
    assert found.aggregates["output_throughput"] == pytest.approx(2.0 * float(whole or 0.0))
    untimed = replace(records, itls=np.zeros(0), itl_offsets=np.zeros(201, dtype=np.int64))
    found = in_window(result_of(untimed, rate=10.0), BEGIN, END)
    assert found.aggregates["output_throughput"] == pytest.approx(whole, rel=0.01)


def test_a_failed_request_is_none_that_came_out() -> None:
    records = falling_behind()
    lost = replace(records, status=tuple("timeout" if i == 30 else "ok" for i in range(200)))
    cut = in_window(result_of(lost, rate=10.0), BEGIN, END)
    assert cut.aggregates["request_throughput"] == pytest.approx(4.9)


def test_requests_are_cut_by_the_clock_that_the_window_was_found_on() -> None:
    plan = np.arange(200) / 10.0
    held = records_of(1.5 * plan, np.full(200, 0.1), np.full(200, 0.01), scheduled=plan)
    cut = in_window(result_of(held, rate=10.0), BEGIN, END)
    assert cut.records is not None
    assert cut.records.scheduled.min() == pytest.approx(5.1)
    assert cut.records.scheduled.max() == pytest.approx(15.0)


def test_every_repeat_has_its_say_on_the_window() -> None:
    n = 300
    sent = np.arange(n) / 8.0  # exact in binary, as the shortest transient is to be found exactly
    runs = [
        result_of(records_of(sent, np.where(np.arange(n) < cold, 2.0, 0.125), np.full(n, 0.02)), origin, 8.0)
        for cold, origin in ((0, "predicted"), (40, "measured"), (90, "measured"))
    ]
    window = common_window(runs)
    assert window is not None
    assert window[0] == 90 / 8
    assert window == common_window([runs[0], runs[2], runs[1]])
    (note,) = [note for note in compare(runs[0], runs[1:], window="steady").notes if note.subject == "window"]
    assert note.kind == "info"
    assert "throughputs count what came out in that time" in note.text
    less = replace(runs[2], records=None)
    assert common_window([*runs[:2], less]) is None
