"""The published reference as inputs: sources, options, and reports as `vllm bench serve` prints them."""

from __future__ import annotations

from sim.build import ScenarioSource, read_source
from sim.reference import ReferenceRun, rtx5090_reference
from sim.scenario import EngineName

REFERENCE = rtx5090_reference()
VLLM_128 = ("vllm", 128, 256)
SGLANG_128 = ("sglang", 128, 256)


def bench(concurrency: int, prompts: int) -> str:
    return f"{REFERENCE.bench} --max-concurrency {concurrency} --num-prompts {prompts}"


def reference_source(engine: EngineName, concurrency: int, prompts: int) -> ScenarioSource:
    setup = REFERENCE.vllm if engine == "vllm" else REFERENCE.sglang
    return read_source(
        serve=setup.serve,
        bench=bench(concurrency, prompts),
        gpu=REFERENCE.gpu,
        engine_version=setup.version,
        kv_cache_tokens=setup.kv_cache_tokens,
    )


def options(case: tuple[EngineName, int, int]) -> list[str]:
    """The same as command-line options."""
    engine, concurrency, prompts = case
    setup = REFERENCE.vllm if engine == "vllm" else REFERENCE.sglang
    return [
        *("--serve", setup.serve),
        *("--bench", bench(concurrency, prompts)),
        *("--gpu", REFERENCE.gpu),
        *("--engine-version", setup.version),
        *("--kv-cache-tokens", str(setup.kv_cache_tokens)),
    ]


def run_of(engine: EngineName, concurrency: int) -> ReferenceRun:
    return next(r for r in REFERENCE.runs if (r.engine, r.max_concurrency) == (engine, concurrency))


def printed(run: ReferenceRun) -> str:
    """A published run as the client prints it, as far as it was published."""
    figures = run.figures
    lines = ["============ Serving Benchmark Result ============"]

    def line(label: str, value: object) -> None:
        lines.append(f"{label + ':':<40} {value!s:<10}")

    line("Successful requests", run.num_prompts)
    line("Failed requests", 0)
    line("Maximum request concurrency", run.max_concurrency)
    for label, key in (
        ("Benchmark duration (s)", "duration"),
        ("Total input tokens", "total_input_tokens"),
        ("Total generated tokens", "total_output_tokens"),
        ("Output token throughput (tok/s)", "output_throughput"),
        ("Total token throughput (tok/s)", "total_token_throughput"),
    ):
        if key in figures:
            whole = key.startswith("total_") and key.endswith("tokens")
            line(label, int(figures[key]) if whole else figures[key])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic, word in (("mean", "Mean"), ("median", "Median"), ("p90", "P90"), ("p99", "P99")):
            key = f"{statistic}_{metric}_ms"
            if key in figures:
                line(f"{word} {metric.upper()} (ms)", figures[key])
    return "\n".join([*lines, "=" * 50, ""])
