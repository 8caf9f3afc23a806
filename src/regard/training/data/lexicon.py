"""The words of the phrase-book: French forms, English forms, and which words go together.

Tables are text with an entry on each line, like a dictionary. Regular plurals, feminines and conjugations are made by
rule; irregular forms are in the tables.
"""

from typing import NamedTuple


class Noun(NamedTuple):
    """A noun; mass nouns (bread, water) have no plural. The letters of `kinds` are explained below."""

    french: str
    french_plural: str
    feminine: bool
    english: str
    english_plural: str
    kinds: str
    mass: bool = False


class Adjective(NamedTuple):
    """An adjective: four forms, a fifth before a vowel (bel) where it differs, and whether it precedes the noun."""

    forms: tuple[str, str, str, str]
    before_vowel: str
    english: str
    precedes: bool
    kinds: str


class Verb(NamedTuple):
    """A verb: present tense for six persons, participle; English base, third person, past and participle."""

    french: str
    present: tuple[str, ...]
    participle: str
    moves: bool
    english: str
    third: str
    past: str
    past_participle: str
    particle: str
    takes: str


# Kinds of nouns, by which adjectives and verbs choose them: p people (y young), k relatives and friends (u only one),
# j professions, a animals, f food, d mass nouns (e to eat, x to cut, l to drink), o objects, h things that open and
# close, c clothes, v vehicles (w with a steering wheel), t things to read (q to answer), s songs and movies, b places
# one is at, r places one is in, n nature

NOUNS = """
homme m man/men p
femme f woman/women p
enfant m child/children y
garçon m boy y
fille f girl y
roi m king p
reine f queen p
père m father ku
mère f mother ku
frère m brother k
sœur f sister k
ami m friend k
amie f friend k
voisin m neighbor k
voisine f neighbor k
cousin m cousin k
cousine f cousin k
oncle m uncle k
tante f aunt k
collègue m colleague k
médecin m doctor j
professeur m teacher j
journaliste m journalist j
dentiste m dentist j
pilote m pilot j
peintre m painter j
étudiant m student j
étudiante f student j
chanteur m singer j
chanteuse f singer j
acteur m actor j
actrice f actress j
serveur m waiter j
serveuse f waitress j
boulanger m baker j
fermier m farmer j
musicien m musician j
musicienne f musician j
infirmière f nurse j
chat m cat a
chien m dog a
oiseau m bird a
cheval/chevaux m horse a
vache f cow a
lapin m rabbit a
mouton m sheep/sheep a
canard m duck a
poule f hen a
loup m wolf/wolves a
singe m monkey a
éléphant m elephant a
tortue f turtle a
âne m donkey a
renard m fox a
cochon m pig a
lion m lion a
pomme f apple f
poire f pear f
orange f orange f
banane f banana f
fraise f strawberry f
tomate f tomato/tomatoes f
carotte f carrot f
citron m lemon f
gâteau m cake f
œuf m egg f
tarte f pie f
biscuit m cookie f
salade f salad f
pain m bread/- dex
fromage m cheese/- dex
viande f meat/- dex
riz m rice/- de
beurre m butter/- dex
soupe f soup/- de
chocolat m chocolate/- dex
miel m honey/- de
eau f water/- dl
lait m milk/- dl
café m coffee/- dl
thé m tea/- dl
vin m wine/- dl
bière f beer/- dl
table f table o
chaise f chair o
lampe f lamp o
montre f watch o
téléphone m phone o
couteau m knife/knives o
verre m glass o
tasse f cup o
assiette f plate o
stylo m pen o
crayon m pencil o
ordinateur m computer o
photo f photo o
lit m bed o
miroir m mirror o
parapluie m umbrella o
ballon m ball o
jouet m toy o
cadeau m gift o
guitare f guitar o
horloge f clock o
clé f key o
porte f door h
fenêtre f window h
boîte f box ho
sac m bag ho
valise f suitcase ho
bouteille f bottle ho
armoire f wardrobe h
chemise f shirt c
robe f dress c
chapeau m hat c
manteau m coat c
jupe f skirt c
écharpe f scarf/scarves c
veste f jacket c
cravate f tie c
gant m glove c
chaussure f shoe c
voiture f car vw
vélo m bike v
train m train v
avion m plane v
bateau m boat v
camion m truck vw
taxi m taxi vw
tracteur m tractor vw
livre m book t
lettre f letter tq
journal/journaux m newspaper t
histoire f story t
roman m novel t
poème m poem t
message m message tq
question f question tq
chanson f song s
film m movie s
école f school b
marché m market b
gare f station b
magasin m store b
parc m park b
plage f beach b
restaurant m restaurant b
hôtel m hotel b
musée m museum b
hôpital/hôpitaux m hospital b
bibliothèque f library b
banque f bank b
église f church b
maison f house r
jardin m garden r
cuisine f kitchen r
chambre f bedroom r
rue f street r
forêt f forest r
village m village r
château m castle r
ville f city r
arbre m tree n
fleur f flower n
montagne f mountain n
rivière f river n
lac m lake n
île f island n
étoile f star n
nuage m cloud n
pont m bridge n
"""

# masculine[/feminine[/before a vowel]], English, kinds of nouns
BEFORE = """
petit small pykjafohcvtsbrn
grand big aohvcbrn
beau/belle/bel beautiful aohcvtsbrn
joli pretty aohcbrn
vieux/vieille/vieil old pkjaohcvtsbrn
nouveau/nouvelle/nouvel new johcvtsb
jeune young pykja
bon/bonne good jfdts
mauvais bad fdts
"""
AFTER = """
rouge red fohcv
bleu blue ohcv
vert green fohcv
noir black aohcv
blanc/blanche white aohcv
jaune yellow fohcv
gris/grise gray aohcv
brun brown aohc
rapide fast av
lent slow av
cher/chère expensive fdohcvb
lourd heavy ohc
léger/légère light ohc
propre clean ohcvbr
sale dirty ohcvbra
chaud hot fd
froid cold fd
délicieux/délicieuse delicious fd
frais/fraîche fresh fd
rond round oh
cassé broken ohv
utile useful ohvt
moderne modern ovbrh
vide empty hbrv
calme quiet pykjabrn
célèbre famous pyjtsbrn
intéressant interesting tsbjk
difficile difficult ts
drôle funny pykjts
triste sad pykjts
fatigué tired pykja
malade sick pykja
heureux/heureuse happy pykja
intelligent intelligent pykja
gentil/gentille kind pykja
riche rich pkj
patient patient pykj
curieux/curieuse curious pykja
sérieux/sérieuse serious pkj
fort strong pykja
dangereux/dangereuse dangerous avrn
français/française French jfdtsbv
anglais/anglaise English jdtsv
italien/italienne Italian jdtsbv
espagnol Spanish jdtsb
japonais/japonaise Japanese jvtsb
"""

# infinitive [present for six persons + participle], English base[/past/participle][ particle], kinds of its object
VERBS = """
manger = eat/ate/eaten fe
voir vois/vois/voit/voyons/voyez/voient+vu see/saw/seen pykjaohcvbrnf
regarder = look_at pykjaohcvbrns
acheter achète/achètes/achète/achetons/achetez/achètent+acheté buy/bought/bought fdohcvta
vendre vends/vends/vend/vendons/vendez/vendent+vendu sell/sold/sold fdocvta
chercher = look_for pykjaohcvbr
trouver = find/found/found aohcvtbr
perdre perds/perds/perd/perdons/perdez/perdent+perdu lose/lost/lost oca
porter = wear/wore/worn c
ouvrir ouvre/ouvres/ouvre/ouvrons/ouvrez/ouvrent+ouvert open h
fermer = close h
lire lis/lis/lit/lisons/lisez/lisent+lu read/read/read t
écrire écris/écris/écrit/écrivons/écrivez/écrivent+écrit write/wrote/written t
connaître connais/connais/connaît/connaissons/connaissez/connaissent+connu know/knew/known pykjbr
préparer = prepare fd
laver = wash cva
réparer = repair ovh
conduire conduis/conduis/conduit/conduisons/conduisez/conduisent+conduit drive/drove/driven w
vouloir veux/veux/veut/voulons/voulez/veulent+voulu want fdocvta
avoir ai/as/a/avons/avez/ont+eu have/had/had aocvtk
prendre prends/prends/prend/prenons/prenez/prennent+pris take/took/taken ocvft
dessiner = draw/drew/drawn anropy
visiter = visit br
aider = help pykj
inviter = invite pykj
rencontrer = meet/met/met pykj
attendre attends/attends/attend/attendons/attendez/attendent+attendu wait_for pykjv
écouter = listen_to pykjs
cacher = hide/hid/hidden oc
casser = break/broke/broken oh
garder = keep/kept/kept oct
oublier = forget/forgot/forgotten oct
apporter = bring/brought/brought fdoct
choisir choisis/choisis/choisit/choisissons/choisissez/choisissent+choisi choose/chose/chosen focvts
nettoyer nettoie/nettoies/nettoie/nettoyons/nettoyez/nettoient+nettoyé clean ohrv
couper = cut/cut/cut fx
remercier = thank pykj
aimer = like pykjafdohcvtsbrn
adorer = love pykjafdcvtsbrn
détester = hate afdcvtsb
préférer préfère/préfères/préfère/préférons/préférez/préfèrent+préféré prefer/preferred/preferred afdcvtsb
boire bois/bois/boit/buvons/buvez/boivent+bu drink/drank/drunk l
"""
# By the French preposition before the object; the English preposition, if any, is the verb's particle.
INDIRECT = {
    "à": """
répondre réponds/réponds/répond/répondons/répondez/répondent+répondu answer pykjq
penser = think/thought/thought_about pykj
téléphoner = call kj
""",
    "de": """
parler = talk_about pykjats
rêver = dream_about pykjv
""",
    "avec": """
jouer = play_with pykaj
danser = dance_with pykj
""",
}
GIVING = """
donner = give/gave/given foct
montrer = show/showed/shown aocvt
envoyer envoie/envoies/envoie/envoyons/envoyez/envoient+envoyé send/sent/sent oct
offrir offre/offres/offre/offrons/offrez/offrent+offert offer foct
prêter = lend/lent/lent ocvt
"""
ACTING = """
dormir dors/dors/dort/dormons/dormez/dorment+dormi sleep/slept/slept
travailler = work
courir cours/cours/court/courons/courez/courent+couru run/ran/run
marcher = walk
nager = swim/swam/swum
rire ris/ris/rit/rions/riez/rient+ri laugh
pleurer = cry
jouer = play
danser = dance
chanter = sing/sang/sung
voyager = travel
crier = shout
attendre attends/attends/attend/attendons/attendez/attendent+attendu wait
*arriver = arrive
*tomber = fall/fell/fallen
*rester = stay
*partir pars/pars/part/partons/partez/partent+parti leave/left/left
*sortir sors/sors/sort/sortons/sortez/sortent+sorti go/went/gone_out
*rentrer = come/came/come_home
"""
GOING = """
*aller vais/vas/va/allons/allez/vont+allé go/went/gone_to
*venir viens/viens/vient/venons/venez/viennent+venu come/came/come_from
"""
STAYING = """
habiter = live
travailler = work
*rester = stay
"""
# Before an infinitive.
WILLING = """
vouloir veux/veux/veut/voulons/voulez/veulent+voulu want_to
savoir sais/sais/sait/savons/savez/savent+su know/knew/known_how_to
aimer = like_to
"""
STATING = """
penser = think/thought/thought
dire dis/dis/dit/disons/dites/disent+dit say/said/said
croire crois/crois/croit/croyons/croyez/croient+cru believe
savoir sais/sais/sait/savons/savez/savent+su know/knew/known
"""

PRESENT = {
    "être": ("suis", "es", "est", "sommes", "êtes", "sont"),
    "avoir": ("ai", "as", "a", "avons", "avez", "ont"),
    "aller": ("vais", "vas", "va", "allons", "allez", "vont"),
    "pouvoir": ("peux", "peux", "peut", "pouvons", "pouvez", "peuvent"),
    "devoir": ("dois", "dois", "doit", "devons", "devez", "doivent"),
}
IMPERFECT = ("étais", "étais", "était", "étions", "étiez", "étaient")

NAMES = {
    "Marie": "f", "Paul": "m", "Anne": "f", "Pierre": "m", "Sophie": "f", "Luc": "m", "Julie": "f", "Marc": "m",
    "Claire": "f", "Thomas": "m", "Emma": "f", "Hugo": "m", "Alice": "f", "Nicolas": "m", "Léa": "f", "Antoine": "m",
}  # fmt: skip
CITIES = {
    "Paris": "Paris", "Lyon": "Lyon", "Londres": "London", "Rome": "Rome", "Berlin": "Berlin", "Bruxelles": "Brussels",
    "Genève": "Geneva", "Lisbonne": "Lisbon", "Athènes": "Athens", "Vienne": "Vienna",
}  # fmt: skip
COUNTRIES = {
    "en France": "France", "en Italie": "Italy", "en Espagne": "Spain", "en Allemagne": "Germany",
    "en Suisse": "Switzerland", "au Japon": "Japan", "au Canada": "Canada", "au Portugal": "Portugal",
}  # fmt: skip
DAYS = {
    "lundi": "Monday", "mardi": "Tuesday", "mercredi": "Wednesday", "jeudi": "Thursday", "vendredi": "Friday",
    "samedi": "Saturday", "dimanche": "Sunday",
}  # fmt: skip
MONTHS = {
    "janvier": "January", "février": "February", "mars": "March", "avril": "April", "mai": "May", "juin": "June",
    "juillet": "July", "août": "August", "septembre": "September", "octobre": "October", "novembre": "November",
    "décembre": "December",
}  # fmt: skip
FEELINGS = {
    "faim": "hungry", "soif": "thirsty", "froid": "cold", "chaud": "hot", "peur": "afraid", "sommeil": "sleepy",
    "raison": "right", "tort": "wrong",
}  # fmt: skip
OFTEN = {"souvent": "often", "toujours": "always", "rarement": "rarely", "parfois": "sometimes"}
HOW = {"bien": "well", "mal": "badly", "beaucoup": "a lot", "vite": "quickly", "lentement": "slowly"}
WHEN = {
    "present": {
        "aujourd'hui": "today", "maintenant": "now", "tous les jours": "every day", "le matin": "in the morning",
        "le soir": "in the evening", "ce matin": "this morning", "cette semaine": "this week",
    },
    "past": {
        "hier": "yesterday", "hier soir": "last night", "ce matin": "this morning", "la semaine dernière": "last week",
        "l'année dernière": "last year",
    },
    "future": {
        "demain": "tomorrow", "ce soir": "tonight", "demain matin": "tomorrow morning",
        "la semaine prochaine": "next week", "l'année prochaine": "next year",
    },
}  # fmt: skip
WHERE = {"dans": "in", "devant": "in front of", "derrière": "behind", "près de": "near", "à côté de": "next to"}
WEATHER = {
    "il pleut": "it rains", "il neige": "it snows", "il fait froid": "it is cold", "il fait chaud": "it is hot",
    "il fait beau": "the weather is nice", "il fait nuit": "it is dark",
}  # fmt: skip

_FRENCH_UNITS = (
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf",
    "dix", "onze", "douze", "treize", "quatorze", "quinze", "seize", "dix-sept", "dix-huit", "dix-neuf",
)  # fmt: skip
_FRENCH_TENS = (
    "",
    "",
    "vingt",
    "trente",
    "quarante",
    "cinquante",
    "soixante",
    "soixante",
    "quatre-vingt",
    "quatre-vingt",
)
_ENGLISH_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ENGLISH_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number(value: int, feminine: bool = False) -> tuple[str, str]:
    """A number from 0 to 100 in French and English words; French numbers that end in one agree with their noun.

    >>> number(21, feminine=True), number(71), number(80), number(99)[0]
    (('vingt et une', 'twenty-one'), ('soixante et onze', 'seventy-one'), ('quatre-vingts', 'eighty'), 'quatre-vingt-dix-neuf')
    """  # noqa: E501
    if not 0 <= value <= 100:
        raise ValueError(f"value: expected 0 to 100, got {value}")
    if value == 100:
        return "cent", "one hundred"
    tens, units = divmod(value, 10)
    english = _ENGLISH_UNITS[value] if value < 20 else _ENGLISH_TENS[tens] + (f"-{_ENGLISH_UNITS[units]}" * (units > 0))
    if tens in (7, 9):  # the French count on from sixty and from eighty
        tens, units = tens - 1, units + 10
    if value < 20:
        french = _FRENCH_UNITS[value]
    elif units == 0:
        french = _FRENCH_TENS[tens] + "s" * (tens == 8)
    elif units % 10 == 1 and tens < 8:
        french = f"{_FRENCH_TENS[tens]} et {_FRENCH_UNITS[units]}"
    else:
        french = f"{_FRENCH_TENS[tens]}-{_FRENCH_UNITS[units]}"
    return french + "e" * (feminine and french.endswith("un")), english


def nouns(table: str) -> tuple[Noun, ...]:
    """The nouns of a table.

    >>> nouns("gâteau m cake f")[0][:5]
    ('gâteau', 'gâteaux', False, 'cake', 'cakes')
    """
    return tuple(_noun(*line.split()) for line in table.strip().splitlines())


def adjectives(table: str, precedes: bool) -> tuple[Adjective, ...]:
    """The adjectives of a table.

    >>> adjectives("beau/belle/bel beautiful n", precedes=True)[0].forms
    ('beau', 'belle', 'beaux', 'belles')
    """
    entries = []
    for line in table.strip().splitlines():
        french, english, kinds = line.split()
        masculine, feminine, before_vowel = (*french.split("/"), "", "")[:3]
        feminine = feminine or (masculine if masculine.endswith("e") else masculine + "e")
        forms = (masculine, feminine, french_plural(masculine), french_plural(feminine))
        entries.append(Adjective(forms, before_vowel or masculine, english, precedes, kinds))
    return tuple(entries)


def verbs(table: str) -> tuple[Verb, ...]:
    """The verbs of a table; a star marks those whose past tense is formed with être.

    >>> verb = verbs("manger = eat/ate/eaten f")[0]
    >>> verb.present[3], verb.participle, verb.third, verb.past
    ('mangeons', 'mangé', 'eats', 'ate')
    """
    entries = []
    for line in table.strip().splitlines():
        french, forms, english, takes = (*line.split(), "")[:4]
        moves, french = french.startswith("*"), french.removeprefix("*")
        stem = french.removesuffix("er")
        if forms == "=":
            soft = "e" if stem.endswith("g") else ""
            present = tuple(stem + end for end in ("e", "es", "e", f"{soft}ons", "ez", "ent"))
            participle = stem + "é"
        else:
            six, participle = forms.split("+")
            present = tuple(six.split("/"))
        words, _, particle = english.partition("_")
        base, past, past_participle = words.split("/") if "/" in words else (words, _regular(words), _regular(words))
        particle = f" {particle.replace('_', ' ')}" if particle else ""
        third = "has" if base == "have" else english_plural(base) if base != "go" else "goes"
        entries.append(Verb(french, present, participle, moves, base, third, past, past_participle, particle, takes))
    return tuple(entries)


def french_plural(word: str) -> str:
    """The regular plural of a French noun or adjective."""
    if word.endswith(("s", "x", "z")):
        return word
    return word + ("x" if word.endswith("eau") else "s")


def english_plural(word: str) -> str:
    """The regular plural of an English noun, which is also the third person singular of a verb."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh")) else "s")


def _noun(french: str, gender: str, english: str, kinds: str) -> Noun:
    singular, _, plural = french.partition("/")
    english, _, many = english.partition("/")
    many = many or english_plural(english)
    return Noun(singular, plural or french_plural(singular), gender == "f", english, many, kinds, mass=many == "-")


def _regular(base: str) -> str:
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ied"
    return base + ("d" if base.endswith("e") else "ed")
