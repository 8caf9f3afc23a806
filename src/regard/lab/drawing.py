"""Figures as SVG text: small, the same for the same numbers, and with ids that no other figure of a page has."""

import re
from html import escape
from io import StringIO

from regard.core.style import Figure

_DROPPED = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->|<style[ >].*?</style>", re.DOTALL)
_ID = re.compile(r' id="([^"]+)"')
_FONT = re.compile(r" ?font-family: 'DejaVu Sans'(?:,[^;\"]*)?;?")
FAMILY = "'DejaVu Sans', Verdana, sans-serif"


def svg(figure: Figure, name: str = "figure") -> str:
    """A figure as an <svg> element that can stand in a page; its text stays text, and its ids begin with `name`.

    >>> from regard.core.style import new_figure
    >>> svg(new_figure(2, 1))[:4]
    '<svg'
    """
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _small(text.getvalue(), name, figure.get_suptitle())


def _small(text: str, name: str, title: str) -> str:
    text = re.sub(r">\s*\n\s*<", "><", _DROPPED.sub("", text).strip())
    text = re.sub(r' transform="rotate\(-0 [^"]*"|<defs></defs>', "", text)
    targets = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in targets else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = re.sub(r'="[^"]*"', lambda match: _FONT.sub("", _rounded(match[0])), text)
    # What a style sheet of the figure's would say of the whole page.
    looks = f"font-family: {FAMILY}; stroke-linejoin: round; stroke-linecap: butt"
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(" ".join(title.split()))}" style="{looks}" ', 1)


def _rounded(attribute: str) -> str:
    """An attribute on a line of its own, with lengths to hundredths of a point.

    >>> _rounded('="M 63.145179 -0.004 L 2.500000 1"')
    '="M 63.15 -0.004 L 2.5 1"'
    """
    if attribute.startswith('="data:'):
        return attribute
    return re.sub(r"-?\d+\.\d{3,}", _shortened, re.sub(r"\s*\n\s*", " ", attribute))


def _shortened(match: re.Match[str]) -> str:
    digits = 2 if abs(float(match[0])) > 1 else 4
    return f"{float(match[0]):.{digits}f}".rstrip("0").rstrip(".")
