"""What a server computes at most: checked before any work, by the sizes of the model and of its input."""

from regard.explorer.subject import Subject, of_ids
from regard.inference.trace import trace
from regard.models.base import ImageModel, TextModel

MOST_TOKENS = 2048
"""The most tokens of a sequence."""
MOST_WEIGHTS = 320_000_000
"""The most weights of a pass, layers · heads · T · S: 1.3 GB."""
MOST_BYTES = 2 * 2**30
"""The most memory of all snapshots but the two newest."""
MOST_MODELS = 3
"""Models in memory."""


def check_size(subject: Subject) -> Subject:
    """The subject, if its pass is not too large; ValueError otherwise."""
    longest = max(len(subject.tokens), len(subject.sources or ()))
    if longest > MOST_TOKENS:
        raise ValueError(f"input: expected at most {MOST_TOKENS:,} tokens, got {longest:,}")
    weights = count_weights(subject)
    if weights > MOST_WEIGHTS:
        raise ValueError(
            f"input: expected at most {MOST_WEIGHTS:,} weights in all layers and heads, got {weights:,}; "
            f"{len(subject.tokens):,} tokens are too many for this model"
        )
    return subject


def count_weights(subject: Subject) -> int:
    """How many weights a pass has: counted on a sequence of one token, which costs next to nothing.

    >>> import regard as rg
    >>> from regard.explorer.subject import Text, subject_of
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=2, num_heads=4)).eval()
    >>> model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> count_weights(subject_of("mine", model, Text("a b a b")))
    128
    """
    model = subject.model
    queries, keys = len(subject.tokens), len(subject.sources or ())
    if isinstance(model, ImageModel):
        heads = sum(parameter.numel() > 0 for name, parameter in model.named_parameters() if "W_o.weight" in name)
        tokens = model.num_tokens(*subject.inputs[0].shape[2:])
        return heads * tokens * tokens
    if not isinstance(model, TextModel):
        config = getattr(model, "config", None)
        layers = getattr(config, "num_hidden_layers", 0) * (3 if subject.sources is not None else 1)
        return layers * getattr(config, "num_attention_heads", 0) * max(queries, keys) ** 2
    short = of_ids(subject.name, model, [0], None if subject.sources is None else [0])
    with trace(model, keep=("queries",)) as recorded:
        short()
    total = 0
    for layer in recorded.layers:
        heads = len(layer.heads)
        encoder = subject.sources is not None and "encoder" in layer.name.split(".")
        total += heads * (keys * keys if encoder else queries * (keys if layer.kind == "cross" else queries))
    return total
