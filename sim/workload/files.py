"""Reading of workload files: text with line numbers, and values that name their place when they are wrong."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sim.errors import BadInput
from sim.jsontext import load_json
from sim.paths import file_bytes

# What a user may write for one quantity; the first name is ours.
INPUT_NAMES = ("input_len", "prompt_len", "input_length", "prompt_tokens", "input_tokens")
EXACT = 2.0**53  # up to which floats hold every whole number
OUTPUT_NAMES = ("output_len", "output_length", "output_tokens", "completion_tokens")


def read_text(path: str | Path, field: str = "--dataset-path") -> str:
    """Whole text of a file, plain or gzip-compressed.

    Raises:
        BadInput: missing, unreadable, truncated, not text, or empty.
    """
    name = str(path)
    try:
        data = file_bytes(path)
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInput(field, name, "no such file") from None
    except EOFError:
        raise BadInput(field, name, "the compressed file is truncated") from None
    except zlib.error:
        raise BadInput(field, name, "the compressed file is damaged") from None
    except UnicodeDecodeError as error:
        raise BadInput(field, name, f"is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BadInput(field, name, error.strerror or str(error)) from None
    if not text.strip():
        raise BadInput(field, name, "is empty")
    return text


def place(path: str | Path, line: int) -> str:
    """How an error message names a line of a file."""
    return f"{path} line {line}"


def parse_json(text: str, path: str | Path, line: int = 1) -> Any:
    """One JSON document that starts at `line` of the file.

    Raises:
        BadInput: naming the line at which the text stops being JSON.
    """
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        hint = "the file is truncated" if ended else f"is not JSON ({error.msg}, column {error.colno})"
        raise BadInput(place(path, at), None, hint) from None


def json_lines(text: str, path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank.

    Raises:
        BadInput: naming the line that is not a JSON object.
    """
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold other line ends within
        if not line.strip():
            continue
        value = parse_json(line, path, number)
        if not isinstance(value, dict):
            raise BadInput(place(path, number), None, "must be a JSON object")
        yield number, value


def whole(value: object, where: str, name: str, low: int) -> int:
    """An integer of at least `low` and less than 2^53; numbers such as 12.0 and texts such as "12" count.

    Raises:
        BadInput: naming place and field.
    """
    number = finite(value, where, name)
    if number != int(number) or number < low:
        raise BadInput(f"{where} {name}", number, f"must be a whole number of at least {low}")
    if number >= EXACT:
        raise BadInput(f"{where} {name}", number, "is too large for any count")
    return int(number)


def finite(value: object, where: str, name: str) -> float:
    """A finite number.

    Raises:
        BadInput: naming place and field.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadInput(f"{where} {name}", None, f"must be a number, is {json.dumps(value, default=str)}")
    try:
        number = float(value)
    except ValueError:
        raise BadInput(f"{where} {name}", value, "must be a number") from None
    if not math.isfinite(number):
        raise BadInput(f"{where} {name}", number, "must be finite")
    return number


def pick(entry: Mapping[str, Any], names: tuple[str, ...], where: str) -> object:
    """The value under the first of `names` that the entry has.

    Raises:
        BadInput: none of them is there.
    """
    for name in names:
        if name in entry:
            value: object = entry[name]
            return value
    raise BadInput(where, None, f"lacks the field {names[0]}")
