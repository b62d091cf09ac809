"""The same question on other GPUs and tensor-parallel sizes, and which of them are worth their price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.build import ScenarioSource
from sim.errors import BadInput
from sim.hardware.gpus import find_gpu
from sim.planning.capacity import Capacity, capacity
from sim.planning.load_curve import Effort
from sim.planning.mix import Traffic
from sim.planning.pool import Pool
from sim.planning.prices import Prices
from sim.planning.sizing import Sizing, size
from sim.planning.slo import Slos
from sim.profile import Profile
from sim.scenario import Observed

TP_FLAG = {"vllm": "tensor-parallel-size", "sglang": "tp-size"}
FRACTIONS = (0.5, 0.7, 0.85, 1.0)
MORE_REPLICAS = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kind of replica.

    Attributes:
        found: its capacity; None if it cannot run.
        failure: why it cannot.
        sizing: replicas for the wanted rate, if one was given.
    """

    name: str
    gpu: str
    gpus_per_replica: int
    found: Capacity | None = None
    failure: str | None = None
    sizing: Sizing | None = None


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """One way to run: a candidate, how much load each replica gets, what that leaves and costs.

    Attributes:
        replicas: for the wanted rate; None where no rate was given.
        load: requests/s per replica.
        margin: 1 - share of the worst objective used.
        per_hour: cost of the deployment (of one replica where no rate was given).
        per_1m_output: cost per million output tokens at this load.
        sure: the load is kept at the low end of the intervals of seeds and model, too.
        pareto: no other point costs less and leaves as much margin.
    """

    name: str
    replicas: int | None
    load: float
    margin: float
    per_hour: float
    per_1m_output: float
    sure: bool = True
    pareto: bool = False


def parse_names(field: str, text: str | None) -> tuple[str, ...]:
    """Read "H100,H200". Raises BadInput for empty or repeated names."""
    if text is None:
        return ()
    names = tuple(word.strip() for word in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise BadInput(field, text, "give distinct names separated by commas")
    return names


def parse_sizes(field: str, text: str | None) -> tuple[int, ...]:
    """Read "1,2,4". Raises BadInput for anything but distinct whole numbers of at least 1."""
    try:
        sizes = tuple(int(name) for name in parse_names(field, text))
    except ValueError:
        sizes = (0,)
    if any(n < 1 for n in sizes):
        raise BadInput(field, text, "give distinct whole numbers of at least 1, separated by commas")
    return sizes


def candidates(
    source: ScenarioSource,
    gpus: Sequence[str],
    tps: Sequence[int],
    slos: Slos,
    *,
    effort: Effort,
    pool: Pool,
    profile: Profile | None = None,
    rate: float | None = None,
    peak_factor: float = 1.0,
    traffic: Traffic | None = None,
    with_error: bool = True,
) -> list[Candidate]:
    """The capacity of every combination; those that cannot run say why.

    What was observed of a start (the KV pool) holds for the scenario's own GPU and size only.

    Raises:
        BadInput: an unknown GPU.
    """
    found = []
    for gpu in gpus or (source.gpu,):
        for tp in tps or (0,):
            changed = _changed(source, gpu, tp)
            name = gpu + (f" TP{tp}" if tp else "")
            try:
                scenario = changed.build()
                answer = capacity(
                    scenario,
                    slos,
                    effort=effort,
                    pool=pool,
                    profile=profile,
                    traffic=traffic,
                    with_error=with_error,
                )
                sizing = None if rate is None else size(answer, rate, peak_factor)
            except BadInput as error:
                if error.field == "--gpu":
                    raise
                found.append(Candidate(name, gpu, max(tp, 1), failure=str(error)))
                continue
            found.append(Candidate(name, scenario.gpu.name, scenario.gpu_count, answer, None, sizing))
    return found


def _changed(source: ScenarioSource, gpu: str, tp: int) -> ScenarioSource:
    changed = source
    if find_gpu(gpu)[0] != find_gpu(source.gpu)[0]:
        changed = replace(changed, gpu=gpu, observed=Observed())
    if tp:
        engine = changed.serve.engine
        before = changed.serve
        changed = changed.with_settings([f"serve.{TP_FLAG[engine]}={tp}"])
        if changed.serve != before:
            changed = replace(changed, observed=Observed(), gpu_count=None)
    return changed


def operating_points(
    found: Sequence[Candidate], prices: Prices, rate: float | None = None
) -> list[OperatingPoint]:
    """Ways to run each candidate, with the Pareto-optimal ones marked.

    With a wanted `rate`: from the fewest replicas that hold the peak to a few more. Without: a replica at
    fractions of its capacity.

    Raises:
        BadInput: a GPU without a price.
    """
    points: list[OperatingPoint] = []
    for candidate in found:
        answer = candidate.found
        if answer is None or answer.level is None or answer.request_rate <= 0:
            continue
        if rate is not None and candidate.sizing is None:
            continue
        hourly = prices.of(candidate.gpu) * candidate.gpus_per_replica
        tokens = requests_per_load(answer) * answer.output_rate / answer.request_rate
        for replicas, load, mean in _loads(candidate, answer):
            used = answer.used_at(load)
            if used is None:
                continue
            bill = hourly * (replicas or 1)
            sold = mean * tokens * 3600.0 / 1e6
            sure = answer.certain is None or load <= answer.certain[0]
            margin = 1.0 - used
            points.append(OperatingPoint(candidate.name, replicas, load, margin, bill, bill / sold, sure))
    return mark_pareto(points, by_hour=any(p.replicas is not None for p in points))


def requests_per_load(answer: Capacity) -> float:
    """Requests per unit of load: one, or all the turns of a session where the load is arrivals of these."""
    return answer.request_rate / answer.kept.value if answer.traffic else 1.0


def _loads(candidate: Candidate, answer: Capacity) -> list[tuple[int | None, float, float]]:
    """(replicas, peak load of each, mean rate of all)."""
    assert answer.level is not None
    if candidate.sizing is not None:
        sizing, least = candidate.sizing, candidate.sizing.at_peak
        return [(n, sizing.peak_rate / n, sizing.rate) for n in range(least, least + MORE_REPLICAS)]
    return [(None, f * answer.level.value, f * answer.level.value) for f in FRACTIONS]


def mark_pareto(points: Sequence[OperatingPoint], *, by_hour: bool) -> list[OperatingPoint]:
    """Mark the points that no other beats in both cost and margin."""

    def price(point: OperatingPoint) -> float:
        return point.per_hour if by_hour else point.per_1m_output

    def beaten(point: OperatingPoint) -> bool:
        return any(
            price(other) <= price(point)
            and other.margin >= point.margin
            and (price(other) < price(point) or other.margin > point.margin)
            for other in points
        )

    return [replace(point, pareto=not beaten(point)) for point in points]
