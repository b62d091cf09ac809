"""What was measured, in the three forms that a fit takes, checked before anything is made of it.

ClientRun   one run as its client saw it: per request, or only as figures
StepRun     steps that the engine's own probe timed
(kernel tables are a prior, not evidence of an engine: see `calibration.kernels`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.told import scenario_of
from sim.engines.base import ScheduledChunk, StepPlan, StepShape
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.paths import file_text
from sim.request import Request
from sim.results import BenchResult, RequestRecords
from sim.scenario import Scenario
from sim.workload.generate import generate, generate_load
from sim.workload.spec import WorkloadSpec
from sim.workload.starts import other_starts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLOCK_SLACK = 1e-3  # a message may be stamped this much before the one it answers [s]
LONGEST = 1e5  # no run of a benchmark lasts longer [s]; milliseconds taken for seconds do
MIN_FIGURES = ("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_itl_ms", "output_throughput")


@dataclass(frozen=True, slots=True)
class PerRequest:
    """One entry per request, in the order of sending; times in seconds, NaN where unknown.

    Attributes:
        requests: as sent: `arrival` counts from the first one.
        ttft: from sending to the first token.
        decode: from the first to the last token.
        output_len: tokens that came.
        token_times: of each request, from its sending, one per output token; empty where the client did not
            record them or a message held several tokens.
    """

    requests: tuple[Request, ...]
    ttft: Floats
    decode: Floats
    output_len: Ints
    token_times: tuple[Floats, ...]

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class ClientRun:
    """One run as a client saw it.

    Attributes:
        name: the file, for messages.
        scenario: engine, model, GPU and load; a closed loop's cap is in its workload.
        figures: aggregates under `vllm bench serve`'s keys (ms); used where there is nothing per request.
        requests: per request, or None.
    """

    name: str
    scenario: Scenario
    figures: Mapping[str, float | int | None]
    requests: PerRequest | None = None

    def sent(self, reseeded: int = 0) -> Sequence[Request]:
        """The requests: as recorded, else generated with the seed moved by `reseeded`."""
        if self.requests is not None:
            return self.requests.requests
        return generate(self.scenario.workload, self.scenario.workload.seed + reseeded)

    def other_starts(self, rate: float | None) -> Sequence[Sequence[Request]]:
        """A generated load with other starts; none if it was recorded or does not keep its start.

        Args:
            rate: what the run completes [requests/s].
        """
        spec = self.scenario.workload
        if self.requests is not None or not rate:
            return []
        return other_starts(spec, generate_load(spec).requests, rate)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps timed inside the engine.

    Attributes:
        shapes, seconds: of every step; a step's own time, without the pause before it.
        start: when it began [s].
    """

    name: str
    scenario: Scenario
    shapes: tuple[StepShape, ...]
    seconds: Floats
    start: Floats


Evidence = ClientRun | StepRun


def client_run(result: BenchResult, name: str, scenario: Scenario | None = None) -> ClientRun:
    """A measured result as evidence.

    Args:
        result: as `sim.results_io.files.read_result` returns it.
        name: the file, for messages.
        scenario: what was run; without it, the result's own identity must say so (bench results do).

    Raises:
        BadInput: an INVALID run, a prediction, one without lengths, or clocks or units that cannot be right;
            names file and field.
    """
    if result.origin != "measured":
        raise BadInput(name, None, "is a prediction; only measurements calibrate")
    if result.verdict.status == "INVALID":
        reasons = "; ".join(note.text for note in result.verdict.reasons)
        raise BadInput(f"{name} verdict", "INVALID", f"cannot calibrate ({reasons})")
    if scenario is None:
        scenario = scenario_of(result.identity, name)
    else:
        check_identity(result.identity, scenario, name)
    if result.records is None:
        if not any(result.aggregates.get(key) for key in MIN_FIGURES):
            raise BadInput(name, None, f"holds none of {', '.join(MIN_FIGURES)}")
        return ClientRun(name, scenario, dict(result.aggregates))
    check_records(result.records, result.duration, name)
    return ClientRun(
        name, scenario, dict(result.aggregates), per_request(result.records, scenario.workload, name)
    )


def check_identity(identity: Mapping[str, Any], scenario: Scenario, name: str) -> None:
    """Refuse a result that says it comes from another engine, model or GPU than the scenario's."""
    said = {"engine": scenario.engine.name, "model": scenario.model.name, "gpu": scenario.gpu.name}
    for key, ours in said.items():
        theirs = identity.get(key)
        if theirs is not None and str(theirs).lower() != ours.lower():
            raise BadInput(f"{name} identity.{key}", str(theirs), f"the scenario has {ours}")


def check_records(records: RequestRecords, duration: float, name: str) -> None:
    """Refuse records whose clocks or units cannot be right.

    Raises:
        BadInput: names file, request and field.
    """
    ok = np.array([status == "ok" for status in records.status], dtype=np.bool_)
    if not ok.any():
        raise BadInput(f"{name} status", None, "no request succeeded")
    if bool((records.prompt_len[ok] <= 0).any()) or bool((records.output_len[ok] <= 0).any()):
        raise BadInput(
            f"{name} input_lens/output_lens", None, "are missing; a fit needs every request's lengths"
        )
    _refuse(
        ok & (records.first_token < records.sent - CLOCK_SLACK), name, "first_token", "before it was sent"
    )
    late = records.last_token < records.first_token - CLOCK_SLACK
    _refuse(ok & late, name, "last_token", "before its first token: the clock goes backwards")
    if bool((records.itls < -CLOCK_SLACK).any()):
        raise BadInput(f"{name} itls", None, "has negative gaps: the clock goes backwards")
    spans = (records.last_token - records.sent)[ok]
    longest = float(np.nanmax(spans))
    if longest > LONGEST or (duration > 0 and longest > 1.5 * duration):
        hint = f"a request took {longest:g} s of a run of {duration:g} s; are these milliseconds?"
        raise BadInput(f"{name} latencies", None, hint)
    counts = np.diff(records.itl_offsets)
    gaps = np.array(
        [
            records.itls[a:b].sum()
            for a, b in zip(records.itl_offsets[:-1], records.itl_offsets[1:], strict=True)
        ]
    )
    told = ok & (counts > 0)
    decode = records.last_token - records.first_token
    wrong = told & (np.abs(gaps - decode) > 0.5 * np.maximum(decode, 0.01))
    if bool(wrong.any()) and float(wrong.sum()) > 0.5 * float(told.sum()):
        i = int(np.flatnonzero(wrong)[0])
        took = f"its decode took {decode[i]:g} s"
        hint = f"of request {records.request_id[i]} add up to {gaps[i]:g}, {took}; wrong unit?"
        raise BadInput(f"{name} itls", None, hint)


def _refuse(wrong: NDArray[np.bool_], name: str, field: str, why: str) -> None:
    if bool(wrong.any()):
        raise BadInput(f"{name} {field}", None, f"request {int(np.flatnonzero(wrong)[0])}: {why}")


def per_request(records: RequestRecords, spec: WorkloadSpec, name: str) -> PerRequest:
    """Successful requests in the order of sending, with prompts that share what the load says they share."""
    ok = np.flatnonzero(np.array([status == "ok" for status in records.status], dtype=np.bool_))
    order = ok[np.argsort(records.sent[ok], kind="stable")]
    prompts = _prompts(records, spec)
    first = float(records.sent[order[0]])
    requests, times = [], []
    for i in order.tolist():
        length = int(records.output_len[i])
        requests.append(Request(records.request_id[i], prompts[i], length, float(records.sent[i]) - first))
        gaps = records.itls[records.itl_offsets[i] : records.itl_offsets[i + 1]]
        own = records.first_token[i] - records.sent[i]
        times.append(
            np.concatenate(([own], own + np.cumsum(gaps))) if len(gaps) == length - 1 else np.empty(0)
        )
    if len({r.request_id for r in requests}) != len(requests):
        raise BadInput(f"{name} request_id", None, "is not unique")
    return PerRequest(
        tuple(requests),
        (records.first_token - records.sent)[order],
        (records.last_token - records.first_token)[order],
        records.output_len[order],
        tuple(times),
    )


def _prompts(records: RequestRecords, spec: WorkloadSpec) -> list[tuple[tuple[int | str, int], ...]]:
    """Segments of every prompt: the load's own where it generates the same lengths, else nobody shares."""
    alone: list[tuple[tuple[int | str, int], ...]] = [
        ((i, int(n)),) for i, n in enumerate(records.prompt_len)
    ]
    try:
        made = generate(spec) if spec.num_prompts == len(records) else []
    except BadInput:
        return alone
    same = len(made) == len(records) and all(
        r.prompt_len == int(n) for r, n in zip(made, records.prompt_len, strict=True)
    )
    return [r.prompt for r in made] if same else alone


def step_run(path: Path, scenario: Scenario) -> StepRun:
    """The steps of a probe's file (`bench/probe`: one JSON object a line, `ev` says what).

    A step that began after an idle pause may contain it where the probe did not say when the step ended;
    such a step is left out.

    Raises:
        BadInput: names file, line and field.
    """
    shapes: list[StepShape] = []
    seconds: list[float] = []
    starts: list[float] = []
    last = -np.inf
    records = list(_json_lines(path))
    lengths = {
        r["id"]: int(r["prompt_len"]) for _, r in records if r.get("ev") == "add" and "prompt_len" in r
    }
    steps = [(line, r) for line, r in records if r.get("ev") == "step"]
    for index, (line, record) in enumerate(steps):
        where = f"{path} line {line}"
        for key in ("t", "dt_ms", "scheduled", "computed"):
            if key not in record:
                raise BadInput(f"{where} {key}", None, "is missing; is this a step file?")
        if record["t"] < last - CLOCK_SLACK:
            raise BadInput(f"{where} t", record["t"], "lies before the step above: the clock goes backwards")
        last = record["t"]
        took = float(record["dt_ms"]) / 1e3
        if took > LONGEST or took < 0:
            raise BadInput(f"{where} dt_ms", record["dt_ms"], "is no step's duration in milliseconds")
        drained = "end" not in record and _drains(steps, index)
        if took > 0 and record["scheduled"] and not drained:
            shapes.append(_shape(record, lengths))
            seconds.append(took)
            starts.append(float(record["end"]) - took if "end" in record else float(record["t"]))
    if not shapes:
        raise BadInput(str(path), None, "holds no timed step")
    return StepRun(str(path), scenario, tuple(shapes), np.array(seconds), np.array(starts))


def _drains(steps: Sequence[tuple[int, Mapping[str, Any]]], index: int) -> bool:
    """Whether the engine may have been idle after this step: the next one has none of its requests."""
    if index + 1 == len(steps):
        return True
    return not set(steps[index][1]["scheduled"]) & set(steps[index + 1][1]["scheduled"])


def _shape(record: Mapping[str, Any], lengths: Mapping[str, int]) -> StepShape:
    plan = StepPlan(int(record.get("step", 0)), "mixed")
    for rid, count in record["scheduled"].items():
        start = int(record["computed"].get(rid, 0))
        samples = start + count >= lengths.get(rid, 0)
        request = Request(rid, ((rid, max(1, lengths.get(rid, start + count))),), 1)
        plan.scheduled.append(ScheduledChunk(request, start, int(count), samples))
    return plan.shape()


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        text = file_text(path)
    except OSError as error:
        raise BadInput("steps", str(path), f"cannot be read: {error.strerror}") from None
    found = []
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            value = load_json(content)
        except json.JSONDecodeError:
            if line == text.count("\n") + 1:  # cut by a kill
                break
            raise BadInput(f"{path} line {line}", None, "is not JSON") from None
        if not isinstance(value, dict):
            raise BadInput(f"{path} line {line}", None, "must be a JSON object")
        found.append((line, value))
    return found


def check_together(evidence: Sequence[Evidence]) -> None:
    """Refuse evidence that one set of coefficients cannot describe.

    Raises:
        BadInput: nothing at all, or several engines, engine versions, models, quantisations, GPUs or
            tensor-parallel sizes; names the two files.
    """
    if not evidence:
        raise BadInput("--from", None, "no measurement was given")
    first = evidence[0]
    for other in evidence[1:]:
        for what, ours, theirs in zip(
            ("engine", "engine version", "model", "quantisation", "GPU", "tensor-parallel size"),
            _subject(first.scenario),
            _subject(other.scenario),
            strict=True,
        ):
            if ours != theirs:
                raise BadInput(
                    f"{other.name} {what}", str(theirs), f"{first.name} has {ours}; fit them apart"
                )


def _subject(scenario: Scenario) -> tuple[object, ...]:
    engine = scenario.engine
    return (
        engine.name,
        engine.asked_version,
        scenario.model.name,
        str(scenario.model.quant),
        scenario.gpu.name,
        engine["tensor_parallel_size"],
    )
