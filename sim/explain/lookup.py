"""From whatever a user pastes (metric, flag, line of /metrics, log or report) to what it means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from sim.commands import bench as bench_commands
from sim.commands import serve as serve_commands
from sim.commands.flags import Flag
from sim.errors import BadInput
from sim.explain.knowledge import (
    Coefficient,
    Concept,
    Knob,
    LogPhrase,
    Metric,
    client_knobs,
    coefficients,
    concepts,
    knobs,
    log_phrases,
    metrics,
)
from sim.scenario import EngineName

ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")
_SUFFIX = re.compile(r"_(total|created|bucket|sum|count|info)$")
_STATISTIC = re.compile(r"^(mean|median|avg|average|std|max|min|p ?\d+(\.\d+)?)\s+(?=\S)")
_UNIT = re.compile(r"\s+(ms|s|seconds|requests?/s|req/s|tok/s|tokens?/s)$")
NEAR = 0.86  # similarity from which a misspelling is taken for the word


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for; exactly one of the six is set.

    Attributes:
        name: canonical.
        engine: whose it is; None: every engine's, or the client's.
        table_flag: a flag's row in its program's own table, beside `knob` or without one.
        also: other engines that have the same flag.
        note: what to say of the match itself.
    """

    name: str
    engine: EngineName | None = None
    concept: Concept | None = None
    metric: Metric | None = None
    log: LogPhrase | None = None
    knob: Knob | None = None
    table_flag: Flag | None = None
    also: tuple[EngineName, ...] = ()
    note: str = ""
    coefficient: Coefficient | None = None

    @property
    def kind(self) -> Literal["concept", "metric", "log", "flag", "coefficient"]:
        """Which kind of page this is."""
        if self.coefficient is not None:
            return "coefficient"
        if self.concept is not None:
            return "concept"
        if self.metric is not None:
            return "metric"
        return "log" if self.log is not None else "flag"


def find(text: str, engine: EngineName | None = None) -> Found:
    """What `text` names; `engine` decides where both have it (without it vLLM's comes first).

    Raises:
        BadInput: nothing is called that; the nearest names are in the hint.
    """
    found = _exact(text, engine)
    if found is not None:
        return found
    near = nearest(text, engine)
    if near and difflib.SequenceMatcher(None, plain(text), plain(near[0])).ratio() >= NEAR:
        again = _exact(near[0], engine)
        if again is not None:
            return _with_note(again, f"nothing is called {text!r}; this is {near[0]}")
    hint = "names no metric, flag, report line or log line that is known"
    if near:
        hint += f"; the nearest: {', '.join(near)}"
    hint += "; `servecast explain --list` prints what is known"
    raise BadInput("NAME", text, hint)


def nearest(text: str, engine: EngineName | None = None, count: int = 3) -> list[str]:
    """The known names most similar to `text`, best first."""
    known: dict[str, str] = {}
    for name in all_names(engine):
        known.setdefault(plain(name), name)
    close = difflib.get_close_matches(plain(text), list(known), n=count, cutoff=0.55)
    return [known[name] for name in close]


def all_names(engine: EngineName | None = None) -> Iterator[str]:
    """Every name that has a page of its own: concepts, metrics, log phrases, flags."""
    for key, concept in concepts().items():
        yield from (key, *concept.words, *concept.lines)
    yield from coefficients()
    for own in _order(engine):
        yield from (name for name in metrics(own) if "*" not in name)
        yield from (row.phrase for row in log_phrases(own))
        yield from (flag.name for flag in serve_commands.table(own).flags)
    for client in ("vllm", "sglang"):
        yield from (flag.name for flag in bench_commands.table(client).flags)


def plain(text: str) -> str:
    """A name without case, punctuation, labels, unit and value: `Mean TTFT (ms): 12.3` -> `mean ttft`."""
    text = re.sub(r"\{.*\}", "", text.strip().lower())
    text = re.sub(r":\s+[\d.,]+\s*$", "", text).rstrip(": ")
    text = re.sub(r"\s*\([^)]*\)$", "", text)
    text = re.sub(r"^-+", "", text)
    return re.sub(r"[\s_\-]+", " ", text).strip(" '\"")


def _order(engine: EngineName | None) -> tuple[EngineName, ...]:
    return ENGINES if engine is None else (engine, *(other for other in ENGINES if other != engine))


def _exact(text: str, engine: EngineName | None) -> Found | None:
    stripped = text.strip()
    if stripped.startswith("-"):
        return _flag(stripped, engine) or _client_flag(stripped, engine)
    if re.match(r"(vllm|sglang):", stripped):
        return _metric(stripped, engine)
    phrase = _log(stripped, engine)
    if phrase is not None and phrase.log is not None and plain(phrase.log.phrase) == plain(stripped):
        return phrase
    return (
        _concept(stripped)
        or _flag(stripped, engine)
        or _metric(stripped, engine)
        or _coefficient(stripped)
        or phrase
        or _client_flag(stripped, engine)
        or _concept(_STATISTIC.sub("", plain(stripped)))
    )


def _concept(text: str) -> Found | None:
    word = plain(text)
    bare = _UNIT.sub("", word)
    for key, concept in concepts().items():
        names = {plain(name) for name in (key, concept.title, *concept.words, *concept.lines, *concept.keys)}
        if word in names or bare in names:
            return Found(key, concept=concept)
    return None


def _coefficient(text: str) -> Found | None:
    name = plain(text.removeprefix("efficiencies.")).replace(" ", "_")
    row = coefficients().get(name)
    return None if row is None else Found(name, coefficient=row)


def known_names(engine: EngineName | None = None) -> dict[str, list[str]]:
    """Names that `find` knows, by what they are; of an engine, or of both."""
    own = ENGINES if engine is None else (engine,)
    found = {
        "metrics": list(concepts()),
        "coefficients of the step-time model": list(coefficients()),
    }
    for name in own:
        program = serve_commands.table(name).program
        found[f"{program}: flags"] = [flag.name for flag in serve_commands.table(name).flags]
        found[f"{program}: /metrics"] = list(metrics(name))
        found[f"{program}: log lines"] = [row.phrase for row in log_phrases(name)]
    flags = [flag.name for client in own for flag in bench_commands.table(client).flags]
    found["benchmark clients: flags"] = list(dict.fromkeys(flags))
    return found


def _flag(text: str, engine: EngineName | None) -> Found | None:
    spelling = _spelling(text)
    having = [own for own in ENGINES if spelling in serve_commands.table(own).spellings]
    if not having:
        return None
    own = engine if engine in having else having[0]
    assert own is not None
    flag = serve_commands.table(own).spellings[spelling]
    note = ""
    if engine is not None and engine != own:
        note = f"{serve_commands.table(engine).program} has no such flag; this is the other engine's"
    return Found(
        flag.name,
        engine=own,
        knob=knobs(own).get(flag.name),
        table_flag=flag,
        also=tuple(other for other in having if other != own),
        note=note,
    )


def _client_flag(text: str, engine: EngineName | None) -> Found | None:
    spelling = _spelling(text)
    clients: tuple[Literal["vllm", "sglang"], ...] = ("sglang", "vllm") if engine == "sglang" else ENGINES
    for client in clients:
        flag = bench_commands.table(client).spellings.get(spelling)
        if flag is not None:
            return Found(flag.name, knob=client_knobs().get(flag.name), table_flag=flag)
    return None


def _spelling(text: str) -> str:
    """A flag as tables spell it: without value and dotted tail, with dashes."""
    word = text.split("=")[0].split(" ")[0] if text.startswith("-") else text
    if re.match(r"-[a-zA-Z]", word):
        return word
    return "--" + word.lstrip("-").partition(".")[0].replace("_", "-")


def _metric(text: str, engine: EngineName | None) -> Found | None:
    name = re.sub(r"\{.*", "", text.split(" ")[0])
    prefix = re.match(r"(vllm|sglang):", name)
    for own in _order("sglang" if prefix and prefix[1] == "sglang" else "vllm" if prefix else engine):
        found = metric_of(name, own)
        if found is None and prefix is None:
            found = metric_of(f"{own}:{name.replace('-', '_')}", own)
        if found is not None:
            known, note = found
            shared = not known.startswith(f"{own}:")
            row = Found(known, engine=None if shared else own, metric=metrics(own)[known], note=note)
            if engine in (None, own) or shared:
                return row
            its, asked = (serve_commands.table(name).program for name in (own, engine))
            return _with_note(row, f"this is {its}'s; {asked} does not export it")
        if prefix is not None:
            return None
    return None


def metric_of(name: str, engine: EngineName) -> tuple[str, str] | None:
    """The entry of an exported name or sample name, and what to say of the match; None if it is unknown."""
    table = metrics(engine)
    bare = _SUFFIX.sub("", name)
    for candidate in (name, bare, f"{name}_total", f"{bare}_total", _SUFFIX.sub("", bare)):
        if candidate in table and "*" not in candidate:
            created = name.endswith("_created")
            return candidate, "the time at which the series began, no measurement" if created else ""
    for known, entry in table.items():
        for old in entry.was:
            if name == old or bare == _SUFFIX.sub("", old):
                return known, f"{old} is an older name"
    for known in table:
        if "*" in known and (fnmatchcase(name, known) or fnmatchcase(bare, known)):
            return known, ""
    return None


def _log(text: str, engine: EngineName | None) -> Found | None:
    """The known phrase that the text contains first, so that whole log lines can be pasted."""
    word = _loose(text)
    hits: list[tuple[int, int, EngineName, LogPhrase]] = []
    for own in _order(engine):
        for row in log_phrases(own):
            phrase = _loose(row.phrase)
            if phrase in word:
                hits.append((word.index(phrase), -len(phrase), own, row))
            elif len(word) >= 8 and word in phrase:
                hits.append((len(word), -len(phrase), own, row))
    if not hits:
        return None
    hits.sort(key=lambda hit: hit[:2])
    _, _, own, row = hits[0]
    others = [hit[3].phrase for hit in hits[1:] if hit[2] == own and _loose(hit[3].phrase) in word]
    note = f"the line also holds: {', '.join(others)}" if others else ""
    return Found(row.phrase, engine=own, log=row, note=note)


def _loose(text: str) -> str:
    """A log line without case, numbers and repeated blanks: `Running: 12 reqs` is `Running: N reqs`."""
    return re.sub(r"\s+", " ", re.sub(r"\b(\d[\d,.]*|n)\b", "#", text.lower())).strip()


def _with_note(found: Found, note: str) -> Found:
    return replace(found, note="; ".join(part for part in (note, found.note) if part))
