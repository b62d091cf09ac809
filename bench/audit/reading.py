"""Files of an audit: result JSON, pasted reports, start-up logs and /metrics dumps, told apart by content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.audit.checks import check_server, check_settings
from bench.audit.facts import Run
from bench.live_log import read_samples
from bench.metrics import Snapshot, parse
from bench.startup_log import StartupLog, parse_startup_log
from sim.commands.bench import parse_bench_command
from sim.commands.serve import parse_serve_command
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.results import BenchResult
from sim.results_io.fields import LARGEST, check_figures, count, number
from sim.results_io.files import read_results
from sim.results_io.printed import HEADER, looks_printed
from sim.results_io.said import with_trace
from sim.results_io.writing import is_vllm_figure
from sim.workload.files import read_text
from sim.workload.spec import RandomDataset

_FIGURE = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el)_ms")
_LINE = re.compile(
    r"\b(mean|median|std|p\d+(?:\.\d+)?)\s+(ttft|tpot|itl|e2el|e2e latency)\s*\((ms|s)\)\s*:\s*([\d.,]+)",
    re.IGNORECASE,
)
_METRICS = re.compile(r"^(?:# TYPE |(?:vllm|sglang):\w+(?:\{| ))", re.MULTILINE)
_NAMESPACE = re.compile(r"\b(\w+)=('[^']*'|None|True|False|[\w.+-]+)")
_COMMAND = re.compile(
    r"vllm bench serve|sglang\.bench(?:_serving|mark)|vllm serve|launch_server|docker run|benchmark_serving"
)
_CLIENT_KEYS = (
    "num_prompts",
    "seed",
    "dataset_name",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "random_prefix_len",
    "backend",
    "endpoint",
    "max_concurrency",
    "request_rate",
    "burstiness",
    "num_warmups",
    "ready_check_timeout_sec",
    "ignore_eos",
)
# Times of ours that other clients' results lack [ms].
_OWN_TIMES = ("mean_dispatch_delay_ms", "mean_e2el_from_schedule_ms")
_ENGINE_KEYS = ("engine", "engine_version", "model", "gpu", "gpu_count", "model_sha", "step_time_sha")
# Arguments that a log resolves and that change what is measured.
_LOGGED = (
    "max_model_len",
    "context_length",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "max_num_seqs",
    "max_running_requests",
    "max_num_batched_tokens",
    "chunked_prefill_size",
    "kv_cache_dtype",
    "quantization",
    "dtype",
    "enforce_eager",
    "enable_prefix_caching",
    "disable_radix_cache",
    "tensor_parallel_size",
    "tp_size",
    "async_scheduling",
    "schedule_policy",
    "schedule_conservativeness",
    "attention_backend",
    "block_size",
    "page_size",
)
# What other lines of a pasted report add to its figures.
_EXTRAS = (
    (re.compile(r"(?:Preemptions|num_preemptions(?:_total)?\S*?)[:\s]\s*(\d+)"), "num_preemptions"),
    (re.compile(r"KV cache \(tokens\):\s+([\d,]+)"), "kv_cache_tokens"),
    (re.compile(r"Total input tokens:\s+(\d+)"), "total_input_tokens"),
    (re.compile(r"Total generated tokens:\s+(\d+)"), "total_output_tokens"),
    (re.compile(r"Output token throughput \(tok/s\):\s+([\d.]+)"), "output_throughput"),
    (re.compile(r"Max(?:imum)? request concurrency:\s+(\d+)"), "max_concurrency"),
    (re.compile(r"Successful requests:\s+(\d+)"), "completed"),
    (re.compile(r"Failed requests:\s+(\d+)"), "failed"),
    (re.compile(r"Benchmark duration \(s\):\s+([\d.]+)"), "duration"),
)


@dataclass(frozen=True, slots=True)
class Material:
    """What one file holds."""

    path: str
    runs: tuple[Run, ...] = ()
    log: StartupLog | None = None
    snapshot: Snapshot | None = None


def read_material(path: str) -> Material:
    """Read one file, whatever it is.

    Raises:
        BadInput: unreadable, or nothing of what an audit can use is in it.
    """
    text = read_text(path, "FILE")
    name = Path(path).name
    if re.match(r"\s*(\{|\[\s*\{)", text):
        return Material(path, _of_json(text, path, name))
    if _METRICS.search(text) and not looks_printed(text):
        try:
            return Material(path, snapshot=parse(text))
        except ValueError as error:
            raise BadInput("FILE", path, f"looks like /metrics but is not the text format: {error}") from None
    log = _log(text)
    runs = _of_text(text, path, name)
    if not runs and log is None:
        raise BadInput(
            "FILE", path, "holds no benchmark report, no start-up log and no /metrics dump that is known"
        )
    return Material(path, runs, log)


def _log(text: str) -> StartupLog | None:
    log = parse_startup_log(text)
    known = log.pools or log.given or log.resolved or next(read_samples(text), None) is not None
    return log if known else None


def _of_json(text: str, path: str, name: str) -> tuple[Run, ...]:
    try:
        results = read_results(path)
    except BadInput as error:
        # What is of another form, or not all there, may still hold figures; what contradicts itself may not.
        partly = "no known format" in error.hint or error.hint.startswith("lacks")
        runs = _loose_json(text, name) if partly else ()
        if not runs:
            raise error from None
        return runs
    many = len(results) > 1
    return tuple(_of_result(r, f"{name}#{i}" if many else name) for i, r in enumerate(results, start=1))


def _of_result(result: BenchResult, name: str) -> Run:
    identity = result.identity
    figures = {key: float(v) for key, v in result.aggregates.items() if isinstance(v, int | float)}
    figures.setdefault("duration", result.duration)
    settings: dict[str, Any] = {key: identity[key] for key in _CLIENT_KEYS if identity.get(key) is not None}
    workload = identity.get("workload")
    if isinstance(workload, Mapping):
        settings |= _of_workload(workload)
    settings["tool"] = result.tool
    check_settings(settings, name)
    check_server(result, name)
    engine = {key: identity[key] for key in _ENGINE_KEYS if identity.get(key) is not None}
    resolved = identity.get("engine_args")
    if isinstance(resolved, Mapping):
        # dtype is spelled in more than one way: bf16, bfloat16
        engine |= {key: resolved[key] for key in _LOGGED if key != "dtype" and resolved.get(key) is not None}
    for flag, value in identity.get("flags") or ():
        engine[str(flag).lstrip("-").replace("-", "_")] = True if value is None else value
    return Run(name, result, figures, settings, engine)


def _of_workload(workload: Mapping[str, Any]) -> dict[str, Any]:
    """A load as our own results carry it."""
    keys = ("num_prompts", "max_concurrency", "request_rate", "burstiness", "seed", "num_warmups", "endpoint")
    found: dict[str, Any] = {key: workload[key] for key in keys if workload.get(key) is not None}
    found["dataset_name"] = str(workload.get("dataset_name"))
    dataset = workload.get("dataset")
    if isinstance(dataset, Mapping):
        for key in ("input_len", "output_len", "range_ratio", "prefix_len"):
            if dataset.get(key) is not None:
                found[f"random_{key}"] = dataset[key]
    return found


def _loose_json(text: str, name: str) -> tuple[Run, ...]:
    """Figures under `vllm bench serve`'s keys in any object; several under `runs`, with a `setting`."""
    try:
        raw = load_json(text)
    except json.JSONDecodeError:
        return ()
    if isinstance(raw, dict) and "servecast" in raw:
        return ()  # a result of our own that cannot be read is damaged
    common = raw.get("setting", {}) if isinstance(raw, dict) else {}
    rows = raw.get("runs", [raw]) if isinstance(raw, dict) else raw
    if not isinstance(rows, list) or not isinstance(common, dict):
        return ()
    runs = []
    for i, entry in enumerate(rows, start=1):
        row = {**common, **entry} if isinstance(entry, dict) else {}
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        if not any(_FIGURE.fullmatch(key) for key in numbers):
            continue
        where = f"{name} run {i}"
        check_figures({key: value for key, value in numbers.items() if is_vllm_figure(key)}, where)
        settings = with_trace({k: row[k] for k in _CLIENT_KEYS if row.get(k) is not None})
        check_settings(settings, where)
        for key in _OWN_TIMES:
            number(row, key, where)
        count(row, "num_preemptions", where)
        runs.append(
            Run(
                f"{name}#{i}" if len(rows) > 1 else name,
                figures={k: float(v) for k, v in numbers.items() if abs(v) <= LARGEST},
                settings=settings | {"tool": "figures"},
                engine={k: row[k] for k in (*_ENGINE_KEYS, *_LOGGED) if row.get(k) is not None},
                kv_given=count(row, "kv_cache_tokens", where) or None,
            )
        )
    return tuple(runs)


def _of_text(text: str, path: str, name: str) -> tuple[Run, ...]:
    """Printed reports, whole or in part, with what their surroundings say of the settings."""
    client, engine = _from_commands(text)
    client = with_trace({**_from_namespace(text), **client})
    if looks_printed(text):
        try:
            results = read_results(path)
        except BadInput as error:
            headers = len(HEADER.findall(text))
            # Figures picked from several reports would make one run of them.
            if headers > 1 or (headers and "truncated" not in error.hint):
                raise
            results = []
        if results:
            many = len(results) > 1
            found = [_of_result(r, f"{name}#{i}" if many else name) for i, r in enumerate(results, start=1)]
            if many:  # what stands around several reports belongs to no one of them
                return tuple(found)
            run = found[0]
            check_settings(client, name)
            figures = {**_extras(text), **run.figures}
            return (
                run.with_(
                    figures=figures,
                    settings={**client, **run.settings},
                    engine={**engine, **run.engine},
                    kv_given=int(figures["kv_cache_tokens"]) if "kv_cache_tokens" in figures else None,
                ),
            )
    figures = _loose_figures(text, name)
    if not figures:
        return ()
    if "max_concurrency" in figures:
        client.setdefault("max_concurrency", int(figures["max_concurrency"]))
    check_settings(client, name)
    return (Run(name, figures=figures, settings={**client, "tool": "part of a report"}, engine=engine),)


def _loose_figures(text: str, name: str) -> dict[str, float]:
    """Lines such as `Mean TTFT (ms): 523.85`, `Successful requests: 20` or `mean_ttft_ms: 523.85`."""
    printed = [
        (
            f"{statistic.lower()}_{metric.lower().replace('e2e latency', 'e2el')}_ms",
            _float(value, name) * (1000.0 if unit.lower() == "s" else 1.0),
        )
        for statistic, metric, unit, value in _LINE.findall(text)
    ]
    keyed = [
        (key, _float(value, name))
        for key, value in re.findall(
            r"\b([a-z]\w+_ms|completed|failed|duration|num_prompts)\b[\"']?\s*[:=]\s*([\d.]+)", text
        )
        if _FIGURE.fullmatch(key) or not key.endswith("_ms")
    ]
    figures = {**_of_one_run(keyed, name), **_of_one_run(printed, name)}
    if not any(_FIGURE.fullmatch(key) for key in figures):
        return {}
    found = {**_extras(text), **figures}
    check_figures({key: value for key, value in found.items() if is_vllm_figure(key)}, name)
    return found


def _of_one_run(pairs: Sequence[tuple[str, float]], name: str) -> dict[str, float]:
    """Figures by key.

    Raises:
        BadInput: a latency has two values, so that they are of two runs.
    """
    figures: dict[str, float] = {}
    for key, value in pairs:
        if figures.setdefault(key, value) != value and _FIGURE.fullmatch(key):
            hint = f"has {key} as {figures[key]:g} and as {value:g}: give each run a file of its own"
            raise BadInput("FILE", name, hint)
    return figures


def _extras(text: str) -> dict[str, float]:
    """Other lines of a report, as far as they are there."""
    found = ((key, pattern.search(text)) for pattern, key in _EXTRAS)
    return {key: _float(match[1], key) for key, match in found if match}


def _float(text: str, where: str) -> float:
    """Digits, points and commas of a report as a number.

    Raises:
        BadInput: two points in it.
    """
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise BadInput(where, text, "is no number") from None


def _from_namespace(text: str) -> dict[str, Any]:
    """Settings of the `Namespace(...)` that clients print."""
    place = text.rfind("Namespace(")
    if place < 0:
        return {}
    found = dict(_NAMESPACE.findall(text[place:].split("\n", 1)[0]))
    return {key: value for key in _CLIENT_KEYS if (value := _literal(found.get(key, "None"))) is not None}


def _literal(text: str) -> Any:
    word = text.strip("'")
    if word in ("None", ""):
        return None
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def _from_commands(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of launch and benchmark commands that were pasted along."""
    client: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    lines = re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines()
    for line in lines:
        if not _COMMAND.search(line) or "Namespace(" in line:
            continue
        try:
            spec = parse_bench_command(line).spec
        except BadInput:
            pass
        else:
            client |= {key: getattr(spec, key) for key in ("num_prompts", "seed", "num_warmups", "endpoint")}
            client |= {"max_concurrency": spec.max_concurrency, "request_rate": spec.request_rate}
            if isinstance(spec.dataset, RandomDataset):
                client |= {"dataset_name": "random", "random_input_len": spec.dataset.input_len}
                client |= {"random_output_len": spec.dataset.output_len}
            continue
        try:
            command = parse_serve_command(line)
        except BadInput:
            continue
        engine |= {"engine": command.engine, "model": command.model}
        engine |= {flag.lstrip("-").replace("-", "_"): True if v is None else v for flag, v in command.flags}
        if command.version:
            engine["engine_version"] = command.version
    known = {key: value for key, value in client.items() if value is not None}
    return known, {key: value for key, value in engine.items() if value is not None}


def engine_facts(log: StartupLog) -> dict[str, Any]:
    """The resolved arguments of a log that change what is measured."""
    facts: dict[str, Any] = {}
    for key in _LOGGED:
        if key in log.resolved and log.resolved[key].value is not None:
            facts[key] = log.resolved[key].value
        elif key in log.given:
            facts[key] = log.given[key]
    model = log.given.get("model") or (log.resolved["model"].value if "model" in log.resolved else None)
    return facts | {
        key: value
        for key, value in (("engine", log.engine), ("engine_version", log.version), ("model", model))
        if value is not None
    }
