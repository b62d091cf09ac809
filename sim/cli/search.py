"""`servecast search`: which flags carry the most load under objectives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.cli.plan import read_effort
from sim.commands.numbers import whole
from sim.errors import BadInput


@click.command()
@scenario_options
@click.option(
    "--over",
    multiple=True,
    metavar="KEY=LOW..HIGH",
    help="A flag and its bounds, or its values V,V,…; repeatable.",
)
@click.option(
    "--slo", "slos", multiple=True, metavar="OBJECTIVE", help='E.g. "p99 ttft <= 500ms"; repeatable.'
)
@click.option("--goodput", metavar="SHARE", help="Share of requests that must keep every limit, e.g. 99%.")
@click.option(
    "--load",
    "kind",
    type=click.Choice(["rate", "concurrency"]),
    default="rate",
    show_default=True,
    help="What to maximise: requests per second, or requests in flight.",
)
@click.option(
    "--candidates", metavar="N", default="27", show_default=True, help="Combinations in the first round."
)
@click.option(
    "--prompts",
    metavar="N",
    default="1000",
    show_default=True,
    help="Requests per full simulation, at least 100.",
)
@click.option("--seeds", metavar="N", default="5", show_default=True, help="Seeds of full simulations.")
@click.option("--jobs", metavar="N", help="Processes.  [default: all cores]")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the result as JSON.")
@click.option(
    "--save", type=click.Path(path_type=Path), help="Write the scenario that would confirm the best."
)
def search(
    inputs: ScenarioOptions,
    over: tuple[str, ...],
    slos: tuple[str, ...],
    goodput: str | None,
    kind: str,
    candidates: str,
    prompts: str,
    seeds: str,
    jobs: str | None,
    profile: Path | None,
    json_to: str | None,
    save: Path | None,
) -> None:
    """The flags with which SCENARIO.yaml sustains the most load per GPU under objectives.

    \b
    servecast search scenario.yaml --slo "p99 ttft <= 500ms" \\
      --over max-num-seqs=16..256 --over max-num-batched-tokens=1024..8192 --over tensor-parallel-size=1,2

    Exit status 1: no combination keeps the objectives at any load.
    """
    from sim.cli.outputs import check_outputs
    from sim.cli.progress import ShownCount
    from sim.planning.plan_report import serve_line
    from sim.planning.pool import Cores
    from sim.planning.search import search as find
    from sim.planning.search_space import parse_space
    from sim.planning.search_text import confirming_scenario, render_search, search_to_dict
    from sim.planning.slo import parse_slos
    from sim.profile import load_profile
    from sim.results_io.atomic import write_text
    from sim.scenario_file import write_scenario_file

    if str(save) == "-":
        raise BadInput("--save", "-", "is a scenario for later: name a file")
    source = inputs.source()
    check_outputs({"--json": json_to, "--save": save}, [*inputs.reads([source]), profile])
    objectives = parse_slos(slos, goodput)
    space, effort = parse_space(over), read_effort(prompts, seeds)
    tried = whole("--candidates", candidates, 2)
    known = None if profile is None else load_profile(profile)
    workers = whole("--jobs", jobs, 1) if jobs else os.cpu_count() or 1
    with ShownCount("combinations") as count:
        result = find(
            source,
            space,
            objectives,
            kind=kind,
            effort=effort,
            candidates=tried,
            pool=Cores(workers, count),
            profile=known,
        )
    if json_to != "-":
        click.echo(render_search(result, str(objectives)))
    if json_to is not None:
        text = json.dumps(search_to_dict(result), indent=1) + "\n"
        if json_to == "-":
            click.echo(text, nl=False)
        else:
            write_text(json_to, text, "--json")
            click.echo(f"result: {json_to}", err=True)
    best = result.best.found
    if best is None or best.level is None:
        if save is not None:
            click.echo(f"{save} is not written: no combination keeps the objectives", err=True)
        raise click.exceptions.Exit(1)
    if save is not None:
        write_scenario_file(confirming_scenario(best, serve_line(best.scenario)), save, "--save")
        click.echo(f"scenario: {save}", err=True)
