"""The phrase-book: its grammar, and the split by combinations of words."""

import random
import re
from itertools import islice

import pytest

from regard.training.data import grammar, lexicon
from regard.training.data.grammar import Writer
from regard.training.data.phrasebook import _is_held_out, _sentences, phrasebook, swaps, words


@pytest.fixture(scope="module")
def train():
    return list(islice(_sentences("train", 0), 50_000))


@pytest.fixture(scope="module")
def held_out():
    return list(islice(_sentences("held_out", 0), 3_000))


# --- the phrase-book: one translation a sentence, and the split


def test_a_french_sentence_has_one_translation(train, held_out):
    translation = {}
    for seed in (1, 2):
        for french, english in phrasebook("train", 5_000, seed):
            assert translation.setdefault(french, english) == english
    for sentence in (*train, *held_out):
        assert translation.setdefault(sentence.french, sentence.english) == sentence.english
    assert len(translation) > 50_000


def test_a_sentence_that_can_be_derived_twice_means_the_same(monkeypatch):
    # A few words only, so that the grammar's forms meet often.
    few = {"livre", "ami", "amie", "chat", "gare", "pain", "médecin", "boîte", "sac", "table"}
    whole = grammar._nouns

    def nouns(kinds):
        return tuple(noun for noun in whole(kinds) if noun.french in few) or whole(kinds)

    monkeypatch.setattr(grammar, "_nouns", nouns)
    monkeypatch.setattr(grammar, "_NOUNS", nouns("koat"))
    monkeypatch.setattr(grammar, "_NAMES", grammar._NAMES[:2])
    for table in ("_VERBS", "_DEEDS", "_ACTING", "_INDIRECT", "_GIVING"):
        monkeypatch.setattr(grammar, table, getattr(grammar, table)[:3])
    writer = Writer(random.Random(0))
    meanings = {}
    repeated = 0
    for _ in range(20_000):
        sentence = writer.sentence()
        repeated += sentence.french in meanings
        meaning = sentence.english, set(sentence.combinations)
        assert meanings.setdefault(sentence.french, meaning) == meaning, sentence.french
    assert repeated > 2_000


def test_held_out_combinations_are_never_seen(train, held_out):
    seen = {combination for sentence in train for combination in sentence.combinations}
    assert not any(map(_is_held_out, seen))
    for sentence in held_out:
        assert set(sentence.combinations) - seen, sentence.french
    unseen = [pair for sentence in held_out for pair in sentence.combinations if _is_held_out(pair)]
    assert len(set(unseen)) > 500
    assert not seen & set(unseen)


def forms():
    """Every form that a word of the dictionary can take."""
    forms_of = {name: {name} for name in lexicon.NAMES}
    for noun in lexicon.nouns(lexicon.NOUNS):
        forms_of[noun.french] = {noun.french, noun.french_plural}
    for adjective in (*lexicon.adjectives(lexicon.BEFORE, True), *lexicon.adjectives(lexicon.AFTER, False)):
        forms_of[adjective.forms[0]] = {*adjective.forms, adjective.before_vowel}
    tables = (lexicon.VERBS, *lexicon.INDIRECT.values(), lexicon.GIVING, lexicon.ACTING, lexicon.GOING)
    tables += (lexicon.STAYING, lexicon.STATING, "coûter = cost")
    for verb in (verb for table in tables for verb in lexicon.verbs(table)):
        participles = {verb.participle + end for end in ("", "e", "s", "es")}
        forms_of[verb.french] = {verb.french, *verb.present, *participles}
    return forms_of


def test_combinations_are_of_words_in_the_sentence(train, held_out):
    table = forms()
    for sentence in (*train, *held_out):
        there = set(words(sentence.french)) | set(words(sentence.french.lower()))
        for word in {word for combination in sentence.combinations for word in combination}:
            assert table[word] & there, (sentence.french, word)


def test_no_sentence_is_in_both_splits(train, held_out):
    assert not {sentence.french for sentence in train} & {sentence.french for sentence in held_out}


def test_held_out_words_all_occur_in_training(train, held_out):
    for side in ("french", "english"):
        trained = {word for sentence in train for word in words(getattr(sentence, side))}
        met = {word for sentence in held_out for word in words(getattr(sentence, side))}
        assert met <= trained, met - trained
        assert len(trained) > 800


def test_the_red_car_is_said_and_is_held_out(monkeypatch):
    car = [noun for noun in lexicon.nouns(lexicon.NOUNS) if noun.french == "voiture"]
    few = [
        adjective
        for adjective in lexicon.adjectives(lexicon.AFTER, False)
        if adjective.forms[0] in ("rouge", "rapide", "cher")
    ]
    monkeypatch.setattr(grammar, "_NOUNS", car)
    monkeypatch.setattr(grammar, "_adjectives", lambda kinds, precedes: [] if precedes else few)
    monkeypatch.setattr(grammar, "_FORMS", [Writer._describe])
    writer = Writer(random.Random(0))
    sentences = {writer.sentence()[:2] for _ in range(5_000)}
    assert ("La voiture rouge est rapide.", "The red car is fast.") in sentences
    assert _is_held_out(("voiture", "rouge"))


def test_the_first_pairs_of_more_are_the_same_and_seeds_differ():
    assert phrasebook("train", 500) == phrasebook("train", 2_000)[:500]
    assert phrasebook("held_out", 50, 7) == phrasebook("held_out", 200, 7)[:50]
    assert swaps("train", 50) == swaps("train", 200)[:50]
    assert phrasebook("train", 50, 1) != phrasebook("train", 50, 2)
    assert len(set(phrasebook("train", 2_000))) == 2_000
    assert phrasebook("train", 0) == []


def test_the_phrasebook_is_the_same_on_every_machine():
    assert phrasebook("train", 4, 3) == [
        ("Votre salade était froide.", "Your salad was cold."),
        ("Tu adores la mère.", "You love the mother."),
        ("Les jeunes chevaux ont nagé.", "The young horses swam."),
        ("Leur roman n'était pas espagnol.", "Their novel was not Spanish."),
    ]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="split: expected train or held_out, got 'test'"):
        phrasebook("test", 1)
    with pytest.raises(ValueError, match="count: expected a whole number of at least 0, got -1"):
        swaps("train", -1)


# --- the phrase-book: grammar


def test_spelling(train):
    elision = re.compile(r"\b(le|la|de|ne|je|me|te|que) (?!onze|huit)[aeiouyhâéêèîôœ]", re.IGNORECASE)
    for sentence in train:
        french, english = sentence.french, sentence.english
        assert not elision.search(french), french
        assert not re.search(r"\b(de|à) les? |\b[mts]a [aeiouhéêâîœ]|\bce [aeiouhéêâîœ]", french), french
        assert not re.search(r"\b(beau|vieux|nouveau) (ami|arbre|avion|âne|œuf|hôtel|homme)\b", french), french
        assert not re.search(r"\b[aA] (?!useful)[aeiouAEIO]|\b[aA]n (?![aeiouAEIO])", english), english
        assert (french[-2:] == " ?") == (english[-1] == "?")
        for side in (french, english):
            assert side[0].isupper()
            assert side[-1] in ".?"
            assert "  " not in side
        assert 3 <= len(french.removesuffix(" ?").split()) <= 14
        assert 3 <= len(english.split()) <= 14


@pytest.mark.parametrize(
    ("french", "english"),
    [
        (r"\bn(e |').* jamais\b", r"\bnever\b"),
        (r"\bn(e |').* pas\b(?!.*\b(et|mais|que|qui)\b)", r"\b(not|cannot|no)\b"),
        (r"^(Tu|Elles) ne (man|dor|li|voi|ven)\w+ pas ", r"\bdo not (eat|sleep|read|see|sell)\b"),
        (r"^Est-ce qu(e |')", r"^(Do|Does|Did|Is|Are|Am|Can|Must)\b.*\?$"),
        (
            r"^\w+-(t-)?(tu|il|elle|nous|vous|ils|elles)\b.* \?",
            r"^(Do|Does|Did|Is|Are|Can) (you|he|she|we|they|there)\b",
        ),
        (r"^Qu'est-ce qu(e |')", r"^What (do|does|did|is|are|am|can|must) "),
        (r"^Combien de? ?", r"^How (many|much) "),
        (r"^Qui\b", r"^Who\b"),
        (r"\bsoixante-quinze\b", r"\bseventy-five\b"),
        (r"\bvingt et une \w+s\b", r"\btwenty-one\b"),
        (r"\bquatre-vingts ", r"\beighty "),
        (r"\bquatre-vingt-dix\b(?!-)", r"\bninety\b"),
        (r"\ble 1er mai\b", r"\bMay 1\b"),
        (r"\ble lundi (\d+) (\w+)", r"Monday, [A-Z]\w+ \d+"),
        (r"\bheures? et demie", r"\bhalf past \w+"),
        (r"\bheures? moins le quart", r"\ba quarter to \w+"),
        (r"\b(le|la) \w+ (de |d')(Marie|Paul|Emma)\b", r"\b(Marie|Paul|Emma)'s \w+"),
        (r"\b(du|de la|de l')\s?voisine?\b", r"neighbor"),
        (r"^(Je|Nous) (les?|la) \w+\.", r"^(I|We) [\w ]+ (it|them)\."),
        (r"^\w+ l'a vue?\.", r"^\w+ (saw|has never seen) it\."),
        (r"\b(me|te) (le|la|les|l')", r"\b(it|them) to (me|you)\b"),
        (r"^(Ils|Elles) sont (parti|arrivé|tombé)e?s\b", r"^They (left|arrived|fell)\b"),
        (r"^Elle est (partie|arrivée|restée)\b", r"^She (left|arrived|stayed)\b"),
        (r"^(Je vais|Tu vas) \w+(er|ir|re)\b(?<!aller)", r"\b(am|are) going to \w+"),
        (r"^(Marie|Sophie|Anne) \w+ (son|sa|ses) ", r"\bher\b"),
        (r"^(Paul|Luc|Marc) \w+ (son|sa|ses) ", r"\bhis\b"),
        (r"\b(aime|adore)\w* les \w+[sx]\.", r"\b(like|love)s? (?!the )\w+\."),
        (r"\bbel (arbre|avion|oiseau|hôtel|hôpital)\b", r"\bbeautiful \w+"),
        (r"\b(vieil|nouvel) \w+", r"\b(old|new) "),
        (r"\bla voiture (bleue|noire|blanche)\b", r"\b(blue|black|white) car\b"),
        (r"\bla petite \w+ (rouge|verte)\b", r"\bsmall (red|green) \w+"),
        (r"\bbeaucoup d'\w+", r"\ba lot of \w+"),
        (r"\b(homme|femme|garçon)s? qui\b", r"\b(man|woman|boy|men|women|boys) who\b"),
        (r"\b(chat|chien)s? qui\b", r"\b(cat|dog)s? that\b"),
        (r"\bqu'(il|elle)s? ", r"\b(that|what|because|there|when|where|why|how|do|does|did|is|are|can|must)\b"),
        (r"^(Au|En) \w+, ", r"^In \w+, "),
        (r"\bau (marché|parc|musée)[.,]", r"\b(at|to) the (market|park|museum)\b"),
        (r"\baux (écoles|magasins)\b(?! \w+s\b)", r"\b(at|to) the (schools|stores)\b"),
        (r"\best (né|née) le\b", r"\bwas born on\b"),
        (r"\bai vingt ans\b|\ba trente ans\b", r"\b(am|is) (twenty|thirty) years old\b"),
        (r"^Il est (professeur|pilote)\.", r"^He is a (teacher|pilot)\."),
        (r"^J'ai (faim|soif)\.|^Il a (faim|soif)\.", r"^(I am|He is) (hungry|thirsty)\."),
    ],
)
def test_constructions(french, english, train):
    matches = [sentence for sentence in train if re.search(french, sentence.french)]
    assert matches, f"no sentence has {french}"
    for sentence in matches:
        assert re.search(english, sentence.english, re.IGNORECASE), sentence[:2]


def test_nouns_and_adjectives_agree_and_swap():
    nouns = {}
    for noun in lexicon.nouns(lexicon.NOUNS):
        nouns[noun.french_plural] = (noun.feminine, True, noun.english_plural)
        nouns[noun.french] = (noun.feminine, False, noun.english)
    adjectives = {adjective.english: adjective for adjective in lexicon.adjectives(lexicon.AFTER, False)}
    for split in ("train", "held_out"):
        for french, english, before, after in swaps(split, 1_000):
            feminine, plural, translated = nouns[before[0]]
            assert after[0] == translated
            assert before[1] == adjectives[after[1]].forms[feminine + 2 * plural]
            here, there = words(french), words(english)
            assert here.index(before[1]) == here.index(before[0]) + 1
            assert there.index(after[1]) == there.index(after[0]) - 1
            article = here[here.index(before[0]) - 1]
            if article in ("un", "une", "le", "la"):
                assert (article in ("une", "la")) == feminine
            assert all(here.count(word) == 1 for word in before)
            assert all(there.count(word) == 1 for word in after)


def test_swaps_are_of_the_phrasebook():
    pairs = set(phrasebook("held_out", 300))
    assert {swap[:2] for swap in swaps("held_out", 60)} <= pairs


@pytest.mark.parametrize(
    ("value", "french", "english"),
    [
        (2, "deux", "two"),
        (17, "dix-sept", "seventeen"),
        (31, "trente et un", "thirty-one"),
        (60, "soixante", "sixty"),
        (70, "soixante-dix", "seventy"),
        (77, "soixante-dix-sept", "seventy-seven"),
        (81, "quatre-vingt-un", "eighty-one"),
        (91, "quatre-vingt-onze", "ninety-one"),
        (100, "cent", "one hundred"),
    ],
)
def test_numbers(value, french, english):
    assert lexicon.number(value) == (french, english)


def test_every_number_has_its_own_name():
    for feminine in (False, True):
        numbers = [lexicon.number(value, feminine) for value in range(101)]
        assert len({french for french, _ in numbers}) == len({english for _, english in numbers}) == 101
    with pytest.raises(ValueError, match="value: expected 0 to 100, got 101"):
        lexicon.number(101)


def test_nothing_is_said_twice(train):
    for sentence in train:
        assert not re.search(r" (\w+) (et|mais) \1\b", sentence.french), sentence.french


def test_words_are_entered_once():
    for table in (lexicon.NOUNS, lexicon.BEFORE + lexicon.AFTER, lexicon.VERBS):
        entries = [line.split()[0] for line in table.strip().splitlines() if line]
        assert len(set(entries)) == len(entries)
    assert len(lexicon.nouns(lexicon.NOUNS)) > 150
