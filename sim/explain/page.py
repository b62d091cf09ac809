"""One name, one screen: what it is, its clock, what moves it, what to read beside it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from sim.commands import serve as serve_commands
from sim.engines.values import version_key
from sim.explain.knowledge import (
    CLASSES,
    Coefficient,
    Concept,
    Direction,
    Knob,
    LogPhrase,
    Metric,
    client_knobs,
    concepts,
    log_phrases,
    metrics,
    movers,
)
from sim.explain.lookup import ENGINES, Found
from sim.scenario import EngineName
from sim.steptime.efficiencies import BOUNDS, Bound

WIDTH = 100
LABEL = 12
_ARROWS: Mapping[Direction, str] = {"up": "up", "down": "down", "either": "either way"}


def render(found: Found, engine: EngineName, version: str) -> str:
    """The page as text of at most 100 columns, without a line end.

    Args:
        found: what was looked up.
        engine: whose names and flags to show.
        version: of that engine; names that it does not have are marked.
    """
    lines = [found.note] if found.note else []
    if found.coefficient is not None:
        lines += _coefficient_page(found.name, found.coefficient)
    elif found.concept is not None:
        lines += _concept_page(found.name, found.concept, engine, version)
    elif found.metric is not None:
        lines += _metric_page(found.name, found.metric, found.engine or engine, version)
    elif found.log is not None:
        lines += _log_page(found.log, found.engine or engine, version)
    else:
        lines += _flag_page(found, version)
    return "\n".join(lines)


def row(label: str, text: str) -> list[str]:
    """One labelled paragraph; nothing for an empty text."""
    if not text:
        return []
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(title: str, kind: str, letter: str) -> list[str]:
    return [title, f"{kind}, class {letter}: {CLASSES[letter]}", ""]


def render_names(names: Mapping[str, Sequence[str]]) -> str:
    """Lists of names under their headings; log lines one by one, as they hold blanks."""
    lines: list[str] = []
    for heading, many in names.items():
        lines += ["", f"{heading} ({len(many)})"]
        if any(" " in name for name in many):
            lines += [f"  {name}" for name in many]
        else:
            lines += textwrap.wrap(
                "  ".join(many),
                WIDTH,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines[1:])


def _span(bound: Bound) -> str:
    return f", from {bound.low:g} to {bound.high:g}"


def _coefficient_page(name: str, entry: Coefficient) -> list[str]:
    bound = BOUNDS[name]
    lines = [name, "coefficient of the step-time model, fitted by `servecast calibrate` or a default", ""]
    lines += row("What", entry.says)
    span = (
        ""
        if bound.unit == "0 to 1"
        else f", at least {bound.low:g}"
        if math.isinf(bound.high)
        else _span(bound)
    )
    lines += row("Unit", bound.unit + span)
    lines += row("Pinned by", entry.pins)
    lines += row("Shows in", entry.moves)
    return lines + row("Source", "sim/steptime/efficiencies.py; defaults by GPU: sim/data/efficiencies.yaml")


def _concept_page(key: str, concept: Concept, engine: EngineName, version: str) -> list[str]:
    lines = _head(concept.title, "metric", concept.metric_class)
    lines += row("What", concept.says)
    lines += row("Clock", concept.clock)
    lines += row("Tool", concept.tool)
    lines += row("Nearest", concept.nearest)
    lines += _moved_by(key, engine, version)
    lines += _beside(concept.beside)
    statistic = "Mean, Median, Pxx " if key in ("ttft", "tpot", "itl", "e2el") else ""
    lines += row("Reports", ", ".join(f"{statistic}{line}" for line in concept.lines))
    names = [
        _name_with_version(name, entry, version)
        for name, entry in metrics(engine).items()
        if entry.concept == key
    ]
    if key != "process":
        lines += row("/metrics", ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else ""))
    phrases = [
        f'"{entry.phrase}"'
        for entry in log_phrases(engine)
        if entry.concept == key and entry.known_in(version)
    ]
    lines += row("Log", ", ".join(phrases))
    return lines + row("Source", concept.source)


def _name_with_version(name: str, entry: Metric, version: str) -> str:
    if entry.known_in(version):
        return name
    return f"{name} (since {entry.since})" if entry.since else f"{name} (until {entry.until})"


def _metric_page(name: str, entry: Metric, engine: EngineName, version: str) -> list[str]:
    concept = concepts()[entry.concept]
    lines = _head(f"{name}, {entry.kind}", f"{_program(engine)} {version} /metrics", concept.metric_class)
    lines += row("What", entry.says)
    lines += row("Clock", entry.clock or concept.clock)
    lines += row("Version", _versions(name, entry.since, entry.until, entry.known_in(version), version))
    lines += row("Older name", ", ".join(entry.was))
    lines += row("Needs", f"{entry.needs}; without it the name is absent, not 0" if entry.needs else "")
    if entry.kind == "histogram":
        lines += row(
            "Reading",
            "mean = _sum / _count is exact; a quantile is only known to lie in its bucket, and in the last "
            "bucket (+Inf) only from below",
        )
    elif entry.kind == "counter":
        lines += row("Reading", "grows since start-up: take the difference over the run; a drop is a restart")
    lines += ["", *row("Measures", f"{concept.title}. {concept.says}")]
    lines += _moved_by(entry.concept, engine, version)
    lines += _beside(concept.beside)
    return lines + row("Source", concept.source)


def _log_page(entry: LogPhrase, engine: EngineName, version: str) -> list[str]:
    concept = concepts()[entry.concept]
    lines = _head(f'"{entry.phrase}"', f"{_program(engine)} {version} log", concept.metric_class)
    lines += row("What", entry.says)
    lines += row("Version", _versions("it", entry.since, entry.until, entry.known_in(version), version))
    lines += ["", *row("Measures", f"{concept.title}. {concept.says}")]
    lines += row("Clock", concept.clock)
    lines += _moved_by(entry.concept, engine, version)
    lines += _beside(concept.beside)
    return lines + row("Source", entry.source)


def _versions(name: str, since: str, until: str, known: bool, version: str) -> str:
    span = f"since {since}" if since else ""
    span += (", " if span and until else "") + (f"until {until}" if until else "")
    if not span:
        return ""
    return span if known else f"{version} does not have {name}: {span}"


def _flag_page(found: Found, version: str) -> list[str]:
    flag, knob = found.table_flag, found.knob
    assert flag is not None
    program = _program(found.engine) if found.engine else "benchmark client"
    lines = [found.name, f"{program} flag, class A: {CLASSES['A']}", ""]
    if knob is not None:
        lines += row("What", knob.says)
        lines += row("Default", knob.default)
        lines += _moves(knob)
        lines += row("When", knob.when)
        lines += row("Costs", "" if knob.costs == "none" else knob.costs)
        if knob.quality:
            lines += row("Quality", "answers may change: measure quality scores again before you keep it")
        lines += _beside(knob.beside)
    elif flag.role == "not-modelled":
        lines += row("Effect", flag.effect)
        lines += row("Note", "not modelled: predictions leave it out, and say so")
    elif flag.role == "irrelevant":
        lines += row("Effect", "no bearing on latency, throughput or memory that is worth modelling")
    else:
        lines += row("Effect", "shapes the load that the client sends")
    kind = flag.kind if not flag.choices else f"one of {', '.join(flag.choices[:12])}"
    lines += row("Takes", "no value" if flag.kind in {"switch", "bool"} else kind)
    if flag.kind == "bool":
        lines += row("Off", flag.negative)
    lines += row("Also", ", ".join(flag.aliases))
    if flag.since or flag.until:
        lines += row("Version", _flag_versions(flag.since, flag.until))
    if found.also:
        lines += row(
            "Elsewhere", f"{_program(found.also[0])} has a flag of this name too: --engine {found.also[0]}"
        )
    return lines


def _flag_versions(since: str, until: str) -> str:
    return ", ".join(
        part for part in (f"since {since}" if since else "", f"gone from {until}" if until else "") if part
    )


def _moves(knob: Knob) -> list[str]:
    if not knob.moves:
        return row("Moves", "nothing that is measured")
    parts = [f"{_short(key)} {_ARROWS[direction]}" for key, direction in knob.moves.items()]
    return (
        row(f"{knob.change}:"[:LABEL], ", ".join(parts))
        if len(knob.change) < LABEL - 1
        else row("Moves", f"{knob.change}: {', '.join(parts)}")
    )


def _short(key: str) -> str:
    return {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "mfu": "MFU"}.get(
        key, key.replace("_", " ").replace("kv ", "KV ")
    )


def _moved_by(key: str, engine: EngineName, version: str) -> list[str]:
    """The flags that move a concept, one line each: direction and price."""
    table = serve_commands.table(engine)
    rows = [
        (name, knob)
        for name, knob in movers(key, engine).items()
        if (flag := table.find(name)) is None
        or not flag.since
        or version_key(version) >= version_key(flag.since)
    ]
    lines = ["", f"Moved by, in {_program(engine)} (conditions: explain the flag)"] if rows else []
    lines += [_mover_line(name, knob, knob.moves[key]) for name, knob in rows]
    load = [
        f"{name} ({knob.change}: {_ARROWS[knob.moves[key]]})"
        for name, knob in client_knobs().items()
        if key in knob.moves
    ]
    if load:
        lines += ["", *row("In the load", ", ".join(load))]
    if lines:
        return [*lines, ""]
    return row("Knob", "none in the engine") if concepts()[key].metric_class == "C" else []


def _mover_line(name: str, knob: Knob, direction: Direction) -> str:
    price = knob.costs.split(";")[0].split(". ")[0]
    head = f"  {name} {knob.change}"
    line = (
        f"{head:<40} {_ARROWS[direction]:<11}costs {price}"
        if knob.costs != "none"
        else f"{head:<40} {_ARROWS[direction]}"
    )
    return textwrap.shorten(line.replace("  ", "\x00\x00"), WIDTH, placeholder=" ...").replace("\x00", " ")


def _beside(keys: Iterable[str]) -> list[str]:
    return row("Read with", ", ".join(concepts()[key].title for key in keys))


def _program(engine: EngineName) -> str:
    return serve_commands.table(engine).program


def default_version(engine: EngineName) -> str:
    """The version whose flags and names are shown unless another is named."""
    return serve_commands.table(engine).version


def engine_of(found: Found, asked: EngineName | None) -> EngineName:
    """Whose names to show: the engine that the name belongs to, else the asked one, else vLLM."""
    return found.engine or asked or ENGINES[0]
