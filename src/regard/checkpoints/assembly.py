"""Fill a model with a file's tensors. All names and shapes are compared first, so no model is left half-loaded."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.form import Link, Shapes
from regard.models.base import Model
from regard.models.config import Config
from regard.models.layers.attention import Attend, MultiHeadAttention
from regard.models.layers.linear import lay_together

MOST_LAYERS = 4096
"""A file with more layers is a mistake or an attack, and building its model would take too long."""
LEAST_TENSORS = 4
"""Every layer of every form has at least this many tensors."""


def assemble(
    build: Callable[[Any], Model],
    config: Config,
    links: Callable[[Any], Iterable[Link]] | None,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    *,
    path: object,
    ignored: str = r"$^",
    swapped: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    joined: bool = True,
) -> Model:
    """Build a model and fill it with a file's tensors, by `shapes` (names and shapes) and `read`.

    Without `links` the file uses our names and has the mechanism's tensors too, unless the mechanism is `swapped` for
    another. A file with several dtypes gives a model with one, `common_dtype`. With `joined`, the weights of queries,
    keys and values are copied next to each other."""
    _check_layers(config, len(shapes), path)
    model = _empty(build, config, path)
    brought = _brought(model)
    kept = brought if links is not None or swapped else {}
    # The tensors of a user's mechanism may be integers or bools; weights may not.
    counts = {name: tensor.dtype for name, tensor in brought.items() if not tensor.is_floating_point()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in kept}
    pairs = [Link(name, (name,)) for name in wanted] if links is None else list(links(config))
    _compare(pairs, wanted, shapes, ignored, path)
    state: dict[str, Tensor] = {}
    for pair in pairs:
        for name, part in pair.split(read(pair.theirs), wanted).items():
            if name not in counts and not part.is_floating_point():
                raise CheckpointError(
                    f"{path}: expected {pair.theirs} to have floating-point numbers, got {part.dtype}"
                )
            state[name] = part.to(device=device, dtype=counts.get(name) or dtype or part.dtype).contiguous()
    wanted_dtype = common_dtype(tensor for name, tensor in state.items() if name not in counts)
    for name, tensor in {**state, **kept}.items():
        state[name] = tensor.to(device=device, dtype=counts.get(name, wanted_dtype))
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if joined and isinstance(module, MultiHeadAttention):  # one product can then compute q, k and v of a token
            lay_together(module.W_q, module.W_k, module.W_v)
    return model.eval()


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of a model whose file has these tensors: the dtype of most of its numbers, with two exceptions.

    A float16 file with some tensors in a wider dtype, like transformers' T5 with its `wo`, needs more range than
    float16 has, so the model is float32. Nothing computes in 8-bit floats, so they become bfloat16, which represents
    them exactly.

    >>> import torch
    >>> common_dtype([torch.ones(9, dtype=torch.bfloat16), torch.ones(3)])
    torch.bfloat16
    >>> common_dtype([torch.ones(9, dtype=torch.float16), torch.ones(3)])
    torch.float32
    """
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        numbers[tensor.dtype if tensor.dtype.itemsize > 1 else torch.bfloat16] += tensor.numel()
    if not numbers:
        return torch.get_default_dtype()
    most = max(numbers, key=lambda dtype: (numbers[dtype], dtype.itemsize))
    return torch.float32 if most is torch.float16 and len(numbers) > 1 else most


def _brought(model: Model) -> dict[str, Tensor]:
    """The tensors of a model's mechanisms, by their names in the model."""
    places = [(name, module) for name, module in model.named_modules() if isinstance(module, Attend)]
    return {f"{name}.{inner}": tensor for name, module in places for inner, tensor in module.state_dict().items()}


def _check_layers(config: Config, tensors: int, path: object) -> None:
    """Raise CheckpointError if the config has more layers than the file can fill, before any layer is built."""
    for name, value in vars(config).items():
        if name.startswith("num_") and name.endswith("layers"):
            layers = sum(value) if isinstance(value, tuple) else value or 0
            if layers > MOST_LAYERS:
                raise CheckpointError(f"{path}: expected at most {MOST_LAYERS} layers, got {name} = {value}")
            if getattr(config, "num_shared", None) is None and layers * LEAST_TENSORS > tensors:
                raise CheckpointError(
                    f"{path}: expected at least {LEAST_TENSORS} tensors per layer, "
                    f"got {tensors} for {layers} layers ({name} = {value})"
                )


def _empty(build: Callable[[Any], Model], config: Config, path: object) -> Model:
    """The model on the meta device: weights without memory."""
    try:
        with torch.device("meta"), _Unfilled():
            return build(config)
    except (ValueError, TypeError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: expected a config that a model can be built from, got {error!s:.200}") from None


class _Unfilled(TorchFunctionMode):
    """Skips the initialisation of weights, which come from a file. (Even on the meta device torch would import its
    compiler for it, which takes a second.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else options["tensor"]
        return func(*args, **options)


def _compare(pairs: list[Link], wanted: Shapes, shapes: Shapes, ignored: str, path: object) -> None:
    """Raise a CheckpointError that lists all tensors that are missing, unexpected or of another shape."""
    filled = {name for pair in pairs for name in pair.ours}
    assert filled == set(wanted), f"links and model differ: {sorted(filled ^ set(wanted))}"
    theirs = {pair.theirs: pair.shape(wanted) for pair in pairs}
    missing = [name for name in theirs if name not in shapes]
    unexpected = [name for name in shapes if name not in theirs and not re.fullmatch(ignored, name)]
    other = [
        f"{name} is {shapes[name]}, not {shape}"
        for name, shape in theirs.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    faults = [
        f"{len(names)} {what}: {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"{path}: expected the {len(theirs)} tensors that its config describes, got " + "; ".join(faults)
        )
