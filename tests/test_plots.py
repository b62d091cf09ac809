from dataclasses import asdict, replace

import pytest

from sim.figures.regime import Regime
from sim.output import plots
from sim.provenance import Note
from sim.results import Verdict
from tests.test_report import result


@pytest.fixture
def axes():
    figure, axes = plots.new_figure(1, 1, 4.0, 3.0)
    yield axes
    from matplotlib import pyplot

    pyplot.close(figure)


def run(state="stable", **identity):
    made = result(extra={"regime": asdict(Regime(state, 2.0))})
    return replace(made, identity={**made.identity, **identity})


def test_a_title_names_the_load_and_the_gpus():
    assert plots.title(run()).splitlines() == ["predicted: vllm · 0.28.0 · m · G", "2 requests/s"]
    loop = run(gpu_count=2, request_rate=float("inf"), max_concurrency=64)
    assert plots.title(loop).splitlines() == ["predicted: vllm · 0.28.0 · m · 2 x G", "concurrency 64"]
    both = run(workload={"max_concurrency": 8})
    assert plots.title(both).endswith("2 requests/s · concurrency 8")


def test_a_title_names_what_is_wrong_with_a_run_and_only_that():
    assert "VALID" not in plots.title(run())
    bad = replace(run("saturated"), verdict=Verdict("SUSPECT", (Note("warning", "a", "b"),)))
    assert plots.title(bad).endswith("2 requests/s · SUSPECT · saturated")


def test_distributions_above_capacity_are_marked_where_they_grow_with_the_test(axes):
    plots.result_cdfs(axes, run("saturated"))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    marked = [label.split(",")[0] for label in labels if "grows with the test" in label]
    assert marked == ["TTFT", "E2EL"]


def test_distributions_of_a_sustained_load_bear_no_mark(axes):
    plots.result_cdfs(axes, run())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["TTFT", "TPOT", "ITL", "E2EL"]
