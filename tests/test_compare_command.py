"""`servecast compare` as a command: gates, exit statuses, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli import main
from sim.build import build_scenario
from sim.cli.compare import compare as compare_command
from sim.cli.compare import parse_percent
from sim.comparison.compare import compare
from sim.comparison.text import comparison_json
from sim.errors import BadInput, NotComparable
from sim.results_io.files import write_result
from sim.simulate import simulate
from tests.made_results import SMALL_SCENARIO, pair


def run(tmp_path: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(compare_command, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        if isinstance(done.exception, NotComparable | BadInput):
            return done.exception.exit_status, str(done.exception)
        raise done.exception
    return done.exit_code, done.output


def test_the_command_gates_a_team_s_flags(tmp_path: Path) -> None:
    predicted, measured = pair(ttft=1.08)
    write_result(predicted, tmp_path / "p.json")
    write_result(measured, tmp_path / "m.json")
    files = (str(tmp_path / "p.json"), str(tmp_path / "m.json"))
    code, text = run(tmp_path, *files, "--fail-above", "10%")
    assert code == 0
    assert "KS distance" in text
    assert "queue" in text
    code, text = run(tmp_path, *files, "--fail-above", "5%")
    assert code == 1
    assert "_ttft_ms +8.0%" in text
    assert "FAIL at 5%" in text
    assert "above 5%: " in text
    code, text = run(tmp_path, *files)
    assert code == 0
    assert "+8.0%: within 10% (not a gate)" in text
    assert "no gate: --fail-above" in text
    code, text = run(tmp_path, *reversed(files))
    assert code == 2
    assert "is a measured result" in text


def test_the_command_refuses_what_differs_with_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted, measured = pair()
    write_result(replace(predicted, identity={**predicted.identity, "gpu": "H100"}), tmp_path / "p.json")
    write_result(replace(measured, identity={**measured.identity, "gpu": "L4"}), tmp_path / "m.json")
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(tmp_path / "p.json"), str(tmp_path / "m.json")])
    assert stop.value.code == 3
    told = capsys.readouterr().err
    assert "gpu is H100 predicted but L4 measured" in told
    assert f"{tmp_path / 'm.json'}: not comparable" in told


def test_a_scenario_is_predicted_replayed_compared_and_drawn(tmp_path: Path) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(SMALL_SCENARIO)
    outcome = simulate(build_scenario(file=scenario)).result
    write_result(replace(outcome, origin="measured", tool="a test"), tmp_path / "m.json")
    code, text = run(
        tmp_path,
        str(scenario),
        str(tmp_path / "m.json"),
        "--replay",
        "--plot",
        str(tmp_path / "c.svg"),
        "--json",
        str(tmp_path / "c.json"),
        "--fail-above",
        "0.1%",
    )
    assert code == 0, text
    assert (tmp_path / "c.svg").stat().st_size > 10_000
    (told,) = json.loads((tmp_path / "c.json").read_text())
    assert told["verdict"] == "PASS"
    # What is uncertain of the step times enters the percentiles that the client was not to print as well.
    parts = {row["key"]: row["interval"]["parts"] for row in told["rows"] if row["interval"]}
    assert all("prediction" in parts[f"{name}_ttft_ms"] for name in ("mean", "p90", "p95", "p99"))


def test_the_json_has_every_row(tmp_path: Path) -> None:
    found = compare(*pair())
    told = comparison_json(found)
    assert [r["key"] for r in told["rows"]] == [r.key for r in found.rows]
    assert told["regimes"]["verdict"] == "comparable"


@pytest.mark.parametrize(
    ("text", "value"), [("5%", 0.05), ("0.5%", 0.005), ("120%", 1.2), ("0", 0), (None, None)]
)
def test_shares(text: str | None, value: float | None) -> None:
    assert parse_percent("--fail-above", text) == value


@pytest.mark.parametrize("text", ["five", "-1%", "inf", "nan", "", "5", "1", "0.05"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--fail-above"):
        parse_percent("--fail-above", text)
