"""`servecast demo`: the reference scenario, predicted and set beside its published measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sim.reference import Reference, ReferenceRun
    from sim.results import BenchResult


def measured_result(reference: Reference, run: ReferenceRun) -> BenchResult:
    """A published run as a measured result of aggregates only."""
    from sim.results import BenchResult

    server = {key: int(run.figures[key]) for key in ("num_preemptions",) if key in run.figures}
    figures = {key: value for key, value in run.figures.items() if key not in server}
    return BenchResult(
        origin="measured",
        tool="published report",
        identity={
            "engine": run.engine,
            "model": reference.model,
            "gpu": reference.gpu,
            "max_concurrency": run.max_concurrency,
        },
        duration=run.figures["duration"],
        aggregates={**figures, "completed": run.num_prompts},
        server=server,
    )


@click.command()
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    default=Path("servecast-demo.png"),
    show_default=True,
    help="Where to draw the picture.",
)
def demo(plot: Path) -> None:
    """Predict the reference scenario, compare it with its published measurement, draw it."""
    import sys

    from sim.cli.compare import format_comparison
    from sim.comparison.compare import compare
    from sim.output.plots import check_place, plot_demo
    from sim.output.report import render
    from sim.reference import rtx5090_reference
    from sim.simulate import simulate

    check_place(plot)
    reference = rtx5090_reference()
    comparisons = []
    for run in reference.runs:
        if run.engine != "vllm":
            continue
        bench = f"{reference.bench} --max-concurrency {run.max_concurrency} --num-prompts {run.num_prompts}"
        click.secho(f"Concurrency {run.max_concurrency}", bold=True)
        click.echo(f"$ servecast predict --gpu {reference.gpu} --engine-version {reference.vllm.version} \\")
        click.echo(f"    --kv-cache-tokens {reference.vllm.kv_cache_tokens} \\")
        click.echo(f"    --serve '{reference.vllm.serve}' \\\n    --bench '{bench}'\n")
        outcome = simulate(reference.scenario("vllm", run.max_concurrency, run.num_prompts))
        click.echo(render(outcome.result, colour=sys.stdout.isatty()))
        comparisons.append(compare(outcome.result, measured_result(reference, run)))
        click.echo("\nBeside the published measurement:")
        click.echo(format_comparison(comparisons[-1]) + "\n")
    click.echo(
        "The RTX 5090's efficiencies were fitted to these two reports: to the mean TTFT and TPOT at "
        "concurrency 1\nand to the median ITL at 128. Everything else above is predicted; "
        "`python -m calibration.reference_fit` shows the fit.\n"
    )
    plot_demo(comparisons, plot)
    click.echo(f"picture: {plot}\nmeasurement: {reference.source}", err=True)
