"""The seam between what an engine schedules and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sim.engines.base import StepShape


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What happens to a request outside the engine's loop. All values in seconds.

    The front end is serial: requests that arrive together queue for it (API server process: HTTP,
    tokenising on the way in; detokenising and streaming on the way out).

    Attributes:
        request: serial time per request before the engine sees it.
        prompt_token: serial time per prompt token (tokenising, parsing token ids).
        output_delay: from a step's result to the client's socket; delays, but nobody queues for it.
        output_token: serial time per streamed chunk in the API process.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    output_delay: float = 0.0
    output_token: float = 0.0


class DecodeLine(NamedTuple):
    """Price of a batch of decodes over its context: intercept + slope * context [s], from `since` to `reach`.

    Where the context asked for lies outside, the line holds for it alone. `resource` is what bounds a step.
    """

    intercept: float
    slope: float
    since: float
    reach: float
    resource: str


class StepTimeModel(Protocol):
    """Prices one step.

    Implementations are pure: the same shape costs the same. Postcondition: `gpu` > 0 for a shape with
    tokens; all returned values are finite and non-negative. For every fixed batch composition, `gpu` is
    affine in `decode_context` between graph-bucket edges, so that runs of identical decode steps have a
    closed form. A model may say so itself, by a method `decode_line(shape) -> DecodeLine`, and may name what
    bounds a step, by `assess(shape) -> (seconds, resource)`.
    """

    @property
    def front_end(self) -> FrontEnd:
        """The terms outside the engine's loop."""

    def gpu(self, shape: StepShape) -> float:
        """Seconds that the device is busy with the step."""

    def host_before(self, shape: StepShape) -> float:
        """Seconds of host work before the launch (schedule, prepare inputs)."""

    def host_after(self, shape: StepShape) -> float:
        """Seconds of host work after the result (sample bookkeeping, update, hand over)."""

    def out_of_range(self, shape: StepShape) -> str | None:
        """Why this shape lies outside what the model was calibrated on, or None."""
