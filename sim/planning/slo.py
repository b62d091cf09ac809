"""Service level objectives: what is promised, read from words, held against runs.

p99 ttft <= 500ms        a percentile over requests (itl: over tokens)
mean e2e < 3s            a mean
ttft <= 500ms            every single request; counts for `--goodput 99%`, the share that keeps all limits
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import BadInput
from sim.figures.quantiles import percentile_word
from sim.provenance import Note

FIELD = "--slo"
METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el", "e2el": "e2el", "latency": "e2el"}
SHOWN = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0}
PER_REQUEST = ("ttft", "tpot", "e2el")
_SLO = re.compile(
    r"\s*([a-z0-9. _()-]+?)\s*(<=|>=|=<|=>|<|>|≤|≥|==?)\s*([0-9.eE+-]+)\s*([a-zµ]*)\s*", re.IGNORECASE
)
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Slo:
    """One objective.

    Attributes:
        metric: "ttft", "tpot", "itl" or "e2el".
        percentile: 0..100; None with `mean` False means every single request.
        mean: the mean instead.
        limit: seconds.
        strict: `<` instead of `<=`.
    """

    metric: str
    limit: float
    percentile: float | None = None
    mean: bool = False
    strict: bool = False

    @property
    def per_request(self) -> bool:
        """Whether it binds each request rather than a statistic."""
        return self.percentile is None and not self.mean

    @property
    def statistic(self) -> str:
        """`P99 TTFT`, `mean E2E`, or `TTFT` for a limit on each request."""
        return f"{self._word('P')}{SHOWN[self.metric]}"

    @property
    def key(self) -> str:
        """The figure's key in a result, for a statistic."""
        return f"{'mean' if self.mean else 'p' + percentile_word(self.percentile or 0.0)}_{self.metric}_ms"

    def __str__(self) -> str:
        shown = f"{self.limit:g} s" if self.limit >= 1 else f"{self.limit * 1e3:g} ms"
        return f"{self.statistic} {'<' if self.strict else '<='} {shown}"

    def met(self, seconds: float) -> bool:
        """Whether a value keeps the limit."""
        return seconds < self.limit if self.strict else seconds <= self.limit

    def _word(self, p: str) -> str:
        if self.mean:
            return "mean "
        return "" if self.percentile is None else f"{p}{percentile_word(self.percentile)} "


@dataclass(frozen=True, slots=True)
class Slos:
    """All objectives of a plan.

    Attributes:
        statistics: objectives on means and percentiles.
        limits: limits on each request, for `goodput`.
        goodput: least share of requests that must keep all `limits`; None without.
        notes: objectives that can never bind, and what was taken for a limit on each request.
    """

    statistics: tuple[Slo, ...]
    limits: tuple[Slo, ...] = ()
    goodput: float | None = None
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        parts = [str(slo) for slo in self.statistics]
        if self.goodput is not None:
            parts.append(f"{self.goodput:.4g} of all requests with {', '.join(str(s) for s in self.limits)}")
        return " and ".join(parts) or "stable"


def parse_slo(text: str) -> Slo:
    """Read one objective.

    Raises:
        BadInput: no such metric or statistic, a limit without a unit, or one that asks for slowness.
    """
    match = _SLO.fullmatch(text)
    if match is None:
        raise BadInput(FIELD, text, 'must read like "p99 ttft <= 500ms" or "mean e2e < 3s"')
    words, sign, number, unit = match[1].lower(), match[2], match[3], match[4].lower()
    if sign in (">", ">=", "=>", "≥", "=", "=="):
        raise BadInput(FIELD, text, "a latency objective is an upper limit: use <= or <")
    metric, percentile, mean = _subject(text, words)
    if not unit:
        raise BadInput(FIELD, text, f"give the limit a unit: {number}ms or {number}s")
    if unit not in UNITS:
        raise BadInput(FIELD, text, f"no such unit {unit!r}; use {', '.join(UNITS)}")
    try:
        value = float(number)
    except ValueError:
        raise BadInput(FIELD, text, f"{number!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise BadInput(FIELD, text, "the limit must be above 0 and finite")
    return Slo(metric, value * UNITS[unit], percentile, mean, sign == "<")


def _subject(text: str, words: str) -> tuple[str, float | None, bool]:
    """Metric and statistic, in either order: `p99 ttft`, `ttft p99`, `p99(ttft)`, `mean_e2e`."""
    metric: str | None = None
    percentile: float | None = None
    mean = False
    found = 0
    for word in re.sub(r"[()_-]", " ", words).split():
        if word in METRICS and metric is None:
            metric = METRICS[word]
        elif (match := _PERCENTILE.fullmatch(word)) and not found:
            percentile, found = float(match[1]), 1
        elif word in ("mean", "avg", "average") and not found:
            mean, found = True, 1
        elif word == "median" and not found:
            percentile, found = 50.0, 1
        elif word == "max" and not found:
            percentile, found = 100.0, 1
        else:
            known = "a metric (ttft, tpot, itl, e2e) and a statistic (mean, median, p99, max)"
            raise BadInput(FIELD, text, f"{word!r} is not part of {known}")
    if metric is None:
        raise BadInput(FIELD, text, "names no metric; known are ttft, tpot, itl and e2e")
    if percentile is not None and not 0 < percentile <= 100:
        raise BadInput(FIELD, text, "a percentile lies above 0 and at most at 100")
    return metric, percentile, mean


def parse_slos(texts: Sequence[str], goodput: str | None = None) -> Slos:
    """Read all objectives of a plan.

    Of two limits on one statistic the stricter holds, and a note says so.
    With `goodput` and no limit on each request, the limits of the statistics hold for each request.

    Raises:
        BadInput: none given; a limit on each request without `goodput`.
    """
    slos = list(dict.fromkeys(parse_slo(text) for text in texts))
    if not slos:
        raise BadInput(FIELD, None, 'give at least one objective, e.g. --slo "p99 ttft <= 500ms"')
    slos, redundant = _strictest(slos)
    share = _share(goodput)
    limits = tuple(slo for slo in slos if slo.per_request)
    statistics = tuple(slo for slo in slos if not slo.per_request)
    notes = (*redundant, *_never_binding(statistics))
    if limits and share is None:
        raise BadInput(
            FIELD, str(limits[0]), "binds each request; say how many must keep it, e.g. --goodput 99%"
        )
    if share is not None and not limits:
        limits = _as_limits(statistics)
        told = ", ".join(str(slo) for slo in limits)
        notes = (*notes, Note("info", "--goodput", f"counts requests that keep {told}"))
    for slo in limits:
        if slo.metric not in PER_REQUEST:
            raise BadInput(FIELD, str(slo), "a request has many ITLs; limit its TTFT, TPOT or E2E instead")
    return Slos(statistics, limits, share, notes)


def _strictest(slos: Sequence[Slo]) -> tuple[list[Slo], tuple[Note, ...]]:
    """One objective per statistic, in the order given, and a note on each that is left out."""
    kept: dict[tuple[str, float | None, bool], Slo] = {}
    notes = []
    for slo in slos:
        key = (slo.metric, slo.percentile, slo.mean)
        other = kept.setdefault(key, slo)
        if other is slo:
            continue
        kept[key], loose = sorted((slo, other), key=lambda s: (s.limit, not s.strict))
        text = f'"{loose}" is left out: "{kept[key]}" says more'
        notes.append(Note("warning", FIELD, text))
    return list(kept.values()), tuple(notes)


def _as_limits(statistics: Sequence[Slo]) -> tuple[Slo, ...]:
    """The tightest limit of each metric, as a limit on each request."""
    tightest: dict[str, Slo] = {}
    for slo in statistics:
        if slo.metric in PER_REQUEST and slo.limit <= tightest.get(slo.metric, slo).limit:
            tightest[slo.metric] = Slo(slo.metric, slo.limit, strict=slo.strict)
    if not tightest:
        raise BadInput("--goodput", None, 'needs limits on requests, e.g. --slo "ttft <= 500ms"')
    return tuple(tightest.values())


def _share(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise BadInput("--goodput", text, "give a share above 0 and at most 1, such as 99% or 0.99")
    return value


def _never_binding(slos: Sequence[Slo]) -> tuple[Note, ...]:
    """Objectives that another one implies: perhaps swapped by mistake."""
    notes = []
    for slo in slos:
        for other in slos:
            if slo is other or slo.percentile is None or other.percentile is None:
                continue
            implied = other.percentile >= slo.percentile and other.limit <= slo.limit
            same = other.metric == slo.metric
            within = (slo.metric, other.metric) == ("ttft", "e2el")  # a TTFT is part of its E2E
            if implied and (same or within):
                notes.append(Note("warning", FIELD, f'"{slo}" can never bind: "{other}" is harder to keep'))
                break
    return tuple(notes)
