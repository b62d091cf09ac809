"""A fit as a profile file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from calibration.evidence import ClientRun, Evidence
from calibration.result import FitResult
from sim.comparison.compare import Comparison
from sim.errors import BadInput
from sim.profile import Coefficient, Covariance, DataFile, Profile, ProfileFile, Validity, subject_of
from sim.scenario import Scenario
from sim.steptime.efficiencies import BOUNDS
from sim.steptime.scale import scale_name

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
        before: the profile that was completed; what it rests on stays, where it is of the same engine.
    """
    kept = None if before is None or before.mismatches(scenario) else before.content
    facts = facts or Facts()
    more = {"driver": facts.driver, "image_digest": facts.image_digest}
    subject = subject_of(scenario, **more)
    if facts.engine_version is not None:
        subject = subject.model_copy(update={"engine_version": facts.engine_version})
    names = list(fit.space.names)
    return ProfileFile(
        servecast_version=_own_version(),
        date=facts.date or datetime.now(UTC).isoformat(timespec="seconds"),
        subject=subject,
        evidence=[*(kept.evidence if kept else ()), *(data_file(item) for item in evidence)],
        coefficients=_coefficients(fit, kept),
        covariance=Covariance.model_validate(
            {
                "names": names,
                "scales": [scale_name(name) for name in names],
                "matrix": [[float(value) for value in row] for row in fit.covariance],
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
        structure=min(1.0, fit.structure),
        first_token=min(1.0, fit.first_token),
        in_sample={name: dict(errors) for name, errors in fit.residuals.items()},
        held_out={label: held_out_errors(found) for label, found in (held_out or {}).items()},
        predicted_again={name: dict(errors) for name, errors in (again or {}).items()},
    )


def _widest(ours: Validity, theirs: Validity | None) -> Validity:
    """The largest steps that either has seen."""
    if theirs is None:
        return ours
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in Validity.model_fields}
    return Validity(**{name: max((v for v in pair if v), default=None) for name, pair in pairs.items()})


def check_new(evidence: Sequence[Evidence], before: Profile | None) -> None:
    """Refuse evidence that the profile to be completed rests on already: it would count twice.

    Raises:
        BadInput: names the file.
    """
    known = {} if before is None else {f.sha256: f.name for f in before.content.evidence if f.sha256}
    for item in evidence:
        if (digest := data_file(item).sha256) in known:
            hint = (
                f"is in {before.source if before else ''} already (as {known[digest]}); leave one of them out"
            )
            raise BadInput("--from", item.name, hint)


def held_out_errors(comparison: Comparison) -> dict[str, float]:
    """Signed relative errors of the figures that a profile keeps."""
    return {r.key: r.error for r in comparison.rows if r.key in SHOWN and r.error is not None}


def _coefficients(fit: FitResult, kept: ProfileFile | None) -> dict[str, Coefficient]:
    found = {}
    for name, bound in BOUNDS.items():
        value = fit.value(name)
        if name not in fit.space.names:
            source = fit.space.prior.sources.get(name, "the model's default")
            found[name] = Coefficient(value=value, unit=bound.unit, status="fixed", source=source)
            continue
        low, high = fit.interval(name)
        status = fit.status[name]
        source = fit.space.prior.sources.get(name, "") if status == "prior" else "this calibration"
        if status == "prior" and kept is not None and name in kept.covariance.names:
            # The runs said nothing new of it: it is known as it was.
            status, source = kept.coefficients[name].status, kept.coefficients[name].source
        told = {"value": value, "unit": bound.unit, "low": low, "high": high}
        found[name] = Coefficient.model_validate({**told, "status": status, "source": source})
    return found


def data_file(item: Evidence) -> DataFile:
    """The entry of one piece of evidence, with the hash of its file where there is one."""
    path = Path(item.name)
    if not path.is_file():
        path = Path(re.sub(r"#\d+$", "", item.name))  # one of several results in a file
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    if isinstance(item, ClientRun):
        points = 2 * len(item.requests) if item.requests is not None else len(item.figures)
    else:
        points = len(item.seconds)
    date = item.facts.get("date") if isinstance(item, ClientRun) else None
    return DataFile(name=Path(item.name).name, sha256=digest, points=points, date=date)


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
