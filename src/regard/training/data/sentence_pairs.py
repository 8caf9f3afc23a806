"""BERT's training examples: pairs of passages with masked words.

    [CLS] passage [SEP] passage [SEP]

A document is cut into passages of whole sentences. Half of the time the second passage is the one that follows the
first; otherwise it is from another document and of about the same length, so that the length tells nothing. For the
inverted sentence, the first passage is one sentence and the second passage is the same sentence with its phrases in
another order: half of the time in reverse, "the boy ran quickly" to "quickly ran the boy". The words are the same in
both cases, and only their order tells; the first phrase, which has the capital letter, comes last in both.

15 % of the words of a pair are predicted: 80 % of them are replaced by [MASK], 10 % by another word, 10 % stay.
(Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers", 3.1.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.files import write
from regard.training.data.arrays import load_arrays
from regard.training.data.draws import draws
from regard.training.data.prose import Document

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
Rows = dict[str, Integers]

CHOSEN, COVERED, CHANGED = 0.15, 0.8, 0.1
"""The share of words that is predicted; of these, the share that is masked, and the share that is changed."""
IGNORED = -100
"""The label of positions without a prediction: the `ignore_index` of torch's cross-entropy."""
FOLLOWS, INVERTED = 0, 0
"""Labels of a second passage that follows, or is inverted; 1 if it does not or is not."""
NEIGHBOURS = 128
"""Number of passages of about the same length that a false second passage is drawn from."""
TRIES = 8
"""Draws to get a passage of another document; if all fail, the true second passage is used."""
FEWEST_PHRASES = 3
"""Phrases of a sentence to be inverted, at least: with fewer, there is no third order."""

PHRASE_WORDS = (
    *("a", "an", "the", "this", "these", "its", "their", "each", "any", "all", "no", "not", "is", "are", "was", "were"),
    *("be", "been", "has", "have", "had", "can", "may", "will", "must", "should", "would", "does", "do", "and", "or"),
    *("but", "if", "when", "while", "because", "unless", "than", "that", "which", "who", "where", "of", "to", "in"),
    *("on", "at", "by", "for", "with", "without", "from", "as", "into", "over", "under", "after", "before", "between"),
)
"""Words that begin a phrase."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as tokens: all tokens in one array, and where sentences and documents begin (and the last one ends)."""

    tokens: Integers
    sentences: Integers
    documents: Integers
    """The index of each document's first sentence."""

    def save(self, path: Path) -> None:
        """Write one file atomically."""
        write(
            path,
            lambda temporary: np.savez(
                temporary, tokens=self.tokens, sentences=self.sentences, documents=self.documents
            ),
        )

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read a file that `save` wrote."""
        return cls(*load_arrays(path, "tokens", "sentences", "documents"))


def tokenized(documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """Documents as tokens.

    >>> from regard.checkpoints.tokenizer import Tokenizer
    >>> from regard.training.data.sentence_pairs import tokenized
    >>> corpus = tokenized([["a b.", "b."], ["a."]], Tokenizer.from_vocabulary(["[UNK]", "a", "b", "."]))
    >>> corpus.tokens.tolist(), corpus.sentences.tolist(), corpus.documents.tolist()
    ([1, 2, 3, 2, 3, 1, 3], [0, 3, 5, 7], [0, 2, 3])
    """
    rows = [[tokenizer.encode(sentence, special=False) for sentence in document] for document in documents]
    rows = [[row for row in document if row] for document in rows]
    flat = [token for document in rows for row in document for token in row]
    return Corpus(
        np.array(flat, np.int64),
        np.cumsum([0, *(len(row) for document in rows for row in document)]),
        np.cumsum([0, *(len(document) for document in rows)]),
    )


@dataclass(frozen=True, eq=False)
class Pairs:
    """The examples of a corpus, of at most `length` tokens each: pairs of passages and, with `inverted`, after them an
    example for each sentence of at least three phrases. `batch` is a pure function of its arguments.

    >>> from regard.checkpoints.tokenizer import Tokenizer
    >>> from regard.training.data.sentence_pairs import Pairs, tokenized
    >>> tokenizer = Tokenizer.from_vocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "."])
    >>> pairs = Pairs(tokenized([["a a.", "a."], ["b b.", "b."]], tokenizer), tokenizer, length=16)
    >>> batch = pairs.batch([0, 1], seed=0, epoch=3)
    >>> batch["next"].tolist(), [" ".join(tokenizer.tokens(row)) for row in batch["tokens"].tolist()]
    ([0, 1], ['[CLS] a a [MASK] [SEP] a . [SEP]', '[CLS] [MASK] b . [SEP] a . [SEP]'])
    """

    corpus: Corpus
    tokenizer: Tokenizer
    length: int
    inverted: bool = False

    @cached_property
    def sizes(self) -> Integers:
        """Tokens of each example; with a false second passage an example can have a few more or less."""
        starts, ends, _, seconds = self._passages
        sizes = ends - starts
        first, last = self._inversions
        return np.concatenate([sizes[seconds - 1] + sizes[seconds], 2 * (last - first)]) + 3

    @property
    def num_passages(self) -> int:
        """How many examples are pairs of passages; they come first."""
        return len(self._passages[3])

    @property
    def room(self) -> int:
        """The largest number of tokens of a passage."""
        return (self.length - 3) // 2

    def batch(self, indices: Sequence[int], seed: int, epoch: int, *, all_covered: bool = False) -> Rows:
        """Some examples: `tokens` and `segments` (B, T), `lengths` (B,); `places` and `words` (B, M), the positions and
        the words to predict; `next` and `inverted` (B,), the labels of the second passage.

        With `all_covered`, all words to predict are replaced by [MASK], as in evaluations.
        """
        chosen = np.asarray(indices, np.int64)

        def draw(purpose: int, count: int) -> Numbers:
            return draws(seed, epoch, chosen, count, purpose)

        paired = chosen < self.num_passages
        labels = (draw(_LABEL, 1)[:, 0] >= 0.5).astype(np.int64)
        first, second = np.empty((len(chosen), 2), np.int64), np.empty((len(chosen), 2), np.int64)
        partners = draw(_PARTNER, TRIES)[paired]
        first[paired], second[paired], labels[paired] = self._pair(chosen[paired], labels[paired], partners)
        first[~paired] = second[~paired] = np.stack(self._inversions, 1)[chosen[~paired] - self.num_passages]

        sizes = first[:, 1] - first[:, 0]
        lengths = sizes + second[:, 1] - second[:, 0] + 3
        columns = np.arange(lengths.max())
        ahead, behind = columns - 1, columns - sizes[:, None] - 2  # positions in the first and second passage
        in_first = (ahead >= 0) & (ahead < sizes[:, None])
        in_second = (behind >= 0) & (columns < lengths[:, None] - 1)
        source = np.where(in_first, first[:, :1] + ahead, np.where(in_second, second[:, :1] + behind, 0))
        if not paired.all():
            orders = self._orders(second[~paired], labels[~paired], draw(_ORDER, self.room)[~paired])
            source[in_second & ~paired[:, None]] = orders

        tokens = np.where(in_first | in_second, self.corpus.tokens[source], self._role("pad"))
        tokens[:, 0] = self._role("classification")
        np.put_along_axis(tokens, np.stack([sizes + 1, lengths - 1], 1), self._role("separator"), 1)
        words = (in_first | in_second) & paired[:, None] & ~np.isin(tokens, self._special)
        return {
            "tokens": tokens,
            "segments": ((behind >= 0) & (columns < lengths[:, None])).astype(np.int64),
            "lengths": lengths,
            **self._masked(tokens, words, draw, all_covered),
            "next": np.where(paired, labels, IGNORED),
            "inverted": np.where(paired, IGNORED, labels),
        }

    def _pair(self, indices: Integers, labels: Integers, random: Numbers) -> tuple[Integers, Integers, Integers]:
        """Bounds of first and second passages, and the labels; the true passage if no other document was drawn."""
        starts, ends, owners, seconds = self._passages
        bounds = np.stack([starts, ends], 1)
        true, (order, places) = seconds[indices], self._by_size
        low = np.clip(places[indices] - NEIGHBOURS // 2, 0, max(0, len(order) - NEIGHBOURS))
        drawn = order[low[:, None] + (random * min(NEIGHBOURS, len(order))).astype(np.int64)]
        others = owners[drawn] != owners[true][:, None]
        labels = np.where(others.any(1), labels, FOLLOWS)
        false = np.take_along_axis(drawn, others.argmax(1)[:, None], 1)[:, 0]
        return bounds[true - 1], bounds[np.where(labels == FOLLOWS, true, false)], labels

    def _orders(self, bounds: Integers, labels: Integers, random: Numbers) -> Integers:
        """The tokens of the second passages, as indices into the corpus: the phrases of each in reverse or, if not
        inverted, the first phrase last and the others in any order but the reverse. The full stop stays at the end."""
        sizes = (bounds[:, 1] - bounds[:, 0])[:, None]
        columns = np.arange(sizes.max())
        inside = columns < sizes
        tokens = np.where(inside, bounds[:, :1] + columns, bounds[:, :1])
        phrases = self._phrases[tokens]
        last = columns == sizes - 1
        counts = np.where(inside & ~last, phrases, 0).max(1, keepdims=True) + 1
        numbers = np.arange(counts.max())
        reverse = counts - 1 - numbers
        keys = np.where(numbers < counts, random[:, : len(numbers)], 2.0)
        keys[:, 0] = 1.0
        ranks = np.argsort(np.argsort(keys, kind="stable"))
        unfit = ((ranks == reverse) | (numbers >= counts)).all(1, keepdims=True)
        ranks = np.where(unfit, (numbers - 1) % counts, ranks)
        ranks = np.where(labels[:, None] == INVERTED, reverse, ranks)
        keys = np.take_along_axis(ranks, np.where(inside, phrases, 0), 1)
        keys = np.where(inside, np.where(last, self.room, keys), self.room + 1)
        return np.take_along_axis(tokens, np.argsort(keys, axis=1, kind="stable"), 1)[inside]

    def _masked(self, tokens: Integers, words: NDArray[np.bool_], draw: "Draw", all_covered: bool) -> Rows:
        """Choose among `words` and mask them in `tokens`, in place. Returns their positions and the original words."""
        counts = np.maximum(np.rint(CHOSEN * words.sum(1)), words.any(1)).astype(np.int64)
        most = max(1, int(counts.max()))
        order = np.argsort(np.where(words, draw(_CHOICE, tokens.shape[1]), 2.0), axis=1, kind="stable")[:, :most]
        chosen = np.arange(most) < counts[:, None]
        places = np.where(chosen, order, 0)
        were = np.take_along_axis(tokens, places, 1)
        kind = np.zeros(places.shape) if all_covered else draw(_KIND, most)
        others = self._ordinary[(draw(_WORD, most) * len(self._ordinary)).astype(np.int64)]
        become = np.where(kind < COVERED, self._role("mask"), np.where(kind < COVERED + CHANGED, others, were))
        tokens[np.nonzero(chosen)[0], places[chosen]] = become[chosen]
        return {"places": places, "words": np.where(chosen, were, IGNORED)}

    def _role(self, role: str) -> int:
        return int(getattr(self.tokenizer, role))

    @cached_property
    def _special(self) -> Integers:
        return np.array([self._role(role) for role in self.tokenizer.special], np.int64)

    @cached_property
    def _ordinary(self) -> Integers:
        return np.setdiff1d(np.arange(self.tokenizer.vocabulary_size), self._special)

    @cached_property
    def _passages(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Where passages begin and end, their documents, and which passages follow another of the same document."""
        starts, ends, owners = [], [], []
        bounds, documents = self.corpus.sentences.tolist(), self.corpus.documents.tolist()
        for document, (at, last) in enumerate(pairwise(documents)):
            # Short documents are cut into two passages, too.
            room = min(self.room, (bounds[last] - bounds[at] + 1) // 2)
            while at < last:
                end = at + 1
                while end < last and bounds[end + 1] - bounds[at] <= room:
                    end += 1
                starts.append(bounds[at])
                ends.append(min(bounds[end], bounds[at] + self.room))
                owners.append(document)
                at = end
        document_of = np.array(owners, np.int64)
        seconds = np.flatnonzero(document_of[1:] == document_of[:-1]) + 1
        return np.array(starts, np.int64), np.array(ends, np.int64), document_of, seconds

    @cached_property
    def _by_size(self) -> tuple[Integers, Integers]:
        """Second passages from the shortest to the longest, and the rank of each among them."""
        starts, ends, _, seconds = self._passages
        order = np.argsort((ends - starts)[seconds], kind="stable")
        return seconds[order], np.argsort(order)

    @cached_property
    def _phrases(self) -> Integers:
        """The number of each token's phrase in its sentence."""
        tokens, sentences = self.corpus.tokens, self.corpus.sentences
        words = [self.tokenizer.encode(word, special=False) for word in PHRASE_WORDS]
        begins = np.isin(tokens, [word[0] for word in words if len(word) == 1])
        begins[1:] &= ~begins[:-1]  # "of the box" is one phrase
        number = np.cumsum(begins)
        return number - np.repeat(number[sentences[:-1]], np.diff(sentences))

    @cached_property
    def _inversions(self) -> tuple[Integers, Integers]:
        """Where the sentences that can be inverted begin and end."""
        starts, ends = self.corpus.sentences[:-1], self.corpus.sentences[1:]
        fits = (ends - starts >= 2) & (ends - starts <= self.room) & self.inverted
        starts, ends = starts[fits], ends[fits]
        enough = self._phrases[ends - 2] >= FEWEST_PHRASES - 1
        return starts[enough], ends[enough]


Draw = Callable[[int, int], Numbers]
"""Draws random numbers for a purpose: a row of a given length for each example."""
_LABEL, _PARTNER, _ORDER, _CHOICE, _KIND, _WORD = range(6)
