"""Robust, bounded regression of step durations with beliefs: the schedule held, everything is smooth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.align import Rows
from calibration.descent import bounded_step
from calibration.parameters import Space
from sim.steptime.arrays import ShapeArrays, device_seconds, heating
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import RooflineModel
from sim.steptime.throttle import throttled

Floats = NDArray[np.float64]

HUBER = 2.0  # residuals beyond this many standard deviations pull no harder
BLOCK_SECONDS = 10.0  # errors of requests that share steps are not independent; blocks of this length are
SCALE_FLOOR = 0.003  # no latency is repeatable to better than this share
MAX_DESCENTS = 12
FEW_ROWS = 20  # fewer residuals than this do not tell their own noise: it is taken to be this share instead
FEW_NOISE = 0.01
FEW_BLOCKS = 3  # per coefficient
KINDS = 3  # of rows: first tokens, decodes, steps
KIND_IDS = range(KINDS)


@dataclass(frozen=True, slots=True)
class AlignedRun:
    """One run's rows over its own steps.

    `model` prices them, with other efficiencies; `warm` says how warm the card was when each step began.
    """

    rows: Rows
    shapes: ShapeArrays
    model: RooflineModel
    warm: Floats

    def predicted(self, efficiencies: Efficiencies) -> Floats:
        """The rows' intervals at `efficiencies` [s]."""
        model = RooflineModel(
            efficiencies,
            self.model.cost,
            self.model.peaks,
            self.model.buckets,
            self.model.tensor_parallel_size,
        )
        cool = device_seconds(model, self.shapes)
        if efficiencies.throttle:
            hot = heating(model, self.shapes)
            cool = throttled(cool, hot, self.warm, efficiencies.throttle, efficiencies.throttle_relax)
        return self.rows.predicted(cool, efficiencies.front_end)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Coefficients on the fitted scale with their covariance.

    Attributes:
        vector: shape (free,).
        covariance: shape (free, free); errors clustered in time, the belief included.
        residuals: measured - predicted of all rows [s].
        scales: noise of each kind of row, one standard deviation [s].
    """

    vector: Floats
    covariance: Floats
    residuals: Floats
    scales: Floats


def regress(runs: Sequence[AlignedRun], space: Space, start: Floats, rounds: int = 2) -> Estimate:
    """Fit the free coefficients to all rows of all runs, in the light of the prior.

    The noise of each kind of row is estimated from its own residuals, so a kind that the model cannot
    explain weighs less. Huber's loss keeps outliers from pulling.
    """
    low, high = space.bounds()
    vector = np.clip(start, low + 1e-12, high - 1e-12)
    kinds = np.concatenate([run.rows.kind for run in runs])
    lengths = np.concatenate([_noise_shape(run.rows) for run in runs])
    sizes = np.concatenate([run.rows.measured for run in runs]) / lengths
    blocks = _blocks(runs)
    scales = np.ones(KINDS)
    center, width = space.start(), space.deviations()

    def residuals_at(values: Floats) -> Floats:
        efficiencies = space.unpack(values)
        return np.concatenate([run.rows.measured - run.predicted(efficiencies) for run in runs])

    for round_number in range(rounds):
        rows = residuals_at(vector)
        scales = np.array(
            [_scale(rows[kinds == k] / lengths[kinds == k], sizes[kinds == k]) for k in KIND_IDS]
        )
        sigma = scales[kinds] * lengths
        # Before anything is fitted all rows err to one side, which says nothing of how they err together.
        weight = _effective(rows / sigma, blocks) if round_number else 1.0

        def objective(values: Floats, sigma: Floats = sigma, weight: float = weight) -> Floats:
            data = _huber_root(residuals_at(values) / sigma) * np.sqrt(weight)
            return np.concatenate((data, (values - center) / width))

        vector = _descend(objective, vector, (low, high), width)
    rows = residuals_at(vector)
    sigma = scales[kinds] * lengths
    jacobian = _jacobian(lambda v: residuals_at(v) / sigma, vector, width)
    covariance = _sandwich(jacobian, rows / sigma, blocks, width)
    return Estimate(vector, covariance, rows, scales)


def _descend(
    objective: Callable[[Floats], Floats], vector: Floats, bounds: tuple[Floats, Floats], width: Floats
) -> Floats:
    """Levenberg-Marquardt within bounds; each step is the exact solution of its small bounded problem."""
    low, high = bounds
    misses = objective(vector)
    damping = 1e-3
    for _ in range(MAX_DESCENTS):
        jacobian = np.stack(
            [
                (objective(vector + step) - misses) / step.sum()
                for step in np.diag(_steps(vector, high, width))
            ],
            axis=1,
        )
        for _ in range(5):
            move = bounded_step(jacobian, misses, (low - vector, high - vector), damping)
            trial = np.clip(vector + move, low, high)
            found = objective(trial)
            if found @ found < misses @ misses:
                break
            damping *= 8.0
        else:
            return vector
        gain = 1.0 - float(found @ found) / float(misses @ misses)
        moved = float(np.max(np.abs(trial - vector) / width))
        vector, misses, damping = trial, found, max(1e-6, damping / 8.0)
        if gain < 1e-6 or moved < 1e-3:
            break
    return vector


def _steps(vector: Floats, high: Floats, width: Floats) -> Floats:
    """Differences that stay within the upper bounds."""
    return np.where(vector + 1e-3 * width <= high, 1e-3, -1e-3) * width


def _noise_shape(rows: Rows) -> Floats:
    """What a row's noise grows with: the root of the gaps it adds up, or the length of a step timed alone."""
    return np.where(rows.kind == 2, rows.measured, np.sqrt(rows.tokens))


def _blocks(runs: Sequence[AlignedRun]) -> NDArray[np.int64]:
    parts, offset = [], 0
    for run in runs:
        ids = (run.rows.time / BLOCK_SECONDS).astype(np.int64)
        ids -= int(ids.min()) if len(ids) else 0
        parts.append(ids + offset)
        offset += int(ids.max()) + 1 if len(ids) else 0
    return np.concatenate(parts)


def _scale(residuals: Floats, sizes: Floats) -> float:
    """Standard deviation by the median absolute residual, but no less than a share of what was measured."""
    if not len(residuals):
        return 1.0
    if len(residuals) < FEW_ROWS:
        return FEW_NOISE * float(np.median(sizes))
    floor = SCALE_FLOOR * float(np.median(sizes))
    return max(floor, float(1.4826 * np.median(np.abs(residuals))))


def _huber_root(z: Floats) -> Floats:
    """Signed root of Huber's loss, so that its square is what least squares minimises."""
    size = np.abs(z)
    return np.sign(z) * np.where(size <= HUBER, size, np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0)))


def _effective(z: Floats, blocks: NDArray[np.int64]) -> float:
    """How much one row counts, given that rows of a block err together: 1 over the design effect."""
    z = np.clip(z, -HUBER, HUBER)
    sums = np.bincount(blocks, z)
    alone = float(np.sum(z * z))
    together = float(np.sum(sums * sums))
    return min(1.0, alone / together) if together > 0 else 1.0


def _jacobian(function: Callable[[Floats], Floats], vector: Floats, width: Floats) -> Floats:
    columns = []
    for j in range(len(vector)):
        step = np.zeros(len(vector))
        step[j] = 1e-3 * width[j]
        columns.append((function(vector + step) - function(vector - step)) / (2 * step[j]))
    return np.stack(columns, axis=1)


def _sandwich(jacobian: Floats, z: Floats, blocks: NDArray[np.int64], width: Floats) -> Floats:
    """Covariance with errors clustered by block, and the prior as one more observation.

    With few blocks their scatter says little of itself: then errors count as independent.
    """
    size = np.maximum(np.abs(z), 1e-12)
    pull = np.minimum(1.0, HUBER / size)
    curvature = jacobian.T @ (jacobian * pull[:, None])
    count = int(blocks.max()) + 1
    if count < FEW_BLOCKS * jacobian.shape[1]:
        excess = max(1.0, float(np.mean(pull * z * z)))
        return np.asarray(np.linalg.inv(curvature / excess + np.diag(width**-2.0)), dtype=np.float64)
    scores = np.zeros((count, jacobian.shape[1]))
    np.add.at(scores, blocks, jacobian * (pull * z)[:, None])
    meat = scores.T @ scores
    # With the design effect in the weight, data and prior stand on one scale.
    weight = _effective(z, blocks)
    bread = np.linalg.inv(weight * curvature + np.diag(width**-2.0))
    meat = meat * (count / (count - jacobian.shape[1]))
    found: Floats = bread @ (weight**2 * meat + np.diag(width**-2.0)) @ bread
    return found
