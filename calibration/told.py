"""What a bench result says of itself: the scenario that it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sim.build import read_source
from sim.errors import BadInput
from sim.results import BenchResult
from sim.scenario import Observed, Scenario
from sim.workload.spec import PrefixRepetitionDataset, RandomDataset

Made = RandomDataset | PrefixRepetitionDataset
MADE: dict[str, type[Made]] = {kind.__name__: kind for kind in (RandomDataset, PrefixRepetitionDataset)}
ADAPTERS: dict[type[Made], TypeAdapter[Made]] = {kind: TypeAdapter(kind) for kind in MADE.values()}


def scenario_of(identity: Mapping[str, Any], name: str) -> Scenario:
    """The scenario that a bench result names.

    Raises:
        BadInput: it does not say what ran; the message names what is missing.
    """
    missing = [key for key in ("engine", "model", "gpu") if not identity.get(key)]
    if identity.get("flags") is None:  # a printed report names an engine, but not how it was launched
        missing.append("flags")
    if missing:
        hint = f"does not say its {' and '.join(missing)}; give the scenario file of the run as well"
        raise BadInput(f"{name} identity", None, hint)
    flags = {
        str(flag).lstrip("-"): True if value is None else value for flag, value in identity.get("flags", ())
    }
    engine = {
        "name": identity["engine"],
        "model": identity["model"],
        "version": identity.get("engine_version"),
        "args": flags,
        "env": dict(identity.get("env") or {}),
    }
    workload = {k: v for k, v in (identity.get("workload") or {}).items() if k in ("num_prompts", "seed")}
    content: dict[str, Any] = {"engine": engine, "gpu": identity["gpu"]}
    if identity.get("gpu_count"):
        content["gpu_count"] = identity["gpu_count"]
    if workload:
        content["workload"] = workload
    source = read_source(file=content)
    dataset = dataset_of(identity, name)
    if dataset is not None:
        bench = replace(source.bench, spec=replace(source.bench.spec, dataset=dataset))
        source = replace(source, bench=bench)
    return source.build()


def observed(scenario: Scenario, result: BenchResult) -> Scenario:
    """The scenario with the KV pool that the engine itself reported; what it did not report stays."""
    seen = scenario.observed
    tokens, blocks = (result.server.get(key) for key in ("kv_cache_tokens", "num_gpu_blocks"))
    return replace(
        scenario,
        observed=Observed(
            seen.kv_cache_tokens if tokens is None else int(tokens),
            seen.num_gpu_blocks if blocks is None else int(blocks),
        ),
    )


def dataset_of(identity: Mapping[str, Any], name: str) -> Made | None:
    """The made-up lengths of a result's load; None where it tells of none, or took them from a file.

    Raises:
        BadInput: names the field that cannot be read.
    """
    workload = identity.get("workload")
    if not isinstance(workload, Mapping):
        return None
    kind, told = MADE.get(str(workload.get("dataset_name"))), workload.get("dataset")
    if kind is None or not isinstance(told, Mapping):
        return None
    unknown = sorted(set(told) - {field.name for field in fields(kind)})
    if unknown:
        where = f"{name} identity.workload.dataset.{unknown[0]}"
        raise BadInput(where, told[unknown[0]], "is not known here")
    try:
        return ADAPTERS[kind].validate_python(dict(told))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((f"{name} identity.workload.dataset", *map(str, first["loc"])))
        raise BadInput(where, first["input"], first["msg"]) from None
