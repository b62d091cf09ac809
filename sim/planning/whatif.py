"""What happens if this one setting changes: the same requests through several scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sim.build import ScenarioSource
from sim.errors import BadInput
from sim.planning.jobs import Job, Runner
from sim.planning.margin import ModelError, model_error
from sim.planning.outcome import Outcome
from sim.planning.stats import Estimate, estimate, paired_difference, paired_ratio
from sim.planning.vary import Dimension, Variant, build, full_grid, locked, one_at_a_time
from sim.profile import Profile
from sim.provenance import Note
from sim.scenario import Scenario
from sim.workload.generate import generate
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec

MODEL_ERROR = 0.02  # a smaller change than this is within what a calibrated step-time model gets wrong
MAX_POINTS = 200

METRICS = (
    ("request_throughput", "req/s"),
    ("output_throughput", "out tok/s"),
    ("mean_ttft_ms", "mean TTFT"),
    ("p99_ttft_ms", "P99 TTFT"),
    ("mean_tpot_ms", "mean TPOT"),
    ("p99_itl_ms", "P99 ITL"),
    ("p99_e2el_ms", "P99 E2E"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One variant with one outcome per seed.

    Attributes:
        fresh: the first seed on an engine with an empty cache, where the others found prompts of an earlier
            point in it; None otherwise.
    """

    variant: Variant
    scenario: Scenario
    outcomes: tuple[Outcome, ...]
    fresh: Outcome | None = None

    @property
    def failure(self) -> str | None:
        """Why the point has no figures, or None."""
        return next((o.failure for o in self.outcomes if o.failure is not None), None)

    def values(self, key: str) -> list[float] | None:
        """The figure under every seed; None if one of them lacks it."""
        found = [o.get(key) for o in self.outcomes]
        return None if any(v is None for v in found) else [float(v) for v in found if v is not None]

    def estimate(self, key: str) -> Estimate | None:
        """Mean and interval of a figure over the seeds."""
        values = self.values(key)
        return None if values is None else estimate(values)


@dataclass(frozen=True, slots=True)
class Change:
    """What a figure does from one point to the next, request by request the same load.

    Attributes:
        clear: the difference leaves its interval, and the ratio, which people are told, leaves 1.
        small: it is below what the step-time model itself may be wrong by.
    """

    key: str
    difference: Estimate
    ratio: Estimate | None
    clear: bool
    small: bool


@dataclass(frozen=True, slots=True)
class Row:
    """The points along one dimension (or the whole grid), in the order given."""

    dimension: Dimension | None
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer: points by dimension, and what to know about them.

    Attributes:
        random: whether the load has anything random in it; if not, one seed is as good as many.
        kept_engine: points of a load dimension ran one after the other on one engine.
        error: how far the step times may be off, of the scenario as it is.
    """

    rows: tuple[Row, ...]
    held: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    random: bool
    kept_engine: bool
    notes: tuple[Note, ...]
    error: ModelError


def what_if(
    source: ScenarioSource,
    dimensions: Sequence[Dimension],
    runner: Runner,
    *,
    grid: bool = False,
    replications: int = 3,
    fresh: bool = False,
    scale_prompts: bool = True,
    profile: Profile | None = None,
) -> WhatIf:
    """Run every variant under the same seeds.

    Points that differ in the client's load alone run on one engine, one after the other, as a benchmark
    sweep does: with one seed every run sends the same prompts, and later runs find them in the prefix cache
    of earlier ones. `fresh` starts each with an empty cache.

    Args:
        replications: how many seeds, from the scenario's own upwards.
        profile: step times; without one those of the GPU's default efficiencies.

    Raises:
        BadInput: a variant that cannot be built.
    """
    if replications < 1:
        raise BadInput("--seeds", replications, "must be at least 1")
    base = source.build()
    seeds = tuple(base.seed + i for i in range(replications))
    rows = (
        [(None, full_grid(source, dimensions, scale_prompts=scale_prompts))]
        if grid
        else list(
            zip(dimensions, one_at_a_time(source, dimensions, scale_prompts=scale_prompts), strict=True)
        )
    )
    random = any_random(base, [variant for _, variants in rows for variant in variants])
    used = seeds if random else seeds[:1]
    notes: list[Note] = [note for note in base.notes if note.kind != "info"]
    plans: list[list[_Planned]] = []
    for _, variants in rows:
        keep = not fresh and not grid and all(v.load_only for v in variants)
        plans.append(_plan(variants, base, used, keep, notes, profile))
    jobs = [job for planned in plans for plan in planned for job in plan.jobs]
    outcomes = dict(zip((job.key for job in jobs), runner(jobs), strict=True))
    points = [[plan.point(outcomes) for plan in planned] for planned in plans]
    kept = any(plan.jobs[0].before for planned in plans for plan in planned)
    if kept:
        points = [_with_fresh(row, planned, runner) for row, planned in zip(points, plans, strict=True)]
    return WhatIf(
        tuple(Row(d, tuple(ps)) for (d, _), ps in zip(rows, points, strict=True)),
        tuple(locked(source, dimensions).items()),
        used,
        random,
        kept,
        tuple(dict.fromkeys(notes)),
        model_error(base, profile),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    variant: Variant
    scenario: Scenario
    jobs: tuple[Job, ...]

    def point(self, outcomes: dict[str, Outcome]) -> Point:
        return Point(self.variant, self.scenario, tuple(outcomes[job.key] for job in self.jobs))


def _plan(
    variants: Sequence[Variant],
    base: Scenario,
    seeds: Sequence[int],
    keep: bool,
    notes: list[Note],
    profile: Profile | None,
) -> list[_Planned]:
    planned: list[_Planned] = []
    earlier: dict[int, tuple[WorkloadSpec, ...]] = dict.fromkeys(seeds, ())
    for variant in variants:
        jobs = []
        scenario = base
        for seed in seeds:
            scenario, told = build(variant, base, seed)
            if told is not None:
                notes.append(Note("assumed", "KV pool", told))
            notes += [
                replace(note, text=f"{variant.label}: {note.text}")
                for note in scenario.notes
                if note.kind == "warning" and note not in base.notes
            ]
            before = tuple(spec for spec in earlier[seed] if keep and same_prompts(spec, scenario.workload))
            key = f"{variant.label} seed {seed}"
            model = None
            if profile is not None:
                model, told_of_it = profile.step_time(scenario)
                notes += told_of_it
            jobs.append(Job(key, scenario, model, before=before if caches(scenario) else ()))
            earlier[seed] += (scenario.workload,)
        planned.append(_Planned(variant, scenario, tuple(jobs)))
    return planned


def _with_fresh(points: Sequence[Point], planned: Sequence[_Planned], runner: Runner) -> list[Point]:
    """Points that an earlier one may have helped, with the figures of an empty cache beside them."""
    helped = [
        i
        for i, (point, plan) in enumerate(zip(points, planned, strict=True))
        if plan.jobs[0].before and (point.outcomes[0].get("prefix_cache_hits") or 0) > 0
    ]
    jobs = [replace(planned[i].jobs[0], key=planned[i].jobs[0].key + " fresh", before=()) for i in helped]
    fresh = dict(zip(helped, runner(jobs), strict=True))
    return [replace(point, fresh=fresh.get(i)) for i, point in enumerate(points)]


def changes(before: Point, after: Point) -> list[Change]:
    """What every metric does from one point to the other; metrics that one of them lacks are left out."""
    found = []
    for key, _ in METRICS:
        ours, theirs = after.values(key), before.values(key)
        if ours is None or theirs is None:
            continue
        difference = paired_difference(ours, theirs)
        ratio = paired_ratio(ours, theirs)
        moved = None if ratio is None else abs(ratio.mean - 1.0)
        clear = _clear(difference, 0.0) and (ratio is None or _clear(ratio, 1.0))
        found.append(Change(key, difference, ratio, clear, moved is not None and moved < MODEL_ERROR))
    return found


def _clear(value: Estimate, of: float) -> bool:
    """Whether the interval leaves `of` out; a single run without one is taken at its word."""
    return value.mean != of and (value.half is None or abs(value.mean - of) > value.half)


def steps_of(row: Row) -> list[tuple[Point, Point]]:
    """Neighbouring points that both have figures."""
    return list(pairwise(point for point in row.points if point.failure is None))


def count_points(dimensions: Sequence[Dimension], grid: bool) -> int:
    """Points of a sweep."""
    sizes = [len(d.values) for d in dimensions]
    if not grid:
        return sum(sizes)
    total = 1
    for size in sizes:
        total *= size
    return total


def any_random(base: Scenario, variants: Sequence[Variant]) -> bool:
    """Whether a seed changes anything at one of the points: what is varied may be what brings chance in."""
    looked_at: dict[tuple[WorkloadSpec, object], bool] = {}
    for variant in variants:
        scenario = build(variant, base, base.seed)[0]
        policy = scenario.engine.values.get("schedule_policy")
        load = scenario.workload, None if policy is None else policy.value
        if load not in looked_at:
            looked_at[load] = is_random(scenario)
    return any(looked_at.values())


def is_random(scenario: Scenario) -> bool:
    """Whether another seed sends anything else than this one."""
    spec = scenario.workload
    one, two = generate(spec), generate(spec, seed=spec.seed + 1)
    chance = "schedule_policy" in scenario.engine.values and scenario.engine["schedule_policy"] == "random"
    return chance or one != two


def caches(scenario: Scenario) -> bool:
    """Whether the engine keeps the KV of finished requests for later ones."""
    values = scenario.engine.values
    if "enable_prefix_caching" in values:
        return bool(values["enable_prefix_caching"].value)
    return not ("disable_radix_cache" in values and bool(values["disable_radix_cache"].value))


def same_prompts(one: WorkloadSpec, two: WorkloadSpec) -> bool:
    """Whether two runs of a client send the same prompts, as far as both go.

    The clients draw all lengths before all contents, so that with random lengths another number of prompts
    shifts the contents; lengths without spread draw nothing (numpy `Generator.integers`).
    """
    if one.dataset != two.dataset or one.seed != two.seed or one.client != two.client:
        return False
    dataset = one.dataset
    if one.num_prompts == two.num_prompts or isinstance(dataset, FileDataset):
        return True
    if isinstance(dataset, PrefixRepetitionDataset):
        return False
    return _fixed_lengths(dataset)


def _fixed_lengths(dataset: RandomDataset) -> bool:
    fixed = 0.0 if dataset.style == "vllm" else 1.0
    outputs = dataset.range_ratio if dataset.output_range_ratio is None else dataset.output_range_ratio
    return dataset.range_ratio == fixed and outputs == fixed
