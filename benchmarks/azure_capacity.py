"""What one H100 with Qwen3-14B carries of Azure's conversations, and whether 20 seeds agree on it.

    .venv/bin/python benchmarks/azure_capacity.py --data FOLDER [--seeds 20]

FOLDER holds `residency_h100_qwen3-14b` (inference-sim/residency-vllm, sweep_rate vanilla cells) and `traces`
(Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv). A profile is fitted to the runs with 4 and 8
requests/s; then `servecast plan` is asked for the rate, for the replicas for 50 requests/s, and for their
cost; then the capacity is found again under other seeds. Some minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from calibration.fit import fit  # noqa: E402 - a script beside the package
from calibration.parameters import default_prior  # noqa: E402
from calibration.profile_writing import profile_content  # noqa: E402
from calibration.validate.residency import FOLDER, OWN_SOURCES, read_cell  # noqa: E402
from sim.build import build_scenario, read_source  # noqa: E402
from sim.planning.capacity import capacity  # noqa: E402
from sim.planning.load_curve import Effort  # noqa: E402
from sim.planning.pool import Cores  # noqa: E402
from sim.planning.slo import parse_slos  # noqa: E402
from sim.profile import load_profile, write_profile  # noqa: E402

TRACE = "traces/AzureLLMInferenceTrace_conv.csv.gz"
SLOS = ("p99 ttft <= 1s", "p99 tpot <= 40ms")
WANTED = "50"  # requests/s
PRICE = "H100: 2.5\n"  # an hour, as an example
SERVE = "vllm serve Qwen/Qwen3-14B --max-num-seqs 256 --max-num-batched-tokens 8192"
BLOCKS = 18038  # as the engine of the published runs logged


def write_inputs(data: Path, out: Path) -> tuple[Path, Path, Path]:
    """Paths of scenario, profile and price list."""
    out.mkdir(parents=True, exist_ok=True)
    scenario, profile, prices = out / "azure.yaml", out / "profile.json", out / "prices.yaml"
    prices.write_text(PRICE, encoding="utf-8")
    scenario.write_text(
        f"serve: {SERVE}\ngpu: H100\nengine_version: 0.23.0\nobserved: {{num_gpu_blocks: {BLOCKS}}}\n"
        f"workload:\n  dataset: {{kind: azure, path: {data / TRACE}}}\n  num_prompts: 2000\n"
        "  ignore_eos: true\n",
        encoding="utf-8",
    )
    subject = build_scenario(
        serve=SERVE, bench="vllm bench serve", gpu="H100", engine_version="0.23.0", num_gpu_blocks=BLOCKS
    )
    cells = [read_cell(data / FOLDER, f"sweep_rate__agg_{rate}rps__vanilla", subject) for rate in (4, 8)]
    fitted = fit(cells, default_prior(subject.gpu, without=OWN_SOURCES))
    write_profile(profile_content(fitted, subject, cells), profile)
    return scenario, profile, prices


def main() -> int:
    """Fit, plan, repeat; status 1 if fewer than 17 in 20 intervals hold the mean of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "azure")
    args = parser.parse_args()
    scenario, profile, prices = write_inputs(args.data.resolve(), args.out)
    words = ["plan", str(scenario), "--profile", str(profile), "--rate", WANTED, "--price", str(prices)]
    for slo in SLOS:
        words += ["--slo", slo]
    print("$ servecast", *words, flush=True)
    html = ["--html", str(args.out / "plan.html")]
    subprocess.run([sys.executable, str(ROOT / "cli.py"), *words, *html], cwd=ROOT, check=True)
    source, known = read_source(file=scenario), load_profile(profile)
    found = []
    for index in range(args.seeds):
        answer = capacity(
            replace(source, seed=1000 * index).build(),
            parse_slos(SLOS),
            effort=Effort(),
            pool=Cores(args.jobs),
            profile=known,
            with_error=False,
        )
        assert answer.level is not None
        assert answer.low is not None
        assert answer.high is not None
        value, low, high = answer.level.value, answer.low, answer.high
        found.append((value, low, high))
        print(f"seed {1000 * index}: {value:.2f} ({low:.2f} to {high:.2f})", flush=True)
    values = [value for value, _, _ in found]
    centre = mean(values)
    inside = sum(low <= centre <= high for _, low, high in found)
    _, low, high = found[0]
    print(f"{min(values):.2f} to {max(values):.2f} requests/s, mean {centre:.2f}")
    print(f"{inside} of {len(found)} 95 % intervals hold the mean")
    print(f"{sum(low <= value <= high for value in values)} of {len(found)} lie in the first interval")
    return 0 if inside >= 0.85 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
