"""The step probe's files (`bench/probe`): one JSON object a line, `ev` says what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.evidence import CLOCK_SLACK, LONGEST, StepRun
from sim.engines.base import ScheduledChunk, StepPlan, StepShape
from sim.errors import BadInput
from sim.jsontext import load_json
from sim.paths import file_text
from sim.request import Request
from sim.scenario import Scenario

NUMBER = (int, float)


def step_run(path: Path, scenario: Scenario) -> StepRun:
    """The steps of a probe's file.

    A step that began after an idle pause may contain it where the probe did not say when the step ended;
    such a step is left out.

    Raises:
        BadInput: names file, line and field.
    """
    shapes: list[StepShape] = []
    seconds: list[float] = []
    starts: list[float] = []
    last = -np.inf
    records = _json_lines(path)
    for line, record in records:
        _check_record(record, f"{path} line {line}")
    lengths = {
        r["id"]: int(r["prompt_len"]) for _, r in records if r.get("ev") == "add" and "prompt_len" in r
    }
    steps = [(line, r) for line, r in records if r.get("ev") == "step"]
    for index, (line, record) in enumerate(steps):
        where = f"{path} line {line}"
        if record["t"] < last - CLOCK_SLACK:
            raise BadInput(f"{where} t", record["t"], "lies before the step above: the clock goes backwards")
        last = record["t"]
        took = float(record["dt_ms"]) / 1e3
        if took > LONGEST or took < 0:
            raise BadInput(f"{where} dt_ms", record["dt_ms"], "is no step's duration in milliseconds")
        drained = "end" not in record and _drains(steps, index)
        if took > 0 and record["scheduled"] and not drained:
            shapes.append(_shape(record, lengths))
            seconds.append(took)
            starts.append(float(record["end"]) - took if "end" in record else float(record["t"]))
    if not shapes:
        raise BadInput(str(path), None, "holds no timed step")
    return StepRun(str(path), scenario, tuple(shapes), np.array(seconds), np.array(starts))


def _check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record that lacks a field, or holds something else there."""
    if record.get("ev") == "add" and "prompt_len" in record:
        _check_kind(record, "id", str, where)
        _check_kind(record, "prompt_len", int, where)
    if record.get("ev") != "step":
        return
    for key in ("t", "dt_ms", *(["end"] if "end" in record else [])):
        _check_kind(record, key, NUMBER, where)
    for key in ("scheduled", "computed"):
        _check_kind(record, key, dict, where)
        for rid in record[key]:
            _check_kind(record[key], rid, int, f"{where} {key}")


def _check_kind(record: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> None:
    value = record.get(key)
    if value is None:
        raise BadInput(f"{where} {key}", None, "is missing; is this a step file?")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise BadInput(f"{where} {key}", None, f"must not be a {type(value).__name__}; is this a step file?")


def _drains(steps: Sequence[tuple[int, Mapping[str, Any]]], index: int) -> bool:
    """Whether the engine may have been idle after this step: the next one has none of its requests."""
    if index + 1 == len(steps):
        return True
    return not set(steps[index][1]["scheduled"]) & set(steps[index + 1][1]["scheduled"])


def _shape(record: Mapping[str, Any], lengths: Mapping[str, int]) -> StepShape:
    plan = StepPlan(int(record.get("step", 0)), "mixed")
    for rid, count in record["scheduled"].items():
        start = int(record["computed"].get(rid, 0))
        samples = start + count >= lengths.get(rid, 0)
        request = Request(rid, ((rid, max(1, lengths.get(rid, start + count))),), 1)
        plan.scheduled.append(ScheduledChunk(request, start, int(count), samples))
    return plan.shape()


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        text = file_text(path)
    except OSError as error:
        raise BadInput("steps", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput("steps", str(path), "is not a text file") from None
    found = []
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            value = load_json(content)
        except json.JSONDecodeError:
            if line == text.count("\n") + 1:  # cut by a kill
                break
            raise BadInput(f"{path} line {line}", None, "is not JSON") from None
        if not isinstance(value, dict):
            raise BadInput(f"{path} line {line}", None, "must be a JSON object")
        found.append((line, value))
    return found
