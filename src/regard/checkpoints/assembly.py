"""A model from tensors: everything is compared before anything is read, and nothing is left half-loaded."""

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
"""More is not a model but a mistake, and building it would take forever."""
LEAST_TENSORS = 4
"""Of a layer: every form has more."""


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
) -> Model:
    """Build a model and fill it. `shapes` and `read` are the file's names, shapes and tensors; without `links` the
    file's names are ours, and the tensors of the mechanism too, unless it is `swapped` for another. A file of several
    dtypes gives a model of one: `common_dtype`."""
    _check_layers(config, len(shapes), path)
    model = _empty(build, config, path)
    brought = _brought(model)
    kept = brought if links is not None or swapped else {}
    # The tensors of a user's mechanism may be whole numbers or bools; weights may not.
    counts = {name: tensor.dtype for name, tensor in brought.items() if not tensor.is_floating_point()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in kept}
    pairs = [Link(name, (name,)) for name in wanted] if links is None else list(links(config))
    _compare(pairs, wanted, shapes, ignored, path)
    state: dict[str, Tensor] = {}
    for pair in pairs:
        for name, part in pair.split(read(pair.theirs), wanted).items():
            if name not in counts and not part.is_floating_point():
                raise CheckpointError(f"{path}: expected {pair.theirs} to hold real numbers, got {part.dtype}")
            state[name] = part.to(device=device, dtype=counts.get(name) or dtype or part.dtype).contiguous()
    wanted_dtype = common_dtype(tensor for name, tensor in state.items() if name not in counts)
    for name, tensor in {**state, **kept}.items():
        state[name] = tensor.to(device=device, dtype=counts.get(name, wanted_dtype))
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):  # so that a token's queries, keys and values can be one product
            lay_together(module.W_q, module.W_k, module.W_v)
    return model.eval()


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype that a model computes in whose file has these tensors: that of most of its numbers.

    Two kinds of files ask for another. Where some of a float16 file is kept in more, as transformers keeps T5's `wo`,
    float16's range did not suffice: the model takes float32. And 8 bits are a way to store numbers, in which nothing is
    computed: bfloat16 holds them as they are.

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
    """Raise CheckpointError for more layers than a file can fill, before the time is spent to build them."""
    for name, value in vars(config).items():
        if name.startswith("num_") and name.endswith("layers"):
            layers = sum(value) if isinstance(value, tuple) else value or 0
            if layers > MOST_LAYERS:
                raise CheckpointError(f"{path}: expected at most {MOST_LAYERS} layers, got {name} = {value}")
            if getattr(config, "num_shared", None) is None and layers * LEAST_TENSORS > tensors:
                raise CheckpointError(
                    f"{path}: expected at least {LEAST_TENSORS} tensors a layer, "
                    f"got {tensors} for {layers} layers ({name} = {value})"
                )


def _empty(build: Callable[[Any], Model], config: Config, path: object) -> Model:
    """The model without memory for its weights."""
    try:
        with torch.device("meta"), _Unfilled():
            return build(config)
    except (ValueError, TypeError, RuntimeError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: expected a config that a model can be built from, got {error!s:.200}") from None


class _Unfilled(TorchFunctionMode):
    """Random numbers are not drawn: what is built is filled from a file. (On the meta device torch would load its
    compiler to draw none, which takes a second.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def _compare(pairs: list[Link], wanted: Shapes, shapes: Shapes, ignored: str, path: object) -> None:
    """Raise CheckpointError that lists every tensor that is missing, unexpected or of another shape."""
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
            f"{path}: expected the {len(theirs)} tensors its config asks for, got " + "; ".join(faults)
        )
