"""Runs for the tests of the audit."""

from __future__ import annotations

from bench.audit.combine import combine
from bench.audit.facts import Run
from bench.audit.finding import Finding
from bench.audit.reading import read_material


def files(tmp_path, **texts: str) -> list[str]:
    paths = []
    for name, text in texts.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        paths.append(str(path))
    return paths


def read(paths: list[str], pool: int | None = None) -> tuple[Run, ...]:
    runs = combine([read_material(path) for path in paths])
    return tuple(run.with_(kv_given=pool) if pool else run for run in runs)


def about(findings: list[Finding], question: str, run: str = "") -> str:
    """All that is said to one question, as one text."""
    own = [f for f in findings if f.question == question and (not run or not f.runs or run in f.runs)]
    return " | ".join(f"{f.level} {f.title}: {f.evidence}. {f.effect}. {f.instead}" for f in own)


def report(**changes: object) -> Run:
    """A plain run: 500 requests of 1000 + 100 tokens at concurrency 8, nothing wrong with it."""
    figures: dict[str, float] = {
        "completed": 500.0,
        "failed": 0.0,
        "duration": 500.0,
        "total_input_tokens": 500_000.0,
        "total_output_tokens": 50_000.0,
        "output_throughput": 100.0,
        "mean_ttft_ms": 400.0,
        "median_ttft_ms": 390.0,
        "p99_ttft_ms": 520.0,
        "mean_tpot_ms": 76.0,
        "mean_itl_ms": 76.0,
        "median_itl_ms": 70.0,
        "p99_itl_ms": 120.0,
        "mean_e2el_ms": 7900.0,
    }
    settings = {"tool": "vllm bench serve", "max_concurrency": 8, "num_warmups": 5, "seed": 1}
    settings |= {"dataset_name": "random"}
    for key, value in changes.items():
        if key in ("name", "engine", "kv_given", "view", "paired"):
            continue
        target = figures if isinstance(value, float) and key != "request_rate" else settings
        target[key] = value
    name, engine, pool = changes.get("name", "r"), changes.get("engine", {}), changes.get("kv_given", 100_000)
    return Run(str(name), figures=figures, settings=settings, engine=engine, kv_given=pool)
