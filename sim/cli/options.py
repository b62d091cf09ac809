"""The options that describe a scenario, the same for every command that takes one.

@click.command()
@scenario_options
def predict(inputs: ScenarioOptions, ...) -> None:
    for scenario in inputs.scenarios(): ...
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sim.build import ScenarioSource, read_source
from sim.errors import BadInput
from sim.paths import file_text
from sim.scenario import Scenario
from sim.workload.spec import FileDataset


@dataclass(frozen=True, slots=True)
class ScenarioOptions:
    """What the user gave: scenario files and overriding options, not yet read."""

    files: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    bench: str | None = None
    gpu: str | None = None
    gpu_count: int | None = None
    model: str | None = None
    engine_version: str | None = None
    kv_cache_tokens: int | None = None
    num_gpu_blocks: int | None = None
    sets: tuple[str, ...] = ()
    seed: int | None = None

    def sources(self) -> list[ScenarioSource]:
        """One source per file; without files one per `--serve`. A single `--serve` overrides the files'.

        Raises:
            BadInput: neither a file nor a command, or anything in them that cannot be used.
        """
        serves = [read_text(text, "--serve") for text in self.serve]
        bench = None if self.bench is None else read_text(self.bench, "--bench")
        if self.files and len(serves) > 1:
            raise BadInput("--serve", None, "give one to override the files, or several without files")
        if not self.files and not serves:
            raise BadInput("SCENARIO", None, "give a scenario file, or --serve, --bench and --gpu")
        pairs = (
            [(file, serves[0] if serves else None) for file in self.files]
            if self.files
            else [(None, serve) for serve in serves]
        )
        return [
            read_source(
                file=file,
                serve=serve,
                bench=bench,
                gpu=self.gpu,
                gpu_count=self.gpu_count,
                model=self.model,
                engine_version=self.engine_version,
                sets=self.sets,
                kv_cache_tokens=self.kv_cache_tokens,
                num_gpu_blocks=self.num_gpu_blocks,
                seed=self.seed,
            )
            for file, serve in pairs
        ]

    def reads(self, sources: Iterable[ScenarioSource]) -> list[str]:
        """Every name that could be a file that these options and their sources are read from."""
        commands = (*self.serve, *(() if self.bench is None else (self.bench,)))
        names = [*self.files, *(text[1:] for text in commands if text.startswith("@"))]
        for source in sources:
            names += [source.gpu, source.model, str(Path(source.model) / "config.json")]
            if isinstance(source.bench.spec.dataset, FileDataset):
                names.append(source.bench.spec.dataset.path)
        return names

    def say_replaced(self, option: str, source: ScenarioSource) -> None:
        """Say on standard error what of these options an option that brings its own load leaves unused."""
        idle = ["--bench"] if self.bench is not None else []
        idle += [f"--set {s}" for s in self.sets if source.with_settings([s]).serve is source.serve]
        if idle:
            click.echo(f"info: {', '.join(idle)}: {option} replaces the client's load", err=True)

    def scenarios(self) -> list[Scenario]:
        """Every scenario, resolved; see `sources`."""
        return [source.build() for source in self.sources()]

    def scenario(self) -> Scenario:
        """The only scenario.

        Raises:
            BadInput: there are several.
        """
        return self.source().build()

    def source(self) -> ScenarioSource:
        """The only source; see `scenario`."""
        sources = self.sources()
        if len(sources) > 1:
            raise BadInput("SCENARIO", None, f"takes one scenario, {len(sources)} were given")
        return sources[0]


def read_text(text: str, field: str) -> str:
    """A command as given, `@FILE` from a file, `-` from standard input.

    Raises:
        BadInput: the file cannot be read, or standard input is empty.
    """
    if text == "-":
        content = sys.stdin.read()
        if not content.strip():
            raise BadInput(field, "-", "standard input is empty")
        return content
    if not text.startswith("@"):
        return text
    try:
        return file_text(text[1:])
    except OSError as error:
        raise BadInput(field, text, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(field, text, "is not a text file") from None


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--serve",
        multiple=True,
        metavar="COMMAND",
        help="Launch command of the engine, as pasted; @FILE or - to read it. Several: one scenario each.",
    ),
    click.option("--bench", metavar="COMMAND", help="Benchmark command, as pasted; @FILE or - to read it."),
    click.option("--gpu", metavar="NAME|FILE", help="GPU (see `servecast gpus`)."),
    click.option("--gpu-count", metavar="N", help="GPUs at hand [default: what TP, PP and DP need]."),
    click.option("--model", metavar="NAME|PATH", help="Model instead of the one in the command."),
    click.option("--engine-version", metavar="VERSION", help="Version whose rules apply."),
    click.option("--kv-cache-tokens", metavar="N", help="KV cache size that the engine logged [tokens]."),
    click.option("--num-gpu-blocks", metavar="N", help="KV blocks that vLLM reported."),
    click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Engine or client flag on top; repeatable."
    ),
    click.option("--seed", metavar="N", help="Seed of the load and of the simulation."),
)
_WHOLE = ("gpu_count", "kv_cache_tokens", "num_gpu_blocks", "seed")


def scenario_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `[SCENARIO.yaml]…` and the scenario options; the command gets them as `inputs: ScenarioOptions`."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        fields = {name: kwargs.pop(name) for name in ScenarioOptions.__dataclass_fields__}
        for name in _WHOLE:
            fields[name] = _whole("--" + name.replace("_", "-"), fields[name])
        return function(*args, inputs=ScenarioOptions(**fields), **kwargs)

    for option in reversed(_OPTIONS):
        command = option(command)
    return click.argument("files", nargs=-1, metavar="[SCENARIO.yaml]...")(command)


def given_words(context: click.Context, without: Collection[str]) -> list[str]:
    """The arguments and options of a command line as they were given, but for the parameters of `without`."""
    words: list[str] = []
    for param in context.command.params:
        name = param.name or ""
        if name in without or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name)
        several = value if isinstance(value, tuple) else (value,)
        if isinstance(param, click.Argument):
            words += map(str, several)
        elif getattr(param, "is_flag", False):
            words.append(param.opts[0])
        else:
            words += [word for one in several for word in (param.opts[0], str(one))]
    return words


def _whole(flag: str, text: str | None) -> int | None:
    """A whole number with optional thousands separators, as engines log it (`194,896`)."""
    if text is None:
        return None
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise BadInput(flag, text, "must be a whole number") from None


def place_of_flag(option: str, command: click.Command) -> str:
    """Which command a flag belongs into that is no option of ours; "" if none has it."""
    if "serve" not in {parameter.name for parameter in command.params}:
        return ""
    from sim.commands import bench, serve

    tables = [("--serve", serve.table("vllm")), ("--serve", serve.table("sglang"))]
    tables += [("--bench", bench.table("vllm")), ("--bench", bench.table("sglang"))]
    near = [(place, name) for place, table in tables for name in table.nearest(option)[:1]]
    found = next(((p, n) for p, n in near if n == option), None) or next(
        ((p, n) for p, n in near if n.startswith(option) or option.startswith(n)), None
    )
    if found is None:
        return ""
    place, name = found
    return f"{name} belongs inside {place} '…', or on top as --set {name[2:]}=VALUE"
