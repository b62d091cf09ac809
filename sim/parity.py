"""Step-by-step comparison with recorded decisions of a real engine.

    python -m sim.parity SCENARIOS.jsonl.gz TRACES.jsonl.gz

Both files are JSON lines, gzipped or not. In the trace file a line with the key `scenario` is a header and
starts a new trace; the lines after it are one per scheduling call. A trace is the expectation for the version
in its header and for each version that its `same_on` names. Exit status: 0 if everything is identical, 1 if
anything differs, 2 if a file cannot be used.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import BadInput, ServecastError
from sim.jsontext import load_json

Line = dict[str, Any]
"""One JSON object of a scenario or trace file."""

FACTS = ("outcome", "evicted_blocks", "evicted_tokens")
"""What a header says about the whole run and a replay has to reproduce."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run: its header and its lines, one per scheduling call."""

    header: Line
    lines: Sequence[Line]

    @property
    def scenario_id(self) -> str:
        """Id of the scenario that was recorded."""
        return str(self.header["scenario"])

    @property
    def versions(self) -> list[str]:
        """Engine versions of which this trace is the expectation."""
        return [str(self.header["engine_version"]), *self.header.get("same_on", [])]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of replaying one trace as one engine version.

    Attributes:
        identical_steps: lines that are equal, counted up to the first that is not.
        difference: None if lines and facts are all equal, else the first difference in words.
    """

    scenario_id: str
    version: str
    steps: int
    identical_steps: int
    difference: str | None


def read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield (line number, object) of a JSON-lines file, gzipped if its name ends in `.gz`.

    Raises BadInput if the file cannot be read or a line is not a JSON object.
    """
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as f
        ):
            for number, text in enumerate(f, 1):
                if not text.strip():
                    continue
                line = load_json(text)
                if not isinstance(line, dict):
                    raise BadInput(str(path), None, f"line {number} is not a JSON object")
                yield number, line
    except json.JSONDecodeError as error:
        raise BadInput(str(path), None, f"not JSON lines, or truncated ({error})") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(str(path), None, f"cannot be read ({reason})") from None


def load_scenarios(path: Path) -> dict[str, Line]:
    """Scenarios of a file by id. Raises BadInput for missing or repeated ids and for an empty file."""
    scenarios: dict[str, Line] = {}
    for number, line in read_lines(path):
        if "id" not in line or "engine" not in line:
            raise BadInput(str(path), None, f"line {number} is not a scenario: no `id` or no `engine`")
        if line["id"] in scenarios:
            raise BadInput(str(path), None, f"line {number} repeats the scenario {line['id']}")
        scenarios[line["id"]] = line
    if not scenarios:
        raise BadInput(str(path), None, "holds no scenario")
    return scenarios


def load_traces(path: Path) -> list[Trace]:
    """Traces of a file, in its order. Raises BadInput for a malformed, truncated or empty file."""
    traces: list[Trace] = []
    lines: list[Line] = []
    for number, line in read_lines(path):
        if "scenario" in line:
            if "steps" not in line or "engine_version" not in line or "outcome" not in line:
                raise BadInput(
                    str(path), None, f"line {number}: header without `steps`, version or `outcome`"
                )
            lines = []
            traces.append(Trace(line, lines))
        elif traces:
            lines.append(line)
        else:
            raise BadInput(str(path), None, "does not begin with a header (a line with the key `scenario`)")
    if not traces:
        raise BadInput(str(path), None, "holds no trace")
    for trace in traces:
        if len(trace.lines) != trace.header["steps"]:
            found = f"{len(trace.lines)} of {trace.header['steps']} lines"
            raise BadInput(str(path), None, f"trace {trace.scenario_id} has {found}: truncated?")
    return traces


def replay(scenario: Line, version: str) -> tuple[list[Line], Line]:
    """Run a scenario through our scheduler of its engine.

    Returns the lines of the trace, one per scheduling call, and the facts that belong in its header.
    Raises BadInput for an unknown engine or a malformed scenario, EngineStuck where the engine would hang.
    """
    match scenario["engine"]:
        case "vllm":
            from sim.engines.vllm import parity as vllm

            return vllm.replay(scenario, version)
        case "sglang":
            from sim.engines.sglang import parity as sglang

            return sglang.replay(scenario, version)
        case other:
            raise BadInput(f"scenario {scenario['id']}", other, "unknown engine; known: vllm, sglang")


def _differences(expected: Line, ours: Line) -> list[str]:
    """One entry per key in which two objects differ."""
    keys = [*expected, *(key for key in ours if key not in expected)]
    return [
        f"  {key}:\n    engine: {json.dumps(expected.get(key))}\n    ours:   {json.dumps(ours.get(key))}"
        for key in keys
        if expected.get(key) != ours.get(key)
    ]


def compare(scenario: Line, trace: Trace, version: str) -> Comparison:
    """Replay `scenario` as `version` and compare with `trace`: every key of every line, then the facts."""
    steps = len(trace.lines)
    try:
        lines, facts = replay(scenario, version)
    except BadInput:
        raise
    except ServecastError as error:
        return Comparison(trace.scenario_id, version, steps, 0, f"replay ended early: {error}")
    for number, (expected, ours) in enumerate(zip(trace.lines, lines, strict=False)):
        if expected != ours:
            difference = "\n".join([f"step {expected.get('step')}", *_differences(expected, ours)])
            return Comparison(trace.scenario_id, version, steps, number, difference)
    same = min(steps, len(lines))
    if steps != len(lines):
        difference = f"the engine made {steps} scheduling calls, we made {len(lines)}"
        return Comparison(trace.scenario_id, version, steps, same, difference)
    recorded = {key: trace.header[key] for key in FACTS if key in trace.header}
    facts = {key: facts.get(key) for key in recorded}
    if recorded != facts:
        difference = "\n".join(["all steps, but the totals differ", *_fact_differences(recorded, facts)])
        return Comparison(trace.scenario_id, version, steps, same, difference)
    return Comparison(trace.scenario_id, version, steps, same, None)


def _fact_differences(recorded: Line, ours: Line) -> list[str]:
    """As `_differences`, but of the outcomes only those of the requests that differ."""
    theirs, mine = dict(recorded), dict(ours)
    if "outcome" in theirs and "outcome" in mine:
        a, b = theirs["outcome"], mine["outcome"]
        theirs["outcome"] = {key: a[key] for key in a if a[key] != b.get(key)}
        mine["outcome"] = {key: b[key] for key in b if b[key] != a.get(key)}
    return _differences(theirs, mine)


def compare_files(scenarios_path: Path, traces_path: Path) -> list[Comparison]:
    """Compare every trace of a file, as every version of which it is the expectation.

    Raises BadInput for files that cannot be used, and if a scenario has no trace or a trace no scenario.
    """
    scenarios, traces = load_scenarios(scenarios_path), load_traces(traces_path)
    for trace in traces:
        if trace.scenario_id not in scenarios:
            raise BadInput(str(scenarios_path), None, f"holds no scenario {trace.scenario_id}")
    missing = scenarios.keys() - {trace.scenario_id for trace in traces}
    if missing:
        raise BadInput(str(traces_path), None, f"holds no trace of the scenario {min(missing)}")
    return [compare(scenarios[t.scenario_id], t, version) for t in traces for version in t.versions]


def report(comparisons: Sequence[Comparison]) -> str:
    """Totals, one line per version if there are several, and the first difference."""
    lines = []
    first = next((c for c in comparisons if c.difference is not None), None)
    if first is not None:
        lines.append(f"first difference: {first.scenario_id} as {first.version}: {first.difference}")
    versions = list(dict.fromkeys(c.version for c in comparisons))
    if len(versions) > 1:
        for version in versions:
            runs = [c for c in comparisons if c.version == version]
            same = sum(c.difference is None for c in runs)
            lines.append(f"{version}: {_steps(runs)}, scenarios {same}/{len(runs)}")
    wrong = {c.scenario_id for c in comparisons if c.difference is not None}
    everything = {c.scenario_id for c in comparisons}
    same = sum(c.difference is None for c in comparisons)
    lines.append(
        f"{_steps(comparisons)}, scenarios {len(everything) - len(wrong)}/{len(everything)}"
        f" (runs {same}/{len(comparisons)})"
    )
    return "\n".join(lines)


def _steps(comparisons: Sequence[Comparison]) -> str:
    identical = sum(c.identical_steps for c in comparisons)
    return f"identical steps {identical}/{sum(c.steps for c in comparisons)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.parity",
        description="Compare our schedulers with recorded decisions of real engines.",
    )
    parser.add_argument("scenarios", type=Path, metavar="SCENARIOS.jsonl.gz")
    parser.add_argument("traces", type=Path, metavar="TRACES.jsonl.gz")
    arguments = parser.parse_args(argv)
    try:
        comparisons = compare_files(arguments.scenarios, arguments.traces)
    except ServecastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(report(comparisons))
    return int(any(c.difference is not None for c in comparisons))


if __name__ == "__main__":
    sys.exit(main())
