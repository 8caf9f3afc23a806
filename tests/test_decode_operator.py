"""The operator of the machine code in torch: its checks, traces, compilation, and what goes another way."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from decode_calls import agree, exact, int8, reason_against, tensors
from regard.core import cpu
from regard.core.calls.call import Call
from regard.core.eager import direct

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Retention()], ids=repr)
def test_a_call_over_other_keys_is_the_same_call(mechanism):
    q, *wide = tensors()
    k, v, *scales = int8(*wide)
    call = Call(mechanism, q, k, v, rg.padding([50, 7]), scales=tuple(scales))
    again = call.with_keys(k + 0, v + 0)
    kept = set(Call.__slots__) - {"k", "v"}
    assert all(getattr(again, name) is getattr(call, name) for name in kept)
    assert again.k.equal(k)
    assert again.v.equal(v)
    wider = call.widened()
    assert wider.scales is None
    assert wider.structure is call.structure
    assert wider.k.dtype == q.dtype


def test_what_it_cannot_serve_says_why(monkeypatch):
    q, k, v = tensors()
    assert "float32, bfloat16" in reason_against(q.double(), k.double(), v.double())
    assert "multiples of" in reason_against(*tensors(K=20))
    assert "up to 256" in reason_against(*tensors(K=512))
    assert "interval" in reason_against(q, k, v, rg.window(before=3) | rg.global_tokens(2))
    assert "interval" in reason_against(q, k, v, rg.padding(valid=torch.arange(100).reshape(2, 50) % 2 == 0))
    assert "gradients" in reason_against(q.requires_grad_(), k, v)
    with torch.no_grad():
        agree(q, k, v)
    q = q.detach()
    monkeypatch.setattr(cpu, "MATRIX_UNITS", True)
    assert "matrix units" in reason_against(*tensors(torch.bfloat16, queries=65))
    monkeypatch.setattr(cpu, "LANES", 0)
    assert "AVX2" in reason_against(q, k, v)


WRONG = {
    "q of 3 dimensions": ("q", {"q": (1, 1, 16)}),
    "no query": ("q", {"q": (1, 1, 0, 16)}),
    "q of float64": ("q", {"dtype": torch.float64}),
    "another head dimension": ("k", {"q": (1, 1, 1, 64)}),
    "another batch": ("k", {"q": (2, 1, 1, 16)}),
    "heads in no groups": ("k", {"q": (1, 3, 1, 16), "k": (1, 2, 4, 16), "v": (1, 2, 4, 16)}),
    "no key": ("k", {"k": (1, 1, 0, 16), "v": (1, 1, 0, 16)}),
    "more values than keys": ("v", {"v": (1, 1, 4_000_000, 16)}),
    "fewer values than keys": ("v", {"v": (1, 1, 1, 16)}),
    "values of other heads": ("v", {"v": (1, 2, 4, 16)}),
    "too long heads": ("v", {"v": (1, 1, 4, 512)}),
    "spans of other rows": ("spans", {"spans": torch.tensor([[0, 4], [0, 4]])}),
    "spans of one number": ("spans", {"spans": torch.tensor([[0]])}),
    "spans of fractions": ("spans", {"spans": torch.tensor([[0.0, 4.0]])}),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_operators_refuse_what_does_not_fit(name):
    argument, changed = WRONG[name]
    shapes = {"q": (1, 1, 1, 16), "k": (1, 1, 4, 16), "v": (1, 1, 4, 16)}
    q, k, v = (
        torch.ones(1, dtype=changed.get("dtype", torch.float32)).expand(changed.get(x, shapes[x])) for x in "qkv"
    )
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        torch.ops.regard.decode(q, k, v, 0.25, changed.get("spans"), None, None)
    if argument != "spans":
        with pytest.raises(ValueError, match=f"^{argument}: expected"):
            torch.ops.regard.decode_part(q, k, v, 0.25, None)


def test_spans_beyond_the_keys_end_with_them():
    q, k, v = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 4, 16), torch.randn(1, 1, 4, 16)
    out = torch.ops.regard.decode(q, k, v, 0.25, torch.tensor([[-9, 50_000_000]]), None, None)
    torch.testing.assert_close(out, rg.attend(q, k, v, path="reference"))


def test_gradients_go_another_way_and_are_right():
    q, k, v = (t.requires_grad_() for t in tensors())
    grads = torch.autograd.grad(rg.attend(q, k, v).sum(), (q, k, v))
    wanted = torch.autograd.grad(exact(q, k, v).sum(), (q, k, v))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_transforms_go_another_way():
    q, k, v = tensors(repeats=1)
    mapped = torch.func.vmap(lambda query: rg.attend(query, k, v))(torch.stack([q, 2 * q]))
    assert (mapped[1] - exact(2 * q, k, v)).abs().max() < 1e-5
    _, slope = torch.func.jvp(lambda query: rg.attend(query, k, v), (q,), (torch.ones_like(q),))
    near = (exact(q + 1e-3, k, v) - exact(q - 1e-3, k, v)) / 2e-3
    assert (slope - near).abs().max() < 1e-3


def test_torch_knows_the_operation():
    case = (*tensors(queries=2), 0.3, torch.tensor([[0, 50], [3, 20]]), 40, 0)
    torch.library.opcheck(torch.ops.regard.decode.default, case)
    with FlopCounterMode(display=False) as counter:
        torch.ops.regard.decode(*case)
    assert counter.get_total_flops() == 2 * 6 * (41 + 41 + 11 + 12) * (32 + 16)


def test_torch_knows_the_operation_on_int8():
    q, *wide = tensors(queries=2)
    k, v, *scales = int8(*wide)
    for operation, rest in ((torch.ops.regard.decode, (0.3, None, 40, 0)), (torch.ops.regard.decode_part, (0.3, 0))):
        torch.library.opcheck(operation.default, (q, k, v, *rest, *scales))
        with FlopCounterMode(display=False) as counter:
            operation(q, k, v, *rest, *scales)
        with FlopCounterMode(display=False) as plain:
            operation(q, *wide, *rest)
        assert counter.get_total_flops() == plain.get_total_flops() > 0
        with pytest.raises(NotImplementedError, match="has no derivative"):
            operation(q.detach().requires_grad_(), k, v, *rest, *scales)


class Seen(torch.Tensor):
    """A tensor that knows which operators computed with it."""

    @staticmethod
    def __new__(cls, inner: Tensor, seen: list[str]) -> "Seen":
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        tensor.inner, tensor.seen = inner, seen
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), named=None):
        (seen,) = {id(x.seen): x.seen for x in args if isinstance(x, cls)}.values()
        seen.append(operator.name())
        return operator(*(x.inner if isinstance(x, cls) else x for x in args), **(named or {}))


class Functions(TorchFunctionMode):
    """The operators of ours that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if isinstance(function, torch._ops.OpOverloadPacket):
            self.names.append(function._qualified_op_name)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_only_who_has_to_goes_through_the_dispatcher():
    """The operator is for traces, modes and other kinds of tensors; it takes longer than a short call."""
    case, seen = tensors(), []
    assert direct(*case)
    plain = rg.attend(*case, mask=rg.padding([50, 7]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert rg.attend(*case, mask=rg.padding([50, 7])).equal(plain)
    assert "regard::decode" in {event.key for event in profile.key_averages()}
    with Functions() as functions:
        assert rg.attend(*case, mask=rg.padding([50, 7])).equal(plain)
    assert "regard::decode" in functions.names
    flipped = [torch._neg_view(t) for t in case]
    assert rg.attend(*flipped, mask=rg.padding([50, 7])).equal(-plain)
    with FlopCounterMode(display=False) as counter:
        counted = rg.attend(*case, mask=rg.padding([50, 7]))
    assert counter.get_total_flops() == 2 * 6 * 57 * (32 + 16)
    assert rg.attend(*(Seen(t, seen) for t in case), mask=rg.padding([50, 7])).equal(plain)
    assert seen == ["regard::decode"]
    assert counted.equal(plain)
    assert rg.attend(*(torch.nn.Parameter(t) for t in case), mask=rg.padding([50, 7])).equal(plain)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward_ad's own
def test_the_operation_has_no_gradient_and_says_so():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="regard::decode has no derivative"):
        torch.ops.regard.decode(q.requires_grad_(), k, v, 0.3, None, None, None)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="regard::decode has no derivative"):
        torch.ops.regard.decode(q.detach(), forward_ad.make_dual(k, k), v, 0.3, None, None, None)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (tensors(K=20), "head dimensions that are multiples of .*, got (20, 16)"),
        ((*tensors()[:2], tensors(torch.float16)[2]), "one dtype, .*torch.float32, torch.float32 and torch.float16"),
    ],
)
def test_the_operation_refuses_what_it_was_not_made_for(case, reason):
    with pytest.raises(ValueError, match=f"decode: expected {reason.replace('(', '[(]').replace(')', '[)]')}"):
        torch.ops.regard.decode(*case, 0.3, None, None, None)


def test_the_operation_refuses_scales_that_are_not_those_of_its_tokens():
    q, *wide = tensors()
    k, v, k_scales, v_scales = int8(*wide)
    for scales, reason in (
        ((), "decode: expected one dtype, or int8 with scales"),
        ((k_scales, None), "decode: expected one dtype, or int8 with scales"),
        ((k_scales[:, :, 1:], v_scales), r"k_scales: expected torch.float32 \(2, 2, 50, 1\), got .*49"),
        ((k_scales, v_scales.double()), r"v_scales: expected torch.float32 .*got torch.float64"),
    ):
        with pytest.raises(ValueError, match=reason):
            torch.ops.regard.decode(q, k, v, 0.3, None, None, None, *scales)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_compiled_derivatives_go_another_way(backend):
    q, k, v = tensors(repeats=1)
    slope = torch.func.grad(lambda query: rg.attend(query, k, v).square().sum())
    wanted = torch.autograd.grad(exact(q.requires_grad_(), k, v).square().sum(), q)[0]
    gradient = torch.compile(slope, backend=backend)(q.detach())
    assert (gradient - wanted).abs().max() < 1e-5


def test_an_exported_program_takes_any_batch_and_length():
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rg.attend(q, k, v)

    sizes = {0: torch.export.Dim("b", min=1, max=64)}
    cache = {**sizes, 2: torch.export.Dim("s", min=2, max=8192)}
    with torch.no_grad():
        program = torch.export.export(Step(), tensors(), dynamic_shapes=(sizes, cache, cache)).module()
        for batch, keys in ((1, 33), (5, 400)):
            case = tensors(batch=batch, keys=keys)
            assert (program(*case) - exact(*case)).abs().max() < 2e-6


@torch.no_grad()
def test_a_compiled_call_takes_any_batch_and_length():
    graphs: list[torch.fx.GraphModule] = []

    def seen(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph.forward

    traced = torch.compile(rg.attend, backend=seen, fullgraph=True, dynamic=True)
    for batch, keys in ((4, 33), (3, 50), (5, 400)):
        case = tensors(batch=batch, keys=keys)
        assert (traced(*case) - exact(*case)).abs().max() < 2e-6
    assert len(graphs) == 1


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_it_can_be_traced_by_jit():
    traced = torch.jit.trace(lambda q, k, v: rg.attend(q, k, v, mask=rg.window(before=30)), tensors(keys=60))
    case = tensors(keys=90)
    assert (traced(*case) - exact(*case, rg.window(before=30))).abs().max() < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("mask", [rg.padding([50, 7]), rg.causal & rg.window(before=20)], ids=repr)
def test_a_masked_call_is_one_graph(mask):
    case = tensors()
    out = torch.compile(lambda: rg.attend(*case, mask=mask), backend="aot_eager", fullgraph=True)()
    assert (out - exact(*case, mask)).abs().max() < 2e-6


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 calls every trace an export")
def test_a_compiled_call_holds_it():
    q, k, v = tensors()
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        out = torch.compile(lambda: rg.attend(q, k, v), backend=seen, fullgraph=True)()
    assert "ops.regard.decode" in graphs[0]
    assert (out - exact(q, k, v)).abs().max() < 2e-6
