"""Flag tables as data, and the reading of a flag list against one.

A table (`flags.json`) names every flag that an engine's or a client's own parser knows, read off that parser
or its source, and sorts it into `modelled`, `not-modelled` (with its likely effect) and `irrelevant` (no
bearing on performance). `since` and `until` are the first version that knows a flag and the first that no
longer does. The last three flags of the clients' modelled ones (rate-scale, use-trace-arrivals, duration) are
servecast's own, for replaying traces. Tables are JSON, which takes a hundredth of YAML's time to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from sim.commands.numbers import human_int, iec_int, real, truth, whole
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.provenance import Note

PACKAGE = Path(__file__).parent.parent
Role = Literal["modelled", "not-modelled", "irrelevant"]
ROLES: tuple[Role, ...] = ("modelled", "not-modelled", "irrelevant")
NO_VALUE_KINDS = {"bool", "switch"}
_NEGATIVE_NUMBER = re.compile(r"-(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$|-inf$|-nan$", re.IGNORECASE)
_LEVEL = re.compile(r"(-O)(\d+)$")  # vLLM's own parser takes -O3; no other short form may touch its value


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of an engine's command line.

    Attributes:
        name: canonical spelling, e.g. "--max-num-seqs".
        kind: "int", "human" and "iec" (with suffix, as vLLM and as SGLang take it), "float", "str", "json",
            "list" (one or more words), "optional" (a word or none), "bool" (has a `--no-` form), "switch"
            (neither value nor `--no-` form).
        effect: what it likely does to performance, for a flag that is not modelled.
        since / until: first version that knows it / first version that no longer does; "" where unlimited.
        secret: its value must not reach results or logs.
    """

    name: str
    kind: str
    role: Role
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    effect: str = ""
    since: str = ""
    until: str = ""
    secret: bool = False

    @property
    def key(self) -> str:
        """The name as the engine's Python code has it: `max_num_seqs`."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def negative(self) -> str:
        """The `--no-` form."""
        return "--no-" + self.name.lstrip("-")


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of one program.

    Attributes:
        program: as it is called in messages, e.g. "vLLM".
        version: the version that the table was read from.
        spellings: every accepted spelling, dashes normalised, `--no-` forms included -> flag.
    """

    program: str
    version: str
    spellings: Mapping[str, Flag]

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Every flag once, in the order of the table."""
        return tuple({flag.name: flag for flag in self.spellings.values()}.values())

    def find(self, spelling: str) -> Flag | None:
        """The flag of one spelling: exact, with underscores, or an unambiguous beginning of a long name.

        Raises:
            BadInput: the beginning of several flags.
        """
        normal = normalise(spelling)
        if normal in self.spellings:
            return self.spellings[normal]
        if not normal.startswith("--") or len(normal) < 4:
            return None
        begun = {
            f.name: f
            for s, f in self.spellings.items()
            if s.startswith(normal) and not f.since and not f.until
        }
        if len(begun) > 1:
            raise BadInput(spelling, None, f"could be any of {', '.join(sorted(begun))}")
        return next(iter(begun.values()), None)

    def is_negative(self, spelling: str) -> bool:
        """Whether a spelling (no dotted tail) is the `--no-` form of a flag that has one; see `find`."""
        flag, normal = self.find(spelling), normalise(spelling)
        return flag is not None and flag.kind == "bool" and normal.startswith("--no-") and normal != flag.name

    def nearest(self, spelling: str, count: int = 1) -> list[str]:
        """The most similar known long spellings, best first."""
        import difflib

        known = [s for s, f in self.spellings.items() if s.startswith("--") and not f.until]
        return difflib.get_close_matches(normalise(spelling), known, n=count, cutoff=0.5)

    def unknown(self, spelling: str, load_other: Callable[[], FlagTable] | None = None) -> BadInput:
        """The exception for a flag that the program does not know."""
        near = self.nearest(spelling)
        hint = f"{self.program} has no such flag"
        other = None if load_other is None else load_other()
        if other is not None and normalise(spelling) in other.spellings:
            hint += f"; it is one of {other.program}'s"
        if near:
            hint += f"; the nearest is {near[0]}"
        return BadInput(spelling, None, hint)


def normalise(spelling: str) -> str:
    """`--max_num_seqs` -> `--max-num-seqs`; dotted tails stay as they are."""
    if not spelling.startswith("--"):
        return spelling
    head, dot, tail = spelling.partition(".")
    return head.replace("_", "-") + dot + tail


@lru_cache(maxsize=8)
def load_table(name: str) -> FlagTable:
    """Read a shipped table, named by its path within the package."""
    raw = load_json((PACKAGE / name).read_text(encoding="utf-8"))
    spellings: dict[str, Flag] = {}
    for role in ROLES:
        for flag_name, entry in (raw.get(role) or {}).items():
            flag = _flag(flag_name, role, {"type": entry} if isinstance(entry, str) else entry)
            for spelling in (flag.name, *flag.aliases):
                spellings[normalise(spelling)] = flag
                if flag.kind == "bool" and spelling.startswith("--"):
                    spellings[normalise("--no-" + spelling[2:])] = flag
    return FlagTable(raw["program"], str(raw["version"]), spellings)


def _flag(name: str, role: Role, entry: Mapping[str, object]) -> Flag:
    def words(key: str) -> tuple[str, ...]:
        value = entry.get(key, [])
        return tuple(str(v) for v in value) if isinstance(value, list) else ()

    return Flag(
        name=name,
        kind=str(entry["type"]),
        role=role,
        aliases=words("aliases"),
        choices=words("choices"),
        effect=str(entry.get("effect", "")),
        since=str(entry.get("since", "")),
        until=str(entry.get("until", "")),
        secret=bool(entry.get("secret", False)),
    )


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """One flag as given: its table row, its spelling for a launch, and its words.

    `spelling` is the canonical name, its `--no-` form, or the canonical name with a dotted tail.
    """

    flag: Flag
    spelling: str
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str | None:
        """The value as one string; None if it takes none. Several words are joined by blanks."""
        return " ".join(self.words) if self.words else None

    @property
    def path(self) -> str:
        """The dotted tail, "" if there is none."""
        return self.spelling.partition(".")[2]

    @property
    def negated(self) -> bool:
        """Whether the `--no-` form was given."""
        return self.spelling == self.flag.negative

    @property
    def absent(self) -> bool:
        """Whether this is a switch that was set to false: as if it had not been given."""
        return self.negated and self.flag.kind == "switch"


def read_flags(
    words: Sequence[str], table: FlagTable, load_other: Callable[[], FlagTable] | None = None
) -> tuple[list[GivenFlag], list[str], list[Note]]:
    """Read an argument list: (flags in order, positional words, notes). Of a repeated flag the last stays.

    Args:
        load_other: makes the table of the program that such a flag may have been meant for; tables take long.

    Raises:
        BadInput: an unknown flag (named with the nearest), a missing value, a value that is no choice.
    """
    given: list[GivenFlag] = []
    positional: list[str] = []
    notes: list[Note] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            positional += queue
            break
        if not _looks_like_flag(word):
            positional.append(word)
            continue
        given.append(_read_one(word, queue, table, load_other, notes))
    return _last_wins(given, notes), positional, notes


def _read_one(
    word: str,
    queue: list[str],
    table: FlagTable,
    load_other: Callable[[], FlagTable] | None,
    notes: list[Note],
) -> GivenFlag:
    name, equals, inline = word.partition("=")
    head, dot, tail = name.partition(".")
    attached = _LEVEL.match(head)
    flag = table.find(head)
    if flag is None and attached and not equals:
        flag, inline, equals = table.find(attached.group(1)), attached.group(2), "="
    if flag is None:
        raise table.unknown(name, load_other)
    if normalise(head) not in table.spellings and not attached:
        notes.append(Note("info", head, f"is read as {flag.name}, as {table.program} reads it"))
    if dot:
        if flag.kind != "json":
            raise BadInput(name, None, f"{flag.name} takes no dotted keys")
        value = (inline,) if equals else tuple(_take(queue, 1))
        return GivenFlag(flag, f"{flag.name}.{tail}", value or ("true",))
    if flag.kind in NO_VALUE_KINDS:
        negated = table.is_negative(head)
        if not equals and queue and queue[0].lower() in {"true", "false"}:
            inline, equals = queue.pop(0), "="
        if equals:
            negated ^= not truth(flag.name, inline)  # `--no-x=false` asks for x
            notes.append(
                Note(
                    "warning",
                    flag.name,
                    f"takes no value in {table.program} {table.version}; read as "
                    + (flag.negative if negated else flag.name),
                )
            )
        return GivenFlag(flag, flag.negative if negated else flag.name)
    if equals:
        value = (inline,)
    elif flag.kind == "list":
        value = tuple(_take(queue, None))
    else:
        value = tuple(_take(queue, 1))
    if not value and flag.kind != "optional":
        raise BadInput(flag.name, None, "needs a value")
    if flag.choices and value and value[0] not in flag.choices:
        raise BadInput(flag.name, value[0], f"must be one of {', '.join(flag.choices)}")
    for text in value:
        check_kind(flag, text)
    return GivenFlag(flag, flag.name, value)


def check_kind(flag: Flag, text: str) -> None:
    """Refuse what the program's own parser would refuse, whatever the flag does.

    Raises:
        BadInput: no number where one is needed, broken JSON, or a shell variable that nothing set.
    """
    if text.startswith("$"):
        raise BadInput(flag.name, text, "is a shell variable that the text does not set; write its value")
    if flag.kind == "int":
        whole(flag.name, text)
    elif flag.kind == "human":
        human_int(flag.name, text)
    elif flag.kind == "iec":
        iec_int(flag.name, text)
    elif flag.kind == "float":
        real(flag.name, text, infinite=True)
    elif flag.kind == "json" and text.lstrip().startswith(("{", "[")):
        try:
            load_json(text)
        except json.JSONDecodeError as error:
            hint = f"is not JSON ({error.msg}); put it in single quotes"
            raise BadInput(flag.name, text, hint) from None


def _take(queue: list[str], limit: int | None) -> Iterable[str]:
    """Pop up to `limit` words that are values."""
    taken: list[str] = []
    while queue and (limit is None or len(taken) < limit) and not _looks_like_flag(queue[0]):
        taken.append(queue.pop(0))
    return taken


def _looks_like_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE_NUMBER.match(word)


def _last_wins(given: list[GivenFlag], notes: list[Note]) -> list[GivenFlag]:
    """Drop every earlier occurrence of a repeated flag, and say so where the values differ."""
    last: dict[str, GivenFlag] = {}
    for item in given:
        identity = item.flag.name + ("." + item.path if item.path else "")
        before = last.pop(identity, None)
        if before is not None and (before.spelling, before.words) != (item.spelling, item.words):
            notes.append(
                Note("warning", item.flag.name, f"given more than once; the last counts ({_shown(item)})")
            )
        last[identity] = item
    return list(last.values())


def _shown(item: GivenFlag) -> str:
    return item.spelling if item.text is None or item.flag.secret else item.text
