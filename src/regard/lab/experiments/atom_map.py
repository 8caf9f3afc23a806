"""A head that means something: in a model of chemical reactions it maps each atom to the atom it comes from."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, QUIET, WEIGHT_MAP, Figure, colour_bar, dress, lattice, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, mean
from regard.lab.trained import initialise, trained, untrained
from regard.models.base import TextModel

ATOM = re.compile(r"\[(?!CLS|SEP)[^\]]+\]|Br|Cl|[BCNOSPFI]|[bcnosp]")
"""A token that is an atom, and not a bond, a bracket or a ring."""
MOST_RIGHT = 0.95


class Reaction(NamedTuple):
    """A reaction whose atom map is known: for each atom of the product, the number of its atom among the reactants."""

    smiles: str
    sources: tuple[int, ...]
    alike: tuple[tuple[int, ...], ...] = ()
    """Atoms that a symmetry of their molecule exchanges: either is right."""


REACTIONS = {
    "thiol for fluorine on a ring": Reaction(
        "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
        (0, 1, 2, 3, 15, 14, 13, 12, 11, 10, 9),
        ((0, 2),),
    ),
    "an ester loses tert-butyl": Reaction(
        "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
        (12, 11, 10, *range(13, 30)),
    ),
    "esterification": Reaction("CC(=O)O.CCCO>>CCCOC(C)=O", (4, 5, 6, 7, 1, 0, 2)),
    "amide": Reaction(
        "O=C(Cl)c1ccccc1.NCc1ccccn1>>O=C(NCc1ccccn1)c1ccccc1",
        (0, 1, *range(9, 17), *range(3, 9)),
        ((4, 8), (5, 7)),
    ),
    "Suzuki coupling": Reaction(
        "COc1ccc(Br)cc1.OB(O)c1ccncc1>>COc1ccc(-c2ccncc2)cc1",
        (0, 1, 2, 3, 4, 5, *range(12, 18), 7, 8),
        ((3, 8), (4, 7), (13, 17), (14, 16)),
    ),
    "ether": Reaction(
        "BrCCCC#N.Oc1ccc(Cl)cc1>>N#CCCCOc1ccc(Cl)cc1",
        (5, 4, 3, 2, 1, *range(6, 14)),
        ((8, 13), (9, 12)),
    ),
    "a protected amine": Reaction(
        "CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCCc1cccs1>>CC(C)(C)OC(=O)NCCc1cccs1",
        (0, 1, 2, 3, 4, 5, 6, *range(15, 23)),
        ((0, 2, 3, 12, 13, 14), (1, 11), (4, 10), (5, 8), (6, 9)),
    ),
    "sulfonamide": Reaction(
        "CS(=O)(=O)Cl.NC1CCOCC1>>CS(=O)(=O)NC1CCOCC1",
        (0, 1, 2, 3, *range(5, 12)),
        ((2, 3), (7, 11), (8, 10)),
    ),
    "Grignard": Reaction("O=Cc1ccco1.C[Mg]Br>>CC(O)c1ccco1", (7, 1, 0, *range(2, 7))),
    "reductive amination": Reaction(
        "O=Cc1ccc(Cl)cc1.C1COCCN1.[Na+].[BH3-]C#N>>Clc1ccc(CN2CCOCC2)cc1",
        (6, 5, 4, 3, 2, 1, 14, 9, 10, 11, 12, 13, 8, 7),
        ((3, 8), (4, 7), (9, 13), (10, 12)),
    ),
}


class Atoms(NamedTuple):
    """Where the atoms of a reaction stand in its text, and which choices are right."""

    ids: Tensor
    names: list[str]
    reactants: list[int]
    product: list[int]
    right: Tensor
    """Whether an atom of the product can come from one of the reactants, (P, R)."""
    same: Tensor
    """Whether both are of the same element, (P, R)."""


def element(atom: str) -> str:
    """The element of an atom as SMILES write it.

    >>> [element(atom) for atom in ("c", "Cl", "[N+]", "[BH3-]", "[nH]")]
    ['C', 'Cl', 'N', 'B', 'N']
    """
    return re.sub(r"[^A-Za-z]|(?<=.)H", "", atom).capitalize()


@experiment(
    claims=("real.atoms",),
    title="A head that maps atoms",
    statement=(
        "RXNMapper was trained to fill in hidden pieces of chemical reactions; nobody told it which atom of a product "
        "comes from which atom of the reactants. Yet a head of it (layer 11, head 6) says so: the reactants' atom with "
        "the most attention from a product's atom is the one it comes from, for at least 95 % of the atoms in "
        "reactions with known maps, and always of the same element. The best head of the same model with random "
        "weights is right for less than half as many."
    ),
    formula=r"\text{source}(p) = \operatorname*{argmax}_{r \in \text{reactants}} a_{pr}",
    needs=("rxnmapper",),
)
def atom_map(
    *,
    layer: Annotated[int, Between(1, 12)] = 11,
    head: Annotated[int, Between(1, 8)] = 6,
    reactions: Annotated[int, Between(1, len(REACTIONS))] = len(REACTIONS),
    twins: Annotated[int, Between(2, 40)] = 20,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Map the atoms of reactions by every head, trained and with random weights, and count the right ones.

    >>> from regard import lab
    >>> lab.experiments()["atom_map"].needs
    ('rxnmapper',)
    """
    random, model = generator(seed), trained("rxnmapper")
    mine = {name: _atoms(name) for name in list(REACTIONS)[:reactions]}
    chosen = {name: _attention(model, atoms.ids, atoms) for name, atoms in mine.items()}
    right = _right(chosen, mine)
    # All reactions in one vocabulary, so that a twin is initialised once for all.
    joined = torch.cat([atoms.ids for atoms in mine.values()], 1)
    twin, small = untrained(model, joined)
    pieces = dict(zip(mine, small.split([atoms.ids.shape[1] for atoms in mine.values()], 1), strict=True))
    by_twin = []
    for number in torch.randint(2**31, (twins,), generator=random).tolist():
        initialise(twin, number)
        by_twin.append(_right({name: _attention(twin, pieces[name], atoms) for name, atoms in mine.items()}, mine))
    best = mean(torch.stack(by_twin).amax((1, 2)))
    place = layer - 1, head - 1
    weights = {name: part[place] for name, part in chosen.items()}
    rows = [_row(name, weights[name], atoms) for name, atoms in mine.items()]
    count = sum(int(row["atoms"]) for row in rows)
    checks = (
        Check(
            name=f"share of {count} atoms whose source is right", predicted=MOST_RIGHT, measured=right[place].item(),
            rule="at least",
        ),
        Check(
            name="share of atoms whose source is of their element",
            predicted=1,
            measured=sum(int(row["same element"]) for row in rows) / count,
        ),
        Check(
            name=f"share that is right: half of this head's against the best head, mean over {twins} random twins",
            predicted=right[place].item() / 2,
            measured=best.value,
            rule="at most",
            interval=best.interval,
        ),
    )  # fmt: skip
    name, atoms = next(iter(mine.items()))
    return Measurements(
        statement=checks,
        table=tuple(rows),
        draw=lambda: _figure(name, weights[name], atoms, right, torch.stack(by_twin), place),
    )


@cache
def _atoms(name: str) -> Atoms:
    reaction, tokenizer = REACTIONS[name], trained("rxnmapper").tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(reaction.smiles)
    names = tokenizer.tokens(ids)
    places = [place for place, token in enumerate(names) if ATOM.fullmatch(token)]
    arrow = names.index(">>")
    reactants, product = [p for p in places if p < arrow], [p for p in places if p > arrow]
    right = torch.zeros(len(product), len(reactants), dtype=torch.bool)
    for row, source in enumerate(reaction.sources):
        right[row, next((list(group) for group in reaction.alike if source in group), [source])] = True
    same = torch.tensor([[element(names[p]) == element(names[r]) for r in reactants] for p in product])
    return Atoms(torch.tensor([ids]), names, reactants, product, right, same)


@torch.no_grad()
def _attention(model: TextModel, ids: Tensor, atoms: Atoms) -> Tensor:
    """The weights of all heads from the atoms of the product to those of the reactants, (L, H, P, R)."""
    with rg.trace(model, keep=("weights",), rows=atoms.product) as trace:
        model(ids)
    return torch.stack([layer.need("weights")[0][..., atoms.reactants] for layer in trace.layers])


def _right(chosen: Mapping[str, Tensor], mine: Mapping[str, Atoms]) -> Tensor:
    """The share of atoms whose source is right, (L, H)."""
    hits = [_hits(weights, mine[name].right) for name, weights in chosen.items()]
    return torch.cat(hits, -1).double().mean(-1)


def _hits(weights: Tensor, among: Tensor) -> Tensor:
    """Whether the key with the most weight is among those keys, (…, P)."""
    return among.expand(weights.shape).gather(-1, weights.argmax(-1, keepdim=True))[..., 0]


def _row(name: str, weights: Tensor, atoms: Atoms) -> dict[str, Any]:
    return {
        "reaction": name,
        "atoms": len(atoms.product),
        "right": int(_hits(weights, atoms.right).sum()),
        "same element": int(_hits(weights, atoms.same).sum()),
        "different sources": len(weights.argmax(-1).unique()),
        "atoms to choose from": len(atoms.reactants),
    }


def _figure(name: str, weights: Tensor, atoms: Atoms, right: Tensor, random: Tensor, place: tuple[int, int]) -> Figure:
    figure = new_figure(
        8.5,
        6.6,
        title="One head looks from each atom of the product at the atom it comes from",
        note=f"Above: {name}; rings: the known map. Below: every head of every layer; random: {len(random)} twins.",
    )
    picture, axes = figure.subplots(2, 1, height_ratios=(1.3, 1))
    image = picture.imshow(weights, cmap=WEIGHT_MAP, vmin=0, vmax=1, aspect="auto")
    down, across = atoms.right.nonzero().T
    picture.plot(across, down, "o", color=COLOURS[1], markerfacecolor="none", markeredgewidth=1.2, markersize=8)
    lattice(picture, *weights.shape)
    dress(picture, title=f"layer {place[0] + 1}, head {place[1] + 1}", x="atoms of the reactants", y="of the product")
    picture.grid(visible=False, which="major")
    picture.set_xticks(range(len(atoms.reactants)), [atoms.names[p] for p in atoms.reactants], fontsize=7.5)
    picture.set_yticks(range(len(atoms.product)), [atoms.names[p] for p in atoms.product], fontsize=7.5)
    colour_bar(figure, image, picture, "weight")
    layers = [[layer + 1] * right.shape[1] for layer in range(len(right))]
    axes.plot(layers, random.amax(0), "_", color=QUIET, label="random weights, best twin")
    axes.plot(layers, right, "o", color=COLOURS[0], markersize=4, label="trained")
    axes.plot(place[0] + 1, right[place], "o", color=COLOURS[1], markerfacecolor="none", markersize=10)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, loc="center right", bbox_to_anchor=(1, 0.7))
    axes.set_ylim(0, 1.05)
    dress(axes, title="all heads", x="layer", y="share of atoms whose source is right")
    return figure
