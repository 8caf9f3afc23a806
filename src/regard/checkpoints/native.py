"""Our checkpoint folders: config.json names the model and has its config, model.safetensors has its tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.adapters import Merged
from regard.checkpoints.assembly import assemble
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import open_folder
from regard.core.families.mechanism import Mechanism
from regard.models.base import Model
from regard.models.registry import MODELS
from regard.models.stored import UserMechanism, is_own, own_from_json

VERSION = 1


def load(
    folder: Path,
    values: dict[str, Any],
    *,
    mechanism: Mechanism | str | None = None,
    mechanisms: Sequence[UserMechanism] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mapped: bool = False,
) -> Model:
    """The model of a folder whose config.json has `values`; `mapped` leaves its tensors in the memory-mapped file."""
    path = folder / "config.json"
    name, config_values = values.get("model"), values.get("config")
    listed = isinstance(name, str) and name in MODELS
    if values.get("regard") != VERSION or not listed or not isinstance(config_values, dict):
        raise CheckpointError(
            f"{path}: expected regard = {VERSION}, a model of {', '.join(MODELS)} and its config, "
            f"got regard = {values.get('regard')!r:.40}, model = {name!r:.80}"
        )
    build, config_class = MODELS[str(name)]
    adapted = "adapters" in values
    source = Merged(folder, values) if adapted else open_folder(folder)

    def first_of(field: str) -> Tensor | None:
        """The tensor of a field of the mechanism in the first layer that has one."""
        names = (name for name in source.shapes if name.endswith(f".attend.{field}"))
        return next((source.read(name).clone() for name in names), None)

    if mechanism is not None:
        config_values = {field: value for field, value in config_values.items() if field != "mechanism"}
    try:
        if is_own(config_values.get("mechanism")):
            config_values = {
                **config_values,
                "mechanism": own_from_json(config_values["mechanism"], mechanisms, first_of),
            }
        config = config_class.from_json(with_windows(str(name), config_values))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the config of a {name}, got {error!s:.300}") from None
    if mechanism is not None:
        config = config.with_mechanism(mechanism)
    # Tensors of the mechanism that is replaced; heads of a base that the model does not have.
    ignored = r".*" if adapted else r"$^" if mechanism is None else r".*\.attend\..*"
    return assemble(
        build,
        config,
        None,
        source.shapes,
        # If not `mapped`, a copy, since a memory-mapped tensor would change when its file does.
        source.read if mapped else lambda tensor_name: source.read(tensor_name).clone(),
        path=folder,
        ignored=ignored,
        swapped=mechanism is not None,
        dtype=dtype,
        device=device,
        joined=not mapped,
    )


def with_windows(model: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model's config, or of a recipe's options, from a file that may be from before `Window`.

    A window was a number then: of tokens with the token itself in a decoder, of tokens on each side in an encoder, of
    patches in a ViT.

    >>> from regard.checkpoints.native import with_windows
    >>> with_windows("Decoder", {"window": 16}), with_windows("VisionTransformer", {"window": 1})
    ({'window': {'before': 15, 'after': 0}}, {'window_radius': 1})
    """
    size = values.get("window")
    if "window" not in values or not (size is None or type(size) is int):
        return values
    earlier = None if size is None else {"before": size - 1, "after": 0}
    around = None if size is None else {"before": size, "after": size}
    windows: dict[str, dict[str, Any]] = {
        "Decoder": {"window": earlier},
        "Encoder": {"window": around},
        "Transformer": {"encoder_window": around, "decoder_window": earlier},
        "VisionTransformer": {"window_radius": size},
        "DaViT": {"window_size": size},
    }
    return {**{name: value for name, value in values.items() if name != "window"}, **windows[model]}
