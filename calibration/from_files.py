"""Evidence from files: results of any client, printed reports, step files of the probe."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from calibration.evidence import Evidence, check_work, client_run
from calibration.steps import step_run
from calibration.told import observed, scenario_of
from sim.comparison.identity import fact, minor
from sim.comparison.loads import named, same_run, scenario_for
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.paths import is_file
from sim.provenance import Origin
from sim.results import BenchResult
from sim.results_io.files import read_results
from sim.scenario import Observed, Scenario


def evidence_files(paths: Sequence[Path], scenario: Scenario | None = None) -> list[Evidence]:
    """Every measurement in the files.

    Args:
        scenario: what was run, the load aside; without it, results must say so themselves (bench results do),
            and step files take the scenario of the results beside them.

    Raises:
        BadInput: names the file and field of what cannot be used.
    """
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise BadInput("--from", str(path), "is given twice; give each file once")
    step_files = [path for path in paths if is_step_file(path)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in step_files]
    for number, digest in enumerate(digests):
        if digest in digests[:number]:
            same = step_files[digests.index(digest)]
            raise BadInput("--from", str(step_files[number]), f"is the same as {same}; give each file once")
    found: list[Evidence] = []
    seen: list[tuple[str, BenchResult]] = []
    for path in paths:
        if path in step_files:
            continue
        results = read_results(path)
        for index, result in enumerate(results):
            name = str(path) if len(results) == 1 else f"{path}#{index + 1}"
            for other, earlier in seen:
                if same_run(earlier, result):
                    raise BadInput("--from", name, f"is the same run as {other}; give each run once")
            seen.append((name, result))
            under = loaded(result, name, scenario)
            run = client_run(named(result, under), name, under)
            check_work(run)
            found.append(run)
    for path in step_files:
        beside = scenario if scenario is not None else next((e.scenario for e in found), None)
        if beside is None:
            raise BadInput(str(path), None, "a step file does not say what ran; give the scenario as well")
        found.append(step_run(path, beside))
    return found


def loaded(result: BenchResult, name: str, scenario: Scenario | None) -> Scenario:
    """The scenario under the load that a result says it had.

    Raises:
        BadInput: there is no scenario, and the result does not say what ran; or it is of another engine,
            another of its minor versions, or another number of GPUs.
    """
    if scenario is not None:
        _check_subject(result, name, scenario)
    under = scenario_for(scenario_of(result.identity, name) if scenario is None else scenario, result)
    # A pool that the engine itself told is its own; one that the user names is known better.
    return observed(under, result) if under.observed == Observed() else under


def _check_subject(result: BenchResult, name: str, scenario: Scenario) -> None:
    engine = fact(result.identity, "engine")
    if engine not in (None, scenario.engine.name):
        raise BadInput(name, str(engine), f"is another engine than the scenario's {scenario.engine.name}")
    version = fact(result.identity, "engine_version")
    ours = scenario.engine.asked_version
    if version is not None and minor(version) != minor(ours):
        hint = f"the scenario has {ours}: its rules are another version's; give --engine-version {version}"
        raise BadInput(f"{name} identity.engine_version", str(version), hint)
    count = fact(result.identity, "gpu_count")
    if count is not None and count != scenario.gpu_count:
        raise BadInput(f"{name} identity.gpu_count", count, f"the scenario has {scenario.gpu_count}")
    _check_flags(result, name, scenario)


def _check_flags(result: BenchResult, name: str, scenario: Scenario) -> None:
    """Refuse a run of an engine with other flags than the scenario's: its steps held something else.

    Flags are compared as the engine resolves them, and only where either side gives one.
    """
    if result.identity.get("flags") is None:
        return
    try:
        ran = scenario_of(result.identity, name)
    except BadInput:  # what it says of itself is not enough to tell
        return
    apart = [
        (key, ours.value, theirs.value)
        for key, ours in scenario.engine.values.items()
        if (theirs := ran.engine.values.get(key)) is not None
        and ours.value != theirs.value
        and Origin.GIVEN in (ours.origin, theirs.origin)
    ]
    if str(ran.model.quant) != str(scenario.model.quant):
        apart.append(("quantization", scenario.model.quant, ran.model.quant))
    for key, wanted, told in apart:
        hint = (
            f"the scenario has {wanted}: give the scenario of this very run, or none (a result of "
            "`servecast bench` says itself how its engine was launched)"
        )
        raise BadInput(f"{name} identity.flags {key}", str(told), hint)


def is_step_file(path: Path) -> bool:
    """Whether a file's first line is a record of the step probe; of a pipe, which is read once, it is not."""
    if not is_file(path):
        return False
    try:
        with path.open(encoding="utf-8") as file:
            first = load_json(file.readline())
    except (OSError, UnicodeDecodeError, ValueError):
        return False
    return isinstance(first, dict) and "ev" in first
