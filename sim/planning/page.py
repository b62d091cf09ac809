"""A self-contained page: what it shows, and the template that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sim.planning.svg import Drawn

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under a title."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """What the template shows, in this order."""

    title: str
    question: tuple[str, ...]
    headline: str
    answer: tuple[str, ...]
    charts: tuple[Drawn, ...]
    tables: tuple[Table, ...]
    assumptions: tuple[str, ...]
    commands: tuple[str, ...] = ()
    explanations: tuple[tuple[str, tuple[str, ...]], ...] = ()
    details: tuple[Table, ...] = ()
    footer: str = ""


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files("sim.planning").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(text)


def render_page(page: Page) -> str:
    """The page as HTML; every text is escaped."""
    return _template().render(page=page) + "\n"


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def footer(seeds: str) -> str:
    """What made the page."""
    try:
        own = f"servecast {version('servecast')}"
    except PackageNotFoundError:
        own = "servecast"
    return f"{own}, simulated; {seeds}"
