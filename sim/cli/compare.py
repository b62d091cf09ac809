"""`servecast compare`: a prediction beside measured results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from sim.cli.outputs import check_outputs
from sim.comparison.text import format_comparison, percent, undecided
from sim.errors import BadInput, ServecastError
from sim.provenance import Note

if TYPE_CHECKING:
    from sim.comparison.compare import Comparison
    from sim.results import BenchResult
    from sim.scenario import Scenario

__all__ = ["compare", "format_comparison", "parse_percent"]


@click.command()
@click.argument("prediction", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument(
    "measured", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Scenario: calibration profile to predict with.",
)
@click.option("--replay", is_flag=True, help="Scenario: send the recorded requests as they were sent.")
@click.option(
    "--window",
    type=click.Choice(["whole", "steady"]),
    default="whole",
    show_default=True,
    help="steady: leave out filling up and draining, on both sides alike.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw errors, CDFs and residuals to this file.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the comparison as JSON.")
@click.option(
    "--margin", metavar="PERCENT", default="10%", show_default=True, help="Of the equivalence test."
)
@click.option(
    "--fail-above",
    metavar="PERCENT",
    help="Exit 1 if a deciding figure is off by more, e.g. 5%, or none can decide.",
)
@click.option(
    "--allow-noise", is_flag=True, help="Do not fail what twice the measured repeat noise explains."
)
@click.option("--force", is_flag=True, help="Compare even what is not comparable.")
def compare(
    prediction: Path,
    measured: tuple[Path, ...],
    profile: Path | None,
    replay: bool,
    window: Literal["whole", "steady"],
    plot: Path | None,
    json_to: str | None,
    margin: str,
    fail_above: str | None,
    allow_noise: bool,
    force: bool,
) -> None:
    """Set PREDICTION (a result of predict --json, or a scenario file) beside MEASURED results.

    MEASURED are result files of `vllm bench serve` or other clients, or its printed report in a text file.
    Several of the same load are repeats: their spread is the noise that errors are held against. A
    scenario is predicted under each load that was measured. Exit status 1: --fail-above; 3: not comparable.
    """
    from sim.comparison.compare import compare as compare_results
    from sim.comparison.compare import exceeds
    from sim.comparison.loads import grouped, load_name
    from sim.results_io.files import read_results

    threshold = parse_percent("--fail-above", fail_above)
    equivalent = parse_percent("--margin", margin)
    if not equivalent:
        raise BadInput("--margin", margin, "must be above 0: no two means are equivalent within nothing")
    places = {"--json": json_to, "--plot": plot}
    check_outputs(places, [prediction, *measured, profile])
    predictions = _Predictions(prediction, profile, replay)
    check_outputs(places, [predictions.dataset])
    if any(path.samefile(prediction) for path in measured):
        raise BadInput("MEASURED", str(prediction), "is PREDICTION itself; give a measured run of that load")
    runs = [(str(path), predictions.named(result)) for path in measured for result in read_results(path)]
    groups = grouped(runs)
    comparisons: list[Comparison] = []
    for group in groups:
        name, first = group[0]
        predicted, capacity = predictions.of(first, Path(name))
        comparison = compare_results(
            predicted,
            [run for _, run in group],
            force=force,
            margin=equivalent,
            window=window,
            capacities=(capacity, None),
            name=name,
        )
        comparisons.append(comparison)
        if json_to != "-":
            files = Path(name).name + repeats_text(len(group) - 1)
            beside = "another prediction" if first.origin == "predicted" else first.tool
            click.echo(f"{files} ({load_name(first)}): predicted beside {beside}")
            click.echo(format_comparison(comparison, threshold, allow_noise=allow_noise))
    if json_to is not None:
        _write_json(comparisons, threshold, allow_noise, json_to)
    if plot is not None:
        from sim.comparison.pictures import plot_comparison

        plot_comparison(comparisons, plot)
        click.echo(f"picture: {plot}", err=True)
    if threshold is None:
        if json_to != "-":
            click.echo("no gate: --fail-above PERCENT makes the exit status judge the errors", err=True)
        return
    over = exceeds(comparisons, threshold, allow_noise=allow_noise)
    unknown = undecided(comparisons, threshold, allow_noise=allow_noise)
    if over:
        click.echo(f"above {percent(threshold)}: {', '.join(over)}", err=True)
    if unknown:
        click.echo(f"undecided at {percent(threshold)}: {'; '.join(unknown)}", err=True)
    if over or unknown:
        raise click.exceptions.Exit(1)


class _Predictions:
    """What PREDICTION says of each measured load: read from its file, or simulated."""

    def __init__(self, source: Path, profile: Path | None, replay: bool) -> None:
        from sim.results_io.files import read_results

        self._profile, self._replay = profile, replay
        self._scenario: Scenario | None = None
        self._results: list[BenchResult] = []
        if source.suffix in (".yaml", ".yml"):
            from sim.build import build_scenario

            self._scenario = build_scenario(file=source)
            return
        if replay or profile is not None:
            flag = "--replay" if replay else "--profile"
            raise BadInput(flag, None, "needs a scenario file: a prediction is finished")
        self._results = read_results(source)
        if any(result.origin != "predicted" for result in self._results):
            hint = "is a measured result; pass a prediction or a scenario file first"
            raise BadInput("PREDICTION", str(source), hint)

    @property
    def dataset(self) -> str | None:
        """The file that the scenario's requests come from."""
        from sim.workload.spec import FileDataset

        dataset = None if self._scenario is None else self._scenario.workload.dataset
        return dataset.path if isinstance(dataset, FileDataset) else None

    def named(self, measured: BenchResult) -> BenchResult:
        """A measured run under the model's own name, where the scenario tells the served one."""
        from sim.comparison.loads import named

        return measured if self._scenario is None else named(measured, self._scenario)

    def of(self, measured: BenchResult, path: Path) -> tuple[BenchResult, float | None]:
        """The prediction of a load, and the predicted capacity [requests/s] where that can be told."""
        from sim.comparison.loads import matching

        if self._scenario is None:
            return matching(self._results, measured), None
        from dataclasses import replace

        from sim.cli.predict import simulate_with
        from sim.comparison.figures import METRICS, PERCENTILES
        from sim.comparison.loads import scenario_for
        from sim.flood import at_once

        scenario = scenario_for(self._scenario, measured, path if self._replay else None)
        # Every statistic that is shown needs an interval of its own, whatever the client was to print.
        spec = replace(scenario.workload, percentiles=PERCENTILES, percentile_metrics=METRICS)
        scenario = replace(scenario, workload=spec)
        predicted = simulate_with(scenario, self._profile, draws=None).result
        flood = at_once(scenario.workload)
        if flood is None:
            return predicted, None
        try:
            flooded = simulate_with(replace(scenario, workload=flood), self._profile).result
        except ServecastError as error:  # everything at once is another load than the one that is compared
            note = Note("warning", "capacity", f"not predicted: {error}")
            return replace(predicted, notes=(*predicted.notes, note)), None
        return predicted, flooded.extra["regime"]["sustainable_rate"]


def repeats_text(count: int) -> str:
    """What follows the name of the first of several runs of a load."""
    return f" and {count} repeat{'s' if count > 1 else ''}" if count else ""


def _write_json(
    comparisons: list[Comparison], threshold: float | None, allow_noise: bool, json_to: str
) -> None:
    from sim.comparison.text import comparison_json
    from sim.results_io.atomic import write_text
    from sim.results_io.writing import plain

    document = plain([comparison_json(c, threshold, allow_noise=allow_noise) for c in comparisons])
    text = json.dumps(document, allow_nan=False, indent=1) + "\n"
    if json_to == "-":
        click.echo(text, nl=False)
    else:
        write_text(json_to, text, "--json")
        click.echo(f"comparison: {json_to}", err=True)


def parse_percent(field: str, text: str | None) -> float | None:
    """Read "5%" as a share.

    Raises:
        BadInput: anything else; also a bare number, which may mean a share or per cent.
    """
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(field, text, "give a share such as 5%")
    if value and not text.endswith("%"):
        raise BadInput(field, text, f"may be {value:.6g}% or {100 * value:.6g}%: write the percent sign")
    return value
