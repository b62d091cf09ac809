"""Reading JSON such that every text that cannot be read is refused in one way."""

from __future__ import annotations

import json
from typing import Any


def load_json(text: str) -> Any:
    """One JSON document.

    Raises:
        json.JSONDecodeError: it is none, is nested deeper than Python can follow, or has a number of more
            digits than Python converts.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has too many digits", text, 0) from None
