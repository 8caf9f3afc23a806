"""What attention costs: FLOPs, bytes, state and activation memory, as formulas that tests compare with counters.

A multiply-add is 2 FLOPs. Only contractions count; elementwise work is left out, and so are the pairs that a structured
mask hides.
"""

from regard.core.cost.counting import COUNTED, count_flops, count_formula, similarity_flops
from regard.core.cost.crossing import PRICES, Rate, crossover, mode_crossover, mode_price
from regard.core.cost.formulas import cost, key_value_bytes, layer_cost, score_cost
from regard.core.cost.own_state import own_state_cost
from regard.core.cost.units import human
from regard.core.cost.work import (
    LONGEST,
    MODES,
    Cost,
    LayerCost,
    Work,
    accumulator,
    heads_label,
    mode_work,
    with_length,
)

__all__ = [
    "COUNTED", "LONGEST", "MODES", "PRICES", "Cost", "LayerCost", "Rate", "Work", "accumulator", "cost", "count_flops",
    "count_formula", "crossover", "heads_label", "human", "key_value_bytes", "layer_cost", "mode_crossover",
    "mode_price", "mode_work", "own_state_cost", "score_cost", "similarity_flops", "with_length",
]  # fmt: skip
