"""Small models of ours for tests of what a trace has besides weights, and what it should say of their logits."""

import pytest
import torch

import regard as rg
from regard.inference.trace import trace
from traced_models import EVERYTHING

WORDS = [f"w{number}" for number in range(40)]
FORM = {"vocabulary_size": 40, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}


def ours(**more):
    return rg.Decoder(rg.DecoderConfig(**FORM, **more)).eval()


def with_tokenizer(model):
    model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", *WORDS[1:]])
    return model


def likeliest(logits, k):
    largest = logits.softmax(-1).topk(k)
    return list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))


def same(top, expected):
    assert [prediction.id for prediction in top] == [number for number, _ in expected]
    assert [prediction.probability for prediction in top] == pytest.approx([share for _, share in expected], abs=1e-5)


STAGES = {"embedding_dim": (8, 16), "num_layers": (1, 1), "num_heads": (2, 4), "num_groups": (2, 4)}
PATCHES = {"patch_size": (3, 2), "patch_stride": (2, 2), "patch_padding": (1, 0), "norm_first": (False, True)}


def davit():
    return rg.DaViT(rg.DaViTConfig(**STAGES, **PATCHES, window_size=3, num_classes=3)).eval()


def traced_davit(**more):
    model, images = davit(), torch.randn(2, 3, 16, 24)
    with trace(model, keep=(*EVERYTHING, "predictions"), **more) as traced:
        model(images)
    return model, images, traced
