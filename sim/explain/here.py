"""What a coefficient of the step-time model is in one scenario: a profile's figure, or the GPU's default."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sim.explain.page import row
from sim.profile import load_profile
from sim.provenance import Note
from sim.scenario import Scenario
from sim.steptime.defaults import default_efficiencies
from sim.steptime.efficiencies import BOUNDS


@dataclass(frozen=True, slots=True)
class Here:
    """One coefficient in one scenario.

    Attributes:
        value: in the coefficient's own unit; `low` to `high` is its 90 % interval where a fit has one.
        origin: of a default, or the coefficient's status in a profile.
        source: the rule or evidence behind it, in words.
        of: the profile, or the GPU.
        notes: where the profile measured something else than the scenario asks for.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    origin: str
    source: str
    of: str
    notes: tuple[Note, ...] = ()


def here(name: str, scenario: Scenario, profile: Path | None) -> Here:
    """The coefficient that a prediction of the scenario uses.

    Raises:
        BadInput: the file is no profile, or was measured on another GPU.
    """
    if profile is not None:
        loaded = load_profile(profile)
        found, notes = loaded.content.coefficients[name], loaded.step_time(scenario)[1]
        said = (found.status, found.source, loaded.source)
        return Here(name, found.value, found.low, found.high, *said, notes)
    default = default_efficiencies(scenario.gpu)
    value, source = getattr(default.efficiencies, name), default.sources.get(name)
    origin, rule = ("", "") if source is None else (source.origin.value, source.rule)
    return Here(name, value, None, None, origin, rule, f"{scenario.gpu.name}, without a profile")


def render_here(found: Here) -> str:
    """The same as labelled paragraphs of a page."""
    unit = BOUNDS[found.name].unit
    told = f"{found.value:.6g}" + ("" if unit in ("0 to 1", "exponent", "share") else f" {unit}")
    if found.low is not None and found.high is not None:
        told += f" (90 %: {found.low:.6g} to {found.high:.6g})"
    if found.origin:
        told += f", {found.origin}: {found.source}"
    lines = row("Here", f"{told} ({found.of})")
    for note in found.notes:
        lines += row("Mind", f"{note.kind}: {note.subject}: {note.text}")
    return "\n".join(lines)


def here_document(found: Here) -> dict[str, Any]:
    """The same for JSON."""
    return asdict(found)
