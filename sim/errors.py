"""The exceptions that servecast raises on purpose.

    ServecastError              exit status 1
    ├── BadInput                exit status 2: the user can fix it, and the message says how
    ├── EngineStuck             exit status 1: the simulated engine would hang or crash here
    └── NotComparable           exit status 3: an INVALID run, or results that must not be compared

Every one of them prints as one clear line; `cli.main` turns them into exit statuses.
"""

from __future__ import annotations


class ServecastError(Exception):
    """Root of all exceptions that are shown to a user as one line, without a traceback."""

    exit_status = 1


class BadInput(ServecastError):
    """An input that cannot be used: names the field, shows the value, says what to do.

    `BadInput("--max-num-seqs", 0, "must be at least 1")` prints
    `--max-num-seqs: 0: must be at least 1`.
    """

    exit_status = 2

    def __init__(self, field: str, value: object, hint: str) -> None:
        self.field = field
        self.value = value
        self.hint = hint
        shown = f" {value!r}:" if isinstance(value, str) else "" if value is None else f" {value}:"
        super().__init__(f"{field}:{shown} {hint}")


class EngineStuck(ServecastError):
    """The real engine would hang, abort or crash in this state; names the request and the reason."""


class NotComparable(ServecastError):
    """The result is INVALID, or two results describe different things."""

    exit_status = 3
