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
from sim.workload.traces import read_trace

Floats = NDArray[np.float64]


@lru_cache(maxsize=8)
def trace_of(dataset: FileDataset) -> Prompts:
    """A trace, read once per process. Raises BadInput naming file, line and field."""
    return read_trace(dataset)


def is_trace(spec: WorkloadSpec) -> bool:
    """Whether the load comes from a recorded trace (ShareGPT files are drawn from, not replayed)."""
    return isinstance(spec.dataset, FileDataset) and spec.dataset.kind != "sharegpt"


def requests_at(spec: WorkloadSpec, seed: int, part: int = 0, parts: int = 1) -> list[Request]:
    """The requests of a load under a seed.

    Of a trace it is a window of `num_prompts` requests: replications `part` of `parts` lie evenly spread
    over the trace, and the seed moves them all, so that together they see the trace's mix at any seed.
    Recorded arrivals are stretched to `request_rate` (if finite), which keeps the bursts within the window.

    Raises:
        BadInput: what cannot be read or used.
    """
    if not is_trace(spec):
        return generate(spec, seed)
    assert isinstance(spec.dataset, FileDataset)
    trace = trace_of(spec.dataset)
    total, n = len(trace), min(spec.num_prompts, len(trace))
    start = int((np.random.default_rng(seed).random() + part / parts) * total) % total
    rows = [(start + i) % total for i in range(n)]
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
    between = np.array([gaps[a] if b == a + 1 else wrap for a, b in pairwise(rows)])
    times: Floats = np.concatenate(([0.0], np.cumsum(between)))
    if np.isfinite(rate) and n > 1 and times[-1] > 0:
        times *= ((n - 1) / rate) / times[-1]
        return times
    return times / spec.rate_scale
