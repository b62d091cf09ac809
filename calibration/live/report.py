"""Predicted against measured on a real engine, with bounds, repeat noise and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.evidence import StepRun
from calibration.live.plan import Load
from calibration.session import Calibration
from sim.comparison.figures import from_records
from sim.results import BenchResult
from sim.simulate import roofline

Floats = NDArray[np.float64]

# What a prediction must keep to, unless twice the repeat noise is more.
BOUNDS = {"mean_tpot_ms": 0.05, "mean_e2el_ms": 0.05, "median_ttft_ms": 0.10}
# Shown beside them, without a bound.
SHOWN = ("mean_ttft_ms",)
STEP_BOUND = 0.05
ALIKE = 10  # steps with the same prompts and decodes, from which on their own median is known


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one load, over all its repeats.

    Attributes:
        n: requests behind it.
        repeats: runs behind it.
        noise: standard deviation of one run [relative], pooled over the setting's loads; None: one run each.
        bound: of the absolute error; None: only shown.
    """

    setting: str
    load: str
    key: str
    predicted: float
    measured: float
    n: int
    repeats: int
    noise: float | None
    bound: float | None

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1.0

    @property
    def limit(self) -> float | None:
        """The bound, or twice the noise where that is more."""
        return None if self.bound is None else max(self.bound, 2.0 * (self.noise or 0.0))

    @property
    def verdict(self) -> str:
        """ "ok", "ok (noise)" where only the noise excuses it, "MISSED", or "" without a bound."""
        if self.bound is None or self.limit is None:
            return ""
        if abs(self.error) <= self.bound:
            return "ok"
        return "ok (noise)" if abs(self.error) <= self.limit else "MISSED"


@dataclass(frozen=True, slots=True)
class Steps:
    """Step times of the held-out loads against the fit: mean absolute relative error, by kind of step.

    Attributes:
        drift: lowest and highest of the runs' own factors on all their steps: how the host's speed changed.
        steady_mape: the error that is left where each run's own factor is taken out; None if no run is known.
        alike_mape: by how much steps with as many prompts and decodes differ from their own median: what no
            model of the engine could take away. None if no `ALIKE` of them were alike.
    """

    count: int
    mape: float
    prefill_count: int
    prefill_mape: float | None
    decode_mape: float | None
    drift: tuple[float, float] | None = None
    steady_mape: float | None = None
    alike_mape: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the steps keep to their bound."""
        return self.mape <= STEP_BOUND


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """One setting: how long its calibration took, and what the fit predicted."""

    name: str
    calibration_seconds: float
    calibration_runs: int
    coefficients: dict[str, float]
    status: dict[str, str]
    rows: tuple[Row, ...]
    steps: Steps | None
    preemptions: dict[str, tuple[float | None, float | None]]
    suspect: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound is kept; step times that lack are none: the probe is always asked for."""
        rows = all(row.verdict != "MISSED" for row in self.rows)
        return rows and self.steps is not None and self.steps.kept


@dataclass(frozen=True, slots=True)
class Outcome:
    """All settings."""

    settings: tuple[SettingOutcome, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound is kept in every setting."""
        return all(setting.passed for setting in self.settings)


Pair = tuple[Load, BenchResult, BenchResult]
Span = tuple[float, float]


def judge_setting(
    name: str,
    calibration: Calibration,
    pairs: Sequence[Pair],
    steps: StepRun | None,
    spans: Sequence[Span] = (),
) -> SettingOutcome:
    """Set predictions beside measurements.

    Args:
        pairs: (load, predicted, measured) of every repeat.
        steps: those of the same runs, none of which the fit has seen.
        spans: when each of them began and ended, on the steps' clock [s].
    """
    rows = []
    for key in (*BOUNDS, *SHOWN):
        noise = pooled_noise(key, pairs)
        for label in dict.fromkeys(load.label for load, _, _ in pairs):
            own = [(p, m) for load, p, m in pairs if load.label == label]
            figures = [(from_records(p, key), from_records(m, key)) for p, m in own]
            known = [(p, m) for p, m in figures if p is not None and m is not None]
            if not known:
                continue
            rows.append(
                Row(
                    name,
                    label,
                    key,
                    sum(p for p, _ in known) / len(known),
                    sum(m for _, m in known) / len(known),
                    sum(int(m.aggregates["completed"] or 0) for _, m in own),
                    len(known),
                    noise,
                    BOUNDS.get(key),
                )
            )
    fitted = calibration.fit
    return SettingOutcome(
        name,
        calibration.measured.seconds,
        len(calibration.measured.runs),
        {n: fitted.value(n) for n in fitted.space.names},
        dict(fitted.status),
        tuple(rows),
        None if steps is None else step_errors(calibration, steps, spans),
        preemptions_of(pairs),
        tuple(_suspects(pairs)),
    )


def pooled_noise(key: str, pairs: Sequence[Pair]) -> float | None:
    """Standard deviation of log(measured / predicted) between repeats of one load, pooled over loads.

    Where repeats send the same requests the prediction is the same, and this is the plain repeat noise; where
    they send others, what their requests explain is taken out.
    """
    squares, degrees = 0.0, 0
    for label in dict.fromkeys(load.label for load, _, _ in pairs):
        ratios = []
        for load, p, m in pairs:
            ours, theirs = from_records(p, key), from_records(m, key)
            if load.label == label and ours and theirs:
                ratios.append(math.log(theirs / ours))
        if len(ratios) > 1:
            squares += float(np.var(ratios, ddof=1)) * (len(ratios) - 1)
            degrees += len(ratios) - 1
    return math.sqrt(squares / degrees) if degrees else None


def step_errors(calibration: Calibration, steps: StepRun, spans: Sequence[Span] = ()) -> Steps:
    """Priced against timed steps; what the host does between launches is part of a step on a CPU."""
    model = replace(roofline(steps.scenario), efficiencies=calibration.fit.efficiencies)
    priced = np.array([model.host_before(s) + model.gpu(s) + model.host_after(s) for s in steps.shapes])
    ratios: Floats = priced / steps.seconds
    errors: Floats = np.abs(ratios - 1.0)
    prefill = np.array([shape.num_prefill_seqs > 0 for shape in steps.shapes])
    factors = np.full(len(ratios), np.nan)
    for begin, end in spans:
        own = (steps.start >= begin) & (steps.start <= end)
        if own.any():
            factors[own] = np.median(ratios[own])
    known = ~np.isnan(factors)
    return Steps(
        len(errors),
        float(errors.mean()),
        int(prefill.sum()),
        float(errors[prefill].mean()) if prefill.any() else None,
        float(errors[~prefill].mean()) if (~prefill).any() else None,
        (float(1.0 / factors[known].max()), float(1.0 / factors[known].min())) if known.any() else None,
        float(np.abs(ratios[known] / factors[known] - 1.0).mean()) if known.any() else None,
        _spread_of_alike(steps, ratios),
    )


def _spread_of_alike(steps: StepRun, ratios: Floats) -> float | None:
    """Mean absolute deviation of priced / timed from its median among steps that hold the same."""
    groups: dict[tuple[int, int], list[float]] = {}
    for shape, ratio in zip(steps.shapes, ratios, strict=True):
        groups.setdefault((shape.num_prefill_seqs, shape.num_decode_seqs), []).append(float(ratio))
    known = [np.array(group) for group in groups.values() if len(group) >= ALIKE]
    if not known:
        return None
    return float(np.concatenate([np.abs(group / np.median(group) - 1.0) for group in known]).mean())


def preemptions_of(pairs: Sequence[Pair]) -> dict[str, tuple[float | None, float | None]]:
    """Mean preemptions per run, (predicted, measured), where either side had any; None: unknown."""
    found = {}
    for label in dict.fromkeys(load.label for load, _, _ in pairs):
        own = [(p, m) for load, p, m in pairs if load.label == label]
        ours = _mean([p.server.get("num_preemptions") for p, _ in own])
        theirs = _mean([m.server.get("num_preemptions") for _, m in own])
        if ours or theirs:
            found[label] = (ours, theirs)
    return found


def _mean(counts: Sequence[float | int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return float(np.mean(known)) if known else None


def _suspects(pairs: Sequence[Pair]) -> list[str]:
    return [
        f"{load.name}: {measured.verdict.status}: {reason.text}"
        for load, _, measured in pairs
        for reason in measured.verdict.reasons
        if reason.subject != "small_sample"
    ]


def report_text(outcome: Outcome) -> str:
    """The table, Markdown."""
    lines = []
    for setting in outcome.settings:
        lines.append(
            f"### {setting.name}: calibrated on {setting.calibration_runs} runs, "
            f"{setting.calibration_seconds:.0f} s of load"
        )
        lines.append("")
        lines.append("| load | n | runs | figure | predicted | measured | error | repeat noise | bound | |")
        lines.append("|---|---:|---:|---|---:|---:|---:|---:|---:|---|")
        lines += [_line(row) for row in setting.rows]
        lines.append("")
        lines.append(_steps_line(setting.steps))
        for label, (ours, theirs) in setting.preemptions.items():
            counts = f"{_count(ours)} predicted, {_count(theirs)} measured"
            lines.append(f"preemptions per run of {label}: {counts}")
        lines += [f"said of the measurement: {text}" for text in setting.suspect]
        lines.append("")
    missed = sum(row.verdict == "MISSED" for s in outcome.settings for row in s.rows)
    bounded = sum(row.bound is not None for s in outcome.settings for row in s.rows)
    kept = sum(s.steps is not None and s.steps.kept for s in outcome.settings)
    lines.append(
        f"{bounded - missed} of {bounded} figures within their bounds, and the step times of {kept} of "
        f"{len(outcome.settings)} settings"
    )
    return "\n".join(lines)


def _count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _line(row: Row) -> str:
    noise = "" if row.noise is None else f"±{row.noise:.1%}"
    bound = "" if row.limit is None else f"{row.limit:.1%}"
    return (
        f"| {row.load} | {row.n} | {row.repeats} | {row.key} | {row.predicted:,.1f} | {row.measured:,.1f} "
        f"| {row.error:+.1%} | {noise} | {bound} | {row.verdict} |"
    )


def _steps_line(steps: Steps | None) -> str:
    if steps is None:
        return f"step times of these loads: none were recorded, bound {STEP_BOUND:.0%}: MISSED"
    kinds = [
        f"{name} {value:.1%}"
        for name, value in (("with prefill", steps.prefill_mape), ("decode only", steps.decode_mape))
        if value is not None
    ]
    verdict = "ok" if steps.kept else "MISSED"
    drift = ""
    if steps.drift is not None and steps.steady_mape is not None:
        low, high = steps.drift
        drift = (
            f"; steps of one run took {low:.2f} to {high:.2f} times the fit's, which left out "
            f"{steps.steady_mape:.1%} remain"
        )
    if steps.alike_mape is not None:
        drift += f"; steps that held the same differ among themselves by {steps.alike_mape:.1%}"
    return (
        f"step times of these loads: MAPE {steps.mape:.1%} over {steps.count} steps "
        f"({', '.join(kinds)}; {steps.prefill_count} with prefill), bound {STEP_BOUND:.0%}: {verdict}{drift}"
    )


def report_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome, JSON-ready."""
    settings = []
    for setting in outcome.settings:
        told = asdict(setting)
        told["rows"] = [
            {**asdict(row), "error": row.error, "limit": row.limit, "verdict": row.verdict}
            for row in setting.rows
        ]
        settings.append({**told, "passed": setting.passed})
    return {"passed": outcome.passed, "settings": settings}
