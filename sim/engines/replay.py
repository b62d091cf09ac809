"""Reading recorded scenarios, for the engines' `parity` modules.

A scenario is a JSON object: `id`, `engine`, `engine_version`, `args` (the engine's flags) and `requests`,
each with `id, arrival_step, prompt [[segment, length], ...], max_tokens, stop_after, priority`. Its clock
counts scheduling calls: a request with `arrival_step` k is handed over immediately before call k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from sim.errors import BadInput
from sim.request import Request, Segment

STOP_SEGMENT = "stop"
"""Key of the stop token: one and the same token whichever request ends with it."""

Scenario = Mapping[str, Any]
"""One scenario as it was read from its file."""


class _RequestRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: StrictStr
    arrival_step: Annotated[StrictInt, Field(ge=0)]
    prompt: list[tuple[StrictInt | StrictStr, Annotated[StrictInt, Field(ge=1)]]] = Field(min_length=1)
    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_after: Annotated[StrictInt, Field(ge=1)] | None = None
    priority: StrictInt = 0


class _ScenarioRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: StrictStr
    engine: Literal["vllm", "sglang"]
    engine_version: StrictStr
    args: dict[str, StrictBool | StrictInt | float | StrictStr | None]
    requests: list[_RequestRecord]


def _segments(prompt: list[tuple[int | str, int]], stops: Mapping[str, int | None]) -> tuple[Segment, ...]:
    """Rename the quoted stop tokens, so that two tokens are equal exactly if key and position are."""
    segments: list[Segment] = []
    for key, length in prompt:
        stop_after = stops[key.removeprefix("out:")] if isinstance(key, str) else None
        if stop_after is None or length < stop_after:
            segments.append((key, length))
        else:  # never generated beyond its stop token: any name of its own does for the rest
            segments += [
                (key, stop_after - 1),
                (STOP_SEGMENT, 1),
                (f"{key}+{stop_after}", length - stop_after),
            ]
    return tuple(segment for segment in segments if segment[1] > 0)


def arrivals(scenario: Scenario) -> deque[tuple[int, Request]]:
    """The scenario's requests as (arrival step, request), in the order in which the engine gets them.

    Raises BadInput for a scenario that lacks a field, has an unknown one, or quotes an unknown request.
    """
    name = f"scenario {scenario.get('id', '?')}"
    try:
        record = _ScenarioRecord.model_validate(dict(scenario))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(name, None, f"{where}: {first['msg']}") from None
    stops = {request.id: request.stop_after for request in record.requests}
    if len(stops) < len(record.requests):
        raise BadInput(name, None, "two requests have the same id")
    for request in record.requests:
        for key, _ in request.prompt:
            if isinstance(key, str) and key.removeprefix("out:") not in stops:
                raise BadInput(
                    name, None, f"request {request.id} quotes {key!r}, which is not a request of it"
                )
    return deque(
        (
            r.arrival_step,
            Request(r.id, _segments(r.prompt, stops), r.max_tokens, 0.0, r.stop_after, r.priority),
        )
        for r in sorted(record.requests, key=lambda r: r.arrival_step)
    )
