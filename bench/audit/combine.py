"""Which log and which /metrics dumps belong to which report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.audit.facts import Run
from bench.audit.reading import Material, engine_facts
from bench.metrics import ServerView, Snapshot, cache_info, difference, view
from bench.startup_log import StartupLog

Dump = tuple[str, Snapshot]


def combine(materials: Sequence[Material]) -> tuple[Run, ...]:
    """The runs of an audit, in the order of their reports, each under a name of its own.

    One log, or one pair of dumps, goes with every report it can go with; as many as there are reports go one
    each, in order. Dumps are paired in order, the earlier of a pair being the one with the smaller counters.
    Without any report, logs and dumps are audited by themselves.
    """
    names = distinct_names([material.path for material in materials])
    runs: list[Run] = []
    for material, name in zip(materials, names, strict=True):
        for run in material.runs:
            own = run.with_(name=name + run.name.removeprefix(Path(material.path).name))
            runs.append(_with_log(own, material.log) if material.log else own)
    named = list(zip(names, materials, strict=True))
    logs = [(name, m.log) for name, m in named if m.log is not None and not m.runs]
    dumps = _pairs([(name, m.snapshot) for name, m in named if m.snapshot is not None])
    if not runs:
        count = max(len(logs), len(dumps))
        own_names = [name for name, _ in logs] if len(logs) >= len(dumps) else [name for name, *_ in dumps]
        runs = [Run(own_names[i]) for i in range(count)]
    if len(logs) == len(runs):
        runs = [_with_log(run, log) for run, (_, log) in zip(runs, logs, strict=True)]
    elif logs:
        runs = [_with_log(run, logs[0][1]) for run in runs]
    return tuple(_with_dumps(runs, dumps))


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of different paths, from the file's name on, that tell them apart."""
    parts = [Path(path).parts for path in paths]
    names = []
    for i, own in enumerate(parts):
        others = [*parts[:i], *parts[i + 1 :]]
        depths = range(1, len(own))
        depth = next((d for d in depths if all(own[-d:] != other[-d:] for other in others)), len(own))
        names.append(str(Path(*own[-depth:])))
    return names


def _with_log(run: Run, log: StartupLog) -> Run:
    # A report's own words about its engine win over a log that may be another start's.
    return run.with_(log=log, engine={**engine_facts(log), **run.engine})


def _pairs(dumps: Sequence[Dump]) -> list[tuple[str, Snapshot, Snapshot | None]]:
    """(name, after, before); the last of an odd number stands alone."""
    out: list[tuple[str, Snapshot, Snapshot | None]] = []
    for i in range(0, len(dumps) - 1, 2):
        first, second = dumps[i], dumps[i + 1]
        early, late = (second, first) if _work(first[1]) > _work(second[1]) else (first, second)
        out.append((late[0], late[1], early[1]))
    if len(dumps) % 2:
        out.append((dumps[-1][0], dumps[-1][1], None))
    return out


def _work(snapshot: Snapshot) -> tuple[float, float]:
    """What tells the order of two dumps: the start of the process, then what it has done."""
    return snapshot.started or 0.0, sum(view(snapshot).counters.values())


def _with_dumps(runs: list[Run], dumps: Sequence[tuple[str, Snapshot, Snapshot | None]]) -> list[Run]:
    if len(dumps) == len(runs):
        return [_with_dump(run, after, before) for run, (_, after, before) in zip(runs, dumps, strict=True)]
    for name, after, before in dumps:
        seen = _view(after, before)
        owner = next((i for i, run in enumerate(runs) if _same_work(run, seen)), None)
        if owner is None:
            runs.append(_with_dump(Run(name), after, before))
        else:
            runs[owner] = _with_dump(runs[owner], after, before)
    return runs


def _with_dump(run: Run, after: Snapshot, before: Snapshot | None) -> Run:
    return run.with_(view=_view(after, before), paired=before is not None, cache=cache_info(after))


def _view(after: Snapshot, before: Snapshot | None) -> ServerView:
    return view(after) if before is None else difference(before, after)


def _same_work(run: Run, seen: ServerView) -> bool:
    """Whether the server generated what the report counts, within 5 %."""
    counted, generated = run.get("total_output_tokens"), seen.counters.get("generation_tokens")
    return bool(counted and generated) and abs((generated or 0.0) / (counted or 1.0) - 1.0) <= 0.05
