"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from sim.planning.capacity import Capacity, flips
from sim.planning.daily import DayOfReplicas
from sim.planning.hardware import Candidate, OperatingPoint
from sim.planning.prices import Cost, cost_lines
from sim.planning.promises import Promise
from sim.planning.resources import WORDS, Utilisation
from sim.planning.sizing import Sizing, unsized_words
from sim.planning.text import milliseconds, wrap

MODEL_TURNS = 0.2
ENOUGH_SEEDS = 5  # with fewer, an interval is often far too wide, and now and then far too narrow
CANDIDATE_WIDTH = 90  # of the columns up to the replicas


def render_capacity(found: Capacity) -> list[str]:
    """The answer, its intervals, what binds, and what is left."""
    lines = wrap(f"objectives: {found.slos}")
    if found.level is None:
        lines += wrap("capacity: none: the objectives cannot be met at any load", "    ")
        lines += wrap(f"  blocked by {found.binding}: {found.cause.text}", "    ")
        lines += ["  best that can be reached, one request at a time:", *_promises(found.promises)]
        return [*lines, *_notes(found)]
    lines += wrap(f"capacity: {answer_words(found)}", "    ")
    lines += wrap(f"  {error_words(found)}", "    ")
    lines += wrap(f"  binding: {binding_words(found)}", "    ")
    lines += [f"  just below it ({found.kept}):", *_promises(found.promises)]
    if found.binding == "stability":
        lines.append(f"  just above it ({found.missed}): more comes in than is answered")
    elif (worst := next((p for p in found.beyond if p.what == found.binding), None)) is not None:
        lines += [f"  just above it ({found.missed}):", *_promises([worst])]
    if found.use is not None:
        lines += wrap(f"  in use there: {use_words(found.use)}", "    ")
    lines += wrap(f"  {headroom_words(found)}", "    ")
    return [*lines, *_notes(found)]


def answer_words(found: Capacity) -> str:
    """`4.21 requests/s (95 %: 4.05 to 4.37, 5 seeds)`."""
    assert found.level is not None
    unit = "" if found.level.kind == "concurrency" else " requests/s"
    value = f"{found.level.value:.0f} requests in flight" if not unit else f"{found.level.value:.3g}{unit}"
    if found.replications < 2:
        return f"{value} (one seed: no interval)"
    if found.low is None or found.high is None:
        return f"{value} ({found.replications} seeds)"
    text = f"{value} (95 %: {found.low:.3g} to {found.high:.3g}, {found.replications} seeds)"
    if found.replications < ENOUGH_SEEDS:
        text += f"; {found.replications} seeds say little, of the interval too: raise --seeds"
    return text


def error_words(found: Capacity) -> str:
    """What the step-time model's error makes of the answer."""
    source = f"{found.error.source}"
    if found.model_low is None and found.model_high is None:
        return f"the model's own error is not in this interval ({source})"
    low, high = found.model_low or 0.0, found.model_high or 0.0
    text = f"with step times {found.error.share:.0%} longer {low:.3g}, shorter {high:.3g} ({source})"
    if found.error.drawn:
        text = f"with other step times that the evidence allows {low:.3g} to {high:.3g} ({source})"
    if turns_with_model(found):
        text += (
            "; WARNING: the answer turns with the model's error: calibrate on this GPU before relying on it"
        )
    return text


def turns_with_model(found: Capacity) -> bool:
    """Whether the answer moves by more than a fifth within the step-time model's error."""
    if found.level is None or found.level.value <= 0 or found.model_low is None or found.model_high is None:
        return False
    return (found.model_high - found.model_low) / found.level.value > MODEL_TURNS


def binding_words(found: Capacity) -> str:
    """What gives way first, and through what."""
    what = "the load itself: the queue grows" if found.binding == "stability" else found.binding
    if "TPOT" in found.binding or "ITL" in found.binding:
        return f"{what}; {found.pace}"
    return f"{what}; {found.cause.text}"


def use_words(use: Utilisation) -> str:
    """Shares of each resource, the binding one named."""
    told = ", ".join(f"{WORDS[name]} {share:.0%}" for name, share in use.shares.items())
    spare = "" if use.headroom else ", no headroom"
    return f"{told}; fullest: {WORDS[use.binding]}{spare}"


def headroom_words(found: Capacity) -> str:
    """How far the scenario's own load is from the answer."""
    assert found.level is not None
    spec, value = found.scenario.workload, found.level.value
    own = spec.request_rate if found.level.kind == "rate" else float(spec.max_concurrency or "inf")
    if own == float("inf") or found.traffic:
        told = "nothing is said of a present load to compare with"
        if found.saturation:
            told += f"; nothing sustains more than about {found.saturation:.3g} requests/s"
        return told
    text = f"headroom: the scenario's own {own:.3g} is {own / value:.0%} of it"
    if own > value:
        text = f"no headroom: the scenario's own {own:.3g} is {own / value:.0%} of it"
    if flips(found, own):
        text += f"; WARNING: whether that load is kept turns within the interval of {found.covers}"
    return text


def _promises(promises: Sequence[Promise]) -> list[str]:
    lines = []
    for promise in promises:
        if promise.what == "goodput":
            shown = "unknown" if promise.value is None else f"{promise.value:.2%}"
            lines.append(f"    {'requests that keep all limits':<32}{shown:>12}  wanted {promise.limit:.4g}")
            continue
        shown = "unknown" if promise.value is None else milliseconds(promise.value * 1e3)
        used = "" if promise.used is None else f"  {promise.used:.0%} of {milliseconds(promise.limit * 1e3)}"
        lines.append(f"    {promise.what:<32}{shown:>12}{used}")
    return lines


def _notes(found: Capacity) -> list[str]:
    return [line for n in found.notes for line in wrap(f"{n.kind}: {n.subject}: {n.text}")]


def render_sizing(sizing: Sizing) -> list[str]:
    """Replicas, with what one failure does."""
    lines = [
        f"replicas for {sizing.rate:.4g} requests/s (peak {sizing.peak_rate:.4g}), "
        f"each trusted with {sizing.per_replica:.3g}:",
        f"  {sizing.at_mean:>6}  for the mean rate",
        f"  {sizing.at_peak:>6}  for the peak",
        f"  {sizing.recommended:>6}  for the peak with one replica down",
        f"          {sizing.use_at_mean:.0%} of what these are trusted with is used on average, "
        f"{sizing.use_at_peak:.0%} at the peak, {sizing.use_one_down:.0%} with one down",
    ]
    if sizing.uncertain:
        worst = "no number" if sizing.pessimistic is None else str(sizing.pessimistic)
        lines += wrap(
            f"  WARNING: within the intervals of {sizing.covers} it is {sizing.optimistic} to {worst}", "    "
        )
    return [
        *lines,
        "  trusted: the low end of the capacity's interval over seeds, or the capacity where there is none",
        "  a router is assumed that splits the load evenly",
    ]


def rate_words(rate: float) -> str:
    """A rate in three digits, or all of its whole ones."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"


def render_day(day: DayOfReplicas) -> list[str]:
    """Replicas by the hour, and what following the day saves."""
    lines = ["replicas by the hour, one of them to spare:"]
    for start in range(0, 24, 8):
        hours = range(start, start + 8)
        lines.append("  hour      " + "".join(f"{h:>11}" for h in hours))
        lines.append("  requests/s" + "".join(f"{rate_words(day.rates[h]):>11}" for h in hours))
        lines.append("  replicas  " + "".join(f"{day.by_hour[h]:>11,}" for h in hours))
    saved = 1.0 - day.replica_hours / day.constant_hours
    lines.append(
        f"  {day.replica_hours} replica hours a day; {day.constant_hours} with {day.constant} all day "
        f"({saved:.0%} saved if replicas follow the hours)"
    )
    return lines


def render_candidates(found: Sequence[Candidate], sized: bool) -> list[str]:
    """Hardware side by side; loads are those of one replica; `sized`: replicas for a rate were asked for."""
    lines = [
        f"{'replica':<20}{'GPUs':>5}{'requests/s':>12}{'95 % (seeds)':>16}{'model error':>16}"
        f"{'out tok/s':>11}{'replicas':>10}  binding",
        f"{'(peak, one down)':>{CANDIDATE_WIDTH}}",
    ]
    for candidate in found:
        if candidate.failure is not None or candidate.found is None:
            lines += wrap(f"{candidate.name:<20}cannot run: {candidate.failure}", " " * 20)
            continue
        answer = candidate.found
        head = f"{candidate.name:<20}{candidate.gpus_per_replica:>5}"
        if answer.level is None:
            lines += wrap(f"{head}  no load keeps {answer.binding}: {answer.cause.text}", " " * 20)
            continue
        replicas = replicas_words(candidate.sizing, answer, sized)
        lines.append(
            f"{head}{answer.level.value:>12.3g}{_range(answer.low, answer.high):>16}"
            f"{_range(answer.model_low, answer.model_high):>16}{answer.output_rate:>11,.0f}{replicas:>10}"
            f"  {answer.binding}"
        )
    if sized and any(c.found and c.found.level and _no_number(c.sizing) for c in found):
        lines += wrap("?: at most unknown: at the low end of the interval no number of replicas is enough")
    if unsure := [c.name for c in found if c.found is not None and turns_with_model(c.found)]:
        lines += wrap(
            f"WARNING: the answer turns with the model's error for {', '.join(unsure)}: calibrate on these "
            "GPUs before relying on it, or on their order"
        )
    return lines


def replicas_words(sizing: Sizing | None, answer: Capacity, sized: bool) -> str:
    """Replicas with one of them down; `117?` where the model's interval begins at no load, `?` where the
    seeds' own does."""
    if sizing is None:
        return "?" if sized and unsized_words(answer) else ""
    return f"{sizing.recommended}{'?' if _no_number(sizing) else ''}"


def _no_number(sizing: Sizing | None) -> bool:
    return sizing is None or sizing.pessimistic is None


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def render_points(points: Sequence[OperatingPoint], currency: str) -> list[str]:
    """Ways to run, cheapest first: those that no other beats, and the cheapest of every kind of replica."""
    title = f"{currency}/hour"
    lines = [
        f"{'way to run':<24}{'replicas':>9}{'req/s each':>12}{'margin':>10}{title:>14}"
        f"{f'{currency}/1M output tok':>20}",
        f"{'(peak, none down)':>33}",
    ]
    ordered = sorted(points, key=lambda p: (p.per_hour, p.per_1m_output))
    cheapest = {p.name: p for p in reversed(ordered)}
    shown = [p for p in ordered if p.pareto or p is cheapest[p.name]]
    several = len(cheapest) > 1  # one kind of replica cannot beat itself
    for p in shown:
        replicas = "" if p.replicas is None else str(p.replicas)
        mark = "  <- not beaten" if p.pareto and several else ""
        margin = f"{p.margin:.0%}{' ' if p.sure else '?'}"
        lines.append(
            f"{p.name:<24}{replicas:>9}{p.load:>12.3g}{margin:>10}{p.per_hour:>14,.2f}"
            f"{p.per_1m_output:>20,.3f}{mark}"
        )
    left = len(points) - len(shown)
    told = ["margin: what is left of the objective nearest to its limit"]
    if several:
        told.append("not beaten: nothing else costs less and leaves as much margin")
    if left:
        told.append(f"{left} more, all beaten, are in --json")
    lines += wrap(f"  {'; '.join(told)}", "  ")
    if not all(p.sure for p in shown):
        lines += wrap(
            "  ?: the load is above the low end of the capacity's intervals (seeds, and the model's error if "
            "it was asked for): the objectives may be missed",
            "  ",
        )
    return lines


def render_cost(cost: Cost, what: str) -> list[str]:
    """The labelled bill of one deployment."""
    head = f"cost of {what}, at {cost.utilisation:.0%} of their capacity under the objectives:"
    return [*wrap(head), *cost_lines(cost)]
