"""Calibration profiles: what was measured of one GPU, engine and model, ready to predict with.

A profile is a JSON file that people can read. It is written by `servecast calibrate`, and read here: a file
of a format that this version does not know is refused, never half-read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.engines.values import version_key
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.paths import file_text
from sim.provenance import Note
from sim.results_io.atomic import write_text
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.efficiencies import BOUNDS, Efficiencies
from sim.steptime.roofline import RooflineModel, ValidRange
from sim.steptime.scale import TIMES, draw, scale_name, widened

FORMAT = 1
AGAIN_POOR = 0.15  # a mean of a run that a fit has seen should be nearer when it is predicted
ROUNDING = 1e-6  # of a covariance's largest entry
KIND = "servecast calibration profile"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Subject(_Strict):
    """What was measured."""

    gpu: str
    gpu_count: int = Field(ge=1)
    driver: str | None = None
    engine: Literal["vllm", "sglang"]
    engine_version: str
    model: str
    quantization: str | None = None
    dtype: str
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = Field(ge=1)
    flags: list[list[str | None]] = Field(default_factory=list)
    image_digest: str | None = None


class DataFile(_Strict):
    """One piece of evidence."""

    name: str
    sha256: str | None = None
    points: int = Field(ge=0)
    date: str | None = None


class Coefficient(_Strict):
    """One coefficient: in its own unit, with its 90 % interval where it was free."""

    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    status: Literal["fitted", "weak", "prior", "at bound", "fixed"]
    source: str


class Covariance(_Strict):
    """Covariance of the free coefficients, each on its scale (log, inverse or linear)."""

    names: list[str]
    scales: list[Literal["log", "inverse", "linear"]]
    matrix: list[list[float]]

    @model_validator(mode="after")
    def _square(self) -> Covariance:
        size = len(self.names)
        if len(self.scales) != size or len(self.matrix) != size or any(len(r) != size for r in self.matrix):
            raise ValueError(f"must have {size} rows and columns, one for each of its names")
        if self.scales != [scale_name(name) for name in self.names]:
            raise ValueError("names a scale that this version does not use")
        matrix = np.array(self.matrix, dtype=np.float64).reshape(size, size)
        if not np.isfinite(matrix).all():
            raise ValueError("must hold finite numbers")
        for i, name in enumerate(self.names):
            if matrix[i, i] < 0:
                raise ValueError(f"matrix[{i}][{i}], the variance of {name}, must not be negative")
        if size and np.abs(matrix - matrix.T).max() > ROUNDING * np.abs(matrix).max():
            raise ValueError("matrix must be symmetric")
        if size and np.linalg.eigvalsh(matrix).min() < -ROUNDING * np.abs(matrix).max():
            raise ValueError("matrix is no covariance: some combination would vary by less than nothing")
        return self


_Count = Annotated[int, Field(ge=0)]


class Validity(_Strict):
    """The largest steps seen: 0 is none of that kind; None is unknown."""

    tokens_per_step: _Count | None = None
    prompt_tokens_per_step: _Count | None = None
    decodes_per_step: _Count | None = None
    context_per_decode: _Count | None = None


class ProfileFile(_Strict):
    """The whole file."""

    kind: Literal["servecast calibration profile"] = "servecast calibration profile"
    format: Literal[1] = 1
    servecast_version: str | None = None
    date: str
    subject: Subject
    evidence: list[DataFile]
    coefficients: dict[str, Coefficient]
    covariance: Covariance
    validity: Validity
    structure: float = Field(ge=0.0, le=1.0)
    first_token: float = Field(default=0.0, ge=0.0, le=1.0)
    in_sample: dict[str, dict[str, float]]
    held_out: dict[str, dict[str, float]] = Field(default_factory=dict)
    predicted_again: dict[str, dict[str, float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> ProfileFile:
        missing = sorted(set(BOUNDS) - set(self.coefficients))
        unknown = sorted(set(self.coefficients) - set(BOUNDS))
        if missing or unknown:
            which = (
                f"lack {missing[0]}" if missing else f"hold {unknown[0]}, which this version does not know"
            )
            raise ValueError(f"coefficients {which}")
        absent = [name for name in self.covariance.names if name not in self.coefficients]
        if absent:
            raise ValueError(f"covariance names {absent[0]}, which is no coefficient")
        return self


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a scenario is not what was measured, and how much less certain that makes a prediction.

    Attributes:
        what: for the user.
        rates: further standard deviation of rates [log].
        share: further standard deviation of times per step [relative to them].
        structure: further relative deviation of whole steps.
    """

    what: str
    rates: float
    share: float
    structure: float


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibration, read and checked."""

    content: ProfileFile
    source: str

    @property
    def efficiencies(self) -> Efficiencies:
        """The most likely coefficients."""
        return Efficiencies.from_dict({k: c.value for k, c in self.content.coefficients.items()})

    def step_time(self, scenario: Scenario) -> tuple[RooflineModel, tuple[Note, ...]]:
        """The step times of a scenario, and what the user should know of them.

        Raises:
            BadInput: the profile is of another GPU.
        """
        notes = [
            Note("warning", "--profile", f"{m.what}: what carries over is used, with wider intervals")
            for m in self.mismatches(scenario)
        ]
        open_ones = [
            name
            for name, c in self.content.coefficients.items()
            if c.status == "prior" and name in self.content.covariance.names
        ]
        if open_ones:
            text = f"the evidence did not pin {', '.join(open_ones)}: assumed values"
            notes.append(Note("info", "--profile", text))
        worst = worst_again(self.content.predicted_again)
        if worst > AGAIN_POOR:
            text = (
                f"a run that it was fitted to is {worst:.0%} off when predicted (predicted_again in the file)"
            )
            notes.append(Note("warning", "--profile", text))
        return self._model(scenario, self.efficiencies), tuple(notes)

    def draws(self, scenario: Scenario, count: int, seed: int) -> list[RooflineModel]:
        """Step times with other coefficients that the evidence allows, wider where the scenario differs."""
        covariance = self.content.covariance
        matrix = np.array(covariance.matrix, dtype=np.float64).reshape(len(covariance.names), -1)
        structure = self.content.structure**2
        base = self.efficiencies
        times = {name: float(getattr(base, name)) for name in TIMES}
        for mismatch in self.mismatches(scenario):
            matrix = widened(covariance.names, matrix, mismatch.rates, times, mismatch.share)
            structure += mismatch.structure**2
        drawn = draw(base, covariance.names, matrix, structure**0.5, count, seed)
        return [self._model(scenario, efficiencies) for efficiencies in drawn]

    def mismatches(self, scenario: Scenario) -> list[Mismatch]:
        """Where the scenario differs from what was measured.

        Raises:
            BadInput: the GPU differs: nothing carries over.
        """
        ours, theirs = self.content.subject, subject_of(scenario)
        if ours.gpu != theirs.gpu:
            hint = f"{self.source} was measured on {ours.gpu}; {theirs.gpu} needs a calibration of its own"
            raise BadInput("--profile", None, hint)
        found = []
        for name, label, rates, share, structure in _DIFFERENCES:
            measured, asked = getattr(ours, name), getattr(theirs, name)
            same = measured == asked
            if name == "engine_version":
                same = version_key(measured) == version_key(asked)
            if not same:
                found.append(Mismatch(f"{label} {measured} measured, {asked} asked", rates, share, structure))
        return found

    def _model(self, scenario: Scenario, efficiencies: Efficiencies) -> RooflineModel:
        valid = self.content.validity
        return replace(
            roofline(scenario, efficiencies),
            source=f"profile {self.source}",
            valid=ValidRange(
                valid.tokens_per_step,
                valid.prompt_tokens_per_step,
                valid.decodes_per_step,
                valid.context_per_decode,
            ),
        )


# Field, its name for people, and what a difference costs: rates [log], times, whole steps [both relative].
# Assumed, round figures: efficiencies of one model carry to another on the same card to several per cent.
_DIFFERENCES: tuple[tuple[str, str, float, float, float], ...] = (
    ("engine", "engine", 0.06, 0.3, 0.04),
    ("engine_version", "engine version", 0.02, 0.1, 0.02),
    ("model", "model", 0.06, 0.2, 0.03),
    ("quantization", "quantization", 0.15, 0.2, 0.05),
    ("dtype", "dtype", 0.10, 0.1, 0.03),
    ("kv_cache_dtype", "KV cache dtype", 0.05, 0.1, 0.02),
    ("tensor_parallel_size", "tensor parallel size", 0.05, 0.3, 0.05),
)


def worst_again(again: Mapping[str, Mapping[str, float]]) -> float:
    """The largest error, without its sign, of runs that a fit has seen and then predicts; 0 without any."""
    return max((abs(error) for errors in again.values() for error in errors.values()), default=0.0)


def subject_of(scenario: Scenario, **more: Any) -> Subject:
    """What a scenario would measure."""
    engine, quant = scenario.engine, scenario.model.quant
    return Subject(
        gpu=scenario.gpu.name,
        gpu_count=scenario.gpu_count,
        engine=engine.name,
        engine_version=engine.asked_version,
        model=scenario.model.name,
        quantization=None if quant is None else str(quant.method),
        dtype=scenario.model.dtype,
        kv_cache_dtype=str(engine["kv_cache_dtype"]),
        tensor_parallel_size=int(engine["tensor_parallel_size"]),
        flags=[[flag, value] for flag, value in engine.given],
        **more,
    )


def load_profile(path: str | Path) -> Profile:
    """Read a profile.

    Raises:
        BadInput: unreadable, no profile, of another format, or damaged; names the field.
    """
    try:
        text = file_text(path)
        content = load_json(text)
    except OSError as error:
        raise BadInput("--profile", str(path), f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise BadInput("--profile", str(path), "is not a JSON file; is it whole?") from None
    if not isinstance(content, Mapping) or content.get("kind") != KIND:
        raise BadInput("--profile", str(path), "is no calibration profile")
    if content.get("format") != FORMAT:
        hint = f"has format {content.get('format')}; this version reads format {FORMAT}: calibrate again"
        raise BadInput("--profile", str(path), hint)
    try:
        checked = ProfileFile.model_validate(content)
        for name, coefficient in checked.coefficients.items():
            _check(str(path), name, coefficient)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{path} {place}".strip(), None, first["msg"].removeprefix("Value error, ")) from None
    return Profile(checked, Path(path).name)


def _check(path: str, name: str, coefficient: Coefficient) -> None:
    bound = BOUNDS[name]
    if not bound.low <= coefficient.value <= bound.high:
        hint = f"lies outside {bound.low:g} to {bound.high:g}, which physics allows"
        raise BadInput(f"{path} coefficients.{name}.value", coefficient.value, hint)
    low, high = coefficient.low, coefficient.high
    if low is not None and not low <= coefficient.value:
        hint = f"must not lie above the value, {coefficient.value:g}"
        raise BadInput(f"{path} coefficients.{name}.low", low, hint)
    if high is not None and not high >= coefficient.value:
        hint = f"must not lie below the value, {coefficient.value:g}"
        raise BadInput(f"{path} coefficients.{name}.high", high, hint)
    if coefficient.unit != bound.unit:
        raise BadInput(f"{path} coefficients.{name}.unit", coefficient.unit, f"must be {bound.unit}")


def write_profile(content: ProfileFile, path: str | Path, field: str = "--out") -> None:
    """Write a profile, whole or not at all.

    Raises:
        BadInput: the place cannot be written to.
    """
    text = json.dumps(content.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, field)
