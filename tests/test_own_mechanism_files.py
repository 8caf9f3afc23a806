"""A mechanism of the user's in a checkpoint: fields and tensors of all kinds come back."""

import json
import math
import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regard as rg
import saved_models
from regard.models import stored

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Everything(rg.Mechanism):
    """Fields of all kinds: what JSON holds, tensors that learn and that do not, whole numbers, a module, a function."""

    width: float = 1.0
    steps: tuple[int, ...] = ()
    name: str = ""
    beta: float | None = None
    W: nn.Parameter
    shift: torch.Tensor
    order: torch.Tensor
    hidden: torch.Tensor
    network: nn.Module = field(default_factory=lambda: nn.Linear(4, 4))
    activation: object = torch.sigmoid
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.steps))

    def similarity(self, q, k):
        q, k = self.network(q[..., self.order] @ self.W), k.masked_fill(self.hidden, 0)
        return self.activation((q @ k.transpose(-1, -2)) / self.width + self.shift + self.total)


def everything(**changes):
    tensors = {
        "W": nn.Parameter(torch.randn(4, 4)),
        "shift": torch.randn(1),
        "order": torch.tensor([2, 1, 0, 3]),
        "hidden": torch.tensor([False, True, False, False]),
    }
    return Everything(**tensors, width=3.0, steps=(1, 2), name="inf", beta=math.inf, **changes)


MODELS = {
    "decoder": lambda mechanism: rg.Decoder(
        rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=2, num_heads=2, mechanism=mechanism)
    ),
    "transformer": lambda mechanism: rg.Transformer(
        rg.TransformerConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2, mechanism=mechanism)
    ),
    "davit": lambda mechanism: rg.DaViT(
        rg.DaViTConfig(
            embedding_dim=(8, 8), num_layers=(1, 1), num_heads=(2, 2), num_groups=(2, 2), patch_size=(3, 3),
            patch_stride=(2, 2), patch_padding=(1, 1), norm_first=(False, True), mechanism=mechanism,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("passed", ["class", "value"])
@pytest.mark.parametrize("kind", MODELS)
def test_fields_and_tensors_of_all_kinds_are_saved_and_loaded(tmp_path, kind, passed, dtype):
    model = MODELS[kind](everything()).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)
    rg.save(model, tmp_path / "model")
    other = Everything if passed == "class" else everything()
    loaded = rg.load(tmp_path / "model", mechanisms=[rg.Softmax, other], dtype=dtype)
    for name, tensor in model.state_dict().items():
        wanted = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        assert torch.equal(loaded.state_dict()[name], wanted), name
        assert loaded.state_dict()[name].dtype == wanted.dtype
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    mechanism = loaded.config.mechanism
    assert type(mechanism) is Everything
    assert (mechanism.width, mechanism.steps, mechanism.name, mechanism.beta, mechanism.total) == (
        3.0, (1, 2), "inf", math.inf, 3,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Holding(rg.Mechanism):
    first: object
    second: object
    third: object


@given(fields=st.tuples(PLAIN, PLAIN, st.lists(PLAIN, max_size=3).map(tuple)))
@settings(max_examples=50, deadline=None)
def test_fields_that_json_holds_come_back_as_they_are(fields):
    mechanism = Holding(**dict(zip(("first", "second", "third"), fields, strict=True)))
    written = json.loads(json.dumps(stored.to_json(mechanism), allow_nan=False))
    for passed in (Holding, mechanism):
        assert repr(stored.own_from_json(written, [passed], read=lambda name: None)) == repr(mechanism)


def test_values_are_chosen_by_their_fields(tmp_path):
    rg.save(MODELS["decoder"](everything()), tmp_path / "model")
    same, other = everything(), everything()
    object.__setattr__(other, "width", 4.0)
    assert rg.load(tmp_path / "model", mechanisms=[other, same]).config.mechanism.width == 3.0
    assert rg.load(tmp_path / "model", mechanisms=[other, Everything]).config.mechanism.width == 3.0
    with pytest.raises(rg.CheckpointError, match=r"mechanisms: expected Everything\(width=3\.0, .*, got Everything\(w"):
        rg.load(tmp_path / "model", mechanisms=[other])


@pytest.mark.parametrize(
    ("mechanisms", "message"),
    [
        (Everything, "mechanisms: expected a list like [Mine], got <class"),
        ("Everything", "mechanisms: expected a list like [Mine], got 'Everything'"),
        ([nn.Linear], "mechanisms: expected classes like Mine or values like Mine(…), got <class"),
        (["Everything"], "mechanisms: expected classes like Mine or values like Mine(…), got 'Everything'"),
    ],
)
def test_what_is_no_list_of_mechanisms_is_refused(tmp_path, mechanisms, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rg.load(rg.save(saved_models.MODELS["gpt2"](), tmp_path / "model"), mechanisms=mechanisms)


def test_a_tensor_that_the_file_has_not_is_missing_and_not_made_up(tmp_path):
    folder = rg.save(MODELS["decoder"](everything()), tmp_path / "model")

    @dataclass(frozen=True, kw_only=True, eq=False)
    class Grown(Everything):
        more: torch.Tensor = field(default_factory=lambda: torch.ones(1))

    Grown.__name__ = "Everything"
    with pytest.raises(rg.CheckpointError, match=r"2 missing: .*attend\.more"):
        rg.load(folder, mechanisms=[Grown])
