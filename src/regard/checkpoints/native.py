"""Our own folders: config.json says the model and its config, model.safetensors holds its tensors by our names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
) -> Model:
    """The model of a folder whose config.json holds `values`."""
    path = folder / "config.json"
    name, own = values.get("model"), values.get("config")
    known = isinstance(name, str) and name in MODELS
    if values.get("regard") != VERSION or not known or not isinstance(own, dict):
        raise CheckpointError(
            f"{path}: expected regard = {VERSION}, a model of {', '.join(MODELS)} and its config, "
            f"got regard = {values.get('regard')!r:.40}, model = {name!r:.80}"
        )
    build, config_class = MODELS[str(name)]
    source = open_folder(folder)

    def first_of(field: str) -> Tensor | None:
        """The first layer's tensor of a field of the mechanism."""
        names = (name for name in source.shapes if name.endswith(f".attend.{field}"))
        return next((source.read(name).clone() for name in names), None)

    if mechanism is not None:
        own = {field: value for field, value in own.items() if field != "mechanism"}
    try:
        if is_own(own.get("mechanism")):
            own = {**own, "mechanism": own_from_json(own["mechanism"], mechanisms, first_of)}
        config = config_class.from_json(own)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the config of a {name}, got {error!s:.300}") from None
    if mechanism is not None:
        config = config.with_mechanism(mechanism)
    return assemble(
        build,
        config,
        None,
        source.shapes,
        lambda one: source.read(one).clone(),
        path=folder,
        ignored=r"$^" if mechanism is None else r".*\.attend\..*",  # what the other mechanism had learned
        swapped=mechanism is not None,
        dtype=dtype,
        device=device,
    )
