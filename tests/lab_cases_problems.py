"""Experiments on document 004 and on cost: verdicts, and what turns them."""

from dataclasses import replace

import regard as rg
from lab_case import LabCase
from regard.core.families import features as features_file
from regard.core.masks.positions import Window2d
from regard.lab.experiment import Check
from regard.lab.experiments import channels as channels_file
from regard.lab.experiments import counts as counts_file
from regard.lab.experiments import heads_cost as heads_cost_file
from regard.lab.experiments import linear_cost as linear_cost_file
from regard.lab.experiments import pretraining as pretraining_file
from regard.lab.experiments import recurrence as recurrence_file
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


def _outputs_again(patch):
    extend = ATTENTION.extend
    patch.setattr(ATTENTION, "extend", lambda layer, x, state, mask: (2 * extend(layer, x, state, mask)[0], state))


def _rows_only(patch):
    patch.setattr(Window2d, "__call__", lambda mask, b, h, q, k: (q // mask.grid[1] - k // mask.grid[1]).abs() <= 1)


def _channels_as_patches(patch):
    patch.setattr(channels_file, "CHANNEL", rg.Softmax())


def _other_constant(patch):
    patch.setattr(rg.Quadratic, "coefficients", lambda kernel, length: (4.0, 4.0, 1.0))


def _projected_twice(patch):
    remember = ATTENTION.remember
    patch.setattr(ATTENTION, "remember", lambda layer, *x: (remember(layer, *x), remember(layer, *x))[1])


def _sums_without_values(patch):
    patch.setattr(linear_cost_file, "sums_flops", lambda n, c, m: 4 * n * c)


def _no_hidden_layer(patch):
    patch.setattr(rg.VisionTransformer, "predict", lambda model, features: model.head(features[:, 0]))


def _no_sums(patch):
    patch.setattr(features_file, "MOST_FEATURES", 1)


def _times_decide(patch):
    patch.setattr(recurrence_file, "Check", lambda **values: Check(**{**values, "timed": False}))


def _one_step(patch):
    trained = pretraining_file.train
    patch.setattr(pretraining_file, "train", lambda task, settings, folder, **options: trained(
        task, replace(settings, steps=1, warmup=1), folder, **options))  # fmt: skip


EXPECTED = counts_file.expected

CASES: dict[str, LabCase] = {
    "counts": LabCase(verdict="does not hold", flip=_printed_counts, quick={"dims": (4, 8), "lengths": (4, 6)}),
    "stacking": LabCase(verdict="holds", flip=_narrow_output, quick={"depth_limit": 3}),
    "heads_cost": LabCase(
        verdict="does not hold", flip=_printed_weights, quick={"dim": 16, "length": 8, "heads": (1, 2, 4)}
    ),
    "equivariance": LabCase(verdict="holds", flip=_ordered_softmax, quick={"length": 8}),
    "saturated_softmax": LabCase(verdict="does not hold", flip=_no_logarithms),
    "new_token": LabCase(verdict="does not hold", flip=_outputs_again, quick={"lengths": (4, 16), "head_length": 4}),
    "local_patches": LabCase(verdict="holds", flip=_rows_only, quick={"sides": (3, 5), "radius": 1}),
    "channels": LabCase(
        verdict="holds under a condition",
        flip=_channels_as_patches,
        quick={"side": 4, "dim": 32, "groups": (1, 2, 4)},
    ),
    "linear_cost": LabCase(
        verdict="does not hold",
        flip=_sums_without_values,
        quick={"dims": (8, 16), "length": 600, "copies": (1, 2), "value_lengths": (4, 8)},
    ),
    "quadratic_features": LabCase(verdict="holds", flip=_other_constant, quick={"dims": (1, 3, 8), "length": 40}),
    "bottleneck": LabCase(
        verdict="holds",
        flip=_projected_twice,
        quick={"targets": (4,), "sources": (4, 8), "head_lengths": (4,)},
    ),
    "complexity": LabCase(
        verdict="holds", flip=_no_sums, quick={"dim": 4, "dims": (4, 8), "lengths": (64, 256), "rounds": 1}
    ),
    "recurrence": LabCase(
        verdict="measured here",
        flip=_times_decide,
        quick={"lengths": (4, 8), "head_length": 4, "rounds": 1},
    ),
    # Random, but the encoder has to be trained each time: benchmarks/lab_seeds.py runs ten seeds.
    "pretraining": LabCase(
        verdict="holds",
        flip=_one_step,
        quick={"steps": 250, "learning_rate": 6e-3, "evaluations": 1},
    ),
    "patches": LabCase(verdict="holds", flip=_no_hidden_layer, quick={"grid": 2, "patch_size": 2, "num_layers": 1}),
}
