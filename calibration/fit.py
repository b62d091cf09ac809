"""From evidence to coefficients: replay, line up, regress, until the alignment holds still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from calibration.align import APART, NEAR, align, step_rows
from calibration.evidence import ClientRun, Evidence, PerRequest, StepRun, check_together
from calibration.parameters import Prior, Space, default_prior, space_of
from calibration.regress import SCALE_FLOOR, AlignedRun, Estimate, block_means, regress
from calibration.replay import Pace, account_of, replay, run_once
from calibration.result import SILENT, STRUCTURE_FLOOR, FitResult, statuses, unexplained
from calibration.search import search, targets
from sim.engines.base import StepShape
from sim.errors import BadInput
from sim.scenario import Scenario
from sim.simulate import roofline
from sim.steptime.arrays import ShapeArrays, device_seconds, heating
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import ValidRange
from sim.steptime.throttle import warmth

Floats = NDArray[np.float64]

# The first rounds find the way with part of each run. Later ones compare first tokens that lie further apart,
# and go on until no coefficient moves by more than a share of its own uncertainty.
FIRST_ROUNDS = 2
FIRST_SHARE = 0.25
MOST_ROUNDS = 6
SETTLED = 0.3
BACK = "output_delay"
FEW_BACK = 8  # blocks of time whose first tokens are compared as a whole
FEW = 300  # requests of a run that are always replayed


def default_free(scenario: Scenario) -> tuple[str, ...]:
    """The coefficients that runs of this scenario can say anything about."""
    free = [
        "weight_bandwidth",
        "gemm_flops",
        "kv_bandwidth",
        "attention_flops",
        "mixed_kv_reread",
        "tile_edge",
        "ridge",
        "throttle",
        "step_overhead",
        "sequence",
        "front_request",
        "front_prompt_token",
        "output_delay",
    ]
    if int(scenario.engine["tensor_parallel_size"]) > 1:
        free += ["allreduce_latency", "link_bandwidth"]
    model = roofline(scenario)
    if not model.buckets.decode and not model.buckets.other:
        free.append("eager_launch")
    if model.cost.kv_group <= 1:
        free.remove("mixed_kv_reread")
    if scenario.gpu.compute_capability is None:
        free.remove("throttle")
    return tuple(free)


def fit(
    evidence: Sequence[Evidence],
    prior: Prior | None = None,
    free: Sequence[str] | None = None,
    on_simulation: Callable[[], None] = lambda: None,
) -> FitResult:
    """Fit the roofline's coefficients to measurements.

    Runs with something per request are replayed and regressed; runs of which only figures are known are
    simulated, with what the others said as belief.

    Args:
        evidence: runs of one engine, model and GPU.
        prior: what is believed before; None takes the shipped table.
        free: the coefficients to fit; None takes all that the scenario can show.
        on_simulation: called as a run has been replayed or simulated once more.

    Raises:
        BadInput: evidence that does not belong together, or says less than there are coefficients.
    """
    check_together(evidence)
    scenario = evidence[0].scenario
    prior = default_prior(scenario.gpu) if prior is None else prior
    space = space_of(prior, default_free(scenario) if free is None else tuple(free))
    aligned = [e for e in evidence if isinstance(e, StepRun) or e.requests is not None]
    figures = [e for e in evidence if isinstance(e, ClientRun) and e.requests is None]
    _enough(evidence, aligned, figures, space)
    outcome = _Aligner(aligned, space, on_simulation).settle() if aligned else None
    if figures:
        return search(figures, space, outcome, on_simulation)
    assert outcome is not None
    return outcome


def _enough(
    evidence: Sequence[Evidence], aligned: Sequence[Evidence], figures: Sequence[ClientRun], space: Space
) -> None:
    points = sum(
        len(e.seconds) if isinstance(e, StepRun) else 2 * len(e.requests or ())
        for e in aligned
        if isinstance(e, StepRun | ClientRun)
    )
    points += sum(len(targets(run)) for run in figures)
    if points < len(space.names):
        names = ", ".join(e.name for e in evidence)
        hint = (
            f"{points} measured points for {len(space.names)} coefficients; add a run of another load, or "
            "give results with every request's latencies"
        )
        raise BadInput(f"--from {names}", None, hint)


class _Aligner:
    """Replays runs at the measured pace and regresses until the coefficients settle."""

    def __init__(self, evidence: Sequence[Evidence], space: Space, on_simulation: Callable[[], None]) -> None:
        self._evidence = evidence
        self._on_simulation = on_simulation
        self._space = space
        self._bases = [replace(roofline(e.scenario), efficiencies=space.prior.efficiencies) for e in evidence]
        self._shapes: list[tuple[StepShape, ...]] = [()] * len(evidence)

    def settle(self) -> FitResult:
        """The whole loop; coefficients on which the data are silent go back to what was believed of them."""
        space, vector = self._space, self._space.start()
        estimate: Estimate | None = None
        runs: list[AlignedRun] = []
        rounds = 0 if any(isinstance(e, ClientRun) for e in self._evidence) else MOST_ROUNDS - 1
        while rounds < MOST_ROUNDS:
            rounds += 1
            first = rounds <= FIRST_ROUNDS
            at = space.unpack(vector)
            runs = [self._line_up(i, at, first) for i in range(len(self._evidence))]
            estimate = regress(runs, space, vector)
            moved = np.abs(estimate.vector - vector) / np.sqrt(np.diag(estimate.covariance))
            vector = estimate.vector
            if rounds > FIRST_ROUNDS + 1 and float(moved.max()) < SETTLED:
                break
        assert estimate is not None
        quiet = self._silent(estimate)
        if quiet and len(quiet) < len(space.names):
            estimate = self._without(runs, estimate, quiet)
        if BACK in space.names and BACK not in quiet:
            estimate = self._way_back(estimate)
        return self._result(runs, estimate, rounds)

    def _line_up(self, index: int, efficiencies: Efficiencies, first: bool) -> AlignedRun:
        evidence, base = self._evidence[index], self._bases[index]
        model = replace(base, efficiencies=efficiencies)
        if isinstance(evidence, StepRun):
            self._shapes[index] = evidence.shapes
            host = np.zeros(len(evidence.shapes))
            if _synchronous(evidence.scenario):
                host = np.array([base.host_before(s) + base.host_after(s) for s in evidence.shapes])
            rows = step_rows(evidence.seconds, host)
            start = evidence.start
        else:
            assert evidence.requests is not None
            requests = first_part(evidence.requests, FIRST_SHARE if first else 1.0)
            run = replay(
                evidence.scenario,
                requests.requests,
                model,
                account_of(evidence.scenario),
                pace=pace_of(requests, efficiencies.output_delay),
            )
            self._shapes[index] = run.shapes
            rows = align(run, requests, efficiencies.front_end, NEAR if first else APART)
            start = run.start
        self._on_simulation()
        shapes = ShapeArrays.of(self._shapes[index], base.cost, base.buckets)
        cool, hot = device_seconds(model, shapes), heating(model, shapes)
        warm = warmth(hot, start, cool, efficiencies.throttle, efficiencies.throttle_relax)
        return AlignedRun(rows, shapes, base, warm)

    def _way_back(self, estimate: Estimate) -> Estimate:
        """The way to the client as all first tokens see it, each estimate with its own precision.

        Rows know it from requests that found an idle engine, which may be few and have to wake it. So the
        runs are replayed once more, at the pace of the coefficients, and first tokens compared as a whole.
        """
        at = self._space.unpack(estimate.vector)
        off: list[Floats] = []
        usual: list[float] = []
        for evidence, base in zip(self._evidence, self._bases, strict=True):
            if isinstance(evidence, StepRun) or evidence.requests is None:
                continue
            requests, model = evidence.requests, replace(base, efficiencies=at)
            records = run_once(
                evidence.scenario, requests.requests, model, account_of(evidence.scenario)
            ).records
            late = requests.ttft - (records.first_token - records.sent)
            usual.append(float(np.nanmedian(requests.ttft)))
            off.append(block_means(late, records.sent))
        found = np.concatenate(off) if off else np.empty(0)
        if len(found) < FEW_BACK:
            return estimate
        index = self._space.names.index(BACK)
        vector, covariance = estimate.vector.copy(), estimate.covariance.copy()
        floor = SCALE_FLOOR * float(np.mean(usual))
        noise = float(np.var(found, ddof=1)) / len(found) + floor**2
        gain = covariance[index, index] / (covariance[index, index] + noise)
        low, high = self._space.bounds()
        vector[index] = np.clip(vector[index] + gain * float(np.median(found)), low[index], high[index])
        covariance[index, :] *= np.sqrt(1.0 - gain)
        covariance[:, index] *= np.sqrt(1.0 - gain)
        return replace(estimate, vector=vector, covariance=covariance)

    def _silent(self, estimate: Estimate) -> tuple[str, ...]:
        share = np.sqrt(np.diag(estimate.covariance)) / self._space.deviations()
        return tuple(n for n, s in zip(self._space.names, share, strict=True) if s > SILENT)

    def _without(self, runs: Sequence[AlignedRun], estimate: Estimate, quiet: Sequence[str]) -> Estimate:
        """The same fit with `quiet` coefficients at their prior, whose deviation they keep."""
        space = self._space
        rest = [i for i, name in enumerate(space.names) if name not in quiet]
        smaller = space_of(space.prior, [space.names[i] for i in rest])
        found = regress(runs, smaller, estimate.vector[rest])
        vector, covariance = space.start(), np.diag(space.deviations() ** 2)
        vector[rest] = found.vector
        covariance[np.ix_(rest, rest)] = found.covariance
        return replace(found, vector=vector, covariance=covariance)

    def _result(self, runs: Sequence[AlignedRun], estimate: Estimate, rounds: int) -> FitResult:
        space = self._space
        efficiencies = space.unpack(estimate.vector)
        return FitResult(
            efficiencies=efficiencies,
            space=space,
            vector=estimate.vector,
            covariance=estimate.covariance,
            status=statuses(space, estimate.vector, estimate.covariance),
            structure=_structure(runs, efficiencies),
            residuals={
                e.name: _residuals(run, efficiencies) for e, run in zip(self._evidence, runs, strict=True)
            },
            rows=sum(len(run.rows) for run in runs),
            rounds=rounds,
            valid=ValidRange.of(shape for shapes in self._shapes for shape in shapes),
            first_token=_first_token(runs, efficiencies),
        )


def first_part(requests: PerRequest, share: float) -> PerRequest:
    """The first requests of a run; what later ones did to the last of them is left out of its rows."""
    keep = max(FEW, int(share * len(requests)))
    if keep >= len(requests):
        return requests
    cut = requests.requests[keep].arrival
    sent = np.array([r.arrival for r in requests.requests[:keep]])
    ttft = np.where(sent + requests.ttft[:keep] < cut, requests.ttft[:keep], np.nan)
    ends = sent + requests.ttft[:keep] + requests.decode[:keep]
    decode = np.where(ends < cut, requests.decode[:keep], np.nan)
    return PerRequest(
        requests.requests[:keep], ttft, decode, requests.output_len[:keep], requests.token_times[:keep]
    )


def pace_of(requests: PerRequest, output_delay: float) -> Pace:
    """The engine's pace: tokens left it `output_delay` before the client had them."""
    tokens = {}
    for i, request in enumerate(requests.requests):
        if np.isnan(requests.ttft[i]):
            continue
        first = request.arrival + float(requests.ttft[i]) - output_delay
        times = requests.token_times[i]
        if len(times) == requests.output_len[i] > 0:
            tokens[request.request_id] = dict(enumerate((first - times[0] + times).tolist(), 1))
        else:
            tokens[request.request_id] = {1: first}
    return Pace(tokens)


def _structure(runs: Sequence[AlignedRun], efficiencies: Efficiencies) -> float:
    """Root mean square of the runs' mean relative deviation of decodes (steps), but at least the floor."""
    deviations = [
        float(np.median((run.rows.measured - run.predicted(efficiencies))[kept] / run.rows.measured[kept]))
        for run in runs
        # Two tokens that came in one message lie no time apart.
        if (kept := (run.rows.kind > 0) & (run.rows.measured > 0)).any()
    ]
    found = float(np.sqrt(np.mean(np.square(deviations)))) if deviations else 0.0
    return max(STRUCTURE_FLOOR, found)


def _first_token(runs: Sequence[AlignedRun], efficiencies: Efficiencies) -> float:
    """Root mean square of the runs' median relative deviation of times to first token."""
    deviations = []
    for run in runs:
        heads = (run.rows.kind == 0) & (run.rows.measured > 0)
        if heads.any():
            off = run.rows.measured - run.predicted(efficiencies)
            deviations.append(float(np.median(off[heads] / run.rows.measured[heads])))
    return unexplained(deviations, 0)


def _residuals(run: AlignedRun, efficiencies: Efficiencies) -> dict[str, float]:
    rows, predicted = run.rows, run.predicted(efficiencies)
    found = {}
    for kind, name in enumerate(("ttft", "decode", "step")):
        chosen = rows.kind == kind
        if rows.measured[chosen].sum() > 0:
            found[name] = float(predicted[chosen].sum() / rows.measured[chosen].sum() - 1.0)
    return found


def _synchronous(scenario: Scenario) -> bool:
    engine = scenario.engine
    if engine.name == "sglang":
        return bool(engine["disable_overlap_schedule"])
    return not bool(engine["async_scheduling"])
