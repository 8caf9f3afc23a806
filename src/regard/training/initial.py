"""The model that training starts from, with the random weights of a seed.

It is built without memory for the weights that `initialise` draws, and filled afterwards. In a sharded run it is
sharded before it is filled: a process draws the weights one after another, each as a whole, as one process does, and
keeps its part. No process ever holds the model, and the weights are the same for every number of processes. (A model
that training starts from is saved by rank 0, and stays in that file until it is sharded: recipes/started.py.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.core.tensors import in_real_place
from regard.models.base import SomeModel
from regard.training.parallel import Place

DRAWN = (nn.Linear, nn.Embedding, nn.Conv2d)
"""The modules whose parameters `initialise` draws."""
DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

_later: ContextVar[bool] = ContextVar("later", default=False)


@contextmanager
def filled_later(place: Place) -> Iterator[None]:
    """Let `initial` leave models without memory if the place is one of several among which they will be sharded."""
    before = _later.set(place.sharded and place.world > 1)
    try:
        yield
    finally:
        _later.reset(before)


def sharded_later() -> bool:
    """Whether models that are made here will be sharded, so that no process should have memory for the whole.

    >>> from regard.training.initial import sharded_later
    >>> sharded_later()
    False
    """
    return _later.get()


def initial(make: Callable[[], SomeModel], seed: int) -> SomeModel:
    """A new model with the random weights of a seed; in a sharded run `fill` makes them later.

    >>> import regard as rg
    >>> from regard.training.initial import initial
    >>> config = rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2)
    >>> first, again = (initial(lambda: rg.Decoder(config), seed=0) for _ in range(2))
    >>> bool((first.embedding.weight == again.embedding.weight).all())
    True
    """
    torch.manual_seed(seed)
    with _emptied():
        model = make()
    if not sharded_later():
        fill(model, model, seed, torch.device("cpu"))
    return model


def fill(module: nn.Module, model: nn.Module, seed: int, device: torch.device) -> None:
    """Give memory to the parameters of a module that have none, and initialise the model in it.

    >>> import regard as rg
    >>> from regard.training.initial import fill, filled_later, initial
    >>> config = rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2)
    >>> with filled_later(Place(0, 2, torch.device("cpu"), "fsdp")):
    ...     model = initial(lambda: rg.Decoder(config), seed=0)
    >>> fill(model, model, 0, torch.device("cpu"))
    >>> bool(model.embedding.weight.isfinite().all())
    True
    """
    if not without_memory(model):
        return
    initialise: Any = getattr(model, "initialise", None)
    if initialise is None:
        raise ValueError(
            "model: expected weights, or a method `initialise` that draws them, got a "
            f"{type(model).__name__} on the meta device"
        )
    if buffers := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(f"model: expected buffers with values, got {buffers[0]!r} on the meta device")
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    module._apply(lambda tensor: torch.full_like(tensor, torch.nan, device=device) if tensor.is_meta else tensor)
    torch.manual_seed(seed)
    with _Sharded():  # type: ignore[no-untyped-call]
        initialise()
    parameters = dict(model.named_parameters())
    if left := [name for name in empty if getattr(parameters[name], "_local_tensor", parameters[name]).isnan().any()]:
        raise ValueError(
            f"initialise: expected all weights of the {type(model).__name__} to be drawn, got no {left[0]!r}"
        )


def without_memory(model: nn.Module) -> bool:
    """Whether some parameters of a model have no memory yet.

    >>> from regard.training.initial import without_memory
    >>> without_memory(nn.Linear(2, 3)), without_memory(nn.Linear(2, 3, device="meta"))
    (False, True)
    """
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def _emptied() -> Iterator[None]:
    """Register the parameters that `initialise` draws on the meta device, and do not draw them."""
    hook = register_module_parameter_registration_hook(_on_meta)
    try:
        with _Undrawn():
            yield
    finally:
        hook.remove()


class _Undrawn(TorchFunctionMode):
    """Leaves tensors without memory as they are; torch would import its compiler for them, which takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else options["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **options)


def _on_meta(module: nn.Module, name: str, parameter: Any) -> Any:
    if isinstance(module, DRAWN) and parameter is not None and not in_real_place():
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return parameter


class _Sharded(TorchDispatchMode):
    """Draws a sharded tensor as a whole, as one process does, and keeps this process's part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in DRAWS or not isinstance(args[0], DTensor):
            return func(*args, **options)
        target = args[0]
        whole = func(torch.empty(target.shape, dtype=target.dtype, device="cpu"), *args[1:], **options)
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
        return target
