"""BERT: an encoder that learns words under masks and whether one passage follows another (Devlin et al. 2018).

    loss = -mean log p(word | the rest)  -  mean log p(does the second passage follow the first?)
           [ -  mean log p(is the second sentence the first one inverted?) ]

Predicting a word is a generative task; telling true pairs from false ones is a contrastive one, and so is the optional
third, the inverted sentence. The embedded text is Python's own documentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.masks import Window, padding
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text
from regard.models.base import Model
from regard.models.encoder import Encoder, EncoderConfig
from regard.training.data.held_out import split
from regard.training.data.prose import prose
from regard.training.data.sentence_pairs import Corpus, Integers, Pairs, Rows, tokenized
from regard.training.data.vocabulary import train_wordpiece
from regard.training.settings import Settings, option
from regard.training.task import IGNORED, Batch, Card, Task, Totals

JUDGED = 512
"""Held-out examples of each kind that an evaluation looks at."""
TOGETHER = 64
"""Of them in one batch."""
COMPARED = 2000
"""Training pairs from which the baseline of shared words learns how many are enough."""
TERMS = {"next sentence": "next", "inverted sentence": "inverted"}
"""What is said of the second passage, and where a batch has its labels."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to learn from, and the encoder.

    >>> from regard.training.recipes.bert import Options
    >>> Options(mechanism="quadratic", num_kv_heads=1, inverted_sentence=True).embedding_dim
    128
    """

    data: str | None = option(None, "A text file, or a folder of them; a blank line ends a document.")
    vocabulary_size: int = option(4096, "Word pieces of the vocabulary, at most.")
    embedding_dim: int = option(128, "Numbers of a token.")
    num_layers: int = option(2, "Layers of the encoder.")
    num_heads: int = option(4, "Heads of an attention.")
    context_length: int = option(64, "Tokens of a pair of passages, at most.")
    dropout: float = option(0.1, "Share of what each sub-layer adds that is dropped in training.")
    inverted_sentence: bool = option(False, "Learn to tell inverted sentences, too.", also="--inverted")
    mechanism: str = option("softmax", f"Attention, one of {CHOICES}.")
    num_kv_heads: int | None = option(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    window: Window | None = option(None, f"{WINDOW_HELP} All if not given.")

    def __post_init__(self) -> None:
        for name, least in (("vocabulary_size", 8), ("context_length", 16)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
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
    """What trains on the embedded text in minutes on two cores."""
    return Settings(steps=4000, learning_rate=1e-3, warmup=200, batch_tokens=2048)


def build(options: Options, folder: Path, seed: int) -> "Bert":
    """The task. `folder` gets the tokenizer and the tokens, or gives them, if it has them.

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
    tokenizer = Tokenizer.from_folder(folder)
    paths = [folder / "train.npz", folder / "held-out.npz"]
    if tokenizer is None or not all(path.is_file() for path in paths):
        documents = prose(None if options.data is None else Path(options.data))
        parts = split(documents, key="\n".join) if len(documents) > 1 else (documents, [])
        counts = [sum(len(document) > 1 for document in part) for part in parts]
        if min(counts) < 2:
            raise ValueError(
                f"{options.data}: expected documents of two sentences or more, several to train on and several held "
                f"out, which is every tenth or so, got {counts[0]} and {counts[1]}; blank lines end documents"
            )
        tokenizer = train_wordpiece((text for document in parts[0] for text in document), options.vocabulary_size)
        tokenizer.save(folder)
        for part, path in zip(parts, paths, strict=True):
            tokenized(part, tokenizer).save(path)
    train, held_out = (
        Pairs(Corpus.load(path), tokenizer, options.context_length, options.inverted_sentence) for path in paths
    )
    if options.inverted_sentence and not all(len(one.sizes) > one.num_passages for one in (train, held_out)):
        raise ValueError(f"{options.data}: expected sentences of three phrases or more to invert, got none")
    torch.manual_seed(seed)
    model = Encoder(options.config(tokenizer.vocabulary_size))
    model.tokenizer = tokenizer
    # Words begin as likely as they are frequent, which training would spend its first hundreds of steps on.
    often = torch.from_numpy(np.bincount(train.corpus.tokens, minlength=tokenizer.vocabulary_size) + 1)
    model.words.bias.data.copy_((often / often.sum()).log())
    return Bert(model, train, held_out, options, seed)


class Bert(Task):
    """Words under masks, and pairs of passages."""

    name: ClassVar[str] = "bert"
    model: Encoder

    def __init__(self, model: Encoder, train: Pairs, held_out: Pairs, options: Options, seed: int) -> None:
        self.model, self.train, self.held_out, self.options, self.seed = model, train, held_out, options, seed
        self.kinds = [name for name in TERMS if name != "inverted sentence" or options.inverted_sentence]
        self.judged = [held_out.batch(part, 0, 0, all_covered=True) for part in _judged(held_out)]
        self.baselines = _baselines(train, self.judged, self.kinds)

    def sizes(self) -> Sequence[int]:
        return self.train.sizes.tolist()

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return self._tensors(self.train.batch(indices, self.seed, epoch))

    def _tensors(self, rows: Rows) -> Batch:
        left_out = {TERMS[name] for name in TERMS if name not in self.kinds}
        return {name: torch.from_numpy(value) for name, value in rows.items() if name not in left_out}

    def counts(self, batch: Batch) -> dict[str, int]:
        labels = {"masked words": batch["words"], **{name: batch[TERMS[name]] for name in self.kinds}}
        return {name: int((one != IGNORED).sum()) for name, one in labels.items()}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {
            name: F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
            for name, (logits, labels) in self._predictions(model, batch).items()
        }

    def _predictions(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Logits and labels of each term. Words are scored where they are to be predicted alone."""
        mask = padding(batch["lengths"])
        hidden = model(batch["tokens"], batch["segments"], mask)
        at = batch["places"][..., None].expand(-1, -1, hidden.shape[-1])
        words = self.model.masked_words(hidden.gather(1, at))
        found = {"masked words": (words.flatten(0, 1), batch["words"].flatten())}
        heads = {"next sentence": self.model.next_sentence, "inverted sentence": self.model.inverted_sentence}
        return found | {name: (heads[name](hidden, mask), batch[TERMS[name]]) for name in self.kinds}

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and accuracy of each task on held-out documents, beside what they are without a model. Every word to be
        predicted is under [MASK]: those that stayed would be too easy."""
        losses, right, counts = (dict.fromkeys(["masked words", *self.kinds], 0.0) for _ in range(3))
        for rows in self.judged:
            batch = {name: one.to(model.device) for name, one in self._tensors(rows).items()}
            for name, (logits, labels) in self._predictions(model, batch).items():
                known = labels != IGNORED
                losses[name] += float(F.cross_entropy(logits[known], labels[known], reduction="sum"))
                right[name] += int((logits[known].argmax(-1) == labels[known]).sum())
                counts[name] += int(known.sum())
        found = {"loss": sum(losses[name] / counts[name] for name in counts)}
        for name, count in counts.items():
            found |= {f"{name} loss": losses[name] / count, f"{name} accuracy": right[name] / count}
            found |= {full: value for full, value in self.baselines.items() if full.startswith(name)}
        return found

    def card(self) -> Card:
        source = Path(self.options.data).name if self.options.data else "Python's own documentation"
        parts = [
            f"{len(one.corpus.documents) - 1:,} documents with {len(one.corpus.tokens):,} word pieces"
            for one in (self.train, self.held_out)
        ]
        return Card(
            data=f"English of {source}: {parts[0]}; {parts[1]} are held out.",
            use="A beginning for other tasks on text: `regard train classify --from RUN`.",
        )

    def samples(self, model: Model) -> list[str]:
        """The first held-out pairs, with what the model says for the words under masks."""
        rows = {name: value[:2] for name, value in self.judged[0].items()}
        batch = {name: one.to(model.device) for name, one in self._tensors(rows).items()}
        guesses = self._predictions(model, batch)["masked words"][0].argmax(-1).view(2, -1).tolist()
        return [
            _filled(self.train.tokenizer, *row)
            for row in zip(
                *(rows[name].tolist() for name in ("tokens", "lengths", "places", "words")), guesses, strict=True
            )
        ]


def _filled(
    tokenizer: Tokenizer, tokens: list[int], length: int, places: list[int], words: list[int], guesses: list[int]
) -> str:
    """A row as text: [guess] where the model is right, [guess, not word] where it is not."""
    names = tokenizer.tokens(tokens[:length])
    for place, word, guess in zip(places, words, guesses, strict=True):
        if word != IGNORED:
            said, true = tokenizer.tokens([guess, word])
            shown = said if guess == word else f"{said}, not {true}"
            names[place] = ("##" if true.startswith("##") else "") + f"[{shown.replace('##', '')}]"
    return " ".join(names[1:-1]).replace(" ##", "").replace("[SEP]", "|")


def _judged(pairs: Pairs) -> Iterator[list[int]]:
    """Some examples of each kind, evenly out of all, in batches of like size."""
    kinds = (range(pairs.num_passages), range(pairs.num_passages, len(pairs.sizes)))
    for kind in kinds:
        chosen = [kind[index * len(kind) // min(JUDGED, len(kind))] for index in range(min(JUDGED, len(kind)))]
        chosen.sort(key=lambda index: pairs.sizes[index])
        yield from (chosen[start : start + TOGETHER] for start in range(0, len(chosen), TOGETHER))


def _baselines(train: Pairs, judged: Sequence[Rows], kinds: Sequence[str]) -> dict[str, float]:
    """What is reached without looking: the most frequent word, the more frequent label; and, of pairs, by the words
    that both passages share, the rare ones counting for more."""
    counts = np.bincount(train.corpus.tokens, minlength=train.tokenizer.vocabulary_size) + 1
    words = np.concatenate([rows["words"][rows["words"] != IGNORED] for rows in judged])
    found = {
        "masked words baseline": float((words == counts.argmax()).mean()),
        "masked words baseline loss": float(-np.log(counts / counts.sum())[words].mean()),
    }
    for name in kinds:
        labels = np.concatenate([rows[TERMS[name]] for rows in judged])
        labels = labels[labels != IGNORED]
        found[f"{name} baseline"] = float(np.bincount(labels).max() / len(labels))
    known = range(0, train.num_passages, max(1, train.num_passages // COMPARED))
    weights = np.log(counts.sum() / counts)
    scores, labels = _shared(train.batch(list(known), 0, 0, all_covered=True), weights)
    right = [((scores < limit) == labels).mean() for limit in np.sort(scores)]
    limit = np.sort(scores)[int(np.argmax(right))]
    paired = [rows for rows in judged if (rows["next"] != IGNORED).all()]
    results = [((scores < limit) == labels) for scores, labels in (_shared(rows, weights) for rows in paired)]
    return found | {"next sentence shared words baseline": float(np.concatenate(results).mean())}


def _shared(rows: Rows, weights: np.ndarray) -> tuple[np.ndarray, Integers]:
    """How much of two passages' words is in both, by weight; and whether the second does not follow. No word is covered
    from this."""
    tokens = rows["tokens"].copy()
    chosen = rows["words"] != IGNORED
    tokens[np.nonzero(chosen)[0], rows["places"][chosen]] = rows["words"][chosen]
    scores = []
    for row, segments, length in zip(tokens, rows["segments"], rows["lengths"], strict=True):
        first, second = (set(row[1:length][segments[1:length] == part].tolist()) for part in (0, 1))
        both, either = (weights[list(one)].sum() for one in (first & second, first | second))
        scores.append(both / either)
    return np.array(scores), rows["next"]
