"""The `servecast` command: finds the subcommand, runs it, turns errors into exit statuses."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from typing import Any

import click

from sim.errors import ServecastError
from sim.interrupts import as_keyboard_interrupt

# name -> (module:function, one line of help). Modules load only when their command runs.
COMMANDS: dict[str, tuple[str, str]] = {
    "predict": ("sim.cli.predict:predict", "Predict TTFT, TPOT, throughput of a serve and a bench command."),
    "memory": ("sim.cli.memory:memory", "Print the memory account: what is left for the KV cache, and why."),
    "compare": ("sim.cli.compare:compare", "Set a prediction beside measured results, metric by metric."),
    "models": ("sim.cli.tables:models", "List the models whose configuration is shipped."),
    "gpus": ("sim.cli.tables:gpus", "List the GPUs and their figures, with sources."),
    "demo": ("sim.cli.demo:demo", "Predict the reference scenario and compare with its measurement."),
    "translate": (
        "sim.cli.translate:translate",
        "Write the nearest SGLang command for a vLLM one, and back.",
    ),
    "whatif": ("sim.cli.whatif:whatif", "Change one setting, keep the rest, see what really moves, and why."),
    "explain": ("sim.cli.explain:explain", "Say what a metric, flag or log line means, and what moves it."),
    "audit": ("bench.audit.cli:audit", "Say whether reports may be compared and believed, and why not."),
    "advise": ("sim.cli.advise:advise", "Rank flag changes for a goal by their simulated effect."),
    "plan": ("sim.cli.plan:plan", "Find the load, the replicas, the GPU and the cost that keep objectives."),
    "search": ("sim.cli.search:search", "Search the flags that carry the most load under objectives."),
    "cluster": (
        "sim.cli.cluster:cluster",
        "Predict several replicas behind a router, mixed or split in two.",
    ),
    "calibrate": ("calibration.cli:calibrate", "Measure what a profile needs, fit it, and check the fit."),
    "validate": ("calibration.cli:validate", "Hold fits and predictions to published measurements."),
    "bench": ("bench.cli:bench", "Run the scenario on the real engine and judge the result."),
    "doctor": ("bench.cli:doctor", "Check this host before a bench run."),
}


# Loading modules makes 400,000 objects and no garbage; Python looks for it after every 700.
GARBAGE = 500_000


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command table without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="servecast")
def servecast() -> None:
    """Know what your LLM server will do before you rent the GPU."""


def main(args: list[str] | None = None) -> Any:
    """Run the command line; exit status 0 ok, 1 failed, 2 bad input, 3 invalid or not comparable."""
    gc.set_threshold(GARBAGE)
    atexit.register(gc.freeze)  # else Python looks through everything once more before it ends
    try:
        with as_keyboard_interrupt():  # else worker processes outlive a SIGTERM
            status = servecast.main(args=args, prog_name="servecast", standalone_mode=False)
    except ServecastError as error:
        _say(str(error))
        sys.exit(error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _say(_one_line(error))
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _say(text: str) -> None:
    from sim.secrets import without_secrets

    click.echo(f"servecast: {without_secrets(text)}", err=True)


def _one_line(error: click.ClickException) -> str:
    """What is wrong with the options, and whose `--help` tells the right ones."""
    text = " ".join(error.format_message().split())
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        from sim.cli.options import place_of_flag

        place = place_of_flag(error.option_name, context.command)
        text = f"no such option '{error.option_name}': {place}" if place else text
    return text if context is None else f"{text} (see {context.command_path} --help)"


if __name__ == "__main__":
    main()
