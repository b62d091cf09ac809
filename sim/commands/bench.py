"""A pasted benchmark-client command -> `BenchCommand`, with the client's own defaults.

Sources: vllm/benchmarks/serve.py and datasets/ (0.28); sglang/benchmark/serving.py (0.5.21).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sim.commands.docker import parse_docker_run
from sim.commands.flags import FlagTable, GivenFlag, load_table, read_flags
from sim.commands.given import Given
from sim.commands.shell import split_commands
from sim.commands.workload_flags import apply_sglang_flags, apply_vllm_flags
from sim.errors import BadInput
from sim.provenance import Note
from sim.workload.spec import RandomDataset, WorkloadSpec

FIELD = "--bench"
ClientName = Literal["vllm", "sglang"]
_OTHER: dict[ClientName, ClientName] = {"vllm": "sglang", "sglang": "vllm"}
_MODULES: dict[str, ClientName] = {
    "sglang.bench_serving": "sglang",
    "sglang.benchmark.serving": "sglang",
    "vllm.benchmarks.serve": "vllm",
}
_SCRIPTS: dict[str, ClientName] = {"benchmark_serving.py": "vllm", "bench_serving.py": "sglang"}


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """One benchmark-client command.

    Attributes:
        client: whose command it is.
        spec: the load that it makes.
        model: as the client names it, or None (it asks the server).
        base_url: where it sends to, or None.
        given: its flags, each once.
    """

    client: ClientName
    spec: WorkloadSpec
    model: str | None
    base_url: str | None
    given: tuple[GivenFlag, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def flags(self) -> tuple[tuple[str, str | None], ...]:
        """(canonical flag, value or None) of every flag; secrets are left out."""
        return tuple((g.spelling, g.text) for g in self.given if not g.flag.secret)

    def names(self, flag: str) -> bool:
        """Whether the command has a flag, by its canonical name."""
        return any(g.flag.name == flag for g in self.given)


def table(client: ClientName) -> FlagTable:
    """The flag table of a client."""
    return load_table(f"commands/bench_{client}.json")


def default_spec(client: ClientName) -> WorkloadSpec:
    """The load of the bare command."""
    if client == "vllm":
        return WorkloadSpec()
    return WorkloadSpec(
        dataset=RandomDataset(1024, 1024, 0.0, style="sglang"),
        seed=42,
        num_warmups=1,
        endpoint="/generate",
        client="sglang",
    )


def parse_bench_command(text: str) -> BenchCommand:
    """Read a benchmark command as it was pasted.

    Raises:
        BadInput: no client in it, an unknown flag (named with the nearest), or a value that cannot be used.
    """
    found: list[BenchCommand] = []
    for command in split_commands(text, FIELD):
        run = parse_docker_run(command.words)
        words = (*run.entrypoint, *run.args) if run else command.words
        for index in range(len(words)):
            entry = _entry_at(words, index)
            if entry is not None:
                client, start = entry
                found.append(bench_from_words(client, words[start:]))
                break
    if not found:
        shown = " ".join(text.split())
        raise BadInput(
            FIELD,
            shown if len(shown) < 80 else shown[:79] + "…",
            "no client in it: expected `vllm bench serve …` or `python -m sglang.bench_serving …`",
        )
    if len(found) > 1:
        raise BadInput(FIELD, None, f"holds {len(found)} benchmark commands; give one")
    return found[0]


def bench_from_words(client: ClientName, words: Sequence[str]) -> BenchCommand:
    """Read a client's own argument list."""
    flags, positional, notes = read_flags(words, table(client), lambda: table(_OTHER[client]))
    if positional:
        raise BadInput(FIELD, positional[0], "is not a flag")
    return bench_from_flags(client, flags, notes=notes)


def bench_from_flags(
    client: ClientName,
    flags: Sequence[GivenFlag],
    base: WorkloadSpec | None = None,
    notes: Sequence[Note] = (),
) -> BenchCommand:
    """Apply flags to the client's default load, or to `base`."""
    given = Given(flags)
    apply = apply_vllm_flags if client == "vllm" else apply_sglang_flags
    spec, more = apply(given, replace(base, client=client) if base else default_spec(client), base is None)
    unmodelled = [
        Note("not-modelled", g.spelling, g.flag.effect)
        for g in flags
        if g.flag.role == "not-modelled" and not g.absent
    ]
    return BenchCommand(
        client=client,
        spec=spec,
        model=given.word("--model"),
        base_url=_base_url(given),
        given=tuple(g for g in flags if not g.flag.secret and not g.absent),
        notes=(*notes, *more, *unmodelled),
    )


def with_bench_flags(command: BenchCommand, extra: Sequence[GivenFlag]) -> BenchCommand:
    """A copy in which `extra` replaces flags of the same name."""
    names = {g.flag.name for g in extra}
    flags = [g for g in command.given if g.flag.name not in names] + list(extra)
    return bench_from_flags(command.client, flags)


def _base_url(given: Given) -> str | None:
    url, host, port = given.word("--base-url"), given.word("--host"), given.integer("--port")
    if url is not None:
        return url
    if host is None and port is None:
        return None
    return f"http://{host or '127.0.0.1'}:{port or 8000}"


def _entry_at(words: Sequence[str], index: int) -> tuple[ClientName, int] | None:
    """(client, index of its first argument) if a client's command begins at `index`."""
    name = Path(words[index]).name
    following = tuple(words[index + 1 : index + 3])
    if name == "vllm" and following[:1] == ("bench",):
        if following[1:] != ("serve",):
            raise BadInput(FIELD, " ".join((name, *following)), "only `vllm bench serve` loads a server")
        return "vllm", index + 3
    if words[index] == "-m" and following and following[0] in _MODULES:
        return _MODULES[following[0]], index + 2
    if name in _SCRIPTS:
        return _SCRIPTS[name], index + 1
    return None
