"""What /metrics say of a run: latencies within their buckets, and whether they agree with the client."""

from __future__ import annotations

from collections.abc import Sequence

from bench.audit.facts import Run
from bench.audit.finding import Finding
from bench.histogram import check_against_client

FULL = 0.9  # KV use from which the pool keeps requests out


def distinct(runs: Sequence[Run]) -> list[Finding]:
    """Server-side quantiles of two runs differ only if their buckets do."""
    known = [(run, run.server_quantile("ttft", 0.5)) for run in runs]
    pairs = [(run, interval) for run, interval in known if interval is not None]
    if len(pairs) < 2:
        return []
    (_, first), (_, last) = pairs[0], pairs[-1]
    text = f"P50 TTFT {first} s against {last} s"
    if first.distinguishable(last):
        return [Finding("percentiles", "note", "server-side medians differ for certain", text)]
    title = "server-side medians are not told apart: their buckets overlap"
    return [
        Finding("percentiles", "note", title, text, "", "compare the means (_sum / _count), which are exact")
    ]


def server_side(run: Run) -> list[Finding]:
    """Histograms of /metrics: what their buckets allow to be said, and whether they agree with the client."""
    if run.view is None:
        return []
    found = _restarted(run) + _gauges(run) + ([] if run.figures else _scraped(run))
    for figure, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E")):
        interval = run.server_quantile(figure, 0.99)
        if interval is not None and interval.censored_at_least is not None:
            text = f"P99 {name} lies in the +Inf bucket"
            found.append(
                Finding(
                    "percentiles",
                    "care",
                    text,
                    f"{run.name}: at least {interval.low:g} s, no upper bound",
                    "histogram_quantile would print the last edge as if it were the value",
                    "take percentiles from the client, or raise the buckets",
                    (run.name,),
                )
            )
        histogram = run.view.histograms.get(figure)
        mean = run.get({"ttft": "mean_ttft_ms", "itl": "mean_itl_ms", "e2e": "mean_e2el_ms"}[figure])
        if histogram is None or figure == "itl" or not run.paired:
            continue
        trust = check_against_client(
            histogram, client_mean=None if mean is None else mean / 1e3, client_count=run.completed
        )
        if trust.reasons:
            shown = "unknown" if trust.server_mean is None else f"{trust.server_mean * 1e3:,.4g} ms"
            client = "" if mean is None else f", client {mean:,.4g} ms"
            found.append(
                Finding(
                    "percentiles",
                    "note" if trust.trusted else "care",
                    f"the server's {name} "
                    + ("has other requests in it" if trust.trusted else "is not to be trusted"),
                    f"{run.name}: server mean {shown}{client}: {', '.join(trust.reasons)}",
                    "",
                    "" if trust.trusted else "use the client's figures",
                    (run.name,),
                )
            )
    if run.view.imbalance is not None and run.view.imbalance > 1.2:
        found.append(
            Finding(
                "percentiles",
                "care",
                "engines unevenly loaded",
                f"{run.name}: the busiest of {run.view.engines} did {run.view.imbalance:.2f} times its share",
                "the mean of KV use hides the full one",
                "look at each engine by itself",
                (run.name,),
            )
        )
    return found


def _restarted(run: Run) -> list[Finding]:
    """A server that began anew between the two dumps has counted a part of the run only."""
    if run.view is None or not run.view.restarted:
        return []
    return [
        Finding(
            "percentiles",
            "care",
            "the server was restarted between the two dumps",
            f"{run.name}: a counter fell, or the process started later than the first dump's",
            "counts and latencies of /metrics are those since the restart: too low, or of a part of the run",
            "scrape before and after a run that one server served to its end",
            (run.name,),
        )
    ]


def _gauges(run: Run) -> list[Finding]:
    """Requests that waited at the moment of the scrape: low KV use beside them is no headroom."""
    if run.view is None or not run.view.waiting:
        return []
    usage, running = run.view.kv_usage_max, run.view.running
    evidence = f"{run.name}: {run.view.waiting:.0f} waited and {running or 0:.0f} ran at the scrape"
    if usage is None:
        return [Finding("percentiles", "care", "requests were waiting", evidence, "", "", (run.name,))]
    evidence += f", KV use {usage:.0%}"
    if usage >= FULL:
        title, effect = "requests were waiting for KV cache", "the pool bounds how many run"
    else:
        title = "requests were waiting with KV cache to spare"
        effect = (
            "something else is exhausted (prefill, token budget, sequence cap): low KV use is no headroom"
        )
    return [Finding("percentiles", "care", title, evidence, effect, "", (run.name,))]


def _scraped(run: Run) -> list[Finding]:
    """What /metrics alone say of latencies: means exactly, quantiles as the interval of their bucket."""
    if run.view is None:
        return []
    parts = []
    for figure, name in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E")):
        mean, p50, p99 = (
            run.view.mean(figure),
            run.server_quantile(figure, 0.5),
            run.server_quantile(figure, 0.99),
        )
        if mean is not None and p50 is not None and p99 is not None:
            parts.append(f"{name} mean {mean:.4g} s, P50 {p50}, P99 {p99}")
    if not parts:
        return []
    queue, ttft = run.view.mean("queue"), run.view.mean("ttft")
    effect = f"{queue / ttft:.0%} of mean TTFT is queue" if queue is not None and ttft else ""
    when = "over the run" if run.paired else "since start-up"
    text = f"{run.name}, {when}: {'; '.join(parts)}"
    title = "server-side latencies: means exact, quantiles only within their buckets"
    return [Finding("percentiles", "note", title, text, effect, "", (run.name,))]
