"""The machine code for a few queries agrees with the reference."""

import math
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from decode_calls import BLOCK, KINDS, SOFTMAX, agree, exact, int8, near, tensors
from regard.core import cpu
from regard.core.laws.case import HEADS, MASKS, Case, exact_output, plain_output
from regard.core.laws.statements import LAWS
from regard.core.paths import decode, parts
from regard.models.layers import linear

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


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
    out = rg.attend(q, k, v, mechanism, mask, path="decode")
    if bad is not None:
        rows = out[place[0], heads, sees]
        assert rows.isfinite().sum() == 0 or (spoiled is k and bad == math.inf)
        out[place[0], heads, sees] = wanted[place[0], heads, sees].float()
    assert (out - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 1e-6


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 130])
def test_int8_keys_and_values_give_what_wide_ones_would(monkeypatch, lanes, rows):
    """Every tile, in blocks that are full and not."""
    monkeypatch.setattr(cpu, "LANES", min(lanes, cpu.LANES))
    kind = KINDS[(rows + lanes // 4) % 3]  # each dtype meets few and many rows
    for keys in (rows, BLOCK, BLOCK + 41):
        q, *wide = tensors(kind, repeats=1, keys=keys, queries=min(rows, keys))
        k, v, *scales = int8(*wide)
        out = torch.ops.regard.decode(q, k, v, 0.3, None, None, 0, *scales)
        assert out.dtype == kind
        wanted = exact(q, k * scales[0], v * scales[1], rg.causal, rg.Softmax(beta=0.3))
        assert (out - wanted).abs().max() <= 2e-6 + torch.finfo(kind).eps / 2 * wanted.abs().max()


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
    out = torch.ops.regard.decode(q, k, v, 0.3, spans, before, after, *scales)
    wanted = torch.ops.regard.decode(q, k * scales[0], v * scales[1], 0.3, spans, before, after)
    assert out.isfinite().equal(wanted.isfinite())
    assert torch.where(wanted.isfinite(), out - wanted, 0).abs().max() < 2e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_int8_of_any_strides_and_threads(threads):
    q, *wide = tensors(batch=2, groups=2, repeats=4, keys=1600)
    whole, before = [t[:, :, 3:-2] for t in int8(*wide)], torch.get_num_threads()
    k, v, *scales = (t[:, :, ::2] for t in whole)
    torch.set_num_threads(threads)
    try:
        for case in (whole, [k, v, *scales], [t.transpose(0, 1).contiguous().transpose(0, 1) for t in whole]):
            out = torch.ops.regard.decode(q, *case[:2], 0.3, None, None, None, *case[2:])
            wanted = exact(q, case[0] * case[2], case[1] * case[3], None, rg.Softmax(beta=0.3))
            assert (out - wanted).abs().max() < 2e-6
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
        outs = list(pool.map(lambda case: rg.attend(*case, path="decode"), cases))
    assert all((out - exact(*case)).abs().max() < 2e-6 for out, case in zip(outs, cases, strict=True))


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
    out = rg.attend(q, k, v, mask=lengths, path="decode")
    assert out.isfinite().all()
    assert (out[2] == 0).all()
    # … by the code itself, without the guard that cleans NaN away
    spans = torch.tensor([[0, 300], [0, 7], [0, 0]])
    assert torch.ops.regard.decode(q, k, v, 1.0, spans, None, None).isfinite().all()
    assert torch.ops.regard.decode(q[1:], k[1:].flip(2), v[1:].flip(2), 1.0, None, 6, 0)[:1].isfinite().all()


def test_spans_end_where_the_cache_does():
    q, k, v = tensors(keys=40)
    spans = torch.tensor([[-5, 1000], [3, 41]])
    out = torch.ops.regard.decode(q, k, v, 32**-0.5, spans, 1000, None)
    wanted = exact(q, k, v, rg.padding(valid=torch.arange(40) >= torch.tensor([[0], [3]])))
    assert (out - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_number_that_is_seen_shows(bad, place):
    call = tensors(keys=200)
    call[1 + place][1, 0, 150, 3] = bad
    out = rg.attend(*call, path="decode")
    assert out[0].isfinite().all()
    assert out[1, 3:].isfinite().all()
    assert not (out[1, :3].isfinite().all(-1)).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_large_scores(kind):
    q, k, v = tensors(kind, keys=200)
    agree(100 * q, 100 * k, v)
    k[:, :, 0] = -math.inf  # a score of -inf weighs nothing
    out = rg.attend(q.abs(), k, v, path="decode")
    near(out, q.abs(), k[:, :, 1:], v[:, :, 1:], None, SOFTMAX)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["streamed", "forked", "batched", "padded", "weights", "groups"])
def test_the_laws_hold_on_it(monkeypatch, name, dtype):
    """Those that record no gradients, under which another path serves."""
    law = LAWS[name]
    served, real = [], decode._attention
    monkeypatch.setattr(decode, "_attention", lambda *arguments: served.append(arguments) or real(*arguments))
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


@pytest.mark.parametrize("keys", [1, 16, 64])
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([1, 1]), rg.causal & rg.window(before=3)], ids=repr)
def test_short_calls_take_it(keys, queries, mask):
    """PyTorch's kernels take longer at any length, and more so under a mask."""
    case = tensors(keys=keys, queries=min(queries, keys))
    assert rg.explain(*case, mask=mask).path == "decode"
    agree(*case, mask)


@pytest.mark.parametrize("kind", KINDS[1:], ids=str)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 3e38])
def test_half_results_are_rounded_once(kind, bad):
    q, k, v = tensors(kind, keys=3)
    if bad is not None:
        v[0] = bad
    wanted, _ = torch.ops.regard.decode_part(q, k, v, 0.3, None)
    out = torch.ops.regard.decode(q, k, v, 0.3, None, None, None)
    torch.testing.assert_close(out, wanted.to(kind), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("queries", [1, 5, 70])
def test_parts_of_a_history_merge_to_the_whole(queries):
    """With the log-sum-exp, in which rows of several chunks, heads and key parts are told apart."""
    q, k, v = tensors(keys=3 * BLOCK, queries=queries)
    torch.library.opcheck(torch.ops.regard.decode_part.default, (q, k, v, 0.2, 0))
    history = torch.ops.regard.decode_part(q, k[:, :, :150], v[:, :, :150], 0.2, None)
    tail = torch.ops.regard.decode_part(q, k[:, :, 150:], v[:, :, 150:], 0.2, 0)
    out, _ = parts.merge(*history, *tail)
    assert (out - exact(q, k, v, rg.causal, rg.Softmax(beta=0.2))).abs().max() < 2e-6


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
        out = rg.attend(*case, mask=rg.padding([50, 7]), path="decode")
    finally:
        torch.set_default_device(None)
    near(out, *case, rg.padding([50, 7]), SOFTMAX)
