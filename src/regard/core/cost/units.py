"""Numbers as people read them."""

import math


def human(value: float, unit: str = "") -> str:
    """A number for people: 1.23 G, 456 k.

    >>> human(1.5e9, "FLOP")
    '1.5 GFLOP'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".strip()
    step = 0
    while step < 10 and abs(value) >= 999.5:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {' kMGTPEZYRQ'[step].strip()}{unit}".strip()
