"""ML.ENERGY leaderboard: median ITL of full servers by batch size; dense models on H100, vLLM 0.11.1.

Prompt lengths are not published; three things are derived or assumed:

* where the KV cache, not `max_num_seqs`, bounds the batch, the batch size tells the context per sequence
  (Llama-3.1-8B at 768: 691 sequences in a pool of about 427,000 tokens; Llama-3.3-70B: 724 in 448,000): 620
  tokens at 400 tokens of output;
* mean ITL (batch size over published throughput) less median ITL, over the prompts that join per step, is
  what a prompt costs: about 250 tokens' worth. A sequence in flight is then 0.92 of the mean output along;
* prompt lengths are as spread as chats' are: log-normal, deviation twice the mean (assumed).
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibration.evidence import StepRun
from calibration.fit import fit
from calibration.parameters import default_prior
from calibration.validate.foresee import possible
from calibration.validate.published import reading
from calibration.validate.table import Outcome, Row
from sim.build import build_scenario
from sim.engines.base import StepShape
from sim.errors import BadInput
from sim.figures.intervals import intervals
from sim.figures.metrics import Figures
from sim.scenario import Scenario
from sim.simulate import roofline

FOLDER = "mlenergy_itl_vs_batch"
SHOW = "4"
BOUND = 0.05
PROMPT = 250
PROGRESS = 0.92
SPREAD = 2.0
OWN_SOURCES = ("ML.ENERGY",)
FREE = ("sequence", "gemm_flops", "ridge")
DRAWS = 40
TEXTS = ("model", "gpu", "flags")
NUMBERS = ("max_num_seqs", "avg_batch_size", "avg_output_len", "median_itl_ms", "tp", "num_gpus")


def validate(folder: Path) -> Outcome:
    """Fit on the smallest, the middle, and the largest batch of each dense model; predict the others."""
    path = folder / "mlenergy_dev.csv"
    with reading(path):
        with path.open(encoding="utf-8", newline="") as file:
            points = [row for row in csv.DictReader(file) if row["arch"].startswith("Dense")]
        numbers = [{key: float(row[key]) for key in NUMBERS} for row in points]
        lacking = [key for row in points for key in TEXTS if row[key] is None]
    if lacking:
        raise BadInput("--data", str(path), f"lacks {lacking[0]}")
    for number, row_numbers in enumerate(numbers, 1):
        for key, value in row_numbers.items():
            if not value > 0:
                raise BadInput(f"{path} {key}", value, f"must be above 0 (dense row {number})")
    rows: list[Row] = []
    for subject in sorted({(p["model"], p["gpu"], p["num_gpus"], p["tp"]) for p in points}):
        mine = [p for p in points if (p["model"], p["gpu"], p["num_gpus"], p["tp"]) == subject]
        rows += _subject(sorted(mine, key=lambda p: int(p["max_num_seqs"])))
    note = (
        f"4: ml-energy/leaderboard @0cd52da; prompt lengths are not published: {PROMPT} tokens on average "
        "are derived, their spread is assumed; the prior leaves out what the shipped table took from here"
    )
    return Outcome(tuple(rows), notes=(note,))


def _subject(points: list[dict[str, str]]) -> list[Row]:
    scenarios = [scenario_of(point) for point in points]
    shapes = [shape_of(point) for point in points]
    measured = [float(point["median_itl_ms"]) for point in points]
    seen = _seen([int(point["max_num_seqs"]) for point in points])
    prior = default_prior(scenarios[0].gpu, without=OWN_SOURCES)
    # A server that is always full has one temperature, and its steps are priced one by one.
    prior = replace(prior, efficiencies=replace(prior.efficiencies, throttle=0.0))
    evidence = [
        StepRun(
            f"batch {points[i]['max_num_seqs']}",
            scenarios[i],
            (shapes[i],),
            np.array([measured[i] / 1e3]),
            np.zeros(1),
        )
        for i in sorted(seen)
    ]
    models = possible(fit(evidence, prior, FREE), DRAWS)
    name = points[0]["model"].split("/")[-1].replace("-Instruct", "")
    told = ", ".join(points[i]["max_num_seqs"] for i in sorted(seen))
    rows = []
    for i, point in enumerate(points):
        if i in seen:
            continue
        priced: list[Figures] = [
            {"median_itl_ms": 1e3 * replace(roofline(scenarios[i]), efficiencies=eff).gpu(shapes[i])}
            for eff in models
        ]
        found = intervals(priced[0], priced[1:])["median_itl_ms"]
        case = f"{name} batch {point['max_num_seqs']}, fit on {told}"
        rows.append(Row(SHOW, case, "median_itl_ms", measured[i], found, BOUND))
    return rows


def _seen(sizes: list[int]) -> set[int]:
    """The smallest, the largest, and the one nearest to their geometric mean."""
    middle = math.sqrt(sizes[0] * sizes[-1])
    nearest = min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / middle)))
    return {0, nearest, len(sizes) - 1}


def scenario_of(point: dict[str, str]) -> Scenario:
    """The engine of one row."""
    flags = (
        f"--max-num-seqs {point['max_num_seqs']} --tensor-parallel-size {point['tp']} --max-model-len 20480"
    )
    if "async-scheduling: true" in point["flags"]:
        flags += " --async-scheduling"
    return build_scenario(
        serve=f"vllm serve {point['model']} {flags} --max-num-batched-tokens 8192",
        bench="vllm bench serve",
        gpu=point["gpu"],
        gpu_count=int(point["num_gpus"]),
        engine_version="0.11.1",
    )


def shape_of(point: dict[str, str]) -> StepShape:
    """The median step: all sequences decode, and as many prompt tokens join as do in the median step."""
    batch, output = float(point["avg_batch_size"]), float(point["avg_output_len"])
    decodes = round(batch)
    context = round(decodes * (PROMPT + PROGRESS * output))
    prompts = _median_prompt_tokens(batch / output)
    joining = max(1, round(prompts / PROMPT)) if prompts else 0
    return StepShape(
        kind="mixed",
        num_prefill_tokens=prompts,
        num_prefill_seqs=joining,
        num_decode_seqs=decodes,
        prefill_pairs=prompts * PROMPT // 2,
        prefill_context=prompts,
        decode_context=context,
        num_sampled=decodes + joining,
    )


def _median_prompt_tokens(joining: float) -> int:
    """Prompt tokens of the median step when `joining` prompts join per step on average.

    Prompts join at random (Poisson); their lengths are log-normal.
    """
    rng = np.random.default_rng(0)
    spread = math.sqrt(math.log(1.0 + SPREAD**2))
    counts = rng.poisson(joining, 4001)
    lengths = rng.lognormal(math.log(PROMPT) - spread**2 / 2, spread, int(counts.sum()))
    owner = np.repeat(np.arange(len(counts)), counts)
    return int(np.median(np.bincount(owner, lengths, minlength=len(counts))))
