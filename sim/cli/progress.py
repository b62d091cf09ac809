"""Progress on standard error: a running line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

import click

PAUSE = 5.0  # between two lines of progress that no terminal shows [s]
WIDTH = 40


class ShownProgress:
    """So many runs of so many.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def __call__(self, done: int, total: int, left: float | None) -> None:
        """`left`: seconds to go; None as long as nothing can be said of them."""
        text = f"{done}/{total} runs" + ("" if left is None else f", about {left:.0f} s left")
        if sys.stderr.isatty():
            click.echo(f"\r{text:<{WIDTH}}" + ("\n" if done == total else ""), err=True, nl=False)
        elif done < total and self._clock() - self._last >= PAUSE:
            self._last = self._clock()
            click.echo(text, err=True)


class ShownCount:
    """What is done, where nobody knows how many it takes; a context that takes its line back at the end.

    Args:
        what: is counted.
        clock: seconds from any origin.
    """

    def __init__(self, what: str = "simulations", clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._start = self._last = clock()
        self._done = 0
        self._shown = False

    def __enter__(self) -> ShownCount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            click.echo(f"\r{'':<{WIDTH}}\r", err=True, nl=False)

    def __call__(self) -> None:
        """One more is done."""
        self._done += 1
        now = self._clock()
        text = f"{self._done} {self._what}, {now - self._start:.0f} s"
        if sys.stderr.isatty():
            self._shown = True
            click.echo(f"\r{text:<{WIDTH}}", err=True, nl=False)
        elif now - self._last >= PAUSE:
            self._last = now
            click.echo(text, err=True)
