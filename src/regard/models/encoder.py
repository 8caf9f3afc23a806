"""Encoders: each token sees all others. BERT's form and ALBERT's.

    x = norm(embedding(tokens) + segment(segments) + positions(place))     [· W, from a narrower embedding: ALBERT]
    x = norm(x + attention(x));  x = norm(x + network(x))                  for each layer, or the same layer L times

Heads, where they exist: the words under masks, whether the second sentence follows the first, whether it is the first
one inverted, classes of a sequence; and a sentence's embedding, pooled from its tokens. A padded batch computes only
its real tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.calls.choice import refusal
from regard.core.masks import Mask, as_mask, global_tokens, window
from regard.core.masks.structure import padding_between, structure_of
from regard.models.base import TextModel, check_length, check_tokens
from regard.models.config import TextConfig, block_config, check_class_names
from regard.models.layers.attention import AnyMask, as_mechanism
from regard.models.layers.block import Stack
from regard.models.layers.linear import Linear, linear
from regard.models.layers.network import ACTIVATIONS, norm
from regard.models.layers.streaming import places
from regard.models.padded_rows import pad_rows
from regard.models.summary import Part, children, products, size, stack_part


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextConfig):
    """An encoder. The defaults are BERT's form; `EncoderConfig.albert(…)` shares one block and narrows the embedding.

    >>> import regard as rg
    >>> rg.EncoderConfig.albert(vocabulary_size=30, embedding_dim=16, num_layers=4, num_heads=2).num_shared
    1
    """

    embedding_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    """Of the position-wise network; 4 · embedding_dim if not given."""
    factor_dim: int | None = None
    """Width of the embedding table where it is narrower than the model (ALBERT)."""
    num_shared: int | None = None
    """How many different blocks there are; one for each layer if not given."""
    context_length: int = 512
    window: int | None = None
    """How many tokens each sees before it and after it; the first token sees all and is seen by all."""
    num_segments: int = 2
    norm: str = "layer"
    norm_epsilon: float = 1e-12
    pre_norm: bool = False
    activation: str = "gelu"
    pooler: bool = False
    """Whether the first token has a layer of its own, on which the sequence's heads stand."""
    masked_words: bool = False
    next_sentence: bool = False
    inverted_sentence: bool = False
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    """What the classes are called, if anyone said so."""
    tied: bool = True
    """Whether the words under masks are scored by the embedding."""
    pooling: tuple[str, ...] = ("mean",)
    """What `embed` makes of a text's hidden states, a key of POOLINGS; several are concatenated."""
    normalized: bool = True
    """Whether `embed` gives vectors of length 1."""
    text_length: int | None = None
    """Of how many tokens `embed` reads; longer texts are cut. If not given, texts beyond the context are refused."""
    text_prefix: str = ""
    """What `embed` puts before each text."""
    prefix_pooled: bool = True
    """Whether the prefix's tokens are pooled too; they are read in any case."""

    @classmethod
    def bert(cls, **changes: Any) -> "EncoderConfig":
        """BERT's form as it is pre-trained: words under masks and the next sentence."""
        return cls(**{"pooler": True, "masked_words": True, "next_sentence": True, **changes})

    @classmethod
    def albert(cls, **changes: Any) -> "EncoderConfig":
        """ALBERT's form: one block for all layers, a narrow embedding."""
        return cls(**{"num_shared": 1, "factor_dim": 128, "activation": "gelu_tanh", **changes})

    def explicit(self) -> "EncoderConfig":
        """The same config with the sizes written out that follow from others if they are not given."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            hidden_dim=self.hidden_dim or 4 * self.embedding_dim,
            num_shared=self.num_shared or self.num_layers or None,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.next_sentence or self.inverted_sentence or self.num_classes) and not self.pooler:
            raise ValueError("pooler: expected True where there are heads for the whole sequence, got False")
        check_class_names(self.class_names, self.num_classes)
        if not self.pooling or not set(self.pooling) <= POOLINGS.keys():
            raise ValueError(f"pooling: expected some of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if self.text_length is not None and self.text_length > self.context_length:
            raise ValueError(
                f"text_length: expected at most context_length = {self.context_length}, got {self.text_length}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1 token, got {self.window}")
        if self.window is not None and refusal(as_mechanism(self.mechanism), window(before=1)) is not None:
            raise ValueError(f"window: expected none with {self.mechanism!r}, which takes no window, got {self.window}")


class Encoder(TextModel):
    """An encoder: `encoder(tokens, segments=None, mask=None)` gives hidden states, (B, T, E).

    >>> import regard as rg, torch
    >>> model = rg.Encoder(rg.EncoderConfig.bert(vocabulary_size=30, embedding_dim=16, num_layers=2, num_heads=4))
    >>> hidden = model(torch.randint(30, (2, 6)), mask=rg.padding([6, 4]))
    >>> hidden.shape, model.masked_words(hidden).shape, model.next_sentence(hidden).shape
    (torch.Size([2, 6, 16]), torch.Size([2, 6, 30]), torch.Size([2, 2]))
    """

    noun = "an encoder"
    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width, narrow = config.embedding_dim, config.factor_dim or config.embedding_dim
        self.embedding = nn.Embedding(config.vocabulary_size, narrow)
        self.positions = nn.Embedding(config.context_length, narrow)
        if config.num_segments:
            self.segments = nn.Embedding(config.num_segments, narrow)
        self.embedding_norm = norm(config.norm, narrow, config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)
        if config.factor_dim is not None:
            self.widen = Linear(narrow, width)
        self.stack = Stack(block_config(config), config.num_layers, num_shared=config.num_shared)
        if config.pooler:
            self.pooler = Linear(width, width)
        if config.masked_words:
            self.words = _Words(config, narrow)
        if config.next_sentence:
            self.order = Linear(width, 2)
        if config.inverted_sentence:
            self.inversion = Linear(width, 2)
        if config.num_classes:
            self.classes = Linear(width, config.num_classes)
        self.initialise()

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "B T"] | None = None, mask: AnyMask = None
    ) -> Float[Tensor, "B T E"]:
        """Hidden states; exactly 0 where `mask` has padding. `segments` (0 or 1) tells two sentences apart."""
        check_tokens("tokens", tokens, self.config.vocabulary_size)
        check_length("tokens", tokens.shape[1], self.config.context_length)
        rule = as_mask(mask)
        x = self.embedding(tokens)
        if segments is not None:
            if not self.config.num_segments:
                raise ValueError("segments: expected none, the model tells no sentences apart, got some")
            check_tokens("segments", segments, self.config.num_segments)
            if segments.shape != tokens.shape:
                raise ValueError(f"segments: expected one a token, {tuple(tokens.shape)}, got {tuple(segments.shape)}")
        if self.config.num_segments:
            segments = torch.zeros_like(tokens) if segments is None else segments
            x = x + self.segments(segments)
        x = self.dropout(self.embedding_norm(x + self.positions(places(tokens, rule))))
        if self.config.factor_dim is not None:
            x = self.widen(x)
        hidden, _ = self.stack(x, self.sight(tokens.shape[1], rule))
        return hidden

    def sight(self, length: int, mask: AnyMask = None) -> Mask | None:
        """What the tokens see: `mask` and, where the model has one, its window and the first token of each row.

        >>> import regard as rg
        >>> sizes = {"vocabulary_size": 9, "embedding_dim": 4, "num_layers": 1, "num_heads": 1}
        >>> print(rg.Encoder(rg.EncoderConfig(**sizes, window=1)).sight(5).draw(5))
        ■ ■ ■ ■ ■
        ■ ■ ■ · ·
        ■ ■ ■ ■ ·
        ■ · ■ ■ ■
        ■ · · ■ ■
        """
        rule, size = as_mask(mask), self.config.window
        if size is None:
            return rule
        found = padding_between(rule, 0, length, length)
        near: Mask = window(before=size, after=size)
        if found is None or (found.rows is not None and all(start == 0 for start, _ in found.rows)):
            near = near | global_tokens(1)
        else:  # rows padded on the left begin elsewhere
            first = found.valid(length, self.device).long().argmax(-1)
            near = near | (lambda b, h, q, k: (q == first[b]) | (k == first[b]))
        return near if rule is None else near & rule

    def masked_words(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"]:
        """Logits of the word at each place."""
        self._has("masked_words")
        return self.words(hidden, self.embedding.weight)

    def next_sentence(self, hidden: Float[Tensor, "B T E"], mask: AnyMask = None) -> Float[Tensor, "B 2"]:
        """Logits of "the second sentence follows" and "it does not"; for ALBERT, of the right order and the wrong."""
        self._has("next_sentence")
        return self.order(self.pooled(hidden, mask))

    def inverted_sentence(self, hidden: Float[Tensor, "B T E"], mask: AnyMask = None) -> Float[Tensor, "B 2"]:
        """Logits of "the second sentence is the first one inverted" and "it is not"."""
        self._has("inverted_sentence")
        return self.inversion(self.pooled(hidden, mask))

    def classify(self, hidden: Float[Tensor, "B T E"], mask: AnyMask = None) -> Float[Tensor, "B D"]:
        """Logits of the classes of each sequence."""
        self._has("num_classes")
        return self.classes(self.dropout(self.pooled(hidden, mask)))

    def pooled(self, hidden: Float[Tensor, "B T E"], mask: AnyMask = None) -> Float[Tensor, "B E"]:
        """The first token, through its own layer: the first real one, where `mask` says that rows are padded."""
        self._has("pooler")
        found = padding_between(as_mask(mask), 0, hidden.shape[1], hidden.shape[1])
        if found is None:
            return torch.tanh(self.pooler(hidden[:, 0]))
        first = found.valid(hidden.shape[1], hidden.device).long().argmax(-1)
        return torch.tanh(self.pooler(hidden[torch.arange(hidden.shape[0], device=hidden.device), first]))

    def embed(
        self, texts: Sequence[str], *, normalize: bool | None = None, batch_size: int = 32
    ) -> Float[Tensor, "B D"]:
        """Embeddings of sentences: their tokens' hidden states, pooled as the config says.

        That is the mean, of length 1, unless a checkpoint (a sentence-transformers folder) says otherwise. `normalize`
        overrules whether the length is 1.
        """
        config = self.config
        skipped = 0 if config.prefix_pooled else self._prefix_tokens()
        vectors = self._of_texts(
            texts,
            batch_size,
            lambda hidden, mask: pool(hidden, mask, config.pooling, skipped),
            config.embedding_dim * len(config.pooling),
            config.text_length,
            config.text_prefix,
        )
        return F.normalize(vectors, dim=-1) if (config.normalized if normalize is None else normalize) else vectors

    def probabilities(self, texts: Sequence[str], *, batch_size: int = 32) -> Float[Tensor, "B D"]:
        """How likely each class is for each text. Of longer texts than the model's context, the beginning counts."""
        self._has("num_classes")
        logits = self._of_texts(texts, batch_size, self.classify, self.config.num_classes, self.config.context_length)
        return logits.float().softmax(-1)

    def _of_texts(
        self,
        texts: Sequence[str],
        batch_size: int,
        head: Callable[[Tensor, Mask], Tensor],
        size: int,
        length: int | None = None,
        prefix: str = "",
    ) -> Tensor:
        """What a head makes of each text behind a prefix; with `length`, of so many tokens."""
        if self.tokenizer is None:
            raise ValueError("model: expected one with a tokenizer to read texts, got none")
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ValueError(f"texts: expected a list of texts, got {texts!r:.80}")
        texts = list(texts)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"texts: expected a list of texts, got {texts!r:.80}")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size: expected a whole number of at least 1, got {batch_size!r}")
        rows = [self.tokenizer.encode(prefix + text, length=length) for text in texts]
        # Texts of like length go together, so that little is padding.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        found = torch.empty(len(rows), size, dtype=self.dtype, device=self.device)
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(order), batch_size):
                    chosen = order[start : start + batch_size]
                    tokens, mask, _ = pad_rows([rows[index] for index in chosen])
                    found[chosen] = head(self(tokens.to(self.device), mask=mask), mask)
        finally:
            self.train(training)
        return found

    def _prefix_tokens(self) -> int:
        """How many tokens come before a text's own: the prefix's, and those that the tokenizer puts before any text."""
        if self.tokenizer is None or not self.config.text_prefix:
            return 0
        tokens = self.tokenizer.encode(self.config.text_prefix)
        ended = tokens and tokens[-1] in (self.tokenizer.separator, self.tokenizer.eos)
        return len(tokens) - bool(ended)

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.stack.blocks)

    def parts(self, length: int) -> Iterator[Part]:
        """Embeddings, the stack and the heads, for one token of a text of `length`."""
        counted = {
            # A head that reads one token of each sequence costs next to nothing per token.
            name: Part(name=name, parameters=size(head), flops=0)
            for name, head in self.named_children()
            if name in ("pooler", "order", "inversion", "classes")
        }
        if self.config.masked_words:
            table = 2 * self.embedding.weight.numel() if self.config.tied else 0
            counted["words"] = Part(name="words", parameters=size(self.words), flops=products(self.words) + table)
        counted["stack"] = stack_part("stack", self.stack, length, self.dtype, mask=self.sight(length))
        return children(self, counted)

    def _has(self, head: str) -> None:
        if not getattr(self.config, head):
            raise ValueError(f"model: expected one with {head} in its config, got {self.config}")


class _Words(nn.Module):
    """Scores every word at every place: a layer, a norm, and the embedding or a table of its own."""

    def __init__(self, config: EncoderConfig, narrow: int) -> None:
        super().__init__()
        self.dense = Linear(config.embedding_dim, narrow)
        self.activation = ACTIVATIONS[config.activation].function
        self.norm = norm(config.norm, narrow, config.norm_epsilon)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary_size))
        self.table = None if config.tied else Linear(narrow, config.vocabulary_size, bias=False)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        hidden = self.norm(self.activation(self.dense(hidden)))
        return linear(hidden, embedding if self.table is None else self.table.weight, self.bias)


def pool(
    hidden: Float[Tensor, "B T E"], mask: AnyMask = None, modes: Sequence[str] = ("mean",), skipped: int = 0
) -> Float[Tensor, "B D"]:
    """One vector a sequence from its real tokens but the first `skipped`; 0 for a sequence without any.

    `modes` are keys of POOLINGS; the vectors of several are concatenated.

    >>> import regard as rg, torch
    >>> from regard.models.encoder import pool
    >>> pool(torch.tensor([[[1.0], [3.0], [9.0]]]), rg.padding([2]), ("mean", "max", "first"))
    tensor([[2., 3., 1.]])
    """
    length = hidden.shape[1]
    if not length:
        return hidden.new_zeros(hidden.shape[0], hidden.shape[2] * len(modes))
    rule = as_mask(mask)
    valid = None if rule is None else structure_of(rule, length, length).valid(length, hidden.device)
    if valid is None:
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    places = valid.cumsum(-1) * valid
    # Sums of half precision are accumulated and divided in float32.
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    counted = places > skipped
    parts = [POOLINGS[mode](wide, counted[..., None].to(wide), places[..., None].to(wide)) for mode in modes]
    return torch.cat(parts, -1).masked_fill(~counted.any(-1, keepdim=True), 0).to(hidden.dtype)


def _sum(hidden: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum; hidden states without a weight may be anything."""
    return (hidden * weights).masked_fill(weights == 0, 0).sum(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "first": lambda x, counted, places: _sum(x, counted * (counted.cumsum(1) == 1)),
    "last": lambda x, counted, places: _sum(x, counted * (places == places.amax(1, keepdim=True))),
    "max": lambda x, counted, places: x.masked_fill(counted == 0, -torch.inf).amax(1),
    "mean": lambda x, counted, places: _sum(x, counted) / counted.sum(1),
    "mean_sqrt_length": lambda x, counted, places: _sum(x, counted) / counted.sum(1).sqrt(),
    "weighted_mean": lambda x, counted, places: _sum(x, places * counted) / (places * counted).sum(1),
}
"""How hidden states (B, T, E) become one vector each, given which tokens count (0 or 1) and their places (from 1; 0 for
padding), both (B, T, 1). `weighted_mean` weighs tokens by their places."""
