"""Small helpers for what people read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

LINE = 100


def wrap(text: str, indent: str = "  ") -> list[str]:
    """`text` in lines of at most 100 columns; continuation lines are indented."""
    return textwrap.wrap(text, LINE, subsequent_indent=indent, break_long_words=False) or [""]


def units_line(columns: Sequence[tuple[str, str, int, int]], width: int) -> str:
    """The line below the titles of `(key, title, width, digits)`: ms below latencies; rates have theirs."""
    cells = "".join(f"{'ms' if key.endswith('_ms') else '':>{w}}" for key, _, w, _ in columns)
    return f"{'':<{width}}{cells}".rstrip()


def milliseconds(value: float, *, sign: bool = False) -> str:
    """Milliseconds as people say them: `3.2 s` from a second on."""
    plus = "+" if sign else ""
    return f"{value / 1e3:{plus}.3g} s" if abs(value) >= 1000 else f"{value:{plus}.3g} ms"
