"""Experiments on document 004 and on cost: verdicts, and what turns them."""

import regard as rg
from lab_case import LabCase
from regard.lab.experiments import counts as counts_file
from regard.lab.experiments import heads_cost as heads_cost_file
from regard.lab.experiments import saturated_softmax as saturated_softmax_file

ATTENTION = rg.MultiHeadAttention


def _printed_counts(patch):
    patch.setattr(counts_file, "expected", lambda d, n: dict.fromkeys(EXPECTED(d, n), 3))


def _narrow_output(patch):
    combine = ATTENTION.combine_heads
    patch.setattr(ATTENTION, "combine_heads", lambda layer, x: combine(layer, x)[..., :-1])


def _printed_weights(patch):
    patch.setattr(heads_cost_file, "weights_of_heads", lambda dim, count, size: count * size**2)


def _ordered_softmax(patch):
    patch.setattr(rg.Softmax, "ordered", True)


def _no_logarithms(patch):
    patch.setattr(saturated_softmax_file, "SOFTMAX", rg.Softmax(beta=0.0))


EXPECTED = counts_file.expected

CASES: dict[str, LabCase] = {
    "counts": LabCase(verdict="does not hold", flip=_printed_counts, quick={"dims": (4, 8), "lengths": (4, 6)}),
    "stacking": LabCase(verdict="holds", flip=_narrow_output, quick={"depth_limit": 3}),
    "heads_cost": LabCase(
        verdict="does not hold", flip=_printed_weights, quick={"dim": 16, "length": 8, "heads": (1, 2, 4)}
    ),
    "equivariance": LabCase(verdict="holds", flip=_ordered_softmax, quick={"length": 8}),
    "saturated_softmax": LabCase(verdict="does not hold", flip=_no_logarithms),
}
