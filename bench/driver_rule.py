"""What an image asks of the driver, in the words of NVIDIA's container runtime.

`NVIDIA_REQUIRE_CUDA=cuda>=12.8 brand=tesla,driver>=535,driver<536`: alternatives stand between spaces, and of
one of them all conditions, between commas, must hold (NVIDIA Container Toolkit, "CUDA constraints"). The
alternatives behind the first are the older drivers that run newer CUDA on data-centre cards (CUDA's forward
compatibility).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from bench.telemetry import GpuInfo

Rule = tuple[tuple[str, ...], ...]
Numbers = tuple[int, ...]
_CONDITION = re.compile(r"(\w+)(>=|<=|!=|=|>|<)(\S+)")
_COMPARE: Mapping[str, Callable[[Numbers, Numbers], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "!=": operator.ne,
}


def driver_rule(text: str) -> Rule:
    """The alternatives of a constraint, each with its conditions; () asks for nothing."""
    return tuple(tuple(filter(None, words.split(","))) for words in text.split())


def least_cuda(rule: Rule) -> tuple[int, int] | None:
    """The CUDA release with which any driver satisfies the rule; None if no alternative is one alone."""
    for conditions in rule:
        match = re.fullmatch(r"cuda>=(\d+)\.(\d+)\S*", conditions[0]) if len(conditions) == 1 else None
        if match:
            return int(match[1]), int(match[2])
    return None


def allows(rule: Rule, gpu: GpuInfo) -> bool | None:
    """Whether an image runs with a GPU's driver; None if that hangs on what is not known, as the brand."""
    if not rule:
        return True
    found = [_all(conditions, gpu) for conditions in rule]
    return True if True in found else None if None in found else False


def _all(conditions: tuple[str, ...], gpu: GpuInfo) -> bool | None:
    found = [_holds(condition, gpu) for condition in conditions]
    return False if False in found else None if None in found else True


def _holds(condition: str, gpu: GpuInfo) -> bool | None:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        return None
    key, sign, wanted = match.groups()
    if key == "brand":
        # NVML alone knows the brand; that a GeForce is none of the others, its name says.
        return False if sign == "=" and "geforce" in gpu.name.lower() and "geforce" not in wanted else None
    has = {"cuda": gpu.cuda, "driver": _numbers(gpu.driver), "arch": gpu.compute_capability}.get(key)
    least = _numbers(wanted)
    if not has or not least:
        return None
    # 535 means 535.0: releases are compared as far as both say.
    length = max(len(has), len(least))
    padded = [(*numbers, *(0,) * (length - len(numbers))) for numbers in (has, least)]
    return _COMPARE[sign](padded[0], padded[1])


def _numbers(text: str) -> Numbers:
    """ "535.104.05" -> (535, 104, 5); () for anything else."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)*", text) else ()
