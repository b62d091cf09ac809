"""What moved, and through which mechanism: read off the simulated runs, not off a rule book."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sim.planning.admission import admission
from sim.planning.outcome import Outcome, mean_outcome
from sim.planning.text import milliseconds
from sim.planning.whatif import MODEL_ERROR, Change, Point, changes

Cause = Literal["kv", "slots", "budget", "client", "none"]

FULL = 0.95  # KV use from which the pool, not its fragmentation, keeps requests out
SOME_WAITING = 0.5  # mean requests waiting below which there is no queue to speak of
PARTS = {
    "client_wait": "waiting in the client",
    "front_end": "front end",
    "queue": "queue",
    "prefill": "prefill",
    "stream": "delivery",
}


@dataclass(frozen=True, slots=True)
class QueueCause:
    """Why requests wait before they are scheduled: the mechanism, and the evidence in words."""

    cause: Cause
    text: str


def queue_cause(outcome: Outcome) -> QueueCause:
    """What kept requests out of the batch.

    Sequence slots if all of them were in use; the KV pool if it was full while slots were free; otherwise
    the token budget, behind which prompts line up.
    """
    waiting, running = outcome.queues.get("mean_waiting") or 0.0, outcome.queues.get("max_running") or 0.0
    if waiting < SOME_WAITING:
        return QueueCause("none", f"hardly a queue ({waiting:.2g} requests waiting on average)")
    slots = outcome.caps.get("max_num_seqs")
    if slots is not None and running >= slots:
        return QueueCause(
            "slots", f"all {slots:,.0f} sequence slots were in use while {waiting:.3g} waited on average"
        )
    full = (outcome.queues.get("max_kv_usage") or 0.0) >= FULL
    behind_kv = outcome.waiting.get("kv", 0.0)
    if (full and behind_kv > 0) or behind_kv > outcome.waiting.get("budget", 0.0):
        return QueueCause("kv", _kv_text(outcome, running, waiting))
    budget = outcome.caps.get("max_num_tokens")
    size = "" if budget is None else f" of {budget:,.0f}"
    return QueueCause(
        "budget",
        f"the token budget{size} per step was used up by prompts: {waiting:.3g} waited on average "
        "for their prefill to begin, with slots and KV to spare",
    )


def requests_that_fit(outcome: Outcome) -> int | None:
    """Requests of the mean full length that the KV pool holds, each rounded up to whole blocks."""
    tokens, pool = outcome.caps.get("request_tokens"), outcome.caps.get("kv_cache_tokens")
    if not tokens or not pool:
        return None
    return admission(int(pool), tokens, 0, block_size=int(outcome.caps.get("block_size") or 1)).at_full_length


def _kv_text(outcome: Outcome, running: float, waiting: float) -> str:
    fit, tokens = requests_that_fit(outcome), outcome.caps.get("request_tokens") or 0.0
    caps = [
        f"{name} {value:,.0f}"
        for name in ("max_num_seqs", "max_concurrency")
        if (value := outcome.caps.get(name)) is not None and fit is not None and value > fit
    ]
    whatever = f", whatever {' and '.join(caps)} {'says' if len(caps) == 1 else 'say'}" if caps else ""
    return (
        f"KV admission: the pool of {outcome.caps.get('kv_cache_tokens') or 0:,.0f} tokens holds {fit} "
        f"requests of {tokens:,.0f} tokens at their full length{whatever}; at most {running:.0f} ran at once "
        f"and {waiting:.3g} waited on average"
    )


def pace_cause(outcome: Outcome) -> str:
    """What sets the time between tokens: how many decodes share a step, and the prompts among them."""
    running, typical = outcome.queues.get("mean_running"), outcome.get("median_itl_ms")
    mean, high = outcome.get("mean_tpot_ms"), outcome.get("p99_itl_ms")
    if running is None or typical is None or mean is None or high is None:
        return "no tokens to judge by"
    text = (
        f"{running:.3g} requests run together on average, the median gap between tokens is {typical:.3g} ms"
    )
    if high > 2 * typical:
        text += (
            f"; prefill blocking makes the mean {mean:.3g} ms and the P99 gap {high:.3g} ms: steps with "
            "prompt chunks hold up the decodes in them"
        )
    return text


def explain(before: Point, after: Point) -> list[str]:
    """What moved from one point to the next, and why, in sentences; says so if nothing did.

    Figures are means over the seeds and factors those of the paired runs, both as `changes` gives them.
    """
    found = {c.key: c for c in changes(before, after)}
    moved = {key: c for key, c in found.items() if c.clear and not c.small}
    old, new = mean_outcome(before.outcomes), mean_outcome(after.outcomes)
    said = _throughput(old, new, found, bool(moved), "output_throughput" in moved)
    for tell in (_ttft, _queue, _tokens, _preemptions, _cache):
        said += tell(old, new, moved)
    if not said:
        said.append(
            f"nothing moves by more than its interval and the {MODEL_ERROR:.0%} that a step-time model "
            "may be wrong by"
        )
    if after.fresh is not None:
        said += _contamination(after, after.fresh)
    if before.fresh is not None or after.fresh is not None:
        said += _without_help(before, after)
    return said


Moved = Mapping[str, Change]


def _factor(change: Change, plain: float) -> float:
    """after / before as the paired runs give it; `plain`, that of the means, where they do not."""
    return plain if change.ratio is None else change.ratio.mean


def _throughput(old: Outcome, new: Outcome, found: Moved, any_moved: bool, moved: bool) -> list[str]:
    a, b = old.get("output_throughput"), new.get("output_throughput")
    if not a or b is None or not any_moved:
        return []
    by = f"{_factor(found['output_throughput'], b / a) - 1:+.1%}" if "output_throughput" in found else ""
    if moved:
        way = "rises" if b > a else "falls"
        return [f"output throughput {way} from {a:,.0f} to {b:,.0f} tok/s ({by})"]
    return [f"output throughput stays flat ({a:,.0f} to {b:,.0f} tok/s, {by})"]


def _ttft(old: Outcome, new: Outcome, moved: Moved) -> list[str]:
    a, b = old.get("mean_ttft_ms"), new.get("mean_ttft_ms")
    if "mean_ttft_ms" not in moved or a is None or b is None or a == b:
        return []
    shifts = {
        name: (new.parts_ms.get(name) or 0.0) - (old.parts_ms.get(name) or 0.0)
        for name in PARTS
        if name != "client_wait"
    }
    told = ", ".join(
        f"{PARTS[name]} {milliseconds(shift, sign=True)}"
        for name, shift in shifts.items()
        if abs(shift) >= 0.02 * abs(b - a)
    )
    factor = f", x{_factor(moved['mean_ttft_ms'], b / a):.2f}" if a > 0 else ""
    head = f"mean TTFT goes from {milliseconds(a)} to {milliseconds(b)}{factor}: {told}"
    return [f"{head}; {_largest_share(shifts, b - a)}"]


def _largest_share(shifts: Mapping[str, float], total: float) -> str:
    """Which part did most of the change; parts may also move against it, and one then more than all of it."""
    largest = max(shifts, key=lambda name: shifts[name] / total)
    share = shifts[largest] / total
    if share <= 1.005:
        return f"{share:.0%} of the change is {PARTS[largest]}"
    against = [PARTS[name] for name, shift in shifts.items() if shift / total <= -0.005]
    others = f" and {' and '.join(against)} the other way" if against else ""
    return f"{PARTS[largest]} moved by more than the whole change{others}"


def _queue(old: Outcome, new: Outcome, moved: Moved) -> list[str]:
    if not moved.keys() & {"mean_ttft_ms", "p99_ttft_ms", "output_throughput", "request_throughput"}:
        return []
    was, now = queue_cause(old), queue_cause(new)
    if was.cause == now.cause == "none":
        return []
    if was.cause != "none" and now.cause == "none":
        return [f"the queue is gone; before, {was.text}"]
    before = {"none": "there was none", "client": ""}.get(was.cause, f"it was {WORDS[was.cause]}")
    again = "the same cause as before" if was.cause == now.cause else f"before, {before}"
    return [f"the queue: {now.text} ({again})"]


WORDS: dict[Cause, str] = {
    "kv": "KV admission",
    "slots": "sequence slots",
    "budget": "the token budget",
    "client": "the client",
    "none": "no queue",
}


def _tokens(old: Outcome, new: Outcome, moved: Moved) -> list[str]:
    """TPOT and ITL: batch size, or decodes that wait for the prefill chunks in their step."""
    said = []
    a, b = old.get("mean_tpot_ms"), new.get("mean_tpot_ms")
    if "mean_tpot_ms" in moved and a and b:
        runs = _pair(old, new, lambda o: o.queues.get("mean_running"))
        batch = "" if runs is None else f"; {runs[0]:.3g} requests ran on average, now {runs[1]:.3g}"
        by = _factor(moved["mean_tpot_ms"], b / a) - 1
        said.append(f"mean TPOT goes from {a:.1f} to {b:.1f} ms ({by:+.0%}){batch}")
    a, b = old.get("p99_itl_ms"), new.get("p99_itl_ms")
    if "p99_itl_ms" in moved and a and b:
        typical = new.get("median_itl_ms")
        blocking = (
            f": prefill blocking, for a step with a prompt chunk holds up the decodes in it (the median gap "
            f"is {typical:.1f} ms)"
            if typical is not None and max(a, b) > 2 * typical
            else ""
        )
        said.append(f"P99 ITL goes from {a:.1f} to {b:.1f} ms{blocking}")
    return said


def _preemptions(old: Outcome, new: Outcome, moved: Moved) -> list[str]:
    del moved
    pair = _pair(old, new, lambda o: o.server.get("num_preemptions"))
    if pair is None or pair[0] == pair[1]:
        return []
    use = new.queues.get("max_kv_usage")
    full = "" if use is None else f"; the KV pool was {use:.0%} full at its fullest"
    return [f"preemptions go from {pair[0]:.0f} to {pair[1]:.0f}{full}"]


def _cache(old: Outcome, new: Outcome, moved: Moved) -> list[str]:
    del moved
    pair = _pair(old, new, hit_share)
    if pair is None or abs(pair[0] - pair[1]) < 0.01:
        return []
    return [f"{pair[0]:.0%} of the prompt tokens came from the prefix cache, now {pair[1]:.0%}"]


def _contamination(after: Point, fresh: Outcome) -> list[str]:
    """What an earlier run of the same prompts did to this one."""
    share, alone = hit_share(after.outcomes[0]), hit_share(fresh)
    a, b = fresh.get("mean_ttft_ms"), after.outcomes[0].get("mean_ttft_ms")
    if share is None or alone is None or share - alone < 0.01 or a is None or b is None:
        return []
    which = "" if len(after.outcomes) == 1 else " under the first seed"
    return [
        f"{after.variant.label} sends prompts that the point before it left in the prefix cache "
        f"({share:.0%} of its prompt tokens): mean TTFT{which} {milliseconds(b)}, "
        f"with an empty cache {milliseconds(a)}; another --seed per run or --fresh avoids it"
    ]


def _without_help(before: Point, after: Point) -> list[str]:
    """The same step between engines that start with an empty cache."""
    old, new = before.fresh or before.outcomes[0], after.fresh or after.outcomes[0]
    told = []
    for key, name in (("output_throughput", "throughput"), ("mean_ttft_ms", "mean TTFT")):
        a, b = old.get(key), new.get(key)
        if a and b is not None:
            told.append(f"{name} x{b / a:.2f}")
    which = "" if max(len(before.outcomes), len(after.outcomes)) == 1 else ", under the first seed"
    return [f"from empty cache to empty cache{which}: {', '.join(told)}"] if told else []


def hit_share(outcome: Outcome) -> float | None:
    """Share of prompt tokens that the prefix cache held; None where nothing was asked of it."""
    queries, hits = outcome.server.get("prefix_cache_queries"), outcome.server.get("prefix_cache_hits")
    return hits / queries if queries and hits is not None else None


def _pair(
    old: Outcome, new: Outcome, of: Callable[[Outcome], float | int | None]
) -> tuple[float, float] | None:
    a, b = of(old), of(new)
    return None if a is None or b is None else (float(a), float(b))
