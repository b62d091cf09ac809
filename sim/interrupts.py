"""Ctrl-C and its kin: one way to be interrupted, and stretches of work that must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # SIGINT has one meaning everywhere (KeyboardInterrupt, and asyncio's own handling of it).
    signal.raise_signal(signal.SIGINT)


@contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP interrupt just as Ctrl-C does. No-op outside the main thread.

    A SIGHUP that is ignored (`nohup`) stays so. SIGINT gets Python's own handler even where it was ignored
    (a background job of a shell): otherwise SIGTERM would be swallowed too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in SIGNALS[1:] if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in heard}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold interrupts back until the block is over, then let the first one through.

    For short work that would leave something behind if it were cut: spawning a process and noting its id,
    creating a container, taking a server down; and for compiled code, which calls Python for its arguments
    and crashes where a handler raises then. No-op outside the main thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, hold) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
