"""Experiments on documents 000, 001 and 002: verdicts, and what turns them."""

import regard as rg
from lab_case import LabCase
from regard.lab.experiments import noise as noise_file
from regard.lab.experiments import norm_length as norm_length_file
from regard.lab.experiments import pointwise as pointwise_file
from regard.lab.experiments import scaling as scaling_file
from regard.models.layers import network, positions


def _no_scale(patch):
    patch.setattr(scaling_file, "SCALED", scaling_file.UNSCALED)


def _beta(factor):
    """Softmax with another beta than the one that it was asked for."""

    def flip(patch):
        original = rg.Softmax._beta
        patch.setattr(rg.Softmax, "_beta", lambda mechanism, length: factor * original(mechanism, length))

    return flip


def _double_first_order(patch):
    original = noise_file.expected
    patch.setattr(noise_file, "expected", lambda *values: (2 * original(*values)[0], original(*values)[1]))


def _no_output_bias(patch):
    original = pointwise_file.kernel
    patch.setattr(pointwise_file, "kernel", lambda layer: (original(layer)[0], layer.W_o.bias))


def _one_bucket_for_both_sides(patch):
    original = positions.RelativeBias.buckets
    patch.setattr(positions.RelativeBias, "buckets", lambda bias, distance: original(bias, distance.clamp(max=0)))


def _batch_norm_everywhere(patch):
    patch.setattr(network, "norm", lambda kind, dim, epsilon: network.nn.BatchNorm1d(dim, eps=epsilon))


def _no_epsilon(patch):
    original = norm_length_file.norm
    patch.setattr(norm_length_file, "norm", lambda kind, dim, epsilon: original(kind, dim, 0.0))


CASES = {
    "scaling": LabCase(verdict="holds", flip=_no_scale, quick={"dims": (4, 64), "samples": 5_000}, statistical=True),
    "norm_dependence": LabCase(verdict="holds", flip=_batch_norm_everywhere, quick={"batch": 3, "dim": 4}),
    "norm_length": LabCase(verdict="holds under a condition", flip=_no_epsilon, quick={"stds": (0.01, 1)}),
    "temperature": LabCase(verdict="holds", flip=_beta(0.9), quick={"betas": (0.1, 10), "queries": 20}),
    "noise": LabCase(
        verdict="does not hold",
        flip=_double_first_order,
        quick={"sigmas": (0.01,), "samples": 10_000},
        statistical=True,
    ),
    "key_scale": LabCase(
        verdict="holds under a condition",
        flip=_beta(0.9),
        quick={"alphas": (1.01, 2), "samples": 200},
        statistical=True,
    ),
    "orthogonal": LabCase(verdict="does not hold", flip=_beta(1000), quick={"sizes": (8,), "betas": (1.0,)}),
    "pointwise": LabCase(verdict="holds", flip=_no_output_bias, quick={"heads": (2,), "length": 4}),
    "convolution": LabCase(verdict="holds under a condition", flip=_one_bucket_for_both_sides),
}
