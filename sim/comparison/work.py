"""Whether two results did the same work, without which no timing may be compared."""

from __future__ import annotations

from collections.abc import Mapping

from sim.figures.metrics import MIN_SUCCESS
from sim.results import BenchResult

LOST = 1.0 - MIN_SUCCESS  # of the requests; so many may fail in a run that is VALID
TOKEN_SLACK = 0.01  # of a total; tokenizers and chat templates add and drop a few tokens


def sides_of(measured: BenchResult) -> tuple[str, str]:
    """What to call the two sides of a comparison: two predictions are compared as well."""
    if measured.origin == "predicted":
        return "in the first", "in the second"
    return "predicted", "measured"


def work_differences(predicted: BenchResult, measured: BenchResult) -> list[str]:
    """Say where two results did not do the same work (requests, tokens); empty if they did.

    As many requests must have been sent; that one side lost as many of them as a VALID run may is no other
    work. Where a side does not say how many failed, both are held to what they completed.
    """
    ours, theirs = predicted.aggregates, measured.aggregates
    first, second = sides_of(measured)
    out: list[str] = []

    def differs(key: str, one: float, other: float) -> None:
        out.append(f"{key} is {one:,} {first} but {other:,} {second}")

    done, their_done = ours.get("completed"), theirs.get("completed")
    sent, their_sent = sent_of(ours), sent_of(theirs)
    lost = 0.0
    if sent is not None and their_sent is not None and sent != their_sent:
        failures = ours.get("failed") or theirs.get("failed")
        differs("requests sent (completed and failed)" if failures else "completed", sent, their_sent)
    elif done is not None and their_done is not None and done != their_done:
        lost = abs(done - their_done) / sent if sent and their_sent else 1.0
        if lost > LOST + 1e-9:
            differs("completed", done, their_done)
    for key in ("total_input_tokens", "total_output_tokens"):
        total, their_total = ours.get(key), theirs.get(key)
        if total is None or their_total is None:
            continue
        if abs(total - their_total) > (TOKEN_SLACK + min(lost, LOST)) * abs(their_total):
            differs(key, total, their_total)
    return out


def sent_of(figures: Mapping[str, float | int | None]) -> float | int | None:
    """How many requests a result counts, failed ones included; None where it does not say."""
    completed, failed = figures.get("completed"), figures.get("failed")
    return None if completed is None or failed is None else completed + failed
