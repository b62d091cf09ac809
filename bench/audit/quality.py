"""What a run's figures can carry: percentiles beside KV use, cold starts, sample size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.audit.facts import Run, alone
from bench.audit.finding import Finding, Level
from bench.audit.server import distinct, server_side
from bench.validity import Evidence, cold_start
from sim.figures.quantiles import percentile_interval, supported
from sim.workload.spec import WorkloadSpec

EQUAL = 0.005  # mean ITL and mean TPOT closer than this are one number
UPPER_BOUND = 368  # samples from which a P99 has an upper 95 % bound
COLD_MEDIANS = 3.0
COLD_FLOOR_MS = 500.0
EXPLAINS = 0.15  # how well one slow request must explain mean and P99 together
MANY_PREEMPTIONS = 0.05  # per request


def percentiles(runs: Sequence[Run]) -> list[Finding]:
    """Means, medians and tails of each run, and whether KV use and preemptions are known beside them."""
    findings: list[Finding] = []
    findings += distinct(runs)
    for run in runs:
        findings += _interruptions(run, runs)
        findings += _preempted(run, runs)
        findings += server_side(run)
    blind = [
        run
        for run in runs
        if run.figures and run.preemptions is None and run.kv_usage is None and run.view is None
    ]
    if blind:
        findings.append(
            Finding(
                "percentiles",
                "unknown",
                "KV use and preemptions are not known",
                f"{', '.join(run.label for run in blind)}: latencies without the server's side",
                "",
                "scrape /metrics before and after, or run it with servecast bench",
                tuple(run.name for run in blind),
            )
        )
    return findings


def _interruptions(run: Run, runs: Sequence[Run]) -> list[Finding]:
    """Mean ITL against TPOT, its median and its P99: what prefills of others did to running streams."""
    mean, tpot = run.get("mean_itl_ms"), run.get("mean_tpot_ms")
    median, p99 = run.median("itl"), run.get("p99_itl_ms")
    if mean is None or p99 is None:
        return []
    same = tpot is not None and abs(mean - tpot) <= EQUAL * tpot
    evidence = f"{run.label}: mean ITL {mean:.2f} ms"
    if same:
        evidence += f" = mean TPOT {tpot:.2f} ms (by arithmetic: one token per message, equal lengths)"
    pace = median if median is not None else mean
    evidence += f", P50 {median:.2f}" if median is not None else ""
    evidence += f", P99 {p99:.2f} ms"
    if pace == 0 or p99 < 2.0 * pace:
        return [
            Finding("percentiles", "note", "decoding was hardly interrupted", evidence, "", "", (run.name,))
        ]
    effect = f"P99 is {p99 / pace:.0f} times the undisturbed step"
    if median is not None and mean > median:
        effect += (
            f"; {1 - median / mean:.0%} of the decode time went into steps that carried others' prefills"
        )
    single = alone(tuple(runs), run)
    ttft, length = (single.get("mean_ttft_ms"), single.mean_tokens("input")) if single else (None, None)
    if ttft and length:
        rate = length / ttft
        tokens = p99 * rate
        effect += (
            f"; {p99:.0f} ms is about {tokens:,.0f} prompt tokens at the {rate * 1e3:,.0f} tok/s of "
            "concurrency 1: the token budget of one step"
        )
    title = "the mean hides prefill interruptions" if same else "long gaps in running streams"
    instead = (
        "quote median and P99 of ITL, not its mean; a smaller --max-num-batched-tokens shortens the gaps"
    )
    return [Finding("percentiles", "note", title, evidence, effect, instead, (run.name,))]


def _preempted(run: Run, runs: Sequence[Run]) -> list[Finding]:
    count, completed = run.preemptions, run.completed
    if count is None or not completed:
        return []
    share = count / completed
    evidence = f"{run.label}: {count} preemptions in {completed} requests"
    if run.kv_usage is not None:
        evidence += f", KV use up to {run.kv_usage:.0%}"
    if count == 0:
        return [Finding("percentiles", "ok", "no preemption", evidence, "", "", (run.name,))]
    effect = f"{share:.0%} of the requests were computed again in part"
    single = alone(tuple(runs), run)
    length, duration = run.mean_tokens("input"), run.get("duration")
    ttft = single.get("mean_ttft_ms") if single else None
    if ttft and length and duration:
        lost = count * ttft / 1e3
        effect += f", about {lost:.0f} s of prefill or {lost / duration:.0%} of the run"
    level: Level = "care" if share > MANY_PREEMPTIONS else "note"
    instead = "cap concurrency at what fits, or give the KV cache more memory; --watermark 0.05 admits fewer"
    return [Finding("percentiles", level, "requests were preempted", evidence, effect, instead, (run.name,))]


class Cold(NamedTuple):
    """A cold start read off aggregates: how slow, how many requests, and the mean without them."""

    slowest_ms: float
    requests: int
    clean_mean_ms: float


def cold_from_aggregates(run: Run) -> Cold | None:
    """One slow request (or one per unit of concurrency) that explains mean and P99 of TTFT together.

    With n requests of about the median m and one of s: mean = m + (s - m) / n, and the linear P99 of fewer
    than 100 lies between the largest two. Both equations giving one s is the sign.
    """
    n, mean, median, p99 = run.completed, run.get("mean_ttft_ms"), run.median("ttft"), run.get("p99_ttft_ms")
    if mean is None or median is None or p99 is None or mean <= median:
        return None
    busy = run.concurrency or 1
    if p99 <= COLD_MEDIANS * max(1.0, 0.5 * busy) * median or p99 - median <= COLD_FLOOR_MS:
        return None
    if not n:
        return Cold(p99, 1, median) if busy == 1 else None
    excess = n * (mean - median)
    for count in range(1, busy + 1):
        slowest = median + excess / count
        position = 0.99 * (n - 1)
        below = position - int(position)
        # Index of the P99 from the top: with `count` slow ones it may fall among them.
        implied = slowest if int(position) >= n - count else median + below * (slowest - median)
        if abs(implied - p99) <= EXPLAINS * p99:
            return Cold(slowest, count, median)
    return None


def warmup(runs: Sequence[Run]) -> list[Finding]:
    """Warm-ups that were made, and cold starts that show."""
    findings = []
    for run in runs:
        # A simulated server compiles and captures nothing.
        if not run.figures or (run.result is not None and run.result.origin == "predicted"):
            continue
        findings.append(_cold(run) or _warm(run))
    return findings


def _cold(run: Run) -> Finding | None:
    records = run.result.records if run.result else None
    if records is not None and run.result is not None:
        found = cold_start(run.result, records, WorkloadSpec(), Evidence())
        if found:
            return Finding(
                "warmup", "care", "a cold start is in the window", found[0][1].text, "", _WARM, (run.name,)
            )
    cold = cold_from_aggregates(run)
    if cold is None:
        return None
    mean, median, p99 = run.get("mean_ttft_ms"), run.median("ttft"), run.get("p99_ttft_ms")
    assert mean is not None
    assert median is not None
    assert p99 is not None
    n = run.completed
    of = f"{cold.requests} of {n} requests" if n else "one request"
    evidence = (
        f"{run.label}: TTFT mean {mean:.2f}, P50 {median:.2f}, P99 {p99:.2f} ms; {of} of about "
        f"{cold.slowest_ms / 1e3:.2f} s explains mean and P99 together"
    )
    effect = (
        f"the mean is {mean / cold.clean_mean_ms - 1:+.0%} too high (about {cold.clean_mean_ms:.0f} ms "
        "without it), and P99 is that one request"
    )
    return Finding("warmup", "care", "a cold start is in the window", evidence, effect, _WARM, (run.name,))


_WARM = "run it again with --num-warmups 5, or on a server that has served; until then quote the median"


def _warm(run: Run) -> Finding:
    asked = run.settings.get("num_warmups")
    ready = run.settings.get("ready_check_timeout_sec")
    tail, median = run.get("p99_ttft_ms"), run.median("ttft")
    sign = ""
    if tail is not None and median and run.concurrency == 1:
        sign = f"; no cold start shows (P99 TTFT {tail / median - 1:+.0%} over its median)"
    if asked or ready:
        what = f"{asked} warm-ups" if asked else "the ready check's one request"
        return Finding("warmup", "ok", "warmed up", f"{run.label}: {what}{sign}", "", "", (run.name,))
    if asked is None and str(run.settings.get("tool", "")).startswith("sglang"):
        text = f"{run.label}: the client sends one by default{sign}"
        return Finding("warmup", "ok", "one warm-up", text, "", "", (run.name,))
    said = "--num-warmups 0" if asked == 0 else "none is named, and vllm bench serve sends none by default"
    return Finding(
        "warmup",
        "care" if asked == 0 and not sign else "note",
        "no warm-up",
        f"{run.label}: {said}{sign}",
        "the first requests of a fresh server compile and capture; they weigh most in small runs",
        "--num-warmups 5",
        (run.name,),
    )


def samples(runs: Sequence[Run]) -> list[Finding]:
    """Requests against the percentiles that are quoted, and rounds against ramp-up and drain."""
    findings = []
    for run in runs:
        n = run.completed
        if n is None:
            if run.figures:
                findings.append(
                    Finding(
                        "samples",
                        "unknown",
                        "the number of requests is not known",
                        run.label,
                        "",
                        "",
                        (run.name,),
                    )
                )
            continue
        quoted = sorted(
            {key.split("_")[0] for key in run.figures if key.startswith("p9") and key.endswith("_ms")}
        )
        beyond = [word.upper() for word in quoted if not supported(n, float(word[1:]))]
        if beyond:
            findings.append(_too_few(run, n, beyond))
        findings += _rounds(run, n)
        if not beyond and quoted:
            bound = "" if n >= UPPER_BOUND else f"; below {UPPER_BOUND} a P99 has no upper 95 % bound"
            findings.append(
                Finding(
                    "samples",
                    "ok",
                    "percentiles lie within the sample",
                    f"{run.label}: n = {n}{bound}",
                    "",
                    "",
                    (run.name,),
                )
            )
    return findings


def _too_few(run: Run, n: int, beyond: Sequence[str]) -> Finding:
    names = ", ".join(beyond)
    evidence = f"{run.label}: n = {n}; {names} is interpolated between the largest values"
    records = run.result.records if run.result else None
    if records is not None and "P99" in beyond:
        interval = percentile_interval(records.first_token - records.sent, 99.0)
        low = "unbounded" if interval.low is None else f"{interval.low * 1e3:.1f} ms"
        high = "unbounded" if interval.high is None else f"{interval.high * 1e3:.1f} ms"
        evidence += f"; 95 % bounds of P99 TTFT: {low} to {high}"
    return Finding(
        "samples",
        "care",
        f"{names} of {n} samples is not to be trusted",
        evidence,
        f"no upper bound at 95 % below {UPPER_BOUND} samples; another run may give a quite different P99",
        f"at least 100 requests for a P99, {UPPER_BOUND} to bound it: --num-prompts {UPPER_BOUND}",
        (run.name,),
    )


def _rounds(run: Run, n: int) -> list[Finding]:
    """In a closed loop: how much of the run is ramp-up and drain."""
    cap, flight = run.concurrency, run.in_flight
    if cap is None or cap < 2 or n / cap >= 5:
        return []
    evidence = f"{run.label}: {n} requests are {n / cap:.3g} rounds"
    effect = ""
    if flight is not None:
        effect = (
            f"{flight:.0f} of {cap} were in flight on average: {1 - flight / cap:.0%} of the load is missing"
        )
        if flight > 0.95 * cap:
            return []
    return [
        Finding(
            "samples",
            "care" if n / cap < 3 else "note",
            "few rounds: ramp-up and drain weigh in",
            evidence,
            effect,
            f"at least 5 rounds: --num-prompts {5 * cap}",
            (run.name,),
        )
    ]
