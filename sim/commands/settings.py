"""One `KEY=VALUE` on top of a launch command or a benchmark command, whichever knows the key."""

from __future__ import annotations

from dataclasses import replace

from sim.commands import bench as bench_commands
from sim.commands import serve as serve_commands
from sim.commands.bench import BenchCommand, bench_from_flags
from sim.commands.flags import FlagTable, GivenFlag, normalise, read_flags
from sim.commands.serve import MODEL_FLAG, ServeCommand
from sim.errors import BadInput
from sim.provenance import Note


def with_setting(
    serve: ServeCommand, bench: BenchCommand, key: str, value: str
) -> tuple[ServeCommand, BenchCommand]:
    """Both commands with the setting in one of them; `serve.KEY` and `bench.KEY` tell which.

    Raises:
        BadInput: an unknown key (named with the nearest), or one that both know.
    """
    side, dot, rest = key.partition(".")
    prefixed = bool(dot) and side in {"serve", "engine", "bench"}
    name = rest if prefixed else key
    spelling = normalise("--" + name.lstrip("-"))
    base = spelling.partition(".")[0]
    engine_table = serve_commands.table(serve.engine)
    client_table = bench_commands.table(bench.client)
    in_engine = engine_table.find(base) if side != "bench" or not prefixed else None
    in_client = client_table.find(base) if not prefixed or side == "bench" else None
    if in_engine is not None and in_client is not None:
        # A whole name of the one goes before the beginning of one of the other's.
        if base in client_table.spellings and base not in engine_table.spellings:
            in_engine = None
        elif base in engine_table.spellings and base not in client_table.spellings:
            in_client = None
    if in_engine is not None and in_client is not None:
        both = f"the engine and {client_table.program} both have it: write serve.{name} or bench.{name}"
        raise BadInput("--set", key, both)
    if in_engine is not None:
        flags, notes = _as_flags(spelling, value, engine_table)
        serve = replace(serve, notes=(*serve.notes, *notes))
        if in_engine.name == MODEL_FLAG[serve.engine]:
            return replace(serve, model=value), bench
        return serve.with_flags(flags), bench
    if in_client is None:
        raise _unknown(key, spelling, engine_table, client_table)
    flags, notes = _as_flags(spelling, value, client_table)
    return serve, _with_client_flags(bench, flags, notes)


def _with_client_flags(bench: BenchCommand, flags: list[GivenFlag], notes: list[Note]) -> BenchCommand:
    read = bench_from_flags(bench.client, flags, base=bench.spec)
    names = {g.flag.name for g in flags}
    given = (*(g for g in bench.given if g.flag.name not in names), *read.given)
    kept = [note for note in bench.notes if note.subject not in names]  # what was said of an earlier value
    fresh = [note for note in (*notes, *read.notes) if note not in kept]
    return replace(bench, spec=read.spec, model=read.model or bench.model, given=given, notes=(*kept, *fresh))


def _as_flags(spelling: str, value: str, flags: FlagTable) -> tuple[list[GivenFlag], list[Note]]:
    """One setting as flags, and how its name was read; truth values and lists are as in a scenario file."""
    base = spelling.partition(".")[0]
    flag = flags.find(base)
    words = [f"{spelling}={value}"]
    if flag is not None and flag.kind == "list":
        words = [spelling, *value.replace(",", " ").split()]
    given, _, notes = read_flags(words, flags)
    # That a switch takes no value needs no word here, where everything has one; what `no-x=true` means does.
    told = notes if flags.is_negative(base) else [note for note in notes if note.kind == "info"]
    return given, told


def _unknown(key: str, spelling: str, engine: FlagTable, client: FlagTable) -> BadInput:
    near = engine.nearest(spelling) + client.nearest(spelling)
    hint = f"neither {engine.program} nor {client.program} has such a flag"
    if near:
        hint += f"; the nearest is {' or '.join(n.removeprefix('--') for n in near)}"
    return BadInput("--set", key, hint)
