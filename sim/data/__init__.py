"""Tables that ship with the simulator."""

from pathlib import Path

FOLDER = Path(__file__).parent


def shipped(name: str) -> str:
    """The text of one of them."""
    return (FOLDER / name).read_text(encoding="utf-8")
