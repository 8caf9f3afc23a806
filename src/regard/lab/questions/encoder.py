"""The encoder: what goes in, the parts of a layer, what comes out."""

from collections.abc import Mapping

import torch
from torch import nn

import regard as rg
from regard.lab.answers import entries, formula, letters, unfilled
from regard.lab.question import question
from regard.lab.questions.inputs import numbers


@question(
    "encoder.1",
    tasks=("001.B1", "001.B3"),
    text=(
        "An encoder with `embedding_dim = 32` reads 2 French sentences of 5 tokens. What are the shapes of the "
        "model's input, of the input of its first layer, and of the output of its last layer?"
    ),
    begin='encoder_1 = {"input": ..., "first layer": ..., "output": ...}',
    solution='{"input": (2, 5), "first layer": (2, 5, 32), "output": (2, 5, 32)}',
)
def _encoder(answer: object) -> str:
    model, tokens = _model(), torch.zeros(2, 5, dtype=torch.long)
    shapes = {"input": tokens, "first layer": model.embedding(tokens), "output": model(tokens)}
    return entries(
        answer,
        {name: tuple(value.shape) for name, value in shapes.items()},
        {
            "input": {"the model embeds; what goes in are numbers of tokens": (2, 5, 32)},
            "first layer": {
                "tokens come before the embedding's axis here": (2, 32, 5),
                "an embedding is a vector for each token": (2, 5),
            },
            "output": {"one vector for each token comes out, not one for each sentence": (2, 32)},
        },
    )


def _model() -> rg.Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = rg.EncoderConfig(vocabulary_size=30, embedding_dim=32, num_layers=1, num_heads=4)
        return rg.Encoder(config).eval()


@question(
    "encoder.2",
    tasks=("001.B2", "002.1.4d"),
    text=(
        "Of which two parts is a layer of the encoder made (besides norms and residual connections)?\n\n"
        "a) multi-head attention\n"
        "b) a convolution over tokens\n"
        "c) a recurrent layer\n"
        "d) a position-wise network of two linear layers"
    ),
    solution='"ad"',
)
def _parts(answer: object) -> str:
    from regard.models.layers.network import PositionWise

    classes = {"a": rg.MultiHeadAttention, "b": nn.Conv1d, "c": nn.RNNBase, "d": PositionWise}
    modules = list(_model().modules())
    right = "".join(letter for letter, kind in classes.items() if any(isinstance(part, kind) for part in modules))
    return letters(
        answer,
        right,
        "abcd",
        {
            "a": "it is the part in which tokens meet",
            "b": "tokens meet in attention",
            "c": "the encoder reads all tokens at once",
            "d": "after tokens have met, each is worked on by itself",
        },
    )


@question(
    "encoder.3",
    tasks=("001.B2a", "002.1.4d"),
    text=(
        "One token of the input is changed. Do the outputs at **other** positions change, of multi-head attention, and "
        "of the position-wise network? `True` or `False`. And how many weights and biases does the network have, from "
        "$e$ numbers to $f$ and back? A function, `lambda e, f: …`."
    ),
    begin='encoder_3 = {"attention": ..., "network": ..., "parameters": ...}',
    solution='{"attention": True, "network": False, "parameters": lambda e, f: 2 * e * f + e + f}',
    points=2,
)
def _meeting(answer: object) -> str:
    from regard.models.layers.network import PositionWise

    if fault := unfilled(answer, ("attention", "network", "parameters")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    block = next(part for part in _model().modules() if hasattr(part, "network") and hasattr(part, "attention"))
    x = numbers(1, 5, 32)
    changed = x.clone()
    changed[0, 2] += 1
    moves: dict[str, object] = {
        name: not torch.allclose(part(x)[0, :2], part(changed)[0, :2], atol=1e-6)
        for name, part in ((name, block.get_submodule(name)) for name in ("attention", "network"))
    }
    fault = entries({name: values[name] for name in moves}, moves)
    of_network = formula(
        values["parameters"],
        lambda e, f: sum(p.numel() for p in PositionWise(int(e), int(f)).parameters()),
        [(8, 32), (3, 5)],
        {
            "biases count, too": lambda e, f: 2 * e * f,
            "there is a second layer, back to e numbers": lambda e, f: e * f + f,
            "each layer has as many biases as outputs": lambda e, f: 2 * e * f + 2 * f,
        },
        tolerance=0,
    )
    return "; ".join(filter(None, [fault, f"parameters: {of_network}" if of_network else ""]))
