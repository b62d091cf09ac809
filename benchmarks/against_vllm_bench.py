"""`servecast bench` beside `vllm bench serve`, in turn on one real server, several times each.

    ./dev test-real            # makes .venv-vllm
    .venv/bin/python benchmarks/against_vllm_bench.py --repeats 5 --concurrency 1,4,8

Serves a 0.5B-like model with made-up weights on the CPU and prints, for each concurrency and metric, the
median over requests of every repeat, and whether the two clients' repeats overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.servers.base import LaunchSpec  # noqa: E402 - a script beside the package
from bench.servers.process import ProcessServer  # noqa: E402
from bench.servers.ready import http_look, wait_ready  # noqa: E402
from tests.real.dummy_model import HALF_B, write  # noqa: E402

METRICS = {"TTFT": "median_ttft_ms", "TPOT": "median_tpot_ms", "E2E": "median_e2el_ms"}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
Figures = Mapping[str, float]


def serve_words(model: Path) -> list[str]:
    """The flags of the server."""
    return [
        "serve",
        str(model),
        *("--served-model-name", "m", "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", "4096", "--max-num-seqs", "16", "--block-size", "32"),
        "--no-enable-prefix-caching",
    ]


def prompts_of(concurrency: int, base: int) -> int:
    """Requests per run: every stream is used at least three times."""
    return max(base, 3 * concurrency)


def ours(url: str, model: Path, concurrency: int, prompts: int, args: argparse.Namespace) -> Figures:
    """One run of `servecast bench` on the running server."""
    with tempfile.TemporaryDirectory() as folder:
        load = " ".join(load_words(concurrency, prompts, args))
        scenario = Path(folder) / "run.yaml"
        scenario.write_text(
            f"serve: vllm {' '.join(serve_words(model))}\nbench: vllm bench serve {load}\ngpu: cpu\n"
        )
        out = Path(folder) / "out"
        words = ["bench", str(scenario), "--base-url", url, "--result-dir", str(out)]
        subprocess.run(
            [sys.executable, "-c", "from cli import main; main()", *words],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return figures(out / f"run-c{concurrency}.json", prompts)


def theirs(url: str, model: Path, concurrency: int, prompts: int, args: argparse.Namespace) -> Figures:
    """One run of `vllm bench serve` on the same server."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(args.venv / "bin" / "vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url]
        words += ["--endpoint", "/v1/completions", "--model", "m", "--tokenizer", str(model)]
        words += load_words(concurrency, prompts, args)
        words += ["--save-result", "--result-dir", folder, "--result-filename", "run.json"]
        subprocess.run(
            words,
            check=True,
            env={**os.environ, **ENV},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return figures(Path(folder) / "run.json", prompts)


def load_words(concurrency: int, prompts: int, args: argparse.Namespace) -> list[str]:
    """The load, in `vllm bench serve`'s words."""
    return [
        *("--dataset-name", "random", "--random-input-len", str(args.input_len)),
        *("--random-output-len", str(args.output_len), "--random-range-ratio", "0", "--ignore-eos"),
        *("--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--num-warmups", "1"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50", "--seed", "1"),
    ]


def figures(path: Path, prompts: int) -> Figures:
    """Medians of a result file; every request must have been answered."""
    result = json.loads(path.read_text())
    if result["completed"] != prompts:
        raise SystemExit(f"{path.name}: {result['completed']} of {prompts} requests completed")
    return {name: float(result[key]) for name, key in METRICS.items()}


def table(runs: Mapping[tuple[int, str], Sequence[Figures]], concurrencies: Sequence[int]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| concurrency | metric | servecast bench [ms]: median (least to most) | vllm bench serve [ms] "
        "| difference | repeats overlap |",
        "|---|---|---|---|---|---|",
    ]
    for concurrency in concurrencies:
        for metric in METRICS:
            both = [sorted(run[metric] for run in runs[concurrency, tool]) for tool in ("ours", "theirs")]
            mine, other = both
            cells = [f"{statistics.median(v):.1f} ({v[0]:.1f} to {v[-1]:.1f})" for v in both]
            difference = statistics.median(mine) / statistics.median(other) - 1
            overlap = "yes" if mine[0] <= other[-1] and other[0] <= mine[-1] else "no"
            lines.append(
                f"| {concurrency} | {metric} | {cells[0]} | {cells[1]} | {difference:+.1%} | {overlap} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Start the server, run both clients in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="environment with vLLM")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--prompts", type=int, default=8, help="requests per run, at least 3 x concurrency")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also write every repeat's figures here")
    args = parser.parse_args()
    concurrencies = [int(word) for word in args.concurrency.split(",")]
    runs: dict[tuple[int, str], list[Figures]] = {
        (c, t): [] for c in concurrencies for t in ("ours", "theirs")
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "half-b", HALF_B)
        command = (str(args.venv / "bin" / "vllm"), *serve_words(model))
        server = ProcessServer(LaunchSpec("vllm", command, "m", Path(folder) / "engine.log", env=ENV))
        try:
            server.start()
            wait_ready(server, http_look(server.base_url, "m"), "m")
            for repeat in range(args.repeats):
                # Both clients of a pair run right after each other, and who goes first alternates: a machine
                # that drifts, or is busy with something else, favours neither.
                order = (("ours", ours), ("theirs", theirs))
                for concurrency in concurrencies:
                    prompts = prompts_of(concurrency, args.prompts)
                    for tool, run in order if repeat % 2 == 0 else order[::-1]:
                        found = run(server.base_url, model, concurrency, prompts, args)
                        runs[concurrency, tool].append(found)
                        print(repeat + 1, tool, concurrency, dict(found), file=sys.stderr, flush=True)
        finally:
            server.stop()
    if args.json is not None:
        args.json.write_text(
            json.dumps({f"{tool} c{c}": found for (c, tool), found in runs.items()}, indent=1)
        )
    print(table(runs, concurrencies))


if __name__ == "__main__":
    main()
