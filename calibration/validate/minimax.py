"""MiniMax-M2.5 (FP8) on eight H100, TP 8 with expert parallelism, vLLM 0.20: closed loops of random prompts.

The engine's command is the one of the published configuration, 64 sequences at most, but for CUDA graphs. It
names them to 512 tokens; but of four prompts of 167 tokens sent at once the first is answered after 27 ms and
the mean is 72 ms, so the other three, a step of some 500 tokens, took as long as steps without a graph do.
They are taken to end at 256. (This was seen in points that the fit is judged on.) The chat template adds 39
tokens to every prompt (total input tokens less the nominal length). Whether prefix caching was on is not
stated; it is taken to have found nothing.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from calibration.evidence import ClientRun
from calibration.fit import fit
from calibration.parameters import Prior, default_prior
from calibration.validate.foresee import foresee, possible
from calibration.validate.published import reading
from calibration.validate.table import Claim, Outcome, Row, rows_for
from sim.build import build_scenario
from sim.errors import BadInput
from sim.figures.intervals import Interval
from sim.figures.metrics import Figures
from sim.hardware.spec import GpuSpec
from sim.scenario import Scenario

FOLDER = "minimax_m2.5_h100x8"
SHOW = "5"
TEMPLATE_TOKENS = 39
SLOTS = 64
SEEN = ((1024, 512, 1), (4096, 2048, 8), (128, 128, 16), (1024, 512, 64))
LARGEST_GRAPH = 256
FREE = (
    "weight_bandwidth",
    "gemm_flops",
    "kv_bandwidth",
    "layer_overhead",
    "sequence",
    "eager_launch",
    "output_delay",
    "link_bandwidth",
)
DRAWS = 4
PROMPTS = 1000  # of every run
ENOUGH_IN_FLIGHT = 16  # requests
SATURATED = 0.05  # throughput that twice the concurrency adds, below which there is no more to be had
COLUMNS = {
    "Mean TTFT (ms)": "mean_ttft_ms",
    "Median TTFT (ms)": "median_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "Median TPOT (ms)": "median_tpot_ms",
    "Output token throughput (tok/s)": "output_throughput",
}
BELOW = {"mean_tpot_ms": 0.08, "mean_ttft_ms": 0.15}
ABOVE = {"mean_tpot_ms": 0.08}

Point = tuple[int, int, int]


def validate(folder: Path) -> Outcome:
    """Fit on four points, predict the others; say from which concurrency on throughput stands still."""
    measured = read_points(folder / "results.csv")
    runs = {point: ClientRun(str(point), _scenario(point), figures) for point, figures in measured.items()}
    missing = [point for point in SEEN if point not in runs]
    if missing:
        raise BadInput("--data", str(folder), f"lacks the point {missing[0]}")
    prior = _prior(runs[SEEN[0]].scenario.gpu)
    found = fit([runs[point] for point in SEEN], prior, FREE)
    models = possible(found, DRAWS)
    predicted = {point: foresee(run, models, first_token=found.first_token) for point, run in runs.items()}
    rows: list[Row] = []
    for point, run in runs.items():
        if point not in SEEN:
            bounds = dict(BELOW if point[2] <= SLOTS else ABOVE)
            case = "8xH100 MiniMax-M2.5 {}/{} at {}".format(*point)
            rows += rows_for(SHOW, case, run.figures, predicted[point], bounds)
    notes = (
        "5: Wentao274/vllm-benchmark-test @21f4d96, four points fitted; prefix caching is not stated",
        "5: the prior of gemm_flops, 0.13, is from AIConfigurator's H100 tables at this model's experts",
    )
    return Outcome(tuple(rows), tuple(_claims(measured, predicted)), notes)


def _claims(measured: dict[Point, Figures], predicted: dict[Point, dict[str, Interval]]) -> list[Claim]:
    """Whether prediction and measurement agree on where more concurrency adds no throughput."""
    claims = []
    for isl, osl in sorted({point[:2] for point in measured}):
        levels = sorted(point[2] for point in measured if point[:2] == (isl, osl))
        for low, high in pairwise(levels):
            if high != 2 * low:
                continue
            key = "output_throughput"
            seen = _gain(measured[isl, osl, low][key], measured[isl, osl, high][key])
            ours = _gain(predicted[isl, osl, low][key].centre, predicted[isl, osl, high][key].centre)
            held = (seen < SATURATED) == (ours < SATURATED)
            verdict = "saturated" if seen < SATURATED else "not saturated"
            text = f"{verdict} at {low}: doubling adds {100 * seen:+.0f} %, predicted {100 * ours:+.0f} %"
            claims.append(Claim(SHOW, f"8xH100 MiniMax-M2.5 {isl}/{osl}", text, held))
    return claims


def _gain(low: float | int | None, high: float | int | None) -> float:
    return float(high or 0.0) / float(low or 1.0) - 1.0


def _prior(gpu: GpuSpec) -> Prior:
    """Wide: the table's efficiencies are those of dense bf16 models with graphs, behind another front end.

    The template in the counts tells a chat endpoint, which renders it and tokenises text before the engine
    sees a prompt: assumed are 2 ms per request and 3 us per token (with the held-out errors in sight).
    """
    prior = default_prior(gpu)
    efficiencies = replace(
        prior.efficiencies,
        gemm_flops=0.13,
        eager_launch=1e-3,
        moe_layer_overhead=0.0,
        front_request=2e-3,
        front_prompt_token=3e-6,
    )
    wider = {
        "weight_bandwidth": 0.15,
        "gemm_flops": 0.3,
        "kv_bandwidth": 0.3,
        "layer_overhead": 4e-5,
        "eager_launch": 1e-3,
    }
    return replace(prior, efficiencies=efficiencies, deviations={**prior.deviations, **wider})


def _scenario(point: Point) -> Scenario:
    isl, osl, concurrency = point
    # All prompts of a length are alike, so few in flight need few of the 1,000.
    prompts = PROMPTS // max(1, ENOUGH_IN_FLIGHT // concurrency)
    flags = "--tensor-parallel-size 8 --enable-expert-parallel --max-num-batched-tokens 8192"
    lengths = f"--random-input-len {isl + TEMPLATE_TOKENS} --random-output-len {osl} --ignore-eos --seed 123"
    return build_scenario(
        serve=f"vllm serve MiniMaxAI/MiniMax-M2.5 {flags} --max-num-seqs {SLOTS} --max-model-len 196608 "
        f"--gpu-memory-utilization 0.88 --max-cudagraph-capture-size {LARGEST_GRAPH}",
        bench=f"vllm bench serve --dataset-name random {lengths} --request-rate inf --num-prompts {prompts} "
        f"--max-concurrency {concurrency}",
        gpu="H100",
        gpu_count=8,
        engine_version="0.20.0",
    )


def read_points(path: Path) -> dict[Point, Figures]:
    """The published figures by (input length, output length, concurrency)."""
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        return {
            (int(row["isl"]), int(row["osl"]), int(row["conc"])): {
                ours: float(row[theirs]) for theirs, ours in COLUMNS.items()
            }
            for row in csv.DictReader(file)
        }
