"""The machine code for a few queries: it agrees with the reference, and what it cannot serve goes another way."""

import math
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.core import cpu
from regard.core.calls.call import Call
from regard.core.eager import direct
from regard.core.laws.case import HEADS, MASKS, Case, exact_output, plain_output
from regard.core.laws.statements import LAWS
from regard.core.paths import compiler, decode, decode_code, machine_code, parts, probe
from regard.core.states.buffer import quantize
from regard.models.layers import linear

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
KINDS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK, SOFTMAX = decode_code.BLOCK, rg.Softmax()


def tensors(
    kind: torch.dtype = torch.float32, batch=2, groups=2, repeats=3, keys=50, K=32, V=16, queries=1
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    shapes = (batch, groups * repeats, queries, K), (batch, groups, keys, K), (batch, groups, keys, V)
    q, k, v = (torch.randn(shape).to(kind) for shape in shapes)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None, mechanism: rg.Mechanism = SOFTMAX) -> Tensor:
    return rg.attend(q.double(), k.double(), v.double(), mechanism, mask, path="reference")


def near(found: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None, mechanism: rg.Mechanism) -> None:
    """Twice the plain formula's own error at most."""
    assert found.dtype == q.dtype
    wanted, plain = (compute(mechanism, q, k, v, mask) for compute in (exact_output, plain_output))
    assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 1e-6


def agree(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None, mechanism: rg.Mechanism = SOFTMAX) -> None:
    near(rg.attend(q, k, v, mechanism, mask, path="decode"), q, k, v, mask, mechanism)


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


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("keys", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_it_agrees_with_the_reference(monkeypatch, kind, lanes, keys):
    monkeypatch.setattr(cpu, "LANES", min(lanes, cpu.LANES))
    for repeats, K, V in ((1, 64, 48), (2, 16, 16), (4, 64, 48), (7, 16, 16)):
        agree(*tensors(kind, repeats=repeats, keys=keys, K=K, V=V))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 16, 20, 32, 64, 130])
def test_new_tokens_over_a_history_agree(monkeypatch, lanes, rows):
    """Every tile there is, whole and with rows to spare, one head or several in it."""
    monkeypatch.setattr(cpu, "LANES", min(lanes, cpu.LANES))
    for repeats in (1, 2, 5):
        if rows % repeats == 0:
            kind = KINDS[(rows + lanes) % 3]  # each dtype meets few and many rows
            case = tensors(kind, repeats=repeats, keys=2 * BLOCK + 7, queries=rows // repeats)
            assert rg.explain(*case, mask=rg.causal).path == "decode"
            agree(*case, rg.causal)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), repeats=st.integers(1, 9),
    queries=st.sampled_from([1, 1, 2, 3, 9, 40]), keys=st.integers(1, 300),
    K=st.just(16), V=st.sampled_from([16, 80]),
    beta=st.sampled_from([None, 0.0, 0.3]), bad=st.sampled_from([None, math.nan, math.inf]), data=st.data(),
)  # fmt: skip
def test_it_agrees_under_any_band_and_padding_and_nothing_hidden_leaks(
    batch, groups, repeats, queries, keys, K, V, beta, bad, data
):
    q, k, v = tensors(torch.float32, batch, groups, repeats, keys, K, V, queries)
    spans = [sorted(data.draw(st.tuples(st.integers(0, keys), st.integers(0, keys)))) for _ in range(batch)]
    valid = torch.tensor([[low <= s < high for s in range(keys)] for low, high in spans])
    distance = st.integers(0, 60) | st.just(keys)
    mask = rg.window(before=data.draw(distance), after=data.draw(distance)) & rg.padding(valid=valid)
    mechanism = rg.Softmax(beta=beta)
    wanted, plain = (compute(mechanism, q, k, v, mask) for compute in (exact_output, plain_output))
    if bad is not None:
        place = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(0, groups - 1))
        token, spoiled = data.draw(st.integers(0, keys - 1)), data.draw(st.sampled_from([k, v]))
        spoiled[place[0], place[1], token] = bad
        heads = slice(place[1] * repeats, (place[1] + 1) * repeats)
        sees = mask.visible(batch, 1, queries, keys)[place[0], 0, :, token]
    found = rg.attend(q, k, v, mechanism, mask, path="decode")
    if bad is not None:
        rows = found[place[0], heads, sees]
        assert rows.isfinite().sum() == 0 or (spoiled is k and bad == math.inf)
        found[place[0], heads, sees] = wanted[place[0], heads, sees].float()
    assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 1e-6


def int8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values as an int8 KV cache has them: numbers of both, scales of both."""
    (k, k_scales), (v, v_scales) = quantize(k), quantize(v)
    return k, v, k_scales, v_scales


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 130])
def test_int8_keys_and_values_give_what_wide_ones_would(monkeypatch, lanes, rows):
    """Every tile, in blocks that are full and not."""
    monkeypatch.setattr(cpu, "LANES", min(lanes, cpu.LANES))
    kind = KINDS[(rows + lanes // 4) % 3]  # each dtype meets few and many rows
    for keys in (rows, BLOCK, BLOCK + 41):
        q, *wide = tensors(kind, repeats=1, keys=keys, queries=min(rows, keys))
        k, v, *scales = int8(*wide)
        found = torch.ops.regard.decode(q, k, v, 0.3, None, None, 0, *scales)
        assert found.dtype == kind
        wanted = exact(q, k * scales[0], v * scales[1], rg.causal, rg.Softmax(beta=0.3))
        assert (found - wanted).abs().max() <= 2e-6 + torch.finfo(kind).eps / 2 * wanted.abs().max()


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3), groups=st.integers(1, 2), repeats=st.integers(1, 5),
    queries=st.sampled_from([1, 1, 2, 3, 9, 40]), keys=st.integers(1, 300),
    bad=st.sampled_from([None, math.nan, math.inf]), data=st.data(),
)  # fmt: skip
def test_int8_agrees_under_any_band_and_padding_and_nothing_hidden_leaks(
    batch, groups, repeats, queries, keys, bad, data
):
    q, *wide = tensors(torch.float32, batch, groups, repeats, keys, 32, 16, queries)
    k, v, *scales = int8(*wide)
    spans = torch.tensor(
        [sorted(data.draw(st.tuples(st.integers(0, keys), st.integers(0, keys)))) for _ in range(batch)]
    )
    before, after = (data.draw(st.integers(0, 60) | st.none()) for _ in range(2))
    if bad is not None:
        place = (
            data.draw(st.integers(0, batch - 1)),
            data.draw(st.integers(0, groups - 1)),
            data.draw(st.integers(0, keys - 1)),
        )
        data.draw(st.sampled_from(scales if bad is math.nan else scales[1:]))[place] = bad
    found = torch.ops.regard.decode(q, k, v, 0.3, spans, before, after, *scales)
    wanted = torch.ops.regard.decode(q, k * scales[0], v * scales[1], 0.3, spans, before, after)
    assert found.isfinite().equal(wanted.isfinite())
    assert torch.where(wanted.isfinite(), found - wanted, 0).abs().max() < 2e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_int8_of_any_strides_and_threads(threads):
    q, *wide = tensors(batch=2, groups=2, repeats=4, keys=1600)
    whole, before = [t[:, :, 3:-2] for t in int8(*wide)], torch.get_num_threads()
    k, v, *scales = (t[:, :, ::2] for t in whole)
    torch.set_num_threads(threads)
    try:
        for case in (whole, [k, v, *scales], [t.transpose(0, 1).contiguous().transpose(0, 1) for t in whole]):
            found = torch.ops.regard.decode(q, *case[:2], 0.3, None, None, None, *case[2:])
            wanted = exact(q, case[0] * case[2], case[1] * case[3], None, rg.Softmax(beta=0.3))
            assert (found - wanted).abs().max() < 2e-6
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("queries", [1, 9])
def test_the_longest_heads(queries):
    agree(*tensors(queries=queries, keys=BLOCK + 9, K=256, V=256), rg.causal)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for groups in (1, 2, 3):
            agree(*tensors(batch=1, groups=groups, repeats=8, keys=1601))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("compute", ["attention", "product"])
def test_pytorchs_threads_stay_when_there_are_fewer_tasks(compute):
    """For a smaller team OpenMP ends threads, which PyTorch then starts again: longer than a step takes."""
    before, numbers = torch.get_num_threads(), torch.randn(1 << 18)
    case = tensors(batch=1, groups=2, keys=90, K=256, V=256, queries=8)  # two tasks
    x, weight = torch.randn(1, 64), torch.randn(8, 64)
    torch.set_num_threads(4)
    try:
        numbers.exp()
        running = set(os.listdir("/proc/self/task"))
        if compute == "attention":
            rg.attend(*case, path="decode")
        else:
            linear._multiply(x, weight, None)
        assert set(os.listdir("/proc/self/task")) == running
    finally:
        torch.set_num_threads(before)


def test_many_python_threads_at_once():
    cases = [tensors(keys=keys, repeats=repeats) for keys in (40, 300) for repeats in (1, 3, 5, 8)] * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: rg.attend(*case, path="decode"), cases))
    assert all((out - exact(*case)).abs().max() < 2e-6 for out, case in zip(found, cases, strict=True))


def _in_a_fork(case: tuple[Tensor, ...]) -> bool:
    torch.set_num_threads(1)
    return bool((rg.attend(*case, path="decode") - exact(*case)).abs().max() < 2e-6)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_can_use_it():
    case = tensors()
    rg.attend(*case, path="decode")
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_in_a_fork, (case,)).get(60)


def _in_a_thread_of_little_stack(case):
    threading.stack_size(1 << 18)
    thread = threading.Thread(target=rg.attend, args=case, kwargs={"path": "decode"})
    thread.start()
    thread.join()


def test_a_thread_of_little_stack_can_attend_with_the_longest_heads():
    """The stack of a thread that overflows ends its process: hence one of its own."""
    case = tensors(torch.float16, batch=1, groups=1, repeats=64, keys=BLOCK + 5, K=256, V=256)
    agree(*case)  # compiled here, where there is room for that
    process = multiprocessing.get_context("fork").Process(target=_in_a_thread_of_little_stack, args=(case,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_cache_of_any_strides():
    q, k, v = tensors(groups=3, keys=100)
    agree(q, k[:, ::2].expand(2, 2, 100, 32)[:, :1], v[:, 1:2, :, :16])
    agree(q, k[:, :, ::3], v[:, :, ::3])
    agree(q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(2, 3).contiguous().transpose(2, 3), v)
    agree(q, k[:1].expand(2, -1, -1, -1), v)


def test_padding_and_windows_are_never_read():
    q, k, v = tensors(batch=3, keys=300)
    lengths = rg.padding([300, 7, 0])
    for mask in (lengths, lengths & rg.causal, rg.causal & rg.window(before=20), lengths & rg.window(before=295)):
        assert rg.explain(q, k, v, mask=mask).path == "decode"
        agree(q, k, v, mask)
    k[1, :, 7:] = v[1, :, 7:] = k[2] = math.nan
    found = rg.attend(q, k, v, mask=lengths, path="decode")
    assert found.isfinite().all()
    assert (found[2] == 0).all()
    # … by the code itself, without the guard that cleans NaN away
    spans = torch.tensor([[0, 300], [0, 7], [0, 0]])
    assert torch.ops.regard.decode(q, k, v, 1.0, spans, None, None).isfinite().all()
    assert torch.ops.regard.decode(q[1:], k[1:].flip(2), v[1:].flip(2), 1.0, None, 6, 0)[:1].isfinite().all()


def test_spans_end_where_the_cache_does():
    q, k, v = tensors(keys=40)
    spans = torch.tensor([[-5, 1000], [3, 41]])
    found = torch.ops.regard.decode(q, k, v, 32**-0.5, spans, 1000, None)
    wanted = exact(q, k, v, rg.padding(valid=torch.arange(40) >= torch.tensor([[0], [3]])))
    assert (found - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_number_that_is_seen_shows(bad, place):
    given = tensors(keys=200)
    given[1 + place][1, 0, 150, 3] = bad
    found = rg.attend(*given, path="decode")
    assert found[0].isfinite().all()
    assert found[1, 3:].isfinite().all()
    assert not (found[1, :3].isfinite().all(-1)).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_large_scores(kind):
    q, k, v = tensors(kind, keys=200)
    agree(100 * q, 100 * k, v)
    k[:, :, 0] = -math.inf  # a score of -inf weighs nothing
    found = rg.attend(q.abs(), k, v, path="decode")
    near(found, q.abs(), k[:, :, 1:], v[:, :, 1:], None, SOFTMAX)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["streamed", "forked", "batched", "padded", "weights", "groups"])
def test_the_laws_hold_on_it(monkeypatch, name, dtype):
    """Those that record no gradients, under which another path serves."""
    law = LAWS[name]
    served, real = [], decode._attention
    monkeypatch.setattr(decode, "_attention", lambda *given: served.append(given) or real(*given))
    for mask, heads, keys in product(MASKS, HEADS, (1, 5, BLOCK + 2)):
        case = Case(mask, heads, dtype, 2, keys if law.square else 1, keys, 16, 32, seed=keys)
        if law.excuse(SOFTMAX, case) is None:
            law.test(SOFTMAX, case)
    assert served


def test_streams_take_it_and_agree():
    q, k, v = tensors(keys=40, queries=40)
    m = rg.Softmax()
    state = m.start(batch=2, num_kv_heads=2, qk_length=32, value_length=16, capacity=64)
    outs = []
    for t in range(40):
        here = slice(t, t + 1)
        out, state = m.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, mask=rg.causal)
        outs.append(out)
    assert (torch.cat(outs, 2) - exact(q, k, v, rg.causal)).abs().max() < 2e-6


def _reason(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask | None = None) -> str:
    plan = rg.explain(q, k, v, mask=mask)
    assert plan.path != "decode"
    with pytest.raises(ValueError, match="path: expected one that can serve this call, got 'decode'"):
        rg.attend(q, k, v, mask=mask, path="decode")
    return plan.rejected["decode"]


def test_what_it_cannot_serve_says_why(monkeypatch):
    q, k, v = tensors()
    assert "float32, bfloat16" in _reason(q.double(), k.double(), v.double())
    assert "multiples of" in _reason(*tensors(K=20))
    assert "up to 256" in _reason(*tensors(K=512))
    assert "interval" in _reason(q, k, v, rg.window(before=3) | rg.global_tokens(2))
    assert "interval" in _reason(q, k, v, rg.padding(valid=torch.arange(100).reshape(2, 50) % 2 == 0))
    assert "gradients" in _reason(q.requires_grad_(), k, v)
    with torch.no_grad():
        agree(q, k, v)
    q = q.detach()
    monkeypatch.setattr(cpu, "MATRIX_UNITS", True)
    assert "matrix units" in _reason(*tensors(torch.bfloat16, queries=65))
    monkeypatch.setattr(cpu, "LANES", 0)
    assert "AVX2" in _reason(q, k, v)


def test_gradients_go_another_way_and_are_right():
    q, k, v = (t.requires_grad_() for t in tensors())
    grads = torch.autograd.grad(rg.attend(q, k, v).sum(), (q, k, v))
    wanted = torch.autograd.grad(exact(q, k, v).sum(), (q, k, v))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_transforms_go_another_way():
    q, k, v = tensors(repeats=1)
    mapped = torch.func.vmap(lambda one: rg.attend(one, k, v))(torch.stack([q, 2 * q]))
    assert (mapped[1] - exact(2 * q, k, v)).abs().max() < 1e-5
    _, slope = torch.func.jvp(lambda one: rg.attend(one, k, v), (q,), (torch.ones_like(q),))
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


@pytest.mark.parametrize("keys", [1, 16, 64])
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([1, 1]), rg.causal & rg.window(before=3)], ids=repr)
def test_short_calls_take_it(keys, queries, mask):
    """PyTorch's kernels take longer at any length, and more so under a mask."""
    case = tensors(keys=keys, queries=min(queries, keys))
    assert rg.explain(*case, mask=mask).path == "decode"
    agree(*case, mask)


class Seen(torch.Tensor):
    """A tensor that knows which operators computed with it."""

    @staticmethod
    def __new__(cls, inner: Tensor, seen: list[str]) -> "Seen":
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        tensor.inner, tensor.seen = inner, seen
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, given=(), named=None):
        (seen,) = {id(x.seen): x.seen for x in given if isinstance(x, cls)}.values()
        seen.append(operator.name())
        return operator(*(x.inner if isinstance(x, cls) else x for x in given), **(named or {}))


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


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 3e38])
def test_half_results_are_rounded_once(kind, bad):
    q, k, v = tensors(kind, keys=3)
    if bad is not None:
        v[0] = bad
    wanted, _ = torch.ops.regard.decode_part(q, k, v, 0.3, None)
    found = torch.ops.regard.decode(q, k, v, 0.3, None, None, None)
    torch.testing.assert_close(found, wanted.to(kind), rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("queries", [1, 5, 70])
def test_parts_of_a_history_merge_to_the_whole(queries):
    """With the log-sum-exp, in which rows of several chunks, heads and key parts are told apart."""
    q, k, v = tensors(keys=3 * BLOCK, queries=queries)
    torch.library.opcheck(torch.ops.regard.decode_part.default, (q, k, v, 0.2, 0))
    history = torch.ops.regard.decode_part(q, k[:, :, :150], v[:, :, :150], 0.2, None)
    tail = torch.ops.regard.decode_part(q, k[:, :, 150:], v[:, :, 150:], 0.2, 0)
    found, _ = parts.merge(*history, *tail)
    assert (found - exact(q, k, v, rg.causal, rg.Softmax(beta=0.2))).abs().max() < 2e-6


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_nothing(default):
    case = tensors(torch.bfloat16)
    try:
        torch.set_default_dtype(default)
        agree(*case)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_changes_nothing():
    case = tensors()
    try:
        torch.set_default_device("meta")
        found = rg.attend(*case, mask=rg.padding([50, 7]), path="decode")
    finally:
        torch.set_default_device(None)
    near(found, *case, rg.padding([50, 7]), SOFTMAX)


def test_sums_of_many_threads_stay_small():
    """64 threads over 65 heads were 64 parts of each."""
    seen: list[int] = []
    before, real = torch.get_num_threads(), torch.empty
    torch.set_num_threads(64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, **rest: seen.append(math.prod(size)) or real(*size, **rest))
            agree(*tensors(batch=65, groups=1, keys=300))
    finally:
        torch.set_num_threads(before)
    assert max(seen) <= 4 * 8 * 64 * 3 * 16


def test_compiled_code_is_made_once_for_all_threads():
    compiler._compiled.cache_clear()
    decode._program.cache_clear()
    case = tensors(repeats=5)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: rg.attend(*case, path="decode"), range(16)))
    assert compiler._compiled.cache_info().misses == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_compiled_derivatives_go_another_way(backend):
    q, k, v = tensors(repeats=1)
    slope = torch.func.grad(lambda one: rg.attend(one, k, v).square().sum())
    wanted = torch.autograd.grad(exact(q.requires_grad_(), k, v).square().sum(), q)[0]
    found = torch.compile(slope, backend=backend)(q.detach())
    assert (found - wanted).abs().max() < 1e-5


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
    found = torch.compile(lambda: rg.attend(*case, mask=mask), backend="aot_eager", fullgraph=True)()
    assert (found - exact(*case, mask)).abs().max() < 2e-6


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 calls every trace an export")
def test_a_compiled_call_holds_it():
    q, k, v = tensors()
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        found = torch.compile(lambda: rg.attend(q, k, v), backend=seen, fullgraph=True)()
    assert "ops.regard.decode" in graphs[0]
    assert (found - exact(q, k, v)).abs().max() < 2e-6


@pytest.mark.parametrize("gone", ["llvmlite", "libgomp"])
def test_where_something_is_missing_torch_computes(gone):
    """In a process of its own, since what is there is looked up once."""
    script = f"""
import importlib.util, pathlib, torch
real, glob = importlib.util.find_spec, pathlib.Path.glob
if {gone == "llvmlite"}:
    importlib.util.find_spec = lambda name, *rest: None if name == "llvmlite" else real(name, *rest)
else:
    pathlib.Path.glob = lambda self, pattern: iter(()) if "libgomp" in pattern else glob(self, pattern)
import regard as rg
q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
plan = rg.explain(q, k, k)
print(plan.path, plan.rejected["decode"])
print((rg.attend(q, k, k) - rg.attend(q, k, k, path="reference")).abs().max() < 1e-5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sdpa ")
    assert {"llvmlite": "needs llvmlite, which is not installed", "libgomp": "GNU OpenMP"}[gone] in done.stdout
    assert done.stdout.endswith("tensor(True)\n")


PROGRAMS = """
from regard.core import cpu
from regard.models.layers import linear_code
from regard.core.paths import compiler, decode_code
for source, sizes in (
    (decode_code.source, (64, 64, 4, "bfloat16", "bfloat16", "bfloat16")),
    (linear_code.source, ("int8",)),
    (linear_code.source, ("float32",)),
):
    machine, _ = compiler.host(cpu.LANES)
    code = machine.emit_assembly(compiler.optimized(source(*sizes, cpu.LANES), machine))
    print(cpu.LANES, "vfmadd" in code, "zmm" in code, "%k1" in code)
"""


def test_code_takes_the_widest_registers_there_are(capsys):
    exec(PROGRAMS, {})
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith("16 True True " if cpu.LANES == 16 else "8 True False False")


def test_code_keeps_to_the_instructions_that_torch_was_told():
    told = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", PROGRAMS], capture_output=True, text=True, check=True, env=told)
    assert done.stdout == 3 * "8 True False False\n"


def test_a_process_that_may_not_make_code_takes_other_ways_and_says_why():
    """As under systemd's MemoryDenyWriteExecute. LLVM used to die there of a segmentation fault, and oneDNN raised."""
    script = """
import ctypes, torch
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: no memory that was written becomes code
    raise SystemExit("this kernel has no PR_SET_MDWE")
import regard as rg
q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
plan = rg.explain(q, k, k)
print(plan.path, plan.rejected["decode"])
print((rg.attend(q, k, k) - rg.attend(q, k, k, path="reference")).abs().max() < 1e-5)
model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9000, embedding_dim=512, num_layers=1, num_heads=8)).eval()
with torch.no_grad():
    print(model(torch.zeros(1, 1, dtype=torch.long)).isfinite().all())
try:
    rg.quantized(model)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "PR_SET_MDWE" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    reason = "the system forbids code generated at run time (W^X, MemoryDenyWriteExecute)"
    assert done.stdout.splitlines() == [
        f"sdpa {reason}",
        "tensor(True)",
        "tensor(True)",
        f"model: expected a machine on which int8 weights are fast, got one without: {reason}",
    ]


def test_where_our_tests_do_not_run_a_probe_must_come_out_right(monkeypatch):
    """Four lanes are ARM's."""
    monkeypatch.setattr(cpu, "LANES", 4)
    for powers, reason in ((machine_code._POWERS, None), ((0.0, *machine_code._POWERS[1:5], 0.7, 1.0), "was off by")):
        monkeypatch.setattr(machine_code, "_POWERS", powers)
        for cached in (compiler._compiled, decode._program, probe.off):
            cached.cache_clear()
        assert (decode.missing() is None) if reason is None else reason in rg.explain(*tensors()).rejected["decode"]
    for cached in (compiler._compiled, decode._program, probe.off):
        cached.cache_clear()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_with_the_reason(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    assert f"made for Linux, where PyTorch uses GNU OpenMP; this is {system}" in _reason(*tensors())


def test_llvm_is_loaded_by_who_decodes_and_nobody_else():
    script = "import sys, regard; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
