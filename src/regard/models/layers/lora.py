"""LoRA: projections with frozen weights and trained adapters of low rank (Hu et al. 2021).

    W x  +  alpha / rank · B (A x)          A: (rank, in), random      B: (out, rank), begins as 0

With B = 0 the model begins as the one that it was made of.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.layers.linear import Linear, linear

TARGETS: dict[str, tuple[str, ...]] = {
    "query": ("W_q",),
    "key": ("W_k",),
    "value": ("W_v",),
    "output": ("W_o",),
    "network": ("gate", "up", "down"),
}
"""The projections by the names that targets have: those of attention, and all of a position-wise network."""
PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which projections get adapters, and of which rank.

    >>> from regard.training import Lora
    >>> Lora(rank=8).alpha, Lora(rank=8, targets="all").targets
    (16.0, ('query', 'key', 'value', 'output', 'network'))
    """

    rank: int
    alpha: float | None = None
    """The adapters' output is multiplied by alpha / rank; 2 · rank if not given."""
    targets: tuple[str, ...] | str = ("query", "value")
    """Names of TARGETS, as a tuple or separated by commas; or "all". A module of your own has those of its layers."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"lora_rank: expected a whole number of at least 1, got {self.rank!r}")
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2.0 * self.rank)
        elif not 0 < self.alpha < math.inf:
            raise ValueError(f"lora_alpha: expected a number above 0, got {self.alpha!r}")
        names = self.targets
        if isinstance(names, str):
            names = tuple(TARGETS) if names == "all" else tuple(name.strip() for name in names.split(","))
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"lora_targets: expected some of {', '.join(TARGETS)}, or all, got {self.targets!r}")
        object.__setattr__(self, "targets", tuple(names))

    @property
    def scale(self) -> float:
        assert self.alpha is not None
        return self.alpha / self.rank

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "targets": list(self.targets)}


class Adapted(Linear):
    """A projection with a frozen weight and an adapter."""

    def __init__(self, projection: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.lora = projection.in_features, projection.out_features, lora
        self.weight, self.bias = projection.weight, projection.bias
        self.lora_A = nn.Parameter(self.weight.new_empty(lora.rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(self.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b E"]:
        adapter = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return linear(x, self.weight, self.bias) + self.lora.scale * adapter

    def whole(self) -> Float[Tensor, "E D"]:
        """The weight with the adapter in it, without gradients."""
        return merged(self.weight.detach(), self.lora, {part: getattr(self, part).detach() for part in PARTS})


def adapt(model: nn.Module, lora: Lora, trained: tuple[str, ...] = ()) -> None:
    """Freeze a model and give its projections adapters, in place. The parameters called `trained` are not frozen.

    >>> import regard as rg
    >>> from regard.training import Lora, adapt
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> adapt(model, Lora(rank=2))
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
    ['stack.blocks.0.attention.W_q.lora_A', 'stack.blocks.0.attention.W_q.lora_B']
    """
    if lora_of(model) is not None:
        raise ValueError("model: expected one without adapters, got one that has them already")
    modules = dict(model.named_modules())
    projections = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    chosen = []
    for target in lora.targets:
        wanted = TARGETS.get(target, (target,))
        matches = [name for name in projections if name.rpartition(".")[2] in wanted]
        if not matches:
            names = [name for name, ours in TARGETS.items() if any(path.rpartition(".")[2] in ours for path in modules)]
            raise ValueError(f"lora_targets: expected some of {', '.join(names) or 'its layers'}, got {target!r}")
        chosen += matches
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    for name in dict.fromkeys(chosen):
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, Adapted(projections[name], lora))


def lora_of(model: nn.Module) -> Lora | None:
    """The adapters that a model has; None if it has none."""
    return next((module.lora for module in model.modules() if isinstance(module, Adapted)), None)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model; without its frozen parameters, if it has adapters."""
    state = model.state_dict()
    if lora_of(model) is None:
        return state
    every = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def merged(weight: Float[Tensor, "E D"], lora: Lora, adapter: Mapping[str, Tensor]) -> Float[Tensor, "E D"]:
    """W + alpha / rank · B A.

    >>> import torch
    >>> from regard.models.layers.lora import Lora, merged
    >>> adapter = {"lora_A": torch.tensor([[1.0, 0.0]]), "lora_B": torch.tensor([[0.5], [0.0]])}
    >>> merged(torch.zeros(2, 2), Lora(rank=1), adapter).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    return torch.addmm(weight, adapter["lora_B"], adapter["lora_A"], alpha=lora.scale)


def merged_tensors(state: Mapping[str, Tensor], lora: Lora | None) -> dict[str, Tensor]:
    """A state dict whose adapters are merged into the weights."""
    names = {name: name.rpartition(".")[0] for name in state if name.rpartition(".")[2] in PARTS}
    out = {name: tensor for name, tensor in state.items() if name not in names}
    for projection in dict.fromkeys(names.values()):
        assert lora is not None
        adapter = {part: state[f"{projection}.{part}"] for part in PARTS}
        out[f"{projection}.weight"] = merged(out[f"{projection}.weight"], lora, adapter)
    return out
