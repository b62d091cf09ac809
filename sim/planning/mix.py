"""Mixes of tenants from a traffic file: who sends what, when, over the day.

rate: 12                  # requests (or sessions) per second in all, mean over the day
duration: 600             # seconds to simulate
daily: [0.3, 0.2, …]      # relative rate of each hour, 24 numbers; absent: constant
from_hour: 9              # hour at which the simulation begins; compress: 60 lets an hour pass in a minute
tenants:
  - name: chat
    share: 0.7
    sessions: {turns: 5, think_time: 12, system_prompt: 800, first_prompt: 150, output: 250}
  - name: batch
    share: 0.3
    priority: 1
    dataset: {kind: azure, path: trace.csv}     # as in a scenario file
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sim.errors import BadInput
from sim.planning.daily import DailyProfile, arrivals, time_for
from sim.planning.sessions import Session, SessionShape, draw_sessions, lasting, singles
from sim.planning.traffic import requests_at
from sim.provenance import Note
from sim.request import Request
from sim.scenario_file import DatasetInput, WorkloadInput, unknown_key, workload_from_input
from sim.workload.files import read_text
from sim.workload.spec import PrefixRepetitionDataset, WorkloadSpec
from sim.yamltext import load_yaml, yaml_fault

FIELD = "--traffic"
TELLING = 0.005  # share of sessions that is worth a note
ENOUGH = 100.0  # arrivals of a duration that is worth naming
_HINTS = {
    "missing": "is missing; a traffic file needs `rate:` [requests/s] and `tenants:` with a name and a share",
    "too_short": "is empty; it needs at least one",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SessionsInput(_Strict):
    """`sessions:`; absent fields keep `SessionShape`'s."""

    turns: float | None = None
    think_time: float | None = None
    system_prompt: int | None = None
    first_prompt: int | None = None
    follow_up: int | None = None
    output: int | None = None
    max_context: int | None = None


class TenantInput(_Strict):
    """One tenant: sessions, or requests of a data set."""

    name: str = Field(min_length=1)
    share: float = Field(gt=0, allow_inf_nan=False)
    sessions: SessionsInput | None = None
    dataset: DatasetInput | None = None
    priority: int = 0
    burstiness: float = Field(default=1.0, gt=0)


class TrafficInput(_Strict):
    """The whole file."""

    rate: float = Field(gt=0, allow_inf_nan=False)
    duration: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    daily: list[float] | None = None
    from_hour: float = Field(default=0.0, ge=0, lt=24)
    compress: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    tenants: list[TenantInput] = Field(min_length=1)


def _known_beside(location: Sequence[int | str]) -> list[str]:
    """The keys that may stand where one stands that may not."""
    parents: dict[int | str, type[BaseModel]] = {"sessions": SessionsInput, "dataset": DatasetInput}
    inner = TenantInput if len(location) > 1 else TrafficInput
    return list((parents.get(location[-2], inner) if len(location) > 1 else inner).model_fields)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends: either sessions of a shape, or requests of a load's data set."""

    name: str
    share: float
    sessions: SessionShape | None = None
    spec: WorkloadSpec | None = None
    priority: int = 0
    burstiness: float = 1.0

    @property
    def mean_turns(self) -> float:
        """Requests per arrival; fewer than the shape's `turns` where `max_context` ends sessions early."""
        return 1.0 if self.sessions is None else lasting(self.sessions)[0]


@dataclass(frozen=True, slots=True)
class Traffic:
    """All tenants together; shares add up to 1. `notes`: what the file does not say in so many words."""

    rate: float
    duration: float
    tenants: tuple[Tenant, ...]
    profile: DailyProfile = dataclasses.field(default_factory=DailyProfile)
    from_hour: float = 0.0
    compress: float = 1.0
    notes: tuple[Note, ...] = ()

    @property
    def mean_turns(self) -> float:
        """Requests per arrival."""
        return sum(t.share * t.mean_turns for t in self.tenants)

    def stay(self, answer: float) -> float:
        """How long the longest kind of session lasts on average [s], if an answer takes that long."""
        shapes = [t.sessions for t in self.tenants if t.sessions is not None]
        return max([answer, *(lasting(s)[0] * (answer + s.think_time) for s in shapes)])

    def generate(self, seed: int, rate: float | None = None, prompts: int | None = None) -> list[Session]:
        """Sessions of all tenants in order of their starts; each tenant has random streams of its own.

        Args:
            rate: instead of the file's.
            prompts: simulate for as long as it takes to send about so many requests, instead of the file's
                duration; a daily profile keeps its duration.

        Raises:
            BadInput: a data set that cannot be read; or nothing falls into the duration.
        """
        found: list[Session] = []
        rate = rate or self.rate
        duration = self.duration
        if prompts is not None and self.profile == DailyProfile():
            duration = prompts / (rate * self.mean_turns)
        for number, tenant in enumerate(self.tenants):
            when, what = (np.random.default_rng([seed, number, stream]) for stream in (0, 1))
            starts = arrivals(
                rate * tenant.share,
                self.profile,
                duration,
                when,
                from_hour=self.from_hour,
                compress=self.compress,
                burstiness=tenant.burstiness,
            )
            if tenant.sessions is not None:
                found += draw_sessions(tenant.sessions, starts.tolist(), tenant.name, what, tenant.priority)
            elif tenant.spec is not None and len(starts):
                found += singles(_requests(tenant, tenant.spec, starts.tolist(), seed))
        if not found:
            longer = time_for(ENOUGH, rate, self.profile, self.from_hour, self.compress)
            hint = f"nothing arrives in that time at {rate:.3g} arrivals/s"
            if longer is not None:
                hint += f"; `duration: {longer:.2g}` brings about {ENOUGH:.0f}".replace("e+0", "e")
            raise BadInput(f"{FIELD} duration", duration, hint)
        return sorted(found, key=lambda session: session.turns[0].arrival)


def tenant_of(request_id: str) -> str:
    """The tenant whose request this is."""
    return request_id.partition(":")[0]


def _requests(tenant: Tenant, spec: WorkloadSpec, starts: list[float], seed: int) -> list[Request]:
    """As many requests of the tenant's data set as arrive; a trace that ends begins again under new names."""
    found: list[Request] = []
    round_ = 0
    while (left := len(starts) - len(found)) > 0:
        wanted = replace(spec, num_prompts=_drawn(spec, left), request_rate=float("inf"))
        batch = requests_at(wanted, seed + round_)
        for request in batch[:left]:
            i = len(found)
            prompt = tuple((f"{tenant.name}/{round_}/{key}", length) for key, length in request.prompt)
            found.append(
                replace(
                    request,
                    request_id=f"{tenant.name}:{i}",
                    prompt=prompt,
                    arrival=starts[i],
                    priority=tenant.priority,
                    session=None,
                )
            )
        round_ += 1
    return found


def _drawn(spec: WorkloadSpec, wanted: int) -> int:
    """How many to draw for so many: prefixes come in equal, shuffled shares, so whole rounds of them."""
    if not isinstance(spec.dataset, PrefixRepetitionDataset):
        return wanted
    prefixes = max(1, spec.dataset.num_prefixes)
    return -(-wanted // prefixes) * prefixes


def read_traffic(path: str | Path) -> Traffic:
    """Read a traffic file.

    Raises:
        BadInput: naming file and line or field.
    """
    text = read_text(path, FIELD)
    try:
        raw = load_yaml(text)
    except yaml.YAMLError as error:
        raise BadInput(FIELD, str(path), yaml_fault(error)) from None
    if not isinstance(raw, Mapping):
        raise BadInput(FIELD, str(path), "must hold `rate:` and `tenants:`")
    return parse_traffic(raw, str(path))


def parse_traffic(raw: Mapping[str, Any], source: str) -> Traffic:
    """Check a mapping with a traffic file's content; `source` names it in messages."""
    try:
        content = TrafficInput.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or source
        value = first["input"] if isinstance(first["input"], str | int | float) else None
        hint = _HINTS.get(first["type"], first["msg"])
        if first["type"] == "extra_forbidden":
            value, hint = None, unknown_key(str(first["loc"][-1]), _known_beside(first["loc"]))
        raise BadInput(where, value, f"{hint} (in {source})") from None
    names = [tenant.name for tenant in content.tenants]
    if len(set(names)) < len(names) or any(":" in name for name in names):
        raise BadInput("tenants", None, f"need names of their own, without a colon (in {source})")
    total = sum(tenant.share for tenant in content.tenants)
    tenants = tuple(_tenant(t, total, f"tenants.{i}") for i, t in enumerate(content.tenants))
    return Traffic(
        content.rate,
        content.duration,
        tenants,
        DailyProfile(tuple(content.daily)) if content.daily is not None else DailyProfile(),
        content.from_hour,
        content.compress,
        (*_share_notes(content, total), *_cut_notes(tenants)),
    )


def _share_notes(content: TrafficInput, total: float) -> tuple[Note, ...]:
    if abs(total - 1.0) < 1e-6:
        return ()
    told = ", ".join(f"{t.name} {t.share / total:.3g}" for t in content.tenants)
    return (
        Note("info", "tenants", f"their shares add up to {total:.4g} and are taken as parts of 1: {told}"),
    )


def _cut_notes(tenants: Sequence[Tenant]) -> list[Note]:
    """Sessions that end before their users would."""
    found = []
    for tenant in tenants:
        shape = tenant.sessions
        if shape is None or lasting(shape)[1] < TELLING:
            continue
        turns, early = lasting(shape)
        text = (
            f"max_context ({shape.max_context:,} tokens) ends {early:.0%} of its sessions early: {turns:.3g} "
            f"turns on average, not {shape.turns:.3g}; rates and costs count those that are sent"
        )
        found.append(Note("warning", f"tenant {tenant.name}", text))
    return found


def _tenant(given: TenantInput, total: float, where: str) -> Tenant:
    if (given.sessions is None) == (given.dataset is None):
        raise BadInput(where, None, "give either sessions or dataset")
    shape = None
    if given.sessions is not None:
        fields = {k: v for k, v in given.sessions.model_dump().items() if v is not None}
        shape = SessionShape(**fields)
        shape.check(f"{where}.sessions")
    spec = None
    if given.dataset is not None:
        spec = workload_from_input(WorkloadInput(dataset=given.dataset), WorkloadSpec())
        spec = replace(spec, use_trace_arrivals=False)
    return Tenant(given.name, given.share / total, shape, spec, given.priority, given.burstiness)
