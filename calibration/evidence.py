"""What was measured, in the three forms that a fit takes, checked before anything is made of it.

ClientRun   one run as its client saw it: per request, or only as figures
StepRun     steps that the engine's own probe timed
(kernel tables are a prior, not evidence of an engine: see `calibration.kernels`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.prompts import recorded_prompts
from calibration.told import scenario_of
from sim.engines.base import StepShape
from sim.errors import BadInput
from sim.provenance import Note
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
WORK_SLACK = 0.10  # of a length: tokenizers and chat templates add and drop a few tokens
CHANCE = 4.0  # standard errors by which the mean of another draw of the same lengths may differ
FACTS = ("date", "image_digest", "engine_version")
SUBJECT = (
    "engine",
    "engine version",
    "model",
    "quantisation",
    "dtype",
    "KV cache dtype",
    "GPU",
    "tensor-parallel size",
)
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
        unshared: why prompts that had something in common are taken as if they had not; None: they are not.
    """

    requests: tuple[Request, ...]
    ttft: Floats
    decode: Floats
    output_len: Ints
    token_times: tuple[Floats, ...]
    unshared: str | None = None

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
        facts: what the result says of its run beside the scenario, of `FACTS`; absent is unknown.
        notes: what speaks against the run, and what is not known of it.
    """

    name: str
    scenario: Scenario
    figures: Mapping[str, float | int | None]
    requests: PerRequest | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

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
        return ClientRun(
            name, scenario, dict(result.aggregates), facts=_facts(result), notes=tuple(_doubts(result))
        )
    check_records(result.records, result.duration, name)
    requests = per_request(result.records, scenario.workload, name)
    notes = _doubts(result)
    if requests.unshared is not None:
        notes.append(Note("warning", "prefixes", requests.unshared))
    return ClientRun(name, scenario, dict(result.aggregates), requests, _facts(result), tuple(notes))


def _doubts(result: BenchResult) -> list[Note]:
    """Why the bench itself doubts a run."""
    if result.verdict.status != "SUSPECT":
        return []
    return [
        replace(reason, kind="warning", text=f"SUSPECT: {reason.text}")
        for reason in result.verdict.reasons
        if reason.subject != "small_sample"  # which speaks of percentiles; a fit takes every request
    ]


def _facts(result: BenchResult) -> dict[str, str]:
    told = {key: result.extra.get(key) or result.identity.get(key) for key in FACTS}
    return {key: value for key, value in told.items() if isinstance(value, str)}


def check_work(run: ClientRun) -> None:
    """Refuse figures of a run whose requests had other lengths than the load that is simulated for it.

    Per-request records bring their own lengths; of figures, the token totals tell.

    Raises:
        BadInput: names the total, and the mean length that the load makes.
    """
    done = run.figures.get("completed")
    if run.requests is not None or not done:
        return
    made = generate(run.scenario.workload)
    for key, flag, lengths in (
        ("total_input_tokens", "--random-input-len", [request.prompt_len for request in made]),
        ("total_output_tokens", "--random-output-len", [request.max_tokens for request in made]),
    ):
        told = run.figures.get(key)
        if told is None:
            continue
        ours, theirs = float(np.mean(lengths)), float(told) / float(done)
        chance = CHANCE * float(np.std(lengths)) / math.sqrt(len(lengths))
        if abs(ours - theirs) > WORK_SLACK * theirs + chance:
            hint = (
                f"is {theirs:.5g} tokens a request, but the load of the scenario makes {ours:.5g}: give the "
                f"run's own benchmark command (--bench, {flag} and so on)"
            )
            raise BadInput(f"{run.name} {key}", told, hint)


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
    """Successful requests in the order of sending, with prompts that share what the load says they share.

    Raises:
        BadInput: two requests have one id.
    """
    ok = np.flatnonzero(np.array([status == "ok" for status in records.status], dtype=np.bool_))
    order = ok[np.argsort(records.sent[ok], kind="stable")]
    prompts, unshared = recorded_prompts(records, spec)
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
        unshared,
    )


def check_together(evidence: Sequence[Evidence]) -> None:
    """Refuse evidence that one set of coefficients cannot describe.

    Raises:
        BadInput: nothing at all, or several of what `SUBJECT` names; names the two files.
    """
    if not evidence:
        raise BadInput("--from", None, "no measurement was given")
    first = evidence[0]
    for other in evidence[1:]:
        for what, ours, theirs in zip(
            SUBJECT,
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
        scenario.model.dtype,
        str(engine["kv_cache_dtype"]),
        scenario.gpu.name,
        engine["tensor_parallel_size"],
    )
