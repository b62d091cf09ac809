"""`servecast explain`: what a metric, flag or line means, and what it does in a scenario."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.build import ScenarioSource
from sim.cli.options import ScenarioOptions, scenario_options
from sim.errors import BadInput
from sim.paths import exists
from sim.provenance import Note
from sim.scenario import EngineName, Scenario

if TYPE_CHECKING:
    from sim.explain.here import Here
    from sim.explain.lookup import Found
    from sim.explain.numbers import Numbers
    from sim.steptime.base import StepTimeModel


# A flag may be named with its dashes.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@scenario_options
@click.option("--engine", type=click.Choice(["vllm", "sglang"]), help="Whose names and flags to show.")
@click.option("--list", "listed", is_flag=True, help="List the names that are known instead.")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "as_json", is_flag=True, help="Print page and numbers, or the list, as JSON.")
def explain(
    inputs: ScenarioOptions,
    name: str | None,
    engine: EngineName | None,
    listed: bool,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Explain NAME: a metric, a flag, a name from /metrics, a line of a log or of a report, a coefficient.

    \b
    servecast explain ttft
    servecast explain max-num-seqs --engine-version 0.33.0
    servecast explain vllm:kv_cache_usage_perc
    servecast explain "GPU KV cache size: 194,896 tokens"
    servecast explain --list --engine vllm

    With a scenario (a file, or --serve, --bench and --gpu) it adds that scenario's numbers, simulated: what
    fits, what waits, where TTFT goes, and what each knob would change.
    """
    from sim.explain.lookup import find, known_names
    from sim.explain.page import default_version, engine_of, render, render_names

    if listed:
        names = known_names(engine)
        click.echo(json.dumps(names, indent=2) if as_json else render_names(names))
        return
    if name is None:
        raise BadInput("NAME", None, "name a metric, a flag or a log line; --list prints what is known")
    name, inputs = _whole_name(name, inputs)
    source = inputs.source() if inputs.files or inputs.serve else None
    if source is None:
        _refuse_idle(inputs, profile)
    if engine is None and source is not None:
        engine = source.serve.engine
    found = find(name, engine)
    own = engine_of(found, engine)
    if inputs.engine_version is not None and not re.fullmatch(r"v?\d+(\.\d+)+\S*", inputs.engine_version):
        raise BadInput("--engine-version", inputs.engine_version, "must be a version such as 0.28.0")
    version = inputs.engine_version or (source.engine_version if source else None)
    # What was given is of the scenario's engine or of the asked one, which need not be the name's.
    if version is None or engine not in (None, own):
        version = default_version(own)
    counted, local, notes = None, None, profile_notes(profile, source)
    if source is not None and found.coefficient is None:
        from sim.explain.numbers import numbers

        counted = numbers(source, found, step_times(profile))
    elif source is not None:
        from sim.explain.here import here

        local = here(found.name, source.build(), profile)
    if as_json:
        click.echo(json.dumps(_document(found, own, version, counted, notes, local), indent=2))
        return
    click.echo(render(found, own, version))
    if local is not None:
        from sim.explain.here import render_here

        click.echo(render_here(local))
    if counted is not None:
        from sim.explain.numbers import render as render_numbers

        click.echo("\n" + render_numbers(counted, notes))


def step_times(profile: Path | None) -> Callable[[Scenario], StepTimeModel | None]:
    """The step-time model of each scenario: of the profile, or the GPU's defaults."""
    from sim.cli.predict import step_time_from
    from sim.explain.uncertain import defaults

    return defaults if profile is None else lambda scenario: step_time_from(profile, scenario)[0]


def profile_notes(profile: Path | None, source: ScenarioSource | None) -> tuple[Note, ...]:
    """What to know of the profile in this scenario; nothing where one of the two is missing."""
    from sim.cli.predict import step_time_from

    return () if source is None else step_time_from(profile, source.build())[1]


def _refuse_idle(inputs: ScenarioOptions, profile: Path | None) -> None:
    """Refuse what would describe a scenario where there is none to add numbers of."""
    given: dict[str, object] = {
        name: getattr(inputs, name)
        for name in ScenarioOptions.__dataclass_fields__
        if name not in ("files", "serve", "engine_version")
    }
    given["profile"] = profile
    for name, value in given.items():
        if value not in (None, ()):
            option = "--set" if name == "sets" else "--" + name.replace("_", "-")
            shown = " ".join(value) if isinstance(value, tuple) else str(value)
            raise BadInput(option, shown, "belongs to a scenario: name its file, or give --serve as well")


def _whole_name(name: str, inputs: ScenarioOptions) -> tuple[str, ScenarioOptions]:
    """Words that are no files belong to the name, so that it need not be quoted."""
    words = [word for word in inputs.files if not exists(word) and not word.endswith((".yaml", ".yml"))]
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            raise BadInput(word, None, "is no option of explain; a flag to be explained comes first, alone")
    files = tuple(word for word in inputs.files if word not in words)
    return " ".join([name, *words]), replace(inputs, files=files)


def _document(
    found: Found,
    engine: EngineName,
    version: str,
    counted: Numbers | None,
    notes: tuple[Note, ...],
    local: Here | None,
) -> dict[str, Any]:
    from sim.explain.cautions import caution_document
    from sim.explain.knowledge import concepts, movers
    from sim.steptime.efficiencies import BOUNDS

    entry = found.coefficient or found.concept or found.metric or found.log or found.knob
    key = found.name if found.concept else found.metric.concept if found.metric else ""
    key = found.log.concept if found.log else key
    document: dict[str, Any] = {
        "name": found.name,
        "kind": found.kind,
        "engine": engine,
        "engine_version": version,
        "class": None if found.coefficient else concepts()[key].metric_class if key else "A",
        "concept": key or None,
        "note": found.note,
        "entry": None if entry is None else entry.model_dump(by_alias=True),
        "moved_by": {
            name: {"change": knob.change, "direction": knob.moves[key], "costs": knob.costs}
            for name, knob in (movers(key, engine).items() if key else ())
        },
    }
    if found.coefficient is not None:
        bound = BOUNDS[found.name]
        document |= {"unit": bound.unit, "low": bound.low, "high": bound.high}
        if math.isinf(bound.high):
            document["high"] = None
    if local is not None:
        from sim.explain.here import here_document

        document["here"] = here_document(local)
    if found.table_flag is not None:
        document["flag"] = {"role": found.table_flag.role, "effect": found.table_flag.effect}
    if counted is not None:
        base = counted.base
        document["scenario"] = {
            "fits": base.fits,
            "in_flight": base.demand,
            "wait": max(0, base.demand - base.fits),
            "kv_cache_tokens": base.kv_cache_tokens,
            "peak_running": base.peak_running,
            "preemptions": base.preemptions,
            "queue_share_of_ttft": base.queue_share,
            "cause": base.cause,
            **caution_document(base.result, notes),
            "figures": dict(base.figures),
            "changes": [
                {
                    "flag": tried.change.flag,
                    "from": tried.change.before,
                    "to": tried.change.after,
                    "fits": None if tried.outcome is None else tried.outcome.fits,
                    "figures": None if tried.outcome is None else dict(tried.outcome.figures),
                    "refused": tried.refusal or None,
                }
                for tried in counted.tried
            ],
        }
    return document
