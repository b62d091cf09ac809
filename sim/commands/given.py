"""Typed, range-checked access to the flags of one command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sim.commands.flags import GivenFlag
from sim.commands.numbers import at_least, human_int, iec_int, real, whole
from sim.errors import BadInput
from sim.jsontext import load_json


class Given:
    """The flags of one command, by canonical name, converted and range-checked on reading."""

    def __init__(self, flags: Sequence[GivenFlag]) -> None:
        self._flags = {flag.flag.name: flag for flag in flags if not flag.path}
        self._dotted = [flag for flag in flags if flag.path]

    def get(self, flag: str) -> GivenFlag | None:
        """The flag as given (its dotted settings do not count)."""
        return self._flags.get(flag)

    def dotted(self, flag: str) -> dict[str, str]:
        """The dotted settings of a JSON flag: tail -> text."""
        return {g.path: g.text or "" for g in self._dotted if g.flag.name == flag}

    def has(self, flag: str) -> bool:
        """Whether the flag was given, dotted settings included."""
        return self.get(flag) is not None or bool(self.dotted(flag))

    def word(self, flag: str) -> str | None:
        """The value as text."""
        item = self.get(flag)
        return item.text if item else None

    def truth(self, flag: str) -> bool | None:
        """True, False for the `--no-` form, None if absent."""
        item = self.get(flag)
        return None if item is None else not item.negated

    def integer(self, flag: str, minimum: int | None = 1) -> int | None:
        """A whole number, human-readable where the table says so.

        Raises:
            BadInput: not a whole number, or below `minimum`.
        """
        item = self.get(flag)
        if item is None or item.text is None:
            return None
        read = {"human": human_int, "iec": iec_int}.get(item.flag.kind, whole)
        return at_least(flag, read(flag, item.text), minimum)

    def number(
        self,
        flag: str,
        *,
        above: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> float | None:
        """A finite number within bounds.

        Raises:
            BadInput: not a number, NaN, infinite, or out of bounds.
        """
        text = self.word(flag)
        return None if text is None else real(flag, text, above=above, minimum=minimum, maximum=maximum)

    def integers(self, flag: str, minimum: int = 1) -> tuple[int, ...] | None:
        """Several whole numbers, separated by blanks or commas.

        Raises:
            BadInput: one of them is no whole number, or below `minimum`.
        """
        text = self.word(flag)
        if text is None:
            return None
        words = text.replace(",", " ").strip("[] ").split()
        return tuple(whole(flag, word, minimum) for word in words)

    def mapping(self, flag: str) -> dict[str, Any]:
        """A JSON flag and its dotted settings, merged; nested tails stay dotted.

        Raises:
            BadInput: the value is no JSON object.
        """
        merged: dict[str, Any] = {}
        text = self.word(flag)
        if text is not None:
            try:
                loaded = load_json(text)
            except json.JSONDecodeError as error:
                raise BadInput(flag, text, f"is not JSON: {error.msg}; quote it for the shell") from None
            if not isinstance(loaded, Mapping):
                raise BadInput(flag, text, 'must be a JSON object such as {"cudagraph_mode": "NONE"}')
            merged.update(loaded)
        for path, value in self.dotted(flag).items():
            try:
                merged[path] = load_json(value)
            except json.JSONDecodeError:
                merged[path] = value
        return merged
