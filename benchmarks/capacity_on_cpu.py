"""Is a planned capacity true? A real vLLM on a CPU keeps objectives at 85 % of it and misses them at 115 %.

    ./dev test-real            # makes .venv-vllm
    .venv/bin/python benchmarks/capacity_on_cpu.py --out .cache/capacity

Calibrates a 0.5B-like model with made-up weights, plans the highest rate under an objective that is set at a
multiple of what a lone request needs, then benches the same engine below and above that rate. Takes about
half an hour; nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.metrics import latencies  # noqa: E402
from sim.planning.outcome import Outcome  # noqa: E402
from sim.planning.probe import Probe, load_ratio, value_of  # noqa: E402 - a script beside the package
from sim.planning.slo import Slos, parse_slos  # noqa: E402
from sim.resultfile import read_results  # noqa: E402
from tests.real.dummy_model import HALF_B, write  # noqa: E402

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
SHARES = (0.85, 1.15)


def scenario_text(model: Path) -> str:
    """A scenario file: the engine without a prefix cache, prompts of mixed lengths, Poisson arrivals."""
    serve = (
        f"vllm serve {model} --served-model-name m --load-format dummy --enforce-eager --max-model-len 4096 "
        "--max-num-seqs 16 --max-num-batched-tokens 2048 --block-size 128 --no-enable-prefix-caching"
    )
    load = (
        f"vllm bench serve --model m --tokenizer {model} --dataset-name random --random-input-len 256 "
        "--random-output-len 48 --random-range-ratio 0.5 --ignore-eos --request-rate 1 --num-prompts 200"
    )
    return f"name: capacity\nserve: {serve}\nbench: {load}\ngpu: cpu\nengine_version: 0.28.0\n"


def servecast(*words: str) -> None:
    """Run one command of ours; stops the script if it fails (an INVALID run is a result, not a failure)."""
    print("$ servecast", *words, flush=True)
    done = subprocess.run([sys.executable, str(ROOT / "cli.py"), *words], cwd=ROOT, check=False)
    if done.returncode not in (0, 3):
        sys.exit(done.returncode)


def launch_words(program: str) -> list[str]:
    """How the engine is started."""
    words = ["--launch", "process", "--program", program]
    for name, value in ENV.items():
        words += ["--env", f"{name}={value}"]
    return words


def judged(slos: Slos, path: Path) -> tuple[float, float, float]:
    """(rate sent, value of the objective [s], share of its limit) of a measured run, from the schedule on."""
    result = read_results(path)[0]
    if result.records is None:
        sys.exit(f"{path}: has no per-request records")
    found = latencies(result.records)
    probe = Probe(
        Outcome(),
        {"ttft": found.ttft + found.delay, "tpot": found.tpot, "e2el": found.e2el + found.delay},
        found.ok[found.ok],
    )
    value = value_of(slos.statistics[0], [probe])
    rate = result.aggregates.get("offered_rate") or 0.0
    return float(rate), float("nan") if value is None else value, load_ratio(slos, [probe])


def main() -> int:
    """Calibrate, plan, bench, judge; exit status 1 if one of the two verdicts is not as planned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default=str(ROOT / ".venv-vllm" / "bin" / "vllm"))
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "capacity")
    parser.add_argument("--budget", default="240", help="seconds of load for the calibration")
    parser.add_argument("--prompts", type=int, default=240, help="requests of each measured run")
    parser.add_argument(
        "--factor", type=float, default=4.0, help="objective: this many times a lone P90 TTFT"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "half-b"
    write(model, HALF_B)
    scenario, profile = args.out / "capacity.yaml", args.out / "profile.json"
    scenario.write_text(scenario_text(model), encoding="utf-8")
    launch = launch_words(args.program)
    if not profile.exists():
        runs = str(args.out / "calibration")
        budget = ["--budget", args.budget, "--result-dir", runs]
        servecast("calibrate", str(scenario), "--out", str(profile), *budget, *launch)
    lone = args.out / "lone.json"
    alone = ["--set", "request-rate=inf", "--set", "max-concurrency=1", "--set", "num-prompts=100"]
    servecast("predict", str(scenario), *alone, "--profile", str(profile), "--json", str(lone))
    limit = args.factor * float(read_results(lone)[0].aggregates["p99_ttft_ms"] or 0.0)
    objective = f"p90 ttft <= {limit:.0f}ms"
    planned = args.out / "plan.json"
    asked = ["--slo", objective, "--profile", str(profile), "--prompts", "400", "--json", str(planned)]
    servecast("plan", str(scenario), *asked)
    capacity = json.loads(planned.read_text(encoding="utf-8"))["capacity"]
    if capacity["value"] is None:
        sys.exit("the objective cannot be met at any rate")
    rates = [capacity["value"] * share for share in SHARES]
    runs = args.out / "measured"
    words = ["--request-rate", ",".join(f"{r:.4g}" for r in rates), "--num-prompts", str(args.prompts)]
    servecast(
        "bench", str(scenario), *words, "--num-warmups", "1", "--result-dir", str(runs), "--force", *launch
    )
    slos = parse_slos([objective])
    print(f"\nplanned: {capacity['value']:.3g} requests/s ({capacity['low']:.3g} to {capacity['high']:.3g})")
    measured = sorted(judged(slos, path) for path in runs.glob("**/*-r*.json"))
    good = len(measured) == len(SHARES)
    for share, (rate, value, used) in zip(SHARES, measured, strict=False):
        kept = used <= 1.0
        good &= kept == (share < 1.0)
        word = "kept" if kept else "missed"
        print(f"at {share:.0%} ({rate:.3g} requests/s): {slos.statistics[0].statistic} {value:.3g} s, {word}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
