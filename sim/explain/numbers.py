"""The numbers of one scenario beside a page: what fits, what waits, what each knob would change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sim.build import ScenarioSource
from sim.errors import ServecastError
from sim.explain.advise import relative
from sim.explain.carry import changed
from sim.explain.cautions import caution_lines
from sim.explain.changes import Change, candidates, variations
from sim.explain.knowledge import movers
from sim.explain.lookup import Found
from sim.explain.outcome import Outcome, evaluate
from sim.explain.page import WIDTH, row
from sim.explain.uncertain import StepTimes, defaults
from sim.output.report import TTFT_PARTS
from sim.provenance import Note
from sim.scenario import Scenario
from sim.workload.spec import RandomDataset

MOST = 9  # simulations on one page
STILL = 0.02  # relative change of every figure below which a change does nothing worth the name
CAPACITY = (
    "ttft",
    "queue_time",
    "kv_capacity",
    "kv_usage",
    "concurrency",
    "running",
    "waiting",
    "preemptions",
)
_LENGTH_FLAG = {
    "vllm": ("--max-model-len", "max_model_len"),
    "sglang": ("--context-length", "context_length"),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """One change, simulated: its outcome, or why the engine refuses it."""

    change: Change
    outcome: Outcome | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A scenario as it is, and with single changes."""

    scenario: Scenario
    base: Outcome
    tried: tuple[Tried, ...]


def numbers(source: ScenarioSource, found: Found, step_times: StepTimes = defaults) -> Numbers:
    """Simulate the scenario, and every change that bears on the page.

    Raises:
        BadInput: the scenario itself is refused.
        EngineStuck: it hangs as it is.
    """
    scenario = source.build()
    base = evaluate(scenario, step_times(scenario))
    tried = []
    for change in _changes(scenario, found, base)[:MOST]:
        try:
            after = changed(source, change.settings).build()
            tried.append(Tried(change, evaluate(after, step_times(after))))
        except ServecastError as error:
            tried.append(Tried(change, None, str(error)))
    return Numbers(scenario, base, tuple(tried))


def _changes(scenario: Scenario, found: Found, base: Outcome) -> list[Change]:
    fits = base.fits or None
    if found.kind == "flag":
        return [] if found.engine is None else variations(scenario, found.name, fits)
    key = found.name if found.concept is not None else found.metric.concept if found.metric else ""
    if found.log is not None:
        key = found.log.concept
    flags = movers(key, scenario.engine.name)
    out = [change for change in candidates(scenario, fits) if change.flag in flags]
    # The next step of each knob first, then the further ones.
    seen: dict[str, int] = {}
    order = []
    for change in out:
        order.append((seen.setdefault(change.flag, 0), change))
        seen[change.flag] += 1
    chosen = [change for _, change in sorted(order, key=lambda pair: pair[0])]
    return (_load_changes(scenario, key) + chosen) if key in CAPACITY else chosen


def _load_changes(scenario: Scenario, key: str) -> list[Change]:
    """Halves of longest sequence, prompt and concurrency: what else decides how many fit."""
    out = []
    flag, value_key = _LENGTH_FLAG[scenario.engine.name]
    dataset, spec = scenario.workload.dataset, scenario.workload
    limit = int(scenario.engine[value_key])
    if isinstance(dataset, RandomDataset):
        needed = dataset.prefix_len + dataset.input_len + dataset.output_len
        if limit // 2 >= needed * (1 + dataset.range_ratio) + 2:
            out.append(Change(flag, str(limit), str(limit // 2), (f"serve.{flag[2:]}={limit // 2}",)))
        half = dataset.input_len // 2
        if half >= 1:
            out.append(
                Change(
                    "--random-input-len",
                    str(dataset.input_len),
                    str(half),
                    (f"bench.random-input-len={half}",),
                )
            )
    if spec.max_concurrency is not None and spec.max_concurrency >= 2 and key != "kv_capacity":
        half = spec.max_concurrency // 2
        out.append(
            Change(
                "--max-concurrency", str(spec.max_concurrency), str(half), (f"bench.max-concurrency={half}",)
            )
        )
    return out


def render(found: Numbers, notes: Iterable[Note] = ()) -> str:
    """The numbers as text, at most 100 columns.

    Args:
        notes: of the profile that the step times come from.
    """
    scenario, base = found.scenario, found.base
    engine = scenario.engine
    head = (
        f"In this scenario: {engine.name} {engine.asked_version}, {scenario.model.name}, {scenario.gpu.name}"
    )
    lines = [head + (f" x {scenario.gpu_count}" if scenario.gpu_count > 1 else "")]
    lines += row("Fits", fit_sentence(base))
    lines += row("TTFT", ttft_sentence(base))
    lines += row("Why", base.cause)
    lines += caution_lines(base.result, notes)
    figures = base.figures
    parts = [
        f"{label} {figures[key]:,.4g} {unit}"
        for key, label, unit in (
            ("mean_tpot_ms", "mean TPOT", "ms"),
            ("p99_itl_ms", "P99 ITL", "ms"),
            ("output_throughput", "output", "tok/s"),
        )
        if key in figures
    ]
    lines += row("Else", "; ".join(parts))
    if base.state == "saturated":
        lines += row(
            "Load", "more is offered than the server completes: TTFT measures the length of the test"
        )
    if found.tried:
        head = "".join(f"{name:>9}" for name in ("TTFT", "TPOT", "P99 ITL", "tok/s"))
        lines += ["", f"{'One change at a time, simulated':<44}{head}{'fit':>6}"]
        lines += [line for tried in found.tried for line in _tried_lines(tried, base)]
    return "\n".join(lines)


def fit_sentence(base: Outcome) -> str:
    """How many requests the pool holds, how many are offered, how many wait."""
    text = (
        f"{base.fits} requests of {base.request_tokens:,} tokens fit the KV cache of {base.kv_cache_tokens:,}"
    )
    wait = base.demand - base.fits
    if base.demand and wait > 0:
        text += f"; {base.demand} are in flight, so {wait} wait for others to end"
    elif base.demand:
        text += f"; {base.demand} are in flight at most"
    text += f". At the height {base.peak_running} ran and {base.peak_waiting} waited in the engine"
    if base.preemptions:
        text += f"; {base.preemptions} preemptions"
    return text


def ttft_sentence(base: Outcome) -> str:
    """Mean TTFT and its parts."""
    mean, total = base.figures.get("mean_ttft_ms"), sum(base.parts.values())
    if mean is None or total <= 0:
        return "unknown"
    shares = sorted(base.parts.items(), key=lambda item: -item[1])
    parts = [f"{value / total:.1%} {TTFT_PARTS.get(name, name).lower()}" for name, value in shares]
    return f"mean {_time(mean)}: {', '.join(parts)}"


def _time(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1000 else f"{ms:.1f} ms"


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, float]], float | None]], ...] = (
    ("ttft", lambda f: f.get("mean_ttft_ms")),
    ("tpot", lambda f: f.get("mean_tpot_ms")),
    ("itl", lambda f: f.get("p99_itl_ms")),
    ("throughput", lambda f: f.get("output_throughput")),
)


def _tried_lines(tried: Tried, base: Outcome) -> list[str]:
    change = tried.change
    name = f"  {change.name} {change.before} -> {change.after}"
    if tried.outcome is None:
        return [f"{name:<44} refused: {tried.refusal}"[:WIDTH]]
    effects = [relative(read(base.figures), read(tried.outcome.figures)) for _, read in _COLUMNS]
    cells = "".join(f"{_percent(effect):>9}" for effect in effects)
    known = [effect for effect in effects if effect is not None]
    still = all(abs(effect) <= STILL for effect in known) and abs(tried.outcome.fits - base.fits) <= 1
    return [f"{name:<44}{cells}{tried.outcome.fits:>6}" + ("  does nothing" if still else "")]


def _percent(effect: float | None) -> str:
    return "" if effect is None else f"{effect:+.1%}"
