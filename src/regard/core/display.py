"""What a notebook shows of a value: tables and small pictures as HTML.

No scripts and no style sheet: a notebook may strip both. Text takes the page's colour, and rules are half transparent,
so that a table reads on a dark page and on a light one. Pictures are palette PNGs, written here: they need no drawing
library.
"""

import html
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

WEIGHT_COLOURS = ("#ffffff", "#c6dcef", "#6aaed6", "#2171b5", "#08306b")
"""Colours of weights from 0 to 1, with even steps between them."""
HIDDEN = "#dfe3e8"
"""The colour of pairs that a mask hides, which are not weights of 0."""
MASK_COLOURS = ("#eef1f5", "#2b5c8a")
"""Colours of hidden and of visible pairs."""
LARGEST = 256
"""Cells a side of a picture: of longer sequences a cell shows the largest number of several."""
_RULE = "rgba(128,128,128,.35)"
_CELL = f"padding:.2em .8em;border-bottom:1px solid {_RULE};vertical-align:top"


class Html(str):
    """Text that is HTML already and is shown as it is."""

    __slots__ = ()


def table(
    rows: Sequence[Mapping[str, object]], *, title: str = "", right: Iterable[str] = (), notes: Iterable[str] = ()
) -> Html:
    """Rows with the same keys as an HTML table; columns in `right` are right-aligned, `notes` are lines below it.

    >>> "<td" in table([{"path": "sdpa", "why": "a < b"}]), "a &lt; b" in table([{"why": "a < b"}])
    (True, True)
    """
    numbers = set(right)
    names = list(rows[0]) if rows else []
    aligned = {name: "right" if name in numbers else "left" for name in names}
    head = "".join(f'<th style="{_CELL};text-align:{aligned[name]}">{escape(name)}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL};text-align:{aligned[name]}">{escape(row[name])}</td>' for name in names)
        + "</tr>"
        for row in rows
    )
    heading = f'<p style="margin:.3em 0"><b>{escape(title)}</b></p>' if title else ""
    lines = "".join(f'<p style="margin:.3em 0;opacity:.75">{escape(note)}</p>' for note in notes)
    grid = (
        '<table style="border-collapse:collapse;color:inherit;background:none;margin:.3em 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return Html(f'<div style="overflow-x:auto">{heading}{grid if rows else ""}{lines}</div>')


def folded(title: str, content: Html) -> Html:
    """Content that a click on its title opens."""
    return Html(f"<details><summary>{escape(title)}</summary>{content}</details>")


def escape(value: object) -> str:
    """A value as text in HTML; what is HTML already stays as it is."""
    return value if isinstance(value, Html) else html.escape(str(value))


def weights_image(panels: Sequence[Tensor], visible: Tensor | None = None) -> Html:
    """Weights (T, S) from 0 to 1 side by side; pairs that `visible` denies are grey.

    >>> import torch
    >>> weights_image([torch.eye(4)])[:14]
    '<img style="im'
    """
    levels = 253  # and one colour for hidden pairs, one for what lies between panels
    images = []
    for panel in panels:
        cells = (_pooled(panel.detach().float().cpu().nan_to_num(0)).clamp(0, 1) * levels).round().to(torch.uint8)
        if visible is not None:
            cells = cells.masked_fill(_pooled(visible.float().cpu()) == 0, levels + 1)
        images.append(cells)
    return _png(images, [*_between(WEIGHT_COLOURS, levels + 1), _rgb(HIDDEN)])


def mask_image(panels: Sequence[Tensor]) -> Html:
    """Bool tables (T, S) side by side, visible pairs filled."""
    return _png([_pooled(panel.float().cpu()).to(torch.uint8) for panel in panels], [_rgb(c) for c in MASK_COLOURS])


def _pooled(cells: Tensor) -> Tensor:
    if not cells.numel() or max(cells.shape) <= LARGEST:
        return cells
    size = tuple(min(LARGEST, side) for side in cells.shape)
    return torch.nn.functional.adaptive_max_pool2d(cells[None, None], size)[0, 0]


def _png(panels: Sequence[Tensor], palette: Sequence[tuple[int, int, int]]) -> Html:
    """Tables of palette indices side by side, as an <img> with its data in it."""
    high, wide = (max((panel.shape[side] for panel in panels), default=0) for side in (0, 1))
    if not high or not wide:
        return Html("")
    clear = len(palette)  # one more colour, transparent, between the panels
    gap = max(1, wide // 16)
    image = torch.full((high, len(panels) * (wide + gap) - gap), clear, dtype=torch.uint8)
    for number, panel in enumerate(panels):
        begin = number * (wide + gap)
        image[: panel.shape[0], begin : begin + panel.shape[1]] = panel
    rows = b"".join(b"\0" + bytes(row) for row in image.tolist())
    size = struct.pack(">IIBBBBB", image.shape[1], high, 8, 3, 0, 0, 0)
    colours = bytes(level for colour in (*palette, (0, 0, 0)) for level in colour)
    chunks = (
        (b"IHDR", size),
        (b"PLTE", colours),
        (b"tRNS", b"\xff" * clear + b"\0"),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    scale = max(1, min(12, 128 // max(high, wide)))
    return Html(
        f'<img style="image-rendering:pixelated;margin:.2em 0" width="{scale * image.shape[1]}" '
        f'height="{scale * high}" alt="" src="data:image/png;base64,{b64encode(data).decode()}">'
    )


def _between(stops: Sequence[str], count: int) -> list[tuple[int, int, int]]:
    """`count` colours from the first stop to the last."""
    colours = []
    for number in range(count):
        place = number * (len(stops) - 1) / (count - 1)
        low = min(int(place), len(stops) - 2)
        first, second = _rgb(stops[low]), _rgb(stops[low + 1])
        r, g, b = (round(a + (c - a) * (place - low)) for a, c in zip(first, second, strict=True))
        colours.append((r, g, b))
    return colours


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
