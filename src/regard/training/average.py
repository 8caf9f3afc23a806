"""The exponential moving average of the weights, which is evaluated and kept in their place (Polyak and Juditsky 1992).

    average = d · average + (1 - d) · weights       d = min(decay, (1 + step) / (10 + step)), after each step

The first steps count less, so that the average forgets the weights that training began with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Average:
    """The averages of a module's trained parameters; of sharded parameters each process has its shards'.

    >>> import torch
    >>> from regard.training.average import Average
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(0.0)
    ...     average = Average(layer, decay=0.5)
    ...     _ = layer.weight.fill_(1.0)
    ...     average.update(step=100)
    ...     with average.used():
    ...         print(layer.weight.item())
    ...     print(layer.weight.item())
    0.5
    1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        """By the names of their parameters."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after a step; steps count from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(_local(self.tensors), _local(self.parameters), 1 - decay)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Exchange the weights for their averages, and back at the end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(_local(self.tensors), _local(self.parameters), strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)


def _local(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> list[Tensor]:
    """The tensors, or this process's shards of them."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors.values()]
