"""Where the error of the end-to-end latency comes from: client, queue, prefill, delivery, decode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.comparison.figures import figure, same_requests
from sim.figures.metrics import latencies
from sim.results import BenchResult, Floats, RequestRecords

FEWEST_ALONE = 5
CANCELS = 0.5  # an E2E error below this share of its parts' errors hides them
ADDS_UP = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the mean latency on both sides [ms].

    `share` is what the part adds to the error of the whole: (predicted - measured) / measured whole.
    """

    name: str
    predicted: float
    measured: float
    share: float


@dataclass(frozen=True, slots=True)
class Sources:
    """The mean latency in parts.

    Attributes:
        how: by what the parts were told apart.
        from_schedule: whether the latency counts from the schedule, the wait in the client included; else it
            counts from sending.
    """

    parts: tuple[Part, ...]
    how: str
    from_schedule: bool = False

    @property
    def largest(self) -> Part | None:
        """The part that adds most to the error."""
        return max(self.parts, key=lambda part: abs(part.share), default=None)


def error_sources(predicted: BenchResult, measured: BenchResult) -> Sources | None:
    """Split the difference of the mean latency into parts; None where not even TTFT and E2E are known.

    With parts of TTFT on both sides (simulator and probe), by those. With records, queue and prefill are told
    apart by the requests that were sent while no other waited for its first token: their TTFT has no queue
    in it. From aggregates only TTFT and decode can be told. The wait in the client is a part where both sides
    know their schedule.
    """
    if predicted.records is None or measured.records is None:
        return _from_aggregates(predicted, measured)
    ours, theirs = predicted.records, measured.records
    named = _known_parts(ours, theirs)
    how = "the engine's own account of TTFT"
    if named is None:
        named = _by_lone_requests(ours, theirs)
        how = "requests that found nobody waiting"
    if named is None:
        return _from_aggregates(predicted, measured)
    pairs = {**named, "decode": (_decode(ours), _decode(theirs))}
    waits = _delay(ours), _delay(theirs)
    if waits[0] is None or waits[1] is None:
        return _assemble(pairs, how)
    return _assemble({"client": (waits[0], waits[1]), **pairs}, how, from_schedule=True)


def cancellation(predicted: BenchResult, measured: BenchResult) -> str | None:
    """A sentence where the errors of TTFT and TPOT cancel in E2E, else None."""
    errors = {}
    for metric in ("ttft", "tpot", "e2el"):
        ours, theirs = (figure(side, f"mean_{metric}_ms") for side in (predicted, measured))
        if ours is None or not theirs:
            return None
        errors[metric] = ours / theirs - 1.0
    first, each, whole = errors["ttft"], errors["tpot"], errors["e2el"]
    if (
        first * each >= 0
        or abs(whole) >= CANCELS * max(abs(first), abs(each))
        or min(abs(first), abs(each)) < 0.02
    ):
        return None
    return (
        f"errors cancel: TTFT {first:+.1%} and TPOT {each:+.1%} leave E2E at {whole:+.1%}; "
        "E2E alone would hide them"
    )


def does_not_add_up(predicted: BenchResult, measured: BenchResult) -> list[str]:
    """Where mean E2E is not mean TTFT plus (N - 1) TPOTs: the figures are not of the same requests.

    N is the mean output length where known, else only the two sides' N are held against each other. Means of
    products differ from products of means, so requests of very different lengths are not judged.
    """
    implied: list[float] = []
    out = []
    for name, side in (("predicted", predicted), ("measured", measured)):
        ttft, tpot, e2el = (figure(side, f"mean_{metric}_ms") for metric in ("ttft", "tpot", "e2el"))
        if side.records is not None or ttft is None or not tpot or e2el is None:
            continue
        implied.append((e2el - ttft) / tpot + 1.0)
        total, completed = side.aggregates.get("total_output_tokens"), side.aggregates.get("completed")
        if total and completed and abs(implied[-1] / (total / completed) - 1.0) > ADDS_UP:
            out.append(
                f"{name} E2E, TTFT and TPOT imply {implied[-1]:.0f} output tokens a request, "
                f"the totals say {total / completed:.0f}"
            )
    if len(implied) == 2 and not out and abs(implied[0] / implied[1] - 1.0) > ADDS_UP:
        out.append(
            f"E2E, TTFT and TPOT imply {implied[0]:.0f} output tokens a request predicted, "
            f"{implied[1]:.0f} measured"
        )
    return out


def _from_aggregates(predicted: BenchResult, measured: BenchResult) -> Sources | None:
    means = {}
    for metric in ("ttft", "e2el"):
        ours, theirs = (figure(side, f"mean_{metric}_ms") for side in (predicted, measured))
        if ours is None or theirs is None:
            return None
        means[metric] = (ours, theirs)
    decode = tuple(whole - first for whole, first in zip(means["e2el"], means["ttft"], strict=True))
    return _assemble({"TTFT": means["ttft"], "decode": (decode[0], decode[1])}, "mean TTFT and E2E")


def _assemble(pairs: dict[str, tuple[float, float]], how: str, from_schedule: bool = False) -> Sources | None:
    whole = sum(theirs for _, theirs in pairs.values())
    if whole <= 0:
        return None
    parts = (Part(name, p, m, (p - m) / whole) for name, (p, m) in pairs.items() if p or m)
    return Sources(tuple(parts), how, from_schedule)


def _known_parts(ours: RequestRecords, theirs: RequestRecords) -> dict[str, tuple[float, float]] | None:
    sides = []
    for records in (ours, theirs):
        found = latencies(records)
        queue, prefill = records.queue[found.ok], records.prefill[found.ok]
        known = ~(np.isnan(queue) | np.isnan(prefill))
        if known.sum() < 0.9 * len(known) or not known.any():
            return None
        rest = found.ttft[known] - queue[known] - prefill[known]
        sides.append([float(values.mean()) * 1e3 for values in (queue[known], prefill[known], rest)])
    names = ("queue", "prefill", "front end and delivery")
    return {name: (sides[0][i], sides[1][i]) for i, name in enumerate(names)}


def _by_lone_requests(ours: RequestRecords, theirs: RequestRecords) -> dict[str, tuple[float, float]] | None:
    lone = [_alone(records) for records in (ours, theirs)]
    if same_requests(ours, theirs):
        shared = lone[0] & lone[1]
        lone = [shared, shared]
    bases, means = [], []
    for records, alone in zip((ours, theirs), lone, strict=True):
        ttft: Floats = records.first_token - records.sent
        if int(alone.sum()) < FEWEST_ALONE:
            return None
        bases.append(float(np.nanmean(ttft[alone])) * 1e3)
        means.append(float(np.nanmean(ttft)) * 1e3)
    return {
        "queue": (means[0] - bases[0], means[1] - bases[1]),
        "prefill": (bases[0], bases[1]),
    }


def _alone(records: RequestRecords) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which requests were sent while no other one waited for its first token."""
    sent, first = records.sent, records.first_token
    known = ~np.isnan(first)
    started, served = np.sort(sent[known]), np.sort(first[known])
    waiting = np.searchsorted(started, sent, "right") - np.searchsorted(served, sent, "right")
    return known & (waiting <= 1)


def _delay(records: RequestRecords) -> float | None:
    """Mean time that requests waited in the client [ms]; None where it is not known of each of them.

    A load that is sent at once, or as answers come, has no schedule.
    """
    scheduled = records.scheduled[~np.isnan(records.scheduled)]
    if not len(scheduled) or scheduled.max() <= scheduled.min():
        return None
    delay = latencies(records).delay
    return float(delay.mean()) * 1e3 if len(delay) and not bool(np.isnan(delay).any()) else None


def _decode(records: RequestRecords) -> float:
    found = latencies(records)
    return float((found.e2el - found.ttft).mean()) * 1e3 if len(found.ttft) else 0.0
