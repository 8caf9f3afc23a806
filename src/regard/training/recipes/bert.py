"""BERT: an encoder that learns masked words and whether a passage follows another (Devlin et al. 2018).

    loss = -mean log p(word | the rest)  -  mean log p(does the second passage follow the first?)
           [ -  mean log p(is the second sentence the inverted first sentence?) ]

Predicting a word is a generative task; telling true pairs from false pairs is a contrastive task, and so is the
optional third task, the inverted sentence. The embedded text is Python's documentation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.masks import Mask, Window, padding
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text, lookup
from regard.models.base import Model
from regard.models.encoder import Encoder, EncoderConfig
from regard.training.data.held_out import parts
from regard.training.data.prose import Document, prose
from regard.training.data.sentence_pairs import Corpus, Integers, Pairs, Rows, tokenized
from regard.training.data.vocabulary import train_wordpiece
from regard.training.divided import divided
from regard.training.fingerprint import digest
from regard.training.initial import initial
from regard.training.recipes.started import Started, adapt_started, scratch, started, with_heads
from regard.training.settings import Settings, option
from regard.training.task import IGNORED, Batch, Card, Task, Totals

JUDGED, TESTED = 512, 4096
"""Examples of each kind that an evaluation uses, and the test at the end, at most."""
FILES = ("train.npz", "validation.npz", "test.npz")
"""The tokens of a run's documents."""
TOGETHER = 64
"""Examples per batch of an evaluation."""
COMPARED = 2000
"""Training pairs from which the baseline of shared words learns its threshold, about."""
WORDS = "masked words"
"""The name of the loss term of masked words."""


class Judgement(NamedTuple):
    """A loss term about the second passage."""

    name: str
    """Its name in metrics and results."""
    labels: str
    """The key of its labels in a batch."""
    head: Callable[[Encoder, Tensor, Mask], Tensor]
    """The logits of an encoder, from its hidden states."""


NEXT = Judgement("next sentence", "next", Encoder.next_sentence)
INVERTED = Judgement("inverted sentence", "inverted", Encoder.inverted_sentence)


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The text and the encoder.

    >>> from regard.training.recipes.bert import Options
    >>> Options(mechanism="quadratic", num_kv_heads=1, inverted_sentence=True).embedding_dim
    128
    """

    data: str | None = option(
        None, "A text file, or a folder of them; a blank line ends a document. Python's documentation if not given."
    )
    validation_data: str | None = option(None, "Text that chooses the best model; part of --data if not given.")
    test_data: str | None = option(None, "Text to measure the best model with, at the end; likewise.")
    vocabulary_size: int = scratch(4096, "Tokens of the WordPiece vocabulary, at most.")
    embedding_dim: int = scratch(128, "Embedding dimension.")
    num_layers: int = scratch(2, "Layers of the encoder.")
    num_heads: int = scratch(4, "Attention heads.")
    context_length: int = option(64, "Tokens of a pair of passages, at most.")
    dropout: float = option(0.1, "Dropout of each sub-layer's output in training.")
    inverted_sentence: bool = option(False, "Learn to recognise inverted sentences, too.", also="--inverted")
    mechanism: str = scratch("softmax", f"Attention, one of {CHOICES}.", changes=True)
    num_kv_heads: int | None = scratch(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    window: Window | None = scratch(None, f"{WINDOW_HELP} All if not given.", changes=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("vocabulary_size", 8), ("context_length", 16)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected at least 0 and below 1, got {self.dropout}")
        if self.mechanism is not None:
            lookup(self.mechanism)
        if self.start is None:
            self.config(self.vocabulary_size)

    def config(self, vocabulary_size: int) -> EncoderConfig:
        """The model's config."""
        return EncoderConfig.bert(
            vocabulary_size=vocabulary_size,
            embedding_dim=self.embedding_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            context_length=self.context_length,
            dropout=self.dropout,
            inverted_sentence=self.inverted_sentence,
            mechanism=from_text(self.mechanism),
            padding_token=0,
        )


def settings() -> Settings:
    """Defaults that train on the embedded text in minutes on two cores."""
    return Settings(steps=4000, learning_rate=1e-3, warmup=200, batch_tokens=2048)


def build(options: Options, folder: Path, seed: int) -> "Bert":
    """The task. Tokenizer and tokens are read from `folder`, or made and saved there.

    >>> import tempfile
    >>> from regard.training.recipes import bert
    >>> sizes = {"vocabulary_size": 80, "embedding_dim": 16, "num_heads": 2, "num_layers": 1, "context_length": 32}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "own.txt").write_text("".join(f"It is {n}. So it was {n}.\\n\\n" for n in range(99)))
    ...     small = bert.Options(data=folder, **sizes)
    ...     task = bert.build(small, Path(folder), seed=0)
    >>> sorted(task.batch([0, 1], epoch=0))
    ['lengths', 'next', 'places', 'segments', 'tokens', 'words']
    """
    torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
    source = None if options.start is None else _started(options, folder)
    tokenizer = Tokenizer.from_folder(folder)
    paths = [folder / name for name in FILES]
    if tokenizer is None or not all(path.is_file() for path in paths):
        documents = _documents(options)
        texts = (text for document in documents[0] for text in document)
        tokenizer = train_wordpiece(texts, options.vocabulary_size) if source is None else source.tokenizer
        assert tokenizer is not None
        tokenizer.save(folder)
        for part, path in zip(documents, paths, strict=True):
            tokenized(part, tokenizer).save(path)
    train, validation, test = (
        Pairs(Corpus.load(path), tokenizer, options.context_length, options.inverted_sentence) for path in paths
    )
    for origin, pairs in (
        (options.data, train),
        (options.validation_data or options.data, validation),
        (options.test_data, test),
    ):
        if options.inverted_sentence and len(pairs.sizes) == pairs.num_passages and (origin or pairs is not test):
            raise ValueError(f"{origin}: expected sentences of three phrases or more to invert, got none")
    tested = test.num_passages > 0 and (not options.inverted_sentence or len(test.sizes) > test.num_passages)
    torch.manual_seed(seed)
    if source is None:
        config = options.config(tokenizer.vocabulary_size)
        model = initial(lambda: Encoder(config), seed)
    else:
        heads: dict[str, Any] = {
            "masked_words": True,
            "next_sentence": True,
            "inverted_sentence": options.inverted_sentence,
        }
        model = with_heads(source, dropout=options.dropout, num_classes=0, class_names=(), **heads)
        adapt_started(model, options, source.state_dict(), seed)
    model.tokenizer = tokenizer
    if source is not None and source.config.masked_words:
        return Bert(model, train, validation, test if tested else None, options, seed)
    # Initialise the bias with the log frequencies of words, which training would need its first hundreds of steps for.
    counts = torch.from_numpy(np.bincount(train.corpus.tokens, minlength=tokenizer.vocabulary_size) + 1)
    model.words.bias.data.copy_((counts / counts.sum()).log())
    return Bert(model, train, validation, test if tested else None, options, seed)


def _started(options: Options, folder: Path) -> Encoder:
    """The encoder to start from, with the options' attention."""
    assert options.start is not None
    source = started(Encoder, options.start, options.mechanism, folder)
    tokenizer = source.tokenizer
    if tokenizer is None or None in (tokenizer.mask, tokenizer.classification, tokenizer.separator):
        raise ValueError(f"from: expected an encoder whose tokenizer has [CLS], [SEP] and [MASK], got {options.start}")
    if source.config.num_segments < 2 or options.context_length > source.config.context_length:
        raise ValueError(
            f"context_length: expected at most {source.config.context_length}, and an encoder of pairs, as "
            f"{options.start} has, got {options.context_length} for {source.config.num_segments} segments"
        )
    if options.window is not None:
        source.config = replace(source.config, window=options.window)
    return source


def _documents(options: Options) -> tuple[list[Document], list[Document], list[Document]]:
    """Documents to train on, to validate with, and, if there are enough, to test with."""
    documents = prose(None if options.data is None else Path(options.data))
    validation, test = (
        None if path is None else _checked(path, prose(Path(path), name))
        for name, path in (("validation_data", options.validation_data), ("test_data", options.test_data))
    )
    if validation is not None or len(set(map("\n".join, documents))) > 1:
        train, validation, tested = parts(documents, "\n".join, validation, test)
    else:
        train, validation, tested = documents, [], test or []
    if test is None and _several(tested) < 2:
        validation, tested = validation + tested, []
    if _several(train) < 2 or _several(validation) < 2:
        raise ValueError(
            f"{options.data}: expected at least 2 documents of several sentences to train on and 2 held out (about "
            f"every tenth), got {_several(train)} and {_several(validation)}; blank lines end documents"
        )
    return train, validation, tested


def _checked(path: str, documents: list[Document]) -> list[Document]:
    if (count := _several(documents)) < 2:
        raise ValueError(
            f"{path}: expected at least 2 documents of several sentences, got {count}; blank lines end documents"
        )
    return documents


def _several(documents: Sequence[Document]) -> int:
    """How many documents have several sentences."""
    return sum(len(document) > 1 for document in documents)


class Bert(Task):
    """Pairs of passages with masked words, and the encoder that learns to predict them."""

    name: ClassVar[str] = "bert"
    model: Encoder

    def __init__(
        self, model: Encoder, train: Pairs, validation: Pairs, test: Pairs | None, options: Options, seed: int
    ) -> None:
        self.model, self.train, self.options, self.seed = model, train, options, seed
        self.validation, self.tested = validation, test
        self.judgements = (NEXT, INVERTED) if options.inverted_sentence else (NEXT,)
        self.judged = _judged(validation, JUDGED)
        self.baselines = _baselines(train, self.judged, self.judgements)

    def sizes(self) -> Integers:
        return self.train.sizes

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return self._tensors(self.train.batch(indices, self.seed, epoch))

    def fingerprint(self) -> str:
        corpora = [pairs.corpus for pairs in (self.train, self.validation, self.tested) if pairs is not None]
        return digest(*(part for corpus in corpora for part in (corpus.tokens, corpus.sentences, corpus.documents)))

    def _tensors(self, rows: Rows) -> Batch:
        unused = {term.labels for term in (NEXT, INVERTED) if term not in self.judgements}
        return {name: torch.from_numpy(values) for name, values in rows.items() if name not in unused}

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = {WORDS: batch["words"], **{term.name: batch[term.labels] for term in self.judgements}}
        return {name: int((values != IGNORED).sum()) for name, values in labels.items()}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {
            name: F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
            for name, (logits, labels) in self._predictions(model, batch).items()
        }

    def _predictions(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Logits and labels of each loss term. Logits of words are computed only where words are predicted."""
        mask = padding(batch["lengths"])
        hidden = model(batch["tokens"], batch["segments"], mask)
        at = batch["places"][..., None].expand(-1, -1, hidden.shape[-1])
        words = self.model.masked_words(hidden.gather(1, at))
        predictions = {WORDS: (words.flatten(0, 1), batch["words"].flatten())}
        for term in self.judgements:
            predictions[term.name] = term.head(self.model, hidden, mask), batch[term.labels]
        return predictions

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and accuracy of each term on documents to validate with, and the baselines without a model. Every word
        to be predicted is replaced by [MASK]: words that stay would be too easy."""
        return self._results(model, self.judged, self.baselines)

    def test(self, model: Model) -> dict[str, float]:
        """The same of documents to test with."""
        return {} if self.tested is None else self._measured(model, self.tested, TESTED)

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all documents of files."""
        documents = _checked(", ".join(paths), [document for path in paths for document in prose(Path(path))])
        corpus = tokenized(documents, self.train.tokenizer)
        pairs = Pairs(corpus, self.train.tokenizer, self.train.length, self.train.inverted)
        return self._measured(model, pairs, len(pairs.sizes))

    def _measured(self, model: Model, pairs: Pairs, most: int) -> dict[str, float]:
        judged = _judged(pairs, most)
        return self._results(model, judged, _baselines(self.train, judged, self.judgements))

    def _results(
        self, model: Model, judged: Sequence[Rows], baselines: dict[str, dict[str, float]]
    ) -> dict[str, float]:
        names = [WORDS, *(term.name for term in self.judgements)]
        losses, right, counts = (dict.fromkeys(names, 0.0) for _ in range(3))

        def sums(rows: Rows) -> dict[str, tuple[float, int, int]]:
            batch = {name: tensor.to(model.device) for name, tensor in self._tensors(rows).items()}
            terms = {}
            for name, (logits, labels) in self._predictions(model, batch).items():
                scored = labels != IGNORED
                loss = F.cross_entropy(logits[scored], labels[scored], reduction="sum")
                hits = (logits[scored].argmax(-1) == labels[scored]).sum()
                terms[name] = float(loss), int(hits), int(scored.sum())
            return terms

        for terms in divided(sums, judged):
            for name, (loss, hits, count) in terms.items():
                losses[name] += loss
                right[name] += hits
                counts[name] += count
        if missing := [name for name in names if not counts[name]]:
            raise ValueError(f"data: expected examples of {', '.join(missing)}, got none")
        results = {"loss": sum(losses[name] / counts[name] for name in names)}
        for name in names:
            results |= {f"{name} loss": losses[name] / counts[name], f"{name} accuracy": right[name] / counts[name]}
            results |= {f"{name} {measure}": value for measure, value in baselines[name].items()}
        return results

    def card(self) -> Card:
        source = Path(self.options.data).name if self.options.data else "Python's documentation"
        trained, validated, tested = (
            "none"
            if part is None
            else f"{len(part.corpus.documents) - 1:,} documents with {len(part.corpus.tokens):,} word pieces"
            for part in (self.train, self.validation, self.tested)
        )
        return Card(
            data=f"{source}: {trained}; to validate with: {validated}; to test with: {tested}.",
            use="Pre-trained for other tasks on text: `regard train classify --from RUN`.",
        )

    def samples(self, model: Model) -> list[str]:
        """The first held-out pairs, with the model's predictions for masked words."""
        rows = {name: value[:2] for name, value in self.judged[0].items()}
        batch = {name: tensor.to(model.device) for name, tensor in self._tensors(rows).items()}
        guesses = self._predictions(model, batch)[WORDS][0].argmax(-1).view(2, -1).tolist()
        return [
            _filled(self.train.tokenizer, *row)
            for row in zip(
                *(rows[name].tolist() for name in ("tokens", "lengths", "places", "words")), guesses, strict=True
            )
        ]


def _filled(
    tokenizer: Tokenizer, tokens: list[int], length: int, places: list[int], words: list[int], guesses: list[int]
) -> str:
    """An example as text: [guess] where the model is right, [guess, not word] where it is wrong."""
    names = tokenizer.tokens(tokens[:length])
    for place, word, guess in zip(places, words, guesses, strict=True):
        if word != IGNORED:
            guessed, true = tokenizer.tokens([guess, word])
            text = guessed if guess == word else f"{guessed}, not {true}"
            names[place] = ("##" if true.startswith("##") else "") + f"[{text.replace('##', '')}]"
    return " ".join(names[1:-1]).replace(" ##", "").replace("[SEP]", "|")


def _judged(pairs: Pairs, most: int) -> list[Rows]:
    """Some examples of each kind, evenly spaced, in batches of similar size."""
    return [pairs.batch(part, 0, 0, all_covered=True) for part in _chosen(pairs, most)]


def _chosen(pairs: Pairs, most: int) -> Iterator[list[int]]:
    kinds = (range(pairs.num_passages), range(pairs.num_passages, len(pairs.sizes)))
    for kind in kinds:
        chosen = [kind[index * len(kind) // min(most, len(kind))] for index in range(min(most, len(kind)))]
        chosen.sort(key=lambda index: pairs.sizes[index])
        yield from (chosen[start : start + TOGETHER] for start in range(0, len(chosen), TOGETHER))


def _baselines(train: Pairs, judged: Sequence[Rows], judgements: Sequence[Judgement]) -> dict[str, dict[str, float]]:
    """Results without a model, by loss term: always the most frequent word, always the more frequent label; and for
    pairs, a threshold on the words that both passages share, where rare words count more."""
    counts = np.bincount(train.corpus.tokens, minlength=train.tokenizer.vocabulary_size) + 1
    words = np.concatenate([rows["words"][rows["words"] != IGNORED] for rows in judged])
    baselines = {
        WORDS: {
            "baseline": float((words == counts.argmax()).mean()),
            "baseline loss": float(-np.log(counts / counts.sum())[words].mean()),
        }
    }
    for term in judgements:
        labels = np.concatenate([rows[term.labels] for rows in judged])
        labels = labels[labels != IGNORED]
        baselines[term.name] = {"baseline": float(np.bincount(labels).max() / len(labels))}
    sampled = range(0, train.num_passages, max(1, train.num_passages // COMPARED))
    weights = np.log(counts.sum() / counts)
    scores, labels = _shared(train.batch(list(sampled), 0, 0, all_covered=True), weights)
    accuracies = [((scores < limit) == labels).mean() for limit in np.sort(scores)]
    limit = np.sort(scores)[int(np.argmax(accuracies))]
    paired = [rows for rows in judged if (rows["next"] != IGNORED).all()]
    right = [((scores < limit) == labels) for scores, labels in (_shared(rows, weights) for rows in paired)]
    baselines[NEXT.name]["shared words baseline"] = float(np.concatenate(right).mean())
    return baselines


def _shared(rows: Rows, weights: np.ndarray) -> tuple[np.ndarray, Integers]:
    """The share of two passages' words that is in both, by weight, and the labels: 1 if the second does not follow."""
    tokens = rows["tokens"].copy()  # with the masked words put back
    chosen = rows["words"] != IGNORED
    tokens[np.nonzero(chosen)[0], rows["places"][chosen]] = rows["words"][chosen]
    scores = []
    for row, segments, length in zip(tokens, rows["segments"], rows["lengths"], strict=True):
        first, second = (set(row[1:length][segments[1:length] == part].tolist()) for part in (0, 1))
        both, either = (weights[list(words)].sum() for words in (first & second, first | second))
        scores.append(both / either)
    return np.array(scores), rows["next"]
