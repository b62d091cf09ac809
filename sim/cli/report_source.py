"""From a result file back to the scenario that made it, so that it can be asked what to change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.build import ScenarioSource, read_source
from sim.cli.options import ScenarioOptions, read_text
from sim.commands.serve import table
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.provenance import Origin
from sim.results import BenchResult
from sim.results_io.files import read_result
from sim.workload.spec import WorkloadSpec

SCENARIO_SUFFIXES = (".yaml", ".yml")
# Resolved arguments of a prediction that say nothing as flags, or follow from others.
_NOT_FLAGS = {"device", "cudagraph_mode", "max_num_scheduled_tokens", "cudagraph_capture_sizes"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def source_of(inputs: ScenarioOptions) -> tuple[ScenarioSource, BenchResult | None]:
    """The scenario to tune, and the measured (or predicted) run of it, if it was read from a result file.

    No run where options change what the result says of itself: its figures are another setup's then.

    A result of `servecast bench` or `predict` carries engine, model, GPU and load. Other clients' reports
    carry the load only, so the launch command and the GPU must be given with --serve and --gpu.

    Raises:
        BadInput: several files, or what the result does not say and no option gives.
    """
    if len(inputs.files) > 1:
        raise BadInput("SCENARIO", None, f"takes one scenario or result, {len(inputs.files)} were given")
    path = inputs.files[0] if inputs.files else None
    if path is None or path.endswith(SCENARIO_SUFFIXES):
        return inputs.source(), None
    if len(inputs.serve) > 1:
        raise BadInput("--serve", None, f"takes one command beside a result, {len(inputs.serve)} were given")
    result = read_result(path)
    source = _of_result(result, path, inputs)
    other = _changes(inputs, result) or (inputs.bench is not None and _other_load(source.bench.spec, result))
    return source, None if other else result


def _changes(inputs: ScenarioOptions, result: BenchResult) -> bool:
    """Whether options say something else than the result; what it does not say, they only add."""
    identity = result.identity
    told = {"model": inputs.model, "gpu_count": inputs.gpu_count}
    if any(value is not None and identity.get(key) not in (None, value) for key, value in told.items()):
        return True
    version, measured = inputs.engine_version, identity.get("engine_version")
    if version and measured and version.removesuffix(".0") != str(measured).removesuffix(".0"):
        return True
    if inputs.gpu is not None and not _same_gpu(inputs.gpu, identity.get("gpu")):
        return True
    own_engine = bool(identity.get("flags") or identity.get("engine_args"))
    own_load = identity.get("workload") is not None
    return bool(inputs.sets or (inputs.serve and own_engine) or (inputs.bench and own_load))


def _other_load(spec: WorkloadSpec, result: BenchResult) -> bool:
    """Whether a benchmark command names another load than the report of a client tells of."""
    figures, told = result.aggregates, result.identity
    sent = (figures.get("completed") or 0) + (figures.get("failed") or 0)
    cap, rate = told.get("max_concurrency"), told.get("request_rate")
    return bool(
        (cap is not None and cap != spec.max_concurrency)
        or (rate is not None and float(rate) != spec.request_rate)
        or (sent and spec.duration is None and sent != spec.num_prompts)
    )


def _of_result(result: BenchResult, path: str, inputs: ScenarioOptions) -> ScenarioSource:
    identity = result.identity
    content: dict[str, Any] = {}
    serve = read_text(inputs.serve[0], "--serve") if inputs.serve else None
    if serve is None:
        content["engine"] = _engine(identity, path)
    gpu = inputs.gpu or identity.get("gpu")
    if gpu is None:
        raise BadInput("--gpu", None, f"{path} does not name the GPU; give it")
    content["workload"] = _workload(result, path)
    same_engine = serve is None
    return read_source(
        file=content,
        serve=serve,
        bench=None if inputs.bench is None else read_text(inputs.bench, "--bench"),
        gpu=gpu,
        gpu_count=inputs.gpu_count,
        model=inputs.model or (identity.get("model") if same_engine else None),
        engine_version=inputs.engine_version or (identity.get("engine_version") if same_engine else None),
        sets=inputs.sets,
        kv_cache_tokens=(
            _logged_pool(result, inputs) if inputs.kv_cache_tokens is None else inputs.kv_cache_tokens
        ),
        num_gpu_blocks=inputs.num_gpu_blocks,
        seed=inputs.seed,
    )


def _logged_pool(result: BenchResult, inputs: ScenarioOptions) -> int | None:
    """The KV pool that an engine logged [tokens]; None where none did, or on another deployment.

    A prediction has it where it was told of it; one that it computed would pass for an observation.
    """
    tokens, identity = result.server.get("kv_cache_tokens"), result.identity
    told = result.origin == "measured" or result.extra.get("kv_origin") in (Origin.GIVEN, Origin.LOGGED)
    if not tokens or not told or inputs.serve or inputs.num_gpu_blocks is not None:
        return None
    if inputs.gpu is not None and not _same_gpu(inputs.gpu, identity.get("gpu")):
        return None
    return int(tokens) if inputs.model in (None, identity.get("model")) else None


def _same_gpu(asked: str, measured: object) -> bool:
    if not isinstance(measured, str):
        return True  # the result names no card: the option only says which one it was
    try:
        return find_gpu(asked)[0].name == find_gpu(measured)[0].name
    except BadInput:
        return asked == measured


def _engine(identity: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The engine as a scenario file has it, from the flags as given or else as resolved."""
    name = identity.get("engine")
    if name not in ("vllm", "sglang") or not (identity.get("flags") or identity.get("engine_args")):
        raise BadInput("--serve", None, f"{path} does not say how the engine was launched; give its command")
    args: dict[str, Any] = {}
    if identity.get("flags") is not None:
        for flag, value in identity["flags"]:
            args[str(flag).lstrip("-")] = True if value is None else value
    else:
        flags = table(name)
        for key, value in identity["engine_args"].items():
            flag = flags.spellings.get("--" + key.replace("_", "-"))
            if value is None or key in _NOT_FLAGS or flag is None or flag.role != "modelled":
                continue
            if flag.kind == "switch" and value is not True:
                continue
            args[key] = _DTYPES.get(value, value) if key == "dtype" else value
    return {"name": name, "model": identity.get("model"), "args": args, "env": identity.get("env") or {}}


def _workload(result: BenchResult, path: str) -> dict[str, Any]:
    """The load: as servecast wrote it, else what the report tells of it."""
    described = result.identity.get("workload")
    if isinstance(described, Mapping):
        return _own_workload(described)
    figures, identity = result.aggregates, result.identity
    completed = figures.get("completed") or 0
    total_in, total_out = figures.get("total_input_tokens"), figures.get("total_output_tokens")
    if not completed or not total_in or not total_out:
        raise BadInput("--bench", None, f"{path} does not tell the load; give the benchmark command")
    workload: dict[str, Any] = {
        "num_prompts": int(completed + (figures.get("failed") or 0)),
        "dataset": {
            "kind": "random",
            "input_len": max(1, round(total_in / completed)),
            "output_len": max(1, round(total_out / completed)),
        },
    }
    if result.records is not None and Path(path).exists() and result.tool == "vllm bench serve":
        workload["dataset"] = {"kind": "vllm-result", "path": path}
    for key in ("max_concurrency", "burstiness"):
        if identity.get(key) is not None:
            workload[key] = identity[key]
    rate = identity.get("request_rate")
    if rate not in (None, "inf"):
        workload["request_rate"] = float(rate)
    return workload


_DATASETS = {"RandomDataset": "random", "PrefixRepetitionDataset": "prefix_repetition"}


def _own_workload(described: Mapping[str, Any]) -> dict[str, Any]:
    """`workload_identity` turned round into a scenario file's `workload:`."""
    workload = {
        key: value
        for key, value in described.items()
        if value is not None and key not in ("dataset", "dataset_name", "goodput")
    }
    if workload.get("request_rate") == "inf":
        workload["request_rate"] = float("inf")
    if workload.get("burstiness") == "inf":
        workload["burstiness"] = float("inf")
    if described.get("goodput"):
        workload["goodput"] = dict(described["goodput"])
    ramp = workload.pop("ramp_up", None)
    if ramp:
        workload["ramp_up"] = {"strategy": ramp[0], "start": ramp[1], "end": ramp[2]}
    dataset = {key: value for key, value in (described.get("dataset") or {}).items() if value is not None}
    dataset.setdefault("kind", _DATASETS.get(str(described.get("dataset_name")), "random"))
    workload["dataset"] = dataset
    return workload
