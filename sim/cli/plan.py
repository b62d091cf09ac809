"""`servecast plan`: how much load, how many replicas, which GPU, at what cost, under objectives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.commands.numbers import real, whole
from sim.errors import BadInput

if TYPE_CHECKING:
    from sim.planning.daily import DailyProfile
    from sim.planning.load_curve import Effort
    from sim.planning.plan import Plan


MAX_RATE = 1e6  # requests/s; beyond any service there is
MAX_PEAK = 1e3
MAX_SEEDS = 1_000


@click.command()
@scenario_options
@click.option(
    "--slo",
    "slos",
    multiple=True,
    metavar="OBJECTIVE",
    help='E.g. "p99 ttft <= 500ms", "mean e2e < 3s"; repeatable.  [default: the client\'s --goodput]',
)
@click.option("--goodput", metavar="SHARE", help="Share of requests that must keep every limit, e.g. 99%.")
@click.option(
    "--load",
    "kind",
    type=click.Choice(["rate", "concurrency"]),
    default="rate",
    show_default=True,
    help="What to find: requests per second, or requests in flight.",
)
@click.option("--rate", metavar="RPS", help="Turn it round: replicas for this many requests per second.")
@click.option("--peak-factor", metavar="F", help="Peak over mean of --rate.  [default: 1, or the day's]")
@click.option("--daily", metavar="F,F,…", help="Relative rate of each of 24 hours: replicas by the hour.")
@click.option("--traffic", type=click.Path(path_type=Path), help="Tenants and sessions instead of the load.")
@click.option("--gpus", metavar="NAME,NAME,…", help="Compare these GPUs.")
@click.option("--tp", metavar="N,N,…", help="Compare these tensor-parallel sizes.")
@click.option(
    "--price",
    metavar="USD|FILE",
    help="Price of a GPU hour; or a YAML file, `GPU: price per hour` a line.",
)
@click.option(
    "--utilisation", metavar="SHARE", help="Share of the capacity in use, without --rate.  [default: 100%]"
)
@click.option(
    "--prompts", metavar="N", default="1000", show_default=True, help="Requests per simulation, at least 100."
)
@click.option("--seeds", metavar="N", default="5", show_default=True, help="Simulations per level of load.")
@click.option("--no-model-error", is_flag=True, help="Leave out the runs with longer and shorter step times.")
@click.option("--jobs", metavar="N", help="Processes.  [default: all cores]")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the plan as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw load against objectives, or cost against margin."
)
@click.option("--html", "html_to", type=click.Path(path_type=Path), help="Write one self-contained page.")
def plan(
    inputs: ScenarioOptions,
    slos: tuple[str, ...],
    goodput: str | None,
    kind: str,
    rate: str | None,
    peak_factor: str | None,
    daily: str | None,
    traffic: Path | None,
    gpus: str | None,
    tp: str | None,
    price: str | None,
    utilisation: str | None,
    prompts: str,
    seeds: str,
    no_model_error: bool,
    jobs: str | None,
    profile: Path | None,
    json_to: str | None,
    plot: Path | None,
    html_to: Path | None,
) -> None:
    """The highest load that SCENARIO.yaml sustains under objectives, or what a wanted load takes.

    \b
    servecast plan scenario.yaml --slo "p99 ttft <= 500ms" --slo "p99 tpot <= 50ms"
    servecast plan scenario.yaml --slo "p99 ttft <= 1s" --rate 40 --gpus H100,L40S --price prices.yaml

    Exit status 1: no load keeps the objectives; the best that can be reached and what blocks it are printed.
    """
    from sim.cli.compare import parse_percent
    from sim.cli.outputs import check_outputs
    from sim.cli.progress import ShownCount
    from sim.planning.capacity import from_workload
    from sim.planning.hardware import parse_names, parse_sizes
    from sim.planning.mix import read_traffic
    from sim.planning.plan import Question, make_plan
    from sim.planning.plan_report import best_found
    from sim.planning.pool import Cores
    from sim.planning.prices import read_prices
    from sim.planning.slo import parse_slos
    from sim.profile import load_profile

    source = inputs.source()
    check_outputs(
        {"--json": json_to, "--plot": plot, "--html": html_to},
        [*inputs.reads([source]), traffic, price, profile],
    )
    texts = slos
    if not texts:
        texts = tuple(from_workload(source.build()))
        goodput = goodput or ("99%" if texts else None)
    if utilisation is not None and rate is not None:
        raise BadInput("--utilisation", utilisation, "follows from --rate; give one of the two")
    share = parse_percent("--utilisation", utilisation or "100%") or 0.0
    if not 0 < share <= 1:
        raise BadInput("--utilisation", utilisation, "must be above 0 and at most 100%")
    if peak_factor and rate is None and daily is None:
        raise BadInput("--peak-factor", peak_factor, "belongs to --rate: the peak over its mean")
    if utilisation is not None and price is None:
        raise BadInput("--utilisation", utilisation, "is of costs; give a --price")
    if peak_factor and daily is not None:
        raise BadInput("--peak-factor", peak_factor, "follows from --daily; give one of the two")
    day = None if daily is None else day_from_text(daily)
    question = Question(
        slos=parse_slos(texts, goodput),
        kind=kind,
        rate=None if rate is None else real("--rate", rate, above=0.0, maximum=MAX_RATE),
        peak_factor=real("--peak-factor", peak_factor, minimum=1.0, maximum=MAX_PEAK)
        if peak_factor
        else day.peak_factor
        if day
        else 1.0,
        daily=day,
        traffic=None if traffic is None else read_traffic(traffic),
        gpus=parse_names("--gpus", gpus),
        tps=parse_sizes("--tp", tp),
        prices=None if price is None else read_prices(price),
        utilisation=share,
        effort=read_effort(prompts, seeds),
        with_error=not no_model_error,
    )
    if traffic is not None:
        inputs.say_replaced("--traffic", source)
    known = None if profile is None else load_profile(profile)
    workers = whole("--jobs", jobs, 1) if jobs else os.cpu_count() or 1
    with ShownCount() as count:
        answer = make_plan(source, question, pool=Cores(workers, count), profile=known)
    write_plan(answer, json_to, plot, html_to)
    if best_found(answer) is None:
        raise click.exceptions.Exit(1)


def read_effort(prompts: str, seeds: str) -> Effort:
    """`--prompts` and `--seeds` of a search by simulation.

    Raises:
        BadInput: no whole numbers, too small, or more than any search could run.
    """
    from sim.planning.load_curve import MAX_PROMPTS, Effort

    return Effort(whole("--prompts", prompts, 100, MAX_PROMPTS), whole("--seeds", seeds, 1, MAX_SEEDS))


def write_plan(answer: Plan, json_to: str | None, plot: Path | None, html_to: Path | None) -> None:
    """Print the plan and write what else was asked for."""
    from sim.planning.plan import plan_to_dict
    from sim.planning.plan_report import render_plan
    from sim.results_io.atomic import write_text

    if json_to != "-":
        click.echo(render_plan(answer))
    if json_to is not None:
        text = json.dumps(plan_to_dict(answer), indent=1) + "\n"
        if json_to == "-":
            click.echo(text, nl=False)
        else:
            write_text(json_to, text, "--json")
            click.echo(f"plan: {json_to}", err=True)
    if plot is not None:
        from sim.planning.pictures import plot_plan

        plot_plan(answer, plot)
        click.echo(f"picture: {plot}", err=True)
    if html_to is not None:
        from sim.planning.report_html import plan_page

        write_text(html_to, plan_page(answer), "--html")
        click.echo(f"page: {html_to}", err=True)


def day_from_text(text: str) -> DailyProfile:
    """Read 24 relative rates.

    Raises:
        BadInput: not 24 numbers of at least 0.
    """
    from sim.planning.daily import DailyProfile

    try:
        return DailyProfile(tuple(float(word) for word in text.split(",")))
    except ValueError:
        raise BadInput("--daily", text, "must be 24 numbers separated by commas") from None
