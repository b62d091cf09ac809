"""A fit as a profile file."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibration.evidence import ClientRun, Evidence
from calibration.parameters import Prior, default_prior
from calibration.result import PINNED, FitResult
from sim.comparison.compare import Comparison
from sim.errors import BadInput
from sim.profile import Coefficient, Covariance, DataFile, Profile, ProfileFile, Validity, subject_of
from sim.scenario import Scenario
from sim.steptime.efficiencies import BOUNDS
from sim.steptime.scale import scale_name

Floats = NDArray[np.float64]
Errors = Mapping[str, Mapping[str, float]]

SHOWN = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput")


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the measurement knows; None is unknown."""

    date: str | None = None
    driver: str | None = None
    image_digest: str | None = None
    engine_version: str | None = None


def profile_content(
    fit: FitResult,
    scenario: Scenario,
    evidence: Sequence[Evidence],
    *,
    held_out: Mapping[str, Comparison] | None = None,
    again: Mapping[str, Mapping[str, float]] | None = None,
    facts: Facts | None = None,
    before: Profile | None = None,
) -> ProfileFile:
    """The file of a fit.

    Args:
        scenario: engine, model, GPU that were measured.
        evidence: what the fit rests on; files are named with the hash of their content where they exist.
        held_out: by run, predictions of a fit that had not seen it beside its measurement.
        again: by run, errors of its means when the fit predicts it without its recorded times.
        before: the profile that was completed; where it is of the same engine, what it rests on stays, and so
            does what speaks against it.
    """
    kept = None if before is None or before.mismatches(scenario) else before.content
    facts = facts or Facts()
    more = {"driver": facts.driver, "image_digest": facts.image_digest}
    subject = subject_of(scenario, **more)
    if facts.engine_version is not None:
        subject = subject.model_copy(update={"engine_version": facts.engine_version})
    names, covariance = _covariance(fit, kept)
    return ProfileFile(
        servecast_version=_own_version(),
        date=facts.date or datetime.now(UTC).isoformat(timespec="seconds"),
        subject=subject,
        evidence=[*(kept.evidence if kept else ()), *(data_file(item) for item in evidence)],
        coefficients=_coefficients(fit, kept, default_prior(scenario.gpu)),
        covariance=Covariance.model_validate(
            {
                "names": names,
                "scales": [scale_name(name) for name in names],
                "matrix": [[float(value) for value in row] for row in covariance],
            }
        ),
        validity=_widest(
            Validity(
                tokens_per_step=fit.valid.tokens,
                prompt_tokens_per_step=fit.valid.prefill_tokens,
                decodes_per_step=fit.valid.decode_seqs,
                context_per_decode=fit.valid.context,
            ),
            None if kept is None else kept.validity,
        ),
        structure=min(1.0, max(fit.structure, kept.structure if kept else 0.0)),
        first_token=min(1.0, max(fit.first_token, kept.first_token if kept else 0.0)),
        in_sample=_errors(kept.in_sample if kept else {}, fit.residuals),
        held_out=_errors(
            kept.held_out if kept else {}, {k: held_out_errors(v) for k, v in (held_out or {}).items()}
        ),
        predicted_again=_errors(kept.predicted_again if kept else {}, again or {}),
    )


def _errors(before: Errors, found: Errors) -> dict[str, dict[str, float]]:
    """Errors by run and figure, earlier ones too; a figure that the fit cannot simulate has none."""
    known = {
        run: {key: error for key, error in errors.items() if math.isfinite(error)}
        for run, errors in found.items()
    }
    return {**{run: dict(errors) for run, errors in before.items()}, **known}


def _covariance(fit: FitResult, kept: ProfileFile | None) -> tuple[list[str], Floats]:
    """Names and covariance of the free coefficients, and of those that are free in the earlier profile only.

    An engine without CUDA graphs shows what one with them does not: what was known of it stays.
    """
    names, matrix = list(fit.space.names), fit.covariance
    if kept is None:
        return names, matrix
    more = [name for name in kept.covariance.names if name not in names]
    rows = [kept.covariance.names.index(name) for name in more]
    theirs = np.array(kept.covariance.matrix, dtype=np.float64).reshape(len(kept.covariance.names), -1)
    size = len(names)
    whole = np.zeros((size + len(more), size + len(more)))
    whole[:size, :size] = matrix
    whole[size:, size:] = theirs[np.ix_(rows, rows)]
    return [*names, *more], whole


def _widest(ours: Validity, theirs: Validity | None) -> Validity:
    """The largest steps that either has seen."""
    if theirs is None:
        return ours
    found: dict[str, int | None] = {}
    for name in Validity.model_fields:
        known = [limit for limit in (getattr(ours, name), getattr(theirs, name)) if limit is not None]
        found[name] = max(known, default=None)
    return Validity(**found)


def check_new(evidence: Sequence[Evidence], before: Profile | None) -> None:
    """Refuse evidence that the profile to be completed rests on already: it would count twice.

    Raises:
        BadInput: names the file.
    """
    check_files("--from", [path for item in evidence if (path := _file(item.name)) is not None], before)


def check_files(field: str, paths: Iterable[Path], before: Profile | None) -> None:
    """Refuse files that the profile to be completed rests on already.

    Raises:
        BadInput: names the first.
    """
    if before is None:
        return
    known = {file.sha256: file.name for file in before.content.evidence if file.sha256}
    for path in paths:
        if (name := known.get(_digest(path))) is not None:
            hint = f"is in {before.source} already (as {name}): it would count twice; leave one of them out"
            raise BadInput(field, str(path), hint)


def held_out_errors(comparison: Comparison) -> dict[str, float]:
    """Signed relative errors of the figures that a profile keeps."""
    return {r.key: r.error for r in comparison.rows if r.key in SHOWN and r.error is not None}


def _coefficients(fit: FitResult, kept: ProfileFile | None, shipped: Prior) -> dict[str, Coefficient]:
    """Every coefficient; `shipped` is what was believed before any calibration."""
    found = {}
    for name, bound in BOUNDS.items():
        value = fit.value(name)
        if name not in fit.space.names:
            if kept is not None and name in kept.covariance.names:
                found[name] = kept.coefficients[name]
                continue
            source = fit.space.prior.sources.get(name, "the model's default")
            found[name] = Coefficient(value=value, unit=bound.unit, status="fixed", source=source)
            continue
        low, high = fit.interval(name)
        status = fit.status[name]
        source = fit.space.prior.sources.get(name, "") if status == "prior" else "this calibration"
        if status == "prior" and kept is not None and name in kept.covariance.names:
            # The runs said nothing new of it: it is known as it was.
            status, source = kept.coefficients[name].status, kept.coefficients[name].source
        elif status == "weak" and kept is not None and _pinned(fit, name, shipped):
            status, source = "fitted", "this calibration and an earlier one"
        told = {"value": value, "unit": bound.unit, "low": low, "high": high}
        found[name] = Coefficient.model_validate({**told, "status": status, "source": source})
    return found


def _pinned(fit: FitResult, name: str, shipped: Prior) -> bool:
    """Whether a coefficient rests on runs more than on the shipped belief, all calibrations counted."""
    at = fit.space.names.index(name)
    return bool(np.sqrt(fit.covariance[at, at]) < PINNED * shipped.deviations[name])


def data_file(item: Evidence) -> DataFile:
    """The entry of one piece of evidence, with the hash of its file where there is one."""
    path = _file(item.name)
    digest = None if path is None else _digest(path)
    if isinstance(item, ClientRun):
        points = 2 * len(item.requests) if item.requests is not None else len(item.figures)
    else:
        points = len(item.seconds)
    date = item.facts.get("date") if isinstance(item, ClientRun) else None
    return DataFile(name=Path(item.name).name, sha256=digest, points=points, date=date)


def _file(name: str) -> Path | None:
    """The file that a piece of evidence is called after; None where there is none."""
    whole, one_of_several = Path(name), Path(re.sub(r"#\d+$", "", name))
    return next((path for path in (whole, one_of_several) if path.is_file()), None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def facts_of(evidence: Sequence[Evidence]) -> Facts:
    """What all results that say it agree on; the profile's own date is that of the fit."""

    def agreed(key: str) -> str | None:
        said = {item.facts[key] for item in evidence if isinstance(item, ClientRun) and key in item.facts}
        return said.pop() if len(said) == 1 else None

    return Facts(image_digest=agreed("image_digest"), engine_version=agreed("engine_version"))


def _own_version() -> str | None:
    try:
        return version("servecast")
    except PackageNotFoundError:
        return None
