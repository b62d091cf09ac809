"""Objectives: read from words, refused where they make no sense, held against runs."""

import numpy as np
import pytest

from sim.errors import BadInput
from sim.planning.outcome import Outcome
from sim.planning.probe import Probe, attainment, load_ratio, value_of
from sim.planning.slo import Slo, parse_slo, parse_slos


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("p99 ttft <= 500ms", Slo("ttft", 0.5, 99.0)),
        ("P99.9 TPOT<50 ms", Slo("tpot", 0.05, 99.9, strict=True)),
        ("mean e2e < 3s", Slo("e2el", 3.0, mean=True, strict=True)),
        ("ttft p95 <= 1.5 s", Slo("ttft", 1.5, 95.0)),
        ("p90(itl) ≤ 80ms", Slo("itl", 0.08, 90.0)),
        ("median_e2el <= 2min", Slo("e2el", 120.0, 50.0)),
        ("max ttft <= 1e3 ms", Slo("ttft", 1.0, 100.0)),
        ("tpot <= 40ms", Slo("tpot", 0.04)),
    ],
)
def test_objectives_are_read(text, slo):
    read = parse_slo(text)
    assert read == slo
    assert parse_slo(str(read)) == read


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("p99 ttft", "must read like"),
        ("p99 ttft >= 500ms", "upper limit"),
        ("p99 ttft = 500ms", "upper limit"),
        ("p99 ttft <= 500", "a unit"),
        ("p99 ttft <= 500h", "no such unit"),
        ("p99 ttft <= -5ms", "above 0"),
        ("p99 ttft <= 0ms", "above 0"),
        ("p99 ttft <= 1e999s", "above 0 and finite"),
        ("p99 ttft <= e5s", "not a number"),
        ("p0 ttft <= 5ms", "percentile"),
        ("p101 ttft <= 5ms", "percentile"),
        ("p99 speed <= 5ms", "'speed' is not part"),
        ("p99 p95 ttft <= 5ms", "'p95' is not part"),
        ("p99 <= 5ms", "no metric"),
    ],
)
def test_bad_objectives_are_refused_with_a_hint(text, says):
    with pytest.raises(BadInput, match=says):
        parse_slo(text)


def test_of_two_limits_on_one_statistic_the_stricter_holds():
    found = parse_slos(["p99 ttft <= 2s", "mean e2e < 9s", "p99 ttft <= 1s", "p99 ttft < 1s"])
    assert str(found) == "P99 TTFT < 1 s and mean E2E < 9 s"
    assert [n.text for n in found.notes if n.kind == "warning"] == [
        '"P99 TTFT <= 2 s" is left out: "P99 TTFT <= 1 s" says more',
        '"P99 TTFT <= 1 s" is left out: "P99 TTFT < 1 s" says more',
    ]
    assert parse_slos(["p99 ttft <= 500ms", "p99 ttft <= 0.5s"]).notes == ()


def test_an_objective_that_can_never_bind_is_told():
    assert "never bind" in parse_slos(["p50 ttft <= 300ms", "p99 ttft <= 200ms"]).notes[0].text
    assert "never bind" in parse_slos(["p99 ttft <= 2s", "p99 e2e <= 1s"]).notes[0].text
    assert not parse_slos(["p50 ttft <= 100ms", "p99 ttft <= 200ms"]).notes


def test_no_objective_at_all():
    with pytest.raises(BadInput, match="at least one"):
        parse_slos([])


def test_limits_on_each_request_need_a_share():
    with pytest.raises(BadInput, match="goodput 99%"):
        parse_slos(["ttft <= 500ms"])
    slos = parse_slos(["ttft <= 500ms", "tpot <= 50ms"], "99%")
    assert (slos.goodput, len(slos.limits), slos.statistics) == (0.99, 2, ())


def test_goodput_takes_the_tightest_limits_of_the_statistics():
    slos = parse_slos(["p99 ttft <= 500ms", "p50 ttft <= 200ms", "mean tpot <= 50ms"], "0.9")
    assert {(s.metric, s.limit) for s in slos.limits} == {("ttft", 0.2), ("tpot", 0.05)}
    assert len(slos.statistics) == 3


@pytest.mark.parametrize("share", ["0", "101%", "-1", "most"])
def test_bad_shares(share):
    with pytest.raises(BadInput, match="share above 0"):
        parse_slos(["ttft <= 500ms"], share)


def test_itl_is_no_limit_on_a_request():
    with pytest.raises(BadInput, match="many ITLs"):
        parse_slos(["itl <= 50ms"], "99%")


def probe(ttft_ms, tpot_ms, e2e_ms=None):
    columns = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2e_ms or [None] * len(ttft_ms)}
    samples = {k: np.array([np.nan if v is None else v / 1000 for v in vs]) for k, vs in columns.items()}
    return Probe(Outcome(), samples, ~np.isnan(samples["ttft"]))


def test_goodput_counts_failures_as_misses_and_limits_as_kept():
    # Five requests, one failed; exactly at both limits is still good.
    run = probe([450, 700, 200, None, 500], [35, 20, 70, None, 50])
    slos = parse_slos(["ttft <= 500ms", "tpot <= 50ms"], "99%")
    assert attainment(slos, [run]) == pytest.approx(2 / 5)
    assert attainment(parse_slos(["ttft <= 500ms"], "99%"), [run]) == pytest.approx(3 / 5)
    assert attainment(parse_slos(["ttft < 500ms"], "99%"), [run]) == pytest.approx(2 / 5)


def test_a_missing_tpot_keeps_its_limit():
    run = probe([100, 100], [None, 10])
    assert attainment(parse_slos(["tpot <= 50ms"], "99%"), [run]) == 1.0


def test_a_mean_hides_what_goodput_shows():
    run = probe([100] * 6 + [1200] * 4, [10] * 10)
    assert value_of(parse_slo("mean ttft <= 600ms"), [run]) < 0.6
    assert attainment(parse_slos(["ttft <= 600ms"], "99%"), [run]) == 0.6


def test_failures_are_endless_in_percentiles_but_not_in_tpot():
    run = probe([100] * 50 + [None] * 50, [10] * 50 + [None] * 50)
    assert value_of(parse_slo("p99 ttft <= 1s"), [run]) == np.inf
    assert value_of(parse_slo("p49 ttft <= 1s"), [run]) == pytest.approx(0.1)
    assert value_of(parse_slo("p99 tpot <= 1s"), [run]) == pytest.approx(0.01)


def test_replications_are_pooled_not_averaged():
    quick, slow = probe([100] * 99, [1] * 99), probe([900], [1])
    assert value_of(parse_slo("p99 ttft <= 1s"), [quick, slow]) == pytest.approx(
        np.percentile([0.1] * 99 + [0.9], 99)
    )


def test_ratio_crosses_one_where_the_objective_turns():
    slos = parse_slos(["ttft <= 500ms"], "80%")
    kept = probe([100] * 8 + [900] * 2, [1] * 10)
    missed = probe([100] * 7 + [900] * 3, [1] * 10)
    assert load_ratio(slos, [kept]) <= 1.0 < load_ratio(slos, [missed])
    assert load_ratio(slos, [Probe(Outcome(failure="stuck"))]) == np.inf
