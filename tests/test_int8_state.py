"""int8 states: rounded by a stated bound, and otherwise as every state is."""

import pytest
import torch

import regard as rg
from broken import Averages
from int8_models import decoder
from regard.core import cpu
from regard.core.calls.call import Call
from regard.core.calls.choice import plan
from regard.core.states.buffer import quantize

SIZES = {"batch": 2, "num_kv_heads": 2, "qk_length": 16, "value_length": 8}


def tokens_of(length, batch=2, dtype=torch.float32):
    shape = (batch, SIZES["num_kv_heads"], length)
    k, v = torch.randn(*shape, SIZES["qk_length"]), torch.randn(*shape, SIZES["value_length"])
    return torch.randn(batch, 4, length, SIZES["qk_length"]).to(dtype), k.to(dtype), v.to(dtype)


def begin(capacity=32, dtype=torch.float32, **more):
    return rg.Softmax().start(**SIZES, capacity=capacity, dtype=dtype, storage=torch.int8, **more)


def stored(state):
    return [tensor[:, :, : state.length] for tensor in state.buffer.tensors]


def same(left, right):
    assert left.length == right.length
    assert all(torch.equal(a, b) for a, b in zip(stored(left), stored(right), strict=True))
    return True


def appended(state, k, v, sizes):
    for a, b in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True):
        state = state.append(a, b)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_key_is_rounded_to_half_a_step_of_its_own_largest(dtype):
    _, k, v = tokens_of(9, dtype=dtype)
    k = k * torch.logspace(-3, 3, 9)[:, None].to(dtype)
    k[0, 0, 0] = 0
    state = begin(dtype=dtype).append(k, v)
    assert state.buffer.keys.dtype == state.buffer.values.dtype == torch.int8
    assert state.keys.dtype == state.values.dtype == dtype
    for rounded, exact in ((state.keys, k), (state.values, v)):
        step = exact.double().abs().amax(-1, keepdim=True) / 127
        exact_to = torch.finfo(dtype).eps * exact.double().abs().amax(-1, keepdim=True)
        assert ((rounded.double() - exact.double()).abs() <= step / 2 + exact_to).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_nearly_underflow_are_off_by_less_than_the_least_normal_number(dtype):
    """float32 has no exact 1/127 of them."""
    rows = torch.tensor([0.0, 1e-45, 3e-41, 1e-37, 2e-36, 6e-8])[:, None] * torch.randn(6, 64)
    numbers, scale = quantize(rows.to(dtype))
    tiny = torch.finfo(torch.float32).tiny
    least = (rows.to(dtype).double().abs().amax(-1, keepdim=True) / 127).clamp_min(tiny)
    assert ((numbers * scale.double() - rows.to(dtype).double()).abs() <= least * 0.5001).all()
    assert not numbers[0].any()


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [13, 7], [1, 5, 14]])
def test_chunks_store_the_same_bytes(sizes):
    _, k, v = tokens_of(20)
    assert same(appended(begin(), k, v, sizes), begin().append(k, v))


def test_extending_attends_to_the_rounded_history():
    q, k, v = tokens_of(20)
    mechanism, state = rg.Softmax(), begin()
    parts = []
    for a, b, c in zip(*(tensor.split([11, 1, 8], 2) for tensor in (q, k, v)), strict=True):
        out, state = mechanism.extend(a, b, c, state, rg.causal)
        parts.append(out)
    expected = rg.attend(q, state.keys, state.values, mechanism, rg.causal)
    torch.testing.assert_close(torch.cat(parts, 2), expected, atol=1e-6, rtol=0)


def test_a_fork_leaves_the_other_as_it_was():
    _, k, v = tokens_of(12)
    base = begin().append(k[:, :, :8], v[:, :, :8])
    fork = base.append(k[:, :, 8:], v[:, :, 8:])
    other = base.append(v.new_ones(2, 2, 4, 16), v.new_ones(2, 2, 4, 8))
    assert fork.buffer is base.buffer
    assert other.buffer is not base.buffer
    assert same(fork, begin().append(k, v))
    assert same(base, begin().append(k[:, :, :8], v[:, :, :8]))
    assert same(other.crop(8), base)


def test_reorder_and_crop_equal_a_state_made_anew():
    _, k, v = tokens_of(12)
    state, index = begin().append(k, v), torch.tensor([1, 1, 0])
    anew = rg.Softmax().start(**{**SIZES, "batch": 3}, capacity=32, storage=torch.int8).append(k[index], v[index])
    assert same(state.reorder(index), anew)
    short = state.crop(5)
    assert same(short, begin().append(k[:, :, :5], v[:, :, :5]))
    assert same(short.append(k[:, :, 5:], v[:, :, 5:]), state)


def test_resizing_moves_the_bytes_and_rounds_nothing_again():
    _, k, v = tokens_of(12)
    state = begin(12).append(k, v)
    for _ in range(3):
        state = state.resized(state.capacity + 4)
    assert same(state, begin().append(k, v))
    assert state.capacity == 24
    assert same(state.resized(8, drop=4), begin().append(k[:, :, 4:], v[:, :, 4:]))
    assert same(begin(12).append(k, v).windowed(rg.Window(5), 3), begin().append(k[:, :, 7:], v[:, :, 7:]))


def test_an_int8_state_takes_a_quarter_and_its_scales():
    sizes = {"batch": 1, "num_kv_heads": 3, "qk_length": 64, "value_length": 64, "capacity": 100}
    small, full = rg.Softmax().start(**sizes, storage=torch.int8), rg.Softmax().start(**sizes)
    assert full.nbytes == 3 * 100 * 128 * 4
    assert small.nbytes == 3 * 100 * (128 + 2 * 4)
    assert small.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in small.buffer.tensors)


def test_a_key_with_nan_spoils_what_sees_it_alone():
    q, k, v = tokens_of(6)
    k[0, 0, 2, 3], v[1, 1, 4, 0] = torch.nan, torch.inf
    out, state = rg.Softmax().extend(q, k, v, begin(), rg.causal)
    full, _ = rg.Softmax().extend(q, k, v, rg.Softmax().start(**SIZES, capacity=32), rg.causal)
    # One scale for a token: a bad number is all of its numbers'.
    assert torch.equal(out.isfinite().all(-1), full.isfinite().all(-1))
    assert not out.isfinite().all()
    assert torch.equal(state.keys.isfinite().all(-1), k.isfinite().all(-1))
    assert torch.equal(state.values.isfinite().all(-1), v.isfinite().all(-1))


def test_gradients_and_sums_are_refused():
    q, k, v = tokens_of(3)
    with pytest.raises(ValueError, match="state: expected no gradients with int8 storage, which rounds, got some"):
        rg.Softmax().extend(q, k.requires_grad_(), v, begin(), rg.causal)
    with torch.no_grad():
        rg.Softmax().extend(q, k, v, begin(), rg.causal)
    for mechanism in (rg.Elu(), rg.Quadratic(), rg.Retention(), Averages(grows=False), Averages(grows=True)):
        with pytest.raises(ValueError, match=r"storage: expected None, since the state of .* is no KV cache"):
            mechanism.start(**SIZES, storage=torch.int8)
    with pytest.raises(ValueError, match=r"storage: expected torch\.int8 or None, got torch\.uint8"):
        rg.Softmax().start(**SIZES, storage=torch.uint8)


@pytest.mark.parametrize("window", [None, rg.Window(4)])
def test_a_model_streams_on_an_int8_state(window):
    model = decoder(window=window).requires_grad_(False)
    tokens = torch.randint(97, (2, 24))
    whole = model(tokens)
    results = []
    for sizes in ([24], [7, 1, 1, 15], [1] * 24):
        state, parts = model.start(batch=2, capacity=24, storage=torch.int8), []
        for piece in tokens.split(sizes, dim=1):
            logits, state = model.extend(piece, state)
            parts.append(logits)
        results.append(torch.cat(parts, 1))
        assert all(layer.buffer.keys.dtype == torch.int8 for layer in state.layers)
    for logits in results:
        assert 0 < (logits - whole).abs().max() < 0.05 * whole.std()
        torch.testing.assert_close(logits, results[0], atol=0.02 * whole.std().item(), rtol=0)


def test_a_left_padded_batch_streams_on_an_int8_state_as_its_rows_do():
    model = decoder().requires_grad_(False)
    tokens = torch.randint(97, (2, 12))
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[0, :4] = False
    _, both = model.extend(
        tokens[:, :10], model.start(batch=2, capacity=12, storage=torch.int8), rg.padding(valid=valid)
    )
    logits, both = model.extend(tokens[:, 10:], both)
    for row, start in ((0, 4), (1, 0)):
        _, alone = model.extend(tokens[row : row + 1, start:10], model.start(batch=1, storage=torch.int8))
        expected, alone = model.extend(tokens[row : row + 1, 10:], alone)
        torch.testing.assert_close(logits[row], expected[0], atol=0.02 * expected.std().item(), rtol=0)
        back, _ = model.extend(tokens[row : row + 1, 10:], both.crop(10).reorder(torch.tensor([row])))
        torch.testing.assert_close(back[0], logits[row], atol=0.02 * expected.std().item(), rtol=0)


def test_attention_over_an_int8_state_is_off_by_about_a_hundredth():
    q, k, v = torch.randn(1, 9, 256, 64), torch.randn(1, 3, 256, 64), torch.randn(1, 3, 256, 64)
    sizes = {"batch": 1, "num_kv_heads": 3, "qk_length": 64, "value_length": 64, "capacity": 256}
    exact = rg.attend(q, k, v, rg.Softmax(), rg.causal)
    out, _ = rg.Softmax().extend(q, k, v, rg.Softmax().start(**sizes, storage=torch.int8), rg.causal)
    assert 0.004 < (out - exact).norm() / exact.norm() < 0.012


WIDE = {"num_kv_heads": 2, "qk_length": 32, "value_length": 16}
GOING_BY_DECODE = (rg.Softmax(), rg.Softmax(beta=0.7), rg.Uniform())


by_machine_code = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


def history(length, new, batch=2, dtype=torch.float32, storage=torch.int8, mechanism=GOING_BY_DECODE[0]):
    """A state of some tokens, and new ones."""
    torch.manual_seed(length + new)
    shape = batch, WIDE["num_kv_heads"], length + new
    k, v = (torch.randn(*shape, WIDE[size]).to(dtype) for size in ("qk_length", "value_length"))
    q = torch.randn(batch, 6, new, WIDE["qk_length"]).to(dtype)
    state = mechanism.start(batch=batch, **WIDE, capacity=length + 4 * new, dtype=dtype, storage=storage)
    state = state.append(k[:, :, :length], v[:, :, :length])
    return q, k[:, :, length:], v[:, :, length:], state


@by_machine_code
@pytest.mark.parametrize("mechanism", GOING_BY_DECODE, ids=repr)
@pytest.mark.parametrize("new", [1, 2, 5, 16, 40])
@pytest.mark.parametrize(
    "mask",
    [
        rg.causal,
        rg.causal & rg.window(before=20),
        rg.causal & rg.padding([150, 9]),
        rg.causal & rg.padding(valid=torch.arange(150) >= torch.tensor([[3], [90]])),
    ],
    ids=repr,
)
@pytest.mark.parametrize("bad", [None, torch.nan])
def test_new_tokens_over_an_int8_state_give_what_its_wide_tokens_do(mechanism, new, mask, bad):
    q, k, v, state = history(150 - new, new, mechanism=mechanism)
    if bad is not None:
        state.buffer.scales[0][0, 1, 100], state.buffer.scales[1][1, 0, 5] = bad, bad
        k[1, 1, -1] = bad
    out, longer = mechanism.extend(q, k, v, state, mask)
    wide = q, longer.keys, longer.values
    plain, wanted = (
        rg.attend(*tokens, mechanism, mask, path="reference") for tokens in (wide, [t.double() for t in wide])
    )
    assert out.isnan().equal(wanted.isnan())
    assert (out - wanted).nan_to_num().abs().max() <= 2 * (plain - wanted).nan_to_num().abs().max() + 1e-6


@by_machine_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mechanism", [rg.Softmax(), rg.Softmax(softcap=5.0), rg.Argmax()], ids=repr)
def test_an_int8_state_of_any_dtype_serves_any_mechanism(dtype, mechanism):
    """Where machine code cannot read it, wide tokens are made of it."""
    q, k, v, state = history(60, 3, dtype=dtype, mechanism=mechanism)
    out, longer = mechanism.extend(q, k, v, state, rg.causal, bias=None)
    wanted = rg.attend(q.double(), longer.keys.double(), longer.values.double(), mechanism, rg.causal)
    assert out.dtype == dtype
    if mechanism != rg.Argmax():  # which rounding may change, and the law of streams looks at
        assert (out - wanted).abs().max() <= 2e-6 + 4 * torch.finfo(dtype).eps


@by_machine_code
def test_why_machine_code_cannot_read_an_int8_state_is_said():
    q, k, v, state = history(60, 2)
    keys, values, scales = state.append(k, v).buffer.stored(62)

    def planned(q, mask=rg.causal, bias=None):
        return plan(Call(rg.Softmax(), q, keys, values, mask, bias, scales))

    assert planned(q).path == "decode"
    assert "float32, bfloat16 and float16" in planned(q.double()).rejected["decode"]
    assert "bias" in planned(q, bias=torch.zeros(2, 62)).rejected["decode"]
    assert "interval" in planned(q, rg.causal & rg.global_tokens(2) | rg.window(before=3)).rejected["decode"]


def allocated(compute) -> int:
    """Bytes of all that a computation allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())


@by_machine_code
@torch.no_grad()
@pytest.mark.parametrize("new", [1, 16])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_over_an_int8_state_makes_no_wide_copy(new, shared):
    mechanism = rg.Softmax()
    q, k, v, state = history(6000, new)
    if shared:  # four continuations of each prompt, whose tokens are stored once
        rows = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        q, k, v, state = q[rows], k[rows], v[rows], state.reorder(rows)
    _, state = mechanism.extend(q, k, v, state, rg.causal)  # compiles, and a fork gets a buffer
    assert (
        allocated(lambda: mechanism.extend(q, k, v, state, rg.causal)) < state.nbytes
    )  # a wide copy takes three times as much
    out, longer = mechanism.extend(q, k, v, state, rg.causal)
    wanted = rg.attend(q, longer.keys, longer.values, mechanism, rg.causal)
    assert (out - wanted).abs().max() < 2e-6


@torch.no_grad()
@by_machine_code
def test_a_compiled_step_reads_an_int8_state():
    q, k, v, state = history(60, 1)
    step = torch.compile(lambda *tokens: rg.Softmax().extend(*tokens, state, rg.causal)[0], backend="aot_eager")
    out = step(q, k, v)
    wanted, _ = rg.Softmax().extend(q, k, v, state.crop(60), rg.causal)
    assert (out - wanted).abs().max() < 2e-6
