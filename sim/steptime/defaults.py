"""Default efficiencies: what is known or assumed of a GPU that nobody has calibrated here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from sim.data import shipped
from sim.hardware.spec import GpuSpec
from sim.provenance import Note, Origin, Sourced
from sim.steptime.efficiencies import Efficiencies
from sim.yamltext import load_yaml

DECISIVE = ("weight_bandwidth", "kv_bandwidth", "gemm_flops")
# Standard deviation of whole steps without a calibration [log]: of a card whose efficiencies were measured
# or fitted, and of one for which they are assumed.
KNOWN_CARD = 0.05
ASSUMED_CARD = 0.15
Z90 = 1.645  # half-width of a normal 90 % interval in standard deviations


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    coefficients: Mapping[str, tuple[float, str]]
    gpus: Sequence[str] = ()
    capabilities: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    sources: Mapping[str, Mapping[str, str]]
    common: Mapping[str, tuple[float, str]]
    families: Sequence[_Family]


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

    @property
    def assumed(self) -> list[str]:
        """The coefficients that matter most and are assumed."""
        return [name for name in DECISIVE if self.sources[name].origin is Origin.ASSUMED]

    @property
    def step_error(self) -> float:
        """By what share steps may be slower, nine times in ten; faster, over one plus it."""
        return math.exp(Z90 * (ASSUMED_CARD if self.assumed else KNOWN_CARD)) - 1.0

    def notes(self) -> tuple[Note, ...]:
        """What a user should know: which of the coefficients that matter most are assumed."""
        if not self.assumed:
            return ()
        text = f"assumed for {self.family}, not measured: {', '.join(self.assumed)}"
        if len(self.assumed) > 1:
            text += "; a run on this GPU calibrates them (`servecast calibrate`)"
        return (Note("assumed", "step time", text),)


def default_efficiencies(gpu: GpuSpec) -> DefaultEfficiencies:
    """The efficiencies of the shipped table for a GPU (sim/data/efficiencies.yaml)."""
    table = _table()
    family = _family_of(gpu, table)
    chosen = {**table.common, **family.coefficients}
    sources = {
        name: Sourced(float(value), Origin(table.sources[source]["origin"]), table.sources[source]["text"])
        for name, (value, source) in chosen.items()
    }
    efficiencies = Efficiencies.from_dict({name: sourced.value for name, sourced in sources.items()})
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
    content = load_yaml(shipped("efficiencies.yaml"))
    return _Table(content["sources"], content["common"], [_Family(**row) for row in content["families"]])
