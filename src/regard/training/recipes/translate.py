"""Translation: the original encoder-decoder (Vaswani et al. 2017), French to English or any other pairs.

    loss = Σ over target tokens of  (1 - ε) · -log p(token) + ε · mean over the vocabulary of -log p

The embedded pairs are a phrase-book whose held-out sentences have combinations of words that training sentences do not
have. Other pairs are read from tables (.tsv) and message catalogues (.po, .mo).
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.masks import Window, padding
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text
from regard.inference.generation import Generated, generate
from regard.inference.trace import trace
from regard.models.base import Model, expect
from regard.models.padded_rows import pad_ranges
from regard.models.transformer import Transformer, TransformerConfig
from regard.training.data.domain import Domain
from regard.training.data.held_out import parts
from regard.training.data.pairs import Pair, read_pairs
from regard.training.data.phrasebook import Swap, phrasebook
from regard.training.data.vocabulary import train_bpe
from regard.training.divided import divided
from regard.training.fingerprint import digest
from regard.training.initial import initial
from regard.training.recipes import check_causal
from regard.training.recipes.started import Started, adapt_started, scratch, started
from regard.training.settings import Settings, option
from regard.training.task import Batch, Card, Task, Totals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAD, START, END = 0, 1, 2
LONGEST = 256
"""Tokens of a source or a target, at most; longer pairs are left out."""
TRANSLATED, TESTED = 200, 1000
"""How many sentences an evaluation translates, and the test at the end, at most."""
HELD_OUT, SHARE = 1000, 0.05
"""Pairs to validate with, and as many to test with: so many, of files this share if it is less, but 3 of 12."""
TOGETHER = 64
"""Sentences per batch of an evaluation."""
SHIPPED = Path(__file__).parents[2] / "shipped" / "translator"


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The data, the model, and how translations are evaluated.

    >>> from regard.training.recipes.translate import Options
    >>> Options(mechanism="quadratic", num_kv_heads=1).embedding_dim
    128
    """

    data: tuple[str, ...] = option((), "Files or folders of pairs: .tsv, .po, .mo. The phrase-book if none.")
    count: int = option(100000, "Phrase-book sentences to train on.")
    validation_data: tuple[str, ...] = option((), "Files of pairs that choose the best model; part of --data if none.")
    test_data: tuple[str, ...] = option((), "Files of pairs to measure the best model with, at the end; likewise.")
    held_out: int | None = option(
        None, f"Pairs kept to validate with, and as many to test with; {HELD_OUT:,} if not given, or a tenth for both."
    )
    vocabulary_size: int = scratch(3072, "Tokens of the vocabulary that both languages share, at most.")
    embedding_dim: int = scratch(128, "Embedding dimension.")
    num_layers: int = scratch(2, "Layers of the encoder, and of the decoder.")
    num_heads: int = scratch(4, "Attention heads.")
    hidden_dim: int = scratch(512, "Hidden units of the position-wise networks.")
    dropout: float = scratch(0.0, "Dropout of each sub-layer's output in training.")
    pre_norm: bool = scratch(True, "Norms before sub-layers; if not, after them, as in the original.")
    label_smoothing: float = option(0.1, "Share of the target probability that is spread over all tokens.")
    mechanism: str = scratch("softmax", f"Attention, one of {CHOICES}.", changes=True)
    num_kv_heads: int | None = scratch(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    encoder_window: Window | None = scratch(None, f"In the source. {WINDOW_HELP} All if not given.")
    decoder_window: Window | None = scratch(None, f"In the target. {WINDOW_HELP} Here AFTER is 0. All if not given.")
    beams: int = option(1, "Beams of the translations that are evaluated.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("count", 1), ("held_out", 1), ("vocabulary_size", 8), ("beams", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.held_out is not None and self.validation_data:
            raise ValueError(f"held_out: expected none with validation_data, got {self.held_out}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected at least 0 and below 1, got {self.label_smoothing}")
        if self.mechanism is not None:
            check_causal(self.mechanism)
        if self.start is None:
            self.config(self.vocabulary_size)

    def config(self, vocabulary_size: int) -> TransformerConfig:
        """The model's config."""
        return TransformerConfig(
            vocabulary_size=vocabulary_size,
            embedding_dim=self.embedding_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden_dim=self.hidden_dim,
            dropout=self.dropout,
            pre_norm=self.pre_norm,
            mechanism=from_text(self.mechanism),
            encoder_window=self.encoder_window,
            decoder_window=self.decoder_window,
            context_length=2 * LONGEST,
            start_token=START,
            end_tokens=(END,),
            padding_token=PAD,
        )


def settings() -> Settings:
    """Defaults that train on the phrase-book in minutes on two cores."""
    return Settings(steps=5000, learning_rate=2e-3, warmup=200, batch_tokens=2048)


def build(options: Options, folder: Path, seed: int) -> "Translation":
    """The task. The tokenizer is read from `folder`, or trained and saved there.

    >>> import tempfile
    >>> from regard.training.recipes import translate
    >>> small = translate.Options(count=100, held_out=10, embedding_dim=16, num_heads=2, num_layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = translate.build(small, Path(folder), seed=0)
    >>> len(task.sizes()), sorted(task.batch([0, 1], epoch=0))
    (100, ['source', 'source_lengths', 'target', 'target_lengths'])
    """
    train, validation, test = _pairs(options, seed)
    if options.start is not None:
        torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
        model = started(Transformer, options.start, options.mechanism, folder)
        if model.tokenizer is None or model.context_length < LONGEST:
            wanted = f"an encoder-decoder with a tokenizer and a context of at least {LONGEST}"
            raise ValueError(f"from: expected {wanted}, got {options.start}")
        Domain.of(source for source, _ in train).save(folder)
        adapt_started(model, options, model.state_dict(), seed)
        return Translation(options, model, train, validation, test)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        tokenizer = train_bpe((text for pair in train for text in pair), options.vocabulary_size)
        Domain.of(source for source, _ in train).save(folder)
        tokenizer.save(folder)
    torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
    config = options.config(tokenizer.vocabulary_size)
    model = initial(lambda: Transformer(config), seed)
    model.tokenizer = tokenizer
    return Translation(options, model, train, validation, test)


def _pairs(options: Options, seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Pairs to train on, to validate with, and to test with."""
    validation, test = (read_pairs(paths) if paths else None for paths in (options.validation_data, options.test_data))
    if options.data:
        pairs = read_pairs(options.data)
        few = min(HELD_OUT, max(3, int(SHARE * len(pairs))), max(1, len(pairs) // 4))
        return parts(pairs, lambda pair: pair[0], validation, test, count=options.held_out or few)
    count = options.held_out or HELD_OUT
    others = phrasebook("held_out", 2 * count, seed)
    if validation is None:
        return phrasebook("train", options.count, seed), others[:count], others[count:] if test is None else test
    return phrasebook("train", options.count, seed), validation, test or []


class _Rows:
    """Token sequences of different lengths, one after another in one array."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], self.lengths.cumsum()])
        self.tokens = np.fromiter((token for row in rows for token in row), dtype=np.int32, count=int(self.starts[-1]))

    def padded(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Some sequences padded on the right, and their lengths."""
        lengths = self.lengths[indices]
        table = pad_ranges(self.tokens, self.starts[indices], lengths, filling=PAD)
        return torch.from_numpy(table), torch.from_numpy(lengths)


class _Examples:
    """Pairs as tokens: sources with [END], targets with [START] and [END]."""

    def __init__(self, name: str, pairs: Sequence[Pair], model: Transformer) -> None:
        tokenizer, start = _tokenizer(model), _start(model)
        rows = [(tokenizer.encode(source), [start, *tokenizer.encode(target)]) for source, target in pairs]
        fits = [at for at, row in enumerate(rows) if max(map(len, row)) <= LONGEST]
        if not fits:
            raise ValueError(f"{name}: expected pairs of at most {LONGEST} tokens, got none")
        self.pairs = [pairs[at] for at in fits]
        self.sources = _Rows([rows[at][0] for at in fits])
        self.targets = _Rows([rows[at][1] for at in fits])
        self.sizes = (self.sources.lengths + self.targets.lengths - 1).tolist()

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = np.asarray(indices)
        source, source_lengths = self.sources.padded(chosen)
        target, target_lengths = self.targets.padded(chosen)
        return {
            "source": source,
            "source_lengths": source_lengths,
            "target": target,
            "target_lengths": target_lengths,
        }


class Translation(Task):
    """Pairs of sentences, and the encoder-decoder that learns to translate them."""

    name: ClassVar[str] = "translate"
    model: Transformer

    def __init__(
        self,
        options: Options,
        model: Transformer,
        train: Sequence[Pair],
        validation: Sequence[Pair],
        test: Sequence[Pair] = (),
    ) -> None:
        self.options, self.model, self.label_smoothing = options, model, options.label_smoothing
        self.train = _Examples("data", train, model)
        self.validation = _Examples("validation_data", validation, model)
        self.tested = _Examples("test_data", test, model) if test else None

    def sizes(self) -> Sequence[int]:
        return self.train.sizes

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return self.train.batch(indices)

    def fingerprint(self) -> str:
        tested = [] if self.tested is None else self.tested.pairs
        return digest(
            self.train.pairs, self.validation.pairs, tested, self.train.sources.tokens, self.train.targets.tokens
        )

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": int((batch["target_lengths"] - 1).sum())}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        logits, labels = _predictions(model, batch)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)}

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss without label smoothing and token accuracy on all pairs to validate with; the share of exact
        translations and BLEU on the first `TRANSLATED`."""
        return self._results(model, self.validation, TRANSLATED)

    def test(self, model: Model) -> dict[str, float]:
        """The same of the pairs to test with; the first `TESTED` are translated."""
        return {} if self.tested is None else self._results(model, self.tested, TESTED)

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all pairs of files."""
        return self._results(model, _Examples("data", read_pairs(paths), self.model), None)

    def _results(self, model: Model, examples: _Examples, translated: int | None) -> dict[str, float]:
        def sums(indices: list[int]) -> tuple[float, int, int]:
            batch = {name: tensor.to(model.device) for name, tensor in examples.batch(indices).items()}
            logits, labels = _predictions(model, batch)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
            return float(loss), int((logits.argmax(-1) == labels).sum()), len(labels)

        losses, rights, counts = zip(*divided(sums, _by_size(examples.sizes)), strict=True)
        loss, right, count = sum(losses), sum(rights), sum(counts)
        scores = quality(model, examples.pairs[:translated], beams=self.options.beams)
        return {"loss": loss / count, "accuracy": right / count, **scores}

    def card(self) -> Card:
        options = self.options
        trained, validated = len(self.train.pairs), len(self.validation.pairs)
        tested = 0 if self.tested is None else len(self.tested.pairs)
        if options.data:
            names = ", ".join(Path(path).name for path in options.data)
            data = f"{trained:,} pairs of {names}; {validated:,} others to validate with, {tested:,} to test with."
        else:
            data = (
                f"{trained:,} sentences of the embedded French-English phrase-book; {validated:,} to validate with and "
                f"{tested:,} to test with, of combinations of words that these do not have."
            )
        if _sacrebleu() is None:
            data += " BLEU was not measured, because sacrebleu is not installed."
        return Card(data=data, use="Translates sentences like those it was trained on: `regard translate`.")

    def samples(self, model: Model) -> list[str]:
        pairs = self.validation.pairs[:3]
        translations = translate(model, [source for source, _ in pairs], beams=self.options.beams)
        return [f"{source} → {text} ({target})" for (source, target), text in zip(pairs, translations, strict=True)]


def _predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (N, D) and labels (N,) of a batch's target tokens, without padding."""
    target, lengths = batch["target"], batch["target_lengths"] - 1
    at = torch.arange(target.shape[1] - 1, device=target.device) < lengths[:, None]
    logits = model(batch["source"], target[:, :-1], padding(batch["source_lengths"]), padding(lengths), at=at)
    return logits, target[:, 1:][at]


def _by_size(sizes: Sequence[int]) -> Iterator[list[int]]:
    """All indices, in batches of similar sizes."""
    order = np.argsort(np.asarray(sizes), kind="stable").tolist()
    return (order[start : start + TOGETHER] for start in range(0, len(order), TOGETHER))


def translate(
    model: Model, texts: Sequence[str], *, beams: int = 4, max_new_tokens: int | None = None
) -> list[Generated]:
    """Translations of texts, in their order, by beam search, or greedily with `beams=1`.

    A translation has at most `max_new_tokens` tokens; by default twice the tokens of the longest text, plus 16.

    >>> from regard.training.recipes.translate import shipped, translate
    >>> translate(shipped(), ["La voiture rouge est rapide."])
    ['The red car is fast.']
    """
    sources = [_tokenizer(model).encode(text) for text in texts]
    most = max_new_tokens or 2 * max(map(len, sources), default=0) + 16

    def written(part: list[int]) -> list[Generated]:
        return generate(model, [sources[at] for at in part], max_new_tokens=most, beams=beams)

    parts = list(_by_size([len(source) for source in sources]))
    translations: dict[int, Generated] = {}
    for part, texts_of_part in zip(parts, divided(written, parts, generates=True), strict=True):
        translations |= zip(part, texts_of_part, strict=True)
    return [translations[at] for at in range(len(sources))]


def _tokenizer(model: Model) -> Tokenizer:
    """The tokenizer of an encoder-decoder; ValueError for other models."""
    expect(Transformer, model)
    if model.tokenizer is None:
        raise ValueError("model: expected one with a tokenizer, got one without")
    return model.tokenizer


def _start(model: Model) -> int:
    """The token that a target begins with."""
    start = model.config.start_token
    return START if start is None else start


def quality(model: Model, pairs: Sequence[Pair], *, beams: int = 1) -> dict[str, float]:
    """The quality of translations: `exact`, the share equal to the reference, and `bleu` if sacrebleu is installed.

    >>> from regard.training.data.phrasebook import phrasebook
    >>> from regard.training.recipes.translate import quality, shipped
    >>> quality(shipped(), phrasebook("held_out", 50))["exact"] > 0.9
    True
    """
    translations = translate(model, [source for source, _ in pairs], beams=beams)
    references = [target for _, target in pairs]
    results = {"exact": sum(map(str.__eq__, translations, references)) / len(pairs)}
    sacrebleu = _sacrebleu()
    if sacrebleu is not None:
        results["bleu"] = sacrebleu.corpus_bleu(translations, [references]).score
    return results


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        return None
    return sacrebleu


def shipped(device: torch.device | str = "cpu") -> Transformer:
    """The translator that ships with the package, trained on the phrase-book."""
    from regard.checkpoints import load

    return expect(Transformer, load(SHIPPED, dtype=torch.float32, device=device))


def domain(run: str | Path | None = None) -> Domain | None:
    """The domain of a run's training sentences, by default of the shipped translator's; None if a run has no such file.

    >>> from regard.training.recipes.translate import domain
    >>> domain().outside("La voiture rouge est rapide."), domain().outside("Bonjour.")
    ([], ['not among the words of its training: Bonjour'])
    """
    return Domain.load(SHIPPED if run is None else Path(run) / "data")


@torch.inference_mode()
def looks(model: Model, source: str, target: str) -> tuple[list[str], list[str], Float[Tensor, "L H T S"]]:
    """Cross-attention by words: words of the target, words of the source, and the weights between them, for each layer
    and head.

    The row of a target word is the mean over the queries that predict its tokens; the column of a source word is the
    sum over its tokens. Special tokens count as words, so that rows sum to 1.

    >>> from regard.training.recipes.translate import looks, shipped
    >>> rows, columns, weights = looks(shipped(), "La voiture rouge est rapide.", "The red car is fast.")
    >>> rows[:3], columns[:3], weights.shape[2:] == (len(rows), len(columns))
    (['The', 'red', 'car'], ['La', 'voiture', 'rouge'], True)
    """
    tokenizer = _tokenizer(model)
    read, written = tokenizer.encode(source), tokenizer.encode(target)
    with trace(model, keep=("weights",)) as recorded:
        model(
            torch.tensor([read], device=model.device),
            torch.tensor([[_start(model), *written[:-1]]], device=model.device),
        )
    (columns, across), (rows, down) = _words(tokenizer, read), _words(tokenizer, written)
    kept = torch.stack([layer.need("weights")[0] for layer in recorded.select(kind="cross").layers])
    across, down = across.to(kept), down.to(kept)
    return rows, columns, torch.einsum("it,lhts,js->lhij", down / down.sum(-1, keepdim=True), kept, across)


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], Bool[Tensor, "W T"]]:
    """The words of a token sequence, including punctuation and special tokens, and which tokens each word has.

    A token belongs to the run of letters, or of punctuation, that it ends in: l' is a word.
    """
    special = {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.unk}
    text = tokenizer.decode([token for token in ids if token not in special])
    runs = [run.end() for run in re.finditer(r"\w+|[^\w\s]+", text)]
    words: list[list[int]] = []
    last, plain = None, list[int]()
    for at, token in enumerate(ids):
        if token not in special:
            plain.append(token)
        # A token may end within a character, which is decoded as one replacement character: the length stays right.
        place = ("special", at) if token in special else ("run", bisect_left(runs, len(tokenizer.decode(plain))))
        if place != last:
            words.append([])
        words[-1].append(at)
        last = place
    members = torch.zeros(len(words), len(ids), dtype=torch.bool)
    for word, places in enumerate(words):
        members[word, places] = True
    return [tokenizer.decode([ids[at] for at in places], special=True).strip() for places in words], members


@dataclass(frozen=True)
class Alignment:
    """How well cross-attention aligns words that change places."""

    share: float
    """The share of sentences in which the adjective attends to the adjective and the noun to the noun."""
    layer: int
    """The decoder layer in which this share is highest."""
    head: int | None
    """The head; None for the mean of the layer's heads."""
    weight: float
    """The mean attention weight of the right words in this layer and head."""


def alignment(model: Model, swaps: Sequence[Swap]) -> Alignment:
    """How often a swapped noun and adjective attend to the right source words, in the best layer and head.

    A word attends to the source word, or special token, with the highest weight.

    >>> from regard.training.data.phrasebook import swaps
    >>> from regard.training.recipes.translate import alignment, shipped
    >>> alignment(shipped(), swaps("held_out", 20)).share > 0.9
    True
    """
    right, attended = [], []
    for source, target, read, written in swaps:
        rows, columns, weights = looks(model, source, target)
        every = torch.cat([weights, weights.mean(1, keepdim=True)], dim=1)  # the mean of the heads as another head
        down, across = [rows.index(word) for word in written], [columns.index(word) for word in read]
        right.append((every[..., down, :].argmax(-1).cpu() == torch.tensor(across)).all(-1))
        attended.append(every[..., down, across].mean(-1))
    shares, means = torch.stack(right).double().mean(0), torch.stack(attended).mean(0)
    layers, heads = shares.shape
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    layer, head = max(places, key=lambda at: (float(shares[at]), float(means[at])))
    return Alignment(float(shares[layer, head]), layer, None if head == heads - 1 else head, float(means[layer, head]))


def attention_figure(model: Model, source: str, target: str) -> "Figure":
    """Cross-attention between the words of a translation and its source, a heat map for each decoder layer.

    >>> from regard.training.recipes.translate import attention_figure, shipped
    >>> figure = attention_figure(shipped(), "La voiture rouge est rapide.", "The red car is fast.")
    >>> [axes.get_title(loc="left") for axes in figure.axes][:2]
    ['layer 1', 'layer 2']
    """
    from regard.core.weights_figure import weights_figure

    rows, columns, weights = looks(model, source, target)
    panels = {f"layer {number}": layer.mean(0) for number, layer in enumerate(weights, start=1)}
    return weights_figure(panels, rows, keys=columns, title="Where each word looks as it is written")
