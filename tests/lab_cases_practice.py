"""Experiments on document 003 and on trained models: verdicts, and what turns them."""

import regard as rg
from lab_case import LabCase
from regard.core.families.scores import ScoreMechanism
from regard.lab.experiments import printed_heads as printed_heads_file


def _soft_argmax(patch):
    patch.setattr(rg.Softmax, "scale", lambda self, qk_length: min(self._beta(qk_length), 10.0))


def _average_for_the_blind(patch):
    patch.setattr(ScoreMechanism, "weigh", lambda self, q, k, visible, bias=None: (
        printed_heads_file.printed_weights(q, k, visible)))  # fmt: skip


def _heads_in_reverse(patch):
    patch.setattr(rg.MultiHeadAttention, "combine_heads", lambda self, x: x.flip(1).transpose(1, 2).flatten(2))


def _scale_of_another_length(patch):
    patch.setattr(rg.Softmax, "_beta", lambda self, qk_length: 0.9 * qk_length**-0.5)


def _forgotten_key(patch):
    patch.setattr(rg.Work, "keys_read", property(lambda self: self.batch * (self.key_length - 1)))


def _plain_division(patch):
    patch.setattr(rg.Mechanism, "normalise", lambda self, similar: similar / similar.sum(-1, keepdim=True))


def _wider_window(patch):
    patch.setattr(rg.Window, "__post_init__", lambda self: object.__setattr__(self, "before", self.before + 1))


def _uniform(patch):
    patch.setattr(rg.Softmax, "_beta", lambda self, qk_length: 0.0)


CASES: dict[str, LabCase] = {
    # Random, but the twins take seconds: benchmarks/lab_seeds.py runs ten seeds.
    "head_patterns": LabCase(verdict="holds", flip=_uniform, quick={"layers": 3, "words": 12}),
    "sinks": LabCase(verdict="holds", flip=_uniform, quick={"tokens": 8, "texts": 1}),
    "atom_map": LabCase(verdict="holds", flip=_uniform, quick={"reactions": 2, "twins": 4}, statistical=True),
    "argmax": LabCase(verdict="holds", flip=_soft_argmax, quick={"betas": (0.1, 1.0), "queries": 8}),
    "printed_heads": LabCase(
        verdict="does not hold", flip=_average_for_the_blind, quick={"heads": 2, "tokens": 5, "padding": 2}
    ),
    "value_length": LabCase(verdict="holds under a condition", flip=_heads_in_reverse, quick={"heads": 2, "d": 4}),
    "printed_decoding": LabCase(
        verdict="does not hold", flip=_scale_of_another_length, quick={"heads": 2, "d": 4, "tokens": 6}
    ),
    "intensity": LabCase(
        verdict="holds", flip=_forgotten_key, quick={"lengths": (4, 8), "heads": 2, "k": 8, "batch": 1}
    ),
    "denominators": LabCase(
        verdict="holds under a condition",
        flip=_plain_division,
        quick={"keys": (1, 2), "d": 4, "samples": 10_000},
        statistical=True,
    ),
    "receptive_field": LabCase(
        verdict="holds", flip=_wider_window, quick={"windows": (1, 3), "layers": 2, "tokens": 8}
    ),
}
