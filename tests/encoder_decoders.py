"""Encoder-decoders, tokens and masks for their tests."""

import torch

from regard.models.transformer import Transformer

SIZES = {"vocabulary_size": 60, "embedding_dim": 24, "num_layers": 2, "num_heads": 4}


def build(config):
    """A model in float64 whose every parameter matters."""
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(*shape, below=50):
    return torch.randint(2, below, shape)


def real(shape, lengths, side):
    """Which tokens are real, (B, T), for rows of some lengths padded on a side."""
    place = torch.arange(shape[1])
    counts = torch.tensor(lengths)[:, None]
    return place < counts if side == "right" else place >= shape[1] - counts


def close(actual, expected, most=1e-10):
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max().item()
    assert error < most, error
