"""LLMServingSim's bench: ShareGPT at 10/s on one RTX PRO 6000, Llama-3.1-8B, vLLM 0.19; overloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibration.evidence import ClientRun, PerRequest
from calibration.fit import fit
from calibration.parameters import default_prior
from calibration.validate.foresee import foresee, measured_figures, possible
from calibration.validate.published import reading
from calibration.validate.table import Outcome, rows_for
from sim.build import build_scenario
from sim.errors import BadInput
from sim.request import Request
from sim.scenario import Scenario

FOLDER = "llmservingsim_bench"
SHOW = "3"
CASE = "RTXPRO6000__Llama-3.1-8B"
BOUNDS = {
    "mean_ttft_ms": 0.05,
    "median_ttft_ms": 0.05,
    "p99_ttft_ms": 0.05,
    "mean_tpot_ms": 0.03,
}


def validate(folder: Path) -> Outcome:
    """Fit on the first third of the requests, predict all of them."""
    run = read_run(folder / CASE)
    requests = run.requests
    assert requests is not None
    third = len(requests) // 3
    unseen = np.arange(len(requests)) >= third
    part = replace(
        requests,
        ttft=np.where(unseen, np.nan, requests.ttft),
        decode=np.where(unseen, np.nan, requests.decode),
    )
    # What came later is known to have been sent, and held the first ones up, but not how it fared.
    found = fit([replace(run, requests=part)], default_prior(run.scenario.gpu))
    case = f"RTX PRO 6000 Llama-3.1-8B, fit on {third} of {len(requests)}"
    predicted = foresee(run, possible(found), first_token=found.first_token)
    rows = rows_for(SHOW, case, measured_figures(requests), predicted, dict(BOUNDS))
    note = "3: casys-kaist/LLMServingSim @5daddb2; TTFT is first_token_ts - queued_ts; all requests count"
    return Outcome(tuple(rows), notes=(note,))


def read_run(folder: Path) -> ClientRun:
    """The recorded requests and the engine's arguments.

    Raises:
        BadInput: a file cannot be read, or lacks a field.
    """
    path = folder / "requests.jsonl"
    with reading(path):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        lines.sort(key=lambda line: float(line["queued_ts"]))
        queued, first, last = (
            np.array([float(line[key]) for line in lines])
            for key in ("queued_ts", "first_token_ts", "last_token_ts")
        )
        lengths = [(int(line["input_toks"]), int(line["output_toks"])) for line in lines]
        ids = [str(line["request_id"]) for line in lines]
    if not lines:
        raise BadInput("--data", str(path), "holds no request")
    requests = tuple(
        Request(ids[i], ((i, prompt),), output, float(queued[i] - queued[0]))
        for i, (prompt, output) in enumerate(lengths)
    )
    output_len = np.array([output for _, output in lengths], dtype=np.int64)
    times = tuple(np.empty(0) for _ in requests)
    measured = PerRequest(requests, first - queued, last - first, output_len, times)
    return ClientRun(str(path), _scenario(folder / "meta.json"), {}, measured)


def _scenario(path: Path) -> Scenario:
    with reading(path):
        meta = json.loads(path.read_text(encoding="utf-8"))
        arguments, version = meta["engine_kwargs"], str(meta["vllm_version"])
        serve = f"vllm serve {arguments['model']} " + " ".join(
            f"--{name.replace('_', '-')} {arguments[name]}"
            for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "dtype")
        )
    return build_scenario(
        serve=serve, bench="vllm bench serve", gpu="RTX-PRO-6000-Server", engine_version=version
    )
