"""How kernels are compiled."""

from __future__ import annotations

from numba import njit

# Numpy's error model: no branch for every division by zero, each of which might raise.
allocating = njit(cache=True, error_model="numpy", _nrt=True)
# Without memory management arrays cannot be made, but they are passed without counting references, with an
# atomic instruction each way, which would take longer than all else.
kernel = njit(cache=True, error_model="numpy", _nrt=False)
