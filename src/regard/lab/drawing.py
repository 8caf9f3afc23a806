"""Figures as SVG text, the same for the same numbers."""

import re
from io import StringIO

from regard.core.style import Figure


def svg(figure: Figure) -> str:
    """A figure as an <svg> element that can stand in a page; its text stays text.

    >>> from regard.core.style import new_figure
    >>> svg(new_figure(2, 1))[:4]
    '<svg'
    """
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL).strip()
