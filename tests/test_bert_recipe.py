"""BERT's recipe: prose without code, pairs whose lengths and capitals say nothing, masks as published, and learning."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from regard.checkpoints.tokenizer import Tokenizer
from regard.training.data.draws import draws
from regard.training.data.held_out import is_held_out
from regard.training.data.prose import embedded, prose, sentences, split_sentences
from regard.training.data.sentence_pairs import IGNORED, Corpus, Pairs, tokenized
from regard.training.recipes import bert

ANIMALS = ("cat", "dog", "cow", "hen", "fox", "bee", "owl", "ant")
SIZES = {
    "vocabulary_size": 90,
    "embedding_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "context_length": 48,
    "dropout": 0.0,
}


def stories(count: int = 400) -> str:
    """Documents of a few sentences about one animal each: the next sentence names it again."""
    draw = random.Random(0)
    texts = []
    for number in range(count):
        animal = ANIMALS[number % len(ANIMALS)]
        places = [draw.choice(("in the big house", "on the old hill", "at the red door")) for _ in range(4)]
        texts.append(" ".join(f"The {animal} sat {place} and the {animal} ate." for place in places))
    return "\n\n".join(texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(stories())
    return path


@pytest.fixture(scope="module")
def small(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> bert.Bert:
    return bert.build(
        bert.Options(data=str(corpus), inverted_sentence=True, **SIZES), tmp_path_factory.mktemp("run"), seed=3
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> bert.Bert:
    options = bert.Options(
        inverted_sentence=True, vocabulary_size=2000, embedding_dim=16, num_heads=2, num_layers=1, context_length=64
    )
    return bert.build(options, tmp_path_factory.mktemp("python"), seed=0)


def names(tokenizer: Tokenizer, row: np.ndarray) -> list[str]:
    return tokenizer.tokens(row.tolist())


def test_documentation_becomes_sentences():
    text = """
    Heading
    =======

    Return *the* ``first`` item of :class:`list`.  It is e.g. a number, or
    "None" if there is none.

        >>> first([1])
        1
        This is what it prints and no sentence.

    * An item of a list is a sentence of its own.
    * So is another one
      that goes on.

    x = first(y)  is code, as one can see.
    first(items, *, default=None)
    NO.
    """
    assert sentences(text) == [
        "Return the first item of list.",
        "It is e.g. a number, or None if there is none.",
        "An item of a list is a sentence of its own.",
        "So is another one that goes on.",
    ]


def test_sentences_end_where_they_end():
    text = 'He said "stop." Then (so it goes.) Dr. No left? Yes! It is 3.5 now.'
    assert split_sentences(text) == ['He said "stop."', "Then (so it goes.)", "Dr. No left?", "Yes!", "It is 3.5 now."]


def test_the_embedded_prose_is_prose():
    sentences = [sentence for document in embedded().values() for sentence in document]
    assert len(sentences) > 5000
    assert len({sentence.lower() for sentence in sentences}) == len(sentences)
    assert all(sentence[0].isupper() and sentence[-1] in ".!?" for sentence in sentences)
    assert not any(sign in sentence for sentence in sentences for sign in (">>>", "==", "``", ":class:"))
    assert prose(None) == [document for document in embedded().values() if document]


def test_text_of_ones_own(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne is here.\r\nTwo is\r\nthere.\r\n\r\n \r\nThree.\r\n")
    (tmp_path / "b" / "c.md").write_text("Vier ist größer.\u2028Ja.")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert prose(tmp_path) == [["One is here.", "Two is there."], ["Three."], ["Vier ist größer.", "Ja."]]
    assert prose(tmp_path / "a.txt") == [["One is here.", "Two is there."], ["Three."]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", r"own\.txt: expected text, got an empty file"),
        (b" \n\n", r"own\.txt: expected text, got an empty file"),
        (b"Good.\nBad \xff.\n", r"own\.txt, line 2: expected UTF-8 text, got byte 0xff"),
        (b"One document. It is alone.\n", r"own\.txt: expected at least 2 documents .* got 1 and 0"),
    ],
)
def test_bad_text_is_one_error_that_names_file_and_line(tmp_path, data, words):
    (tmp_path / "own.txt").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        bert.build(bert.Options(data=str(tmp_path / "own.txt"), **SIZES), tmp_path, seed=0)


def test_sentences_that_cannot_be_inverted_are_an_error(tmp_path):
    (tmp_path / "own.txt").write_text("\n\n".join(f"Cats sleep {number}. Dogs bark." for number in range(80)))
    with pytest.raises(ValueError, match=r"own\.txt: expected sentences of three phrases or more to invert, got none"):
        bert.build(bert.Options(data=str(tmp_path / "own.txt"), inverted_sentence=True, **SIZES), tmp_path, seed=0)


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"data: expected a text file or a folder of them, got .*nowhere"):
        prose(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected a folder with \.txt, \.md, \.rst files, got none"):
        prose(tmp_path)


def test_what_is_held_out_depends_on_the_text_alone(small, corpus):
    documents = prose(corpus)
    kept = [" ".join(document) for document in documents if is_held_out("\n".join(document))]
    assert 0 < len(kept) < len(documents) / 3
    tokenizer = small.train.tokenizer
    texts = [
        tokenizer.decode(corpus.tokens[start:end].tolist())
        for corpus in (small.validation.corpus, small.tested.corpus)
        for start, end in zip(
            corpus.sentences[corpus.documents[:-1]], corpus.sentences[corpus.documents[1:]], strict=True
        )
    ]
    assert sorted(text.replace(" ", "") for text in texts) == sorted(text.replace(" ", "") for text in kept)


def test_random_numbers_are_random_and_belong_to_their_example():
    numbers = draws(1, 2, np.arange(2000), 50, 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.histogram(numbers, 10, (0, 1))[0] / numbers.size - 0.1).max() < 0.005
    assert np.array_equal(numbers[7:9, :5], draws(1, 2, np.array([7, 8]), 5, 3))
    others = [
        draws(2, 2, np.arange(2000), 50, 3),
        draws(1, 3, np.arange(2000), 50, 3),
        draws(1, 2, np.arange(2000), 50, 4),
    ]
    others += [np.roll(numbers, 1, 0), np.roll(numbers, 1, 1)]
    assert all(abs(np.corrcoef(numbers.ravel(), other.ravel())[0, 1]) < 0.02 for other in others)


def test_an_example_does_not_depend_on_its_company(small):
    many = list(range(0, len(small.sizes()), 3))
    together = small.batch(many, epoch=4)
    for place in (0, 11, len(many) - 1):
        alone = small.batch([many[place]], epoch=4)
        length = int(alone["lengths"])
        assert together["lengths"][place] == length
        for name in ("tokens", "segments"):
            assert torch.equal(together[name][place, :length], alone[name][0])
        count = int((alone["words"] != IGNORED).sum())
        for name in ("places", "words"):
            assert torch.equal(together[name][place, :count], alone[name][0, :count])
        assert (together["words"][place, count:] == IGNORED).all()
        assert all(together[name][place] == alone[name][0] for name in ("next", "inverted"))
    again = small.batch(many, epoch=4)
    assert all(torch.equal(together[name], again[name]) for name in together)
    assert not torch.equal(together["words"], small.batch(many, epoch=5)["words"][:, : together["words"].shape[1]])


def lifted(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Tokens as they were before they were covered."""
    tokens, chosen = rows["tokens"].copy(), rows["words"] != IGNORED
    tokens[np.nonzero(chosen)[0], rows["places"][chosen]] = rows["words"][chosen]
    return tokens


def passages(pairs: Pairs, indices: list[int], epoch: int = 0) -> list[tuple[list[int], list[int]]]:
    rows = pairs.batch(indices, 0, epoch)
    return [
        (row[1:length][kinds[1:length] == 0][:-1].tolist(), row[:length][kinds[:length] == 1][:-1].tolist())
        for row, kinds, length in zip(lifted(rows), rows["segments"], rows["lengths"], strict=True)
    ]


def test_the_second_passage_follows_or_is_of_another_document(python):
    pairs = python.train
    stream = pairs.corpus.tokens.tolist()
    ends = pairs.corpus.sentences[pairs.corpus.documents]
    starts = {tuple(stream[at : at + 6]): at for at in range(len(stream) - 6)}
    indices = list(range(0, pairs.num_passages, 7))
    labels = pairs.batch(indices, 0, 0)["next"]
    assert abs(labels.mean() - 0.5) < 0.06
    checked = Counter()
    for (first, second), label in zip(passages(pairs, indices), labels, strict=True):
        assert first
        assert second
        assert len(first) + len(second) + 3 <= 64
        start = starts.get(tuple(first[:6]))
        if start is None or stream[start : start + len(first)] != first:
            continue  # a short or repeated beginning
        document = np.searchsorted(ends, start, side="right")
        after = stream[start + len(first) : start + len(first) + len(second)] == second
        other = starts.get(tuple(second[:6]))
        if label == 0 and len(first) < pairs.room - 1:
            assert after
            checked["follows"] += 1
        elif label == 1 and other is not None and stream[other : other + len(second)] == second:
            assert np.searchsorted(ends, other, side="right") != document
            checked["other"] += 1
    assert min(checked["follows"], checked["other"]) > 50


def test_lengths_say_nothing_about_pairs(python):
    rows = [python.train.batch(list(range(python.train.num_passages)), 0, epoch) for epoch in range(2)]
    lengths = np.concatenate([row["segments"].sum(1) for row in rows])
    labels = np.concatenate([row["next"] for row in rows])
    best = max(max(m := ((lengths < limit) == labels).mean(), 1 - m) for limit in range(64))
    assert best < 0.53


def test_sizes_are_those_of_the_examples_or_nearly(python):
    lengths = python.train.batch(list(range(len(python.sizes()))), 0, 0)["lengths"]
    assert lengths.max() <= 64
    sizes = np.array(python.sizes())
    inverted = sizes[python.train.num_passages :]
    assert np.array_equal(lengths[python.train.num_passages :], inverted)
    assert abs(lengths - sizes).mean() < 0.5


def test_words_are_covered_as_published(python):
    pairs, tokenizer = python.train, python.train.tokenizer
    rows = pairs.batch(list(range(pairs.num_passages)), 0, 1)
    special = [getattr(tokenizer, role) for role in tokenizer.special]
    before = lifted(rows)
    words = ~np.isin(before, special) & (np.arange(before.shape[1]) < rows["lengths"][:, None])
    chosen = rows["words"] != IGNORED
    assert abs(chosen.sum() / words.sum() - 0.15) < 0.005
    assert (chosen.sum(1) >= 1).all()
    assert not np.isin(rows["words"], special).any()
    after = np.take_along_axis(rows["tokens"], rows["places"], 1)[chosen]
    was = rows["words"][chosen]
    assert abs((after == tokenizer.mask).mean() - 0.8) < 0.01
    assert abs((after == was).mean() - 0.1) < 0.01
    assert not np.isin(after[after != tokenizer.mask], special).any()
    for row in range(0, len(before), 50):  # each place once
        places = rows["places"][row][chosen[row]]
        assert len(set(places.tolist())) == len(places)
        changed = np.flatnonzero(before[row] != rows["tokens"][row])
        assert set(changed.tolist()) <= set(places.tolist())
    judged = pairs.batch(list(range(200)), 0, 1, all_covered=True)
    chosen_words = judged["words"] != IGNORED
    assert (np.take_along_axis(judged["tokens"], judged["places"], 1)[chosen_words] == tokenizer.mask).all()


def test_inverted_sentences(small):
    pairs, tokenizer = small.train, small.train.tokenizer
    indices = list(range(pairs.num_passages, len(small.sizes())))
    rows = pairs.batch(indices, 0, 0)
    assert (rows["words"] == IGNORED).all()
    assert (rows["next"] == IGNORED).all()
    assert (pairs.batch([0], 0, 0)["inverted"] == IGNORED).all()
    assert abs(rows["inverted"].mean() - 0.5) < 0.1
    orders = set()
    for (first, second), label in zip(passages(pairs, indices), rows["inverted"], strict=True):
        assert sorted(first) == sorted(second)
        assert first[-1] == second[-1]
        text, turned = (" ".join(names(tokenizer, np.array(tokens))).replace(" ##", "") for tokens in (first, second))
        subject, place, animal = text.removesuffix(" .").split(" ")[1], text.split(" sat ")[1].split(" and ")[0], "ate"
        reverse = f"and the {subject} {animal} {place} The {subject} sat ."
        assert (turned == reverse) == (label == 0)
        assert turned.endswith(f"The {subject} sat .")
        orders.add((turned.split(subject)[0], int(label)))
    assert {label for _, label in orders} == {0, 1}


def test_orders_of_many_phrases_differ():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer.from_vocabulary([*special, "of", "in", *"vwxyz", "."], r"\w+|\.")
    pairs = Pairs(tokenized([["v of w in x of y in z."] * 40], tokenizer), tokenizer, 32, inverted=True)
    rows = pairs.batch(list(range(pairs.num_passages, len(pairs.sizes))), 0, 0)
    orders = {label: set() for label in (0, 1)}
    for row, length, label in zip(rows["tokens"], rows["lengths"], rows["inverted"], strict=True):
        orders[label].add(" ".join(names(tokenizer, row[12:length])))
    assert orders[0] == {"in z of y in x of w v . [SEP]"}
    assert len(orders[1]) > 5
    assert all(text.endswith(" v . [SEP]") for text in orders[1])


def test_a_batch_is_the_sum_of_its_examples(small):
    model = small.model.double().eval()
    try:
        indices = [0, 5, 9, small.train.num_passages + 1, small.train.num_passages + 6]
        together = small.batch(indices, epoch=1)
        counts = small.counts(together)
        parts = [small.batch([index], epoch=1) for index in indices]
        assert counts == {name: sum(small.counts(part)[name] for part in parts) for name in counts}
        assert (counts["next sentence"], counts["inverted sentence"]) == (3, 2)
        totals = small.totals(model, together)
        for name, total in totals.items():
            assert abs(total - sum(small.totals(model, part)[name] for part in parts)) <= 1e-9
        # Scoring every place and keeping the chosen ones gives the same.
        hidden = model(together["tokens"], together["segments"], rg.padding(together["lengths"]))
        labels = torch.full_like(together["tokens"], IGNORED)
        chosen = together["words"] != IGNORED
        labels[chosen.nonzero()[:, 0], together["places"][chosen]] = together["words"][chosen]
        whole = torch.nn.functional.cross_entropy(
            model.masked_words(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        assert abs(whole - totals["masked words"]) <= 1e-9
    finally:
        model.float()


def test_words_are_scored_where_they_are_covered_only(small):
    batch = small.batch(list(range(8)), epoch=0)
    seen = []
    hook = small.model.words.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    small.totals(small.model, batch)
    hook.remove()
    assert seen == [(8, batch["places"].shape[1], small.model.config.vocabulary_size)]
    assert batch["places"].shape[1] < 0.25 * batch["tokens"].shape[1]


def test_a_folder_with_tokens_needs_no_text(corpus, tmp_path):
    gone = tmp_path / "gone.txt"
    gone.write_text(corpus.read_text())
    (tmp_path / "data").mkdir()
    options = bert.Options(data=str(gone), **SIZES)
    first = bert.build(options, tmp_path / "data", seed=3)
    gone.unlink()
    second = bert.build(options, tmp_path / "data", seed=3)
    assert list(first.sizes()) == list(second.sizes())
    a, b = first.batch([1, 2, 3], 7), second.batch([1, 2, 3], 7)
    assert a.keys() == b.keys()
    assert "inverted" not in a
    assert all(torch.equal(a[name], b[name]) for name in a)
    own_state = second.model.state_dict()
    assert all(torch.equal(tensor, own_state[name]) for name, tensor in first.model.state_dict().items())
    saved = Corpus.load(tmp_path / "data" / "train.npz")
    assert np.array_equal(saved.tokens, first.train.corpus.tokens)
    assert not list((tmp_path / "data").glob(".*"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_dim": 30}, "num_heads: expected a divisor of embedding_dim = 30"),
        ({"mechanism": "hope"}, "mechanism: expected one of"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor"),
        ({"window": 4}, r"window: expected Window\(before, after\), got 4"),
        ({"context_length": 4}, "context_length: expected at least 16"),
        ({"vocabulary_size": 3}, "vocabulary_size: expected at least 8"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1"),
    ],
)
def test_options_are_checked_before_any_work(changes, words):
    with pytest.raises(ValueError, match=words):
        bert.Options(**changes)


@pytest.mark.parametrize("changes", [{"mechanism": "elu"}, {"num_kv_heads": 1}, {"window": rg.Window(3, 3)}])
def test_any_attention_takes_a_step(corpus, tmp_path, changes):
    task = bert.build(bert.Options(data=str(corpus), **SIZES, **changes), tmp_path, seed=0)
    totals = task.totals(task.model, task.batch([0, 1, 2], 0))
    sum(totals.values()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in task.model.parameters())
    expected = {"mechanism": rg.Elu()} if "mechanism" in changes else changes
    expected = {"num_kv_heads" if name == "kv_heads" else name: value for name, value in expected.items()}
    assert {name: getattr(task.model.config, name) for name in expected} == expected


def test_it_learns_words_and_inversions(small):
    task = small
    start = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    first = evaluated(task)
    assert evaluated(task) == first
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-3)
    draw = np.random.default_rng(0)
    task.model.train()
    for step in range(300):
        batch = task.batch(draw.integers(0, len(task.sizes()), 24).tolist(), epoch=step)
        counts = task.counts(batch)
        loss = sum(total / counts[name] for name, total in task.totals(task.model, batch).items())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results = evaluated(task)
    samples = task.samples(task.model)
    task.model.load_state_dict(start)
    assert results["loss"] < first["loss"]
    assert results["masked words accuracy"] > results["masked words baseline"] + 0.3
    assert results["masked words loss"] < results["masked words baseline loss"] - 1
    assert results["inverted sentence accuracy"] > 0.95
    assert len(samples) == 2
    assert all("[" in sample and "|" in sample for sample in samples)


def evaluated(task: bert.Bert) -> dict[str, float]:
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(task.model)


def test_results_stand_beside_their_baselines(python):
    results = evaluated(python)
    tasks = ("masked words", "next sentence", "inverted sentence")
    assert results["loss"] == pytest.approx(sum(results[f"{name} loss"] for name in tasks))
    assert all(0 <= results[f"{name} {kind}"] <= 1 for name in tasks for kind in ("accuracy", "baseline"))
    assert 0.5 <= results["next sentence baseline"] < 0.6
    assert 0.03 < results["masked words baseline"] < 0.1
    # Passages that follow each other share words; that alone tells more than chance.
    assert 0.6 < results["next sentence shared words baseline"] < 0.9
    assert "documents" in python.card().data
