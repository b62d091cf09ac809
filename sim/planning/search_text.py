"""A search's answer as people read it, with the commands that start the best and confirm it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from sim.planning.capacity import Capacity
from sim.planning.plan_report import confirming_commands, confirming_load, confirming_words
from sim.planning.plan_text import answer_words, binding_words, error_words
from sim.planning.search import MATTERS, SearchResult, Trial, words_of
from sim.planning.text import wrap
from sim.scenario_file import ObservedInput, ScenarioInput, workload_to_input


def render_search(result: SearchResult, objectives: str) -> str:
    """Best, given, finalists, ranking and commands."""
    lines = [*wrap(f"objectives: {objectives}")]
    rounds = ", ".join(str(n) for n in result.rounds)
    lines.append(f"combinations per round: {rounds}; cannot run: {len(result.refused)}")
    lines += _trial("best", result.best)
    if result.best.settings:
        lines += _trial("as given", result.given, words_of(result.held))
        if result.given.score > 0:
            lines += wrap(f"  {_gain_words(result)}", "    ")
    else:
        lines.append("  nothing that was tried does better than the scenario as it stands")
    lines += ["", "finalists, load per GPU:"]
    for trial in result.finalists:
        lines += wrap(f"  {trial.score:>10.4g}  {trial.label}", " " * 14)
    lines += [
        "",
        *wrap(
            f"which flag matters, moved alone around {words_of(result.centre)}: what each value loses "
            "against the flag's best (short simulations under one seed, so no loads; below "
            f"{MATTERS:.0%} they do not resolve):"
        ),
    ]
    for one in result.ranking:
        losses = ", ".join(
            f"{value}: " + ("cannot run" if loss is None else f"{-loss:.0%}".replace("-0%", "0%"))
            for value, loss in one.losses
        )
        verdict = f"{one.effect:.0%}" if one.matters else "does not matter"
        lines += wrap(f"  {one.name:<28}{verdict:>16}  {losses}", " " * 6)
    for trial in result.refused[:5]:
        lines += wrap(f"refused: {trial.label}: {trial.failure}")
    if result.best.found is not None and result.best.found.level is not None:
        told = confirming_words(result.best.found)
        lines += ["", *wrap(f"to start the best, and to confirm it on hardware{told}")]
        lines += [f"  {command}" for command in confirming_commands(result.best.found)]
        for note in result.best.found.scenario.notes:
            if note.kind == "warning":
                lines += wrap(f"{note.kind}: {note.subject}: {note.text}")
    return "\n".join(lines)


def _gain_words(result: SearchResult) -> str:
    gain = f"the best carries {result.best.score / result.given.score - 1:+.1%} per GPU"
    paired = result.gain
    if paired is not None and paired.low is not None and paired.high is not None:
        ends = f"{math.expm1(paired.low):+.1%} to {math.expm1(paired.high):+.1%}"
        gain += f" (95 %: {ends}, seed by seed)"
    if result.clearly_better:
        return f"{gain}: clear of chance"
    if result.clearly_better is None or result.best.found is None or result.best.found.replications < 2:
        return f"{gain}; one seed cannot tell whether that is chance"
    return f"{gain}: within noise, so nothing speaks for a change yet; more --seeds tell more"


def _trial(name: str, trial: Trial, settings: str = "") -> list[str]:
    head = wrap(f"{name}: {settings or trial.label}", "    ")
    if trial.failure is not None:
        return [*head, *wrap(f"  cannot run: {trial.failure}", "    ")]
    if trial.found is None or trial.found.level is None:
        reason = "" if trial.found is None else f" ({trial.found.binding}: {trial.found.cause.text})"
        return [*head, *wrap(f"  no load keeps the objectives{reason}", "    ")]
    return [
        *head,
        *wrap(f"  {answer_words(trial.found)}, {_gpus(trial.found.scenario.gpu_count)}", "    "),
        *wrap(f"  {error_words(trial.found)}", "    "),
        *wrap(f"  binding: {binding_words(trial.found)}", "    "),
    ]


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def confirming_scenario(found: Capacity, serve: str, share: float = 0.85) -> ScenarioInput:
    """A scenario file that benches a found configuration at a share of its capacity."""
    scenario = found.scenario
    load = confirming_load(found, share).workload
    at = f"{share:.0%}" if load.max_concurrency is None else f"concurrency {load.max_concurrency}"
    return ScenarioInput(
        name=f"{scenario.name or 'best'} at {at}",
        serve=serve,
        workload=workload_to_input(load),
        gpu=scenario.gpu.spelling,
        gpu_count=scenario.gpu_count,
        engine_version=scenario.engine.asked_version or None,
        observed=ObservedInput(
            kv_cache_tokens=scenario.observed.kv_cache_tokens,
            num_gpu_blocks=scenario.observed.num_gpu_blocks,
        ),
    )


def search_to_dict(result: SearchResult) -> dict[str, Any]:
    """The result, JSON-ready."""
    return {
        "best": _as_dict(result.best),
        "given": _as_dict(result.given),
        "finalists": [_as_dict(t) for t in result.finalists],
        "rounds": list(result.rounds),
        "ranking": [
            {
                "name": r.name,
                "effect": r.effect,
                "matters": r.matters,
                "losses": dict(r.losses),
                "short_scores": dict(r.scores),
            }
            for r in result.ranking
        ],
        "ranking_around": dict(result.centre),
        "given_settings": dict(result.held),
        "clearly_better": result.clearly_better,
        "gain": None if result.gain is None else asdict(result.gain),
        "refused": [_as_dict(t) for t in result.refused],
    }


def _as_dict(trial: Trial) -> dict[str, Any]:
    found = trial.found
    return {
        "settings": dict(trial.settings),
        "score_per_gpu": trial.score,
        "failure": trial.failure,
        "value": None if found is None or found.level is None else found.level.value,
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "binding": None if found is None else found.binding,
    }
