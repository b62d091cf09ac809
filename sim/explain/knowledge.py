"""What is known of every metric, flag and log line, as data files beside this module.

`concepts.yaml`, `report.yaml` and `outside.yaml` say what is measured, `<engine>-metrics.yaml` under which
names and clocks, `<engine>-flags.yaml` and `client-flags.yaml` what moves it, `coefficients.yaml` what
calibration fits. Which flags move a metric is not written down twice: it is read from the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sim.engines.values import version_key
from sim.scenario import EngineName
from sim.yamltext import load_yaml

MetricClass = Literal["A", "B", "C"]
Direction = Literal["up", "down", "either"]
CLASSES: Mapping[str, str] = {
    "A": "a knob sets it",
    "B": "an outcome: measured, moved only through other knobs",
    "C": "outside the engine: another tool measures it",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Concept(_Strict):
    """One thing that is measured.

    Attributes:
        metric_class: "A", "B" or "C", see `CLASSES`.
        clock: between which two moments.
        words: other names that people use.
        beside: keys of concepts that must be read with it.
        lines, keys: labels in printed reports and keys in result files, without statistic and unit.
        tool, nearest: of class C: what measures it, and what comes nearest inside an engine.
    """

    title: str
    metric_class: MetricClass = Field(alias="class")
    says: str
    clock: str = ""
    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    source: str
    tool: str = ""
    nearest: str = ""


class _Versioned(_Strict):
    since: str = ""
    until: str = ""

    def known_in(self, version: str) -> bool:
        """Whether a version has it; `since` is the first that does, `until` the first that no longer does."""
        key = version_key(version)
        return not (
            (self.since and key < version_key(self.since)) or (self.until and key >= version_key(self.until))
        )


class Metric(_Versioned):
    """A name that an engine exports; `needs` is the flag without which it is not there."""

    kind: Literal["gauge", "counter", "histogram", "summary"]
    concept: str
    says: str
    clock: str = ""
    was: tuple[str, ...] = ()
    needs: str = ""


class LogPhrase(_Versioned):
    """A line, or a part of one, in an engine's log."""

    phrase: str
    concept: str
    says: str
    source: str


class Knob(_Strict):
    """A flag: what it does, what it moves in which direction, what that costs.

    Attributes:
        change: the direction that `moves` speaks of: raise, lower, on, off, or a value.
        moves: concept -> direction.
        when: under which condition it does anything.
        quality: whether answers may change, so that quality scores must be measured again.
    """

    says: str
    default: str
    change: str
    moves: Mapping[str, Direction]
    when: str
    costs: str
    beside: tuple[str, ...] = ()
    quality: bool = False


class Coefficient(_Strict):
    """A coefficient of the step-time model; its unit and range are in `sim.steptime.efficiencies.BOUNDS`.

    Attributes:
        pins: which measurement tells it.
        moves: in which figures it shows.
    """

    says: str
    pins: str
    moves: str


class _MetricFile(_Strict):
    engine: EngineName
    program: str
    metrics: dict[str, Metric]
    logs: tuple[LogPhrase, ...]


class _FlagFile(_Strict):
    engine: EngineName | None = None
    flags: dict[str, Knob]


@cache
def concepts() -> Mapping[str, Concept]:
    """Every concept by key, those outside the engine last."""
    found: dict[str, Concept] = {}
    for name in ("concepts.yaml", "report.yaml", "outside.yaml"):
        found.update({key: Concept.model_validate(value) for key, value in _load(name).items()})
    return found


@cache
def metrics(engine: EngineName) -> Mapping[str, Metric]:
    """What an engine exports, by name; a name may hold `*`."""
    return _metric_file(engine).metrics


@cache
def log_phrases(engine: EngineName) -> tuple[LogPhrase, ...]:
    """What an engine logs."""
    return _metric_file(engine).logs


@cache
def knobs(engine: EngineName) -> Mapping[str, Knob]:
    """Every modelled flag of an engine, by canonical name."""
    return _FlagFile.model_validate(_load(f"{engine}-flags.yaml")).flags


@cache
def client_knobs() -> Mapping[str, Knob]:
    """The benchmark clients' flags that change what is measured."""
    return _FlagFile.model_validate(_load("client-flags.yaml")).flags


@cache
def coefficients() -> Mapping[str, Coefficient]:
    """Every coefficient of the step-time model, in the order of its table."""
    return {name: Coefficient.model_validate(row) for name, row in _load("coefficients.yaml").items()}


def movers(concept: str, engine: EngineName) -> dict[str, Knob]:
    """The engine's flags that move a concept, by name."""
    return {name: knob for name, knob in knobs(engine).items() if concept in knob.moves}


@cache
def _metric_file(engine: EngineName) -> _MetricFile:
    return _MetricFile.model_validate(_load(f"{engine}-metrics.yaml"))


def _load(name: str) -> dict[str, object]:
    text = resources.files("sim.explain.data").joinpath(name).read_text(encoding="utf-8")
    content: dict[str, object] = load_yaml(text)
    return content
