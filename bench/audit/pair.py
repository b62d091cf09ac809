"""What differs between runs: the load they carried, the client that carried it, the settings that changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.audit.facts import Run
from bench.audit.finding import Finding, Level
from sim.results_io.fields import UNIT_SLACK

OTHER = 0.05  # tokens that the server counted beyond those of the report
SAME = 0.01  # mean lengths further apart than this are two loads
LOAD = {
    "max_concurrency": "concurrency",
    "num_prompts": "prompts",
    "request_rate": "request rate",
    "burstiness": "burstiness",
    "num_warmups": "warm-ups",
}
SAMPLE = ("num_prompts", "num_warmups")  # change how much is measured, not what
DATA = ("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len")


def input_distribution(runs: Sequence[Run]) -> list[Finding]:
    """Mean lengths, data set and spread, between runs."""
    said = [f"{run.label}: {_lengths(run)}" for run in runs]
    if len(runs) < 2:
        return [Finding("input", "note", "one run, nothing to compare with", "; ".join(said))]
    means = {side: [_mean(run, side) for run in runs] for side in ("input", "output")}
    blind = ["sent" if side == "input" else "generated" for side, known in means.items() if None in known]
    findings = [_another(side, found) for side, known in means.items() if (found := _apart(known))]
    findings += _spread(runs)
    for key in DATA:
        names = {str(run.settings[key]) for run in runs if key in run.settings}
        if len(names) > 1 and not findings:
            effect = "" if blind else "the means agree all the same"
            findings.append(
                Finding(
                    "input", "care", f"{key} differs", ", ".join(sorted(names)), effect, "use one data set"
                )
            )
    if blind:
        findings.append(
            Finding(
                "input",
                "unknown",
                "the load is not known of every run",
                f"not every report says how many tokens were {' and '.join(blind)}",
                "",
                "keep the whole report or the JSON",
            )
        )
    return findings or [Finding("input", "ok", "the same mean lengths", "; ".join(said))]


def _mean(run: Run, side: str) -> float | None:
    """Mean length [tokens]; None is unknown, while a report may well say that nothing was generated."""
    if run.get(f"total_{side}_tokens") == 0 and run.get("completed"):
        return 0.0
    return run.mean_tokens(side)


def _apart(means: Sequence[float | None]) -> list[float]:
    """The means that are known, where they are of more than one load; else none."""
    known = [mean for mean in means if mean is not None]
    return known if known and max(known) > min(known) * (1.0 + SAME) else []


def _another(side: str, means: Sequence[float]) -> Finding:
    least = min(means)
    gap = f"{max(means) / least - 1.0:+.1%} tokens per request" if least else f"one had no {side} at all"
    return Finding(
        "input",
        "stop",
        f"another {side} length",
        f"mean {side} tokens {' against '.join(f'{mean:,.1f}' for mean in means)}",
        f"{gap}; TTFT follows prompt tokens, E2E and KV use follow both",
        f"the same lengths in both: --random-{side}-len {round(means[0]) or round(max(means))}, --ignore-eos",
    )


def _lengths(run: Run) -> str:
    known = [run.mean_tokens(side) for side in ("input", "output")]
    if known == [None, None]:
        return "lengths unknown"
    length, out = ("unknown" if mean is None else f"{mean:,.0f}" for mean in known)
    return f"{length} prompt and {out} output tokens per request"


def _spread(runs: Sequence[Run]) -> list[Finding]:
    """Equal means with unequal spread, where requests are known one by one."""
    found: list[Finding] = []
    for column in ("prompt_len", "output_len"):
        spreads = []
        for run in runs:
            records = run.result.records if run.result else None
            if records is None:
                return found
            lengths = getattr(records, column)
            lengths = lengths[lengths >= 0]
            spreads.append(
                float(np.std(lengths) / max(float(np.mean(lengths)), 1.0)) if len(lengths) else 0.0
            )
        if max(spreads) - min(spreads) > 0.05:
            values = " against ".join(f"{spread:.0%}" for spread in spreads)
            title = f"another spread of {'prompt' if column == 'prompt_len' else 'output'} lengths"
            found.append(
                Finding(
                    "input",
                    "stop",
                    title,
                    f"standard deviation over mean {values}",
                    "percentiles differ by it",
                )
            )
    return found


def client(runs: Sequence[Run]) -> list[Finding]:
    """Tool, endpoint and backend; and whether the server had other clients."""
    return [*_other_load(runs), *_clients(runs)]


def _other_load(runs: Sequence[Run]) -> list[Finding]:
    found = []
    for run in runs:
        ratio = run.foreign_tokens
        if ratio is not None and abs(ratio - 1.0) > OTHER:
            found.append(
                Finding(
                    "client",
                    "care",
                    "report and /metrics are not of one run",
                    f"{run.label}: the server counted {run.counted('prompt_tokens'):,.0f} prompt tokens, the "
                    f"report {run.get('total_input_tokens'):,.0f}",
                    f"{ratio:.2g} times the load: other clients, warm-ups, or dumps of another run",
                    "scrape right before and right after, with no other client",
                    (run.name,),
                )
            )
    return found


def _clients(runs: Sequence[Run]) -> list[Finding]:
    if len(runs) < 2:
        run = runs[0]
        what = ", ".join(str(run.settings[k]) for k in ("tool", "backend", "endpoint") if k in run.settings)
        return [
            Finding("client", "note", "one run, nothing to compare with", what or "the client is not named")
        ]
    tools = [_tool(run) for run in runs]
    known = {tool for tool in tools if tool}
    if len(known) > 1:
        return [
            Finding(
                "client",
                "care",
                "two clients",
                " against ".join(sorted(known)),
                "E2EL ends at [DONE] in sglang.bench_serving and at the last token in vllm bench serve; an "
                "ITL sample is a token in one and a message in the other: neither can be compared",
                "run both engines with one client, e.g. vllm bench serve",
            )
        ]
    for key in ("endpoint", "backend"):
        values = [str(run.settings[key]) for run in runs if key in run.settings]
        if len(set(values)) > 1:
            chat = any("chat" in value for value in values) and not all("chat" in value for value in values)
            effect = (
                "a chat template adds tokens to every prompt" if chat else "requests are made in another way"
            )
            return [
                Finding(
                    "client",
                    "care",
                    f"another {key}",
                    " against ".join(values),
                    effect,
                    f"use one {key} for both",
                )
            ]
    if not all(tools):
        return [
            Finding(
                "client", "unknown", "not every report names its client", ", ".join(t or "?" for t in tools)
            )
        ]
    ends = {str(run.settings[k]) for run in runs for k in ("endpoint", "backend") if k in run.settings}
    evidence = tools[0] + (
        f", {', '.join(sorted(ends))}" if ends else "; the reports do not name the endpoint"
    )
    return [Finding("client", "ok", "the same client", evidence)]


def _tool(run: Run) -> str:
    tool = str(run.settings.get("tool", ""))
    return "" if tool in ("figures", "part of a report") else tool


def dimensions(runs: Sequence[Run]) -> list[Finding]:
    """What changed besides the lengths, and whether an effect can be put down to one thing."""
    if len(runs) < 2:
        return [Finding("dimensions", "note", "one run, nothing to compare with", runs[0].label)]
    load = _changed(runs, LOAD, _load_value)
    keys = {key: key for run in runs for key in run.engine if key not in ("engine_version",)}
    engine = _changed(runs, keys | {"engine_version": "engine version"}, lambda run, key: run.engine.get(key))
    pools = {run.kv_tokens for run in runs if run.kv_tokens is not None}
    if len(pools) > 1 and not engine:
        engine["kv_tokens"] = "KV cache " + " against ".join(f"{pool:,}" for pool in sorted(pools))
    said = [*load.values(), *engine.values()]
    effect = _effects(runs)
    open_ = "" if all(run.engine for run in runs) else "; the reports do not name engine, version and flags"
    if not said:
        return [Finding("dimensions", "ok", "nothing changed that is known", f"the same load{open_}", effect)]
    title = f"{len(said)} things changed" if len(said) > 1 else "one thing changed"
    real = [key for key in load if key not in SAMPLE]
    mixed = bool(engine) and (len(engine) > 1 or bool(real))
    level: Level
    if len(said) == 1:
        level, instead = "ok", ""
    elif mixed:
        level = "stop"
        instead = f"change one at a time: keep {_first(said)} and repeat, then change the next"
    else:
        level = "care"
        instead = _sweep_hint(runs, load)
    return [Finding("dimensions", level, title, "; ".join(said) + open_, effect, instead)]


def _first(said: Sequence[str]) -> str:
    return said[0].split(" ")[0]


def _sweep_hint(runs: Sequence[Run], load: dict[str, str]) -> str:
    if "max_concurrency" in load and "num_prompts" in load:
        top = max(run.concurrency or 1 for run in runs)
        return (
            f"send the same number of prompts at every concurrency, at least {max(100, 5 * top)} "
            f"(--num-prompts {max(100, 5 * top)})"
        )
    return "change one at a time"


def _load_value(run: Run, key: str) -> Any:
    if key == "num_prompts":
        return run.num_prompts
    return run.settings.get(key)


def _changed(runs: Sequence[Run], names: dict[str, str], value: Callable[[Run, str], Any]) -> dict[str, str]:
    """Keys with more than one known value, in words."""
    found = {}
    for key, name in names.items():
        values = [value(run, key) for run in runs]
        known = [v for v in values if v is not None]
        if len({str(v) for v in known}) > 1:
            found[key] = f"{name} {' to '.join(str(v) for v in known)}"
    return found


def _effects(runs: Sequence[Run]) -> str:
    """How the figures of the last run stand to those of the first."""
    first, last = runs[0], runs[-1]
    parts = []
    for key, name in (
        ("output_throughput", "output throughput"),
        ("mean_ttft_ms", "mean TTFT"),
        ("p99_ttft_ms", "P99 TTFT"),
        ("mean_tpot_ms", "mean TPOT"),
        ("p99_tpot_ms", "P99 TPOT"),
        ("p99_itl_ms", "P99 ITL"),
    ):
        a, b = first.get(key), last.get(key)
        if a and b:
            ratio = b / a
            parts.append(f"{name} x {ratio:.3g}" if ratio < UNIT_SLACK else f"{name} x {ratio:,.0f}")
    return ", ".join(parts)
