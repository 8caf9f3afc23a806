"""Packages that not every installation has, and which extra of ours installs them.

`pip install regard` brings torch, einops and jaxtyping, which is all that the core and the models compute with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "llvmlite": "fast",
    "safetensors": "models",
    "tokenizers": "models",
    "jinja2": "models",
    "numpy": "models",
    "matplotlib": "plots",
    "hypothesis": "check",
    "PIL": "train",
    "tensorboard": "train",
    "sacrebleu": "train",
    "transformers": "hf",
    "gguf": "gguf",
    "starlette": "view",
    "uvicorn": "view",
    "markdown_it": "lab",
    "latex2mathml": "lab",
    "typst": "lab",
}
"""The smallest extra with a package, by the name that Python imports."""


@contextmanager
def needed_for(purpose: str, extra: str | None = None) -> Iterator[None]:
    """Around imports of packages that extras install: if one is missing, the error says which extra to install.

    That is the smallest extra with the package, unless `extra` names another.

    >>> with needed_for("a picture"):
    ...     raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    Traceback (most recent call last):
    ModuleNotFoundError: a picture needs matplotlib: pip install "regard[plots]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (sentence := explanation(error, purpose, extra)) is None:
            raise
        raise ModuleNotFoundError(sentence, name=error.name) from None


def explanation(error: ModuleNotFoundError, purpose: str, extra: str | None = None) -> str | None:
    """What to install after an import failed; None if no extra installs the missing package."""
    if "regard[" in str(error):
        return str(error)
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f'{purpose} needs {package}: pip install "regard[{extra or EXTRAS[package]}]"'
