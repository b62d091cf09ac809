"""What `servecast calibrate` does with a scenario: plan, measure, fit, check, write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.run import BenchOptions
from bench.session import Reporter, Subject
from bench.telemetry import Gpus
from calibration.again import again_text
from calibration.design import Plan, design
from calibration.evidence import ClientRun, Evidence
from calibration.fit import default_free
from calibration.kernels import best_prior
from calibration.parameters import Prior, default_prior
from calibration.profile_writing import Facts, profile_content
from calibration.result import PINNED, STRUCTURE_FLOOR, FitResult
from calibration.search import FIGURES_FLOOR
from calibration.session import Calibration, calibrate, measure
from sim.comparison.text import format_comparison
from sim.profile import Profile, ProfileFile, write_profile
from sim.scenario import Scenario
from sim.steptime.efficiencies import BOUNDS

# What a profile gives as settled.
SETTLED = ("fitted",)


def lacking(profile: Profile | None, scenario: Scenario) -> tuple[str, ...] | None:
    """Coefficients that a profile does not pin, of those that runs of the scenario can show.

    All of them (None) where there is no profile, or it was fitted to another model, version or parallelism.

    Raises:
        BadInput: the profile is of another GPU.
    """
    if profile is None or profile.mismatches(scenario):
        return None
    content = profile.content
    known = [n for n in content.covariance.names if content.coefficients[n].status in SETTLED]
    return tuple(name for name in default_free(scenario) if name not in known)


def prior_of(profile: Profile | None, scenario: Scenario) -> Prior:
    """What is believed before the runs: a profile's coefficients with their uncertainty, else the tables'."""
    if profile is None:
        return best_prior(scenario)
    prior = default_prior(scenario.gpu)
    covariance = profile.content.covariance
    deviations = dict(prior.deviations)
    if not profile.mismatches(scenario):
        spreads = np.sqrt(np.diag(np.array(covariance.matrix, dtype=np.float64)))
        deviations |= dict(zip(covariance.names, (float(s) for s in spreads), strict=True))
    sources = dict.fromkeys(prior.sources, f"profile {profile.source}")
    return Prior(profile.efficiencies, deviations, sources)


def plan_of(scenario: Scenario, budget: float, profile: Profile | None = None) -> Plan:
    """The runs that pin what the profile lacks, or everything.

    Raises:
        BadInput: a budget in which nothing can be measured, or a profile of another GPU.
    """
    return design(
        scenario, budget=budget, lacking=lacking(profile, scenario), prior=prior_of(profile, scenario)
    )


def run(
    subject: Subject,
    plan: Plan,
    options: BenchOptions,
    gpus: Gpus | None,
    reporter: Reporter,
    profile: Profile | None = None,
) -> Calibration:
    """Measure, fit, check.

    Raises:
        EngineFailed: the engine did not start.
        NotComparable: a run was INVALID.
        BadInput: the runs say less than there are coefficients.
    """
    prior = prior_of(profile, subject.scenario)
    return calibrate(measure(subject, plan, options, gpus, reporter, prior), prior)


def save(
    done: Calibration, path: Path, driver: str | None = None, before: Profile | None = None
) -> ProfileFile:
    """Write the profile; `driver` is the GPU driver's version, if known, `before` the profile completed.

    Raises:
        BadInput: the place cannot be written to.
    """
    measured = done.measured
    results = list(measured.results.values())
    content = profile_content(
        done.fit,
        measured.scenario,
        done.evidence,
        held_out=done.held_out,
        again=done.again,
        facts=Facts(
            date=_first(r.extra.get("date") for r in results),
            driver=driver,
            image_digest=_first(r.identity.get("image_digest") for r in results),
            engine_version=_first(r.identity.get("engine_version") for r in results),
        ),
        before=before,
    )
    write_profile(content, path)
    return content


POOR = 0.15  # a figure that a fit has seen should be nearer


def coefficients_text(fit: FitResult) -> str:
    """The free coefficients with intervals, and what the evidence did with each."""
    lines = [f"{'coefficient':<22}{'value':>12}{'90 % interval':>26}  {'unit':<16}  status"]
    for name in fit.space.names:
        low, high = fit.interval(name)
        bounds = f"{low:.4g} to {high:.4g}"
        lines.append(
            f"{name:<22}{fit.value(name):>12.4g}{bounds:>26}  {BOUNDS[name].unit:<16}  {fit.status[name]}"
        )
    assumed = fit.structure in (STRUCTURE_FLOOR, FIGURES_FLOOR)
    known = ", which is assumed: the runs show less" if assumed else ""
    lines.append(f"steps deviate by {fit.structure:.1%} beyond what the coefficients explain{known}")
    lines.append(
        "status: fitted by the runs; weak: by runs and prior alike; prior: the runs say nothing of it"
    )
    for name, errors in fit.residuals.items():
        told = ", ".join(f"{key} {error:+.1%}" for key, error in errors.items() if math.isfinite(error))
        if told:
            how = "reproduces" if all(key.endswith("_ms") for key in errors) else "at its recorded times,"
            lines.append(f"{how} {name}: {told}")
    return "\n".join([*lines, *warnings(fit)])


def warnings(fit: FitResult) -> list[str]:
    """What speaks against a fit, although it ended well."""
    found = []
    at_bound = [name for name, status in fit.status.items() if status == "at bound"]
    if absent := [name for name in at_bound if _is_absent(fit, name)]:
        found.append(f"note: the runs show nothing of {', '.join(absent)}: 0 is the least there can be")
    vague = [name for name in at_bound if name not in absent and _share(fit, name) >= PINNED]
    if vague:
        found.append(
            f"note: {', '.join(vague)} came out at the end of what physics allows, but the runs tell little "
            "of it: see its interval"
        )
    if stuck := [name for name in at_bound if name not in absent and name not in vague]:
        found.append(
            f"WARNING: {', '.join(stuck)} would leave what physics allows: the runs, their GPU or their "
            "flags may not be those of the scenario, or a client or another process slowed them"
        )
    known = [e for errors in fit.residuals.values() for e in errors.values() if math.isfinite(e)]
    worst = max(map(abs, known), default=0.0)
    if worst > POOR:
        found.append(
            f"WARNING: a figure that the fit has seen is still {worst:.0%} off; do not rely on the profile "
            "before you know why"
        )
    return found


def _is_absent(fit: FitResult, name: str) -> bool:
    """Whether a coefficient came out as nothing at all: cards need not throttle."""
    bound = BOUNDS[name]
    return bound.low == 0.0 and fit.value(name) < bound.high - fit.value(name)


def _share(fit: FitResult, name: str) -> float:
    """A coefficient's deviation after the fit as a share of the one before."""
    at = fit.space.names.index(name)
    return float(np.sqrt(fit.covariance[at, at]) / fit.space.deviations()[at])


def doubts_text(evidence: Sequence[Evidence]) -> str:
    """What speaks against runs that are fitted all the same, a line each; empty if nothing does."""
    lines: list[str] = []
    for item in evidence:
        own = item.notes if isinstance(item, ClientRun) else ()
        lines += [f"{note.kind}: {Path(item.name).name}: {note.subject}: {note.text}\n" for note in own]
        told = [note for note in item.scenario.notes if note.kind in ("warning", "not-modelled")]
        lines += [f"{note.kind}: {note.subject}: {note.text}\n" for note in told]
    return "".join(dict.fromkeys(lines))


NOTHING_HELD_OUT = (
    "held out: nothing, all of it was fitted; with a run that was not given here,\n"
    "  `servecast compare SCENARIO.yaml RESULT --profile PROFILE` tells how far off predictions are"
)


def summary(done: Calibration) -> str:
    """What was found out, and how well a fit without the held-out run predicts it."""
    lines = [*doubts_text(done.evidence).splitlines(), coefficients_text(done.fit)]
    lines += [f"{note.kind}: {note.subject}: {note.text}" for note in done.measured.notes]
    if not done.held_out:
        lines.append(NOTHING_HELD_OUT)
    if done.again:
        lines.append(again_text(done.again))
    for label, found in done.held_out.items():
        lines.append(f"{label}, predicted by a fit that has not seen it:")
        lines.append(format_comparison(found))
    return "\n".join(lines)


def _first(values: Iterable[object]) -> str | None:
    return next((str(value) for value in values if value is not None), None)
