"""Encoders: every token sees all others. BERT's form and ALBERT's.

    x = norm(embedding(tokens) + segment(segments) + positions(place))     [· W, from a narrower embedding: ALBERT]
    x = norm(x + attention(x));  x = norm(x + network(x))                  for each layer, or the same layer L times

Optional heads: masked words, next sentence, inverted sentence (whether the second sentence is the first one inverted),
and classes of a sequence. `embed` pools the tokens of a sentence into one vector. Padding is not computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.masks import Mask, Window, as_mask, global_tokens
from regard.core.masks.structure import padding_between, structure_of
from regard.models.base import TextModel, check_length, check_tokens
from regard.models.config import TextConfig, block_config, check_class_names, check_window, names_of_classes
from regard.models.layers.attention import AnyMask
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
    """Hidden units of the position-wise network; 4 · embedding_dim if not given."""
    factor_dim: int | None = None
    """Width of the embedding table, if it is narrower than the model (ALBERT)."""
    num_shared: int | None = None
    """How many different blocks the layers share; by default every layer has its own."""
    context_length: int = 512
    window: Window | None = None
    """The sliding window, if any; the first token sees all and is seen by all."""
    num_segments: int = 2
    norm: str = "layer"
    norm_epsilon: float = 1e-12
    pre_norm: bool = False
    activation: str = "gelu"
    pooler: bool = False
    """Whether there is a pooler: a layer on the first token, whose output the heads for whole sequences read."""
    masked_words: bool = False
    next_sentence: bool = False
    inverted_sentence: bool = False
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    """The names of the classes, if they have names."""
    tied: bool = True
    """Whether the head for masked words shares its weights with the embedding."""
    pooling: tuple[str, ...] = ("mean",)
    """How `embed` pools a text's hidden states: keys of POOLINGS, whose results are concatenated."""
    normalized: bool = True
    """Whether `embed` gives vectors of length 1."""
    text_length: int | None = None
    """`embed` truncates texts to this many tokens. If not given, texts longer than the context are refused."""
    text_prefix: str = ""
    """`embed` puts this before each text."""
    prefix_pooled: bool = True
    """Whether the prefix's tokens are pooled too; the model reads them in any case."""

    @classmethod
    def bert(cls, **changes: Any) -> "EncoderConfig":
        """BERT's form as it is pre-trained: heads for masked words and the next sentence."""
        return cls(**{"pooler": True, "masked_words": True, "next_sentence": True, **changes})

    @classmethod
    def albert(cls, **changes: Any) -> "EncoderConfig":
        """ALBERT's form: one block for all layers, a narrow embedding."""
        return cls(**{"num_shared": 1, "factor_dim": 128, "activation": "gelu_tanh", **changes})

    def explicit(self) -> "EncoderConfig":
        """The same config with every size filled in, also those that are computed from others by default."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            hidden_dim=self.hidden_dim or 4 * self.embedding_dim,
            num_shared=self.num_shared or self.num_layers or None,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.next_sentence or self.inverted_sentence or self.num_classes) and not self.pooler:
            raise ValueError("pooler: expected True, since a head reads the whole sequence, got False")
        check_class_names(self.class_names, self.num_classes)
        if not self.pooling or not set(self.pooling) <= POOLINGS.keys():
            raise ValueError(f"pooling: expected some of {', '.join(POOLINGS)}, got {self.pooling!r}")
        if self.text_length is not None and self.text_length > self.context_length:
            raise ValueError(
                f"text_length: expected at most context_length = {self.context_length}, got {self.text_length}"
            )
        check_window("window", self.window, self.mechanism)


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
        """Hidden states; exactly 0 at padding. `segments` has 0 for the first sentence and 1 for the second."""
        check_tokens("tokens", tokens, self.config.vocabulary_size)
        check_length("tokens", tokens.shape[1], self.config.context_length)
        rule = as_mask(mask)
        x = self.embedding(tokens)
        if segments is not None:
            if not self.config.num_segments:
                raise ValueError("segments: expected None, since the model has no segment embedding, got a tensor")
            check_tokens("segments", segments, self.config.num_segments)
            if segments.shape != tokens.shape:
                raise ValueError(
                    f"segments: expected one per token, {tuple(tokens.shape)}, got {tuple(segments.shape)}"
                )
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
        >>> print(rg.Encoder(rg.EncoderConfig(**sizes, window=rg.Window(1, 1))).sight(5).draw(5))
        ■ ■ ■ ■ ■
        ■ ■ ■ · ·
        ■ ■ ■ ■ ·
        ■ · ■ ■ ■
        ■ · · ■ ■
        """
        rule, window = as_mask(mask), self.config.window
        if window is None:
            return rule
        padding = padding_between(rule, 0, length, length)
        if padding is None or (padding.rows is not None and all(start == 0 for start, _ in padding.rows)):
            near = window | global_tokens(1)
        else:  # rows padded on the left begin later
            first = padding.valid(length, self.device).long().argmax(-1)
            near = window | (lambda b, h, q, k: (q == first[b]) | (k == first[b]))
        return near if rule is None else near & rule

    def logits(self, output: Float[Tensor, "..."]) -> Float[Tensor, "... D"] | None:
        if self.config.num_classes:
            return self.classify(output)
        return self.masked_words(output) if self.config.masked_words else None

    @property
    def class_names(self) -> tuple[str, ...]:
        return names_of_classes(self.config.class_names, self.config.num_classes)

    def masked_words(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"]:
        """Logits of the word at each position."""
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
        """The pooler's output for the first token: the first real token, if `mask` has padding."""
        self._has("pooler")
        padding = padding_between(as_mask(mask), 0, hidden.shape[1], hidden.shape[1])
        if padding is None:
            return torch.tanh(self.pooler(hidden[:, 0]))
        first = padding.valid(hidden.shape[1], hidden.device).long().argmax(-1)
        return torch.tanh(self.pooler(hidden[torch.arange(hidden.shape[0], device=hidden.device), first]))

    def embed(
        self, texts: Sequence[str], *, normalize: bool | None = None, batch_size: int = 32
    ) -> Float[Tensor, "B D"]:
        """Embeddings of sentences: the hidden states of their tokens, pooled as the config says.

        By default that is the mean, normalised to length 1; a sentence-transformers checkpoint may say otherwise.
        `normalize` overrides whether vectors are normalised.
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
        """The probability of each class for each text. Texts longer than the context are truncated."""
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
        """A head's output for each text after a prefix, truncated to `length` tokens if given."""
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
        # Batches have texts of similar length, so that there is little padding.
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        outputs = torch.empty(len(rows), size, dtype=self.dtype, device=self.device)
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(order), batch_size):
                    chosen = order[start : start + batch_size]
                    tokens, mask, _ = pad_rows([rows[index] for index in chosen])
                    outputs[chosen] = head(self(tokens.to(self.device), mask=mask), mask)
        finally:
            self.train(training)
        return outputs

    def _prefix_tokens(self) -> int:
        """How many tokens come before the text: the prefix's, and the special tokens that begin every sequence."""
        if self.tokenizer is None or not self.config.text_prefix:
            return 0
        tokens = self.tokenizer.encode(self.config.text_prefix)
        ended = tokens and tokens[-1] in (self.tokenizer.separator, self.tokenizer.eos)
        return len(tokens) - bool(ended)

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def token_tables(self) -> list[nn.Embedding]:
        return [self.embedding]

    @property
    def output_stack(self) -> Stack:
        return self.stack

    def vocabulary_logits(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"] | None:
        """Logits of masked words, if the model has a head for them."""
        return self.masked_words(hidden) if self.config.masked_words else None

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.stack.blocks)

    def parts(self, length: int) -> Iterator[Part]:
        """Embeddings, the stack and the heads, for one token of a text of `length`."""
        counted = {
            # A head that reads one token per sequence costs next to nothing per token.
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
            raise ValueError(f"model: expected one with {head} in its config, got one without")


class _Words(nn.Module):
    """The head for masked words: a layer, a norm, and the tied embedding or a separate table."""

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
    """One vector per sequence, pooled from its real tokens except the first `skipped`; 0 if there are none.

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
    # Half-precision tokens are summed and divided in float32.
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    counted = places > skipped
    parts = [POOLINGS[mode](wide, counted[..., None].to(wide), places[..., None].to(wide)) for mode in modes]
    return torch.cat(parts, -1).masked_fill(~counted.any(-1, keepdim=True), 0).to(hidden.dtype)


def _sum(hidden: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over tokens; a NaN at a token with weight 0 has no effect."""
    return (hidden * weights).masked_fill(weights == 0, 0).sum(1)


POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "first": lambda x, counted, places: _sum(x, counted * (counted.cumsum(1) == 1)),
    "last": lambda x, counted, places: _sum(x, counted * (places == places.amax(1, keepdim=True))),
    "max": lambda x, counted, places: x.masked_fill(counted == 0, -torch.inf).amax(1),
    "mean": lambda x, counted, places: _sum(x, counted) / counted.sum(1),
    "mean_sqrt_length": lambda x, counted, places: _sum(x, counted) / counted.sum(1).sqrt(),
    "weighted_mean": lambda x, counted, places: _sum(x, places * counted) / (places * counted).sum(1),
}
"""Functions that pool hidden states (B, T, E) to (B, E), from which tokens count (0 or 1) and their positions (from 1;
0 for padding), both (B, T, 1). `weighted_mean` weighs tokens by their positions."""
