"""The base of every model's config: a frozen dataclass that is checked when created and converts to JSON and back."""

from dataclasses import dataclass, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from regard.core.calls.choice import refusal
from regard.core.display import Html, table
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Window
from regard.core.masks.structure import Structure
from regard.core.mechanisms import Softmax
from regard.models import stored
from regard.models.layers.attention import as_mechanism
from regard.models.layers.block import BlockConfig
from regard.models.layers.positions import RotaryScaling

C = TypeVar("C", bound="Config")

PARTS = {"rotary_scaling": RotaryScaling, "window": Window, "encoder_window": Window, "decoder_window": Window}
"""The classes of fields that JSON has as objects; the mechanism is apart."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields that every model's config has. `mechanism` is a mechanism or the name of a shipped one.

    >>> import regard as rg
    >>> config = rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2, mechanism="elu")
    >>> config.mechanism, rg.DecoderConfig.from_json(config.to_json()) == config
    (Elu(), True)
    """

    mechanism: Mechanism | str = Softmax()  # noqa: RUF009 - a frozen value
    dropout: float = 0.0
    """In training: of embeddings, and of each sub-layer's output."""
    attention_dropout: float = 0.0
    """In training: of attention weights."""
    start_token: int | None = None
    """The token that a generated sequence begins with, if any."""
    end_tokens: tuple[int, ...] = ()
    """The tokens that end a generated sequence."""
    padding_token: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mechanism", as_mechanism(self.mechanism))
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if name.endswith(("_size", "_dim", "_length")) or name.startswith("num_"):
                least = 0 if name in ("num_layers", "num_classes", "num_segments") else 1
                numbers = value if isinstance(value, tuple) else (value,)
                if value is not None and not all(type(number) is int and number >= least for number in numbers):
                    raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
            if Window in get_args(hints[name]):
                _check_type(name, value)
            if not _fits(value, hints[name]):
                kind = getattr(hints[name], "__name__", None) if isinstance(hints[name], type) else None
                raise ValueError(f"{name}: expected {kind or hints[name]}, got {value!r}")
            if name.endswith("dropout") and not 0 <= value < 1:
                raise ValueError(f"{name}: expected at least 0 and below 1, got {value}")
        self._check_heads()

    def _check_heads(self) -> None:
        """Raise ValueError unless num_heads divides embedding_dim and num_kv_heads divides num_heads."""
        width, heads = getattr(self, "embedding_dim", None), getattr(self, "num_heads", None)
        if not isinstance(width, int) or not isinstance(heads, int):  # no heads, or a tuple of them, one per stage
            return
        if getattr(self, "qk_length", None) is None and width % heads:
            or_length = " (or qk_length given)" if hasattr(self, "qk_length") else ""
            raise ValueError(f"num_heads: expected a divisor of embedding_dim = {width}{or_length}, got {heads}")
        groups = getattr(self, "num_kv_heads", None)
        if groups is not None and heads % groups:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {heads}, got {groups}")

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Config.__repr__  # type: ignore[method-assign] # so that dataclass does not generate its own

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name}={value!r}" for name, value in self._chosen().items())
        return f"{type(self).__name__}({chosen})"

    def _repr_html_(self) -> Html:
        rows = [{"field": name, "value": repr(value)} for name, value in self._chosen().items()]
        return table(rows, title=type(self).__name__, notes=["Other fields have their default."])

    def _chosen(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        values = {field: getattr(self, field.name) for field in fields(self)}
        return {field.name: value for field, value in values.items() if value != field.default}

    def to_json(self) -> dict[str, Any]:
        """The config as a dict that can be written as JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls: type[C], values: dict[str, Any]) -> C:
        """The config from what `to_json` gave. Unknown and missing fields raise ValueError."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"config: expected fields of {cls.__name__}, got {', '.join(unknown)} too")
        arguments = {name: _tuples(value) for name, value in values.items()}
        if isinstance(arguments.get("mechanism"), dict):
            arguments["mechanism"] = stored.from_json(arguments["mechanism"])
        try:
            parts = {name: value for name, value in arguments.items() if name in PARTS and isinstance(value, dict)}
            return cls(**arguments | {name: PARTS[name](**value) for name, value in parts.items()})
        except TypeError as error:
            raise ValueError(f"config: expected the fields of {cls.__name__}, got {error}") from None

    def explicit(self: C) -> C:
        """The same config with every size filled in, also those that are computed from others by default."""
        return self

    def with_mechanism(self: C, mechanism: Mechanism | str) -> C:
        """The same config with another mechanism."""
        return replace(self, mechanism=mechanism)


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """The fields that every text model's config has."""

    vocabulary_size: int

    @property
    def target_size(self) -> int:
        """How many different tokens the model predicts."""
        return self.vocabulary_size

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.target_size
        if not all(0 <= token < size for token in self.end_tokens):
            raise ValueError(f"end_tokens: expected tokens from 0 to {size - 1}, got {self.end_tokens}")


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """The fields that every image model's config has."""

    num_channels: int = 3
    num_classes: int = 1000
    """0 for a model without a head; it returns the features that the head would read."""
    class_names: tuple[str, ...] = ()
    """The names of the classes, if they have names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_names(self.class_names, self.num_classes)


def block_config(config: Any, **changes: Any) -> BlockConfig:
    """The config of a model's blocks: the fields that both configs have, and `changes`.

    >>> import regard as rg
    >>> from regard.models.config import block_config
    >>> sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> block_config(rg.DecoderConfig(**sizes), cross=True).hidden_dim
    32
    """
    shared = {field.name: getattr(config, field.name) for field in fields(BlockConfig) if hasattr(config, field.name)}
    shared["hidden_dim"] = config.hidden_dim or 4 * config.embedding_dim
    return BlockConfig(**shared, **changes)


def names_of_classes(class_names: tuple[str, ...], num_classes: int) -> tuple[str, ...]:
    """The names of the classes of a config; numbers where it has none.

    >>> from regard.models.config import names_of_classes
    >>> names_of_classes((), 2)
    ('0', '1')
    """
    return class_names or tuple(str(number) for number in range(num_classes))


def check_class_names(class_names: tuple[str, ...], num_classes: int) -> None:
    """Raise ValueError unless there is one name per class, or none at all."""
    if class_names and len(class_names) != num_classes:
        raise ValueError(f"class_names: expected {num_classes}, one per class, or none, got {len(class_names)}")


def check_window(name: str, window: Window | int | None, mechanism: Mechanism | str) -> None:
    """Raise ValueError for a window, or the radius of a square one, with a mechanism that takes no window.

    >>> import regard as rg
    >>> from regard.models.config import check_window
    >>> check_window("window", rg.Window(3, 3), "elu")
    """
    # A narrow window stands for all: a wide one hides nothing among the few tokens that `refusal` tries.
    if window is not None and refusal(as_mechanism(mechanism), Window(1)) is not None:
        raise ValueError(f"{name}: expected none with {mechanism!r}, which takes no window, got {window!r}")


def check_decoder_window(name: str, window: Window | None, mechanism: Mechanism | str, qk_length: int) -> None:
    """Raise ValueError for a window that shows later tokens, or that a mechanism cannot have token by token.

    >>> import regard as rg
    >>> from regard.models.config import check_decoder_window
    >>> check_decoder_window("window", rg.Window(3), "softmax", qk_length=64)
    """
    if window is None:
        return
    if window.after:
        raise ValueError(f"{name}: expected after=0, since a decoder's tokens see no later ones, got {window!r}")
    if as_mechanism(mechanism).streams(qk_length, Structure(window.before, window.after)) is not None:
        raise ValueError(f"{name}: expected none with {mechanism!r}, whose sums cannot drop a key, got {window!r}")


def _check_type(name: str, window: Any) -> None:
    """Raise ValueError for what is neither a window nor None; a number is told how to be one."""
    if window is None or isinstance(window, Window):
        return
    advice = ""
    if type(window) is int and window > 0:
        advice = (
            f"; {window} tokens, itself among them, are Window(before={window - 1}), "
            f"{window} on each side Window(before={window}, after={window})"
        )
    raise ValueError(f"{name}: expected Window(before, after), got {window!r}{advice}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has its annotation's type. The config with the field checks allowed strings and lengths."""
    parts = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(hint) is Literal:
        return isinstance(value, str)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(entry, parts[0]) for entry in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint in (int, bool) else isinstance(value, hint)


def _plain(value: Any) -> Any:
    if isinstance(value, Mechanism):
        return stored.to_json(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
