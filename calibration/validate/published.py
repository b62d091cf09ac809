"""Reading of published files, whose damage is told by file and not by a traceback."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sim.errors import BadInput


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """For the statements that read a file and take it apart, and no others.

    Raises:
        BadInput: the file cannot be read, is cut off, or lacks a field.
    """
    try:
        yield
    except OSError as error:
        raise BadInput("--data", str(path), f"cannot be read: {error.strerror or error}") from None
    except EOFError:
        raise BadInput("--data", str(path), "is cut off") from None
    except KeyError as error:
        raise BadInput("--data", str(path), f"lacks {error.args[0]}") from None
    except (csv.Error, zlib.error, AttributeError, IndexError, TypeError, ValueError) as error:
        raise BadInput("--data", str(path), f"is damaged: {error}") from None
