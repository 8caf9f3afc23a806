"""What a mechanism learns: layers and models register it, every path derives it, once and twice, whole and streamed."""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import regard as rg
from regard.core.families.features import FeatureMechanism
from regard.core.mechanisms import REGISTRY

SIZES = {"vocabulary_size": 11, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}


@dataclass(frozen=True, kw_only=True)
class Bilinear(rg.Mechanism):
    """A user's mechanism with a parameter and a tensor that does not learn."""

    W: nn.Parameter
    shift: torch.Tensor

    def similarity(self, q, k):
        return torch.sigmoid(q @ self.W @ k.transpose(-1, -2) + self.shift)


@dataclass(frozen=True, kw_only=True)
class Projected(FeatureMechanism):
    """A user's kernel with a parameter."""

    W: nn.Parameter

    def features(self, x):
        return torch.nn.functional.softplus(x @ self.W)

    def feature_length(self, qk_length):
        return self.W.shape[1]


LEARNED = {
    "a module": lambda: rg.Kernel(feature_map=nn.Sequential(nn.Linear(8, 6), nn.Softplus())),
    "a parameter": lambda: Bilinear(W=nn.Parameter(torch.randn(8, 8)), shift=torch.ones(1)),
    "a kernel's parameter": lambda: Projected(W=nn.Parameter(torch.randn(8, 6))),
    "a gate": lambda: rg.Gated(gate=nn.Sequential(nn.Linear(8, 8), nn.LogSigmoid())),
}
learned = pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)


def attention(mechanism):
    return rg.MultiHeadAttention(16, 2, mechanism=mechanism)


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


class Map:
    def __init__(self, W):
        self.W = W

    def __call__(self, x, bias=0.1):
        return torch.relu(x @ self.W) + bias

    method = __call__


WEIGHT = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)


def by_default(x, W=WEIGHT):
    return torch.relu(x @ W) + 0.1


def by_argument(W, x):
    return torch.relu(x @ W) + 0.1


def closure():
    W = WEIGHT
    return lambda x: torch.relu(x @ W) + 0.1


CAPTURES = {
    "a closure": closure(),
    "a global": lambda x: torch.relu(x @ WEIGHT) + 0.1,
    "a default": by_default,
    "a partial": functools.partial(by_argument, WEIGHT),
    "a method": Map(WEIGHT).method,
    "an object": Map(WEIGHT),
    "another function": lambda x: by_default(x),
    "a product": lambda x, W=2 * WEIGHT: torch.relu(x @ W) + 0.1,
}


def make_tensors(length, size=4, grad=True):
    return [torch.randn(1, 2, length, size, dtype=torch.float64, requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("grad", [True, False], ids=["learned q", "plain q"])
@pytest.mark.parametrize("feature_map", CAPTURES.values(), ids=CAPTURES)
def test_a_captured_tensor_gets_its_gradient(feature_map, grad):
    mechanism, tensors = rg.Kernel(feature_map=feature_map), make_tensors(300, grad=grad)
    grads = [
        torch.autograd.grad(
            rg.attend(*tensors, mechanism, rg.causal, path=path).square().sum(), WEIGHT, retain_graph=True
        )
        for path in ("chunked", "reference")
    ]
    torch.testing.assert_close(*grads)
    assert grads[0][0].abs().sum() > 0


@pytest.mark.parametrize("feature_map", CAPTURES.values(), ids=CAPTURES)
def test_a_layer_refuses_what_it_cannot_register(feature_map):
    with pytest.raises(ValueError, match=r"mechanism: expected its learned tensors in fields.* captures .*\(4, 6\)"):
        rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=feature_map))


def test_a_layer_names_what_it_cannot_register():
    with pytest.raises(ValueError, match=r"Kernel, whose function captures WEIGHT \(4, 6\)$"):
        rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=CAPTURES["a global"]))
    with pytest.raises(ValueError, match=r"^W: expected an nn.Parameter, .* got a tensor with requires_grad$"):
        attention(Bilinear(W=torch.randn(8, 8, requires_grad=True), shift=torch.ones(1)))
    with pytest.raises(
        ValueError, match=r"^mechanism: expected one that works with qk_length = 8, got Kernel, which raises "
    ):
        attention(rg.Kernel(feature_map=nn.Linear(5, 5)))


CONSTANT = torch.randn(4, 6, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Turned(rg.Mechanism):
    """A user's mechanism whose formula reads a global."""

    def similarity(self, q, k):
        return torch.sigmoid(q @ CONSTANT @ CONSTANT.mT @ k.mT)


CONSTANTS = {
    "a closure": lambda: rg.Kernel(feature_map=(lambda W: lambda x: torch.relu(x @ W))(CONSTANT)),
    "a default": lambda: rg.Kernel(feature_map=lambda x, W=CONSTANT: torch.relu(x @ W)),
    "a partial": lambda: rg.Kernel(feature_map=functools.partial(by_argument, CONSTANT)),
    "a method": lambda: rg.Kernel(feature_map=Map(CONSTANT).method),
    "an object": lambda: rg.Kernel(feature_map=Map(CONSTANT)),
    "a gate": lambda: rg.Gated(gate=lambda k: -(k @ CONSTANT @ CONSTANT.mT).abs()),
    "a global": Turned,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_layer_refuses_a_constant_that_it_could_not_move_or_save(name):
    message = r"mechanism: expected its tensors in fields, as .* captures (W|CONSTANT|argument 0) \(4, 6\)$"
    with pytest.raises(ValueError, match=message), torch.device("cpu"):
        rg.MultiHeadAttention(8, 2, mechanism=CONSTANTS[name]())


def test_numbers_and_tensors_made_by_a_formula_are_no_constants():
    half = torch.tensor(0.5)

    def features(x):
        mask = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype, device=x.device)
        return torch.relu(x * mask + torch.arange(4, device=x.device) * half) + x.new_ones(4)

    layer = rg.MultiHeadAttention(8, 2, mechanism=rg.Kernel(feature_map=features))
    assert layer.double()(torch.randn(1, 3, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("holder", [tuple, list, lambda parts: dict(enumerate(parts))], ids=["tuple", "list", "dict"])
@pytest.mark.parametrize("grad", [True, False], ids=["learned", "constant"])
def test_tensors_within_a_field_are_refused_by_the_fields_name(holder, grad):
    @dataclass(frozen=True, kw_only=True)
    class Heated(rg.Mechanism):
        heats: object

        def similarity(self, q, k):
            return torch.sigmoid(self.heats[0] * (q @ k.mT) + self.heats[1])

    heats = holder([nn.Parameter(torch.ones(1), requires_grad=grad) for _ in range(2)])
    with pytest.raises(ValueError, match=r"^heats: expected tensors in fields of their own, or in an nn.ParameterList"):
        attention(Heated(heats=heats))
    attention(Heated(heats=nn.ParameterList([torch.ones(1), torch.ones(1)])))
    attention(Heated(heats=(1.0, 2.0)))


def small_kernel():
    return rg.Kernel(feature_map=nn.Sequential(nn.Linear(4, 5), nn.Softplus()).double())


@pytest.mark.parametrize("square", [True, False], ids=["grad of squares", "grad of a sum"])
@pytest.mark.parametrize(
    "name", [name for name in REGISTRY if isinstance(REGISTRY[name], FeatureMechanism)] + ["learned"]
)
def test_second_derivatives_of_sums_are_the_plain_formulas(name, square):
    mechanism = REGISTRY.get(name) or small_kernel()
    inputs = [*make_tensors(300), *mechanism.parameters()]
    second = []
    for path in ("chunked", "reference"):
        out = rg.attend(*inputs[:3], mechanism, rg.causal, path=path)
        first = torch.autograd.grad(out.square().sum() if square else out.sum(), inputs, create_graph=True)
        total = out.sum() + sum(grad.square().sum() for grad in first)
        second.append(torch.autograd.grad(total, inputs))
    for fast, plain in zip(*second, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-8 * float(plain.abs().max()))


def test_second_derivatives_through_layers_that_share_a_mechanism():
    torch.manual_seed(1)
    mechanism, x = small_kernel(), torch.randn(1, 2, 260, 4, dtype=torch.float64, requires_grad=True)
    second = []
    for path in ("chunked", "reference"):
        inner = rg.attend(x, x, x, mechanism, rg.causal, path=path)
        out = rg.attend(inner, inner.square(), x, mechanism, rg.causal, path=path)
        first = torch.autograd.grad(out.square().sum(), [x, *mechanism.parameters()], create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, *mechanism.parameters()]))
    for fast, plain in zip(*second, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-8 * float(plain.abs().max()))


def test_second_derivatives_of_merged_parts_are_refused():
    q, k, v = make_tensors(5)
    (first,) = torch.autograd.grad(
        rg.attend(q[:, :, :2], k, v, mask=rg.causal, path="parts").sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match=r"second derivatives .* path='reference'"):
        torch.autograd.grad(first.square().sum(), q)


SECOND = {
    "sdpa": (None, True),
    "sdpa causal": (rg.causal, True),
    "sdpa padded": (rg.padding([3]), True),
    "blocks": (rg.window(before=1), True),
    "reference": (rg.causal, False),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("of", [0, 1, 2], ids=["q", "k", "v"])
def test_second_derivatives_of_softmax_are_the_plain_formulas_or_refused(name, of):
    """PyTorch's kernels have none, and the error says what has. A gradient that is not derived again is no error."""
    tensors, (mask, refused) = make_tensors(5), SECOND[name]

    def first(path):
        out = rg.attend(*tensors, mask=mask, path=path)
        return torch.autograd.grad(out.square().sum(), tensors, create_graph=True)[of]

    actual, expected = first(name.split()[0]), first("reference")
    assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-12)
    if refused:
        with pytest.raises(NotImplementedError, match=r"^sdpa: second derivatives .* path='reference'$"):
            torch.autograd.grad(actual.square().sum(), tensors)
        return
    second, exact = (torch.autograd.grad(grad.square().sum(), tensors) for grad in (actual, expected))
    assert all(torch.allclose(mine, theirs, rtol=1e-9, atol=1e-11) for mine, theirs in zip(second, exact, strict=True))


def test_third_derivatives_of_sums_are_refused():
    q, k, v = make_tensors(5)
    (first,) = torch.autograd.grad(rg.attend(q, k, v, rg.Elu(), path="chunked").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivatives"):
        torch.autograd.grad(first.square().sum(), q, create_graph=True)


@pytest.mark.parametrize("learns", ["a bias", "a module", "a parameter", "a capture"])
def test_a_stream_of_plain_tokens_derives_what_is_learned(learns):
    q, k, v = make_tensors(200, grad=False)
    parameter = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    mechanism, bias = rg.Softmax(), None
    if learns == "a bias":
        bias = parameter = nn.Parameter(torch.randn(200, 200, dtype=torch.float64))
    elif learns == "a module":
        mechanism = small_kernel()
        parameter = mechanism.parameters()[0]
    elif learns == "a parameter":
        mechanism = Bilinear(W=parameter, shift=torch.ones(1, dtype=torch.float64))
    else:
        mechanism = rg.Kernel(feature_map=lambda x: torch.nn.functional.softplus(x @ parameter))
    state = mechanism.start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=200, dtype=torch.float64)
    parts = []
    for start in range(0, 200, 40):
        piece = slice(start, start + 40)
        rows = None if bias is None else bias[piece, : start + 40]
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rg.causal, bias=rows)
        parts.append(out)
    whole = rg.attend(q, k, v, mechanism, rg.causal, bias=bias, path="reference")
    streamed = torch.cat(parts, 2)
    torch.testing.assert_close(streamed, whole)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.square().sum(), parameter)[0] for out in (streamed, whole)), rtol=1e-8, atol=1e-8
    )


@dataclass(frozen=True, kw_only=True)
class Shifted(rg.Mechanism):
    """A similarity with a learned number, or one for each head."""

    shift: nn.Parameter

    def similarity(self, q, k):
        return torch.sigmoid(q @ k.transpose(-1, -2) + self.shift)


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
