"""Which measured runs are repeats of one load, and which prediction is of the same load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.comparison.facts import fact, followed_times, load_of, pace_of, same_load, same_rate
from sim.comparison.identity import differences, setup_differences
from sim.comparison.work import work_differences
from sim.errors import BadInput, NotComparable
from sim.provenance import Note
from sim.results import BenchResult, RequestRecords
from sim.results_io.writing import PEAK_KEYS
from sim.scenario import Scenario
from sim.workload.generate import generate
from sim.workload.spec import FileDataset, WorkloadSpec

REPLAY = "--replay"
ROUNDED = 0.006  # a report prints two digits behind the point
FIGURES = 2  # so many at least tell a run by its figures
_MAY_BE_NONE = ("max_concurrency", "ramp_up")  # of a load: none is a fact, and nothing unknown
CAPPED = (
    "the client's cap held requests back, so that their times follow from the answers: they are sent by "
    "rate and cap, not at the recorded times"
)
UNSHARED = (
    "what the recorded prompts had in common is not in the file: each is replayed as one of its own, so "
    "that a prefix cache finds nothing"
)


def grouped(runs: Sequence[tuple[str, BenchResult]]) -> list[list[tuple[str, BenchResult]]]:
    """(name, result) pairs by load, in the order of their first appearance: each group holds repeats.

    Raises:
        BadInput: a run is given twice; as a repeat it would tell of a noise of zero.
    """
    groups: list[list[tuple[str, BenchResult]]] = []
    for name, run in runs:
        for group in groups:
            first = group[0][1]
            if _is_repeat(first, run):
                _check_new(name, run, group)
                group.append((name, run))
                break
        else:
            groups.append([(name, run)])
    return groups


def _is_repeat(first: BenchResult, run: BenchResult) -> bool:
    """Whether two runs are of one load on one engine, flags included, model and GPU, as far as they say."""
    if first.origin != run.origin or not same_load(first.identity, run.identity):
        return False
    if work_differences(first, run) or setup_differences(first.identity, run.identity):
        return False
    return not any(difference.fatal for difference in differences(first.identity, run.identity))


def _check_new(name: str, run: BenchResult, group: Sequence[tuple[str, BenchResult]]) -> None:
    for other, earlier in group:
        if same_run(earlier, run):
            raise BadInput("MEASURED", name, f"is the same run as {other}; give each run once")


def same_run(one: BenchResult, other: BenchResult) -> bool:
    """Whether two results are of one run: all moments agree, or all figures but for what a report rounds.

    Peaks are left out: clients count them otherwise than we do from the requests.
    """
    if one.records is not None and other.records is not None:
        return one.aggregates == other.aggregates and _sent(one) == _sent(other)
    shared = [key for key in one.aggregates if other.aggregates.get(key) is not None and key not in PEAK_KEYS]
    pairs = [(one.aggregates[key], other.aggregates[key]) for key in shared]
    known = [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]
    return len(known) >= FIGURES and all(abs(a - b) <= ROUNDED for a, b in known)


def _sent(run: BenchResult) -> bytes | None:
    return None if run.records is None else run.records.sent.tobytes() + run.records.first_token.tobytes()


def load_name(result: BenchResult) -> str:
    """A load in a few words: "4 requests/s", "concurrency 16", "linear ramp from 1 to 9 requests/s"."""
    rate, cap = load_of(result.identity)
    words = []
    if followed_times(result.identity):
        words.append(str(pace_of(result.identity)))
    elif rate is not None and math.isfinite(rate):
        words.append(f"{rate:g} requests/s")
    if cap is not None:
        words.append(f"concurrency {cap}")
    return ", ".join(words) or ("all at once" if rate is not None else "load unknown")


def matching(predictions: Sequence[BenchResult], measured: BenchResult) -> BenchResult:
    """The prediction of the measured run's load; a single prediction is taken as it is.

    Raises:
        NotComparable: several predictions, and none or more than one of this load.
    """
    if len(predictions) == 1:
        return predictions[0]
    found = [p for p in predictions if same_load(p.identity, measured.identity)]
    if len(found) > 1:
        found = [p for p in found if not work_differences(p, measured)]
    if len(found) != 1:
        loads = ", ".join(load_name(p) for p in predictions)
        raise NotComparable(f"{load_name(measured)}: no one prediction of this load; there are: {loads}")
    return found[0]


def scenario_for(scenario: Scenario, measured: BenchResult, path: Path | None = None) -> Scenario:
    """The scenario under the load that a measured run says it had; what it does not say stays.

    Args:
        path: the measured run's file: its requests are replayed as recorded, lengths and arrivals.

    Raises:
        BadInput: a replay of a file without per-request records.
    """
    spec = scenario.workload
    changes = {
        **_arrivals(spec, measured.identity),
        "burstiness": fact(measured.identity, "burstiness"),
        "num_prompts": fact(measured.identity, "num_prompts") or sent_requests(measured),
        "seed": fact(measured.identity, "seed"),
    }
    known = {key: value for key, value in changes.items() if value is not None or key in _MAY_BE_NONE}
    if isinstance(known.get("seed"), str):
        del known["seed"]
    if measured.tool == "servecast bench":
        # Our bench warms up with prompts of its own; vLLM's client repeats the load's first.
        known["num_warmups"] = 0
    spec = replace(spec, **known)
    notes = scenario.notes
    if path is not None:
        had_schedule = _has_schedule(measured, spec)
        if _shares_prompts(spec):
            notes = (*notes, Note("warning", REPLAY, UNSHARED))
        spec = _replayed(spec, measured, path, had_schedule)
        if had_schedule and not spec.use_trace_arrivals:
            notes = (*notes, Note("warning", REPLAY, CAPPED))
    seed = spec.seed if "seed" in known else scenario.seed
    return replace(scenario, workload=spec, seed=seed, notes=notes)


def _arrivals(spec: WorkloadSpec, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says of its times of sending, as changes of a load's description."""
    rate, cap = load_of(identity)
    pace = pace_of(identity)
    if pace.ramp is not None:
        ramp = {"request_rate": math.inf, "ramp_up": pace.ramp, "use_trace_arrivals": False}
        return {**ramp, "max_concurrency": cap}
    if pace.trace:
        timed = {"use_trace_arrivals": True, "ramp_up": None, "max_concurrency": cap}
        return timed if pace.scale is None else {**timed, "rate_scale": pace.scale}
    if rate is None:
        return {} if cap is None else {"max_concurrency": cap}
    changes: dict[str, Any] = {"request_rate": rate, "max_concurrency": cap}
    if same_rate(spec.request_rate, rate, identity):
        changes["request_rate"] = spec.request_rate  # a printed rate has fewer digits
    if fact(identity, "request_rate") is not None:  # a cap without a rate does not say that there was no ramp
        changes["ramp_up"] = None
    if pace.trace is False:
        changes["use_trace_arrivals"] = False
    return changes


def named(result: BenchResult, scenario: Scenario) -> BenchResult:
    """The result with the model's own name, where its client knew only the name that it was served under."""
    served = next((v for flag, v in scenario.engine.given if flag == "--served-model-name"), None)
    if served is None or result.identity.get("model") not in served.split():
        return result
    return replace(result, identity={**result.identity, "model": scenario.model.name})


def sent_requests(measured: BenchResult) -> int | None:
    """How many requests a report counts; None where it says of none."""
    completed = measured.aggregates.get("completed")
    return None if completed is None else int(completed + (measured.aggregates.get("failed") or 0)) or None


def _most_in_flight(records: RequestRecords) -> int:
    """Requests that were out at once, at most."""
    out = ~np.isnan(records.sent)
    sent = np.sort(records.sent[out])
    ended = np.sort(np.where(np.isnan(records.last_token), np.inf, records.last_token)[out])
    return int((np.arange(1, len(sent) + 1) - np.searchsorted(ended, sent, side="right")).max(initial=0))


def _has_schedule(measured: BenchResult, spec: WorkloadSpec) -> bool:
    """Whether the client had times of its own to send at: a rate, a trace's times, a ramp."""
    if followed_times(measured.identity):
        return True
    rate = load_of(measured.identity)[0]
    return not spec.closed_loop if rate is None else math.isfinite(rate)


def _shares_prompts(spec: WorkloadSpec) -> bool:
    """Whether requests of a load begin alike, which a result file does not tell."""
    anytime = replace(spec, request_rate=math.inf, use_trace_arrivals=False, ramp_up=None)
    try:
        prompts = [request.prompt for request in generate(anytime)]
    except BadInput:  # a load that the scenario leaves open
        return False
    names = [name for prompt in prompts for name, _ in prompt]
    return len(set(names)) < len(names)


def _replayed(spec: WorkloadSpec, measured: BenchResult, path: Path, had_schedule: bool) -> WorkloadSpec:
    records = measured.records
    if records is None:
        raise BadInput("--replay", str(path), "holds no per-request records to replay")
    sent = records.sent[~np.isnan(records.sent)]
    # Whoever waits for answers has no schedule: the cap sends its requests again.
    held = spec.max_concurrency is not None and _most_in_flight(records) >= spec.max_concurrency
    timed = len(sent) > 1 and not held and float(sent.max() - sent.min()) > 0.0
    follows = timed and had_schedule
    return replace(
        spec,
        dataset=FileDataset("vllm-result", str(path)),
        num_prompts=len(records),
        use_trace_arrivals=follows,
        rate_scale=1.0,
        ramp_up=None if follows else spec.ramp_up,
    )
