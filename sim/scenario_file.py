"""Scenario files: YAML with the content of a `Scenario`'s inputs, unknown keys refused.

    serve: vllm serve Qwen/Qwen2.5-7B-Instruct --max-num-seqs 128     # or an `engine:` mapping
    bench: vllm bench serve --random-input-len 4096 --num-prompts 256 # or a `workload:` mapping
    gpu: RTX-5090
    gpu_count: 1
    observed: {kv_cache_tokens: 194896}

A `workload:` mapping has the fields of `WorkloadSpec`; its `dataset` has a `kind` and the fields of that
data set. Beside `bench:` it overrides single fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sim.errors import BadInput
from sim.paths import file_text
from sim.results_io.atomic import write_text
from sim.workload.spec import (
    Dataset,
    FileDataset,
    PrefixRepetitionDataset,
    RandomDataset,
    WorkloadSpec,
)
from sim.yamltext import load_yaml, yaml_fault

_FILE_KINDS = ("sharegpt", "azure", "mooncake", "vllm-result", "lengths")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic would take `seed: yes` for 1."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("is true or false to YAML; write a number, or quote a text")
        return value


def _quoted_version(value: object) -> object:
    """YAML reads 0.30 as the number 0.3, so that the version meant is lost: only text is taken."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError('is a number to YAML, which drops closing zeros; quote it, as in "0.28.0"')
    return value


class EngineInput(_Strict):
    """`engine:`: what a launch command would say."""

    name: Literal["vllm", "sglang"]
    model: str | None = None
    version: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    image: str | None = None

    @field_validator("version", mode="before")
    @classmethod
    def _version_text(cls, value: object) -> object:
        return _quoted_version(value)

    @field_validator("env", mode="before")
    @classmethod
    def _env_text(cls, value: object) -> object:
        return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else value


class ObservedInput(_Strict):
    """`observed:`: facts read off a real start."""

    kv_cache_tokens: int | None = Field(default=None, ge=1)
    num_gpu_blocks: int | None = Field(default=None, ge=1)


class DatasetInput(_Strict):
    """`workload.dataset:`."""

    kind: Literal[
        "random", "prefix_repetition", "sharegpt", "azure", "mooncake", "vllm-result", "lengths"
    ] = "random"
    input_len: int | None = Field(default=None, ge=1)
    output_len: int | None = Field(default=None, ge=1)
    range_ratio: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    output_range_ratio: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    prefix_len: int | None = Field(default=None, ge=0)
    style: Literal["vllm", "sglang"] | None = None
    num_special_tokens: int | None = Field(default=None, ge=0)
    vocab_size: int | None = Field(default=None, ge=1)
    suffix_len: int | None = Field(default=None, ge=1)
    num_prefixes: int | None = Field(default=None, ge=1)
    shuffle: bool | None = None
    path: str | None = None
    context_len: int | None = Field(default=None, ge=1)


class RampUpInput(_Strict):
    """`workload.ramp_up:`."""

    strategy: Literal["linear", "exponential"]
    start: float = Field(ge=0, allow_inf_nan=False)
    end: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _rising(self) -> RampUpInput:
        if self.start > self.end or (self.strategy == "exponential" and self.start == 0):
            raise ValueError("must rise; an exponential one from above 0")
        return self


class WorkloadInput(_Strict):
    """`workload:`; absent fields keep the client's defaults."""

    client: Literal["vllm", "sglang"] | None = None
    dataset: DatasetInput | None = None
    num_prompts: int | None = Field(default=None, ge=1)
    request_rate: float | None = Field(default=None, gt=0)
    burstiness: float | None = Field(default=None, gt=0)
    max_concurrency: int | None = Field(default=None, ge=1)
    ramp_up: RampUpInput | None = None
    use_trace_arrivals: bool | None = None
    rate_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    ignore_eos: bool | None = None
    num_warmups: int | None = Field(default=None, ge=0)
    goodput: dict[Literal["ttft", "tpot", "e2el"], float] | None = None
    percentiles: list[float] | None = None
    percentile_metrics: list[Literal["ttft", "tpot", "itl", "e2el"]] | None = None
    seed: int | None = Field(default=None, ge=0)
    duration: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    endpoint: str | None = None

    @field_validator("goodput")
    @classmethod
    def _limit(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and not all(v >= 0 and math.isfinite(v) for v in value.values()):
            raise ValueError("limits must be finite and at least 0 [ms]")
        return value

    @field_validator("percentiles")
    @classmethod
    def _percent(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not all(0 < v <= 100 for v in value):
            raise ValueError("must lie above 0 and at most at 100")
        return value


class ScenarioInput(_Strict):
    """A whole scenario file."""

    name: str = ""
    serve: str | None = None
    engine: EngineInput | None = None
    bench: str | None = None
    workload: WorkloadInput | None = None
    model: str | None = None
    gpu: str | None = None
    gpu_count: int | None = Field(default=None, ge=1)
    engine_version: str | None = None
    observed: ObservedInput = ObservedInput()
    seed: int | None = Field(default=None, ge=0)

    @field_validator("engine_version", mode="before")
    @classmethod
    def _version_text(cls, value: object) -> object:
        return _quoted_version(value)

    @model_validator(mode="after")
    def _one_engine(self) -> ScenarioInput:
        if self.serve is not None and self.engine is not None:
            raise ValueError("has both serve and engine; keep one")
        return self


def read_scenario_file(path: str | Path) -> ScenarioInput:
    """Read and check a scenario file.

    Raises:
        BadInput: unreadable, no YAML mapping, an unknown or impossible field (named).
    """
    try:
        text = file_text(path)
    except OSError as error:
        raise BadInput("SCENARIO", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput("SCENARIO", str(path), "is not a text file") from None
    try:
        raw = load_yaml(text)
    except yaml.YAMLError as error:
        raise BadInput("SCENARIO", str(path), yaml_fault(error)) from None
    if not isinstance(raw, Mapping):
        raise BadInput("SCENARIO", str(path), "must hold `serve:`, `bench:`, `gpu:` and so on")
    if raw.keys() >= {"duration", "completed"}:
        raise BadInput("SCENARIO", str(path), "is a result, no scenario; `servecast compare` takes those")
    return parse_scenario_mapping(raw, str(path))


def parse_scenario_mapping(raw: Mapping[str, Any], source: str) -> ScenarioInput:
    """Check a mapping with a scenario file's content; `source` names it in messages."""
    try:
        return ScenarioInput.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or source
        value = first["input"] if isinstance(first["input"], str | int | float) else None
        hint = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            value, hint = None, _unknown_key(first["loc"])
        raise BadInput(place, value, f"{hint} (in {source})") from None


def write_scenario_file(scenario: ScenarioInput, path: str | Path, field: str = "SCENARIO") -> None:
    """Write a scenario file, whole or not at all.

    Raises:
        BadInput: the path cannot be written; `field` names the option that gave it.
    """
    write_text(path, dump_scenario(scenario), field)


def dump_scenario(scenario: ScenarioInput) -> str:
    """The scenario file as YAML text; fields at their defaults are left out."""
    content = scenario.model_dump(mode="python", exclude_defaults=True)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def workload_from_input(given: WorkloadInput, base: WorkloadSpec) -> WorkloadSpec:
    """Apply a `workload:` mapping to a load.

    Raises:
        BadInput: a data set field that its kind does not have, or a file data set without a path.
    """
    changes: dict[str, Any] = {
        key: value
        for key, value in given.model_dump(exclude={"dataset", "ramp_up"}).items()
        if value is not None
    }
    if given.goodput is not None:
        changes["goodput"] = tuple(given.goodput.items())
    for key in ("percentiles", "percentile_metrics"):
        if key in changes:
            changes[key] = tuple(changes[key])
    if given.ramp_up is not None:
        changes["ramp_up"] = (given.ramp_up.strategy, given.ramp_up.start, given.ramp_up.end)
    if given.request_rate is not None and given.ramp_up is None:
        changes["ramp_up"] = None  # one of the two: a ramp sets the rate itself
    elif given.ramp_up is not None and given.request_rate is None:
        changes["request_rate"] = math.inf
    dataset = base.dataset if given.dataset is None else _dataset(given.dataset, base.dataset)
    changes["dataset"] = dataset
    if given.use_trace_arrivals is None:
        changes["use_trace_arrivals"] = _own_times(given, dataset, base)
    return dataclasses.replace(base, **changes)


def _own_times(given: WorkloadInput, dataset: Dataset, base: WorkloadSpec) -> bool:
    """Whether a load is sent at its file's times where nothing says so: unless a schedule is given."""
    if given.request_rate is not None or given.ramp_up is not None:
        return False
    if not isinstance(dataset, FileDataset) or dataset.kind == "sharegpt":
        return False
    if isinstance(base.dataset, FileDataset) and base.dataset.kind == dataset.kind:
        return base.use_trace_arrivals
    return math.isinf(base.request_rate) and base.ramp_up is None


def workload_to_input(spec: WorkloadSpec) -> WorkloadInput:
    """The `workload:` mapping that describes `spec` (defaults included)."""
    content = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    kind = {RandomDataset: "random", PrefixRepetitionDataset: "prefix_repetition"}.get(type(spec.dataset))
    content["dataset"] = {**({"kind": kind} if kind else {}), **dataclasses.asdict(spec.dataset)}
    content["goodput"] = dict(spec.goodput) or None
    content["percentiles"] = list(spec.percentiles)
    content["percentile_metrics"] = list(spec.percentile_metrics)
    if spec.ramp_up is not None:
        strategy, start, end = spec.ramp_up
        content["ramp_up"] = {"strategy": strategy, "start": start, "end": end}
    return WorkloadInput.model_validate(content)


def _dataset(given: DatasetInput, base: Dataset) -> Dataset:
    fields = {key: value for key, value in given.model_dump(exclude={"kind"}).items() if value is not None}
    own: Dataset
    if given.kind == "random":
        own = base if isinstance(base, RandomDataset) else RandomDataset()
    elif given.kind == "prefix_repetition":
        own = base if isinstance(base, PrefixRepetitionDataset) else PrefixRepetitionDataset()
    else:
        if not given.path:
            raise BadInput("workload.dataset.path", None, f"must name a file for kind {given.kind}")
        own = FileDataset(given.kind, given.path)
    known = {f.name for f in dataclasses.fields(own)}
    for key in fields:
        if key not in known:
            raise BadInput(f"workload.dataset.{key}", None, f"is not a field of kind {given.kind}")
    return dataclasses.replace(own, **fields)


def _unknown_key(location: tuple[int | str, ...]) -> str:
    models: dict[str, type[_Strict]] = {
        "engine": EngineInput,
        "observed": ObservedInput,
        "workload": WorkloadInput,
        "dataset": DatasetInput,
        "ramp_up": RampUpInput,
    }
    parent = str(location[-2]) if len(location) > 1 else ""
    known = list(models.get(parent, ScenarioInput).model_fields)
    name = str(location[-1]).replace("-", "_")
    if not parent and name in ObservedInput.model_fields:
        return f"belongs under observed, as in `observed: {{{name}: 194896}}`"
    return unknown_key(name, known)


def unknown_key(name: str, known: Sequence[str]) -> str:
    """What to say of a key that no model knows."""
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"unknown key; the nearest is {near[0]}" if near else f"unknown key; known are {', '.join(known)}"
