"""Several predictions in one table: engines or settings beside each other, over a range of concurrencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sim.comparison.compare import figure
from sim.errors import BadInput
from sim.results import BenchResult
from sim.scenario import Scenario
from sim.workload.sweep_prompts import prompts_of

COLUMNS = (
    ("request_throughput", "req/s", 8, 2),
    ("output_throughput", "out tok/s", 10, 0),
    ("mean_ttft_ms", "TTFT mean", 11, 1),
    ("p99_ttft_ms", "TTFT P99", 11, 1),
    ("mean_tpot_ms", "TPOT mean", 10, 2),
    ("p99_itl_ms", "ITL P99", 9, 1),
    ("p99_e2el_ms", "E2E P99", 11, 0),
)
_SAYS = {
    "saturated": "saturated: TTFT and E2E grow for as long as requests are sent",
    "unknown": "too short to tell whether the load can be sustained: send more prompts",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One prediction of a curve; `concurrency` is None if the workload has no cap."""

    concurrency: int | None
    result: BenchResult


@dataclass(frozen=True, slots=True)
class Curve:
    """Predictions of one scenario over concurrency."""

    name: str
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point | None:
        """Where more concurrency stops buying throughput; see `find_knee`."""
        return find_knee(self.points)


def parse_levels(text: str | None) -> tuple[int, ...]:
    """Read "1,16,64". Raises BadInput for anything but distinct whole numbers of at least 1."""
    if text is None:
        return ()
    try:
        levels = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise BadInput(
            "--concurrency", text, "give whole numbers separated by commas, e.g. 1,16,64"
        ) from None
    if min(levels) < 1 or len(set(levels)) < len(levels):
        raise BadInput("--concurrency", text, "give distinct whole numbers of at least 1")
    return tuple(sorted(levels))


def sweep(
    scenario: Scenario,
    levels: Sequence[int],
    predict: Callable[[Scenario], BenchResult],
    name: str | None = None,
    *,
    scale_prompts: bool = True,
) -> Curve:
    """Predict a scenario at each concurrency; without levels, once as it stands.

    Args:
        name: of the curve.
        scale_prompts: whether the number of prompts goes with the concurrency.
    """
    name = name or label(scenario)
    if not levels:
        return Curve(name, (Point(scenario.workload.max_concurrency, predict(scenario)),))
    points = []
    for level in levels:
        workload = scenario.workload
        prompts = prompts_of(workload, level) if scale_prompts else workload.num_prompts
        workload = replace(workload, max_concurrency=level, num_prompts=prompts)
        points.append(Point(level, predict(replace(scenario, workload=workload))))
    return Curve(name, tuple(points))


def label(scenario: Scenario) -> str:
    """A short name for tables and legends."""
    if scenario.name:
        return scenario.name
    engine, model = scenario.engine, scenario.model.name.rpartition("/")[2]
    if engine["quantization"]:
        model += f" {engine['quantization']}"
    cards = scenario.gpu.name if scenario.gpu_count == 1 else f"{scenario.gpu_count} x {scenario.gpu.name}"
    return f"{engine.name} {engine.asked_version} · {model} · {cards}"


def labels(scenarios: Sequence[Scenario]) -> list[str]:
    """Names that tell scenarios apart: where two are alike, with the flags that not all of those share."""
    short = [label(scenario) for scenario in scenarios]
    names = []
    for own, scenario in zip(short, scenarios, strict=True):
        alike = [set(other.engine.given) for name, other in zip(short, scenarios, strict=True) if name == own]
        shared = set.intersection(*alike)
        flags = [" ".join(filter(None, flag)) for flag in scenario.engine.given if flag not in shared]
        names.append(" ".join([own, *flags]))
    return [
        f"{name} ({1 + names[:i].count(name)})" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def find_knee(points: Sequence[Point], gain: float = 0.1) -> Point | None:
    """The last point worth its concurrency: up to the next one throughput grows by less than `gain` of
    what proportional growth would give. None with fewer than two points, or if no such point is seen.
    """
    for here, there in pairwise(points):
        ours, theirs = (figure(p.result, "output_throughput") for p in (here, there))
        if not ours or not theirs or here.concurrency is None or there.concurrency is None:
            continue
        if theirs / ours - 1.0 < gain * (there.concurrency / here.concurrency - 1.0):
            return here
    return None


def state_of(result: BenchResult) -> str | None:
    """The load's regime, e.g. "saturated"; None where nothing was judged."""
    regime = result.extra.get("regime")
    return regime.get("state") if isinstance(regime, Mapping) else None


def hit_rate_text(result: BenchResult) -> str | None:
    """The run's own prefix hit rate, computed from tokens; None where nothing was asked of a cache."""
    queries, hits = (result.server.get(f"prefix_cache_{name}") for name in ("queries", "hits"))
    if not queries or hits is None:
        return None
    text = f"prefix hit rate of the run, from tokens: {hits:,} of {queries:,} = {hits / queries:.1%}"
    if result.identity.get("engine") == "sglang":
        text += " (SGLang's gauge `sglang:cache_hit_rate` shows its last prefill batch instead, not the run)"
    return text


def _band(result: BenchResult) -> str:
    """How far the ends of the 90 % intervals lie from the figures; empty if none is known."""
    told = result.extra.get("intervals")
    ends = told["figures"] if isinstance(told, Mapping) else {}
    cells = []
    for key, _, width, _ in COLUMNS:
        value, band = figure(result, key), ends.get(key)
        half = None if band is None or not value else max(band[1] / value - 1.0, 1.0 - band[0] / value)
        cells.append(f"{'' if half is None else f'±{half:.0%}':>{width}}")
    return "".join(cells).rstrip()


def render_curves(curves: Sequence[Curve]) -> str:
    """All curves as one table of at most 100 columns, the knee of each marked."""
    head = f"{'concurrency':>11} " + "".join(f"{title:>{width}}" for _, title, width, _ in COLUMNS)
    lines = []
    for curve in curves:
        lines += ["", curve.name, head + f"{'preempted':>11}"]
        knee = curve.knee
        for point in curve.points:
            cells = "".join(
                f"{'unknown':>{width}}" if value is None else f"{value:>{width},.{digits}f}"
                for key, _, width, digits in COLUMNS
                for value in (figure(point.result, key),)
            )
            preempted = point.result.server.get("num_preemptions")
            level = "no cap" if point.concurrency is None else str(point.concurrency)
            mark = "  <- knee" if point is knee else ""
            lines.append(f"{level:>11} {cells}{'unknown' if preempted is None else preempted:>11}{mark}")
            if band := _band(point.result):
                lines.append(f"{'90 %':>11} {band}")
            said = _SAYS.get(state_of(point.result) or "")
            if said and (point.concurrency is None or state_of(point.result) == "saturated"):
                lines.append(f"{'':>12}{said}")
            if point.result.verdict.status != "VALID":
                reasons = "; ".join(note.text for note in point.result.verdict.reasons)
                lines.append(f"{'':>12}{point.result.verdict.status}: {reasons}")
        if (text := hit_rate_text(curve.points[-1].result)) and curve.points[-1].result.server.get(
            "prefix_cache_hits"
        ):
            lines.append(text)
        if knee is not None:
            lines.append(f"knee at {knee.concurrency}: beyond it concurrency adds queueing, not throughput")
    notes = {
        f"{note.kind}: {note.subject}: {note.text}"
        for curve in curves
        for point in curve.points
        for note in point.result.notes
        if note.kind in ("warning", "not-modelled", "assumed")
    }
    return "\n".join([*lines[1:], "TTFT, TPOT, ITL and E2E in ms", "", *sorted(notes)]).rstrip()
