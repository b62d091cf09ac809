"""How many streams a load generator can follow before it measures itself; ours beside `vllm bench serve`.

One fake server streams 50 tokens/s per request and stamps every token with the time it was sent. The delay
that a client adds is its own time stamp minus that one, so the server's jitter is not held against it. A
level of N streams passes if, in steady state,

* P99 over tokens of (the client's gap minus the server's gap) stays under 2 ms, and
* P99 over requests of (the client's TTFT minus the server's own) stays under 5 ms.

Requests arrive at a nearly constant rate (burstiness 100), not all at once: a burst of N connections would
measure the burst. Run on a quiet machine:

    python benchmarks/client_overhead.py --vllm PATH/TO/bin/vllm --tokenizer MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.driver import Outcome, Plan, drive
from bench.payload import Target
from bench.workers import run_workers
from sim.workload.generate import generate
from sim.workload.spec import RandomDataset, WorkloadSpec

RATE = 50.0  # tokens/s of one stream
TOKENS = 200  # per request: 4 s
PROMPT = 64
HOLD = 3  # lengths of a request for which a level is held
ITL_LIMIT_MS, TTFT_LIMIT_MS = 2.0, 5.0


@dataclass(frozen=True)
class Answer:
    """One good answer: send time, TTFT, gaps [s] as the client saw them, and its text with the stamps."""

    sent: float
    ttft: float
    gaps: Sequence[float]
    text: str


@dataclass(frozen=True)
class Level:
    """One run: P99s in ms, and how many answers they rest on."""

    streams: int
    answers: int
    failed: int
    itl_ms: float
    ttft_ms: float
    lag_ms: float
    server_itl_ms: float
    cpu_us: float | None = None  # CPU time of the client per token

    @property
    def passes(self) -> bool:
        """Whether the client stayed within both limits."""
        return not self.failed and self.itl_ms < ITL_LIMIT_MS and self.ttft_ms < TTFT_LIMIT_MS

    def row(self, name: str) -> str:
        """A line of the table."""
        verdict = "pass" if self.passes else "fail"
        cpu = "" if self.cpu_us is None else f"{self.cpu_us:.0f}"
        return (
            f"| {name} | {self.streams} | {self.itl_ms:.2f} | {self.ttft_ms:.2f} | {self.lag_ms:.2f} "
            f"| {self.server_itl_ms:.2f} | {cpu} | {self.failed} | {verdict} |"
        )


def load(streams: int) -> WorkloadSpec:
    """A load that keeps about `streams` requests open."""
    length = TOKENS / RATE
    rate = streams / length
    return WorkloadSpec(
        RandomDataset(PROMPT, TOKENS),
        num_prompts=round(rate * length * (1 + HOLD)),
        request_rate=rate,
        burstiness=100.0,
    )


def assess(streams: int, answers: list[Answer], failed: int) -> Level:
    """Judge the part of the run in which all streams were open."""
    length = TOKENS / RATE
    start = min(a.sent for a in answers)
    steady = [a for a in answers if start + length <= a.sent]
    end = max(a.sent for a in answers)
    itls, ttfts, lags, server = [], [], [], []
    for answer in steady:
        first, *rest = answer.text.split()
        received, first_sent = first.split(":")
        stamps = np.array([float(first_sent), *map(float, rest)])
        gaps = np.asarray(answer.gaps)
        seen = answer.sent + answer.ttft + np.concatenate(([0.0], np.cumsum(gaps)))
        if len(stamps) != len(seen):
            raise SystemExit(f"{len(stamps)} tokens were sent, {len(seen)} seen")
        inside = seen[1:] <= end
        itls.append((gaps - np.diff(stamps))[inside])
        server.append(np.diff(stamps)[inside])
        lags.append((seen - stamps)[seen <= end])
        ttfts.append(answer.ttft - (float(first_sent) - float(received)))

    def p99(values: Sequence[float] | NDArray[np.float64]) -> float:
        return float(np.percentile(values, 99)) * 1e3

    return Level(
        streams,
        len(steady),
        failed,
        p99(np.concatenate(itls)),
        p99(ttfts),
        p99(np.concatenate(lags)),
        p99(np.concatenate(server)),
    )


def cpu_seconds() -> float:
    """CPU time of this process and of all children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_ours(url: str, streams: int, processes: int) -> Level:
    """One level with our client."""
    spec = load(streams)
    target = Target(url, "m")
    plan = Plan(generate(spec, 1), seed=1)
    outcome = Outcome()
    before = cpu_seconds()
    if processes == 1:
        asyncio.run(drive(target, plan, outcome, keep_text=True))
    else:
        run_workers(target, plan, outcome, processes, keep_text=True)
    used = cpu_seconds() - before
    start = outcome.start or 0.0
    good = [r for r in outcome.rows if r.status == "ok"]
    answers = [
        Answer(start + (r.sent or 0.0), (r.first_token or 0.0) - (r.sent or 0.0), r.chunk_gaps, r.text)
        for r in good
    ]
    level = assess(streams, answers, len(outcome.rows) - len(good))
    return replace(level, cpu_us=used / (spec.num_prompts * TOKENS) * 1e6)


def call_vllm(url: str, spec: WorkloadSpec, vllm: str, tokenizer: str) -> tuple[dict[str, Any], float]:
    """The detailed result of `vllm bench serve`, and the CPU seconds that it took, start-up included."""
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        command = [vllm, "bench", "serve", "--backend", "vllm", "--base-url", url, "--model", "m"]
        command += ["--tokenizer", tokenizer, "--endpoint", "/v1/completions", "--dataset-name", "random"]
        command += ["--random-input-len", str(PROMPT), "--random-output-len", str(TOKENS), "--ignore-eos"]
        command += ["--random-range-ratio", "0", "--num-prompts", str(spec.num_prompts)]
        command += ["--request-rate", str(spec.request_rate), "--burstiness", str(spec.burstiness)]
        command += ["--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "r.json"]
        command += ["--disable-tqdm"]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        result: dict[str, Any] = json.loads((Path(folder) / "r.json").read_text())
    return result, cpu_seconds() - before


def run_vllm(url: str, streams: int, vllm: str, tokenizer: str, startup: float) -> Level:
    """One level with `vllm bench serve`; `startup` [CPU seconds] is not counted as cost of tokens."""
    spec = load(streams)
    result, used = call_vllm(url, spec, vllm, tokenizer)
    answers, failed = [], 0
    columns = zip(
        result["start_times"],
        result["ttfts"],
        result["itls"],
        result["generated_texts"],
        result["errors"],
        strict=True,
    )
    for sent, ttft, itls, text, error in columns:
        if error:
            failed += 1
        else:
            answers.append(Answer(sent, ttft, itls, text))
    level = assess(streams, answers, failed)
    return replace(level, cpu_us=max(0.0, used - startup) / (spec.num_prompts * TOKENS) * 1e6)


def main() -> None:
    """Run all levels and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", help="the `vllm` command of an environment of its own")
    parser.add_argument("--tokenizer", help="a model folder with a tokenizer, for vllm bench serve")
    parser.add_argument("--processes", type=int, nargs="*", default=[1])
    parser.add_argument(
        "--levels", type=int, nargs="*", default=[100, 200, 300, 400, 500, 600, 800, 1000, 1200]
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--affinity", action="store_true", help="keep the server on CPU 0, clients on the rest"
    )
    parser.add_argument(
        "--realtime", action="store_true", help="SCHED_RR for all, where others use the machine"
    )
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    server_file = Path(__file__).with_name("token_server.py")
    server = subprocess.Popen(
        [sys.executable, str(server_file), "--rate", str(RATE)], stdout=subprocess.PIPE, text=True
    )
    if options.affinity:
        os.sched_setaffinity(server.pid, {0})
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        print("P99s in ms; CPU in us per token")
        print("| client | streams | ITL added | TTFT added | lag | server ITL | CPU | failed | |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        startup = 0.0
        if options.vllm:
            one = WorkloadSpec(RandomDataset(PROMPT, TOKENS), num_prompts=1)
            startup = call_vllm(url, one, options.vllm, options.tokenizer)[1]
        for streams in options.levels:
            for _ in range(options.repeats):
                if options.vllm:
                    level = run_vllm(url, streams, options.vllm, options.tokenizer, startup)
                    print(level.row("vllm bench serve"), flush=True)
                for processes in options.processes:
                    name = "servecast" + (f" x{processes}" if processes > 1 else "")
                    print(run_ours(url, streams, processes).row(name), flush=True)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
