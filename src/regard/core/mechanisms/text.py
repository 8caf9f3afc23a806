"""A mechanism from text: the name of a shipped mechanism, or FILE.py:NAME or MODULE:NAME for a user's."""

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import REGISTRY, hint
from regard.core.mechanisms.user_modules import called, named

CHOICES = f"{', '.join(REGISTRY)}; or your own: FILE.py:NAME, MODULE:NAME"
"""What a command's help says after "one of"."""


def from_text(text: str) -> Mechanism:
    """The mechanism that a text names; a class is instantiated.

    >>> from regard.core.mechanisms.text import from_text
    >>> from_text("quadratic"), from_text("regard.core.mechanisms:Elu")
    (Quadratic(c=1.0), Elu())
    """
    return made(lookup(text), text)


def lookup(text: str) -> Mechanism | type[Mechanism]:
    """What a text names: a mechanism, or a class of mechanisms. A function is called.

    >>> from regard.core.mechanisms.text import lookup
    >>> lookup("softmax"), lookup("regard:Softmax")
    (Softmax(beta=None, softcap=None), <class 'regard.core.mechanisms.softmax.Softmax'>)
    """
    if text in REGISTRY:
        return REGISTRY[text]
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"mechanism: expected one of {CHOICES}, got {text!r}{_hint(text)}")
    thing = named("mechanism", text, _is_mechanism)
    if callable(thing) and not isinstance(thing, Mechanism | type):
        thing = called("mechanism", thing, text)
    if not _is_mechanism(thing):
        kind = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
        raise ValueError(f"mechanism: expected a regard.Mechanism, got {text!r}, which is {kind}")
    return thing


def _hint(text: str) -> str:
    """What may have been meant: a file without the name in it, or a shipped mechanism."""
    return f"; write {text}:NAME" if text.endswith(".py") else hint(text)


def made(thing: Mechanism | type[Mechanism], text: str | None = None) -> Mechanism:
    """The mechanism itself, or an instance of a class, made without arguments; `text` is its name in errors.

    >>> import regard as rg
    >>> made(rg.Quadratic), made(rg.Quadratic(c=2.0))
    (Quadratic(c=1.0), Quadratic(c=2.0))
    """
    return called("mechanism", thing, text or thing.__name__) if isinstance(thing, type) else thing


def _is_mechanism(thing: object) -> bool:
    return isinstance(thing, Mechanism) or (
        isinstance(thing, type) and issubclass(thing, Mechanism) and thing is not Mechanism
    )
