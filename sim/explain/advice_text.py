"""Advice as people read it, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from sim.explain.advise import Advice, Advised, Effect
from sim.explain.cautions import caution_document, caution_lines
from sim.explain.numbers import fit_sentence, ttft_sentence
from sim.explain.outcome import GOALS
from sim.explain.page import WIDTH, row
from sim.provenance import Note

MEASURED_OFF = 0.2  # prediction against measurement, from which the advice says so


def render(
    found: Advised,
    *,
    limit: int = 8,
    measured: float | None = None,
    price: float | None = None,
    notes: Iterable[Note] = (),
) -> str:
    """The advice as text, at most 100 columns, commands apart.

    Args:
        limit: how many changes to show in full.
        measured: the goal's figure as it was measured, if the scenario came from a result file.
        price: USD per GPU hour, for the goal "cost".
        notes: of the profile that the step times come from.
    """
    key, less, unit = GOALS[found.goal]
    base = found.base.value(found.goal)
    lines = [f"Goal: {'lower' if less else 'raise'} {key}, now {_value(base, unit, price)} (predicted)"]
    if measured is not None and base:
        off = base / measured - 1
        lines[0] += f", {_value(measured, unit, price)} measured ({off:+.1%})"
        if abs(off) > MEASURED_OFF:
            lines += row(
                "Caution", "prediction and measurement are far apart: calibrate before you trust what follows"
            )
    lines += row("Note", found.goal_note)
    lines += row("Fits", fit_sentence(found.base))
    lines += row("TTFT", ttft_sentence(found.base))
    lines += row("Why", found.base.cause)
    lines += caution_lines(found.base.result, notes)
    shown = found.ranked[:limit]
    if not shown:
        lines += ["", "No flag change on the GPUs at hand helps."]
    for number, advice in enumerate(shown, start=1):
        lines += ["", *_advice(number, advice, unit, found, price)]
    if found.more_gpus:
        lines += ["", "With more GPUs"]
        for number, advice in enumerate(found.more_gpus[:2], start=len(shown) + 1):
            lines += _advice(number, advice, unit, found, price)
    lines += ["", *_rest(found)]
    return "\n".join(lines).rstrip()


def _advice(number: int, advice: Advice, unit: str, found: Advised, price: float | None) -> list[str]:
    change = advice.change
    lines = [
        f"{number}. {change.flag} {change.before} -> {change.after}: {_effect(advice.effect)}, to "
        f"{_value(advice.outcome.value(found.goal), unit, price)}"
    ]
    figures = advice.outcome.figures
    side = [
        f"{label} {_value(figures[key], 'ms', None)}"
        for key, label in (
            ("mean_ttft_ms", "mean TTFT"),
            ("mean_tpot_ms", "mean TPOT"),
            ("p99_itl_ms", "P99 ITL"),
        )
        if key in figures
    ]
    side.append(f"throughput {advice.throughput:+.1%}")
    side.append(f"{advice.outcome.fits} requests fit")
    lines += _indented("also", "; ".join(side))
    lines += _indented("costs", advice.costs)
    for warning in advice.warnings:
        lines += _indented("mind", warning)
    lines.append(f"   run    {advice.serve}")
    lines.append(f"   check  {advice.predict}")
    return lines


def _indented(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"   {label:<7}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rest(found: Advised) -> list[str]:
    lines = row("Nothing", ", ".join(f"{c.name} {c.before} -> {c.after}" for c in found.useless))
    worse = [f"{c.name} {c.before} -> {c.after} ({effect:+.1%})" for c, effect in found.harmful]
    lines += row("Worse", ", ".join(worse))
    return lines + row("Refused", "; ".join(f"{c.name} {c.after}: {why}" for c, why in found.refused))


def _effect(effect: Effect) -> str:
    if effect.low is None or effect.high is None:
        return f"{effect.mean:+.1%}"
    text = f"{effect.mean:+.1%} ({effect.low:+.1%} to {effect.high:+.1%})"
    return text if effect.sure else f"{text}, not sure of the direction"


def _value(value: float | None, unit: str, price: float | None) -> str:
    if value is None:
        return "unknown"
    if unit == "ms":
        return f"{value / 1e3:,.2f} s" if value >= 1000 else f"{value:,.4g} ms"
    text = f"{value:,.4g} {unit}"
    return text + f" = {value * price:,.4g} USD" if price is not None and unit.startswith("GPU h") else text


def document(
    found: Advised,
    measured: float | None = None,
    *,
    price: float | None = None,
    notes: Iterable[Note] = (),
) -> dict[str, Any]:
    """The advice, JSON-ready; see `render`. With a price, `now` and `predicted` come in USD as well."""
    key, less, unit = GOALS[found.goal]
    return {
        "goal": found.goal,
        "figure": key,
        "less_is_better": less,
        "unit": unit,
        "now": found.base.value(found.goal),
        "measured": measured,
        "price_per_gpu_hour": price,
        **_in_usd("now_usd", found.base.value(found.goal), price),
        "fits": found.base.fits,
        "note": found.goal_note or None,
        **caution_document(found.base.result, notes),
        "changes": [_change(advice, found, price) for advice in found.ranked],
        "more_gpus": [_change(advice, found, price) for advice in found.more_gpus],
        "does_nothing": [[c.flag, c.before, c.after] for c in found.useless],
        "worse": [[c.flag, c.before, c.after, effect] for c, effect in found.harmful],
        "refused": [[c.flag, c.before, c.after, why] for c, why in found.refused],
    }


def _in_usd(key: str, hours: float | None, price: float | None) -> dict[str, float]:
    return {} if hours is None or price is None else {key: hours * price}


def _change(advice: Advice, found: Advised, price: float | None) -> dict[str, Any]:
    return {
        "flag": advice.change.flag,
        "from": advice.change.before,
        "to": advice.change.after,
        "set": list(advice.change.settings),
        "effect": advice.effect.mean,
        "effect_low": advice.effect.low,
        "effect_high": advice.effect.high,
        "predicted": advice.outcome.value(found.goal),
        **_in_usd("predicted_usd", advice.outcome.value(found.goal), price),
        "throughput_change": advice.throughput,
        "fits": advice.outcome.fits,
        "kv_cache_tokens": advice.outcome.kv_cache_tokens,
        "gpus": advice.outcome.gpus,
        "figures": dict(advice.outcome.figures),
        "costs": advice.costs,
        "warnings": list(advice.warnings),
        "serve": advice.serve,
        "predict": advice.predict,
    }
