"""The report as one HTML page: no scripts, nothing loaded from elsewhere."""

from pathlib import Path

from regard.core.extras import needed_for
from regard.lab.reporting.content import LISTS, MEANING, TERMS, Content
from regard.lab.reporting.formula import mathml
from regard.lab.reporting.markup import html, line

with needed_for("the lab's report", "lab"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

TEMPLATES = Path(__file__).with_name("templates")
SYMBOLS = {
    "holds": '<circle cx="12" cy="12" r="11" fill="currentColor"/><path d="M6.5 12.5l3.8 3.8 7.2-8" stroke="PAPER"/>',
    "condition": '<path d="M12 1.5L22.5 12 12 22.5 1.5 12z" stroke="currentColor"/>'
    '<path d="M12 1.5L1.5 12 12 22.5z" fill="currentColor" stroke="currentColor"/>',
    "fails": '<rect x="1.5" y="1.5" width="21" height="21" rx="2" fill="currentColor"/>'
    '<path d="M7 7l10 10M17 7L7 17" stroke="PAPER"/>',
    "undecided": '<circle cx="12" cy="12" r="10" stroke="currentColor"/>'
    '<path d="M8.8 9.5a3.2 3.2 0 1 1 4.6 2.9c-1 .5-1.4 1-1.4 2.1M12 17.6v.2" stroke="currentColor"/>',
    "measured": '<circle cx="12" cy="13.5" r="8.8" stroke="currentColor"/>'
    '<path d="M12 13.5V8.5M12 4.5V2M9 1.6h6" stroke="currentColor"/>',
    "missing": '<circle cx="12" cy="12" r="10" stroke="currentColor" stroke-dasharray="4 3.1"/>',
}
"""The sign of each verdict, which differs in shape as well as in colour; PAPER is the colour of what it stands on."""


def page(content: Content, *, pdf: bool) -> str:
    """The HTML of a report, with a link to its PDF if it has one."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        markdown=lambda text: Markup(html(text)),
        line=lambda text: Markup(line(text)),
        svg=Markup,
        formula=lambda latex: Markup(mathml(latex, display=True)),
        seconds=seconds,
    )
    return environment.get_template("page.html").render(
        content=content,
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        symbols={name: Markup(shapes.replace("PAPER", "var(--paper)")) for name, shapes in SYMBOLS.items()},
        meaning=MEANING,
        lists=LISTS,
        terms=TERMS,
        pdf=pdf,
    )


def seconds(value: float) -> str:
    """A time as the board has it.

    >>> seconds(0.04), seconds(2.345), seconds(312.0)
    ('< 0.1 s', '2.3 s', '5 min 12 s')
    """
    if value >= 60:
        return f"{int(value // 60)} min {round(value % 60)} s"
    return f"{value:.1f} s" if value >= 0.1 else "< 0.1 s"


def symbol(name: str, colour: str) -> str:
    """The sign of a verdict as an SVG file."""
    shapes = SYMBOLS[name].replace("PAPER", "#ffffff").replace("currentColor", colour)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="24" height="24" fill="none" '
        f'stroke-width="2.4" stroke-linecap="round" stroke-linejoin="round">{shapes}</svg>'
    )
