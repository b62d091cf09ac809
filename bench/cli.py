"""`servecast bench` and `servecast doctor`: parse, call the library, print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import click

from sim.build import ScenarioSource
from sim.cli.options import ScenarioOptions, scenario_options
from sim.errors import BadInput, NotComparable

DEFAULT_DIR = Path("servecast-results")


_LAUNCH_FLAGS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--launch",
        type=click.Choice(["docker", "process", "url"]),
        help="How the engine is started [default: url with --base-url, docker with an image, else process].",
    ),
    click.option("--base-url", metavar="URL", help="A server that is running already."),
    click.option("--image", metavar="IMAGE", help="Container image with tag."),
    click.option("--program", metavar="WORDS", help="Run this in place of `vllm`, e.g. a path into a venv."),
    click.option("--probe", is_flag=True, help="Note every scheduling step (vLLM), with its cost."),
    click.option(
        "--network",
        type=click.Choice(["bridge", "host"]),
        default="bridge",
        show_default=True,
        help="Docker: publish the port, or share the host's network.",
    ),
    click.option("--shm-size", metavar="SIZE", help="Docker: /dev/shm, e.g. 1g [default: the host's]."),
    click.option("--gpus", metavar="all|none|0,1", help="Docker: GPUs to hand on [default: all there are]."),
    click.option("--mount", "mounts", multiple=True, metavar="DIR:DIR", help="Docker: one more, read-only."),
    click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Engine environment; repeatable."),
    click.option(
        "--stall-timeout",
        metavar="SECONDS",
        default="900",
        show_default=True,
        help="Give up a start in which nothing moves for so long.",
    ),
    click.option(
        "--stop-timeout",
        metavar="SECONDS",
        default="20",
        show_default=True,
        help="From asking the engine to go to killing it.",
    ),
)


def launch_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how an engine is started; `launch_options` reads them."""
    for option in reversed(_LAUNCH_FLAGS):
        function = option(function)
    return function


@click.command()
@scenario_options
@launch_flags
@click.option(
    "--concurrency",
    "--max-concurrency",
    "concurrency",
    metavar="N,N,...",
    help="Closed-loop sweep: requests in flight.",
)
@click.option("--request-rate", metavar="R,R,...", help="Open-loop sweep: requests/s, or inf.")
@click.option("--num-prompts", metavar="N", help="Per point [default: max(20, 2 x concurrency) in sweeps].")
@click.option("--num-warmups", metavar="N", help="Requests before each point, over its prompt shapes.")
@click.option(
    "--result-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIR,
    show_default=True,
    help="Where results go.",
)
@click.option("--plots", is_flag=True, help="Draw a picture of every point beside its result.")
@click.option("--resume", is_flag=True, help="Keep finished points of an earlier run in --result-dir.")
@click.option("--force", is_flag=True, help="Overwrite results, and run in spite of what doctor finds.")
@click.option(
    "--request-timeout",
    metavar="SECONDS",
    help="Limit of one request, queue included [default: 3600, and 300 without a byte between tokens].",
)
def bench(inputs: ScenarioOptions, **given: Any) -> None:
    """Run the scenario on the real engine and judge the result.

    Several scenarios run one after the other, each alone on the host. Exit status 3: a run was INVALID.
    """
    from sim.interrupts import as_keyboard_interrupt

    with as_keyboard_interrupt():
        try:
            statuses = _bench(inputs, given)
        except KeyboardInterrupt:
            click.echo(f"interrupted; what was measured is in {given['result_dir']}", err=True)
            sys.exit(130)
    if "INVALID" in statuses:
        raise NotComparable(f"{statuses.count('INVALID')} of {len(statuses)} runs are INVALID")


def _bench(inputs: ScenarioOptions, given: dict[str, Any]) -> list[str]:
    from bench.alignment import align, table
    from bench.files import check_folder
    from bench.live_table import LiveTable
    from bench.payload import Timeouts
    from bench.run import BenchOptions
    from bench.serial import points_for, refuse_overwrite, run_serial, subjects_of, write_alignment
    from bench.telemetry import open_gpus

    gpus = open_gpus()
    launch = launch_options(given)
    subjects = subjects_of(sources_of(inputs, gpus))
    concurrencies = [_whole("--concurrency", text) for text in _split(given["concurrency"])]
    rates = [_rate(text) for text in _split(given["request_rate"])]
    num_prompts = None if given["num_prompts"] is None else _whole("--num-prompts", given["num_prompts"])
    if given["num_warmups"] is not None:
        warmups = _whole("--num-warmups", given["num_warmups"], least=0)
        subjects = [
            replace(
                s, scenario=replace(s.scenario, workload=replace(s.scenario.workload, num_warmups=warmups))
            )
            for s in subjects
        ]
    plans = [
        (
            subject,
            points_for(subject, concurrencies=concurrencies, rates=rates, num_prompts=num_prompts),
        )
        for subject in subjects
    ]
    folder: Path = given["result_dir"]
    check_folder(folder)
    if not given["resume"] and not given["force"]:
        refuse_overwrite(plans, folder)
    if not given["force"]:
        preflight(subjects, launch, folder, gpus)
    for first, second in pairwise(subjects):
        lines = table(align(first.scenario, second.scenario))
        _print_table(("knob", first.stem, second.stem, ""), lines)
    limit: str | None = given["request_timeout"]
    timeouts = Timeouts() if limit is None else Timeouts.of_request(_seconds("--request-timeout", limit))
    options = BenchOptions(launch, folder, resume=given["resume"], timeouts=timeouts, plots=given["plots"])
    with LiveTable() as reporter:
        outcomes = run_serial(plans, options, gpus, reporter)
    write_alignment(subjects, folder)
    results = [result for results in outcomes for result in results]
    _print_results(plans, outcomes)
    return [result.verdict.status for result in results]


def sources_of(inputs: ScenarioOptions, gpus: Any) -> list[ScenarioSource]:
    """The scenarios; a GPU that nobody named is the one in this host."""
    try:
        return inputs.sources()
    except BadInput as error:
        if error.field != "--gpu" or inputs.gpu is not None or gpus is None:
            raise
        return replace(inputs, gpu=gpus.info()[0].name).sources()


def launch_options(given: dict[str, Any]) -> Any:
    """`bench.launch.LaunchOptions` from what `launch_flags` were given.

    Raises:
        BadInput: names the flag.
    """
    from bench.launch import LaunchOptions, split_program

    gpus: str | None = given["gpus"]
    chosen: Literal["all", "none"] | tuple[str, ...] | None = None
    if gpus in ("all", "none"):
        chosen = cast(Literal["all", "none"], gpus)
    elif gpus is not None:
        chosen = tuple(_split(gpus))
    return LaunchOptions(
        kind=given["launch"],
        base_url=given["base_url"],
        image=given["image"],
        program=None if given["program"] is None else split_program(given["program"]),
        env=dict(_pair("--env", text) for text in given["env"]),
        mounts=tuple(_mount(text) for text in given["mounts"]),
        network=given["network"],
        shm_bytes=None if given["shm_size"] is None else _size(given["shm_size"]),
        gpus=chosen,
        probe=given["probe"],
        stall_timeout=_seconds("--stall-timeout", given["stall_timeout"]),
        stop_timeout=_seconds("--stop-timeout", given["stop_timeout"]),
    )


def preflight(subjects: Sequence[Any], launch: Any, folder: Path, gpus: Any) -> None:
    """Refuse to start what the host cannot run.

    Raises:
        EngineFailed: a check failed.
    """
    from bench.doctor import Subject, examine
    from bench.failures import EngineFailed, Failure
    from bench.launch import choose_kind

    for subject in subjects:
        kind = choose_kind(subject.source, launch)
        if kind == "url":
            continue
        image = (launch.image or subject.source.serve.image) if kind == "docker" else None
        checks = examine(
            Subject(
                model=None if launch.mounts else subject.source.model,
                image=image,
                weights=not _is_dummy(subject.source),
                result_dir=folder,
                env={**subject.scenario.engine.env, **launch.env},
            ),
            gpus=gpus,
            with_docker=kind == "docker",
        )
        for check in checks:
            if check.status == "fail":
                raise EngineFailed(Failure(check.name.replace(" ", "_"), "launch", check.detail, check.fix))
            if check.status == "warn":
                click.echo(f"doctor: {check.name}: {check.detail}; {check.fix}", err=True)


def _is_dummy(source: ScenarioSource) -> bool:
    given = source.serve.get("--load-format")
    return given is not None and given.text == "dummy"


def _print_results(plans: Sequence[tuple[Any, Sequence[Any]]], outcomes: Sequence[Sequence[Any]]) -> None:
    from bench.live_table import summary_cells
    from sim.output.report import render

    results = [
        (subject.stem, point.label, result)
        for (subject, points), found in zip(plans, outcomes, strict=True)
        for point, result in zip(points, found, strict=False)
    ]
    if len(results) == 1:
        click.echo(render(results[0][2], colour=sys.stdout.isatty()))
        return
    rows = [cells[:4] + cells[5:] for cells in (summary_cells(*result) for result in results)]
    head = ("engine", "load", "done", "failed", "req/s", "tok/s", "TTFT ms", "TPOT ms", "verdict")
    _print_table(head, rows)
    for stem, label, result in results:
        for reason in result.verdict.reasons:
            click.echo(f"{stem} {label}: {result.verdict.status}: {reason.subject}: {reason.text}")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        line = "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


@click.command()
@click.option("--model", metavar="NAME|PATH", help="Model that is to be served: is it complete?")
@click.option("--image", metavar="IMAGE", help="Container image: does it fit GPU and driver?")
@click.option("--dummy-weights", is_flag=True, help="The model needs no weights.")
@click.option(
    "--result-dir", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_DIR, show_default=True
)
def doctor(model: str | None, image: str | None, dummy_weights: bool, result_dir: Path) -> None:
    """Check this host before a bench run. Exit status 1: something would fail."""
    from bench.doctor import Subject, examine

    checks = examine(Subject(model=model, image=image, weights=not dummy_weights, result_dir=result_dir))
    for check in checks:
        click.echo(
            f"{check.status:8}{check.name}: {check.detail}" + (f"\n        {check.fix}" if check.fix else "")
        )
    if any(check.status == "fail" for check in checks):
        sys.exit(1)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _whole(flag: str, text: str, least: int = 1) -> int:
    if not text.isdigit() or int(text) < least:
        raise BadInput(flag, text, f"must be a whole number of at least {least}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise BadInput("--request-rate", text, "must be a number above 0, or inf")
    return rate


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise BadInput(flag, text, "must be a number of seconds above 0")
    return seconds


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadInput(flag, text, "must be NAME=VALUE")
    return name, value


def _mount(text: str) -> tuple[Path, str]:
    source, colon, target = text.rpartition(":")
    if not colon or not target.startswith("/"):
        raise BadInput("--mount", text, "must be FOLDER:/PATH/IN/THE/CONTAINER")
    folder = Path(source).expanduser()
    if not folder.exists():
        raise BadInput("--mount", source, "no such folder")
    return folder, target


def _size(text: str) -> int:
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    number = text.strip().lower().removesuffix("ib").rstrip("bkmg")
    unit = text.strip().lower().removesuffix("ib")[len(number) :]
    if not number.isdigit() or unit not in units or int(number) < 1:
        raise BadInput("--shm-size", text, "must be a size such as 256m or 1g")
    return int(number) * units[unit]
