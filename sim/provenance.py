"""Where a number comes from: every figure that a user sees can say so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class Origin(StrEnum):
    """How a value came to be."""

    GIVEN = "given"  # the user wrote it
    DEFAULT = "default"  # the engine's own rule for an absent flag
    DERIVED = "derived"  # the engine changed or computed it from other flags
    LOGGED = "logged"  # read from an engine's log
    MEASURED = "measured"
    FITTED = "fitted"
    COMPUTED = "computed"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Sourced(Generic[T]):
    """A value with its origin and the rule or source behind it, in one short phrase."""

    value: T
    origin: Origin
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """One thing the user should know about a scenario or a result.

    `kind` is one of "info", "warning", "not-modelled", "assumed"; `subject` names the flag or figure.
    """

    kind: str
    subject: str
    text: str
