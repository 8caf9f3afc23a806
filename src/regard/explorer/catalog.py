"""The models and mechanisms that a page offers, each model with an input to begin with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard.checkpoints import load_with
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.names import NAMES, resolve
from regard.core.families.channels import ChannelMechanism
from regard.core.mechanisms import REGISTRY
from regard.core.mechanisms.text import lookup
from regard.explorer.layers import TITLES
from regard.explorer.requests import WINDOW
from regard.explorer.subject import Input, Kind, Pair, Text

TRANSLATOR = "translator"
"""The name of the model that ships with the package."""
EXAMPLES: dict[str, Input] = {
    TRANSLATOR: Pair("La voiture rouge est rapide."),
    "minilm": Text("The animal didn't cross the street because it was too tired."),
    "smollm2": Text("When Mary and John went to the store, John gave a drink to"),
    "rxnmapper": Text("CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"),
    "antiberty": Text("EVQLVESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKG"),
}
ANY_TEXT = Text("The quick brown fox jumps over the lazy dog.")
FOLDERS = ("runs/*/model", "runs/*")
"""Where trained models are, from the working folder."""
KINDS: dict[str, Kind] = {
    "Transformer": "pair",
    "VisionTransformer": "image",
    "DaViT": "image",
    "t5": "pair",
    "vit": "image",
    "davit": "image",
}
"""What models read, by their class in our config.json or their model_type in Hugging Face's; the others read text."""
TRAIN_PICTURES = "regard train vision --out runs/vision"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the menu."""

    name: str
    title: str
    kind: Kind
    installed: bool = True
    install: str | None = None
    """The command that installs or trains it, if it is not there."""
    example: Input | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values, for the page."""
        example: dict[str, Any] | None = None
        if isinstance(self.example, Text):
            example = {"text": self.example.text}
        elif isinstance(self.example, Pair):
            example = {"source": self.example.source, "target": self.example.target}
        elif self.kind == "image":
            example = {"image": None}
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "installed": self.installed,
            "install": self.install,
            "example": example,
            "note": self.note,
        }


def catalog(folders: Sequence[str] = ()) -> list[Entry]:
    """The shipped translator, the models that install by name, and folders: those that are named, and trained ones.

    >>> [entry.name for entry in catalog()][:2]
    ['translator', 'smollm2']
    """
    entries = [
        Entry(
            name=TRANSLATOR,
            title="Translator (shipped)",
            kind="pair",
            example=EXAMPLES[TRANSLATOR],
            note="French to English, an encoder-decoder: 2 + 2 layers, 4 heads, trained on a phrase-book",
        )
    ]
    for name, package in NAMES.items():
        there = package.find() is not None
        title, _, note = package.description.partition(": ")
        entries.append(
            Entry(
                name=name,
                title=title,
                kind="text",
                installed=there,
                install=None if there else package.command,
                example=EXAMPLES.get(name, ANY_TEXT),
                note=note,
            )
        )
    paths = [*folders, *(str(path) for pattern in FOLDERS for path in sorted(Path().glob(pattern)))]
    for path in dict.fromkeys(paths):
        kind = folder_kind(Path(path))
        if kind is not None and path not in {entry.name for entry in entries}:
            entries.append(Entry(name=path, title=path, kind=kind, example=_example(kind), note="a checkpoint folder"))
    if not any(entry.kind == "image" for entry in entries):
        entries.append(
            Entry(
                name="vision",
                title="A Vision Transformer of your own",
                kind="image",
                installed=False,
                install=TRAIN_PICTURES,
                example=None,
                note="letters and digits; train it, then choose its folder",
            )
        )
    return entries


def _example(kind: Kind) -> Input | None:
    return {"text": ANY_TEXT, "pair": EXAMPLES[TRANSLATOR], "image": None}[kind]


def folder_kind(path: Path) -> Kind | None:
    """What the model of a folder reads; None if there is no model. A .gguf file reads text."""
    if path.suffix == ".gguf" and path.is_file():
        return "text"
    try:
        values = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        return None
    return KINDS.get(str(values.get("model") or values.get("model_type")), "text")


def load_model(name: str, mechanism: str | None = None) -> nn.Module:
    """A model by its name in the catalog, or by the path of a folder or .gguf file, ready to run.

    `mechanism` is another mechanism in place of the model's, or the user's that the model was trained with.
    """
    chosen = None if mechanism is None else lookup(mechanism)
    if name == TRANSLATOR:
        from regard.training.recipes.translate import SHIPPED

        return load_with(SHIPPED, chosen).eval()
    if name == "vision" and not Path(name).exists():
        raise CheckpointError(f"vision: expected a model of pictures, got none: {TRAIN_PICTURES}")
    return load_with(name, chosen).eval()


def check_name(name: str) -> None:
    """Raise CheckpointError unless there is a model of this name, without loading it."""
    if name != TRANSLATOR:
        resolve(name)


def mechanisms_json() -> list[dict[str, Any]]:
    """The mechanisms that can take a layer's place, as the page reads them."""
    return [
        {
            "name": name,
            "title": TITLES[name][0],
            "formula": TITLES[name][1],
            "causal": mechanism.ordered,
        }
        for name, mechanism in REGISTRY.items()
        if not isinstance(mechanism, ChannelMechanism)
    ] + [{"name": WINDOW, "title": TITLES[WINDOW][0], "formula": TITLES[WINDOW][1], "causal": False}]
