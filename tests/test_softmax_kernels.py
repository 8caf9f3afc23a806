"""Softmax kernels for GPUs on the CPU, in Triton's interpreter, on tiny shapes: formulas, masks and indices.

What the interpreter cannot tell (half precision, speed, races) is for test_gpu.py, on a GPU.
"""

import math
from contextlib import nullcontext

import pytest
import torch

import regard as rg
from regard.core.calls import repeats
from regard.core.calls.call import Call
from regard.core.kernels import band_attention, decode_attention, launch
from regard.core.laws.case import within_budget
from regard.core.paths import band, cudnn, split
from regard.core.states.buffer import quantize

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KEYS = 40
PLAN = decode_attention.plan
PADDED = rg.padding(
    valid=(torch.arange(KEYS) >= torch.tensor([[0], [7]])) & (torch.arange(KEYS) < torch.tensor([[33], [KEYS]]))
)
MASKS = {
    "none": None,
    "causal": rg.causal,
    "padded": PADDED,
    "causal, padded": rg.causal & PADDED,
    "window": rg.causal & rg.window(before=5),
    "wide window": rg.causal & rg.window(before=33),
    "packed": rg.segments(torch.tensor([[0] * 5 + [3] * 20 + [1] * 15, [2] * 33 + [0] * 7])),
    "packed, causal, window": rg.causal & rg.window(before=9) & rg.segments(torch.tensor([[0] * 17 + [1] * 23])),
    "wide window ahead": rg.window(before=31, after=3),
    "window ahead, padded": rg.window(before=9, after=3) & PADDED,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, launches):
    """Tiles so small that a few dozen tokens cross every border."""
    step = band_attention.Launch(16, 16, 4, 1)
    monkeypatch.setattr(band_attention, "tiles", lambda *_: band_attention.Tiles(step, step, step))
    monkeypatch.setattr(band_attention, "MENDING", step)
    band_attention._work.cache_clear()
    decode_attention._work.cache_clear()
    monkeypatch.setattr(decode_attention, "plan", lambda *_: (decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), 3))


def tensors(queries, heads=2, groups=1, length=16, value_length=16, batch=2):
    sizes = (heads, queries, length), (groups, KEYS, length), (groups, KEYS, value_length)
    return [torch.randn(batch, *size) for size in sizes]


def compare(path, rule, *tensors, mechanism=rg.Softmax(), gradients=False):  # noqa: B008 - a frozen value
    leaves = [[t.to(kind).requires_grad_(gradients) for t in tensors] for kind in (torch.float32, torch.float64)]
    call = Call(mechanism, *leaves[0], rule)
    assert path.unfit(call) is None
    plain = [rg.attend(*inputs, mechanism, rule, path="reference") for inputs in (leaves[1], leaves[0])]
    outs = [path.run(call), *plain]
    within_budget("output", *outs)
    if gradients:
        grad = torch.randn_like(outs[0])
        inputs = leaves[0], leaves[1], leaves[0]
        grads = [
            torch.autograd.grad(out, sources, grad.to(out.dtype)) for out, sources in zip(outs, inputs, strict=True)
        ]
        for name, *results in zip("qkv", *grads, strict=True):
            within_budget(f"gradient of {name}", *results, gradient=True)


@pytest.mark.parametrize("mask", MASKS)
def test_bands_and_their_gradients(mask):
    queries = 24 if mask in ("none", "causal", "padded", "window", "wide window", "wide window ahead") else KEYS
    compare(band, MASKS[mask], *tensors(queries), gradients=True)


def test_bands_of_odd_heads_more_queries_than_keys_and_other_scales():
    compare(band, rg.causal, *tensors(50, heads=1, length=9, value_length=5, batch=1), gradients=True)
    compare(band, rg.causal, *tensors(17, heads=1, batch=1), mechanism=rg.Uniform(), gradients=True)


@pytest.mark.parametrize("mask", ["none", "padded", "window", "causal, padded"])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_few_queries(mask, queries):
    compare(split, MASKS[mask], *tensors(queries, heads=6, groups=2))


def test_a_few_queries_of_odd_heads_in_one_part_and_in_several_tiles(monkeypatch):
    compare(split, None, *tensors(1, heads=3, groups=3, length=9, value_length=5))
    monkeypatch.setattr(decode_attention, "plan", lambda *_: (decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), 1))
    compare(split, rg.causal, *tensors(2, heads=20, groups=1, length=9))
    monkeypatch.setattr(decode_attention, "MOST_ROWS", 16)
    decode_attention._work.cache_clear()
    compare(split, rg.causal, *tensors(2, heads=20, groups=1))


def test_int8_states_and_lengths_on_the_device():
    q, k, v = tensors(1, heads=4, groups=2)
    (k8, k_scale), (v8, v_scale) = quantize(k), quantize(v)
    length, bounds = torch.tensor([29], dtype=torch.int32), torch.tensor([[0, 4], [40, 40]], dtype=torch.int32)
    out = decode_attention.forward(q, k8, v8, 0.25, bounds, before=20, scales=(k_scale, v_scale), length=length)
    rule = rg.window(before=20) & rg.padding(valid=torch.arange(29) >= torch.tensor([[0], [4]]))
    seen = [t[:, :, :29].double() for t in (k8 * k_scale, v8 * v_scale)]
    exact = rg.attend(q.double(), *seen, mask=rule, path="reference")
    within_budget("output", out, exact, exact.float())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("before", [None, 20])
def test_the_newest_key_is_stored_on_the_way(splits, before, monkeypatch):
    chosen = decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), splits
    monkeypatch.setattr(decode_attention, "plan", lambda *_: chosen)
    q, k, v = tensors(1, heads=6, groups=2)
    length, bounds = torch.tensor([29], dtype=torch.int32), torch.tensor([[0, 4], [40, 40]], dtype=torch.int32)
    new = k[:, :, 28:29].clone(), v[:, :, 28:29].clone()
    k[:, :, 28:], v[:, :, 28:] = torch.nan, torch.nan
    out = decode_attention.forward(q, k, v, 0.25, bounds, before=before, length=length, new=new)
    assert torch.equal(k[:, :, 28:29], new[0])
    assert torch.equal(v[:, :, 28:29], new[1])
    assert k[:, :, 29:].isnan().all()
    rule = rg.padding(valid=torch.arange(29) >= torch.tensor([[0], [4]]))
    rule = rule if before is None else rule & rg.window(before=before)
    exact = rg.attend(q.double(), k[:, :, :29].double(), v[:, :, :29].double(), mask=rule, path="reference")
    within_budget("output", out, exact, exact.float())


def test_a_first_token_and_one_that_is_padding():
    q, k, v = (t[:, :, :1] for t in tensors(1, heads=4, groups=2))
    out = decode_attention.forward(q, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan), 0.25, new=(k, v))
    torch.testing.assert_close(out, v.repeat_interleave(2, 1))
    bounds = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)
    out = decode_attention.forward(q, k.clone(), v.clone(), 0.25, bounds, new=(k, torch.full_like(v, torch.nan)))
    assert out[0].isnan().all()
    assert not out[1].any()


@pytest.mark.parametrize("rule", [None, rg.causal, rg.window(before=7)], ids=str)
def test_steps_like_one_before_are_not_chosen_again(rule, chosen, monkeypatch):
    mechanism, steps = rg.Softmax(), []
    advance = type(mechanism).advance
    monkeypatch.setattr(rg.Softmax, "advance", lambda *args: (steps.append(args[4].length), advance(*args))[1])
    q, k, v = tensors(40, heads=4, groups=2)
    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=k.shape[3], value_length=v.shape[3], capacity=12)
    states = []
    for at in range(12):
        states.append(state)
        token = (t[:, :, at : at + 1] for t in (q, k, v))
        out, state = mechanism.extend(*token, state, mask=rule)
        exact = plain_softmax(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1], rule)
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    assert steps == [0, 1]
    torch.testing.assert_close(state.keys, k[:, :, :12])
    windowed = rule is not None and rule.before is not None  # then it forgets what it has left behind
    with nullcontext() if windowed else pytest.raises(ValueError, match="at most 12 tokens"):
        mechanism.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, mask=rule)
    fork, _ = mechanism.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], states[8], mask=rule)
    keys, values = (torch.cat([t[:, :, :8], t[:, :, :1]], 2) for t in (k, v))
    torch.testing.assert_close(fork, plain_softmax(q[:, :, :1], keys, values, rule), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.keys, k[:, :, :12])


@pytest.mark.parametrize("queries", [1, 5])
def test_int8_states_without_a_wide_copy(queries):
    q, k, v = tensors(queries, heads=4, groups=2)
    k[0, :, 38], v[1, :, 39] = torch.nan, torch.inf  # seen by the last queries alone
    (k8, k_scale), (v8, v_scale) = quantize(k), quantize(v)
    rule = rg.causal & rg.window(before=20)
    assert split.PATH.reads_int8
    out = split.run(Call(rg.Softmax(), q, k8, v8, rule, scales=(k_scale, v_scale)))
    wide = [t.double() * scale for t, scale in ((k8, k_scale), (v8, v_scale))]
    exact = rg.attend(q.double(), *wide, mask=rule, path="reference")
    seen = exact.isnan()
    assert torch.equal(out.isfinite(), ~seen)
    within_budget("output", out[~seen], exact[~seen], exact[~seen].float())


@pytest.mark.parametrize("path", [band, split], ids=["band", "split"])
def test_what_is_hidden_does_not_leak_and_what_is_seen_shows(path):
    queries = 3 if path is split else KEYS
    rule = rg.causal & rg.window(before=30) & rg.padding([33, KEYS]) if path is band else rg.causal & PADDED
    q, k, v = tensors(queries)
    first = KEYS - queries
    clean = path.run(Call(rg.Softmax(), q, k, v, rule))
    k[0, :, 36], v[0, :, 35], k[1, :, 38], v[1, :, 38] = torch.nan, torch.inf, torch.nan, torch.inf
    leaves = [t.requires_grad_(path is band) for t in (q, k, v)]
    out = path.run(Call(rg.Softmax(), *leaves, rule))
    within = 38 - first
    torch.testing.assert_close(out[0], clean[0])
    torch.testing.assert_close(out[1, :, :within], clean[1, :, :within])
    assert not out[1, :, within:].isfinite().any()
    if path is band:
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[1][1, :, 38].any()
        assert not grads[2][0, :, 33:].any()
        exact = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(rg.attend(*exact, mask=rule, path="reference").square().sum(), exact)
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_heads_that_another_kernel_spoiled_are_computed_again():
    """cuDNN's output is stood in for by a plain one, in which a masked NaN reached every query of its head."""
    q, k, v = tensors(KEYS, heads=4, groups=2, batch=1)
    v[0, 1, 20] = torch.nan
    exact = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = rg.attend(*exact, mask=rg.causal, path="reference")
    out, lse = (
        expected.detach().clone(),
        (q @ k.repeat_interleave(2, 1).mT / 4)
        .masked_fill(torch.ones(KEYS, KEYS).triu(1).bool(), -torch.inf)
        .logsumexp(-1),
    )
    out[:, 2:] = torch.nan
    work = band_attention.work_of(q, k, v, 0.25, None, 0)
    band_attention.mend(work, q, k, v, out, lse)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    theirs = torch.autograd.grad(expected, exact, grad)
    ours = tuple(t.clone(memory_format=torch.contiguous_format) for t in theirs)
    for tensor in ours:
        tensor[:, tensor.shape[1] // 2 :] = torch.nan
    band_attention.mend_backward(work, q, k, v, grad, out, lse, ours)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_queries_that_see_nothing_give_zero():
    q, k, v = tensors(50, batch=1)
    assert not band.run(Call(rg.Softmax(), q, k, v, rg.causal))[:, :, :10].any()
    for path in (band, split):
        assert not path.run(Call(rg.Softmax(), q[:, :, :1], k, v, rg.padding([0]))).any()


def test_parts_of_the_keys_fill_the_gpu():
    """Programs come in waves that leave few multiprocessors idle, unless the cache is too short for more parts."""
    for keys, pairs in ((131072, 1), (16384, 8), (4096, 64), (131072, 8), (16384, 256), (1024, 128)):
        launch, parts = PLAN(keys, pairs, 32 * pairs, 128, 2, True)
        waves = pairs * parts / (len(launch.shares) * decode_attention.MULTIPROCESSORS)
        assert waves / math.ceil(waves) > 0.6, (keys, pairs, parts)
    assert PLAN(256, 1, 4, 128, 2, True)[1] == 1


def test_what_is_done_to_each_token():
    from regard.core.kernels import elementwise
    from regard.models.layers.network import RMSNorm
    from regard.models.layers.positions import Rotary

    x, norm = torch.randn(2, 3, 20), RMSNorm(20)
    norm.weight.data.uniform_()
    torch.testing.assert_close(elementwise.rms_norm(x, norm.weight, norm.epsilon), norm(x))
    q, k = torch.randn(2, 3, 4, 12).transpose(1, 2), torch.randn(2, 2, 3, 12)
    for pairing in ("halves", "neighbours"):
        rotary = Rotary(length=12, pairing=pairing)
        for place in (torch.arange(5, 8), torch.tensor([[0, 1, 2], [7, 8, 9]])):
            tables = rotary.tables(place)
            for ours, plain in zip(elementwise.turn(q, k, *tables, pairing == "neighbours"), (q, k), strict=True):
                torch.testing.assert_close(ours, rotary.turn(plain, tables))
    gate, up = torch.randn(2, 3, 7, 11)[:2]
    torch.testing.assert_close(elementwise.gated(gate.clone(), up), torch.nn.functional.silu(gate) * up)


def test_operators_have_shapes_without_data():
    q, k, v = (torch.empty(2, h, 12, 8, device="meta", dtype=torch.bfloat16) for h in (4, 2, 2))
    out, lse = band_attention.band(q, k, v, None, None, 1.0, None, 0, 0)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    assert decode_attention.split(q, k, v, None, 1.0, True, None).shape == q.shape


@pytest.mark.parametrize(("path", "rule", "queries"), [("band", rg.causal, 40), ("split", None, 1)])
def test_calls_like_one_before_are_not_chosen_again(path, rule, queries, chosen):
    for _ in range(3):
        q, k, v = tensors(queries)
        out = rg.attend(q, k, v, mask=rule)
        assert chosen == [path]
        torch.testing.assert_close(out, plain_softmax(q, k, v, rule), rtol=1e-4, atol=1e-4)


def plain_softmax(q, k, v, rule):
    visible = None if rule is None else rule.visible(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return rg.Softmax().mix(rg.Softmax().weigh(q, k, visible), v)


def test_calls_that_differ_are_chosen_each(chosen, monkeypatch):
    def run(q, k, v, *rest, **options):
        before = len(chosen)
        rg.attend(q, k, v, *rest, **options)
        return len(chosen) > before

    q, k, v = tensors(1)
    assert run(q, k, v)
    assert not run(q, k, v, rg.Softmax())  # an equal one
    assert run(q, k, v, rg.Softmax(beta=2))
    assert run(q, k, v, mask=rg.window(before=3))
    assert run(q[:1], k[:1], v[:1])
    assert run(q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
    assert run(q.clone().requires_grad_(), k, v)
    assert run(q, k, v, path="split")
    assert run(q, k, v, bias=torch.zeros(1, KEYS))
    with pytest.raises(ValueError, match="k: expected q's qk_length"):
        rg.attend(q, k[..., :8], v)
    with pytest.raises(ValueError, match="mechanism: expected a mechanism"):
        rg.attend(q, k, v, [])
    monkeypatch.setattr(repeats, "MOST", 2)
    for rows in (1, 2, 3):
        rg.attend(q[:, :, :, :rows].contiguous(), k[:, :, :, :rows].contiguous(), v)
    assert 0 < len(repeats._kept_runs) <= 2


def test_a_chain_launches_again_with_the_pointers_of_new_tensors(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    constant, calls = torch.zeros(4), []

    def compiled(name):
        return lambda *arguments: calls.append((name, arguments)), ("head",), (8,)

    def run(q, k, number):
        out, between = torch.empty_like(q), torch.empty(100)
        first, second = (q, k, None, constant, between), (between, between[32:], out)
        launch._recording.launches += [
            (compiled("first"), (1, 2, 3), first, (number, 5)),
            (compiled("second"), (4, 1, 1), second, ()),
        ]
        return out

    chain = launch.Chain(run, constant)
    chain(torch.zeros(3), torch.zeros(5), number=1)
    q, k = torch.zeros(3), torch.zeros(5)
    out = chain(q, k, number=9)
    (_, first), (_, second) = calls
    between = first[9]
    pointers = q.data_ptr(), k.data_ptr(), None, constant.data_ptr(), between
    assert first == (1, 2, 3, 7, "head", *pointers, 9, 5, 8)
    assert second == (4, 1, 1, 7, "head", between, between + 128, out.data_ptr(), 8)
    assert out.shape == q.shape


def test_explain_says_why_not():
    q = torch.randn(1, 1, 4, 8)
    rejected = rg.explain(q, q, q, mask=rg.causal).rejected
    assert {rejected[name] for name in ("split", "band", "cudnn")} == {"made for GPUs"}
    holes = rg.padding(valid=torch.tensor([[True, False, True, True]]))
    for path in (split, band):
        assert path.unfit(Call(rg.Softmax(), q, q, q, holes)) == "padding with holes"
        assert "softcap" in str(rg.Softmax(softcap=3.0))
        assert path.unfit(Call(rg.Softmax(softcap=3.0), q, q, q)) == "SDPA does not compute this mechanism"
        assert path.unfit(Call(rg.Softmax(), q.double(), q.double(), q.double())) is not None
    assert split.unfit(Call(rg.Softmax(), q, q, q, rg.window(before=1, after=1))) is not None
    packed, mixed = rg.segments([[0, 0, 1, 1]]), rg.segments([[0, 1, 0, 1]])
    assert band.unfit(Call(rg.Softmax(), q, q, q, rg.causal & packed)) is None
    assert "no band" in band.unfit(Call(rg.Softmax(), q, q, q, mixed))
    assert "no band" in split.unfit(Call(rg.Softmax(), q, q, q, packed))
    assert cudnn.cannot(Call(rg.Softmax(), q, q, q)) == "made for GPUs"
