"""Numbers as the engines' own parsers take them, refused with the name of the flag."""

from __future__ import annotations

import math
import re

from sim.errors import BadInput

_DECIMAL_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_SUFFIX = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SI_SUFFIX = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_IEC_SUFFIX = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_IEC = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])?")


def human_int(flag: str, text: str) -> int:
    """Read `4096`, `1k` (1,000), `4K` (4,096), `25.6k` (25,600), `-1`; `auto` means -1.

    A binary suffix takes no decimals (vllm/engine/arg_utils.py `human_readable_int`, 0.28).

    Raises:
        BadInput: not such a number.
    """
    stripped = text.strip().replace("_", "")
    if stripped == "auto":
        return -1
    if re.fullmatch(r"-\d+", stripped):
        return int(stripped)
    match = _HUMAN.fullmatch(stripped)
    if match is None:
        raise BadInput(flag, text, "must be a whole number such as 8192, 8k (8,000) or 8K (8,192)")
    number, suffix = match.groups()
    if suffix in _BINARY_SUFFIX:
        if "." in number:
            raise BadInput(flag, text, f"a decimal takes a lower-case suffix ({number}{suffix.lower()})")
        return int(number) * _BINARY_SUFFIX[suffix]
    if suffix in _DECIMAL_SUFFIX:
        return _scaled(number, _DECIMAL_SUFFIX[suffix])
    if "." in number:
        raise BadInput(flag, text, "must be a whole number")
    return int(number)


def iec_int(flag: str, text: str) -> int:
    """Read `4096`, `4k` (4,000), `4Ki` (4,096) (sglang/srt/utils/common.py `human_readable_int`, 0.5.21).

    Raises:
        BadInput: not such a number; `4K` is none.
    """
    match = _IEC.fullmatch(text.strip())
    if match is None:
        try:
            return int(text.strip())
        except ValueError:
            hint = "must be a whole number such as 8192, 8k (8,000) or 8Ki (8,192)"
            raise BadInput(flag, text, hint) from None
    number, suffix = match.groups()
    if suffix in _SI_SUFFIX:
        return _scaled(number, _SI_SUFFIX[suffix])
    if "." in number:
        raise BadInput(flag, text, f"a decimal takes an SI suffix ({number}{suffix[0]})")
    return int(number) * _IEC_SUFFIX[suffix]


def _scaled(number: str, scale: int) -> int:
    """A decimal text times a power of ten, exact, rounded down."""
    units, _, decimals = number.partition(".")
    return int(units) * scale + (int(decimals) * scale // 10 ** len(decimals) if decimals else 0)


def whole(flag: str, text: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """Read a whole number.

    Raises:
        BadInput: not a whole number, below `minimum` or above `maximum`.
    """
    try:
        value = int(text.strip())
    except ValueError:
        raise BadInput(flag, text, "must be a whole number") from None
    if maximum is not None and value > maximum:
        raise BadInput(flag, value, f"must be at most {maximum:,}")
    return at_least(flag, value, minimum)


def at_least(flag: str, value: int, minimum: int | None) -> int:
    """Return `value`, or raise BadInput if it lies below `minimum`."""
    if minimum is not None and value < minimum:
        raise BadInput(flag, value, f"must be at least {minimum}")
    return value


def real(
    flag: str,
    text: str,
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    infinite: bool = False,
) -> float:
    """Read a number.

    Raises:
        BadInput: not a number, NaN, infinite without `infinite`, or outside (`above`, `minimum`, `maximum`).
    """
    try:
        value = float(text.strip())
    except ValueError:
        raise BadInput(flag, text, "must be a number") from None
    if math.isnan(value):
        raise BadInput(flag, text, "must be a number, not NaN")
    if math.isinf(value) and not infinite:
        raise BadInput(flag, text, "must be finite")
    if above is not None and value <= above:
        raise BadInput(flag, text, f"must be greater than {above:,.12g}")
    if minimum is not None and value < minimum:
        raise BadInput(flag, text, f"must be at least {minimum:,.12g}")
    if maximum is not None and value > maximum:
        raise BadInput(flag, text, f"must be at most {maximum:,.12g}")
    return value


def truth(flag: str, text: str) -> bool:
    """Read a written-out truth value (`true`, `False`, `1`, `no`, …).

    Raises:
        BadInput: none of these.
    """
    lowered = text.strip().lower()
    if lowered in {"true", "1", "yes", "on"}:
        return True
    if lowered in {"false", "0", "no", "off"}:
        return False
    raise BadInput(flag, text, "must be true or false")
