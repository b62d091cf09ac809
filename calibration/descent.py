"""One step of Levenberg-Marquardt within bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

Floats = NDArray[np.float64]


def bounded_step(jacobian: Floats, misses: Floats, room: tuple[Floats, Floats], damping: float) -> Floats:
    """The step that minimises the damped, linearised sum of squares within `room`.

    Args:
        jacobian: of the misses, shape (misses, coefficients).
        misses: what is to become small.
        room: lowest and highest step of every coefficient; 0 must lie within.
        damping: share of the curvature's diagonal that is added to it.
    """
    curvature = jacobian.T @ jacobian
    curvature = curvature + damping * np.diag(np.diag(curvature)) + 1e-12 * np.eye(len(curvature))
    root = np.linalg.cholesky(curvature)
    aim = -np.linalg.solve(root, jacobian.T @ misses)
    low, high = np.minimum(room[0], -1e-15), np.maximum(room[1], 1e-15)
    found: Floats = lsq_linear(root.T, aim, bounds=(low, high), method="bvls").x
    return found
