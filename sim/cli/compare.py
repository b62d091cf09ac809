"""`servecast compare`: a prediction beside measured results."""

from __future__ import annotations

from pathlib import Path

import click

from sim.compare import Comparison, MetricRow, exceeds
from sim.compare import compare as compare_results
from sim.errors import BadInput
from sim.results import BenchResult


def load_prediction(source: Path, profile: Path | None) -> BenchResult:
    """Read a prediction, or make it from a scenario file."""
    from sim.resultfile import read_result

    if source.suffix in (".yaml", ".yml"):
        from sim.build import build_scenario
        from sim.cli.predict import simulate_with

        return simulate_with(build_scenario(file=source), profile).result
    result = read_result(source)
    if result.origin != "predicted":
        raise BadInput(
            "PREDICTION", str(source), "is a measured result; pass a prediction or a scenario file first"
        )
    return result


def format_value(value: float | None) -> str:
    """A figure with four significant digits and thousands separators."""
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 10_000 or value == int(value) else f"{value:,.4g}"


def format_row(row: MetricRow) -> str:
    """One line of the table."""
    error = "" if row.error is None else f"{row.error:+8.1%}"
    return f"  {row.key:<24}{format_value(row.predicted):>14}{format_value(row.measured):>14}{error:>10}"


def format_comparison(comparison: Comparison) -> str:
    """A comparison as a table, worst figure last."""
    lines = [
        f"  {'figure':<24}{'predicted':>14}{'measured':>14}{'error':>10}",
        *(format_row(row) for row in comparison.rows),
    ]
    worst = comparison.worst
    if worst is not None:
        lines.append(f"  worst: {worst.key} {worst.error:+.1%}")
    lines += [f"  {note.kind}: {note.text}" for note in comparison.notes]
    return "\n".join(lines)


@click.command()
@click.argument("prediction", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument(
    "measured", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option("--profile", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--plot", type=click.Path(path_type=Path), help="Draw errors and CDF overlays to this file.")
@click.option("--fail-above", metavar="PERCENT", help="Exit 1 if any figure is off by more, e.g. 5%.")
@click.option("--force", is_flag=True, help="Compare even what is not comparable.")
def compare(
    prediction: Path,
    measured: tuple[Path, ...],
    profile: Path | None,
    plot: Path | None,
    fail_above: str | None,
    force: bool,
) -> None:
    """Set PREDICTION (a result of predict --json, or a scenario file) beside MEASURED results.

    MEASURED are result files of `vllm bench serve` or other clients, or its printed report in a text file.
    """
    from sim.resultfile import read_result

    threshold = parse_percent("--fail-above", fail_above)
    predicted = load_prediction(prediction, profile)
    comparisons = []
    for path in measured:
        comparisons.append(compare_results(predicted, read_result(path), force=force))
        click.echo(f"{path.name}: predicted beside {comparisons[-1].measured.tool}")
        click.echo(format_comparison(comparisons[-1]))
    if plot is not None:
        from sim.plots import plot_comparison

        plot_comparison(comparisons, plot)
        click.echo(f"picture: {plot}", err=True)
    if threshold is not None and (over := exceeds(comparisons, threshold)):
        click.echo(f"above {threshold:.3g}: {', '.join(over)}", err=True)
        raise click.exceptions.Exit(1)


def parse_percent(field: str, text: str | None) -> float | None:
    """Read "5%" or "0.05" as a share. Raises BadInput for anything else or a negative number."""
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(field, text, "give a share such as 5% or 0.05")
    return value
