"""residency-vllm: Qwen3-14B on one H100 under vLLM 0.23, four arrival rates of 600 s each, per request."""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibration.evidence import ClientRun, PerRequest
from calibration.fit import fit
from calibration.kernels import describe, installed, kernel_prior
from calibration.parameters import Prior, default_prior
from calibration.validate.foresee import figures_of, foresee, measured_figures, possible
from calibration.validate.published import reading
from calibration.validate.table import Outcome, Row, rows_for
from sim.build import build_scenario
from sim.errors import BadInput
from sim.figures.intervals import Interval
from sim.request import Request
from sim.scenario import Scenario

FOLDER = "residency_h100_qwen3-14b"
SHOW = "2"
KERNELS = "6"
RATES = (2, 4, 6, 8)
OWN_SOURCES = ("residency",)  # shipped efficiencies from these very runs must not be known to the fit
# Fit on 2 and 8, predict 4 and 6.
BETWEEN: Mapping[str, float | None] = {
    "mean_ttft_ms": 0.03,
    "median_ttft_ms": 0.03,
    "p99_ttft_ms": 0.08,
    "mean_tpot_ms": 0.02,
    "p99_tpot_ms": 0.06,
    "mean_e2el_ms": 0.02,
}
# Fit on 2 and 4, predict 8: to 60 % of capacity.
BEYOND: Mapping[str, float | None] = {
    "mean_tpot_ms": 0.03,
    "p99_tpot_ms": 0.06,
    "mean_e2el_ms": 0.03,
    "p99_e2el_ms": 0.06,
    "mean_ttft_ms": 0.04,
    "p99_ttft_ms": 0.08,
}
STATED: Mapping[str, float | None] = dict.fromkeys((*BETWEEN, "p99_e2el_ms"))


def validate(folder: Path) -> Outcome:
    """Fit on some rates, predict the others."""
    scenario = _scenario()
    runs = {rate: read_cell(folder, f"sweep_rate__agg_{rate}rps__vanilla", scenario) for rate in RATES}
    prior = default_prior(scenario.gpu, without=OWN_SOURCES)
    rows = [
        *_case(runs, prior, (2, 8), (4, 6), BETWEEN),
        *_case(runs, prior, (2, 4), (8,), BEYOND),
        *_case(runs, prior, (2,), (4, 6, 8), STATED),
    ]
    notes = [
        "2: inference-sim/residency-vllm @2641b57, sweep_rate vanilla cells; the prior leaves out what "
        "the shipped table took from these runs"
    ]
    if installed():
        tables = kernel_prior(scenario, OWN_SOURCES)
        rows += _untouched(runs, tables)
        rows += _case(runs, tables, (2,), (4, 6), BETWEEN, KERNELS)
        rows += _case(runs, tables, (2,), (8,), BEYOND, KERNELS)
        notes.append(f"6: kernel tables give {describe(tables.efficiencies)}")
    else:
        notes.append("6: left out; the kernel tables are not installed (pip install '.[kernels]')")
    return Outcome(tuple(rows), notes=tuple(notes))


def _untouched(runs: dict[int, ClientRun], tables: Prior) -> list[Row]:
    """What the kernel tables alone say: stated, not bounded."""
    rows = []
    for rate, run in runs.items():
        assert run.requests is not None
        figures = figures_of(run.scenario, run.requests.requests, tables.efficiencies)
        unknown = {key: Interval(float(v), 0.0, math.inf) for key, v in figures.items() if v}
        case = f"H100 Qwen3-14B {rate}/s, kernel tables alone"
        rows += rows_for(KERNELS, case, measured_figures(run.requests), unknown, STATED, held_out=False)
    return rows


def _case(
    runs: dict[int, ClientRun],
    prior: Prior,
    seen: tuple[int, ...],
    held_out: tuple[int, ...],
    bounds: Mapping[str, float | None],
    show: str = SHOW,
) -> list[Row]:
    found = fit([runs[rate] for rate in seen], prior)
    models = possible(found)
    told = "fit on " + " and ".join(f"{rate}/s" for rate in seen)
    told += " and kernel tables" if show == KERNELS else ""
    rows = []
    for rate in held_out:
        requests = runs[rate].requests
        assert requests is not None
        measured = measured_figures(requests)
        case = f"H100 Qwen3-14B {rate}/s, {told}"
        predicted = foresee(runs[rate], models, first_token=found.first_token)
        rows += rows_for(show, case, measured, predicted, bounds, held_out=show == SHOW)
    return rows


def _scenario() -> Scenario:
    return build_scenario(
        serve="vllm serve Qwen/Qwen3-14B --max-num-seqs 256 --max-num-batched-tokens 8192",
        bench="vllm bench serve",
        gpu="H100",
        engine_version="0.23.0",
        num_gpu_blocks=18038,
    )


def read_cell(folder: Path, name: str, scenario: Scenario) -> ClientRun:
    """One cell of the set; with every token's time where its file lies beside it.

    Raises:
        BadInput: the file cannot be read, lacks a column, or holds nothing.
    """
    path = folder / f"{name}.csv.gz"
    with reading(path):
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
        rows.sort(key=lambda row: float(row["send_us"]))
        columns = ("send_us", "ttft_us", "e2e_us")
        send, ttft, e2e = (np.array([float(r[k]) for r in rows]) / 1e6 for k in columns)
        output = np.array([int(row["output_tokens"]) for row in rows], dtype=np.int64)
        prompts = [int(row["prompt_tokens"]) for row in rows]
        ids = [row["request_id"] for row in rows]
    if not rows:
        raise BadInput("--data", str(path), "holds no request that succeeded")
    requests = tuple(
        Request(ids[i], ((i, prompts[i]),), int(output[i]), float(send[i] - send[0])) for i in range(len(ids))
    )
    times = _token_times(folder / f"{name}.itl.csv.gz", requests, ttft)
    per_request = PerRequest(requests, ttft, e2e - ttft, output, times)
    return ClientRun(name, replace(scenario, name=name), {}, per_request)


def _token_times(path: Path, requests: tuple[Request, ...], ttft: np.ndarray) -> tuple[np.ndarray, ...]:
    """Times of every token from its request's sending; the first message of a chat carries none."""
    if not path.exists():
        return tuple(np.empty(0) for _ in requests)
    stamps: dict[str, list[float]] = defaultdict(list)
    with reading(path), gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            if row and row[0] != "request_id":
                stamps[row[0]].append(float(row[2]) / 1e6)
    found = []
    for i, request in enumerate(requests):
        tokens = np.array(stamps.get(request.request_id, ())[1 : request.max_tokens + 1])
        complete = len(tokens) == request.max_tokens
        found.append(tokens - tokens[0] + ttft[i] if complete else np.empty(0))
    return tuple(found)
