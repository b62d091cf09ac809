"""When the compiled kernels apply, and the way into and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engines.base import Scheduler
from sim.engines.glue import Limits
from sim.engines.sglang.scheduler import SglangScheduler
from sim.engines.vllm.scheduler import VllmScheduler
from sim.fast import sglang, sglang_state, vllm, vllm_state
from sim.fast.prices import RESOURCES, Beyond, FlatModel, flatten
from sim.fast.state import (
    AFTER_FIXED,
    AFTER_SEQ,
    ARRIVAL,
    ASKED,
    AT_ENGINE,
    BEFORE_FIXED,
    BEFORE_SEQ,
    CACHED,
    CAP,
    DELAY,
    DEVICE,
    FIRST_RESULT,
    FIRST_SCHEDULED,
    FIRST_TOKEN,
    FRONT_REQUEST,
    FRONT_TOKEN,
    HITS,
    HOST_TIME,
    IDLE_POLL,
    LAST_EMISSION,
    LAST_TOKEN,
    LATEST,
    LIMIT_SEQS,
    LIMIT_TOKENS,
    MAX_STEPS,
    MAX_USED,
    MEMBERS,
    MOST,
    OUTPUTS,
    OWN,
    OWN_F,
    PREEMPTED,
    PREEMPTIONS,
    PROMPT,
    QUERIES,
    RUN_FIRST,
    SENT_AT,
    STEPS,
    STOP,
    TROUBLE,
    WAITING,
    Run,
)  # fmt: skip
from sim.fast.tape import APART, EMISSIONS, GAPS, RUNS, SAMPLES, Tape
from sim.loop.recorder import TtftParts
from sim.loop.records import SimulatedRecords
from sim.loop.replica import Usage
from sim.loop.run import RunOutcome
from sim.loop.tokens import EmissionTable, num_gaps
from sim.request import Request, can_share_prefixes
from sim.results import ServerSeries
from sim.steptime.base import StepTimeModel
from sim.steptime.roofline import RooflineModel
from sim.workload.table import OwnPrompts, RequestTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_LIMIT = 1 << 40
WAITING_FOR = ("slots", "budget", "kv")
MOST_STEPS = 30_000_000  # beyond that the emissions would not fit into memory; leaps are shorter


class Load(NamedTuple):
    """A load as columns, shape (n,); `stop` is 0 where only a length limit ends a request."""

    prompt: Ints
    output: Ints
    stop: Ints
    arrival: Floats


def run_compiled(
    scheduler: Scheduler,
    requests: Sequence[Request],
    step_time: StepTimeModel,
    *,
    max_concurrency: int | None,
    stream_interval: int,
    idle_poll: float,
    limits: Limits,
) -> RunOutcome | None:
    """What `sim.loop.run.run` returns for requests ordered by arrival, or None where no kernel applies.

    It applies to a fresh scheduler under first come, first served, prompts of which no two begin alike, and a
    roofline without a calibrated range whose API process streams for nothing. None also if the run gets into
    trouble: the plain code then says what it is.
    """
    if not requests or step_time.front_end.output_token:
        return None
    if type(scheduler) is VllmScheduler:
        prepared = _prepare_vllm(scheduler, requests, step_time)
    elif type(scheduler) is SglangScheduler:
        prepared = _prepare_sglang(scheduler, requests, step_time)
    else:
        return None
    if prepared is None or not isinstance(step_time, RooflineModel):
        return None
    front, eff, floats = step_time.front_end, step_time.efficiencies, prepared.floats
    floats[FRONT_REQUEST], floats[FRONT_TOKEN], floats[DELAY] = (
        front.request,
        front.prompt_token,
        front.output_delay,
    )
    floats[BEFORE_FIXED], floats[BEFORE_SEQ] = eff.host_schedule, eff.host_schedule_seq
    floats[AFTER_FIXED], floats[AFTER_SEQ] = eff.host_update, eff.host_update_seq
    floats[IDLE_POLL] = idle_poll
    ints = prepared.ints
    ints[CAP], ints[MAX_STEPS] = max_concurrency or 0, MOST_STEPS
    ints[LIMIT_SEQS] = NO_LIMIT if limits.max_num_seqs is None else limits.max_num_seqs
    ints[LIMIT_TOKENS] = NO_LIMIT if limits.max_num_tokens is None else limits.max_num_tokens
    batches, ends = np.zeros((2, MEMBERS + prepared.width), np.int64), np.zeros((2, 2))
    kernel = vllm.simulate if type(scheduler) is VllmScheduler else sglang.simulate
    counted = Beyond.none()
    state = Run(
        prepared.model, counted, prepared.rows, prepared.times, ints, floats, batches, ends, np.zeros(2)
    )
    tape = kernel(state)
    if ints[TROUBLE]:
        return None
    return _outcome(requests, prepared, tape, counted, step_time, stream_interval)


class Prepared(NamedTuple):
    """A kernel's arguments; see `sim.fast.state`."""

    model: FlatModel
    rows: Ints
    times: Floats
    ints: Ints
    floats: Floats
    width: int
    total: int


def _prepare_vllm(
    scheduler: VllmScheduler, requests: Sequence[Request], step_time: StepTimeModel
) -> Prepared | None:
    config = scheduler.config
    if config.scheduling_policy != "fcfs" or scheduler.shares_prefixes:
        return None
    load, model = _columns(requests), flatten(step_time, ("mixed",))
    usable = config.num_gpu_blocks - 1
    longest = int(load.prompt.max())
    if model is None or longest >= config.max_model_len or -(-longest // config.block_size) > usable:
        return None
    most = np.minimum(load.output, config.max_model_len - load.prompt)
    rows, times = _rows(load, most, vllm_state.NUM_COLUMNS)
    ints, floats = np.zeros(vllm_state.NUM_K, np.int64), np.zeros(OWN_F)
    vllm_state.prepare(config, rows, ints)
    width = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
    return Prepared(model, rows, times, ints, floats, min(width, len(rows)), usable * config.block_size)


def _prepare_sglang(
    scheduler: SglangScheduler, requests: Sequence[Request], step_time: StepTimeModel
) -> Prepared | None:
    config = scheduler.config
    if (
        config.schedule_policy != "fcfs"
        or config.disable_radix_cache
        or config.mixes_chunks
        or config.enable_priority_scheduling
        or can_share_prefixes(requests)
    ):
        return None
    load, model = _columns(requests), flatten(step_time, ("prefill", "decode"))
    total, page = config.pool_tokens, config.page_size
    longest = min(config.context_length - 1, total - 1)
    asked = load.prompt + load.output
    if model is None or int(load.prompt.max()) >= longest - 5 or int(asked.max()) > config.context_length:
        return None
    # `SglangScheduler.add_request`.
    paged = -(-load.prompt // page) * page
    most = np.maximum(0, np.minimum(load.output, longest - load.prompt - 1))
    most = np.maximum(0, np.minimum(most, total - paged - page - 1))
    rows, times = _rows(load, most, sglang_state.NUM_COLUMNS)
    ints, floats = np.zeros(sglang_state.NUM_K, np.int64), np.zeros(sglang_state.NUM_F)
    sglang_state.prepare(config, scheduler.ratio, rows, ints, floats)
    return Prepared(model, rows, times, ints, floats, min(config.request_slots, len(rows)), total)


def _rows(load: Load, most: Ints, columns: int) -> tuple[Ints, Floats]:
    """R and times before anything happens."""
    rows, times = np.zeros((len(most), columns), np.int64), np.full((len(most), 8), np.nan)
    rows[:, PROMPT], rows[:, ASKED], rows[:, MOST], rows[:, STOP] = (
        load.prompt,
        load.prompt + load.output,
        most,
        load.stop,
    )
    rows[:, CACHED] = rows[:, RUN_FIRST] = -1
    rows[:, LAST_EMISSION] = -2
    times[:, ARRIVAL] = load.arrival
    return rows, times


def _columns(requests: Sequence[Request]) -> Load:
    if isinstance(requests, RequestTable) and isinstance(requests.prompts, OwnPrompts):
        outputs = requests.output_lens
        stops = outputs if requests.stops else np.zeros_like(outputs)
        return Load(requests.prompts.lens, outputs, stops, requests.arrivals)
    lengths = [(r.prompt_len, r.max_tokens, r.stop_after or 0) for r in requests]
    numbers = np.array(lengths, dtype=np.int64)
    arrivals = np.array([r.arrival for r in requests], dtype=np.float64)
    prompt, output, stop = (np.ascontiguousarray(column) for column in numbers.T)
    return Load(prompt, output, stop, arrivals)


def _outcome(
    requests: Sequence[Request],
    prepared: Prepared,
    tape: Tape,
    counted: Beyond,
    model: RooflineModel,
    interval: int,
) -> RunOutcome:
    _, rows, times, ints, floats, _, total = prepared
    by_row, by_time = np.ascontiguousarray(rows.transpose()[:OWN]), np.ascontiguousarray(times.transpose())
    parts = TtftParts(
        client_wait=by_time[SENT_AT] - by_time[ARRIVAL],
        front_end=by_time[AT_ENGINE] - by_time[SENT_AT],
        queue=by_time[FIRST_SCHEDULED] - by_time[AT_ENGINE],
        prefill=by_time[FIRST_RESULT] - by_time[FIRST_SCHEDULED],
        stream=by_time[FIRST_TOKEN] - by_time[FIRST_RESULT],
    )
    offsets = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(num_gaps(by_row[OUTPUTS], interval), out=offsets[1:])
    records = SimulatedRecords(
        request_id=requests.ids
        if isinstance(requests, RequestTable)
        else tuple(r.request_id for r in requests),
        scheduled=by_time[ARRIVAL],
        sent=by_time[SENT_AT],
        first_token=by_time[FIRST_TOKEN],
        last_token=by_time[LAST_TOKEN],
        prompt_len=by_row[PROMPT],
        output_len=by_row[OUTPUTS],
        cached_tokens=by_row[CACHED],
        status=("ok",) * len(requests),
        itl_offsets=offsets,
        queue=parts.queue,
        prefill=parts.prefill,
        preemptions=by_row[PREEMPTED],
        emissions=_emissions(tape, model.front_end.output_delay, interval),
    )
    device = dict(zip(RESOURCES, floats[DEVICE : DEVICE + 3].tolist(), strict=True)) | {
        "host": float(floats[HOST_TIME])
    }
    waiting = dict(zip(WAITING_FOR, floats[WAITING : WAITING + 3].tolist(), strict=True))
    usage = Usage(
        device={name: seconds for name, seconds in device.items() if seconds},
        waiting={name: seconds for name, seconds in waiting.items() if seconds},
        out_of_range=counted.reasons(model, "mixed"),
        steps=int(ints[STEPS]),
        preemptions=int(ints[PREEMPTIONS]),
        prefix_queries=int(ints[QUERIES]),
        prefix_hits=int(ints[HITS]),
        max_kv_used_tokens=int(ints[MAX_USED]),
        kv_total_tokens=total,
    )
    series = ServerSeries(*tape.samples[: tape.counts[SAMPLES]].T.copy())
    return RunOutcome(records, parts, series, usage, float(floats[LATEST]), "compiled")


def _emissions(tape: Tape, delay: float, interval: int) -> EmissionTable:
    counts, no_floats, no_ints = tape.counts, np.empty(0), np.empty(0, dtype=np.int64)
    emissions, runs, gaps = counts[EMISSIONS], tape.runs[: counts[RUNS]], tape.gaps[: counts[GAPS]]
    return EmissionTable(
        base=tape.base[:emissions],
        size=np.ascontiguousarray(tape.sizes[:emissions, 0]),
        stayed=np.ascontiguousarray(tape.sizes[:emissions, 1]),
        leap_piece=no_ints,
        leap_count=no_ints,
        leap_gap=no_floats,
        leap_slope=no_floats,
        gaps=np.column_stack((gaps, np.ones(len(gaps)))),
        run_row=runs[:, 0],
        run_first=runs[:, 1],
        run_last=runs[:, 2],
        run_place=np.zeros(len(runs), dtype=np.int64),
        apart_row=tape.apart_row[: counts[APART]],
        apart_time=tape.apart_time[: counts[APART]],
        cost=0.0,
        delay=delay,
        start=0.0,
        interval=interval,
    )
