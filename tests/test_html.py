"""The page: self-contained, escaped, with values to hover over."""

import re
import shlex
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import pytest

from sim.build import read_source
from sim.planning.jobs import run_serially
from sim.planning.load_curve import Effort
from sim.planning.plan import Question, make_plan
from sim.planning.prices import Prices
from sim.planning.report_html import plan_page
from sim.planning.slo import parse_slos
from sim.planning.svg import Band, Chart, Mark, Series, draw, nice_ticks, short
from sim.planning.vary import parse_vary
from sim.planning.whatif import what_if
from sim.planning.whatif_html import whatif_page

SERVE = "vllm serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 1024 --max-num-seqs 8"
BENCH = (
    "vllm bench serve --dataset-name random --random-input-len 64 --random-output-len 8 "
    "--request-rate 60 --num-prompts 40"
)
HOSTILE = "<script>alert(1)</script>&\"'"


def source():
    return replace(read_source(serve=SERVE, bench=BENCH, gpu="L4"), name=HOSTILE)


def question(objective, **more):
    slos = parse_slos([objective])
    return Question(slos, effort=Effort(100, 2), with_error=False, **more)


@pytest.fixture(scope="module")
def page():
    asked = question("p90 ttft <= 300ms", rate=50.0, prices=Prices({"L4-24GB": 0.7, "L4": 0.7}), gpus=("L4",))
    return plan_page(make_plan(source(), asked))


@pytest.fixture(scope="module")
def whatif():
    answer = what_if(source(), parse_vary(["max-num-seqs=8,1"]), run_serially, replications=2)
    return whatif_page(answer, HOSTILE)


@pytest.mark.parametrize("which", ["page", "whatif"])
def test_nothing_is_fetched(which, request):
    text = request.getfixturevalue(which)
    assert not re.findall(r"https?://|//[a-z]+\.|@import|url\(", text)
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=\"(?!data:)", text)
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text


@pytest.mark.parametrize("which", ["page", "whatif"])
def test_names_are_escaped(which, request):
    text = request.getfixturevalue(which)
    assert HOSTILE not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


@pytest.mark.parametrize("which", ["page", "whatif"])
def test_pictures_are_well_formed_and_tell_exact_values(which, request):
    text = request.getfixturevalue(which)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert pictures
    for picture in pictures:
        tree = ElementTree.fromstring(picture)
        marks = [node for node in tree.iter() if node.get("data-tip")]
        assert marks
        for mark in marks:
            assert 0 <= float(mark.get("cx")) <= 400
            assert 0 <= float(mark.get("cy")) <= 260
            assert mark.find("title").text.split() == mark.get("data-tip").split()


def test_plan_has_question_answer_evidence_assumptions_and_commands(page):
    for word in ("Highest load that keeps P90 TTFT", "requests/s", "Evidence", "Assumptions", "vllm serve"):
        assert word in page
    assert "servecast bench" in page
    assert "Cost against margin" in page


def test_whatif_says_why(whatif):
    assert "<h2>Why</h2>" in whatif
    assert "sequence slots" in whatif


def test_whatif_confirms_the_point_that_its_headline_names():
    answer = what_if(source(), parse_vary(["max-num-seqs=1,8"]), run_serially, replications=2)
    commands = unescape(
        re.search(r"To confirm on hardware</h2>\s*<pre>(.*?)</pre>", whatif_page(answer, "p"), re.S)[1]
    )
    serve, bench = commands.splitlines()
    assert serve.startswith("vllm serve")
    assert "--max-num-seqs 8" in serve
    assert bench.startswith("servecast bench --gpu L4")
    words = shlex.split(bench)
    assert words[words.index("--serve") + 1] == serve
    assert words[words.index("--bench") + 1].startswith("vllm bench serve --dataset-name")


def test_units_stand_in_the_heads(page, whatif):
    assert "TTFT mean (ms)" in whatif
    assert "replicas (peak, one down)" in page
    assert "replicas (peak, none down)" in page


def test_no_point_wins_by_less_than_its_interval(whatif):
    assert "Most throughput at max-num-seqs=8: " in whatif
    answer = what_if(source(), parse_vary(["max-num-seqs=256,512,1"]), run_serially, replications=2)
    assert "Most throughput at max-num-seqs=256 or max-num-seqs=512: " in whatif_page(answer, "p")
    moved = r"TTFT x[\d.]+(e\+\d+)? from max-num-seqs=512 to max-num-seqs=1\."
    assert re.search(moved, whatif_page(answer, "p"))
    same = replace(answer, rows=(replace(answer.rows[0], points=answer.rows[0].points[:2]),))
    assert "Throughput does not change over max-num-seqs: " in whatif_page(same, "p")
    assert " from max-num-seqs=256 to max-num-seqs=512." not in whatif_page(same, "p")


def test_unreachable_objectives_have_a_page_too():
    text = plan_page(make_plan(source(), question("p90 ttft <= 1us")))
    assert "cannot be met at any load" in text
    assert "at best" in text


def test_same_plan_same_page():
    pages = {plan_page(make_plan(source(), question("p90 ttft <= 300ms"))) for _ in range(2)}
    assert len(pages) == 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_geometry():
    marks = (Mark(0, 0, "a"), Mark(10, 5, "b", 4, 6), Mark(5, 99, "above"))
    drawn = draw(Chart("t", "x", "y", (Series("s", marks),), (Band(2, 4, "band"),), level=3.0, y_max=6.0))
    left, top, right, bottom = drawn.frame
    (_, _, path, placed) = drawn.series[0]
    assert (placed[0][0], placed[0][1]) == (left, bottom)
    assert placed[1][0] == right
    assert top <= placed[1][3] < placed[1][1] < placed[1][2] <= bottom
    assert placed[2][1] == top  # what lies above is drawn at the edge
    assert len(path.split()) == 3
    assert drawn.bands[0][1] > 0
    assert short(12_500) == "12.5k"
