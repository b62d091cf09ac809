"""Default efficiencies: what is known or assumed of a GPU that nobody has calibrated here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict

from sim.hardware import GpuSpec
from sim.provenance import Note, Origin, Sourced
from sim.steptime.efficiencies import Efficiencies
from sim.yamltext import load_yaml


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid")

    origin: Literal["measured", "fitted", "assumed"]
    text: str


class _Family(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    gpus: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    coefficients: dict[str, tuple[float, str]]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sources: dict[str, _Source]
    common: dict[str, tuple[float, str]]
    families: tuple[_Family, ...]


@dataclass(frozen=True, slots=True)
class DefaultEfficiencies:
    """Efficiencies with the origin of every coefficient.

    Attributes:
        family: the row of the table.
        sources: by coefficient, in the order of `Efficiencies`.
    """

    family: str
    efficiencies: Efficiencies
    sources: Mapping[str, Sourced[float]]

    def notes(self) -> tuple[Note, ...]:
        """What a user should know: which of the coefficients that matter most are assumed."""
        decisive = ("weight_bandwidth", "kv_bandwidth", "gemm_flops")
        assumed = [name for name in decisive if self.sources[name].origin is Origin.ASSUMED]
        if not assumed:
            return ()
        text = f"assumed for {self.family}, not measured: {', '.join(assumed)}"
        if len(assumed) > 1:
            text += "; expect errors of 20 to 30 % until a run on this GPU calibrates them"
        return (Note("assumed", "step time", text),)


def default_efficiencies(gpu: GpuSpec) -> DefaultEfficiencies:
    """The efficiencies of the shipped table for a GPU (sim/data/efficiencies.yaml)."""
    table = _table()
    family = _family_of(gpu, table)
    chosen = {**table.common, **family.coefficients}
    sources = {
        name: Sourced(value, Origin(table.sources[source].origin), table.sources[source].text)
        for name, (value, source) in chosen.items()
    }
    efficiencies = Efficiencies.from_dict({name: value for name, (value, _) in chosen.items()})
    return DefaultEfficiencies(family.name, efficiencies, sources)


def _family_of(gpu: GpuSpec, table: _Table) -> _Family:
    capability = "" if gpu.compute_capability is None else "{}.{}".format(*gpu.compute_capability)
    for family in table.families:
        if gpu.name in family.gpus:
            return family
    for family in table.families:
        if capability and capability in family.capabilities:
            return family
    return table.families[-1]


@cache
def _table() -> _Table:
    text = resources.files("sim.data").joinpath("efficiencies.yaml").read_text(encoding="utf-8")
    return _Table.model_validate(load_yaml(text))
