"""Measured intervals lined up with the simulated steps that they span.

The scheduler is exact, so a replay says which steps lie between two moments of a request's life. Each
measured interval is then a sum of step durations, one row of a regression. With the schedule held, rows are
smooth in the coefficients, which the simulated latencies themselves are not: a request that misses a step by
a microsecond waits for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from calibration.evidence import PerRequest
from calibration.replay import Replay
from sim.steptime.base import FrontEnd

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MIN_AGREEMENT = 0.2
# How many steps may lie between two first tokens for these to be compared: few, where the replay's steps may
# be some percent off, and it would count one too many or too few.
NEAR, APART = 8, 64
PAUSE = 2e-3  # between two steps, the host may let the device wait this long [s]
SAME_STEP = 1e-4  # tokens of one step reach the client within this [s]
PIECE = 16  # gaps per row where every token's time is known: short enough to tell kinds of steps apart


@dataclass(frozen=True, slots=True)
class Rows:
    """Intervals over steps; every array has shape (rows,).

    An interval lasts

        fixed + front(coefficients) + delays * output_delay
              + share * duration[before] + sum(duration[first : last + 1])

    Attributes:
        kind: 0 for a time to first token, 1 for gaps between tokens, 2 for a step that was timed alone.
        measured: what the client saw [s].
        first, last: the steps that it contains whole.
        before: the step that was running when the request came, or -1.
        share: the part of `before` that was left.
        requests, prompt_tokens: of the requests that the front end worked on meanwhile.
        delays: how often the way back to the client counts.
        fixed: what the host added between the steps, at the coefficients of the replay [s].
        time: when the interval ended [s]; neighbours share their steps, so errors cluster in time.
        tokens: how many gaps a row is the sum of; its noise grows with the root of that.
    """

    kind: Ints
    measured: Floats
    first: Ints
    last: Ints
    before: Ints
    share: Floats
    requests: Floats
    prompt_tokens: Floats
    delays: Floats
    fixed: Floats
    time: Floats
    tokens: Floats

    def __len__(self) -> int:
        return len(self.measured)

    def predicted(self, durations: Floats, front: FrontEnd) -> Floats:
        """The intervals at other step durations and front-end terms, the schedule held [s]."""
        total = np.concatenate(([0.0], np.cumsum(durations)))
        spanned = total[self.last + 1] - total[self.first]
        running = np.where(self.before >= 0, durations[self.before] * self.share, 0.0)
        outside = self.requests * front.request + self.prompt_tokens * front.prompt_token
        total_time: Floats = self.fixed + spanned + running + outside + self.delays * front.output_delay
        return total_time

    def select(self, keep: NDArray[np.bool_]) -> Rows:
        """The rows that `keep` marks."""
        return Rows(**{name: getattr(self, name)[keep] for name in self.__slots__})


def align(run: Replay, measured: PerRequest, front: FrontEnd, near: int = APART) -> Rows:
    """Rows of one run: a TTFT per request, and its decode: whole, or in pieces where token times are known.

    Args:
        run: the replay of these requests at the current coefficients.
        measured: in the order of `run.records`; NaN leaves a row out.
        front: the front end that the replay ran with.
        near: first tokens of requests that found the engine at work are compared with the one before, if that
            came out of one of this many steps before.
    """
    prompt_lens = np.array([r.prompt_len for r in measured.requests], dtype=np.int64)
    served = np.array([len(steps) > 0 for steps in run.token_steps])
    heads, bodies = _same_company(run, measured)
    index = np.flatnonzero(served & ~np.isnan(measured.ttft) & heads)
    rows = _first_tokens(run, measured.ttft, front, prompt_lens, index)
    waited, between = _after_first_tokens(run, measured, index[rows.before >= 0], near)
    # A replay at the measured pace has the running step end as much earlier as the way back is longer.
    held = rows.before >= 0
    back = np.where(held, front.output_delay, 0.0)
    rows = replace(rows, delays=np.where(held, 0.0, 1.0), fixed=rows.fixed + back)
    return join([rows.select(~np.isin(index, waited)), between, _decodes(run, measured, bodies)])


def _same_company(run: Replay, measured: PerRequest) -> tuple[Flags, Flags]:
    """Whose intervals saw as many other requests' first tokens in the replay as in the measurement.

    The others' rows would book a prompt on the wrong interval; such noise in what a row contains makes every
    prompt look cheaper than it is. First tokens that the replay has at an interval's very ends may count or
    not: they came out of the same step, and noise alone decides which of them a client saw first. To keep
    only those that came in the replay's order would keep the late ones. Where hardly any row agrees, all are
    kept.

    Returns:
        For first tokens and for decodes, shape (requests,).
    """
    sent = np.array([r.arrival for r in measured.requests])
    first, last = sent + measured.ttft, sent + measured.ttft + measured.decode
    ours_first, ours_last = run.records.first_token, run.records.last_token
    both = ~np.isnan(first) & ~np.isnan(ours_first)
    known, ours = np.sort(first[both]), np.sort(ours_first[both])

    def agree(begin: Floats, end: Floats, our_begin: Floats, our_end: Floats) -> Flags:
        seen = _within(known, begin, end)
        fewest = _within(ours, our_begin + SAME_STEP, our_end - SAME_STEP)
        most = _within(ours, our_begin - SAME_STEP, our_end + SAME_STEP)
        return np.asarray((seen >= fewest) & (seen <= most), dtype=np.bool_)

    heads = agree(sent, first, sent, ours_first)
    bodies = agree(first, last, ours_first, ours_last)
    enough = MIN_AGREEMENT * int(both.sum())
    return (
        heads if (heads & both).sum() > enough else np.ones_like(heads),
        bodies if (bodies & both).sum() > enough else np.ones_like(bodies),
    )


def _within(times: Floats, begin: Floats, end: Floats) -> Ints:
    """How many of the sorted `times` lie in each (begin, end]."""
    found = np.searchsorted(times, end, side="right") - np.searchsorted(times, begin, side="right")
    return np.asarray(found, dtype=np.int64)


def step_rows(seconds: Floats, host: Floats) -> Rows:
    """One row per step that a probe timed; `host` is what the host adds to each [s]."""
    size = len(seconds)
    index = np.arange(size)
    zeros = np.zeros(size)
    return Rows(
        kind=np.full(size, 2),
        measured=seconds,
        first=index,
        last=index,
        before=np.full(size, -1),
        share=zeros,
        requests=zeros,
        prompt_tokens=zeros,
        delays=zeros,
        fixed=host,
        time=np.cumsum(seconds),
        tokens=np.ones(size),
    )


def join(parts: list[Rows]) -> Rows:
    """All rows of `parts`, one after the other; their steps must be numbered alike."""
    return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in Rows.__slots__})


def _first_tokens(run: Replay, measured: Floats, front: FrontEnd, prompt_lens: Ints, index: Ints) -> Rows:
    records, ends = run.records, run.start + run.duration
    arrived = run.at_engine[index]
    first_step = np.array([run.token_steps[i][0] for i in index.tolist()], dtype=np.int64)
    # The step on the device when the request reached the engine, if there was one.
    before = np.searchsorted(run.start, arrived, side="right") - 1
    running = (before >= 0) & (before < first_step)
    running &= np.where(before >= 0, ends[np.maximum(before, 0)] > arrived, False)
    before = np.where(running, before, -1)
    left = np.where(running, ends[np.maximum(before, 0)] - arrived, 0.0)
    share = np.where(running, left / run.duration[np.maximum(before, 0)], 0.0)
    first = np.where(running, before + 1, np.searchsorted(run.start, arrived, side="left"))
    requests, tokens = _front_work(records.sent, run.at_engine, front, prompt_lens)
    total = np.concatenate(([0.0], np.cumsum(run.duration)))
    simulated = records.first_token[index] - records.sent[index]
    known = total[first_step + 1] - total[first] + left
    known = known + requests[index] * front.request + tokens[index] * front.prompt_token + front.output_delay
    return Rows(
        kind=np.zeros(len(index), dtype=np.int64),
        measured=measured[index],
        first=first,
        last=first_step,
        before=before,
        share=share,
        requests=requests[index],
        prompt_tokens=tokens[index],
        delays=np.ones(len(index)),
        fixed=simulated - known,
        time=records.first_token[index],
        tokens=np.ones(len(index)),
    )


def _after_first_tokens(run: Replay, measured: PerRequest, waiting: Ints, near: int) -> tuple[Ints, Rows]:
    """For requests that found the engine at work: from another's first token to theirs.

    What was left of the running step when they came nobody measured, and a coefficient that is off moves it
    as far as their own first token the other way. From the step of the first token before theirs on, every
    step counts whole, and what is outside the engine cancels.

    Args:
        waiting: which requests, by index.

    Returns:
        The requests for which there was such a token, and their rows.
    """
    records, ends = run.records, run.start + run.duration
    first_step = np.array([steps[0] if len(steps) else -1 for steps in run.token_steps], dtype=np.int64)
    seen = records.sent + measured.ttft
    known = np.flatnonzero((first_step >= 0) & ~np.isnan(seen))
    known = known[np.argsort(first_step[known], kind="stable")]
    at = np.searchsorted(first_step[known], first_step[waiting], side="left") - 1
    earlier = known[np.maximum(at, 0)]
    # Idle in between, the engine waited for somebody to come.
    idle = np.concatenate(([0.0], np.cumsum(np.maximum(0.0, run.start[1:] - ends[:-1] - PAUSE))))
    chosen = (at >= 0) & (first_step[waiting] - first_step[earlier] <= near)
    chosen &= idle[first_step[waiting]] == idle[np.maximum(first_step[earlier], 0)]
    waiting, earlier = waiting[chosen], earlier[chosen]
    first, last = first_step[earlier], first_step[waiting]
    total = np.concatenate(([0.0], np.cumsum(run.duration)))
    zeros = np.zeros(len(waiting))
    rows = Rows(
        kind=np.zeros(len(waiting), dtype=np.int64),
        measured=seen[waiting] - seen[earlier],
        first=first + 1,
        last=last,
        before=np.full(len(waiting), -1),
        share=zeros,
        requests=zeros,
        prompt_tokens=zeros,
        delays=zeros,
        fixed=ends[last] - ends[first] - (total[last + 1] - total[first + 1]),
        time=ends[last],
        tokens=np.ones(len(waiting)),
    )
    return waiting, rows


def _front_work(sent: Floats, at_engine: Floats, front: FrontEnd, prompt_lens: Ints) -> tuple[Floats, Floats]:
    """Requests and prompt tokens that the serial front end worked on while each request was there."""
    requests, tokens = np.zeros(len(sent)), np.zeros(len(sent))
    waiting_requests = waiting_tokens = 0.0
    free = -np.inf
    for i in np.argsort(sent, kind="stable").tolist():
        if sent[i] >= free:
            waiting_requests = waiting_tokens = 0.0
        else:
            # Part of the work before it was over when this request came: only what was left delays it.
            work = waiting_requests * front.request + waiting_tokens * front.prompt_token
            left = min(1.0, (free - sent[i]) / work) if work > 0 else 0.0
            waiting_requests, waiting_tokens = waiting_requests * left, waiting_tokens * left
        waiting_requests, waiting_tokens = waiting_requests + 1.0, waiting_tokens + float(prompt_lens[i])
        requests[i], tokens[i] = waiting_requests, waiting_tokens
        free = at_engine[i]
    return requests, tokens


def _decodes(run: Replay, measured: PerRequest, keep: Flags) -> Rows:
    """Sums of gaps between tokens, as (request, token, later token)."""
    spans: list[tuple[int, int, int]] = []
    seen: list[float] = []
    for i, steps in enumerate(run.token_steps):
        times, last = measured.token_times[i], len(steps) - 1
        if last < 1 or np.isnan(measured.decode[i]) or not keep[i]:
            continue
        if len(times) == len(steps):
            ends = [*range(0, last, PIECE), last]
            if len(ends) > 2 and ends[-1] - ends[-2] < PIECE // 2:
                del ends[-2]
            spans += [(i, a, b) for a, b in pairwise(ends)]
            seen += [float(times[b] - times[a]) for a, b in pairwise(ends)]
        else:
            spans.append((i, 0, last))
            seen.append(float(measured.decode[i]))
    size = len(spans)
    first = np.array([run.token_steps[i][a] for i, a, _ in spans], dtype=np.int64)
    last_step = np.array([run.token_steps[i][b] for i, _, b in spans], dtype=np.int64)
    ends_at = run.start + run.duration
    total = np.concatenate(([0.0], np.cumsum(run.duration)))
    between = (
        ends_at[last_step] - ends_at[first] - (total[last_step + 1] - total[first + 1])
        if size
        else np.empty(0)
    )
    zeros = np.zeros(size)
    return Rows(
        kind=np.ones(size, dtype=np.int64),
        measured=np.array(seen),
        first=first + 1,
        last=last_step,
        before=np.full(size, -1),
        share=zeros,
        requests=zeros,
        prompt_tokens=zeros,
        delays=zeros,
        fixed=between,
        time=ends_at[last_step] if size else np.empty(0),
        tokens=np.array([b - a for _, a, b in spans], dtype=np.float64),
    )
