"""GPU kernels on the CPU, in Triton's interpreter, on tiny shapes: the formulas, the masks and the indices.

What the interpreter cannot tell (half precision, speed, races) is for test_gpu.py, on a GPU.
"""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

import regard as rg
from regard.core.calls.call import Call
from regard.core.families import features
from regard.core.kernels import feature_attention, square_attention, square_sizes, step_attention
from regard.core.laws.case import within_budget
from regard.core.masks.structure import padding_between
from regard.core.paths import fused, fused_stream, stream
from regard.core.paths.slots import Clock, SumSlot

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PADDED = rg.padding(
    valid=(torch.arange(40) >= torch.tensor([[0], [7]])) & (torch.arange(40) < torch.tensor([[33], [40]]))
)
MECHANISMS = {
    "quadratic": rg.Quadratic(c=0.5),
    "taylor": rg.Taylor(),
    "elu": rg.Elu(),
    "given": rg.Kernel(feature_map=lambda x: torch.cat([x.relu(), (-x).relu()], -1)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, launches):
    """Tiles so small that a few dozen tokens cross every border of chunks, segments, blocks and programs."""
    square, feature = square_sizes.tiles, feature_attention.tiles

    def small_square(*sizes):
        near = square_sizes.Launch(32, 32, 4, 1)
        tiles = square(*sizes)
        few = replace(tiles, chunk=32, near=near, near_keys=near, far=near, sums=near, square=near)
        return replace(few, pull=tiles.pull._replace(rows=32), left=8, right=16)

    def small_feature(*sizes):
        step = feature_attention.Launch(32, 4, 1)
        return replace(feature(*sizes), segment=32, sums=step, walk=step, walk_back=step)

    monkeypatch.setattr(square_sizes, "tiles", small_square)
    monkeypatch.setattr(feature_attention, "tiles", small_feature)
    monkeypatch.setattr(fused, "FEW", 0)
    square_sizes._work.cache_clear()
    feature_attention._work.cache_clear()


def compare(mechanism, rule, queries=40, keys=40, heads=2, groups=1, length=16, value_length=16, batch=2):
    q, k, v = (
        torch.randn(batch, h, n, size)
        for h, n, size in ((heads, queries, length), (groups, keys, length), (groups, keys, value_length))
    )
    dtype = torch.float32
    leaves = [[t.to(kind).requires_grad_() for t in (q, k, v)] for kind in (dtype, torch.float64, dtype)]
    call = Call(mechanism, *leaves[0], rule)
    assert fused.unfit(call) is None
    outs = [fused.run(call), *(rg.attend(*inputs, mechanism, rule, path="reference") for inputs in leaves[1:])]
    within_budget("output", *outs)
    grad = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, inputs, grad.to(out.dtype)) for out, inputs in zip(outs, leaves, strict=True)]
    for name, *results in zip("qkv", *grads, strict=True):
        within_budget(f"gradient of {name}", *results, gradient=True)


@pytest.mark.parametrize("name", ["quadratic", "elu", "given"])
def test_causal_padded_grouped(name):
    compare(MECHANISMS[name], rg.causal & PADDED)


@pytest.mark.parametrize("name", ["taylor", "elu"])
def test_lengths_that_are_not_round(name):
    compare(MECHANISMS[name], rg.causal, length=9, value_length=5, heads=1, batch=1)


@pytest.mark.parametrize(("name", "rule"), [("taylor", PADDED), ("elu", PADDED), ("quadratic", None), ("elu", None)])
def test_without_causality(name, rule):
    compare(MECHANISMS[name], rule, queries=24, heads=1)


@pytest.mark.parametrize(("name", "queries"), [("quadratic", 50), ("elu", 24), ("elu", 50)])
def test_fewer_and_more_queries_than_keys(name, queries):
    compare(MECHANISMS[name], rg.causal, queries=queries, heads=1, batch=1)


def test_coordinates_beyond_one_block_and_sums_along_the_whole_length(monkeypatch):
    monkeypatch.setattr(square_attention, "PROGRAMS", 1)
    compare(rg.Quadratic(), rg.causal, queries=24, length=20, heads=1, batch=1)


def test_parts_of_the_length_summed_side_by_side(monkeypatch):
    monkeypatch.setattr(square_attention, "PARTS", 4)  # two programs of two: three chunks are a part and a rest
    compare(rg.Quadratic(), rg.causal, queries=100, keys=100, heads=1, batch=1)


@pytest.mark.parametrize("name", ["quadratic", "taylor"])
def test_half_precision_counts_by_a_product_with_ones(name, monkeypatch):
    """With float16 in place of bfloat16, which Triton's interpreter does not know."""
    tiles = square_sizes.tiles
    monkeypatch.setattr(square_sizes, "tiles", lambda *sizes: replace(tiles(*sizes), compute=tl.float16))
    monkeypatch.setattr(square_sizes.Work, "kind", torch.float16)
    q, k, v = (torch.randn(1, 1, 100, 16).half() / 2 for _ in range(3))
    outs = [fused.run(Call(MECHANISMS[name], q, k, v, rg.causal))]
    for kind in (torch.float64, torch.float16):
        outs.append(rg.attend(q.to(kind), k.to(kind), v.to(kind), MECHANISMS[name], rg.causal, path="reference"))
    within_budget("output", *outs)
    assert torch.equal(outs[0][0, 0, 0], v[0, 0, 0])  # one key alone weighs 1


@pytest.mark.parametrize("name", ["quadratic", "elu", "given"])
def test_what_is_hidden_does_not_leak_and_what_is_seen_shows(name):
    mechanism, rule = MECHANISMS[name], rg.causal & PADDED
    q, k, v = (torch.randn(2, 1, 40, 16) for _ in range(3))
    clean = fused.run(Call(mechanism, q, k, v, rule))
    k[0, :, 36], v[1, :, 3], v[0, :, 21] = torch.nan, torch.inf, torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = fused.run(Call(mechanism, *leaves, rule))
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, :, :21], clean[0, :, :21])
    assert out[0, :, 21:].isnan().all()
    grads = torch.autograd.grad(out[:, :, :21].sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][0, :, 21:].any()
    assert not grads[2][0, :, 21:].any()
    assert not grads[0][0, :, 21:].any()


def test_queries_that_see_nothing_give_zero():
    q, k, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    for mechanism in (rg.Quadratic(), rg.Elu()):
        assert not fused.run(Call(mechanism, q, k, v, rg.causal))[:, :, :2].any()
        assert not fused.run(Call(mechanism, q, k, v, rg.padding([0]))).any()


@pytest.fixture
def streams_by_kernels(monkeypatch):
    """`extend` by our kernels wherever they can compute it, on this CPU too."""

    def cannot(mechanism, q, k, v, sums, causal, holes):
        return fused_stream.unfit(mechanism, q, v, sums, causal, holes)

    monkeypatch.setattr(fused_stream, "cannot", cannot)
    step_attention._work.cache_clear()


def streamed(mechanism, q, k, v, pieces, rule=rg.causal):
    """A stream that keeps 32 recent tokens: the output of all pieces, and the state."""
    state = mechanism.start(batch=q.shape[0], num_kv_heads=k.shape[1], qk_length=q.shape[3], value_length=v.shape[3])
    outs = []
    for tokens in torch.arange(q.shape[2]).split(pieces):
        total = state.length + len(tokens)
        real = padding_between(rule, state.folded, total, q.shape[2])
        out, state = stream.stream(mechanism, q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], state, True, real, 32)
        outs.append(out)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize(
    ("name", "lengths", "pieces"),
    [
        ("taylor", (20, 9), [34, 15, 1]),
        ("quadratic", (9, 5), [1, 90, 1]),
        ("elu", (16, 16), [50, 13, 1]),
        ("elu", (9, 5), [31, 1, 1, 20]),
        ("given", (8, 16), [30, 1, 1, 1, 40, 1]),
    ],
)
def test_a_stream_by_kernels_is_the_whole(name, lengths, pieces, streams_by_kernels, monkeypatch):
    mechanism, total = MECHANISMS[name], sum(pieces)
    if name == "taylor":
        monkeypatch.setattr(square_attention, "PROGRAMS", 1)  # sums along the whole length
    q, k, v = (
        torch.randn(2, heads, total, size) for heads, size in ((2, lengths[0]), (1, lengths[0]), (1, lengths[1]))
    )
    rule = rg.causal & rg.padding(valid=torch.arange(total) >= torch.tensor([[0], [19]]))
    out, state = streamed(mechanism, q, k, v, pieces, rule)
    exact, plain = (rg.attend(*(t.to(kind) for t in (q, k, v)), mechanism, rule, path="reference") for kind in (
        torch.float64, torch.float32
    ))  # fmt: skip
    within_budget("output", out, exact, plain)
    monkeypatch.setattr(fused_stream, "cannot", lambda *_: "asked for PyTorch")
    _, other = streamed(mechanism, q, k, v, pieces, rule)
    assert state.folded == other.folded > 0
    torch.testing.assert_close(state.sums, other.sums, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.normaliser, other.normaliser, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "mechanism"), [(3, rg.Quadratic(c=0)), (20, rg.Quadratic()), (20, rg.Elu())], ids=str
)
def test_one_token_of_any_number_of_query_heads_and_parts(heads, mechanism, streams_by_kernels, monkeypatch):
    monkeypatch.setattr(step_attention, "TILE", 1)  # so many parts that they are added up in two rounds
    q, k, v = (torch.randn(1, count, 36, 20) for count in (heads, 1, 1))
    out, _ = streamed(mechanism, q, k, v, [35, 1])
    exact = rg.attend(q.double(), k.double(), v.double(), mechanism, rg.causal, path="reference")
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["quadratic", "elu", "given"])
def test_a_slot_goes_on_with_a_stream_by_kernels(name, streams_by_kernels):
    mechanism, count = MECHANISMS[name], 46
    q, k, v = (torch.randn(2, heads, 50, 8) for heads in (2, 1, 1))
    whole, begun = (
        rg.causal & rg.padding(valid=torch.arange(total) >= torch.tensor([[0], [19]])) for total in (50, count)
    )
    exact = rg.attend(q.double(), k.double(), v.double(), mechanism, whole, path="reference")
    _, state = streamed(mechanism, *(t[:, :, :count] for t in (q, k, v)), [count], begun)
    clock = Clock.at(count, (0, 19), 100, q.device)
    slot = SumSlot(state, clock)
    for at in range(count, 50):
        slot.make_room(mechanism, at + 1)
        clock.tick()
        out = slot.attend(mechanism, *(t[:, :, at : at + 1] for t in (q, k, v)))
        torch.testing.assert_close(out.double(), exact[:, :, at : at + 1], rtol=0, atol=1e-5)
    assert slot.folded > state.folded


@pytest.mark.parametrize("name", ["quadratic", "elu", "given"])
def test_a_stream_by_kernels_leaks_nothing_hidden_and_hides_nothing_seen(name, streams_by_kernels):
    mechanism = MECHANISMS[name]
    q, k, v = (torch.randn(2, 1, 36, 8) for _ in range(3))
    rule = rg.causal & rg.padding(valid=torch.arange(36) >= torch.tensor([[0], [9]]))
    clean, _ = streamed(mechanism, q, k, v, [34, 1, 1], rule)
    k[1, :, 3], v[1, :, 5], v[0, :, 33] = torch.nan, torch.inf, torch.nan
    out, _ = streamed(mechanism, q, k, v, [34, 1, 1], rule)
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, :, :33], clean[0, :, :33])
    assert out[0, :, 33:].isnan().all()


def test_gradients_of_given_features_keep_their_digits_in_half_precision():
    mechanism, dtype = rg.Kernel(feature_map=torch.relu), torch.bfloat16
    q, k, v, grad = (torch.randn(1, heads, 40, 8, dtype=dtype) for heads in (2, 1, 1, 2))
    leaves = [[t.to(kind).requires_grad_() for t in (q, k, v)] for kind in (dtype, torch.float64, dtype)]
    visible = rg.causal.visible(1, 2, 40, 40)
    outs = [fused.run(Call(mechanism, *leaves[0], rg.causal))]
    outs += [mechanism.mix(mechanism.weigh(a, b, visible).to(a.dtype), c).to(a.dtype) for a, b, c in leaves[1:]]
    within_budget("output", *outs)
    grads = [torch.autograd.grad(out, some, grad.to(out.dtype)) for out, some in zip(outs, leaves, strict=True)]
    for letter, *results in zip("qkv", *grads, strict=True):
        within_budget(f"gradient of {letter}", *results, gradient=True)


@pytest.mark.parametrize("name", ["quadratic", "elu"])
def test_calls_like_one_before_are_not_chosen_again(name, chosen):
    for _ in range(2):
        q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
        out = rg.attend(q, k, v, MECHANISMS[name], rg.causal)
        assert chosen == ["fused"]
        visible = rg.causal.visible(1, 1, 40, 40)
        exact = MECHANISMS[name].mix(MECHANISMS[name].weigh(q, k, visible), v)
        torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["quadratic", "elu", "given"])
def test_steps_like_one_before_are_not_chosen_again(name, streams_by_kernels, chosen, monkeypatch):
    mechanism, steps = MECHANISMS[name], []
    monkeypatch.setattr(features, "RECENT", 8)
    plain = stream.stream
    monkeypatch.setattr(stream, "stream", lambda *args: (steps.append(args[4].length), plain(*args))[1])
    q, k, v = (torch.randn(2, heads, 14, 9) for heads in (2, 1, 1))
    state = mechanism.start(batch=2, num_kv_heads=1, qk_length=9, value_length=9)
    outs, states = [], []
    for at in range(14):
        states.append(state)
        out, state = mechanism.extend(*(t[:, :, at : at + 1] for t in (q, k, v)), state, mask=rg.causal)
        outs.append(out)
    exact = rg.attend(q.double(), k.double(), v.double(), mechanism, rg.causal, path="reference")
    torch.testing.assert_close(torch.cat(outs, 2).double(), exact, rtol=0, atol=1e-5)
    # The first has room for one token alone, which waits to begin; later ones fold. Given features have no such step.
    assert steps == ([0, 1, 8, 12] if name != "given" else list(range(14)))
    fork, _ = mechanism.extend(*(t[:, :, :1] for t in (q, k, v)), states[10], mask=rg.causal)
    tokens = [torch.cat([t[:, :, :10], t[:, :, :1]], 2).double() for t in (q, k, v)]
    other = rg.attend(*tokens, mechanism, rg.causal, path="reference")[:, :, 10:]
    torch.testing.assert_close(fork.double(), other, rtol=0, atol=1e-5)
    torch.testing.assert_close(state.recent.keys, k[:, :, state.folded :])


def test_no_sequences_are_no_work_for_kernels(streams_by_kernels):
    q = torch.randn(0, 2, 40, 8)
    out, state = streamed(rg.Quadratic(), q, q, q, [38, 1, 1])
    assert (out.shape, state.length) == (q.shape, 40)


@pytest.mark.parametrize("name", ["quadratic", "elu"])
def test_one_compiled_graph_and_the_gradient_of_a_sum(name):
    tensors = [torch.randn(1, 1, 20, 16, requires_grad=True) for _ in range(3)]

    def step(q, k, v):
        return fused.run(Call(MECHANISMS[name], q, k, v, rg.causal))

    plain, compiled = step(*tensors), torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(plain, compiled)
    theirs = torch.autograd.grad(plain, tensors, torch.ones_like(plain), retain_graph=True)
    for out in (plain, compiled):
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), tensors), theirs))


def test_operators_have_shapes_without_data():
    from regard.core.kernels import operators

    q, k, v = (torch.empty(2, h, 12, 8, device="meta", dtype=torch.bfloat16) for h in (4, 2, 2))
    for out, *_, den in (
        operators.square(q, k, v, None, 1.0, 2.0, 1.0, True, True),
        operators.feature(q, k, v, None, "elu", True),
    ):
        assert out.shape == (2, 4, 12, 8)
        assert (den.shape, den.dtype, out.dtype) == ((2, 4, 12), torch.float32, torch.bfloat16)


def test_explain_says_why_not(monkeypatch):
    q = torch.randn(1, 1, 4, 8)
    assert rg.explain(q, q, q, rg.Quadratic(), rg.causal).rejected["fused"] == "made for GPUs"
    holes = rg.padding(valid=torch.tensor([[True, False, True, True]]))
    assert fused.unfit(Call(rg.Quadratic(), q, q, q, holes)) == "padding with holes"
    assert fused.unfit(Call(rg.Quadratic(), q.double(), q.double(), q.double())) == "made for float32 and shorter"
    assert "more than 64 features" in fused.unfit(Call(rg.RandomFeatures(n=300), q, q, q))
    monkeypatch.setattr(fused, "FEW", 3)
    few, none = rg.padding([3]), rg.padding([0])
    assert fused.unfit(Call(rg.Quadratic(), q, q, q, few)) == "sums over 3 keys or fewer lose digits that scores keep"
    for mechanism, rule in (
        (rg.Quadratic(), none),
        (rg.Quadratic(), None),
        (rg.Quadratic(), rg.causal & few),
        (rg.Elu(), few),
    ):
        assert fused.unfit(Call(mechanism, q, q, q, rule)) is None
    half = q.bfloat16()
    assert "more than 128 features" in fused.unfit(Call(rg.RandomFeatures(n=300), half, half, half))
    assert fused_stream.unfit(rg.Quadratic(), q, q, None, False, False) == "new tokens that see later ones"
    assert fused_stream.unfit(rg.Quadratic(), q, q, None, True, True) == "padding with holes"
    assert "more than 64 features" in fused_stream.unfit(rg.RandomFeatures(n=300), q, q, None, True, False)


def test_explain_says_how_a_state_is_extended():
    with FakeTensorMode():
        q = torch.empty(1, 1, 4, 8, device="cuda")
        plan = rg.explain(q, q, q, rg.Quadratic(), rg.causal)
    assert plan.path == "fused"
    assert "extended by such tokens by PyTorch's operators: a trace or transform" in plan.notes[0]
