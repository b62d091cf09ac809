"""`servecast predict`: what the engine will do under the load, before anything is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.cli.outputs import check_outputs
from sim.errors import BadInput
from sim.provenance import Note
from sim.results_io.atomic import whole_file
from sim.scenario import Scenario

if TYPE_CHECKING:
    from sim.simulate import SimResult
    from sim.steptime.base import StepTimeModel


WORTH_COMPILED = 20_000  # requests that take longer than loading the compiled kernels does


def step_time_from(profile: Path | None, scenario: Scenario) -> tuple[StepTimeModel | None, tuple[Note, ...]]:
    """The step-time model of a calibration profile and what to know of it; None without a profile.

    Raises:
        BadInput: the file is not a profile, or says nothing about this scenario.
    """
    if profile is None:
        return None, ()
    from sim.profile import load_profile

    return load_profile(profile).step_time(scenario)


def simulate_with(
    scenario: Scenario,
    profile: Path | None,
    steps: Callable[[dict[str, Any]], None] | None = None,
    leap: bool = True,
    draws: int | None = 0,
) -> SimResult:
    """Simulate a scenario with the profile's step times if one is given; see `sim.forecast.forecast`."""
    with one_blas_thread():
        from sim.forecast import forecast

    loaded = None
    if profile is not None:
        from sim.profile import load_profile

        loaded = load_profile(profile)
    large = scenario.workload.num_prompts >= WORTH_COMPILED
    return forecast(
        scenario,
        loaded,
        draws=draws,
        steps=steps,
        leap=leap,
        fast=None if large else False,
        copies=not large,  # nor are kernels loaded twice, or large loads held twice
    )


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """For the import of numpy: its OpenBLAS would start a thread per core, and let them spin, for nothing."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def steps_file(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A sink that writes one JSON line a step; the file appears only once it is complete.

    Raises:
        BadInput: the place cannot be written to.
    """
    if path is None:
        yield None
        return
    with whole_file(path, "--steps") as file:

        def write(step: dict[str, Any]) -> None:
            file.write(json.dumps(step, separators=(",", ":")) + "\n")

        yield write


@click.command()
@scenario_options
@click.option(
    "--concurrency",
    metavar="N,N,…",
    help="Predict at each of these concurrencies (prompts grow with it unless --bench names their number).",
)
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the result with `vllm bench serve`'s keys.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the result (.png, .svg or .pdf).")
@click.option("--steps", type=click.Path(path_type=Path), help="Write each step's batch as JSONL.")
@click.option(
    "--draws",
    type=click.IntRange(0, 200),
    metavar="N",
    help="Simulations behind the intervals of --profile [default: 8]; 0 leaves intervals out.",
)
@click.option("--no-leap", is_flag=True, help="Take every step one by one: slower, same result.")
def predict(
    inputs: ScenarioOptions,
    concurrency: str | None,
    profile: Path | None,
    json_to: str | None,
    plot: Path | None,
    steps: Path | None,
    draws: int | None,
    no_leap: bool,
) -> None:
    """Predict TTFT, TPOT, ITL, E2E, throughput, KV use and preemptions of SCENARIO.yaml or of two commands.

    \b
    servecast predict --gpu H100 \\
      --serve 'vllm serve Qwen/Qwen3-14B --max-num-seqs 256' \\
      --bench 'vllm bench serve --dataset-name random --random-input-len 1024 --request-rate 4'

    Several scenarios (files, or several --serve) come out side by side.
    """
    if draws and profile is None:
        raise BadInput("--draws", draws, "belongs to --profile: without one there is nothing to draw from")
    sources = inputs.sources()
    reads = [*inputs.reads(sources), profile]
    scenarios = [source.build() for source in sources]
    if len(scenarios) > 1 or concurrency is not None:
        if steps is not None:
            raise BadInput("--steps", str(steps), "writes one run; give one scenario without --concurrency")
        check_outputs({"--json": json_to, "--plot": plot}, reads)
        scale = [not source.bench.names("--num-prompts") for source in sources]
        predict_side_by_side(scenarios, scale, concurrency, profile, json_to, plot, not no_leap, draws)
        return
    check_outputs({"--json": json_to, "--plot": plot, "--steps": steps}, reads)
    with steps_file(steps) as sink:
        outcome = simulate_with(scenarios[0], profile, sink, leap=not no_leap, draws=draws)
    write_outcome(outcome, json_to, plot)


def write_outcome(outcome: SimResult, json_to: str | None, plot: Path | None) -> None:
    """Print the report (unless the JSON goes to standard output), write JSON and picture."""
    import sys

    from sim.results_io.writing import result_text, write_result

    result = outcome.result
    if json_to == "-":
        click.echo(result_text(result).encode(), nl=False)  # text would be searched for colours
    else:
        from sim.output.report import render

        click.echo(render(result, colour=sys.stdout.isatty()))
    if json_to not in (None, "-"):
        write_result(result, json_to)
        click.echo(f"result: {json_to}", err=True)
    if plot is not None:
        from sim.output.plots import plot_result

        plot_result(result, plot)
        click.echo(f"picture: {plot}", err=True)


def predict_side_by_side(
    scenarios: list[Scenario],
    scale_prompts: list[bool],
    concurrency: str | None,
    profile: Path | None,
    json_to: str | None,
    plot: Path | None,
    leap: bool = True,
    draws: int | None = None,
) -> None:
    """Predict several scenarios, each at several concurrencies, as one table and one picture."""
    from sim.output.sidebyside import labels, parse_levels, render_curves, sweep
    from sim.results_io.atomic import write_text
    from sim.results_io.writing import result_text

    levels = parse_levels(concurrency)
    curves = [
        sweep(
            scenario,
            levels,
            lambda s: simulate_with(s, profile, leap=leap, draws=draws).result,
            name,
            scale_prompts=scale,
        )
        for scenario, name, scale in zip(scenarios, labels(scenarios), scale_prompts, strict=True)
    ]
    results = [point.result for curve in curves for point in curve.points]
    text = "".join(result_text(result, detailed=False) for result in results)  # JSON lines
    if json_to == "-":
        click.echo(text, nl=False)
    else:
        click.echo(render_curves(curves))
    if json_to not in (None, "-"):
        write_text(json_to, text, "--json")
        click.echo(f"results: {json_to}", err=True)
    if plot is not None:
        from sim.output.plots import plot_curves

        plot_curves(curves, plot)
        click.echo(f"picture: {plot}", err=True)
