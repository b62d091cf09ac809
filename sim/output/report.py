"""A result as people read it: the verdict, `vllm bench serve`'s own report, then what only we know.

Beyond the aggregates the report shows, where a result has them:

* `extra["regime"]`: the fields of `sim.figures.regime.Regime`,
* `extra["ttft_parts_ms"]`: mean parts of TTFT by name, in order [ms],
* `extra["device_time"]`, `extra["waiting_time"]`: seconds by what bounded the steps, and by what kept
  requests waiting,
* `extra["intervals"]`: level, from, and figures: key -> [low, high],
* `server`: num_preemptions, prefix_cache_queries, prefix_cache_hits, kv_cache_tokens, max_kv_usage.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sim.comparison.identity import load_of
from sim.figures.metrics import client_limited
from sim.figures.quantiles import supported
from sim.provenance import Note
from sim.results import BenchResult

WIDTH = 50  # of vllm bench serve's report
LINE = 100
BAR = 20
SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
TTFT_PARTS = {
    "client_wait": "Client wait, before sending",
    "front_end": "Front end",
    "queue": "Queue",
    "prefill": "Prefill",
    "stream": "First token to client",
}
Paint = Callable[[str, str], str]

SPARKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "unknown"
SEES_SCHEDULE = ("ttft", "e2el")  # latencies that measure the length of the test once a load is too high
SENT_OTHERWISE = 0.01  # of the rate asked for
_STYLES = {"VALID": "32", "SUSPECT": "33", "INVALID": "31", "saturated": "31", "title": "1", "faint": "2"}
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)_(\w+)_ms")


def render(result: BenchResult, *, colour: bool = False) -> str:
    """The report as text of at most 100 columns, without a line end.

    Args:
        result: any, predicted or measured; what it does not know is left out or called unknown.
        colour: with ANSI colours.
    """
    paint = _painter(colour)
    blocks: list[Iterable[str]] = [
        _verdict(result, paint),
        _totals(result),
        *(_latency(result, *entry, paint) for entry in SECTIONS),
        _from_schedule(result),
        ["=" * WIDTH],
        _ttft(result, paint),
        _server(result, paint),
        _bounds(result, paint),
        _notes(result, paint),
    ]
    return "\n".join(line.rstrip() for block in blocks for line in block)


def _painter(colour: bool) -> Paint:
    def paint(style: str, text: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour and style in _STYLES else text

    return paint


def _line(label: str, value: object, more: str = "") -> str:
    """One figure as vllm bench serve prints it; whole numbers stay whole."""
    if value is None:
        shown = UNKNOWN
    elif isinstance(value, float):
        shown = f"{value:.2f}"
    else:
        shown = str(value)
    return f"{label + ':':<40} {shown:<10}" + (f" {more}" if more else "")


def _rule(title: str) -> str:
    return f"{title:-^{WIDTH}}"


def _wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, LINE, subsequent_indent=indent, break_long_words=False) or [""]


def _regime(result: BenchResult) -> Mapping[str, Any]:
    found = result.extra.get("regime")
    return found if isinstance(found, Mapping) else {}


def _saturated(result: BenchResult) -> bool:
    return _regime(result).get("state") == "saturated"


def _verdict(result: BenchResult, paint: Paint) -> list[str]:
    """What was run, whether its figures may be used, and whether the load can be sustained."""
    identity = result.identity
    parts = [identity.get(key) for key in ("engine", "engine_version", "model")]
    args, count = identity.get("engine_args"), identity.get("gpu_count")
    if isinstance(args, Mapping):
        parts.append(args.get("quantization"))
    gpu = identity.get("gpu")
    parts.append(f"{count} x {gpu}" if gpu and isinstance(count, int) and count > 1 else gpu)
    what = " · ".join(str(part) for part in parts if part)
    lines = [paint("title", line) for line in _wrap(f"{result.origin}: {what or result.tool}")]
    status = result.verdict.status
    lines.append(f"verdict: {paint(status, status)}{_stability(result, paint)}")
    for reason in result.verdict.reasons:
        lines += _wrap(f"  {reason.subject}: {reason.text}", "    ")
    return [*lines, ""]


def _stability(result: BenchResult, paint: Paint) -> str:
    regime = _regime(result)
    state, offered = regime.get("state"), regime.get("offered_rate")
    rate = regime.get("sustainable_rate")
    if state == "saturated":
        able = f"about {rate:.3g} sustainable" if rate else "fewer sustainable"
        grows = regime.get("backlog_growth")
        queue = f", queue grows {grows:.3g}/s" if grows else ""
        return ", " + paint("saturated", "saturated") + f": {offered:.3g} requests/s offered, {able}{queue}"
    if state == "stable" and offered:
        asked = load_of(result.identity)[0]
        sent = " as sent" if asked and abs(offered / asked - 1.0) > SENT_OTHERWISE else ""
        return f", stable: {offered:.3g} requests/s offered{sent}"
    if state == "unknown" and offered:
        return f", too short to tell whether {offered:.3g} requests/s can be sustained"
    if state in ("closed-loop", "capped"):
        cap = load_of(result.identity)[1]
        held = "all sent at once" if cap is None else f"closed loop of {cap}"
        if state == "capped":
            held = f"capped at {cap} in flight: {offered:.3g} requests/s scheduled"
        answered = f", {rate:.3g} requests/s answered" if rate else ""
        return f", {held}{answered}" + ("; latencies grow with the number of prompts" if cap is None else "")
    return ""


def _totals(result: BenchResult) -> list[str]:
    figures = result.aggregates
    settings = {**_workload(result), **result.identity}
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines.append(_line("Successful requests", figures.get("completed")))
    kinds = [f"{n} {k[7:].replace('_', ' ')}" for k, n in figures.items() if k.startswith("failed_") and n]
    lines.append(_line("Failed requests", figures.get("failed"), ", ".join(kinds)))
    if settings.get("max_concurrency") is not None:
        lines.append(_line("Maximum request concurrency", settings["max_concurrency"]))
    rate = settings.get("request_rate")
    follows_trace = settings.get("use_trace_arrivals") is True
    if isinstance(rate, int | float) and np.isfinite(rate) and not follows_trace:
        lines.append(_line("Request rate configured (RPS)", float(rate)))
    lines.append(_line("Benchmark duration (s)", float(result.duration), _band(result, "duration")))
    for label, key in (
        ("Total input tokens", "total_input_tokens"),
        ("Total generated tokens", "total_output_tokens"),
        ("Request throughput (req/s)", "request_throughput"),
        ("Request goodput (req/s)", "request_goodput"),
        ("Output token throughput (tok/s)", "output_throughput"),
        ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
        ("Peak concurrent requests", "max_concurrent_requests"),
        ("Total token throughput (tok/s)", "total_token_throughput"),
    ):
        if figures.get(key) is not None or key in ("total_input_tokens", "total_output_tokens"):
            more = _attainment(result) if key == "request_goodput" else _band(result, key)
            lines.append(_line(label, figures.get(key), more))
    return lines


def _workload(result: BenchResult) -> Mapping[str, Any]:
    workload = result.identity.get("workload")
    return workload if isinstance(workload, Mapping) else {}


def _attainment(result: BenchResult) -> str:
    share = result.aggregates.get("goodput_attainment")
    return "" if share is None else f"{share:.1%} of all requests met every limit"


def _latency(result: BenchResult, key: str, name: str, title: str, paint: Paint) -> list[str]:
    """One metric; past saturation those that only measure the length of the test are not stated."""
    figures = result.aggregates
    keys = [k for k in figures if k.endswith(f"_{key}_ms") and k.split("_")[0] not in ("std",)]
    keys = [k for k in keys if figures[k] is not None]
    if not keys:
        return []
    lines = [_rule(title)]
    if _saturated(result) and key in SEES_SCHEDULE:
        text = f"{name} is not stated: above capacity it grows for as long as requests are sent."
        return [*lines, paint("faint", text)]
    for k in keys:
        match = _PERCENTILE.fullmatch(k)
        word = f"P{match[1]}" if match else k.split("_")[0].capitalize()
        more = "  ".join(part for part in (_band(result, k), _trust(result, k)) if part)
        lines.append(_line(f"{word} {name} (ms)", float(figures[k] or 0.0), more))
    return lines


def _band(result: BenchResult, key: str) -> str:
    """The 90 % interval of a predicted figure, e.g. `90 %: 105.4 to 131.0`."""
    told = result.extra.get("intervals")
    ends = told["figures"].get(key) if isinstance(told, Mapping) else None
    if not isinstance(told, Mapping) or ends is None:
        return ""
    low, high = (_rounded(float(end)) for end in ends)
    return f"{told['level']:.0%}: {low} to {high}"


def _rounded(value: float) -> str:
    """A bound with four significant digits: more would claim too much."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _trust(result: BenchResult, key: str) -> str:
    """n and 95 % bounds beside a percentile that few samples have to carry.

    Few are less than 100, and of a measurement fewer than ten beyond the percentile: the band of a prediction
    holds that spread already.
    """
    match = _PERCENTILE.fullmatch(key)
    if match is None:
        return ""
    figures = result.aggregates
    n = figures.get(f"n_{match[2]}", figures.get("completed"))
    q = float(match[1])
    if n is None or (match[2] == "itl" and (n >= 100 or "n_itl" not in figures)):
        return ""
    if n >= 100 and (_band(result, key) or n * (1.0 - q / 100.0) >= 10.0):
        return ""
    few = "" if supported(int(n), q) else ", too few to reach it"
    if f"{key}_low" not in figures:
        return f"n = {n}{few}"
    low, high = figures[f"{key}_low"], figures.get(f"{key}_high")
    shown = (
        f"{'below' if low is None else f'{low:.2f} to'} {'no upper bound' if high is None else f'{high:.2f}'}"
    )
    return f"n = {n}, 95 %: {shown}"


def _from_schedule(result: BenchResult) -> list[str]:
    """What users waited for, where it differs from what the client reports."""
    figures = result.aggregates
    delay = figures.get("mean_dispatch_delay_ms")
    if not delay or delay < 0.01 or _regime(result).get("state") in ("saturated", "capped"):
        return []
    lines = [_rule("Counted from the Schedule")]
    lines.append(
        _line("Mean dispatch delay (ms)", delay, "client-limited" if client_limited(dict(figures)) else "")
    )
    for key, name in (("ttft", "TTFT"), ("e2el", "E2EL")):
        lines.append(_line(f"Mean {name} from schedule (ms)", figures.get(f"mean_{key}_from_schedule_ms")))
        for k in figures:
            match = re.fullmatch(rf"p([\d.]+)_{key}_from_schedule_ms", k)
            if match:
                lines.append(_line(f"P{match[1]} {name} from schedule (ms)", figures[k]))
    return lines


def _bar(share: float) -> str:
    return "█" * round(share * BAR)


def _ttft(result: BenchResult, paint: Paint) -> list[str]:
    parts = result.extra.get("ttft_parts_ms")
    figures = result.aggregates
    if not isinstance(parts, Mapping):
        parts = {
            "client_wait": figures.get("mean_dispatch_delay_ms"),
            "queue": figures.get("mean_queue_ms"),
            "prefill": figures.get("mean_prefill_ms"),
            "stream": figures.get("mean_first_token_delivery_ms"),
        }
        if parts["queue"] is None:
            return []
    known = {name: float(value) for name, value in parts.items() if value is not None}
    # In a closed loop a request waits for a free place by design, and no one waits for it.
    if _regime(result).get("state") in ("closed-loop", "capped") or known.get("client_wait", 0.0) < 0.005:
        known.pop("client_wait", None)
    total = sum(known.values())
    if total <= 0:
        return []
    lines = [paint("title", _rule("Where Mean TTFT Goes"))]
    # Above capacity the parts in ms measure the length of the test, as TTFT does.
    saturated = _saturated(result)
    for name, value in known.items():
        share = f"{value / total:6.1%} {_bar(value / total)}"
        label = _part(name, result)
        lines.append(
            _line(f"{label} (%)", 100 * value / total, _bar(value / total))
            if saturated
            else _line(f"{label} (ms)", value, share)
        )
    if saturated:
        text = "Shares of this test alone: above capacity the queue's part grows with its length."
        lines.append(paint("faint", text))
    return lines


def _part(name: str, result: BenchResult) -> str:
    """A part's label; a simulated queue starts on arrival, with the running step's end in it."""
    if name == "queue" and result.origin == "predicted":
        return "Queue, running step's end included"
    return TTFT_PARTS.get(name, name)


def _server(result: BenchResult, paint: Paint) -> list[str]:
    server = result.server
    lines = []
    if server.get("kv_cache_tokens") is not None:
        lines.append(_line("KV cache (tokens)", server["kv_cache_tokens"]))
    usage = server.get("max_kv_usage")
    series = result.series
    if usage is None and series is not None:
        usage = _largest(series.kv_usage)
    if usage is not None or (series is not None and len(series.kv_usage)):
        lines.append(_line("Peak KV use (%)", None if usage is None else float(usage) * 100.0))
    if series is not None and len(series.time) > 1:
        for label, values, top in (
            ("KV use over time", series.kv_usage, 1.0),
            ("Running over time", series.running, None),
            ("Waiting over time", series.waiting, None),
        ):
            lines.append(f"{label + ':':<40} {_spark(series.time, values, top)}")
    preemptions = server.get("num_preemptions", result.aggregates.get("num_preemptions"))
    if preemptions is not None:
        lines.append(_line("Preemptions", int(preemptions)))
    queries, hits = server.get("prefix_cache_queries"), server.get("prefix_cache_hits")
    if queries and hits is not None:
        more = f"{int(hits):,} of {int(queries):,} tokens"
        lines.append(_line("Prefix cache hit rate (%)", 100.0 * hits / queries, more))
    return [paint("title", _rule("KV Cache and Queue")), *lines] if lines else []


def _largest(values: Any) -> float | None:
    """The largest of a column in which NaN is unknown; None if all of it is."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known.max()) if len(known) else None


def _spark(time: Any, values: Any, top: float | None) -> str:
    """A series as 40 bars of its means over time, scaled to `top` or to its own maximum (then stated).

    Where nothing is known there is a blank, which is not the lowest bar.
    """
    largest = _largest(values)
    if largest is None:
        return UNKNOWN
    edges = np.linspace(time[0], time[-1], 41)
    at = np.clip(np.searchsorted(time, (edges[:-1] + edges[1:]) / 2, side="right") - 1, 0, len(time) - 1)
    shown = np.asarray(values, dtype=np.float64)[at]
    scale = largest if top is None else top
    levels = np.clip(shown / (scale or 1.0) * (len(SPARKS) - 1), 0, len(SPARKS) - 1).round()
    text = "".join(SPARKS[int(level)] if np.isfinite(level) else " " for level in levels)
    return text if top is not None else f"{text} max {scale:.0f}"


def _bounds(result: BenchResult, paint: Paint) -> list[str]:
    lines: list[str] = []
    for key, title in (
        ("device_time", "What Bound the Device"),
        ("waiting_time", "What Requests Waited for"),
    ):
        seconds = result.extra.get(key)
        if not isinstance(seconds, Mapping) or result.duration <= 0:
            continue
        # An engine that works ahead may still be at a step when the last token is out.
        whole = max(result.duration, sum(seconds.values()) if key == "device_time" else 0.0)
        rows = [(name, float(value) / whole) for name, value in seconds.items() if value]
        if rows:
            lines.append(paint("title", _rule(title)))
            rows.sort(key=lambda row: -row[1])
            lines += [
                f"{name + ' (% of the time):':<40} {share * 100:<10.1f} {_bar(share)}" for name, share in rows
            ]
    return lines


def _notes(result: BenchResult, paint: Paint) -> list[str]:
    notes: list[Note] = list(result.notes)
    spread = result.extra.get("intervals")
    if isinstance(spread, Mapping):
        text = f"{spread['level']:.0%} of the time a run lies within the bounds shown: {spread['from']}"
        notes.append(Note("info", "intervals", text))
    told = _regime(result).get("notes", ())
    notes += [n if isinstance(n, Note) else Note(n["kind"], n["subject"], n["text"]) for n in told]
    notes = [n for n in notes if n.subject not in ("saturated", "load")]  # the verdict has said so
    if not notes:
        return []
    order = {"warning": 0, "not-modelled": 1, "assumed": 2, "info": 3}
    notes.sort(key=lambda note: order.get(note.kind, 4))
    lines = [paint("title", _rule("Notes"))]
    for note in notes:
        lines += _wrap(f"{note.kind}: {note.subject}: {note.text}")
    return lines
