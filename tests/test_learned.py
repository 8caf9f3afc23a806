"""What a mechanism learns: layers and models register it, copy it, save and load it."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import regard as rg
from learned_mechanisms import LEARNED, SIZES, Shifted, attention, learned, small_kernel


@learned
def test_a_layer_registers_what_its_mechanism_learns(make):
    mechanism = make()
    layer, x = attention(mechanism), torch.randn(2, 9, 16)
    learned = mechanism.parameters()
    assert learned
    assert all(any(registered is parameter for registered in layer.parameters()) for parameter in learned)
    before = layer(x, mask=rg.causal)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x, mask=rg.causal).square().sum().backward()
    start = [parameter.detach().clone() for parameter in learned]
    optimizer.step()
    assert all(not torch.equal(before_step, parameter) for before_step, parameter in zip(start, learned, strict=True))
    assert not torch.equal(layer(x, mask=rg.causal), before)
    assert rg.cost(mechanism, rg.Work(qk_length=8)).parameters == sum(parameter.numel() for parameter in learned)


@learned
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_layers_mechanism_moves_with_it(make, dtype):
    layer, x = attention(make()), torch.randn(2, 300, 16)
    before = layer(x, mask=rg.causal)
    layer.to(dtype)
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {dtype}
    assert all(tensor.dtype == dtype for tensor in layer.mechanism.parameters())
    out = layer(x.to(dtype), mask=rg.causal)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), before, rtol=0, atol=1e-6 if dtype == torch.float64 else 0.02)
    state = layer.start(batch=2, capacity=300)
    streamed, _ = layer.extend(x.to(dtype), state, mask=rg.causal)
    torch.testing.assert_close(streamed, out, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.02)


@learned
def test_a_layers_mechanism_is_copied_loaded_and_swapped_with_it(make):
    layer, x = attention(make()), torch.randn(2, 9, 16)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    assert not {id(parameter) for parameter in twin.mechanism.parameters()} & {
        id(parameter) for parameter in layer.mechanism.parameters()
    }
    other = {name: tensor * 1.5 for name, tensor in layer.state_dict().items()}
    swapped = torch.func.functional_call(layer, other, (x,))
    with torch.device("meta"):
        empty = attention(make())
    empty.to_empty(device="cpu")
    for module, assign in ((twin, False), (empty, True)):
        module.load_state_dict(other, assign=assign)
        assert torch.equal(module(x), swapped)
    assert not torch.equal(swapped, layer(x))


def test_a_layers_mechanism_is_one_object_while_its_tensors_are_the_same():
    """What is remembered of a mechanism is remembered by its identity: which shapes its formula was checked for."""
    layer = attention(LEARNED["a parameter"]())
    layer.to(torch.float64)
    moved = layer.mechanism
    assert moved is layer.mechanism
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    lent = {name: tensor * 1.5 for name, tensor in layer.state_dict().items()}
    torch.func.functional_call(layer, lent, (x,))
    assert layer.mechanism is moved
    layer.load_state_dict(lent, assign=True)
    assert moved is not layer.mechanism is layer.mechanism
    assert torch.equal(layer.mechanism.shift, lent["attend.shift"])


def test_a_parametrized_tensor_is_computed_at_each_access():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    layer = attention(LEARNED["a parameter"]())
    torch.nn.utils.parametrize.register_parametrization(layer.attend, "shift", Doubled())
    layer.to(torch.float64)
    x, twin = torch.randn(1, 5, 16, dtype=torch.float64), copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    before = layer(x)
    with torch.no_grad():
        layer.attend.parametrizations.shift.original.add_(1)
    assert not torch.equal(before, layer(x))


def test_a_moved_layers_formula_gets_copies_for_new_shapes_only():
    inputs = []

    @dataclass(frozen=True, kw_only=True)
    class Shifted(rg.Mechanism):
        shift: torch.Tensor

        def similarity(self, q, k):
            inputs.append(k.data_ptr())
            return torch.sigmoid(q @ k.transpose(-1, -2) + self.shift)

    layer = attention(Shifted(shift=torch.ones(1))).to(torch.float64)
    k = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    for copied in (True, False, False):
        inputs.clear()
        layer.attend(k, k, k)
        assert (k.data_ptr() not in inputs) == copied


@learned
def test_each_layer_of_a_model_learns_its_own_copy(make):
    mechanism = make()
    config = rg.DecoderConfig(**SIZES, mechanism=mechanism)
    model, other = rg.Decoder(config), rg.Decoder(config)
    layers = [block.attention.mechanism for block in (*model.stack.blocks, *other.stack.blocks)]
    for layer in layers:  # as it was passed: `initialise` is for the model's own weights
        for mine, passed in zip(layer.parameters(), mechanism.parameters(), strict=True):
            assert torch.equal(mine, passed)
    everything = [id(tensor) for layer in (mechanism, *layers) for tensor in layer.parameters()]
    assert len(everything) == len(set(everything))
    assert model.summary(8).parameters == sum(tensor.numel() for tensor in model.parameters())
    assert "Parameter containing" not in str(model.summary(8))
    tokens = torch.randint(11, (2, 7))
    torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
    assert all(tensor.grad.abs().sum() > 0 for layer in layers[:2] for tensor in layer.parameters())
    assert torch.equal(model.double()(tokens).argmax(-1), model.float()(tokens).argmax(-1))


@learned
def test_a_learned_mechanism_takes_the_place_of_a_checkpoints(make, tmp_path):
    model = rg.Decoder(rg.DecoderConfig(**SIZES))
    mechanism = make()
    swapped = rg.load(rg.save(model, tmp_path / "model"), mechanism=mechanism, dtype=torch.float64)
    for block in swapped.stack.blocks:
        for mine, passed in zip(block.attention.mechanism.parameters(), mechanism.parameters(), strict=True):
            assert mine.dtype == torch.float64
            assert torch.equal(mine, passed.double())
    assert swapped(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@learned
def test_what_a_mechanism_has_learned_is_saved_and_loaded(make, tmp_path):
    model = rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=make())).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)  # layers differ, as they do once trained
    folder, tokens = rg.save(model, tmp_path / "model"), torch.randint(11, (2, 7))
    with pytest.raises(rg.CheckpointError, match=rf"mechanisms=\[{type(make()).__name__}"):
        rg.load(folder)
    passed = make()
    before = [parameter.detach().clone() for parameter in passed.parameters()]
    loaded = rg.load(folder, mechanisms=[passed])
    assert torch.equal(loaded(tokens), model(tokens))
    assert all(torch.equal(*pair) for pair in zip(passed.parameters(), before, strict=True))
    assert rg.load(folder, mechanism="softmax")(tokens).isfinite().all()


def test_a_learned_number_is_saved_and_loaded(tmp_path):
    sizes = {"vocabulary_size": 11, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    model = rg.Decoder(rg.DecoderConfig(**sizes, mechanism=Shifted(shift=nn.Parameter(torch.tensor(0.3)))))
    rg.save(model, tmp_path / "saved")
    again = rg.load(tmp_path / "saved", mechanisms=[Shifted])
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens), model(tokens))


def test_a_parameter_for_each_head_serves_in_a_layer():
    layer = rg.MultiHeadAttention(8, 4, mechanism=Shifted(shift=nn.Parameter(torch.randn(4, 1, 1))))
    layer(torch.randn(2, 5, 8), mask=rg.causal).sum().backward()
    assert layer.attend.shift.grad.shape == (4, 1, 1)


def test_a_formula_that_does_not_fit_grouped_heads_is_told_their_shapes():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    with pytest.raises(ValueError, match=r"^similarity: expected .* \(2, 2, 10, 8\) and .* \(2, 2, 7, 8\), .*Shifted"):
        rg.attend(q, k, k, Shifted(shift=nn.Parameter(torch.randn(4, 1, 1))))
    rg.attend(q, k, k, Shifted(shift=nn.Parameter(torch.randn(2, 1, 1))))  # one for each key/value head


@pytest.mark.parametrize("make", [*LEARNED.values(), small_kernel, rg.Quadratic], ids=[*LEARNED, "small", "none"])
def test_mechanisms_are_equal_by_the_very_same_tensors(make):
    mechanism, other = make(), make()
    again = copy.copy(mechanism)
    assert again == mechanism
    assert hash(again) == hash(mechanism)
    assert {mechanism: 1}[again] == 1
    assert (mechanism == other) == (not mechanism.tensors())
    assert mechanism != rg.Softmax()
    assert mechanism != "quadratic"
    config = rg.DecoderConfig(**SIZES, mechanism=mechanism)
    assert config == copy.copy(config)
    assert (config == rg.DecoderConfig(**SIZES, mechanism=other)) == (mechanism == other)


def test_a_number_is_no_tensor_where_mechanisms_are_compared():
    single, many = Shifted(shift=0.5), Shifted(shift=torch.ones(3))
    assert (single == many, many == single, single == Shifted(shift=0.5)) == (False, False, True)


@pytest.mark.parametrize("heads", [[2], [3, 2, 1, 0], [1, 1]], ids=str)
def test_chosen_heads_keep_their_own_part_of_a_formula(heads):
    layer = rg.MultiHeadAttention(8, 4, mechanism=Shifted(shift=nn.Parameter(torch.randn(4, 1, 1))))
    q, k = torch.randn(2, 4, 5, 2), torch.randn(2, 4, 5, 2)
    expected = rg.weights(q, k, layer.mechanism, rg.causal, rows=[1, 4])[:, heads]
    assert torch.equal(rg.weights(q, k, layer.mechanism, rg.causal, rows=[1, 4], heads=heads), expected)
    x, chosen = torch.randn(2, 5, 8), sorted(set(heads))
    with rg.trace(layer, keep=("weights", "scores")) as whole:
        layer(x, mask=rg.causal)
    with rg.trace(layer, heads=chosen, keep=("weights", "scores")) as part:
        layer(x, mask=rg.causal)
    for kept in ("weights", "scores"):
        assert torch.equal(getattr(part.layers[0], kept), getattr(whole.layers[0], kept)[:, chosen])
