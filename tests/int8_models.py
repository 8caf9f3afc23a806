"""A small decoder for tests of int8 weights and states."""

import regard as rg


def nbytes(module):
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def decoder(**changes):
    sizes = {"vocabulary_size": 97, "embedding_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return rg.Decoder(rg.DecoderConfig(**{**sizes, "context_length": 64, **changes})).eval()
