"""Split pasted shell text into words, as a person reads it; nothing is ever run.

Understood: line continuations (also with trailing blanks), `$ ` and `> ` prompts, comments, code fences,
`export A=B` and `A=B` lines, `A=B` in front of a command, `cd … &&`, pipes and redirections after it,
and `$NAME` where the same text sets it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from sim.errors import BadInput

_CONTINUATION = re.compile(r"\\[ \t]*\r?\n[ \t]*(?:>[ \t]+)?")
_PROMPT = re.compile(r"^\s*(?:\([^)\s]*\)\s*)?(?:[\w.@:~/-]*[$%❯➜]\s+)")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_REDIRECTION = re.compile(r"^(?:\d|&)?>{1,2}(.*)$|^<(.*)$")
_SEPARATORS = {"&&", "||", ";"}


@dataclass(frozen=True, slots=True)
class Words:
    """One simple command: its words, and the environment variables that the text sets for it."""

    words: tuple[str, ...]
    env: Mapping[str, str]


def split_commands(text: str, field: str) -> list[Words]:
    """Split `text` into simple commands, in order.

    Raises:
        BadInput: named `field`, for an unclosed quote or text without any command.
    """
    env: dict[str, str] = {}
    commands: list[Words] = []
    for line in _logical_lines(text):
        try:
            tokens = shlex.split(_without_comment(line))
        except ValueError as error:
            raise BadInput(field, _shorten(line), f"{error}: check the quotes") from None
        for simple in _simple_commands(tokens):
            local = dict(env)
            words = _take_assignments(simple, local)
            if words:
                commands.append(Words(tuple(_substitute(w, local) for w in words), local))
            else:
                env.update(local)
    if not commands:
        raise BadInput(field, _shorten(text), "there is no command in it")
    return commands


def _logical_lines(text: str) -> list[str]:
    """Join continuations, drop fences and prompts; a line that begins with a flag continues the last."""
    lines: list[str] = []
    for raw in _CONTINUATION.sub(" ", text).splitlines():
        line = _PROMPT.sub("", raw).strip()
        if not line or line.startswith(("#", "```")):
            continue
        if line.startswith("-") and lines:
            lines[-1] += " " + line
        elif lines and _has_open_quote(lines[-1]):
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return lines


def _has_open_quote(line: str) -> bool:
    try:
        shlex.split(_without_comment(line))
    except ValueError:
        return True
    return False


def _without_comment(line: str) -> str:
    """Cut an unquoted ` # …` tail; a `#` inside a word stays, as in a shell."""
    quote = ""
    for position, char in enumerate(line):
        if quote:
            if char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "#" and (position == 0 or line[position - 1].isspace()):
            return line[:position]
    return line


def _simple_commands(words: list[str]) -> list[list[str]]:
    """Cut at `&&`, `||` and `;`; drop pipes' right sides, redirections and `&`."""
    commands: list[list[str]] = [[]]
    piped = skip = False
    for word in words:
        redirection = _REDIRECTION.match(word)
        if skip:
            skip = False
        elif word in _SEPARATORS:
            commands.append([])
            piped = False
        elif word == "|" or piped:
            piped = True
        elif redirection:
            skip = not (redirection.group(1) or redirection.group(2))
        elif word.endswith(";") and len(word) > 1:
            commands[-1].append(word[:-1])
            commands.append([])
        elif word != "&":
            commands[-1].append(word)
    return [command for command in commands if command]


def _take_assignments(tokens: list[str], env: dict[str, str]) -> list[str]:
    """Move leading `export` / `env` / `A=B` words into `env`; return the rest."""
    rest = list(tokens)
    exporting = False
    while rest:
        match = _ASSIGNMENT.match(rest[0])
        if rest[0] in {"export", "env", "set"}:
            exporting = rest[0] != "env"
        elif match:
            env[match.group(1)] = _substitute(match.group(2), env)
        else:
            break
        rest.pop(0)
    return [] if exporting else rest


def _substitute(word: str, env: Mapping[str, str]) -> str:
    """Replace `$NAME` where the text itself has set it; leave every other `$` alone."""

    def value(match: re.Match[str]) -> str:
        return env.get(match.group(1) or match.group(2), match.group(0))

    return _VARIABLE.sub(value, word) if "$" in word else word


def _shorten(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
