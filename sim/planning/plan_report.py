"""A whole plan as text: answer, sizing, cost, hardware, and the commands that would confirm it."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from sim.command_text import load_line
from sim.commands.serve import launch_words
from sim.output.sidebyside import label
from sim.planning.capacity import Capacity
from sim.planning.hardware import Candidate
from sim.planning.plan import Plan
from sim.planning.plan_text import (
    render_candidates,
    render_capacity,
    render_cost,
    render_day,
    render_points,
    render_sizing,
)
from sim.planning.probe import Level, at_level
from sim.planning.sizing import unsized_words
from sim.planning.text import wrap
from sim.planning.traffic import is_trace, native_rate
from sim.provenance import Note
from sim.scenario import Scenario
from sim.secrets import without_secrets

ENOUGH = 1000  # requests of a run that is to confirm a P99
LASTING = 120  # s that it should last
WAVES = 6  # of all requests in flight, so that the first one does not tell
SHARES = (0.85, 1.15)  # of the answer: to be kept, and to be missed


def render_plan(plan: Plan) -> str:
    """Everything, at most 100 columns but for the commands."""
    lines: list[str] = []
    if plan.found is not None:
        lines += wrap(f"scenario: {label(plan.found.scenario)}")
        lines += render_capacity(plan.found)
    if plan.candidates:
        lines += wrap(f"objectives: {plan.question.slos}")
        lines += render_candidates(plan.candidates, plan.question.rate is not None)
    if plan.sizing is not None:
        lines += ["", *render_sizing(plan.sizing)]
    elif plan.question.rate is not None and plan.found is not None and unsized_words(plan.found):
        lines += ["", *wrap(unsized_words(plan.found))]
    if plan.day is not None:
        lines += ["", *render_day(plan.day)]
    if plan.bill is not None and plan.billed is not None:
        lines += ["", *render_cost(plan.bill, billed_words(plan.billed, among=len(plan.candidates)))]
    if plan.points and plan.question.prices is not None:
        lines += ["", *render_points(plan.points, plan.question.prices.currency)]
    best = best_found(plan)
    if best is not None:
        lines += ["", *wrap(f"to confirm on hardware{confirming_words(best)}")]
        lines += [f"  {command}" for command in confirming_commands(best)]
    for note in assumptions(plan):
        lines += wrap(f"{note.kind}: {note.subject}: {note.text}")
    return "\n".join(lines)


def billed_words(billed: Candidate, among: int) -> str:
    """`5 replicas, 5 x H100-SXM-80GB`, and that others cost more."""
    replicas = 1 if billed.sizing is None else billed.sizing.recommended
    gpus = replicas * billed.gpus_per_replica
    cheapest = ", the cheapest of these" if among > 1 else ""
    return f"{replicas} replica{'' if replicas == 1 else 's'}, {gpus} x {billed.gpu}{cheapest}"


def best_found(plan: Plan) -> Capacity | None:
    """The capacity that the confirming commands are for: the only one, or the strongest candidate's."""
    found = [plan.found, *(c.found for c in plan.candidates)]
    able = [f for f in found if f is not None and f.level is not None]
    return max(able, key=lambda f: f.request_rate) if able else None


def confirming_commands(found: Capacity) -> list[str]:
    """The launch command, and a benchmark command on either side of the answer."""
    assert found.level is not None
    commands = [serve_line(found.scenario)]
    if not found.traffic:
        commands += [bench_line(confirming_load(found, share)) for share in SHARES]
    return commands


def serve_line(scenario: Scenario) -> str:
    """The engine's launch command for a scenario, its secrets masked."""
    engine = scenario.engine
    words = ["vllm", "serve", scenario.model.name]
    if engine.name == "sglang":
        words = ["python", "-m", "sglang.launch_server", "--model-path", scenario.model.name]
    given = tuple(pair for pair in engine.given if pair[0] not in ("--model", "--model-path"))
    words += launch_words(replace(engine, given=given))
    env = [f"{key}={shlex.quote(value)}" for key, value in engine.env.items()]
    return without_secrets(" ".join([*env, shlex.join(words)]))


def confirming_words(found: Capacity) -> str:
    """What the confirming runs are to show; "" where a traffic file has none."""
    assert found.level is not None
    if found.traffic:
        return ""
    if found.level.kind == "concurrency":
        low, high = (f"{_confirming_level(found.level, share):.0f}" for share in SHARES)
        told = f"with {low} in flight and missed with {high}"
    else:
        gpus = f"{found.scenario.gpu_count} x {found.scenario.gpu.name}"
        told = f"at 85 % of the capacity of {gpus} and missed at 115 %"
    return f": if the prediction holds, the objectives are met {told}{prompts_words(found)}"


def _confirming_level(level: Level, share: float) -> float:
    """A share of a level; of requests in flight whole ones on the share's side, at least 1."""
    value = level.value * share
    if level.kind != "concurrency":
        return value
    return float(max(1, math.floor(value))) if share < 1 else float(math.ceil(value))


def confirming_load(found: Capacity, share: float) -> Scenario:
    """The scenario at a share of the answer, with enough requests to tell whether the objectives are met."""
    assert found.level is not None
    value = _confirming_level(found.level, share)
    rate = value * (found.request_rate / found.kept.value if found.level.kind == "concurrency" else 1.0)
    waves = WAVES * value if found.level.kind == "concurrency" else 0.0
    prompts = max(ENOUGH, round(LASTING * rate), round(waves), found.scenario.workload.num_prompts)
    scenario = at_level(found.scenario, Level(found.level.kind, value), prompts)
    spec = scenario.workload
    if is_trace(spec) and spec.use_trace_arrivals:
        spec = replace(spec, rate_scale=float(f"{value / native_rate(spec):.3g}"), request_rate=float("inf"))
    else:
        spec = replace(spec, request_rate=float(f"{spec.request_rate:.3g}"))
    return replace(scenario, workload=spec)


def prompts_words(found: Capacity) -> str:
    """Why the confirming runs send more requests than the scenario does; "" where they do not."""
    own = found.scenario.workload.num_prompts
    sent = {confirming_load(found, share).workload.num_prompts for share in SHARES}
    if found.traffic or sent == {own}:
        return ""
    many = " and ".join(f"{n:,}" for n in sorted(sent))
    return f" ({many} requests instead of the scenario's {own:,}: enough for a P99 and for {LASTING} s)"


def bench_line(scenario: Scenario) -> str:
    """The `servecast bench` command of a scenario, complete in itself."""
    words = ["servecast", "bench", "--gpu", scenario.gpu.spelling, "--gpu-count", str(scenario.gpu_count)]
    if scenario.engine.asked_version:
        words += ["--engine-version", scenario.engine.asked_version]
    client = load_line(scenario.workload)
    return shlex.join([*words, "--serve", serve_line(scenario), "--bench", client])


def assumptions(plan: Plan) -> list[Note]:
    """Warnings and assumptions of every scenario that was simulated, each once."""
    scenarios = [plan.found.scenario] if plan.found is not None else []
    scenarios += [c.found.scenario for c in plan.candidates if c.found is not None]
    notes = [n for s in scenarios for n in s.notes if n.kind in ("warning", "assumed", "not-modelled")]
    prices, gpus = plan.question.prices, dict.fromkeys(s.gpu.name for s in scenarios)
    if prices is not None and prices.any_gpu is not None and len(gpus) > 1:
        hint = f"is taken for each of {', '.join(gpus)}; a file prices them one by one (`H100: 2.5`)"
        notes.insert(0, Note("warning", "--price", f"{prices.any_gpu:g} {prices.currency} an hour {hint}"))
    return list(dict.fromkeys(notes))
