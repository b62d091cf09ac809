"""Robust, bounded regression of step durations with beliefs: the schedule held, everything is smooth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from calibration.align import Rows
from calibration.descent import bounded_step
from calibration.parameters import Space
from sim.steptime.arrays import ShapeArrays, device_seconds, heating
from sim.steptime.efficiencies import Efficiencies
from sim.steptime.roofline import RooflineModel
from sim.steptime.throttle import throttled

Floats = NDArray[np.float64]

HUBER = 2.0  # residuals beyond this many standard deviations pull no harder
# At last, those beyond this many do not pull at all: such rows hold other steps than were measured.
TUKEY = 6.0
# Errors of requests that share steps are not independent; blocks of this length (or share of a run) are.
BLOCK_SECONDS = 10.0
BLOCK_SHARE = 1 / 8
SCALE_FLOOR = 0.003  # no latency is repeatable to better than this share
MAX_DESCENTS = 12
FEW_ROWS = 20  # fewer residuals than this do not tell their own noise: it is taken to be this share instead
FEW_NOISE = 0.01
FEW_BLOCKS = 3  # per coefficient
LEAST_FREEDOM = 1.5  # below, Student's quantiles say no more than that nothing is known
KINDS = 3  # of rows: first tokens, decodes, steps
STEP = 2
# A step that was timed alone holds what it is said to hold: slow ones are how the machine is, and means count
# them. So its outliers begin where it takes this many times longer than expected.
STALL = 1.0
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
    explain weighs less. Huber's loss keeps outliers from pulling hard, Tukey's from then on from pulling at
    all (Yohai's MM estimate, Annals of Statistics 15, 1987): a prompt that counts in the row beside makes
    prompts look cheap. Steps timed alone cannot hold another's prompt and pull up to `STALL`.
    """
    low, high = space.bounds()
    vector = np.clip(start, low + 1e-12, high - 1e-12)
    kinds = np.concatenate([run.rows.kind for run in runs])
    alone = kinds == STEP
    measured = np.concatenate([run.rows.measured for run in runs])
    lengths = np.concatenate([_noise_shape(run.rows) for run in runs])
    blocks = _blocks(runs)
    scales, reach = np.ones(KINDS), np.ones(len(kinds))
    center, width = space.start(), space.deviations()

    def residuals_at(values: Floats) -> Floats:
        efficiencies = space.unpack(values)
        return np.concatenate([run.rows.measured - run.predicted(efficiencies) for run in runs])

    for round_number in range(rounds):
        rows = residuals_at(vector)
        if round_number:
            # Against what is expected of it: against its own length a slow step would weigh least.
            lengths[alone] = (measured - rows)[alone]
        sizes = measured / lengths
        scales = np.array(
            [_scale(rows[kinds == k] / lengths[kinds == k], sizes[kinds == k]) for k in KIND_IDS]
        )
        sigma = scales[kinds] * lengths
        # Before anything is fitted all rows err to one side, which says nothing of how they err together.
        weight = _effective(rows / sigma, blocks) if round_number else 1.0
        reach = np.where(alone, np.maximum(1.0, STALL / (HUBER * scales[STEP])), 1.0)
        root = _tukey_root if round_number and len(rows) >= FEW_ROWS else _huber_root

        def objective(
            values: Floats,
            sigma: Floats = sigma,
            weight: float = weight,
            root: Callable[[Floats], Floats] = root,
            reach: Floats = reach,
        ) -> Floats:
            data = reach * root(residuals_at(values) / (sigma * reach)) * np.sqrt(weight)
            return np.concatenate((data, (values - center) / width))

        vector = _descend(objective, vector, (low, high), width)
    rows = residuals_at(vector)
    sigma = scales[kinds] * lengths
    jacobian = _jacobian(lambda v: residuals_at(v) / sigma, vector, width)
    z, far = rows / sigma, rows / (sigma * reach)
    covariance = _sandwich(jacobian, z, (_pull(far), _slope(far)), blocks, width)
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
        ids = _block_of(run.rows.time)
        ids -= int(ids.min()) if len(ids) else 0
        parts.append(ids + offset)
        offset += int(ids.max()) + 1 if len(ids) else 0
    return np.concatenate(parts)


def _block_of(time: Floats) -> NDArray[np.int64]:
    span = float(np.ptp(time)) if len(time) else 0.0
    ids: NDArray[np.int64] = (time / (min(BLOCK_SECONDS, BLOCK_SHARE * span) or 1.0)).astype(np.int64)
    return ids


def block_means(values: Floats, time: Floats) -> Floats:
    """Means of the values of each block of time, outliers cut to twice the usual distance from the median.

    Args:
        values, time: shape (requests,); NaN values are left out.
    """
    known = ~np.isnan(values)
    values, ids = values[known], _block_of(time[known])
    if not len(values):
        return np.empty(0)
    middle = float(np.median(values))
    reach = HUBER * 1.4826 * float(np.median(np.abs(values - middle)))
    values = np.clip(values, middle - reach, middle + reach)
    counts = np.bincount(ids)
    found: Floats = np.bincount(ids, values)[counts > 0] / counts[counts > 0]
    return found


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


def _tukey_root(z: Floats) -> Floats:
    """The same of Tukey's biweight, which is flat from `TUKEY` on."""
    near = 1.0 - np.minimum(1.0, np.square(z / TUKEY))
    return np.sign(z) * TUKEY * np.sqrt((1.0 - near**3) / 3.0)


def _pull(z: Floats) -> Floats:
    """What a residual weighs in the last round: the loss's slope over that of a square."""
    size = np.maximum(np.abs(z), 1e-12)
    if len(z) < FEW_ROWS:
        return np.minimum(1.0, HUBER / size)
    return np.square(np.maximum(0.0, 1.0 - np.square(size / TUKEY)))


def _slope(z: Floats) -> Floats:
    """How much harder a residual pulls when it grows, next to one of a square; below 0 where it lets go."""
    if len(z) < FEW_ROWS:  # too few to tell: those that pull less are taken to do so wherever they lie
        return _pull(z)
    square = np.minimum(1.0, np.square(z / TUKEY))
    return (1.0 - square) * (1.0 - 5.0 * square)


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


def _sandwich(
    jacobian: Floats,
    z: Floats,
    robust: tuple[Floats, Floats],
    blocks: NDArray[np.int64],
    width: Floats,
) -> Floats:
    """Covariance with errors clustered by block, and the prior as one more observation.

    A robust loss bends: where residuals pull less the larger they are, the fit moves further until they
    balance, so its curvature is that of the loss's slope, not of the weights (Huber, Robust Statistics, 1981,
    section 7.6). A block pulls the fit towards itself, so its errors count as they would had it been left out
    (Bell and McCaffrey, Survey Methodology 28, 2002); by luck they may still cancel, so no deviation is less
    than with independent errors of one size (Angrist and Pischke, Mostly Harmless Econometrics, 2009, section
    8.1). With few blocks their scatter says little of itself: then errors count as independent.

    Args:
        robust: `_pull` and `_slope` of the rows.
    """
    pull, slope = robust
    curvature = jacobian.T @ (jacobian * slope[:, None])
    if np.linalg.eigvalsh(curvature * np.outer(width, width))[0] < 0.0:  # too many let go to tell
        slope, curvature = pull, jacobian.T @ (jacobian * pull[:, None])
    alone = _independent(jacobian, pull * z, pull, slope, width)
    count = int(blocks.max()) + 1
    if count < FEW_BLOCKS * jacobian.shape[1]:
        return alone
    # With the design effect in the weight, data and prior stand on one scale.
    weight = _effective(z, blocks)
    bread = np.linalg.inv(weight * curvature + np.diag(width**-2.0))
    meat, shares = np.zeros_like(bread), np.zeros((count, len(bread)))
    for block in range(count):
        mine = blocks == block
        own = jacobian[mine]
        inner = own.T @ (own * slope[mine][:, None])
        score = np.linalg.solve(np.eye(len(bread)) - weight * inner @ bread, own.T @ (pull * z)[mine])
        meat += (count - 1) / count * np.outer(score, score)
        shares[block] = np.diag(own.T @ (own * pull[mine][:, None]))
    found = bread @ (weight**2 * meat + np.diag(width**-2.0)) @ bread
    wider = np.maximum(1.0, np.sqrt(np.diag(alone) / np.diag(found))) * _few(shares, np.diag(found), width)
    return np.asarray(found * np.outer(wider, wider), dtype=np.float64)


def _independent(jacobian: Floats, score: Floats, pull: Floats, slope: Floats, width: Floats) -> Floats:
    """Covariance with independent errors of one size: mean score^2 / (mean slope)^2, over rows that pull."""
    kept = pull > 0.0
    spread = float(np.mean(np.square(score[kept]))) / float(np.mean(slope[kept])) ** 2
    curvature = jacobian[kept].T @ jacobian[kept] / max(1.0, spread)
    return np.asarray(np.linalg.inv(curvature + np.diag(width**-2.0)), dtype=np.float64)


def _few(shares: Floats, variances: Floats, width: Floats) -> Floats:
    """How much wider an interval is for the few blocks that it rests on, shape (free,).

    Blocks that say much count for more: (sum of information)^2 / sum of its square is their effective number,
    and Student's quantile takes the place of the normal one, where it is the data that speak.

    Args:
        shares: information by block on each coefficient, shape (blocks, free).
    """
    known = np.maximum(shares.sum(axis=0), 1e-300)
    effective = known**2 / np.maximum(np.square(shares).sum(axis=0), 1e-300)
    factor = stdtrit(np.maximum(LEAST_FREEDOM, effective - 1.0), 0.95) / stdtrit(np.inf, 0.95)
    silent = np.minimum(1.0, variances / width**2)
    return np.asarray(np.sqrt(factor**2 * (1.0 - silent) + silent), dtype=np.float64)
