"""Vocabularies learned from texts: the same texts give the same vocabulary, on every machine and every time.

The name of a special token in a text is encoded as that token: a text with [END] has an end token.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from regard.checkpoints.tokenizer import Tokenizer
from regard.checkpoints.tokenizer_parts import BERT
from regard.core.extras import needed_for

if TYPE_CHECKING:
    import tokenizers

TRANSLATION = {"pad": "[PAD]", "bos": "[START]", "eos": "[END]", "unk": "[UNK]"}
"""The special tokens of `train_bpe` by role; their ids are 0 to 3."""
WORDPIECE = ("pad", "unk", "classification", "separator", "mask")
"""Roles of the special tokens of `train_wordpiece`; their ids are 0 to 4."""

# English endings (don't, Marie's), French beginnings (l'arbre, qu'elle), words, single digits, signs, spaces.
_ENDING = r"(?:s|t|re|ve|m|ll|d)(?!\p{L})"
CUT = rf"['’]{_ENDING}| ?\p{{L}}+['’](?!{_ENDING})(?=\p{{L}})| ?\p{{L}}+| ?\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
"""The pre-tokenizer: how texts are split before pieces are merged."""


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens: [PAD] = 0, [START] = 1 (bos), [END] = 2 (eos), [UNK] = 3.

    `encode(text)` is the text and [END], the source sequence in training and in `rg.generate`. A target sequence is
    `[tokenizer.bos, *tokenizer.encode(text)]`. `encode(text, special=False)` has no special tokens. Decoding returns
    the original text.

    >>> tokenizer = train_bpe(["l'arbre rouge", "l'arbre vert"] * 9, size=270)
    >>> ids = tokenizer.encode("l'arbre")
    >>> tokenizer.tokens(ids), tokenizer.decode(ids)
    (["l'", 'arbre', '[END]'], "l'arbre")
    """
    with needed_for("a vocabulary"):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    letters = pre_tokenizers.ByteLevel.alphabet()
    _check_size(size, len(TRANSLATION) + len(letters))
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    special = list(TRANSLATION.values())
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    inner.train_from_iterator(_checked(texts), trainer)
    end = TRANSLATION["eos"]
    inner.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, inner.token_to_id(end))]
    )
    return Tokenizer(inner, TRANSLATION)


def train_wordpiece(texts: Iterable[str], size: int) -> Tokenizer:
    """BERT's WordPiece vocabulary of at most `size` tokens: [PAD] = 0, [UNK] = 1, [CLS] = 2, [SEP] = 3, [MASK] = 4.

    `encode(text)` is [CLS] text [SEP]. It is cased: upper and lower case are different.

    >>> tokenizer = train_wordpiece(["the cat sat", "the cap is his"] * 9, size=40)
    >>> tokenizer.tokens(tokenizer.encode("the cats"))
    ['[CLS]', 'the', 'cat', '##s', '[SEP]']
    """
    with needed_for("a vocabulary"):
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    def empty(vocabulary: dict[str, int]) -> "tokenizers.Tokenizer":
        inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=BERT["unk"]))
        inner.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(cleanup=False)
        return inner

    texts, special = _checked(texts), [BERT[role] for role in WORDPIECE]
    learner = empty({})
    words = {
        word
        for text in texts
        for word, _ in learner.pre_tokenizer.pre_tokenize_str(learner.normalizer.normalize_str(text))
    }
    inside = sorted({f"##{letter}" for word in words for letter in word[1:]})
    _check_size(size, len(special) + len(inside) + len({letter for word in words for letter in word}))
    # The trainer numbers letters inside of words in a different order each time and breaks ties by these numbers.
    # Passed as special tokens, they are numbered first; in the final tokenizer they are ordinary pieces.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[*special, *inside], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    inner = empty(learner.get_vocab())
    inner.add_special_tokens(special)
    first, last = BERT["classification"], BERT["separator"]
    inner.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, inner.token_to_id(token)) for token in (first, last)],
    )
    return Tokenizer(inner, BERT)


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise ValueError("texts: expected several strings, got one")
    strings = list(texts)
    if not strings:
        raise ValueError("texts: expected one or more strings, got none")
    return strings


def _check_size(size: int, least: int) -> None:
    if type(size) is not int or size < least:
        raise ValueError(f"size: expected at least {least}, for special tokens and single letters, got {size!r}")
