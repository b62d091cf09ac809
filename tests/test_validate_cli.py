"""`servecast validate`: one command over a folder of measured runs, and the verdicts it ends with."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import cli
from calibration.validate import llmservingsim, mlenergy, residency
from calibration.validate.run import validate_folder
from calibration.validate.table import Claim, Outcome, Row, coverage, covers, passed, render, rows_for
from sim.build import build_scenario
from sim.errors import BadInput, ServecastError
from sim.figures.intervals import Interval
from sim.simulate import roofline

BATCHES = (8, 16, 32, 64, 128, 256)
COLUMNS = (
    "model",
    "arch",
    "gpu",
    "num_gpus",
    "tp",
    "flags",
    "max_num_seqs",
    "avg_batch_size",
    "avg_output_len",
    "median_itl_ms",
)


def point(batch: int) -> dict[str, str]:
    known = ("meta-llama/Llama-3.1-8B-Instruct", "Dense", "H100", "1", "1", "async-scheduling: true")
    return dict(zip(COLUMNS, (*known, str(batch), str(batch), "400", ""), strict=True))


def write_curve(folder: Path, factors: Mapping[int, float] | None = None) -> Path:
    """A decode curve as the step-time model itself has it, some points multiplied by a factor."""
    place = folder / mlenergy.FOLDER
    place.mkdir(parents=True)
    path = place / "mlenergy_dev.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for batch in BATCHES:
            row = point(batch)
            assert row["arch"].startswith("Dense")
            seconds = roofline(mlenergy.scenario_of(row)).gpu(mlenergy.shape_of(row))
            row["median_itl_ms"] = str(1e3 * seconds * (factors or {}).get(batch, 1.0))
            writer.writerow(row)
    return path


def run(*words: str) -> Result:
    done = CliRunner().invoke(cli.servecast, ["validate", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit | ServecastError):
        raise done.exception
    return done


def refusal(*words: str) -> str:
    done = run(*words)
    assert isinstance(done.exception, BadInput)
    return str(done.exception)


def test_kept_bounds_end_with_status_0_and_the_pooled_coverage_is_counted(tmp_path: Path) -> None:
    write_curve(tmp_path)
    (tmp_path / "notes_of_mine").mkdir()
    found = validate_folder(tmp_path, jobs=1)
    outcome = found.outcomes[mlenergy.FOLDER]
    assert [row.case.split(" batch ")[1].split(",")[0] for row in outcome.rows] == ["16", "32", "128"]
    assert not any(row.missed for row in outcome.rows)
    done = run("--data", str(tmp_path), "--jobs", "1")
    assert "bounds: 3 of 3 kept" in done.output
    assert "skipped, not known here: notes_of_mine" in done.output
    assert "90 % intervals: 3 of 3 held-out figures inside (100 %" in done.output
    # Three figures of one data set are no test of 80 to 97 %.
    assert "not judged here" in done.output
    assert done.exit_code == 0


def test_a_missed_bound_ends_with_status_1(tmp_path: Path) -> None:
    write_curve(tmp_path, {128: 1.3})
    done = run("--data", str(tmp_path), "--jobs", "1")
    assert done.exit_code == 1
    assert "MISSED" in done.output
    assert "bounds: 2 of 3 kept" in done.output


def test_a_folder_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    assert "is no folder" in refusal("--data", str(tmp_path / "nowhere"))
    assert "holds none of residency_h100_qwen3-14b" in refusal("--data", str(tmp_path))
    path = write_curve(tmp_path)
    assert "is not there; known are" in refusal("--data", str(tmp_path), "--only", "something")
    assert "is not there; known are" in refusal("--data", str(tmp_path), "--only", "llmservingsim_bench")
    path.write_text(path.read_text().replace("median_itl_ms", "median"))
    assert str(path) in refusal("--data", str(tmp_path), "--jobs", "1")
    path.unlink()
    assert "cannot be read" in refusal("--data", str(tmp_path), "--jobs", "1")


def row(measured: float, *, bound: float | None = 0.05, held_out: bool = True) -> Row:
    return Row("2", "a run", "mean_tpot_ms", measured, Interval(100.0, 90.0, 110.0), bound, held_out)


def test_an_error_is_signed_and_relative_to_the_measurement() -> None:
    assert row(80.0).error == pytest.approx(0.25)
    assert row(125.0).error == pytest.approx(-0.2)
    assert row(104.0).missed is False
    assert row(106.0).missed is True
    assert row(106.0, bound=None).missed is False
    assert row(math.nan).missed is True


def test_coverage_is_judged_of_all_data_sets_together_only() -> None:
    """Ninety figures that all lie inside: intervals too wide."""
    wide = [Outcome(tuple(row(100.0) for _ in range(90)))]
    assert not passed(wide)
    assert "to be 80 to 97 %)  MISSED" in render(wide)
    assert passed(wide, pooled=False)
    assert "MISSED" not in render(wide, pooled=False)


def test_coverage_counts_held_out_figures_only() -> None:
    rows = [row(100.0), row(109.0), row(111.0), row(89.0, held_out=False)]
    assert coverage(rows) == (2, 3)
    assert covers([])
    # Of three figures none can be four fifths: whole figures decide.
    assert covers(rows)
    assert not covers([row(100.0), row(111.0), row(112.0)])
    assert covers([row(100.0)] * 9 + [row(120.0)])
    # Intervals that always hold the truth are too wide.
    assert not covers([row(100.0)] * 40)


def test_rows_are_of_figures_that_both_sides_know() -> None:
    bounds = {"mean_tpot_ms": 0.05, "mean_ttft_ms": None, "p99_ttft_ms": 0.1}
    predicted = {"mean_tpot_ms": Interval(1.0, 1.0, 1.0), "mean_ttft_ms": Interval(1.0, 1.0, 1.0)}
    rows = rows_for(
        "2", "c", {"mean_tpot_ms": 1.0, "mean_ttft_ms": None, "p99_ttft_ms": 3.0}, predicted, bounds
    )
    assert [r.figure for r in rows] == ["mean_tpot_ms"]


def test_every_kind_of_miss_fails_the_whole() -> None:
    good = [row(100.0)] * 9 + [row(104.0)]
    outside = Row("2", "a run", "f", 111.0, Interval(100.0, 90.0, 110.0), None)
    kept = Outcome((*good, outside))
    assert passed([kept])
    assert not passed([kept, Outcome((row(50.0, held_out=False),))])
    assert not passed([kept, Outcome((), (Claim("5", "c", "saturated", False),))])
    assert not passed([kept, Outcome((outside,) * 5)])
    text = render([kept, Outcome((), (Claim("5", "c", "saturated", False),), ("from somewhere",))])
    assert "saturated  MISSED" in text
    assert "note: from somewhere" in text
    assert "bounds: 10 of 11 kept" in text
    assert "10 of 11 held-out figures inside (91 %, to be 80 to 97 %)" in text


def gzipped(lines: str) -> bytes:
    return gzip.compress(lines.encode(), mtime=0)


CELL = "request_id,status,send_us,ttft_us,e2e_us,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "cannot be read"),
        (gzipped(CELL * 50)[:-9], "is cut off"),
        (b"\x1f\x8b\x08" + b"\xff" * 40, "is damaged|cannot be read|is cut off"),
        (gzipped(CELL.replace(",ttft_us", "") + "a,ok,1,3,4,5\n"), "lacks ttft_us"),
        (gzipped(CELL + "a,ok,1,2,soon,4,5\n"), "is damaged.*soon"),
        (gzipped(CELL + "a,ok,1\n"), "is damaged"),
        (gzipped(CELL + "a,failed,1,2,3,4,5\n"), "no request that succeeded"),
    ],
)
def test_a_damaged_cell_is_one_clear_line(tmp_path: Path, data: bytes | None, says: str) -> None:
    if data is not None:
        (tmp_path / "cell.csv.gz").write_bytes(data)
    with pytest.raises(BadInput, match=says) as caught:
        residency.read_cell(tmp_path, "cell", build_scenario(serve="vllm serve Qwen/Qwen3-14B", gpu="H100"))
    assert "cell.csv.gz" in str(caught.value)


REQUEST = {"request_id": "a", "queued_ts": 1.0, "first_token_ts": 2.0, "last_token_ts": 3.0, "input_toks": 5}


@pytest.mark.parametrize(
    ("request_line", "meta", "says"),
    [
        ({**REQUEST, "output_toks": 2}, {"vllm_version": "0.19.0"}, "meta.json.*lacks engine_kwargs"),
        ({**REQUEST, "output_toks": 2}, [], "meta.json.*is damaged"),
        (REQUEST, {}, "requests.jsonl.*lacks output_toks"),
        ([1], {}, "requests.jsonl.*is damaged"),
        ({**REQUEST, "output_toks": 2, "queued_ts": None}, {}, "requests.jsonl.*is damaged"),
    ],
)
def test_a_damaged_run_is_one_clear_line(tmp_path: Path, request_line: Any, meta: Any, says: str) -> None:
    (tmp_path / "requests.jsonl").write_text(json.dumps(request_line) + "\n", encoding="utf-8")
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(BadInput, match=says):
        llmservingsim.read_run(tmp_path)


def test_a_curve_with_a_row_cut_short_is_one_clear_line(tmp_path: Path) -> None:
    path = write_curve(tmp_path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.rstrip().rpartition(",")[0] + "\n", encoding="utf-8")
    assert "mlenergy_dev.csv: is damaged" in refusal("--data", str(tmp_path), "--jobs", "1").replace("'", "")
    path.write_text(whole.replace("avg_output_len", "length"), encoding="utf-8")
    assert "lacks avg_output_len" in refusal("--data", str(tmp_path), "--jobs", "1")
