"""What a cluster's figures become if its step times are wrong, and what a reader should know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sim.planning.cluster import ClusterOutcome, Member
from sim.planning.margin import ModelError, model_error, other_models
from sim.profile import Profile
from sim.provenance import Note
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.base import StepTimeModel
from sim.steptime.defaults import default_efficiencies

Range = tuple[float, float]


def other_clusters(members: Sequence[Member], profile: Profile | None) -> list[list[Member]]:
    """The same replicas with other step times that are possible, all of them moved alike.

    One cluster per possibility: step times longer and shorter by the model's error, or a profile's draws.
    """
    known: dict[int, list[StepTimeModel]] = {}
    for member in members:
        if id(member.scenario) not in known:
            scenario, model = member.scenario, member.step_time or roofline(member.scenario)
            known[id(scenario)] = other_models(scenario, model, model_error(scenario, profile), profile)
    count = min(len(models) for models in known.values())
    return [[replace(m, step_time=known[id(m.scenario)][k]) for m in members] for k in range(count)]


def largest_error(members: Sequence[Member], profile: Profile | None) -> ModelError:
    """Of all replicas, the model error that is allowed for most."""
    return max((model_error(m.scenario, profile) for m in members), key=lambda error: error.share)


def ranges(figures: Sequence[Mapping[str, float | int | None]], keys: Sequence[str]) -> dict[str, Range]:
    """Least and greatest of each figure over all runs; a figure that one of them lacks is left out."""
    found = {}
    for key in keys:
        values = [float(v) for one in figures if (v := one.get(key)) is not None]
        if len(values) == len(figures):
            found[key] = (min(values), max(values))
    return found


def notes_of(members: Sequence[Member], outcome: ClusterOutcome, profile: Profile | None) -> list[Note]:
    """What `predict` would say of each kind of replica, each note once."""
    notes: list[Note] = []
    for member in members:
        notes += member.scenario.notes
        if profile is None:
            notes += default_efficiencies(member.scenario.gpu).notes()
        else:
            notes += profile.step_time(member.scenario)[1]
    for node in outcome.nodes:
        notes += node.account.notes
    return list(dict.fromkeys(notes))


def hardware_words(members: Sequence[Member]) -> list[str]:
    """`4 replicas of vllm 0.28 · Qwen/Qwen3-32B · 2 x H100-SXM-80GB`, a line per kind, and all GPUs."""
    kinds: dict[tuple[int, str], list[Scenario]] = {}
    for member in members:
        kinds.setdefault((id(member.scenario), member.role), []).append(member.scenario)
    lines = []
    for (_, role), scenarios in kinds.items():
        one, n = scenarios[0], len(scenarios)
        what = "" if role == "both" else f"{role} "
        version = f" {one.engine.asked_version}" if one.engine.asked_version else ""
        lines.append(
            f"{n} {what}replica{'s' if n > 1 else ''} of {one.engine.name}{version}, {one.model.name}, "
            f"{one.gpu_count} x {one.gpu.name} each"
        )
    return [*lines, f"GPUs: {gpus(members)}"]


def gpus(members: Sequence[Member]) -> int:
    """GPUs of all replicas together."""
    return sum(member.scenario.gpu_count for member in members)
