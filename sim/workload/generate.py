"""From the description of a load to its requests: the same load for the simulator and for the bench."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.loop.collector import collector_off
from sim.provenance import Note
from sim.request import Request
from sim.workload.arrivals import check_arrivals, sglang_arrivals, vllm_arrivals
from sim.workload.datasets import Prompts, prefix_repetition, sglang_random, vllm_random
from sim.workload.sharegpt import read_sharegpt
from sim.workload.spec import FileDataset, PrefixRepetitionDataset, RandomDataset, WorkloadSpec
from sim.workload.table import RequestTable
from sim.workload.traces import first, read_trace

Floats = NDArray[np.float64]
MAX_PROMPTS = 10_000_000  # more would not fit into a machine's memory
MAX_SPAN = 1e7  # of send times [s], four months: output is counted second by second
MAX_SEED = 2**32 - 1  # numpy's legacy generator takes no larger one, and neither do the clients


@dataclass(frozen=True, slots=True)
class Load:
    """A generated load.

    Attributes:
        requests: in order of their scheduled send times.
        notes: what the user should know: estimated lengths, rows left out, prompts repeated.
    """

    requests: RequestTable
    notes: tuple[Note, ...]


def generate(spec: WorkloadSpec, seed: int | None = None) -> list[Request]:
    """The requests of a load, ordered by arrival; request i of the client has the id `str(i)`.

    With `request_rate` inf every arrival is 0; who enforces `max_concurrency` sends them as slots fall
    free. Warm-ups are not among them: see `warmups`.

    Args:
        spec: the load.
        seed: instead of `spec.seed`.

    Raises:
        BadInput: a value or a file that cannot be used, named.
    """
    return list(generate_load(spec, seed).requests)


def generate_load(spec: WorkloadSpec, seed: int | None = None) -> Load:
    """`generate`, with the notes that belong to it."""
    seed = spec.seed if seed is None else seed
    check_spec(spec, seed)
    with collector_off():
        return _generate(spec, seed)


def _generate(spec: WorkloadSpec, seed: int) -> Load:
    rng = np.random.RandomState(seed)
    prompts = _prompts(spec, seed, rng)
    if spec.use_trace_arrivals:
        if prompts.arrivals is None:
            raise BadInput(
                "--dataset-name", _dataset_name(spec), "brings no arrival times; give --request-rate"
            )
        arrivals = prompts.arrivals / spec.rate_scale
    else:
        with np.errstate(all="ignore"):  # what no number can hold is refused below
            arrivals = _drawn_arrivals(spec, len(prompts), rng)
    count = len(prompts)
    _check_span(spec, arrivals)
    if spec.duration is not None:
        count = int(np.searchsorted(arrivals, spec.duration, side="right"))
        if count == 0:
            raise BadInput(
                "--duration", spec.duration, f"ends before the first request ({arrivals[0]:.3f} s)"
            )
    return Load(_requests(spec, prompts, arrivals, count), prompts.notes)


def check_spec(spec: WorkloadSpec, seed: int) -> None:
    """Refuse values that describe no load.

    Raises:
        BadInput: naming the client's flag.
    """
    check_arrivals(spec.request_rate, spec.burstiness, spec.ramp_up, spec.client)
    for flag, value, low in (
        ("--num-prompts", spec.num_prompts, 1),
        ("--max-concurrency", spec.max_concurrency, 1),
        ("--num-warmups", spec.num_warmups, 0),
    ):
        if value is not None and value < low:
            raise BadInput(flag, value, f"must be at least {low}")
        if value is not None and value > MAX_PROMPTS and flag != "--max-concurrency":
            raise BadInput(flag, value, f"must be at most {MAX_PROMPTS:,}")
    if not 0 <= seed <= MAX_SEED:
        raise BadInput("--seed", seed, f"must be between 0 and {MAX_SEED}")
    for flag, number in (("--rate-scale", spec.rate_scale), ("--duration", spec.duration)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise BadInput(flag, number, "must be above 0 and finite")
    fixed = spec.dataset.output_len if isinstance(spec.dataset, FileDataset) else None
    if fixed is not None and fixed < 1:
        raise BadInput("--output-len", fixed, "must be at least 1")


def _drawn_arrivals(spec: WorkloadSpec, n: int, rng: np.random.RandomState) -> Floats:
    if spec.client == "sglang":
        return sglang_arrivals(n, spec.request_rate, rng)
    return vllm_arrivals(n, spec.request_rate, spec.burstiness, spec.ramp_up, rng)


def _check_span(spec: WorkloadSpec, arrivals: Floats) -> None:
    last = float(arrivals[-1]) if len(arrivals) else 0.0
    if last <= MAX_SPAN:  # false of NaN too
        return
    hint = f"the last of {len(arrivals):,} requests would go out after more than {MAX_SPAN:.0e} s"
    if spec.use_trace_arrivals:
        raise BadInput("--rate-scale", spec.rate_scale, hint)
    if spec.ramp_up is not None:
        raise BadInput("--ramp-up-start-rps", spec.ramp_up[1], hint)
    if len(arrivals) / spec.request_rate <= MAX_SPAN:
        raise BadInput("--burstiness", spec.burstiness, "is too small: gaps exceed what a number can hold")
    raise BadInput("--request-rate", spec.request_rate, hint)


def warmups(spec: WorkloadSpec, requests: Sequence[Request]) -> list[Request]:
    """The warm-up requests: `num_warmups` copies of request 0 (vllm/benchmarks/serve.py, 0.28).

    The client sends them all at once (under `max_concurrency`) and waits for the last answer before its
    clock starts. Those after the first find the prompt in the prefix cache, and so does request 0 later.
    """
    client_first = next((r for r in requests if r.request_id == "0"), None)
    if client_first is None or not spec.num_warmups:
        return []
    return [replace(client_first, request_id=f"warmup-{i}", arrival=0.0) for i in range(spec.num_warmups)]


def _dataset_name(spec: WorkloadSpec) -> str:
    dataset = spec.dataset
    if isinstance(dataset, RandomDataset):
        return "random"
    return "prefix_repetition" if isinstance(dataset, PrefixRepetitionDataset) else dataset.kind


def _prompts(spec: WorkloadSpec, seed: int, rng: np.random.RandomState) -> Prompts:
    """Lengths and prefixes; `rng` is the client's global stream, from which the gaps come afterwards."""
    dataset, n = spec.dataset, spec.num_prompts
    if isinstance(dataset, RandomDataset):
        return vllm_random(dataset, n, seed) if dataset.style == "vllm" else sglang_random(dataset, n, rng)
    if isinstance(dataset, PrefixRepetitionDataset):
        return prefix_repetition(dataset, n, seed)
    if dataset.kind == "sharegpt":
        return read_sharegpt(dataset, n, seed, spec.client)
    trace = read_trace(dataset)
    cut = first(trace, n)
    if len(cut) < n:
        note = Note("warning", dataset.path, f"holds {len(cut)} requests, {n} asked for: all are sent, once")
        return replace(cut, notes=(*cut.notes, note))
    return cut


def _requests(spec: WorkloadSpec, prompts: Prompts, arrivals: Floats, count: int) -> RequestTable:
    ignores_eos = spec.ignore_eos or prompts.forces_ignore_eos
    return RequestTable(
        prompts.segments,
        prompts.output_lens,
        arrivals[:count],
        # A length from a trace is where the model stopped; without ignore_eos it stops there again.
        stops=not ignores_eos,
        priorities=prompts.priorities,
        sessions=prompts.sessions,
    )
