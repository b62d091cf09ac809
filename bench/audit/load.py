"""What the load met: failures, warm caches, held-back clients, saturation, too little KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.audit.checks import as_count
from bench.audit.facts import Run, alone
from bench.audit.finding import Finding, Level
from bench.audit.pair import OTHER
from sim.comparison.regimes import regime_of_figures, state_of
from sim.figures.metrics import MIN_SUCCESS
from sim.figures.regime import Regime

WARM = 0.01  # share of prompt tokens from the cache from which a random load is not fresh
FILLED = 0.8  # of the client's cap, over many rounds
PREDICTED = "servecast predict"  # the tool that a prediction names
SHARED_DATA = ("prefix_repetition", "PrefixRepetitionDataset")


def failures(runs: Sequence[Run]) -> list[Finding]:
    """Failed requests, and verdicts that a result carries already."""
    findings = []
    for run in runs:
        failed, completed = run.get("failed"), run.get("completed")
        if completed is not None and failed is not None:
            total = completed + failed
            rate = completed / total if total else 1.0
            evidence = f"{run.label}: {completed:.0f} of {total:.0f} answered"
            if rate < MIN_SUCCESS:
                findings.append(
                    Finding(
                        "failures",
                        "stop",
                        f"{failed:.0f} requests failed",
                        evidence,
                        "latencies are of the survivors only",
                        "find out why before anything else",
                        (run.name,),
                    )
                )
            elif failed:
                findings.append(
                    Finding(
                        "failures", "care", f"{failed:.0f} requests failed", evidence, "", "", (run.name,)
                    )
                )
            else:
                findings.append(
                    Finding("failures", "ok", "every request was answered", evidence, "", "", (run.name,))
                )
        elif run.figures:
            text = f"{run.label}: failures are not reported"
            findings.append(Finding("failures", "unknown", "not known", text, "", "", (run.name,)))
        findings += _stored(run)
    return findings


def _stored(run: Run) -> list[Finding]:
    """A verdict of servecast's own, as the result carries it."""
    if run.result is None or not run.result.tool.startswith("servecast"):
        return []
    levels: dict[str, Level] = {"INVALID": "stop", "SUSPECT": "care"}
    level = levels.get(run.result.verdict.status)
    if level is None:
        return []
    return [
        Finding(
            "failures",
            level,
            f"judged {run.result.verdict.status}",
            f"{run.label}: {reason.text}",
            "",
            "",
            (run.name,),
        )
        for reason in run.result.verdict.reasons
    ]


def cache(runs: Sequence[Run]) -> list[Finding]:
    """Prefix-cache hits that the load does not explain, or prompts that an earlier run may have left."""
    findings = []
    for run in runs:
        rate = run.hit_rate
        if rate is not None:
            findings.append(_hits(run, *rate))
    if findings:
        return findings
    if any(run.view is not None and not run.paired for run in runs):
        text = (
            "one /metrics dump shows all since start-up; the run's own share needs one before and one after"
        )
        findings.append(Finding("cache", "unknown", "not known", text, "", "scrape before and after"))
    return findings + _replayed(runs)


def _hits(run: Run, hits: float, queries: float) -> Finding:
    share = hits / queries
    evidence = f"{run.label}: {hits:,.0f} of {queries:,.0f} prompt tokens came from the cache ({share:.1%})"
    data = str(run.settings.get("dataset_name", ""))
    prefix = int(run.settings.get("random_prefix_len") or 0)
    shares = data in SHARED_DATA or prefix > 0
    if share < WARM:
        return Finding("cache", "ok", "no contamination", evidence, "", "", (run.name,))
    intended = run.intended_hits
    if intended:
        evidence += f", up to {intended:,} of them because prompts begin alike"
        share = (hits - intended) / queries
        shares = share < WARM
    if shares:
        return Finding("cache", "note", "hits of a load that shares prefixes", evidence, "", "", (run.name,))
    own = abs((run.foreign_tokens or 1.0) - 1.0) <= OTHER
    level: Level = "stop" if data.lower().startswith("random") and own else "care"
    return Finding(
        "cache",
        level,
        "CONTAMINATED: the cache was warm",
        evidence,
        f"{share:.0%} of the prefill was not done; TTFT and throughput measure the cache",
        "another --seed for each run, a fresh server, or no prefix caching",
        (run.name,),
    )


def _replayed(runs: Sequence[Run]) -> list[Finding]:
    """Two runs of one seed on one server: the second sends prompts that the first has left in the cache."""
    if len(runs) < 2:
        text = "no cache counters; a seed that the server has seen before would measure the cache"
        return [
            Finding(
                "cache", "unknown", "not known", text, "", "scrape /metrics before and after, vary --seed"
            )
        ]
    first, last = runs[0], runs[-1]
    seeds = [run.settings.get("seed") for run in runs]
    n, m = first.num_prompts, last.num_prompts
    same = None not in seeds and len(set(seeds)) == 1
    if None not in seeds and not same:
        said = ", ".join(str(seed) for seed in seeds)
        return [Finding("cache", "ok", "different seeds", f"seeds {said}: no prompt is sent twice")]
    share = f"; at most {min(n, m) / max(n, m):.0%} of the larger run's prompts" if n and m else ""
    title = "one seed for all runs" if same else "seeds and cache counters are not known"
    text = (
        "the same seed makes the same prompts" if same else "the clients' default seed is the same every time"
    )
    return [
        Finding(
            "cache",
            "care" if same and _caching(runs) else "unknown",
            title,
            f"{text}, and prefix caching is on by default",
            f"if one server took both, prompts were replayed{share}",
            "another --seed for each run, or compare prefix_cache_hits before and after",
        )
    ]


def _caching(runs: Sequence[Run]) -> bool:
    return not any(
        run.engine.get("enable_prefix_caching") is False or run.engine.get("disable_radix_cache") is True
        for run in runs
    )


def client_limited(runs: Sequence[Run]) -> list[Finding]:
    """Requests that waited in the client, or a client that never reached its own cap."""
    findings = []
    for run in runs:
        delay, whole = run.get("mean_dispatch_delay_ms"), run.get("mean_e2el_from_schedule_ms")
        flight, cap, n = run.in_flight, run.concurrency, run.completed
        if delay is not None and whole and delay > 0.1 * whole:
            findings.append(
                Finding(
                    "client_limited",
                    "care",
                    "requests waited in the client",
                    f"{run.label}: {delay:,.0f} ms of {whole:,.0f} ms E2E counted from the schedule",
                    f"users wait {delay / whole:.0%} longer than the latencies say",
                    "raise --max-concurrency, or quote latencies from the schedule",
                    (run.name,),
                )
            )
        elif flight is not None and cap and n and run.rate is None and n / cap >= 5 and flight < FILLED * cap:
            findings.append(
                Finding(
                    "client_limited",
                    "care",
                    "the client never filled its cap",
                    f"{run.label}: {flight:.1f} of {cap} requests in flight over {n / cap:.0f} rounds",
                    f"the server saw {1 - flight / cap:.0%} less load than configured",
                    "more client processes; no tokenising or TLS in the load generator's loop",
                    (run.name,),
                )
            )
        elif flight is not None and cap:
            text = f"{run.label}: {flight:.1f} of {cap} in flight on average"
            findings.append(Finding("client_limited", "ok", "the cap was filled", text, "", "", (run.name,)))
    measured = [run for run in runs if run.figures and run.settings.get("tool") != PREDICTED]
    if not findings and any(run.figures for run in runs) and not measured:
        text = "predictions: a simulated client is never short of time"
        findings.append(Finding("client_limited", "ok", "nothing was held back", text))
    elif not findings and measured:
        text = "the reports carry neither send times nor enough to count requests in flight"
        findings.append(Finding("client_limited", "unknown", "not known", text, "", "--save-detailed"))
    return findings


def saturated(runs: Sequence[Run]) -> list[Finding]:
    """Open loops that outran the server; closed loops, whose TTFT holds for their concurrency only."""
    findings = []
    states = [_regime(run).state for run in runs]
    for run, state in zip(runs, states, strict=True):
        rate, achieved, ttft, duration = (
            run.rate,
            run.throughput,
            run.get("mean_ttft_ms"),
            run.get("duration"),
        )
        if not run.figures:
            continue
        share = (
            f"mean TTFT is {ttft / 1e3 / duration:.0%} of the run's {duration:.0f} s"
            if ttft and duration
            else ""
        )
        if state == "saturated" and rate is not None and achieved is not None:
            findings.append(
                Finding(
                    "saturated",
                    "stop" if states.count("saturated") < len(runs) else "care",
                    "saturated",
                    f"{run.label}: {rate:g} requests/s offered, {achieved:.3g} completed",
                    f"{share}; it grows with the length of the test" if share else "TTFT grows with the test",
                    f"offer less than {achieved:.2g} requests/s to measure latency; compare throughput only",
                    (run.name,),
                )
            )
        elif rate is None or state in ("closed-loop", "capped"):
            findings.append(_closed(run, share))
        else:
            known = state == "stable"
            text = f"{run.label}: {achieved:.3g} completed" if achieved is not None else run.label
            title, effect = ("below capacity", "") if known else ("too short to tell", "send more requests")
            level: Level = "ok" if known else "unknown"
            findings.append(Finding("saturated", level, title, text, effect, "", (run.name,)))
    return findings


def _regime(run: Run) -> Regime:
    """Of an open loop; by its requests where they are known."""
    if run.result is not None and run.result.records is not None:
        return state_of(run.result)
    found = Regime("unknown") if run.rate is None else regime_of_figures(run.rate, run.figures)
    return replace(found, state="capped") if found.state == "saturated" and run.concurrency else found


def _closed(run: Run, share: str) -> Finding:
    if run.concurrency is None:
        title = "all requests at once"
        level: Level = "note"
        if run.settings.get("request_rate") is None:
            title, level = "rate and cap are not known", "unknown"
        return Finding("saturated", level, title, run.label, share, "", (run.name,))
    text = f"{run.label}: a closed loop cannot outrun the server; TTFT holds for this concurrency only"
    return Finding("saturated", "note", "closed loop", text, share, "", (run.name,))


def capacity(runs: Sequence[Run]) -> list[Finding]:
    """What the KV cache admits against what is in flight, and what that does to TTFT."""
    findings = []
    for run in runs:
        findings += _hybrid(run)
        full, half, prompt = run.fits(), run.fits(of_output=0.5), run.fits(of_output=0.0)
        cap = run.concurrency or (round(run.in_flight) if run.in_flight else None)
        if full is None or prompt is None or cap is None:
            findings += _unknown_capacity(run)
            continue
        tokens = (run.mean_tokens("input") or 0) + (run.mean_tokens("output") or 0)
        evidence = f"{run.label}: {_pool(run)} hold {full} requests of {tokens:,.0f}"
        if cap <= full:
            text = f"{evidence}; {cap} are in flight"
            findings.append(
                Finding("capacity", "ok", "all requests fit the KV cache", text, "", "", (run.name,))
            )
            continue
        evidence += f" to their end ({half} on average, {prompt} at admission)"
        evidence += f"; {cap} are in flight, so {cap - full} wait"
        findings.append(
            Finding(
                "capacity",
                "care",
                f"{full} of {cap} fit in the KV cache",
                evidence,
                _queue_effect(run, runs),
                f"--max-concurrency {full}, or more KV cache (memory share, FP8 KV cache, quantised "
                "weights, more GPUs); "
                "raising the sequence cap does nothing",
                (run.name,),
            )
        )
    return findings


def _queue_effect(run: Run, runs: Sequence[Run]) -> str:
    share = run.queue_share()
    ttft = run.get("mean_ttft_ms")
    parts = []
    if run.view is not None and run.paired:
        queue, seen = run.view.mean("queue"), run.view.mean("ttft")
        if queue is not None and seen:
            parts.append(f"{queue / seen:.0%} of mean TTFT is queue, by the server's own histograms")
    if share is not None and ttft is not None:
        low, high = share
        text = f"{low:.0%} to {high:.0%} of the {ttft / 1e3:.1f} s mean TTFT is queue (Little's law)"
        parts.append(text)
    if run.simulated is not None and run.simulated.queue_share is not None:
        parts.append(f"{run.simulated.queue_share:.0%} in a simulation of this run")
    single = alone(tuple(runs), run)
    alone_ttft = single.get("mean_ttft_ms") if single else None
    if alone_ttft and ttft:
        parts.append(f"the prefill itself takes {alone_ttft / 1e3:.2f} s at concurrency 1")
    return "; ".join(parts)


def _hybrid(run: Run) -> list[Finding]:
    pool = run.log.kv if run.log else None
    if pool is None or pool.consistent:
        return []
    return [
        Finding(
            "capacity",
            "note",
            "the printed token count is not the pool",
            f"{run.name}: {pool.check}",
            f"sequences of {pool.max_len:,} tokens really hold {pool.equivalent_tokens:,}",
            "use the printed concurrency, not tokens / length (sliding-window, hybrid or state-space layers)",
            (run.name,),
        )
    ]


def _pool(run: Run) -> str:
    """Size of the KV cache, which each data-parallel replica has for itself."""
    count = len(run.kv_pools)
    return f"{run.kv_tokens:,} tokens" + (f" in {count} replicas" if count > 1 else "")


def _unknown_capacity(run: Run) -> list[Finding]:
    """Without the pool's size: what Little's law says of who was served."""
    flight, decoding = run.in_flight, run.decoding
    if run.kv_tokens is not None and not run.figures:
        logged = run.log.pools if run.log else ()
        most = as_count(run.engine.get("max_num_seqs")) or as_count(run.engine.get("max_running_requests"))
        text = f"{run.name}: KV cache of {_pool(run)}"
        times = [pool.concurrency for pool in logged if pool.concurrency is not None]
        if times and len(times) == len(logged) and logged[0].max_len is not None:
            text += f", {sum(times):.2f} requests of the full {logged[0].max_len:,}"
        if most is not None:
            where = " in each replica" if len(run.kv_pools) > 1 else ""
            text += f"; up to {most} sequences may run{where}"
            text += f", each of {min(run.kv_pools) // most:,} tokens at most"
        return [Finding("capacity", "note", "what the pool holds", text, "", "", (run.name,))]
    if not run.figures:
        return []
    evidence, effect = f"{run.label}: the size of the KV cache is not known", ""
    if flight is not None and decoding is not None and run.concurrency not in (None, 1):
        effect = (
            f"of {flight:.0f} requests in flight {decoding:.0f} were past their first token (Little's law)"
        )
    return [
        Finding(
            "capacity",
            "unknown",
            "not known",
            evidence,
            effect,
            "add the start-up log or --kv-cache-tokens",
            (run.name,),
        )
    ]
