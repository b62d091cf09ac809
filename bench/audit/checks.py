"""What a file says of a run, checked before an audit counts with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import BadInput
from sim.results import BenchResult
from sim.results_io.fields import count, number
from sim.results_io.said import check_said

_SERVER = (
    "kv_cache_tokens",
    "num_preemptions",
    "max_kv_usage",
    "prompt_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
)


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Refuse settings of a client of another kind than they can be; absent ones are unknown.

    Raises:
        BadInput: names the field.
    """
    try:
        check_said(settings, where)
    except BadInput as error:
        # They stand under no `identity` where someone else wrote them.
        raise BadInput(error.field.replace(" identity.", " "), error.value, error.hint) from None
    count(settings, "random_prefix_len", where)


def check_server(result: BenchResult, where: str) -> None:
    """Refuse figures of the server's side that are no numbers.

    Raises:
        BadInput: names the field.
    """
    for key in _SERVER:
        number(result.server, key, f"{where} server")
    number(result.extra, "intended_prefix_hits", f"{where} extra")
    overhead = result.extra.get("template_overhead")
    if overhead is not None and (isinstance(overhead, bool) or not isinstance(overhead, int | float)):
        hint = f"must be a number, is {type(overhead).__name__}"
        raise BadInput(f"{where} extra template_overhead", None, hint)


def as_count(value: object) -> int | None:
    """A count of at least 1 that a flag or a log gives as number or text; None if it is none."""
    text = "" if isinstance(value, bool) else str(value)
    return int(text) if text.isdecimal() and int(text) else None
