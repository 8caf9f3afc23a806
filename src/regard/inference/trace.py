"""Look inside a model's attention: record queries, keys, values, scores and weights of every layer and head.

Works on our models, with any mechanism, and on Hugging Face models, without changes to the model. A trace does not
change the output: for our models it is bit for bit the same, for Hugging Face models it is that of eager attention. A
trace is saved as one file. `rollout`, `value_weighted` and `patterns` analyse it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from regard.inference.tracing import huggingface, ours
from regard.inference.tracing.analysis import rollout, value_weighted
from regard.inference.tracing.definition import Definition
from regard.inference.tracing.gather import Chosen, Readers, Recorder
from regard.inference.tracing.patterns import HeadPatterns, Patterns, patterns
from regard.inference.tracing.predictions import Prediction, Predictions, Spelling
from regard.inference.tracing.record import KEEP, Layers, Tokens, Trace, TracedLayer
from regard.inference.tracing.targets import word_ids

__all__ = [
    "Definition",
    "HeadPatterns",
    "Layers",
    "Patterns",
    "Prediction",
    "Predictions",
    "Trace",
    "TracedLayer",
    "patterns",
    "rollout",
    "trace",
    "value_weighted",
    "word_ids",
]


@contextmanager
def trace(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    keep: Sequence[str] = ("weights", "queries", "keys", "values", "predictions"),
    tokens: Tokens | None = None,
    source_tokens: Tokens | None = None,
) -> Iterator[Trace]:
    """Record a model's attention inside a `with` block.

    `layers` are numbered in the order in which attention runs in one forward pass, cross-attention included. `rows` are
    positions of queries; negative ones count from the end of each pass, so `rows=[-1]` while generating records every
    new token. Our models compute weights only for what is chosen.

    `keep` may also name "scores", and "outputs", what each head gives (`layer.outputs`, `layer.contributions()`).
    "predictions" are the likeliest tokens at each recorded row, or classes: `trace.top()`. `tokens` are their strings,
    and `source_tokens` those of an encoder-decoder's source, by default those of the input where the model has a
    tokenizer (`model.tokenizer`).

    Passes that continue from a KV cache (`generate`, `extend`) are joined: they add rows and keys, with weights of 0 on
    keys that did not exist yet. Any other pass, such as one with another input or with reordered beams, replaces what
    was recorded. Tensors are detached. In training, weights are those before dropout.

    A Hugging Face model is set to eager attention meanwhile, for all threads: two threads on one such model at the same
    time are not supported.

    >>> import regard as rg, torch
    >>> layer = rg.MultiHeadAttention(16, 4, num_kv_heads=2, mechanism=rg.Quadratic())
    >>> x = torch.randn(1, 6, 16)
    >>> with rg.trace(layer, rows=[-1], tokens="a b c d e f".split()) as trace:
    ...     y = layer(x, mask=rg.causal)
    >>> trace.layers[0].weights.shape, trace.layers[0].keys.shape, torch.equal(y, layer(x, mask=rg.causal))
    (torch.Size([1, 4, 1, 6]), torch.Size([1, 2, 6, 4]), True)
    """
    chosen = _chosen(layers, heads, rows, keep)
    attentions, theirs, starts = attentions_of(model, "trace the model inside it")
    both = {module: name for name, module in model.named_modules() if module in attentions or module in theirs}
    traced = Trace(tokens=tokens, source_tokens=source_tokens, model=type(model).__name__)
    recorder = Recorder(traced, chosen, both, _readers(model, bool(theirs)))
    with ExitStack() as stack:
        for handle in recorder.watch(starts):
            stack.callback(handle.remove)
        if attentions:
            for handle in ours.Adapter(recorder, model).attach(model):
                stack.callback(handle.remove)
        if theirs:
            adapter = huggingface.Adapter(recorder, model, theirs)
            for handle in adapter.attach():
                stack.callback(handle.remove)
            stack.enter_context(huggingface.eager(model, adapter.attentions, adapter))
        try:
            yield traced
        finally:
            recorder.finish()
    recorder.check()


def attentions_of(model: nn.Module, instead: str) -> tuple[dict[nn.Module, str], dict[nn.Module, str], list[nn.Module]]:
    """The attention modules of our layers in a model and those of Hugging Face's, with their paths, and the modules at
    which a pass begins. `instead` says what to do with a compiled model, which is refused.

    >>> import regard as rg
    >>> from regard.inference.trace import attentions_of
    >>> layer = rg.MultiHeadAttention(embedding_dim=16, num_heads=2)
    >>> [len(part) for part in attentions_of(layer, "trace the model inside it")]
    [1, 0, 1]
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"model: expected a model that is not compiled, got a compiled one; {instead}")
    attentions, starts = ours.find(model)
    theirs, their_starts = huggingface.find(model)
    if not attentions and not theirs:
        raise ValueError(
            f"model: expected attention of regard's layers or of a Hugging Face model, got {type(model).__name__}, "
            "which has neither"
        )
    return attentions, theirs, list(dict.fromkeys([model, *starts, *their_starts]))


def _readers(model: nn.Module, theirs: bool) -> Readers:
    """What our and Hugging Face's models in a module read and predict."""
    first = ours.readers(model)
    other = huggingface.readers(model) if theirs else Readers()
    return Readers(
        spell=_spelling(model),
        name_classes=first.name_classes or other.name_classes,
        num_classes=other.num_classes,
        logits={**first.logits, **other.logits},
        heads=first.heads,
        sources=first.sources | other.sources,
    )


def _spelling(model: nn.Module) -> Spelling | None:
    """The strings of token ids by the tokenizer of a model, of our kind or Hugging Face's; None without one."""
    for module in model.modules():
        tokenizer: Any = getattr(module, "tokenizer", None)
        spell = getattr(tokenizer, "tokens", None) or getattr(tokenizer, "convert_ids_to_tokens", None)
        if callable(spell):
            return spell
    return None


def _chosen(
    layers: Sequence[int] | None, heads: Sequence[int] | None, rows: Sequence[int] | None, keep: Sequence[str]
) -> Chosen:
    if isinstance(keep, str) or not keep or not set(keep) <= {*KEEP, "predictions"}:
        raise ValueError(f"keep: expected some of {', '.join(KEEP)} and predictions, got {keep!r}")
    return Chosen(
        None if layers is None else frozenset(chosen_numbers("layers", layers, 0)),
        None if heads is None else chosen_numbers("heads", heads),
        None if rows is None else chosen_numbers("rows", rows),
        frozenset(keep),
    )


def chosen_numbers(name: str, numbers: Sequence[int], least: int | None = None) -> tuple[int, ...]:
    """Numbers of layers, heads or positions; ValueError for anything else.

    >>> from regard.inference.trace import chosen_numbers
    >>> chosen_numbers("heads", [0, -1])
    (0, -1)
    """
    whole = isinstance(numbers, Sequence) and all(type(number) is int for number in numbers)
    if not whole or not numbers or (least is not None and min(numbers) < least):
        above = "" if least is None else f" from {least}"
        raise ValueError(f"{name}: expected a list of whole numbers{above}, got {numbers!r}")
    return tuple(numbers)
