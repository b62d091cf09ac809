"""`servecast whatif`: change one setting, keep the rest, see what really moves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.cli.progress import ShownProgress
from sim.commands.numbers import whole
from sim.errors import BadInput
from sim.paths import is_file

if TYPE_CHECKING:
    from sim.planning.jobs import Job, Runner
    from sim.planning.outcome import Outcome

MAX_RUNS = 2_000  # more are to be confirmed
FEW_RUNS = 8  # so few that starting other processes takes longer


@click.command()
@scenario_options
@click.option(
    "--vary",
    "vary",
    multiple=True,
    metavar="KEY=V,V,…",
    help="Engine or client flag and its values; repeatable.",
)
@click.option("--grid", is_flag=True, help="Every combination instead of one setting at a time.")
@click.option("--seeds", metavar="N", default="3", show_default=True, help="Seeds per point.")
@click.option("--explain", "explained", is_flag=True, help="Say what moved, and through which mechanism.")
@click.option("--fresh", is_flag=True, help="Start every point of a load setting with an empty prefix cache.")
@click.option("--keep-prompts", is_flag=True, help="Keep --num-prompts as it is when max-concurrency varies.")
@click.option("--out", metavar="FILE", help="Stream results to this JSONL file; the same command resumes.")
@click.option("--jobs", metavar="N", help="Processes.  [default: all cores for 8 runs or more]")
@click.option("--backend", metavar="NAME", default="loky", help="Where to run: loky, dask or ray.")
@click.option(
    "--address", metavar="HOST:PORT", help="Dask scheduler or Ray head; without it a local cluster."
)
@click.option("--yes", is_flag=True, help="Run even a large number of points.")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write every point and its outcomes as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw a picture per metric (.png, .svg or .pdf)."
)
@click.option("--html", "html_to", type=click.Path(path_type=Path), help="Write one self-contained page.")
def whatif(
    inputs: ScenarioOptions,
    vary: tuple[str, ...],
    grid: bool,
    seeds: str,
    explained: bool,
    fresh: bool,
    keep_prompts: bool,
    out: str | None,
    jobs: str | None,
    backend: str,
    address: str | None,
    yes: bool,
    profile: Path | None,
    json_to: str | None,
    plot: Path | None,
    html_to: Path | None,
) -> None:
    """What happens if one flag of SCENARIO.yaml changes.

    \b
    servecast whatif scenario.yaml --vary max-num-seqs=32,64,128 --vary max-num-batched-tokens=2048,8192

    One setting at a time, all others locked; the same requests at every point, under several seeds.
    """
    from sim.cli.outputs import check_outputs
    from sim.planning.parallel import Sweep
    from sim.planning.vary import parse_vary
    from sim.planning.whatif import MAX_POINTS, count_points, what_if
    from sim.planning.whatif_text import render_whatif, table_rows
    from sim.profile import load_profile
    from sim.results_io.atomic import write_text

    source = inputs.source()
    check_outputs(
        {"--json": json_to, "--plot": plot, "--html": html_to, "--out": out},
        [*inputs.reads([source]), profile],
    )
    replications = whole("--seeds", seeds, 1)
    dimensions = parse_vary(vary)
    total = count_points(dimensions, grid)
    if total > MAX_POINTS and not yes:
        raise BadInput("--vary", None, f"{total} points; confirm more than {MAX_POINTS} with --yes")
    if total * replications > MAX_RUNS and not yes:
        hint = f"makes {total * replications:,} runs; confirm more than {MAX_RUNS:,} with --yes"
        raise BadInput("--seeds", seeds, hint)
    if explained and grid:
        raise BadInput("--explain", None, "tells what one setting moves; leave out --grid")
    if jobs is not None and address is not None:
        raise BadInput("--jobs", jobs, "a running cluster has its own workers; leave out one of the two")
    if address is not None and backend == "loky":
        raise BadInput("--address", address, "belongs to --backend dask or ray")
    few = total * replications < FEW_RUNS and backend == "loky"
    sweep = Sweep(
        backend=backend,
        address=address,
        workers=whole("--jobs", jobs, 1) if jobs is not None else 1 if few else None,
        out=out,
        progress=ShownProgress(),
    )
    answer = what_if(
        source,
        dimensions,
        interruptible(sweep, out),
        grid=grid,
        replications=replications,
        fresh=fresh,
        scale_prompts=not keep_prompts,
        profile=None if profile is None else load_profile(profile),
    )
    if json_to != "-":
        click.echo(render_whatif(answer, explained=explained))
    if json_to is not None:
        text = json.dumps({"points": table_rows(answer)}, indent=1) + "\n"
        if json_to == "-":
            click.echo(text, nl=False)
        else:
            write_text(json_to, text, "--json")
            click.echo(f"points: {json_to}", err=True)
    if plot is not None:
        from sim.planning.pictures import plot_whatif

        plot_whatif(answer, plot)
        click.echo(f"picture: {plot}", err=True)
    if html_to is not None:
        from sim.output.sidebyside import label
        from sim.planning.whatif_html import whatif_page

        write_text(html_to, whatif_page(answer, label(source.build())), "--html")
        click.echo(f"page: {html_to}", err=True)


def interruptible(runner: Runner, out: str | None) -> Runner:
    """The runner, with a word on what an interrupt left behind."""

    def run(jobs: Sequence[Job]) -> list[Outcome]:
        try:
            return runner(jobs)
        except KeyboardInterrupt:
            there = out is not None and is_file(out)
            kept = f"finished runs are in {out}; the same command goes on" if there else "nothing was kept"
            click.echo(f"\ninterrupted: {kept}", err=True)
            raise click.exceptions.Exit(130) from None

    return run
