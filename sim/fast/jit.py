"""How kernels are compiled, and how they pass arrays without counting references."""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# No branch for every division by zero, each of which might raise.
kernel = njit(cache=True, error_model="numpy")


@intrinsic
def borrowed(_: Any, array: Any) -> Any:
    """The same array without an owner, which must outlive it.

    Functions that take an array count the reference, with an atomic instruction each way; that took longer
    than all else.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.return_type)(context, builder, arguments[0])
        made.meminfo = cgutils.get_null_value(made.meminfo.type)
        made.parent = cgutils.get_null_value(made.parent.type)
        return made._getvalue()

    if not isinstance(array, types.Array):
        return None
    return array(array), generate
