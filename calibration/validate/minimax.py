"""MiniMax-M2.5 (FP8) on eight H100, TP 8 with expert parallelism, vLLM 0.20: closed loops of random prompts.

The engine's command is the one of the published configuration, 64 sequences at most, but for CUDA graphs.
It names them to 512 tokens; but steps of 500 tokens took as long as the longest without a graph, and steps of
230 a third of that, so they are taken to end at 256. (That was seen in points that the fit is judged on. The
published log of 512/256 at 16, which is not among them, agrees: TPOT -1 % with 256, -5 % with 512.) The chat
template adds 39 tokens to every prompt (total input tokens less the nominal length).

Prefix caching is not mentioned, hence on, and it found something. The publisher's script runs, at each
concurrency, the prompt lengths of `SERIES` one after the other on one engine with one seed, and the client's
prompt i of one length begins with its prompt i of any shorter one. So what of an earlier run the pool still
holds shortens prefills: which, the scheduler's own rules say (`warm_tokens`). The published log of 1024/512
at concurrency 32 shows it: prompts finish 26 at a time up to about number 620, and 7 to 8 at a time, a full
budget of whole prompts, from there on.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibration.evidence import ClientRun
from calibration.fit import fit
from calibration.parameters import Prior, default_prior
from calibration.replay import account_of, run_once
from calibration.validate.foresee import foresee, possible
from calibration.validate.table import Claim, Outcome, Row, rows_for
from sim.build import build_scenario
from sim.errors import BadInput
from sim.hardware import GpuSpec
from sim.intervals import Interval
from sim.metrics import Figures
from sim.request import Request
from sim.scenario import Scenario
from sim.simulate import roofline

FOLDER = "minimax_m2.5_h100x8"
SHOW = "5"
TEMPLATE_TOKENS = 39
TEMPLATE_TAIL = 9  # of them, after the prompt (assumed)
PROMPTS = 1000
# Prompt and output lengths at one concurrency, in the order of the publisher's script.
SERIES = ((128, 128), (512, 256), (1024, 512), (2048, 1024), (4096, 2048), (8192, 1024))
SLOTS = 64
# Where the published logs turn from shortened to whole prompts (1024/512 at 32) and back (128/128 at 16,
# number 883) says how much the pool held; our estimate for 0.88 of the memory is a tenth more.
KV_CACHE_TOKENS = 1_270_000
# The corners: shortest and longest prompts, alone and with every slot taken.
SEEN = ((128, 128, 1), (4096, 2048, 1), (128, 128, 64), (4096, 2048, 64))
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
    "front_request",
    "front_prompt_token",
)
DRAWS = 4
ENOUGH_IN_FLIGHT = 16  # requests; below, a share of the 1,000 says as much
BLOCK = 16  # tokens of a KV block; the template alone fills one
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
    warm = {lengths: warm_tokens(*lengths) for lengths in {point[:2] for point in measured}}
    runs = {
        point: ClientRun(str(point), _scenario(point), figures, load=shortened(point, warm[point[:2]]))
        for point, figures in measured.items()
    }
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
        "5: Wentao274/vllm-benchmark-test @21f4d96, four points fitted; "
        + ", ".join(
            f"{np.count_nonzero(w > BLOCK)} of {len(w)} prompts of {i} were partly cached"
            for (i, _), w in sorted(warm.items())
        ),
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

    A chat endpoint renders a template and tokenises text, about a megabyte a second, before the engine sees a
    prompt.
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
        "front_request": 3e-3,
        "front_prompt_token": 3e-6,
    }
    return replace(prior, efficiencies=efficiencies, deviations={**prior.deviations, **wider})


def warm_tokens(isl: int, osl: int) -> NDArray[np.int64]:
    """Prompt tokens that earlier runs left in the prefix cache, by request; none for lengths not in `SERIES`.

    The engine's own scheduler serves what the pool can hold of the runs before, then this one; only the order
    of requests matters for what is evicted, so outputs are served as if they were prompt, in few steps.
    """
    if (isl, osl) not in SERIES:
        return np.zeros(PROMPTS, dtype=np.int64)
    at = SERIES.index((isl, osl))
    scenario = _scenario((isl, osl, 1))
    account = account_of(scenario)
    earlier: list[Request] = []
    room = account.kv_cache_tokens
    for lengths in (*SERIES[:at][::-1], *SERIES[at:][::-1]):
        for i in reversed(range(PROMPTS)):
            if room > 0:
                earlier.append(_whole(i, *lengths))
                room -= earlier[-1].prompt_len
    requests = [*reversed(earlier), *(_whole(i, isl, osl) for i in range(PROMPTS))]
    in_order = [replace(r, request_id=str(n), arrival=n * 1e-6) for n, r in enumerate(requests)]
    records = run_once(scenario, in_order, roofline(scenario), account).records
    found = np.minimum(records.cached_tokens[-PROMPTS:], isl + TEMPLATE_TOKENS - 1)
    return np.maximum(found, 0)


def _whole(i: int, isl: int, osl: int) -> Request:
    """Prompt i of a length with its template, and its answer as if it were prompt."""
    head = TEMPLATE_TOKENS - TEMPLATE_TAIL
    parts = (("template", head), (i, isl), (f"end of {isl}/{i}", TEMPLATE_TAIL + osl))
    return Request("", parts, 1)


def shortened(point: Point, warm: NDArray[np.int64]) -> tuple[Request, ...]:
    """The load, prompts as long as what the cache did not hold; attention reads that much less context.

    All prompts of a length are alike but for that, so few in flight need few of them: every so-manieth.
    """
    isl, osl, concurrency = point
    every = max(1, ENOUGH_IN_FLIGHT // concurrency)
    return tuple(
        Request(str(i), ((i, isl + TEMPLATE_TOKENS - int(warm[i])),), osl) for i in range(0, len(warm), every)
    )


def _scenario(point: Point) -> Scenario:
    isl, osl, concurrency = point
    flags = "--tensor-parallel-size 8 --enable-expert-parallel --max-num-batched-tokens 8192"
    lengths = f"--random-input-len {isl + TEMPLATE_TOKENS} --random-output-len {osl} --ignore-eos --seed 123"
    return build_scenario(
        serve=f"vllm serve MiniMaxAI/MiniMax-M2.5 {flags} --max-num-seqs {SLOTS} --max-model-len 196608 "
        f"--gpu-memory-utilization 0.88 --max-cudagraph-capture-size {LARGEST_GRAPH}",
        bench=f"vllm bench serve --dataset-name random {lengths} --request-rate inf --num-prompts 1000 "
        f"--max-concurrency {concurrency}",
        gpu="H100",
        gpu_count=8,
        engine_version="0.20.0",
        kv_cache_tokens=KV_CACHE_TOKENS,
    )


def read_points(path: Path) -> dict[Point, Figures]:
    """The published figures by (input length, output length, concurrency)."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {
                (int(row["isl"]), int(row["osl"]), int(row["conc"])): {
                    ours: float(row[theirs]) for theirs, ours in COLUMNS.items()
                }
                for row in csv.DictReader(file)
            }
    except OSError as error:
        raise BadInput("--data", str(path), f"cannot be read: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise BadInput(str(path), None, f"is damaged: {error}") from None
