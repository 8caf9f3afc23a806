"""A grammar that generates French sentences together with their English translations.

A `Writer` draws subject, verb and objects, and writes the sentence in both languages at once. Spelling comes last:
French is first written without elisions and contractions (le arbre, de le chat, ma amie), English without "an".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple, TypeVar

from regard.training.data import lexicon
from regard.training.data.lexicon import PRESENT, Adjective, Noun, Verb, number
from regard.training.data.pairs import Pair


class Sentence(NamedTuple):
    """A sentence in both languages, and the combinations of words in it."""

    french: str
    english: str
    swap: tuple[Pair, Pair] | None
    """(noun, adjective) in French and in English, where they change places."""
    combinations: tuple[Pair, ...]
    """Every (noun, adjective), (subject, verb) and (verb, object), in their dictionary forms."""


class _Phrase(NamedTuple):
    """A subject or an object. `person` counts je, tu, il, nous, vous, ils from 0; `words` are dictionary forms."""

    french: str
    english: str
    person: int = 2
    feminine: bool = False
    plural: bool = False
    words: tuple[str, ...] = ()
    kinds: str = "p"
    owner: str = ""
    """The possessive of a single person: his or her."""


_Bilingual = tuple[str, str]
"""A phrase in French and in English."""
_Form = tuple[str, str, bool]
"""A sentence in French and in English, and whether it is a question."""
_T = TypeVar("_T")

# --- words


def _entries(table: Mapping[str, str]) -> tuple[_Bilingual, ...]:
    return tuple((f" {french}", f" {english}") for french, english in table.items())


_NOUNS = lexicon.nouns(lexicon.NOUNS)
_ADJECTIVES = (*lexicon.adjectives(lexicon.BEFORE, True), *lexicon.adjectives(lexicon.AFTER, False))
_VERBS = lexicon.verbs(lexicon.VERBS)
_GIVING = lexicon.verbs(lexicon.GIVING)
_ACTING = lexicon.verbs(lexicon.ACTING)
_STAYING = lexicon.verbs(lexicon.STAYING)
_STATING = lexicon.verbs(lexicon.STATING)
_GOING, _COMING = lexicon.verbs(lexicon.GOING)
_INDIRECT = tuple((verb, f" {word}") for word, table in lexicon.INDIRECT.items() for verb in lexicon.verbs(table))
_WILLING = dict(zip(("want", "know", "like"), lexicon.verbs(lexicon.WILLING), strict=True))
(_COST,) = lexicon.verbs("coûter = cost/cost/cost")

_CITIES = _entries(lexicon.CITIES)
_COUNTRIES = _entries(lexicon.COUNTRIES)
_DAYS = _entries(lexicon.DAYS)
_MONTHS = _entries(lexicon.MONTHS)
_FEELINGS = _entries(lexicon.FEELINGS)
_OFTEN = _entries(lexicon.OFTEN)
_HOW = _entries(lexicon.HOW)
_WHEN = {tense: _entries(table) for tense, table in lexicon.WHEN.items()}
_WHERE = _entries(lexicon.WHERE)
_WEATHER = _entries(lexicon.WEATHER)

_PRONOUNS = (
    _Phrase("je", "I", 0),
    _Phrase("tu", "you", 1),
    _Phrase("il", "he", 2, owner="his"),
    _Phrase("elle", "she", 2, feminine=True, owner="her"),
    _Phrase("nous", "we", 3, plural=True),
    _Phrase("vous", "you", 4),
    _Phrase("ils", "they", 5, plural=True),
    _Phrase("elles", "they", 5, feminine=True, plural=True),
)
# Tu, nous and vous are twice as frequent: nouns and names do not use their verb forms.
_SPEAKERS = (*_PRONOUNS, *(_PRONOUNS[place] for place in (1, 4, 5)))
_NAMES = tuple(
    _Phrase(name, name, 2, gender == "f", words=(name,), owner="her" if gender == "f" else "his")
    for name, gender in lexicon.NAMES.items()
)
_WHO = _Phrase("qui", "who")
_THIRD = {(False, False): "il", (True, False): "elle", (False, True): "ils", (True, True): "elles"}
_BE = ("am", "are", "is", "are", "are", "are")
_WAS = ("was", "were", "was", "were", "were", "were")
_OWNERS = (
    ("mon", "ma", "mes", "my "),
    ("ton", "ta", "tes", "your "),
    ("notre", "notre", "nos", "our "),
    ("votre", "votre", "vos", "your "),
    ("leur", "leur", "leurs", "their "),
)
_ME = (("me ", " me"), ("te ", " you"), ("nous ", " us"), ("vous ", " you"))
_IT = (("le ", " it"), ("la ", " it"), ("les ", " them"))
_MINUTES = (
    (" et quart", "a quarter past"),
    (" et demie", "half past"),
    (" moins le quart", "a quarter to"),
    (" dix", "ten past"),
    (" vingt", "twenty past"),
    (" moins dix", "ten to"),
    (" moins vingt", "twenty to"),
)
_NOTHING = ("", "")

# Determiners by letter, repeated by frequency: definite, indefinite, possessive, this, number, much, of someone.
# A capital I is an indefinite singular, so that no English sentence begins with a plural without an article.
_ANY = "ddddddiiiipppsnmo"
_SUBJECT = "ddddddpppsIno"
_RELATED = "dddppsIn"
_DEFINITE = "ddddppso"
_PLACE = "ddddddps"
_THINGS = "afdeohcvwtsbrnl"

# --- which words go together


def _pick_verbs(names: str) -> tuple[Verb, ...]:
    table = {verb.french: verb for verb in (*_ACTING, *_VERBS)}
    return tuple(table[name] for name in names.split())


def _pick_nouns(names: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in _NOUNS if noun.french in names.split())


_LIKING = frozenset({"aimer", "adorer", "détester", "préférer"})
_STATES = _LIKING | {"avoir", "vouloir", "connaître"}
_DEEDS = tuple(verb for verb in _VERBS if verb.french not in _STATES)
_MANNERED = _pick_verbs("travailler courir marcher nager jouer danser chanter")
_ANIMAL_DEEDS = _pick_verbs("manger boire voir regarder chercher trouver cacher aimer écouter")
_ANIMAL_ACTS = _pick_verbs("dormir courir marcher nager jouer arriver tomber rester partir sortir rentrer")
_SEEING = _pick_verbs("voir connaître chercher attendre regarder")
_HAVING = _pick_verbs("avoir voir acheter vendre vouloir")
_OPENING = _pick_verbs("ouvrir fermer")
_LEAVING = _pick_verbs("partir sortir rentrer")  # "à Paris" would be ambiguous: for Paris, or to Paris
_TRAVELLING = _pick_verbs("arriver partir")
# Only some verbs are inverted with their subject, and only some participles agree with a pronoun before them: a data
# set with the forms of all verbs would have too few examples of each form.
_TURNING = _pick_verbs("avoir aimer voir vouloir prendre")
_AGREEING = _pick_verbs("voir manger trouver perdre prendre ouvrir")
_AGREEING_PEOPLE = _pick_verbs("voir aider inviter rencontrer")

_BOTH_GENDERS = _pick_nouns("médecin professeur journaliste dentiste pilote peintre")
_SURFACES = _pick_nouns("table chaise lit boîte sac armoire")
_CONTAINERS = _pick_nouns("boîte sac armoire")
_TIMED = _pick_nouns("train avion bateau taxi")

_GROUPS = {
    name: group
    for group, names in enumerate(
        (
            "rouge bleu vert noir blanc jaune gris brun",
            "français anglais italien espagnol japonais",
            "chaud froid",
            "rapide lent",
            "lourd léger",
            "propre sale",
            "triste heureux drôle",
            "petit grand",
            "vieux nouveau jeune",
            "bon mauvais",
            "cassé",
            "vide",
            "rond",
            "délicieux",
        )
    )
    for name in names.split()
}
"""Adjectives that exclude each other, by group: a subject gets one of a group."""
_ABSOLUTE = frozenset(name for name, group in _GROUPS.items() if group in (0, 1, 10, 11, 12, 13))
"""Adjectives that do not take "very"."""


@cache
def _share(kinds: str, others: str) -> bool:
    return bool(set(kinds) & set(others))


@cache
def _human(kinds: str) -> bool:
    return _share(kinds, "pykj")


@cache
def _nouns(kinds: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in _NOUNS if _share(noun.kinds, kinds))


@cache
def _adjectives(kinds: str, precedes: bool) -> tuple[Adjective, ...]:
    return tuple(
        adjective for adjective in _ADJECTIVES if adjective.precedes == precedes and _share(adjective.kinds, kinds)
    )


# --- spelling

_VOWEL = "(?!onze|huit)[aeiouyhâéêèîôûœAEIOUYHÉ]"
_ELIDED = {"ma": "mon ", "ta": "ton ", "sa": "son ", "ce": "cet "}
_ELISION = re.compile(rf"(?<![\w-])(le|la|de|ne|je|me|te|que|ma|ta|sa|ce) (?={_VOWEL})")
_CONTRACTED = {"de le": "du", "de les": "des", "à le": "au", "à les": "aux"}
_CONTRACTION = re.compile(r"(?<![\w-])(?:de|à) les?(?= )")
_ARTICLE = re.compile(r"\ba (?=(?!useful)[aeiouAEIO])")


def _spelled(french: str, english: str, question: bool) -> _Bilingual:
    french = _ELISION.sub(lambda match: _ELIDED.get(match[1], f"{match[1][:-1]}'"), french)
    french = _CONTRACTION.sub(lambda match: _CONTRACTED[match[0]], french)
    english = _ARTICLE.sub("an ", english)
    ends = (" ?", "?") if question else (".", ".")
    return f"{french[0].upper()}{french[1:]}{ends[0]}", f"{english[0].upper()}{english[1:]}{ends[1]}"


@cache
def _before_vowel(word: str) -> bool:
    return re.match(_VOWEL, word) is not None


def _agreed(participle: str, feminine: bool, plural: bool) -> str:
    form = participle + "e" * feminine
    return form + "s" * (plural and not form.endswith("s"))


def _of(owner: _Phrase) -> str:
    return owner.english + ("'" if owner.plural and owner.english.endswith("s") else "'s")


def _denied(negation: str) -> _Bilingual:
    return ("ne ", f" {negation}") if negation else _NOTHING


def _with_auxiliary(subject: str, auxiliary: str, negation: str, question: str, rest: str) -> str:
    """An English clause with an auxiliary verb: is, can, must."""
    if question:
        return f"{auxiliary} {subject}{rest}"
    if negation == "pas":
        return f"{subject} cannot{rest}" if auxiliary == "can" else f"{subject} {auxiliary} not{rest}"
    return f"{subject} {auxiliary}{' never' if negation else ''}{rest}"


def _with_do(subject: str, do: str, finite: str, base: str, negation: str, question: str, rest: str) -> str:
    """An English clause whose question and negation need a form of do."""
    if question:
        return f"{do} {subject} {base}{rest}"
    if negation == "pas":
        return f"{subject} {do} not {base}{rest}"
    return f"{subject} {'never ' if negation else ''}{finite}{rest}"


class Writer:
    """Writes sentences, and notes which words are combined in each.

    >>> from random import Random
    >>> Writer(Random(1)).sentence()[:2]
    ('Le 13 janvier, le cheval heureux sort.', 'On January 13, the happy horse goes out.')
    """

    def __init__(self, random: Random) -> None:
        self._random = random.random
        self._combinations: list[Pair] = []
        self._qualities: set[str] = set()
        self._swap: tuple[Pair, Pair] | None = None

    def sentence(self) -> Sentence:
        """The next sentence."""
        self._combinations = []
        self._qualities = set()
        self._swap = None
        clause = self._pick(_FORMS)(self)
        return Sentence(*_spelled(*clause), self._swap, tuple(self._combinations))

    def _pick(self, choices: Sequence[_T]) -> _T:
        return choices[int(self._random() * len(choices))]

    def _chance(self, probability: float) -> bool:
        return self._random() < probability

    def _note(self, first: Sequence[str], second: Sequence[str]) -> None:
        for word in first:
            for other in second:
                self._combinations.append((word, other))

    def _qualify(self, nouns: Sequence[str], adjective: Adjective) -> None:
        self._note(nouns, adjective.forms[:1])
        self._qualities.add(adjective.forms[0])

    # --- nouns

    def _noun_phrase(
        self, nouns: Sequence[Noun], determiners: str, negation: str = "", generic: bool = False, owner: str = ""
    ) -> _Phrase:
        """A noun with determiner and adjectives. `generic` is for verbs of liking: les chats are cats, not the cats."""
        noun = self._pick(nouns)
        feminine, kinds = noun.feminine, noun.kinds
        determiner = self._pick(determiners)
        single = noun.mass or "u" in kinds
        if (determiner in "po" and not _share(kinds, "kjafdohcvtr")) or (determiner in "nmI" and single):
            determiner = "d"
        # After "jamais" French uses the plural: il n'achète jamais de livres.
        many = determiner in "nm" or (determiner == "i" and negation == "jamais")
        plural = not single and determiner != "I" and (many or self._chance(0.3))
        french, english, leading = self._described(noun, plural)
        the = "les" if plural else "la" if feminine else "le"
        if determiner == "d":
            before = the, "" if generic and (plural or noun.mass) else "the "
        elif determiner in "iI":
            before = self._indefinite(noun, plural, bool(negation), leading)
        elif determiner == "p":
            forms = ("son", "sa", "ses", f"{owner} ") if owner and self._chance(0.4) else self._pick(_OWNERS)
            before = forms[2 if plural else int(feminine)], forms[3]
        elif determiner == "s":
            before = ("ces", "these ") if plural else ("cette" if feminine else "ce", "this ")
        elif determiner == "m":
            before = "beaucoup de", "a lot of "
        elif determiner == "o":
            possessor = self._possessor()
            before, french = (the, f"{_of(possessor)} "), f"{french} de {possessor.french}"
        else:
            counted = number(2 + int(self._random() ** 2 * 98), feminine)
            before = counted[0], f"{counted[1]} "
        owned = "" if plural or not _human(kinds) else "her" if feminine else "his"
        french, english = f"{before[0]} {french}", f"{before[1]}{english}"
        return _Phrase(french, english, 5 if plural else 2, feminine, plural, (noun.french,), kinds, owned)

    def _indefinite(self, noun: Noun, plural: bool, negated: bool, leading: bool) -> _Bilingual:
        """The indefinite article; `leading` is whether an adjective precedes the noun."""
        if noun.mass:
            return "de" if negated else "de la" if noun.feminine else "de le", ""
        if plural:
            return "de" if negated or leading else "des", ""
        return "de" if negated else "une" if noun.feminine else "un", "a "

    def _described(self, noun: Noun, plural: bool) -> tuple[str, str, bool]:
        """A noun with up to two adjectives, and whether an adjective precedes it in French."""
        bare = (noun.french_plural, noun.english_plural) if plural else (noun.french, noun.english)
        french, english = bare
        place = noun.feminine + 2 * plural
        luck = self._random()
        following = _adjectives(noun.kinds, False)
        if 0.16 < luck < 0.5 and following:
            adjective = self._pick(following)
            form = adjective.forms[place]
            french, english = f"{french} {form}", f"{adjective.english} {english}"
            self._qualify((noun.french,), adjective)
            self._swap = self._swap or ((bare[0], form), (bare[1], adjective.english))
        preceding = _adjectives(noun.kinds, True)
        if luck < 0.22 and preceding:
            adjective = self._pick(preceding)
            form = adjective.before_vowel if place == 0 and _before_vowel(bare[0]) else adjective.forms[place]
            self._qualify((noun.french,), adjective)
            return f"{form} {french}", f"{adjective.english} {english}", True
        return french, english, False

    def _possessor(self) -> _Phrase:
        if self._chance(0.5):
            return self._pick(_NAMES)
        noun = self._pick(_nouns("kjpy"))
        plural = "u" not in noun.kinds and self._chance(0.25)
        french, english = (noun.french_plural, noun.english_plural) if plural else (noun.french, noun.english)
        if "k" in noun.kinds:
            forms = self._pick(_OWNERS)
            before = forms[2 if plural else int(noun.feminine)], forms[3]
        else:
            before = "les" if plural else "la" if noun.feminine else "le", "the "
        return _Phrase(f"{before[0]} {french}", f"{before[1]}{english}", plural=plural)

    def _pronoun(self) -> _Phrase:
        pronoun = self._pick(_SPEAKERS)
        if pronoun.person in (0, 1, 3):
            return pronoun._replace(feminine=self._chance(0.5))
        if pronoun.person == 4:
            return pronoun._replace(feminine=self._chance(0.5), plural=self._chance(0.5))
        return pronoun

    def _pronoun_or_name(self) -> _Phrase:
        return self._pronoun() if self._chance(0.5) else self._pick(_NAMES)

    def _subject(self, kinds: str = "pykja") -> _Phrase:
        """The subject of a verb of action."""
        luck = self._random()
        if luck < 0.45:
            return self._pronoun()
        if luck < 0.6:
            return self._pick(_NAMES)
        if luck < 0.65:
            name, other = self._pick(_NAMES), self._pick(_NAMES)
            if name is not other:
                french, english = f"{name.french} et {other.french}", f"{name.english} and {other.english}"
                return _Phrase(french, english, 5, name.feminine and other.feminine, True, name.words + other.words)
        return self._noun_phrase(_nouns(kinds), _SUBJECT)

    def _target(self, verb: Verb, determiners: str = _ANY, negation: str = "", owner: str = "") -> _Bilingual:
        """The object of a verb."""
        if _human(verb.takes) and self._chance(0.3):
            target = self._pick(_NAMES)
        else:
            generic = verb.french in _LIKING
            target = self._noun_phrase(
                _nouns(verb.takes), _DEFINITE if generic else determiners, negation, generic, owner
            )
        self._note((verb.french,), target.words)
        return f" {target.french}", f" {target.english}"

    def _clitic(self, subject: _Phrase) -> _Bilingual:
        """A pronoun before the verb (me, you, us) that is not the subject."""
        if subject.person in (0, 3):
            return self._pick(_ME[1::2])
        return self._pick(_ME[0::2] if subject.person in (1, 4) else _ME)

    # --- clauses

    def _clause(
        self,
        subject: _Phrase,
        verb: Verb,
        rest: _Bilingual = _NOTHING,
        *,
        tense: str = "present",
        negation: str = "",
        question: str = "",
        clitic: _Bilingual = _NOTHING,
        agreement: tuple[bool, bool] = (False, False),
        adverb: _Bilingual = _NOTHING,
    ) -> _Bilingual:
        """A clause of subject and verb. `question` is "", "est-ce que" or "inversion", which needs a pronoun."""
        self._note(subject.words, (verb.french,))
        person, name = subject.person, subject.english
        third = person == 2
        before, after = _denied(negation)
        tail = f"{verb.particle}{clitic[1]}{rest[1]}"
        do = "does" if third else "do"
        if tense == "present":
            before, finite, after = before + clitic[0], verb.present[person], after + adverb[0]
            name += adverb[1]
            english = _with_do(name, do, verb.third if third else verb.english, verb.english, negation, question, tail)
        elif tense == "past":
            if verb.moves:
                agreement = subject.feminine, subject.plural
            before, finite = before + clitic[0], PRESENT["être" if verb.moves else "avoir"][person]
            after = f"{after}{adverb[0]} {_agreed(verb.participle, *agreement)}"
            if negation == "jamais" or adverb[1]:
                have = "has" if third else "have"
                english = f"{name} {have}{adverb[1] or ' never'} {verb.past_participle}{tail}"
            else:
                english = _with_do(name, "did", verb.past, verb.english, negation, question, tail)
        else:
            after, tail = f"{after} {clitic[0]}{verb.french}", f" {verb.english}{tail}"
            if tense == "future":
                finite = PRESENT["aller"][person]
                english = _with_auxiliary(name, _BE[person], negation, question, f" going to{tail}")
            elif tense in ("can", "must"):
                finite = PRESENT["pouvoir" if tense == "can" else "devoir"][person]
                english = _with_auxiliary(name, tense, negation, question, tail)
            else:
                will = _WILLING[tense]
                finite, tail = will.present[person], will.particle + tail
                wills = will.third if third else will.english
                english = _with_do(name, do, wills, will.english, negation, question, tail)
        if question == "inversion":
            link = "-t-" if third and finite[-1] in "ae" else "-"
            return f"{before}{finite}{link}{subject.french}{after}{rest[0]}", english
        asked = "est-ce que " if question else ""
        return f"{asked}{subject.french} {before}{finite}{after}{rest[0]}", english

    def _being(
        self, subject: _Phrase, rest: _Bilingual, *, negation: str = "", question: str = "", past: bool = False
    ) -> _Bilingual:
        """A clause with "to be"."""
        forms, be = (lexicon.IMPERFECT, _WAS) if past else (PRESENT["être"], _BE)
        finite = forms[subject.person]
        english = _with_auxiliary(subject.english, be[subject.person], negation, question, rest[1])
        if question == "inversion" and subject.words:
            return f"{subject.french} {finite}-{_THIRD[subject.feminine, subject.plural]}{rest[0]}", english
        if question == "inversion":
            return f"{finite}-{subject.french}{rest[0]}", english
        before, after = _denied(negation)
        asked = "est-ce que " if question else ""
        return f"{asked}{subject.french} {before}{finite}{after}{rest[0]}", english

    def _feeling(self, person: _Phrase, negation: str = "") -> _Bilingual:
        """A feeling, with "avoir" in French and "to be" in English: hungry, thirsty, cold."""
        french, english = self._pick(_FEELINGS)
        before, after = _denied(negation)
        have = PRESENT["avoir"][person.person]
        translation = _with_auxiliary(person.english, _BE[person.person], negation, "", english)
        return f"{person.french} {before}{have}{after}{french}", translation

    def _tense(self, human: bool = True) -> str:
        luck = self._random()
        if luck < 0.74:
            return "present" if luck < 0.5 else "past"
        if luck < 0.84 or not human:
            return "future"
        return self._pick(("can", "must", "want", "know", "like"))

    def _negation(self, tense: str = "present", once: bool = False) -> str:
        """No negation, "pas" or "jamais"; not "jamais" if the sentence is about one occasion (`once`)."""
        if self._chance(0.72):
            return ""
        return "jamais" if self._chance(0.3) and tense in ("present", "past") and not once else "pas"

    def _deed(self, human: bool, turned: bool) -> tuple[Verb, str]:
        """A verb, and its French preposition."""
        luck = self._random()
        if turned:
            return self._pick(_TURNING), ""
        if luck < 0.3:
            return self._pick(_ACTING if human else _ANIMAL_ACTS), ""
        if not human:
            return self._pick(_ANIMAL_DEEDS), ""
        return self._pick(_INDIRECT) if luck < 0.45 else (self._pick(_VERBS), "")

    def _acting(self, subject: _Phrase, question: str = "", tense: str = "", ending: str = "") -> _Bilingual:
        """A clause with a verb of action, with or without an object; `ending` is "", "place" or "time"."""
        human = _human(subject.kinds)
        tense = tense or self._tense(human)
        verb, preposition = self._deed(human, turned=question == "inversion" and tense == "present")
        state = verb.french in _STATES
        if state:
            tense, ending = "present", ""
            question = "est-ce que" if question and verb not in _TURNING else question
        if verb in _LEAVING:
            ending = "time" if ending else ""
        negation = "" if question else self._negation(tense, state or ending == "time")
        rest = _NOTHING
        if preposition:
            target = self._target(verb, _DEFINITE, owner=subject.owner)
            rest = preposition + target[0], target[1]
        elif verb.takes:
            rest = self._target(verb, _ANY, negation, subject.owner)
        adverb, first = _NOTHING, _NOTHING
        if ending:
            last = self._place() if ending == "place" else self._when(tense)
            if ending == "time" and self._chance(0.3):
                first = f"{last[0][1:]}, ", f"{last[1][1:]}, "
            else:
                rest = rest[0] + last[0], rest[1] + last[1]
        elif not (negation or question or state) and self._chance(0.25):
            adverb = {"present": self._pick(_OFTEN), "past": (" déjà", " already")}.get(tense, _NOTHING)
        french, english = self._clause(
            subject, verb, rest, tense=tense, negation=negation, question=question, adverb=adverb
        )
        return first[0] + french, first[1] + english

    def _adjective(self, subject: _Phrase) -> tuple[str, str, str]:
        """An adjective for a subject in French and English, and its dictionary form. It contradicts no adjective
        that the sentence has."""
        groups = {_GROUPS.get(name) for name in self._qualities} - {None}
        fitting = _adjectives(subject.kinds, False) or _adjectives(subject.kinds, True)
        adjective = self._pick(fitting)
        while adjective.forms[0] in self._qualities or _GROUPS.get(adjective.forms[0]) in groups:
            adjective = self._pick(fitting)
        self._qualify(subject.words, adjective)
        return f" {adjective.forms[subject.feminine + 2 * subject.plural]}", f" {adjective.english}", adjective.forms[0]

    def _quality(self, subject: _Phrase) -> _Bilingual:
        """One or two adjectives, perhaps with "very" or "too"."""
        french, english, name = self._adjective(subject)
        luck = self._random()
        if luck < 0.15:
            other = self._adjective(subject)
            et, and_ = self._pick((("et", "and"), ("mais", "but")))
            return f"{french} {et}{other[0]}", f"{english} {and_}{other[1]}"
        if luck < 0.4 and name not in _ABSOLUTE:
            return (f" très{french}", f" very{english}") if luck < 0.32 else (f" trop{french}", f" too{english}")
        return french, english

    # --- places and times

    def _place(self) -> _Bilingual:
        luck = self._random()
        if luck < 0.4:
            before = self._pick(_WHERE)
            where = self._noun_phrase(_nouns("r" if before[1] == " in" else "rb"), _PLACE)
            return f"{before[0]} {where.french}", f"{before[1]} {where.english}"
        if luck < 0.55:
            where = self._noun_phrase(_nouns("b"), "d")
            return f" à {where.french}", f" at {where.english}"
        if luck < 0.72:
            city = self._pick(_CITIES)
            return f" à{city[0]}", f" in{city[1]}"
        if luck < 0.85:
            country = self._pick(_COUNTRIES)
            return country[0], f" in{country[1]}"
        owner = self._possessor()
        return f" chez {owner.french}", f" at {_of(owner)} house"

    def _clock(self) -> _Bilingual:
        """A time of the day."""
        luck = self._random()
        if luck < 0.08:
            return self._pick(((" midi", " noon"), (" minuit", " midnight")))
        hour = 1 + int(self._random() * 12)
        french, english = number(hour, feminine=True)
        hours = f" {french} heure{'s' * (hour > 1)}"
        if luck < 0.4:
            return hours, f" {english} o'clock"
        after, before = self._pick(_MINUTES)
        return hours + after, f" {before} {english}"

    def _date(self) -> _Bilingual:
        month = self._pick(_MONTHS)
        day = 1 + int(self._random() * 28)
        french, english = f" {'1er' if day == 1 else day}{month[0]}", f"{month[1]} {day}"
        if self._chance(0.3):
            weekday = self._pick(_DAYS)
            return f" le{weekday[0]}{french}", f"{weekday[1]},{english}"
        return f" le{french}", english

    def _when(self, tense: str) -> _Bilingual:
        luck = self._random()
        if luck < 0.5:
            return self._pick(_WHEN.get(tense, _WHEN["future"]))
        if luck < 0.65:
            clock = self._clock()
            return f" à{clock[0]}", f" at{clock[1]}"
        if luck < 0.77:
            date = self._date()
            return date[0], f" on{date[1]}"
        if luck < 0.86:
            month = self._pick(_MONTHS)
            return f" en{month[0]}", f" in{month[1]}"
        day = self._pick(_DAYS)
        if tense == "present" and self._chance(0.5):
            return f" le{day[0]}", f" on{day[1]}s"
        return day[0], f" on{day[1]}"

    # --- forms of sentences: French, English, and whether it is a question

    def _tell(self) -> _Form:
        subject = self._subject()
        return *self._acting(subject, ending=self._pick(("", "", "", "", "", "place", "time", "time"))), False

    def _tell_how(self) -> _Form:
        return *self._clause(self._subject("pykj"), self._pick(_MANNERED), self._pick(_HOW)), False

    def _ask(self) -> _Form:
        if self._chance(0.4):
            pronoun = self._pronoun()
            # Je is not inverted: peux-je is wrong, puis-je is rare.
            question = "inversion" if pronoun.person else "est-ce que"
            return *self._acting(pronoun, question, self._pick(("present", "present", "past", "future", "can"))), True
        return *self._acting(self._subject(), "est-ce que"), True

    def _describe(self) -> _Form:
        luck = self._random()
        subject = self._noun_phrase(_NOUNS, _SUBJECT) if luck < 0.75 else self._pronoun_or_name()
        quality = self._quality(subject)
        luck = self._random()
        if luck < 0.12 or (luck < 0.3 and not subject.words):
            question = self._pick(("est-ce que", "inversion")) if subject.person else "est-ce que"
            return *self._being(subject, quality, question=question), True
        if luck < 0.2:
            often = self._pick(_OFTEN)
            return *self._being(subject, (often[0] + quality[0], often[1] + quality[1])), False
        return *self._being(subject, quality, negation=self._negation(), past=self._chance(0.2)), False

    def _point(self) -> _Form:
        """Object pronouns: je le vois, I see it."""
        subject, tense, person = self._subject("pykj"), self._tense(), self._chance(0.3)
        verb = self._pick((_AGREEING_PEOPLE if person else _AGREEING) if tense == "past" else _VERBS)
        state = verb.french in _STATES
        tense = "present" if state else tense
        if _human(verb.takes) and verb.french != "avoir" and (person or not _share(verb.takes, _THINGS)):
            clitic = self._clitic(subject)
            agreement = self._chance(0.5), clitic[0] == "nous " or (clitic[0] == "vous " and self._chance(0.5))
        else:
            clitic = self._pick(_IT)
            many = clitic[0] == "les "
            agreement = clitic[0] == "la " or (many and self._chance(0.5)), many
        turning = tense in ("past", "future", "can") or (tense == "present" and verb in _TURNING)
        asked = turning and not subject.words and subject.person > 0 and self._chance(0.15)
        question, negation = ("inversion", "") if asked else ("", self._negation(tense, state))
        rest = _NOTHING if question or negation or state or self._chance(0.7) else self._when(tense)
        clause = self._clause(
            subject,
            verb,
            rest,
            tense=tense,
            negation=negation,
            question=question,
            clitic=clitic,
            agreement=agreement,
        )
        return *clause, bool(question)

    def _give(self) -> _Form:
        """A verb of giving, whose objects are nouns, or pronouns before the verb in French."""
        subject, verb, tense = self._subject("pykj"), self._pick(_GIVING), self._tense()
        luck = self._random()
        if luck < 0.25:
            me, it = self._clitic(subject), self._pick(_IT)
            both = (f"{it[0]}leur ", f"{it[1]} to them") if self._chance(0.2) else (me[0] + it[0], f"{it[1]} to{me[1]}")
            tense = "present" if tense == "past" else tense
            return *self._clause(subject, verb, tense=tense, negation=self._negation(tense), clitic=both), False
        question = "est-ce que" if self._chance(0.15) else ""
        negation = "" if question else self._negation(tense)
        rest, clitic = self._target(verb, _ANY, negation, subject.owner), _NOTHING
        if luck < 0.6:
            clitic = self._clitic(subject) if self._chance(0.8) else ("leur ", " them")
        else:
            person = self._pick(_NAMES) if self._chance(0.5) else self._noun_phrase(_nouns("kj"), _DEFINITE)
            rest = f"{rest[0]} à {person.french}", f"{rest[1]} to {person.english}"
        clause = self._clause(subject, verb, rest, tense=tense, negation=negation, question=question, clitic=clitic)
        return *clause, bool(question)

    def _go(self) -> _Form:
        subject, tense = self._subject("pykj"), self._tense()
        luck = self._random()
        if luck < 0.35:
            verb, rest = self._pick(_STAYING), self._place()
            tense = "present" if verb.french == "habiter" else tense
        else:
            verb, rest = (_GOING, self._there()) if luck < 0.75 else (_COMING, self._from_there())
        if self._chance(0.15):
            return *self._clause(subject, verb, rest, tense=tense, question="est-ce que"), True
        negation = self._negation(tense)
        if not negation and self._chance(0.25):
            when = self._when(tense)
            rest = rest[0] + when[0], rest[1] + when[1]
        return *self._clause(subject, verb, rest, tense=tense, negation=negation), False

    def _there(self) -> _Bilingual:
        luck = self._random()
        if luck < 0.5:
            where = self._noun_phrase(_nouns("b"), "d")
            self._note((_GOING.french,), where.words)
            return f" à {where.french}", f" {where.english}"
        if luck < 0.7:
            city = self._pick(_CITIES)
            return f" à{city[0]}", city[1]
        if luck < 0.85:
            return self._pick(_COUNTRIES)
        owner = self._possessor()
        return f" chez {owner.french}", f" {_of(owner)} house"

    def _from_there(self) -> _Bilingual:
        if self._chance(0.7):
            where = self._noun_phrase(_nouns("br"), _PLACE)
            self._note((_COMING.french,), where.words)
            return f" de {where.french}", f" {where.english}"
        city = self._pick(_CITIES)
        return f" de{city[0]}", city[1]

    def _there_is(self) -> _Form:
        luck = self._random()
        negation = "pas" if luck < 0.2 else ""
        thing, place = self._noun_phrase(_nouns("pyjafdohcvtn"), "i" if negation else "iiin", negation), self._place()
        be = "are" if thing.plural else "is"
        if negation:
            none = thing.english.removeprefix("a ")
            return f"il ne y a pas {thing.french}{place[0]}", f"there {be} no {none}{place[1]}", False
        if luck < 0.4:
            ask = self._pick(("est-ce que il y a", "y a-t-il"))
            return f"{ask} {thing.french}{place[0]}", f"{be} there {thing.english}{place[1]}", True
        return f"il y a {thing.french}{place[0]}", f"there {be} {thing.english}{place[1]}", False

    def _locate(self) -> _Form:
        asked = self._chance(0.3)
        thing = self._noun_phrase(_nouns("octkja"), _DEFINITE if asked else _SUBJECT)
        if asked:
            return (
                f"où {PRESENT['être'][thing.person]} {thing.french}",
                f"where {_BE[thing.person]} {thing.english}",
                True,
            )
        if _share(thing.kinds, "oct") and self._chance(0.7):
            before = self._pick((("sur", "on"), ("sous", "under"), ("dans", "in")))
            there = _CONTAINERS if before[0] == "dans" else _SURFACES
            under = self._noun_phrase([noun for noun in there if noun.french not in thing.words], _PLACE)
            place = f" {before[0]} {under.french}", f" {before[1]} {under.english}"
        else:
            place = self._place()
        return *self._being(thing, place, negation=self._negation(), past=self._chance(0.2)), False

    def _tell_the_time(self) -> _Form:
        luck = self._random()
        if luck < 0.35:
            clock = self._clock()
            return f"il est{clock[0]}", f"it is{clock[1]}", False
        if luck < 0.7:
            date = self._date()
            if luck < 0.48:
                return f"aujourd'hui, c'est{date[0]}", f"today is{date[1]}", False
            if luck < 0.58:
                owner = self._possessor()
                return f"l'anniversaire de {owner.french} est{date[0]}", f"{_of(owner)} birthday is on{date[1]}", False
            person = self._pick((*_NAMES, *_PRONOUNS[2:4]))
            born = _agreed("né", person.feminine, False)
            return f"{person.french} est {born}{date[0]}", f"{person.english} was born on{date[1]}", False
        clock = self._clock()
        rest = f" à{clock[0]}", f" at{clock[1]}"
        if luck < 0.85:
            return *self._clause(self._noun_phrase(_nouns("b"), "dds"), self._pick(_OPENING), rest), False
        subject, tense = self._noun_phrase(_TIMED, "ddps"), self._pick(("present", "past"))
        return *self._clause(subject, self._pick(_TRAVELLING), rest, tense=tense), False

    def _count(self) -> _Form:
        """Ages and prices."""
        many = number(2 + int(self._random() * 99))
        if self._chance(0.5):
            thing = self._noun_phrase(_nouns("ohcvtf"), _SUBJECT)
            return *self._clause(thing, _COST, (f" {many[0]} euros", f" {many[1]} euros")), False
        person = self._noun_phrase(_nouns("pyk"), _DEFINITE) if self._chance(0.3) else self._pronoun_or_name()
        have, be = PRESENT["avoir"][person.person], _BE[person.person]
        return f"{person.french} {have} {many[0]} ans", f"{person.english} {be} {many[1]} years old", False

    def _feel(self) -> _Form:
        return *self._feeling(self._subject("pykj"), self._negation()), False

    def _work(self) -> _Form:
        """Professions, which have no article in French."""
        person = self._noun_phrase(_nouns("k"), "pppo") if self._chance(0.3) else self._pronoun_or_name()
        job = self._pick(_nouns("j"))
        while job.feminine != person.feminine and job not in _BOTH_GENDERS:
            job = self._pick(_nouns("j"))
        rest = (
            (f" {job.french_plural}", f" {job.english_plural}")
            if person.plural
            else (f" {job.french}", f" a {job.english}")
        )
        if self._chance(0.15):
            return *self._being(person, rest, question="est-ce que"), True
        return *self._being(person, rest, negation=self._negation(once=True)), False

    def _weather(self) -> _Form:
        french, english = self._pick(_WEATHER)
        rest = self._place() if self._chance(0.5) else self._when("present")
        return french[1:] + rest[0], english[1:] + rest[1], False

    def _relate(self) -> _Form:
        """Relative clauses: who, that."""
        luck = self._random()
        if luck < 0.2:
            person = self._pick(_NAMES)
            doer = person._replace(french=f"{person.french} qui", english=f"{person.english} who")
            french, english = self._acting(doer)
            return f"c'est {french}", f"it is {english}", False
        if luck < 0.5:
            verb = self._pick(_DEEDS)
            thing = self._noun_phrase(_nouns(verb.takes), "d")
            self._note((verb.french,), thing.words)
            french, english = self._clause(self._pronoun_or_name(), verb)
            thing = thing._replace(french=f"{thing.french} que {french}", english=f"{thing.english} that {english}")
            return *self._being(thing, self._quality(thing), negation=self._negation(once=True)), False
        doer = self._noun_phrase(_nouns("pykja"), _RELATED)
        link = "who" if _human(doer.kinds) else "that"
        # A possessive would be ambiguous with two people in a sentence.
        relative = doer._replace(french=f"{doer.french} qui", english=f"{doer.english} {link}", owner="")
        french, english = self._acting(relative, tense=self._pick(("present", "past")))
        doer = doer._replace(french=french, english=english)
        if luck < 0.75:
            return *self._being(doer, self._quality(doer), negation=self._negation(once=True)), False
        verb = self._pick([verb for verb in _SEEING if _share(verb.takes, doer.kinds)])
        self._note((verb.french,), doer.words)
        return *self._clause(self._pronoun_or_name(), verb, (f" {french}", f" {english}")), False

    def _join(self) -> _Form:
        """Two clauses."""
        first, second = self._pronoun_or_name(), self._pronoun_or_name()._replace(owner="")
        luck = self._random()
        if luck < 0.4:
            french, english = self._acting(second)
            return *self._clause(first, self._pick(_STATING), (f" que {french}", f" that {english}")), False
        clause = self._acting(first._replace(owner=""), tense="present" if luck > 0.8 else "")
        if luck < 0.6:
            word, other = self._pick((("et", "and"), ("mais", "but"))), self._acting(second)
        elif luck < 0.8:
            word = "parce que", "because"
            other = self._feeling(second) if self._chance(0.5) else self._being(second, self._quality(second))
        else:
            word, (french, english) = ("quand", "when"), self._pick(_WEATHER)
            other = french[1:], english[1:]
        return f"{clause[0]} {word[0]} {other[0]}", f"{clause[1]} {word[1]} {other[1]}", False

    def _wonder(self) -> _Form:
        """Questions that begin with a question word."""
        luck = self._random()
        if luck < 0.25:
            word = self._pick((("où", "where"), ("quand", "when"), ("pourquoi", "why"), ("comment", "how")))
            french, english = self._acting(self._subject(), "est-ce que")
            return f"{word[0]} {french}", f"{word[1]} {english}", True
        if luck < 0.45:
            verb = self._pick(_DEEDS)
            while not _share(verb.takes, _THINGS):
                verb = self._pick(_DEEDS)
            french, english = self._clause(self._subject("pykj"), verb, tense=self._tense(), question="est-ce que")
            return f"que {french}", f"what {english}", True
        if luck < 0.6:
            return *self._acting(_WHO, tense=self._pick(("present", "past", "future", "can"))), True
        if luck < 0.72:
            verb, noun = self._pick(_HAVING), self._pick(_nouns("aocvt"))
            self._note((verb.french,), (noun.french,))
            french, english = self._clause(self._subject("pykj"), verb, question="est-ce que")
            return f"combien de {noun.french_plural} {french}", f"how many {noun.english_plural} {english}", True
        if luck < 0.78:
            person = self._pick((*_NAMES, *_PRONOUNS[1:]))
            have = PRESENT["avoir"][person.person]
            link = " " if person.words else "-t-" if have == "a" else "-"
            return f"quel âge {have}{link}{person.french}", f"how old {_BE[person.person]} {person.english}", True
        thing = self._noun_phrase(_nouns("ohcv"), "ddps")
        if luck < 0.88:
            be = PRESENT["être"][thing.person]
            return f"de quelle couleur {be} {thing.french}", f"what color {_BE[thing.person]} {thing.english}", True
        self._note(thing.words, (_COST.french,))
        do = "do" if thing.plural else "does"
        return f"combien {_COST.present[thing.person]} {thing.french}", f"how much {do} {thing.english} cost", True


_SHARES: tuple[tuple[int, Callable[[Writer], _Form]], ...] = (
    (28, Writer._tell),
    (3, Writer._tell_how),
    (9, Writer._ask),
    (16, Writer._describe),
    (8, Writer._point),
    (7, Writer._give),
    (6, Writer._go),
    (4, Writer._there_is),
    (4, Writer._locate),
    (4, Writer._tell_the_time),
    (3, Writer._count),
    (2, Writer._feel),
    (2, Writer._work),
    (1, Writer._weather),
    (7, Writer._relate),
    (4, Writer._join),
    (7, Writer._wonder),
)
_FORMS = tuple(form for share, form in _SHARES for _ in range(share))
