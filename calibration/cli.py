"""`servecast calibrate` and `validate`: from measured minutes to a profile, and how right fits are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bench.cli import launch_flags
from sim.cli.options import ScenarioOptions, given_words, scenario_options
from sim.cli.outputs import check_outputs
from sim.errors import BadInput
from sim.secrets import without_secrets

if TYPE_CHECKING:
    from bench.launch import LaunchOptions
    from bench.session import Subject
    from sim.profile import Profile

DEFAULT_DIR = Path("servecast-calibration")
# What `calibrate --plan` does not hand on to the runs that it prints.
OWN = ("show_plan", "measured", "out", "profile", "budget", "result_dir", "resume", "bench", "sets", "seed")


@click.command()
@scenario_options
@click.option("--plan", "show_plan", is_flag=True, help="Print the runs that are needed, and start nothing.")
@click.option(
    "--from",
    "measured",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Fit what is measured already: results, printed reports, step files; repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where the profile goes.")
@click.option("--profile", type=click.Path(path_type=Path), help="A profile to complete: only what it lacks.")
@click.option(
    "--budget",
    metavar="SECONDS",
    default="300",
    show_default=True,
    help="Seconds of load.",
)
@click.option(
    "--result-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIR,
    show_default=True,
    help="Where the runs' results go.",
)
@click.option("--resume", is_flag=True, help="Keep finished runs of an earlier try in --result-dir.")
@click.option("--force", is_flag=True, help="Overwrite results, and run in spite of what doctor finds.")
@launch_flags
def calibrate(
    inputs: ScenarioOptions,
    show_plan: bool,
    measured: tuple[Path, ...],
    out: Path | None,
    profile: Path | None,
    budget: str,
    result_dir: Path,
    resume: bool,
    force: bool,
    **given: Any,
) -> None:
    """Measure what a profile needs, fit it, check it on a run that was held out.

    \b
    servecast calibrate SCENARIO.yaml --plan                    what would be measured, and for how long
    servecast calibrate SCENARIO.yaml --out PROFILE.json        launch, measure, fit, check, write
    servecast calibrate --from RESULT.json --out PROFILE.json   fit what is measured already
    """
    if measured:
        # `--from A B` is natural where a shell spells out `result-*.json`.
        more = tuple(file for file in inputs.files if not file.endswith((".yaml", ".yml")))
        measured = (*measured, *map(Path, more))
        inputs = replace(inputs, files=tuple(file for file in inputs.files if file not in more))
    if measured and show_plan:
        raise BadInput("--plan", None, "does not go with --from: what is measured needs no plan")
    if measured:
        _refuse_unused(inputs, given)
        fit_measured(inputs, measured, out, profile)
        return
    if show_plan:
        from bench.cli import launch_options

        launch = launch_options(given)
        print_plan(inputs, budget, profile, result_dir, launch)
        return
    if out is None:
        raise BadInput(
            "--out", None, "say where the profile is to go, or --plan to see what would be measured"
        )
    measure_and_fit(inputs, out, profile, seconds("--budget", budget), result_dir, resume, force, given)


def _refuse_unused(inputs: ScenarioOptions, given: Mapping[str, Any]) -> None:
    """Options that --from has no use for: those of a launch, and without a scenario those that change one.

    Raises:
        BadInput: names the first.
    """
    context = click.get_current_context()
    launch = {"budget", "result_dir", "resume", "force", *given}
    scenario = {field for field in ScenarioOptions.__dataclass_fields__ if field not in ("files", "serve")}
    for param in context.command.params:
        name = param.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if name in launch:
            raise BadInput(param.opts[0], None, "starts or loads an engine; --from fits what is measured")
        if name in scenario and not inputs.files and not inputs.serve:
            hint = "changes a scenario, and the results bring their own: give a scenario file or --serve too"
            raise BadInput(param.opts[0], None, hint)


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder with one subfolder per published data set.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Only this subfolder; repeatable.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Data sets at a time.")
def validate(data: Path, only: tuple[str, ...], jobs: int) -> None:
    """Fit on parts of published measurements, predict the rest, and hold every error to its bound.

    Exits with status 1 if a bound is missed. Subfolders that are not known are named and skipped.
    """
    from calibration.validate.run import validate_folder
    from calibration.validate.table import passed, render

    found = validate_folder(data, jobs, only)
    outcomes = list(found.outcomes.values())
    click.echo(render(outcomes, pooled=found.whole))
    if found.skipped:
        click.echo(f"skipped, not known here: {', '.join(found.skipped)}")
    sys.exit(0 if passed(outcomes, pooled=found.whole) else 1)


def fit_measured(
    inputs: ScenarioOptions, measured: tuple[Path, ...], out: Path | None, profile: Path | None
) -> None:
    """Fit results that are there."""
    from calibration.again import again_text, all_again
    from calibration.fit import fit
    from calibration.from_files import evidence_files
    from calibration.plan_run import NOTHING_HELD_OUT, coefficients_text, doubts_text, prior_of
    from calibration.profile_writing import check_new, facts_of, profile_content
    from sim.cli.progress import ShownCount
    from sim.profile import write_profile

    if out is None:
        raise BadInput("--out", None, "say where the profile is to go")
    sources = [inputs.source()] if inputs.files or inputs.serve else []
    check_outputs({"--out": out}, [*inputs.reads(sources), *measured, profile])
    scenario = sources[0].build() if sources else None
    evidence = evidence_files(measured, scenario)
    first, held = evidence[0].scenario, _profile(profile)
    check_new(evidence, held)
    with ShownCount() as count:
        found = fit(evidence, prior_of(held, first), on_simulation=count)
    click.echo(doubts_text(evidence), nl=False)
    click.echo(coefficients_text(found))
    again = all_again(evidence, found.efficiencies)
    if again:
        click.echo(again_text(again))
    click.echo(NOTHING_HELD_OUT)
    write_profile(
        profile_content(found, first, evidence, again=again, facts=facts_of(evidence), before=held), out
    )
    click.echo(f"profile: {out}", err=True)


def print_plan(
    inputs: ScenarioOptions, budget: str, profile: Path | None, folder: Path, launch: LaunchOptions
) -> None:
    """Print the plan as a table with the commands of its runs."""
    from bench.launch import choose_kind
    from calibration.design import plan_text
    from calibration.plan_run import plan_of
    from sim.command_text import serve_text

    source = inputs.source()
    choose_kind(source, launch)
    scenario = source.build()
    plan = plan_of(scenario, seconds("--budget", budget), _profile(profile))
    context = click.get_current_context()
    words = given_words(context, OWN)
    if "-" in inputs.serve:  # it can be read once
        words[words.index("--serve") + 1] = serve_text(source)
    for setting in inputs.sets:  # the load is each run's own: one that was set would replace it
        if source.with_settings([setting]).bench is source.bench:
            words += ["--set", setting]
    stem = "calibration"
    if context.get_parameter_source("result_dir") is ParameterSource.COMMANDLINE:
        stem = str(folder / stem)
    click.echo(plan_text(plan, without_secrets(shlex.join(["servecast", "bench", *words])), stem))
    idle = [f"--{name}" for name in ("out", "resume") if context.params[name]]
    if idle:
        click.echo(f"{' and '.join(idle)}: for the calibration itself; --plan starts nothing", err=True)


def measure_and_fit(
    inputs: ScenarioOptions,
    out: Path,
    profile: Path | None,
    budget: float,
    folder: Path,
    resume: bool,
    force: bool,
    given: dict[str, Any],
) -> None:
    """Launch, measure, fit, check, write."""
    from bench.cli import launch_options, preflight, sources_of
    from bench.files import check_folder
    from bench.launch import choose_kind
    from bench.live_table import LiveTable
    from bench.run import BenchOptions
    from bench.serial import subjects_of
    from bench.telemetry import open_gpus
    from calibration.plan_run import plan_of, run, save, summary
    from calibration.profile_writing import check_files
    from sim.interrupts import as_keyboard_interrupt

    gpus = open_gpus()
    sources = sources_of(inputs, gpus)
    check_outputs({"--out": out}, [*inputs.reads(sources), profile])
    subjects = subjects_of(sources)
    if len(subjects) != 1:
        raise BadInput("SCENARIO", None, f"takes one scenario, {len(subjects)} were given")
    (subject,) = subjects
    held = _profile(profile)
    plan = plan_of(subject.scenario, budget, held)
    options = BenchOptions(launch_options(given), folder, resume=resume)
    check_folder(folder)
    if not resume and not force:
        _refuse_overwrite(subject, folder)
    if resume:
        check_files("--result-dir", sorted(folder.glob(f"{subject.stem}*.json*")), held)
    if not force:
        preflight(subjects, options.launch, folder, gpus)
    click.echo(
        f"{len(plan.runs)} runs, about {plan.seconds:.0f} s of load beside the engine's start", err=True
    )
    for note in plan.notes:
        click.echo(f"{note.kind}: {note.subject}: {note.text}", err=True)
    try:
        with as_keyboard_interrupt(), LiveTable() as reporter:
            done = run(subject, plan, options, gpus, reporter, held)
    except KeyboardInterrupt:
        click.echo(f"interrupted; what was measured is in {folder}, --resume goes on from it", err=True)
        sys.exit(130)
    click.echo(summary(done))
    # A server that was running before may run anywhere.
    here = gpus if choose_kind(subject.source, options.launch) != "url" else None
    save(done, out, None if here is None else here.info()[0].driver, held)
    click.echo(f"profile: {out}", err=True)


def _refuse_overwrite(subject: Subject, folder: Path) -> None:
    there = sorted(folder.glob(f"{subject.stem}-*.json"))
    if there:
        hint = f"{there[0].name} is there: --resume keeps finished runs, --force measures all again"
        raise BadInput("--result-dir", str(folder), hint)


def _profile(path: Path | None) -> Profile | None:
    from sim.profile import load_profile

    return None if path is None else load_profile(path)


def seconds(flag: str, text: str) -> float:
    """Read a number of seconds above 0.

    Raises:
        BadInput: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise BadInput(flag, text, "must be a number of seconds above 0")
    return value
