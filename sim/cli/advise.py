"""`servecast advise`: which flag to change for which goal, and what it costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.errors import BadInput

if TYPE_CHECKING:
    from sim.explain.outcome import Goal


@click.command()
@scenario_options
@click.option(
    "--goal",
    type=click.Choice(["ttft", "tpot", "p99-ttft", "p99-tpot", "p99-itl", "throughput", "cost"]),
    default="ttft",
    show_default=True,
    help="What to improve; a latency without p99 is its mean.",
)
@click.option("--price", metavar="USD", help="Price of one GPU hour, for the goal cost.")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "as_json", is_flag=True, help="Print the advice as JSON.")
def advise(
    inputs: ScenarioOptions, goal: Goal, price: str | None, profile: Path | None, as_json: bool
) -> None:
    """Rank flag changes for a goal, one at a time, by their simulated effect on this load.

    \b
    servecast advise scenario.yaml --goal ttft
    servecast advise result.json --goal cost --price 2.5

    Takes a scenario (file or commands), or a result: one of servecast's own says all that is needed, with a
    report of another client give --serve and --gpu too. Ranges come from what is uncertain of the card, the
    pool and the load. Each change comes with what it costs and the commands to run and to check it.
    """
    from sim.cli.explain import profile_notes, step_times
    from sim.cli.report_source import source_of
    from sim.comparison.compare import figure
    from sim.explain.advice_text import document, render
    from sim.explain.advise import advise as find_advice
    from sim.explain.outcome import GOALS

    per_hour = _price(price)
    if price is not None and goal != "cost":
        raise BadInput("--price", price, "belongs to --goal cost; leave it out, or ask for that")
    source, measured = source_of(inputs)
    found = find_advice(
        source, goal, step_times=step_times(profile), profile=None if profile is None else str(profile)
    )
    notes = profile_notes(profile, source)
    seen = None
    if measured is not None and measured.origin == "measured":
        seen = figure(measured, GOALS[goal][0])
    if as_json:
        click.echo(json.dumps(document(found, seen, price=per_hour, notes=notes), indent=2))
    else:
        click.echo(render(found, measured=seen, price=per_hour, notes=notes))


def _price(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadInput("--price", text, "must be a positive number of USD per GPU hour")
    return value
