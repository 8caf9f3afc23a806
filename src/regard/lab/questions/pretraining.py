"""The tasks that BERT is trained on, and contrastive ones."""

import torch

import regard as rg
from regard.lab.answers import blank, called, entries, kind, real
from regard.lab.question import BLANK, question

SENTENCES = (
    "The boy ran to the river.",
    "He threw a stone into the water.",
    "The stone sank at once.",
    "A fish looked at it.",
    "Nobody else saw the stone.",
    "Then it began to rain.",
)


@question(
    "pretraining.1",
    tasks=("004.12.6",),
    text=(
        "BERT is trained on two tasks: predicting masked words, and saying whether the second sentence follows the "
        'first. Which is `"generative"` (a word is made), and which `"contrastive"` (true examples are told from false '
        "ones)? And among how many classes does each choose, with a vocabulary of 30,000?"
    ),
    begin=(
        "pretraining_1 = {\n"
        '    "masked words": ...,\n'
        '    "next sentence": ...,\n'
        '    "classes of masked words": ...,\n'
        '    "classes of next sentence": ...,\n'
        "}"
    ),
    solution=(
        "{\n"
        '    "masked words": "generative",\n'
        '    "next sentence": "contrastive",\n'
        '    "classes of masked words": 30_000,\n'
        '    "classes of next sentence": 2,\n'
        "}"
    ),
)
def _tasks(answer: object) -> str:
    with torch.device("meta"):
        config = rg.EncoderConfig.bert(vocabulary_size=30_000, embedding_dim=8, num_layers=1, num_heads=1)
        model = rg.Encoder(config)
        hidden = model(torch.zeros(1, 4, dtype=torch.long))
        words, order = model.masked_words(hidden).shape[-1], model.next_sentence(hidden).shape[-1]

    def sort(classes: int) -> str:
        return "generative" if classes == config.vocabulary_size else "contrastive"

    return entries(
        answer,
        {
            "masked words": sort(words),
            "next sentence": sort(order),
            "classes of masked words": words,
            "classes of next sentence": order,
        },
        {
            "masked words": {"a word of the whole vocabulary is predicted": "contrastive"},
            "next sentence": {"nothing is written: it is decided whether a pair is true": "generative"},
            "classes of next sentence": {"follows, or does not: two classes": 1},
        },
    )


@question(
    "pretraining.2",
    tasks=("004.12.6",),
    text=(
        "Propose a contrastive task that needs no labels: from a list of `sentences` of a text (at least four), return "
        "examples `(first, second, label)`. Label 1: `second` is what it should be. Label 0: it was spoilt, in a way "
        "that *you* choose, but not by taking another sentence: `second` must differ from all sentences of the text. "
        "Both labels must occur equally often, and nothing may be drawn that the text does not give."
    ),
    begin="def examples(sentences):",
    solution=(
        "def reverse(sentence):\n"
        '    return " ".join(reversed(sentence.split()))\n\n'
        "true = [(a, b, 1) for a, b in zip(sentences, sentences[1:])]\n"
        "return true + [(a, reverse(b), 0) for a, b, _ in true]"
    ),
    points=3,
)
def _examples(answer: object) -> str:
    if blank(answer):
        return BLANK
    if not callable(answer):
        return f"expected a function of (sentences), got {kind(answer)}"
    made, error = called(answer, list(SENTENCES))
    if error or blank(made):
        return BLANK if error in ("", BLANK) else f"it {error}"
    triples = made if isinstance(made, list | tuple) else ()
    if not triples or any(not isinstance(example, list | tuple) or len(example) != 3 for example in triples):
        return f"expected a list of (first, second, label), got {kind(made)}"
    if any(not isinstance(text, str) for *texts, _ in triples for text in texts):
        return "expected strings as first and second"
    labels = [label for *_, label in triples]
    if other := [label for label in labels if real(label) not in (0, 1)]:
        return f"expected the labels 0 and 1, got {kind(other[0])}"
    if labels.count(0) != labels.count(1):
        return f"{labels.count(1)} examples have label 1, {labels.count(0)} have label 0: guessing would pay"
    true, false = ({(first, second) for first, second, label in triples if label == which} for which in (1, 0))
    if both := true & false:
        return f"a pair has both labels: {next(iter(both))}"
    if copied := [second for _, second in false if second in SENTENCES]:
        return f"label 0 has a sentence of the text as it stands: {copied[0]!r}"
    words = {word.strip(".").lower() for sentence in SENTENCES for word in sentence.split()}
    strange = {word.strip(".").lower() for first, second in true | false for word in (first + " " + second).split()}
    if strange - words:
        return f"the text does not have the word {sorted(strange - words)[0]!r}"
    return ""
