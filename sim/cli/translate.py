"""`servecast translate`: the nearest command of the other engine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from sim.cli.options import read_text
from sim.commands.serve import ServeCommand, parse_serve_command
from sim.errors import BadInput
from sim.paths import is_file
from sim.secrets import without_secrets
from sim.translation.translate import Pair, Translation
from sim.translation.translate import translate as translate_command

_WORDS = {"equal": "equal", "near": "near", "none": "no counterpart"}


@click.command()
@click.argument("command", metavar="[COMMAND|@FILE|-|SCENARIO.yaml]", required=False)
@click.option("--serve", metavar="COMMAND", help="The command, as pasted; @FILE or - to read it.")
@click.option("--json", "as_json", is_flag=True, help="Print command and pairs as JSON.")
def translate(command: str | None, serve: str | None, as_json: bool) -> None:
    """Write the nearest SGLang command for a vLLM one, and back.

    \b
    servecast translate 'vllm serve Qwen/Qwen3-14B --max-num-seqs 64'
    servecast translate scenario.yaml

    Below the command stands what became of each flag: equal, near (and what differs), or no counterpart.
    These lines are shell comments, so the whole output can be pasted.
    """
    made = translate_command(_command(command, serve))
    click.echo(without_secrets(_as_json(made) if as_json else render(made)))


def _command(text: str | None, serve: str | None) -> ServeCommand:
    """The command that was given, be it as text or within a scenario file.

    Raises:
        BadInput: none, two, or one that cannot be used.
    """
    if (text is None) == (serve is None):
        raise BadInput("COMMAND", None, "give one command: as text, @FILE, -, a scenario file, or --serve")
    if serve is not None:
        return parse_serve_command(read_text(serve, "--serve"))
    assert text is not None
    looks_like_a_file = text.endswith((".yaml", ".yml")) and len(text.split()) == 1
    if looks_like_a_file or ("\n" not in text and is_file(text)):
        from sim.build import serve_of

        return serve_of(text)
    return parse_serve_command(read_text(text, "COMMAND"))


def render(made: Translation) -> str:
    """The command, and the pairs as comments."""
    lines = [made.command, "", "# what became of each flag"]
    lines += _table(made.pairs) or ["#   no flags given"]
    if made.defaults:
        lines += ["# left at defaults that differ"]
        lines += [
            f"#   {pair.source[1:-1].removesuffix(' at its default')}: {pair.text}" for pair in made.defaults
        ]
    if made.notes:
        lines += ["# of the command as it was read"]
        lines += [f"#   {note.subject}: {note.text}" for note in made.notes]
    return "\n".join(lines)


def _table(pairs: tuple[Pair, ...]) -> list[str]:
    if not pairs:
        return []
    left = max(len(pair.source) for pair in pairs)
    right = min(max(len(pair.target) for pair in pairs), 40)
    return [
        f"#   {pair.source:<{left}}  ->  {pair.target or '-':<{right}}  {_WORDS[pair.verdict]}"
        + (f": {pair.text}" if pair.text and pair.text != _WORDS[pair.verdict] else "")
        for pair in pairs
    ]


def _as_json(made: Translation) -> str:
    content = {"command": made.command, **asdict(made), "env": dict(made.env)}
    return json.dumps(content, indent=2)
