"""How fast the simulator is, on workloads of every sort: `python benchmarks/speed.py --help`.

Every case runs in a process of its own, so that its peak memory is its own. Times are CPU seconds, medians of
several runs after one that warms up; beside them stand what two yardsticks took on the same machine at the
same time: `python -c "import numpy, simpy"` and a fixed loop in plain Python.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from sim import simulate as simulation
from sim.build import build_scenario
from sim.scenario import Scenario
from sim.workload.spec import FileDataset

SERVE = {
    "vllm": "vllm serve Qwen/Qwen3-14B --max-num-seqs 256",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-14B --max-running-requests 256",
}
RANDOM = (
    "--dataset-name random --random-input-len {i} --random-output-len {o} "
    "--num-prompts {n} --request-rate {r}"
)
# name: client flags, server flags by engine. The long ones take a trace's lengths, see `_lengths`.
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "moderate": (RANDOM.format(i=1024, o=256, n=1000, r=10), {}),
    "saturating": (RANDOM.format(i=1024, o=256, n=1000, r=80), {}),
    "long-output": (RANDOM.format(i=256, o=4096, n=200, r=2), {}),
    "kv-starved": (
        RANDOM.format(i=256, o=1024, n=1000, r=80),
        {
            "vllm": "--num-gpu-blocks-override 1500 --max-model-len 4096",
            "sglang": "--max-total-tokens 24000 --schedule-conservativeness 0.05 --context-length 4096",
        },
    ),
    # The same with half the output: vLLM preempts about once per request instead of twice.
    "kv-starved-once": (
        RANDOM.format(i=256, o=512, n=1000, r=80),
        {
            "vllm": "--num-gpu-blocks-override 1500 --max-model-len 4096",
            "sglang": "--max-total-tokens 24000 --schedule-conservativeness 0.05 --context-length 4096",
        },
    ),
    # Short prompts, long outputs, and a reserve that is soon forgotten: SGLang retracts as many as come.
    "retracting": (
        RANDOM.format(i=16, o=1000, n=1000, r=80),
        {
            "vllm": "--num-gpu-blocks-override 1500 --max-model-len 4096",
            "sglang": "--max-total-tokens 24000 --schedule-conservativeness 0.05 --context-length 4096",
        },
    ),
    "shared-prefix": (
        "--dataset-name prefix_repetition --prefix-repetition-prefix-len 1024 "
        "--prefix-repetition-suffix-len 128 --prefix-repetition-num-prefixes 100 "
        "--prefix-repetition-output-len 128 --num-prompts 2000 --request-rate 20",
        {
            "vllm": "--num-gpu-blocks-override 4000 --max-model-len 4096",
            "sglang": "--max-total-tokens 64000 --context-length 4096",
        },
    ),
    "closed-loop-256": (RANDOM.format(i=1024, o=256, n=1000, r="inf") + " --max-concurrency 256", {}),
    "10k": ("", {}),
    "100k": ("", {}),
    "1M": ("", {}),
}
LONG = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000}
LOAD_RATE = 10.0  # requests/s, about 85 % of what this model on this card sustains with these lengths
# Azure's conversation trace (2023): mean lengths 1155 and 211; here as lognormals of the same means.
MEAN_INPUT, MEAN_OUTPUT, SPREAD = 1155, 211, 0.9
ENVIRONMENT = {("sglang", "retracting"): "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS=1 "}
PATHS = {"compiled": {"fast": True}, "leaps": {"fast": False}, "steps": {"leap": False}}
PEERS = ("blis", "aiconfigurator", "vidur")


def scenario(engine: str, case: str, folder: Path) -> Scenario:
    """One standard workload on one engine."""
    bench, flags = CASES[case]
    bench = bench or RANDOM.format(i=1024, o=256, n=1, r=LOAD_RATE)
    made = build_scenario(
        serve=f"{ENVIRONMENT.get((engine, case), '')}{SERVE[engine]} {flags.get(engine, '')}",
        bench=f"vllm bench serve --ignore-eos {bench}",
        gpu="H100",
    )
    if case not in LONG:
        return made
    dataset = FileDataset("azure", str(_lengths(folder, LONG[case])))
    workload = dataclasses.replace(made.workload, dataset=dataset, num_prompts=LONG[case])
    return dataclasses.replace(made, workload=workload)


def _lengths(folder: Path, count: int) -> Path:
    """A trace file with that many rows."""
    path = folder / f"lengths-{count}.csv"
    if path.exists():
        return path
    rng = np.random.default_rng(1)
    shift = SPREAD**2 / 2
    inputs = np.clip(rng.lognormal(np.log(MEAN_INPUT) - shift, SPREAD, count), 1, 14_000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(MEAN_OUTPUT) - shift, SPREAD, count), 1, 1000).astype(int)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows(("2023-11-16 18:15:46.680", *row) for row in zip(inputs, outputs, strict=True))
    return path


def python_loop() -> float:
    """CPU seconds of a fixed loop in plain Python."""
    begin, total = time.process_time(), 0
    for number in range(2_000_000):
        total += number * 3 & 7
    return time.process_time() - begin


def importing() -> float:
    """CPU seconds of a process that imports numpy and simpy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import numpy, simpy"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(engine: str, case: str, path: str, repeat: int, folder: Path) -> dict[str, Any]:
    """One case in this process: medians of `repeat` runs after one more; the long cases run once."""
    of = scenario(engine, case, folder)
    parts: dict[str, list[float]] = {}
    for name in ("generate_load", "run", "summarise"):
        setattr(simulation, name, _timed(getattr(simulation, name), parts.setdefault(name, [])))
    totals: list[float] = []
    runs = 1 if case in LONG else repeat + 1
    for _ in range(runs):
        begin = time.process_time()
        outcome = simulation.simulate(of, **PATHS[path])
        totals.append(time.process_time() - begin)
    kept = slice(1, None) if runs > 1 else slice(None)
    seconds = statistics.median(totals[kept])
    result, usage = outcome.result, outcome.usage
    return {
        "engine": engine,
        "case": case,
        "path": result.extra["path"],
        "requests": result.aggregates["completed"],
        "steps": usage.steps,
        "preemptions": usage.preemptions,
        "state": result.extra["regime"]["state"],
        "seconds": seconds,
        "parts": {name: statistics.median(values[kept]) for name, values in parts.items()},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000.0,
        "loop": statistics.median(python_loop() for _ in range(3)),
    }


def _timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            into.append(time.process_time() - begin)

    return timed


def in_child(engine: str, case: str, path: str, repeat: int, folder: Path) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--child", engine, case, path, str(repeat), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def show(row: dict[str, Any], imported: float, before: dict[str, Any] | None) -> str:
    """One line of the table."""
    seconds, parts = row["seconds"], row["parts"]
    shares = " ".join(f"{100 * parts[name] / seconds:3.0f}" for name in ("generate_load", "run", "summarise"))
    line = (
        f"{row['engine']:7s}{row['case']:16s}{row['path']:9s}{row['requests']:8d}{row['steps']:9d}"
        f"{row['preemptions']:8d}{seconds * 1e3:11.1f}{row['requests'] / seconds:11.0f}"
        f"{row['steps'] / seconds:10.0f}"
        f"{row['peak_mb']:7.0f}  {shares:12s}{seconds / imported:8.2f}{seconds / row['loop']:8.2f}"
    )
    return line if before is None else f"{line}{seconds / before['seconds']:8.2f}"


def peers() -> list[str]:
    """Which other simulators could be timed beside this one."""
    return [name for name in PEERS if shutil.which(name)]


def profile(engine: str, case: str, path: str, picture: Path, folder: Path) -> None:
    """Draw where one run spends its time, by function."""
    import cProfile
    import pstats

    from matplotlib import pyplot

    of = scenario(engine, case, folder)
    simulation.simulate(of, **PATHS[path])
    profiler = cProfile.Profile()
    profiler.runcall(simulation.simulate, of, **PATHS[path])
    stats = pstats.Stats(profiler).get_stats_profile().func_profiles
    rows = sorted(stats.items(), key=lambda item: item[1].tottime)[-25:]
    figure, axes = pyplot.subplots(figsize=(8, 7), layout="constrained")
    axes.barh([f"{Path(p.file_name).stem}:{name}" for name, p in rows], [p.tottime * 1e3 for _, p in rows])
    axes.set(xlabel="own time [ms], profiler included", title=f"{engine}, {case}, {path}")
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", choices=SERVE, default=list(SERVE))
    parser.add_argument("--case", nargs="+", choices=CASES, default=[c for c in CASES if c not in LONG])
    parser.add_argument("--path", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    parser.add_argument("--compare", type=Path, help="figures saved before; the last column is now over then")
    parser.add_argument("--profile", type=Path, help="draw the first case's profile instead")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        engine, case, path, repeat, folder = arguments.child
        print(json.dumps(measure(engine, case, path, int(repeat), Path(folder))))
        return
    before = {}
    if arguments.compare:
        saved = json.loads(arguments.compare.read_text(encoding="utf-8"))
        before = {(row["engine"], row["case"], row["path"]): row for row in saved["rows"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.profile:
            profile(arguments.engine[0], arguments.case[0], arguments.path[0], arguments.profile, folder)
            return
        imported = statistics.median(importing() for _ in range(5))
        print(f"import numpy, simpy: {imported * 1e3:.0f} ms; peers on PATH: {', '.join(peers()) or 'none'}")
        print(
            f"{'engine':7s}{'case':16s}{'path':9s}{'requests':>8s}{'steps':>9s}{'preempt':>8s}{'CPU ms':>11s}"
            f"{'requests/s':>11s}{'steps/s':>10s}{'MB':>7s}  {'gen/run/sum':12s}{'/import':>8s}{'/loop':>8s}"
        )
        rows = []
        for engine in arguments.engine:
            for case in arguments.case:
                for path in arguments.path:
                    row = in_child(engine, case, path, arguments.repeat, folder)
                    if row["path"] != path:
                        continue  # this path does not apply; another one took over
                    rows.append(row)
                    print(show(row, imported, before.get((engine, case, path))), flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps({"import": imported, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
