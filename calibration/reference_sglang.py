"""SGLang's side of the published reference, with the profile that was fitted on vLLM's run at concurrency 1.

    python -m calibration.reference_sglang

Nothing here is fitted to SGLang. Throughput changes are shown for two histories: every run on a fresh
engine, and the runs one after the other on one engine, as the published counters suggest. With the client's
default seed a run of 128 prompts begins with the 32 of the run before: what is still cached is not computed
again, which raises the throughput of the middle runs and so lowers that of the last one by comparison.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from calibration.reference_fit import fit_concurrency_1, published
from sim.reference import rtx5090_reference
from sim.request import Request
from sim.scenario import EngineName
from sim.simulate import SimResult, roofline, simulate
from sim.steptime.efficiencies import Efficiencies
from sim.workload.generate import generate

SERIES = ((1, 20), (16, 32), (64, 128), (128, 256))
CHUNKS = (4096, 8192)


def series(
    efficiencies: Efficiencies, engine: EngineName, settings: tuple[str, ...], warm: bool
) -> list[SimResult]:
    """The four published loads in turn; `warm`: each finds what the one before left in the cache."""
    outcomes = []
    before: list[Request] = []
    for concurrency, prompts in SERIES:
        scenario = rtx5090_reference().scenario(engine, concurrency, prompts, settings)
        model = roofline(scenario, efficiencies)
        outcomes.append(simulate(scenario, step_time=model, before=before))
        if warm:
            before = generate(replace(scenario.workload, num_prompts=prompts))
    return outcomes


def changes(outcomes: list[SimResult]) -> list[float]:
    """Output throughput of each run against the one before [%]; the first has none."""
    rates = [float(o.result.aggregates["output_throughput"] or 0.0) for o in outcomes]
    return [100.0 * (later / earlier - 1.0) for earlier, later in pairwise(rates)]


def main() -> None:
    """Print TTFT at concurrency 1 and the changes of throughput."""
    reference = rtx5090_reference()
    efficiencies = fit_concurrency_1().efficiencies
    measured = published(reference, 1, "sglang").figures["median_ttft_ms"]
    told = reference.sglang_throughput_change_percent
    print(f"published: median TTFT at concurrency 1 {measured} ms")
    print(f"published: throughput 16 to 64 {told['16 to 64']:+.0f} %, 64 to 128 {told['64 to 128']:+.0f} %")
    print(f"published: {reference.sglang_retractions_at_128} retractions at 128\n")
    for name, settings, engine in (
        *((f"SGLang, chunk {chunk}", (f"chunked-prefill-size={chunk}",), "sglang") for chunk in CHUNKS),
        ("vLLM, budget 8192", (), "vllm"),
    ):
        for warm in (False, True):
            outcomes = series(efficiencies, "vllm" if engine == "vllm" else "sglang", settings, warm)
            to_64, to_128 = changes(outcomes)[1:]
            ttft = [float(o.result.aggregates["mean_ttft_ms"] or 0.0) for o in outcomes]
            hits = [o.usage.prefix_hits / max(1, o.usage.prefix_queries) for o in outcomes]
            median = float(outcomes[0].result.aggregates["median_ttft_ms"] or 0.0)
            print(
                f"{name:18} {'one engine' if warm else 'fresh each'}: TTFT at 1 {median:.1f} ms "
                f"({100 * (median / measured - 1):+.1f} % of SGLang's), 16 to 64 {to_64:+.1f} %, "
                f"64 to 128 {to_128:+.1f} %, mean TTFT 64 to 128 x{ttft[3] / ttft[2]:.1f}, "
                f"hit rates {' '.join(f'{100 * h:.0f}' for h in hits)} %, "
                f"preempted at 128 {outcomes[3].usage.preemptions}"
            )


if __name__ == "__main__":
    main()
