"""Traffic at a wanted rate: windows of recorded traces, and what the clients themselves would send."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.errors import BadInput
from sim.request import Request
from sim.workload.datasets import Prompts
from sim.workload.generate import generate
from sim.workload.spec import FileDataset, WorkloadSpec
from sim.workload.table import OwnPrompts
from sim.workload.traces import read_trace

Floats = NDArray[np.float64]
BLOCK = 50  # neighbours in a trace that stay together: bursts are shorter, drifts are longer


@lru_cache(maxsize=8)
def trace_of(dataset: FileDataset) -> Prompts:
    """A trace, read once per process. Raises BadInput naming file, line and field."""
    return read_trace(dataset)


def is_trace(spec: WorkloadSpec) -> bool:
    """Whether the load comes from a recorded trace (ShareGPT files are drawn from, not replayed)."""
    return isinstance(spec.dataset, FileDataset) and spec.dataset.kind != "sharegpt"


def native_rate(spec: WorkloadSpec) -> float:
    """Requests/s of the whole trace as it was recorded; 1 if it has no times."""
    assert isinstance(spec.dataset, FileDataset)
    times = trace_of(spec.dataset).arrivals
    if times is None or len(times) < 2 or times[-1] <= times[0]:
        return 1.0
    return float((len(times) - 1) / (times[-1] - times[0]))


def requests_at(spec: WorkloadSpec, seed: int, part: int = 0, parts: int = 1) -> list[Request]:
    """The requests of a load under a seed.

    Of a trace it is `num_prompts` requests out of all parts of it, for recorded traffic drifts: blocks of
    neighbours, evenly spread from a start that the seed draws; replications `part` of `parts` lie in each
    other's gaps. Where prompts share beginnings or sessions it is one window, in which reuse survives.
    Recorded arrivals are stretched to `request_rate` (if finite), which keeps the bursts within blocks.

    Raises:
        BadInput: what cannot be read or used.
    """
    if not is_trace(spec):
        return generate(spec, seed)
    assert isinstance(spec.dataset, FileDataset)
    trace = trace_of(spec.dataset)
    total, n = len(trace), min(spec.num_prompts, len(trace))
    rows = _rows(total, n, total if shares_prompts(trace) else BLOCK, seed, part / parts)
    arrivals = _arrivals(spec, trace, rows, seed)
    stops = spec.ignore_eos or trace.forces_ignore_eos
    return [
        Request(
            str(i),
            trace.segments[row],
            trace.output_lens[row],
            float(arrivals[i]),
            None if stops else trace.output_lens[row],
            0 if trace.priorities is None else trace.priorities[row],
            None if trace.sessions is None else trace.sessions[row],
        )
        for i, row in enumerate(rows)
    ]


def _rows(total: int, n: int, block: int, seed: int, shift: float) -> list[int]:
    """Rows of `n` requests in blocks, evenly spread over `total` rows; `shift` (0..1) moves into the gaps."""
    blocks = max(1, round(n / block))
    start = np.random.default_rng(seed).random() * total + shift * total / blocks
    counts = np.diff(np.round(np.linspace(0, n, blocks + 1)).astype(int))
    firsts = [int(start + k * total / blocks) for k in range(blocks)]
    return [(first + i) % total for first, count in zip(firsts, counts, strict=True) for i in range(count)]


def shares_prompts(trace: Prompts) -> bool:
    """Whether requests of a trace begin alike or belong to sessions."""
    if trace.sessions is not None and any(session is not None for session in trace.sessions):
        return True
    if isinstance(trace.segments, OwnPrompts):
        return False
    seen: set[object] = set()
    for segments in trace.segments:
        if segments and segments[0][0] in seen:
            return True
        seen.add(segments[0][0] if segments else None)
    return False


def _arrivals(spec: WorkloadSpec, trace: Prompts, rows: list[int], seed: int) -> Floats:
    """Send times of a window, from 0 [s]."""
    n, rate = len(rows), spec.request_rate
    if not spec.use_trace_arrivals:
        timed = replace(spec, dataset=WorkloadSpec().dataset, num_prompts=n)
        return np.array([r.arrival for r in generate(timed, seed)])
    if trace.arrivals is None:
        raise BadInput("--dataset-name", str(spec.dataset), "brings no arrival times; give --request-rate")
    gaps = np.diff(trace.arrivals)
    wrap = float(gaps.mean()) if len(gaps) else 0.0
    between = np.array([gaps[a] if b == a + 1 else wrap for a, b in pairwise(rows)])  # wrap: between blocks
    times: Floats = np.concatenate(([0.0], np.cumsum(between)))
    if np.isfinite(rate) and n > 1 and times[-1] > 0:
        times *= ((n - 1) / rate) / times[-1]
        return times
    return times / spec.rate_scale
