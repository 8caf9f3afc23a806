"""The length from which one mechanism is cheaper than another."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from regard.core.cost.formulas import check_work, cost
from regard.core.cost.work import Work, mode_work, with_length

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

Rate = Callable[["Mechanism", Work], float]
"""Seconds a mechanism takes for some work on a machine."""
PRICES: dict[str, Rate] = {
    "flops": lambda mechanism, work: float(cost(mechanism, work).flops),
    "bytes": lambda mechanism, work: float(cost(mechanism, work).bytes),
}
"""Prices that need no measurement of a machine."""


def crossover(
    first: "Mechanism", second: "Mechanism", work: Work, *, seconds: Rate | None = None, limit: int = 1 << 22
) -> int | None:
    """The length from which `second` is cheaper than `first`, or None if it is not up to `limit`.

    The work's `key_length` is varied; where `query_length` equals it (prefill), both are, else queries stay (decode).
    By FLOPs, or by `seconds(mechanism, work)` for a machine's measured rates (`commands.suite.crossing(…).rates`).

    >>> import regard as rg
    >>> work = rg.Work(query_length=1024, key_length=1024, num_heads=4, num_kv_heads=4, mask=rg.causal)
    >>> rg.crossover(rg.Softmax(), rg.Quadratic(), work)  # by FLOPs, at D = 64
    5213
    """
    check_work(work)
    price: Rate = seconds or (lambda mechanism, at: float(cost(mechanism, at).flops))

    def gain(length: int) -> float:
        at = with_length(work, length)
        return price(first, at) - price(second, at)

    # Search from the longest length down: linear attention can also be cheaper within its first chunk, but "from which"
    # means for all longer lengths.
    high = limit
    if gain(high) <= 0:
        return None
    while high > 1 and gain(high // 2) > 0:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    # Each new chunk adds a small fixed cost, so the gain can fall below 0 again a little later.
    stride = max(1, high // (512 if high < 1 << 16 else 16))
    dips = [length for length in range(high, 2 * high, stride) if gain(length) <= 0]
    if not dips:
        return high
    low, high = dips[-1], dips[-1] + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def mode_price(mode: str) -> Rate:
    """What decides a mode's speed, as a price for `crossover`: FLOPs for prefill, bytes moved for decode.

    >>> import regard as rg
    >>> from regard.core.cost import mode_price
    >>> mode_price("decode")(rg.Softmax(), rg.Work(key_length=1024))
    2105344.0
    """
    return PRICES["flops" if mode == "prefill" else "bytes"]


def mode_crossover(
    first: "Mechanism", second: "Mechanism", work: Work, mode: str, price: Rate | None = None
) -> int | None:
    """The length from which `second` is cheaper in a mode, by what decides the mode's speed or by another price.

    >>> import regard as rg
    >>> from regard.core.cost import mode_crossover
    >>> mode_crossover(rg.Softmax(), rg.Quadratic(), rg.Work(mask=rg.causal), "decode")
    2565
    """
    # Any length of at least 2 will do: a decode step of length 1 would look like a whole sequence of one token.
    at = mode_work(work, mode, 2)
    return crossover(first, second, at, seconds=price or mode_price(mode))
