"""KV caches in several buffers, which a GPU reads through a block table: the kernel on the CPU, in Triton's
interpreter; what is shared in whole pages; and slots whose rows share a prompt."""

from dataclasses import replace

import pytest
import torch

import regard as rg
from regard.core.kernels import decode_attention
from regard.core.laws.case import within_budget
from regard.core.masks.structure import part_of
from regard.core.paths import gpu, pages, slots
from regard.core.states import buffer, key_value_runs
from regard.core.states.buffer import Buffer, quantize
from regard.core.states.key_value_runs import Prefix, Run
from regard.inference.generation import replay

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PAGE, TOTAL = 32, 64 + 32 + 13
LEFT = rg.padding(valid=torch.arange(TOTAL) >= torch.tensor([[0], [7], [70]]))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch, launches):
    """Pages and steps so small that a hundred tokens cross every border."""
    for module in (decode_attention, pages, key_value_runs):
        monkeypatch.setattr(module, "TABLE_PAGE", PAGE)
    decode_attention._work.cache_clear()
    monkeypatch.setattr(decode_attention, "plan", lambda *_: (decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), 3))


def made(rows, room, used, groups=2, length=16, value_length=8):
    return Buffer(torch.randn(rows, groups, room, length), torch.randn(rows, groups, room, value_length), used)


def run():
    """Three rows: 64 tokens of one buffer's rows 1, 0 and 1, then 32 of another's own, then 13."""
    prefixes = Prefix(made(2, 80, 70), 64, (1, 0, 1)), Prefix(made(3, 50, 40), 32, (0, 1, 2))
    return Run((0, 1, 2), made(3, 40, 13), waiting=False, prefixes=prefixes)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "mask",
    [None, rg.causal, rg.causal & LEFT, rg.causal & rg.window(before=50), rg.causal & rg.window(before=5)],
    ids=str,
)
def test_a_cache_in_three_buffers_is_read_as_one(mask, queries, splits, monkeypatch):
    chosen = decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), splits
    monkeypatch.setattr(decode_attention, "plan", lambda *_: chosen)
    cache, q = run(), torch.randn(3, 6, queries, 16)
    out = pages.attend(rg.Softmax(), q, cache, TOTAL, mask)
    k, v = cache.read(0, TOTAL), cache.read(1, TOTAL)
    exact = rg.attend(q.double(), k.double(), v.double(), mask=mask, path="reference")
    within_budget("output", out, exact, rg.attend(q, k, v, mask=mask, path="reference"))


def test_a_new_token_is_stored_in_the_last_buffer():
    cache, q, new = run(), torch.randn(3, 6, 1, 16), (torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 8))
    before = [tensor.clone() for part in cache.prefixes for tensor in part.buffer.tensors]
    length = torch.tensor([TOTAL + 1], dtype=torch.int32)
    out = decode_attention.forward(
        q, *cache.buffer.tensors, 0.25, length=length, new=new, table=pages.table(cache), keys=TOTAL + 20
    )
    k, v = cache.read(0, TOTAL + 1), cache.read(1, TOTAL + 1)
    assert torch.equal(k[:, :, -1:], new[0])
    assert torch.equal(v[:, :, -1:], new[1])
    assert all(map(torch.equal, before, [tensor for part in cache.prefixes for tensor in part.buffer.tensors]))
    exact = rg.attend(q.double(), k.double(), v.double(), path="reference")
    within_budget("output", out, exact, exact.float())


def test_a_masked_nan_in_a_shared_page_stays_where_it_is():
    cache, q = run(), torch.randn(3, 6, 3, 16)
    cache.prefixes[0].buffer.keys[1, :, 3] = torch.nan
    cache.buffer.values[0, :, 12] = torch.nan
    out = pages.attend(rg.Softmax(), q, cache, TOTAL, rg.causal & LEFT)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()
    assert not out[2].isnan().any()
    out = pages.attend(rg.Softmax(), q, cache, TOTAL, rg.causal & rg.window(before=20))
    assert out[0, :, 2].isnan().all()
    assert not out[0, :, :2].isnan().any()


def test_a_table_is_made_once_for_a_run_and_anew_for_other_prefixes():
    cache = run()
    assert pages.table(cache) is pages.table(replace(cache, rows=(3, 4, 5)))
    other = replace(cache, prefixes=cache.prefixes[:1])
    assert not torch.equal(pages.table(other)[:, :3], pages.table(cache)[:, :3])


def reason(mechanism=rg.Softmax(), q=None, cache=None, mask=rg.causal):  # noqa: B008 - frozen values
    q, cache = torch.randn(3, 6, 1, 16) if q is None else q, cache or run()
    return pages.cannot(mechanism, q, cache, TOTAL, part_of(mask, (0, 1, 2), 0, TOTAL))


def test_what_no_table_serves_is_named(monkeypatch):
    assert reason() == "not a softmax that kernels of ours compute"  # on a CPU
    monkeypatch.setattr(gpu, "serves", lambda q, v: True)
    assert reason() is None
    assert reason(rg.Softmax(softcap=5.0)) == "not a softmax that kernels of ours compute"
    assert "query rows" in reason(q=torch.randn(3, 6, 900, 16))
    assert "no band" in reason(mask=rg.global_tokens(3) | rg.causal)
    assert "no band" in reason(q=torch.randn(3, 6, 8, 16), mask=rg.window(before=3, after=3))
    assert "holes" in reason(mask=rg.padding(valid=(torch.arange(TOTAL) % 2 == 0).expand(3, -1)))
    cropped = run().cropped(50)
    assert reason(cache=cropped) == "a prefix ends within a page"
    (k, k_scale), (v, v_scale) = (quantize(tensor) for tensor in made(3, 40, 13).tensors)
    small = replace(run(), buffer=Buffer(k, v, 13, scales=(k_scale, v_scale), rounded=torch.float32))
    assert "int8" in reason(cache=small)


@pytest.fixture
def whole_pages(monkeypatch):
    """Prefixes have whole pages, as on a GPU."""
    monkeypatch.setattr(Run, "_whole_pages", lambda run, count: count // PAGE * PAGE)
    monkeypatch.setattr(buffer, "FORKED", 64)
    monkeypatch.setattr(key_value_runs, "SHARED", 64)


def test_forks_and_repeated_rows_share_whole_pages(whole_pages):
    q, k, v = (torch.randn(2, 2, 150, 8, dtype=torch.float64) for _ in range(3))
    softmax = rg.Softmax()
    start = softmax.start(batch=2, num_kv_heads=2, qk_length=8, value_length=8, capacity=200, dtype=torch.float64)
    _, prompt = softmax.extend(q[:, :, :110], k[:, :, :110], v[:, :, :110], start, mask=rg.causal)
    order = [0, 1, 1, 0]
    forks = [softmax.extend(*(t[:, :, 110:130] for t in (q, k, v)), prompt, mask=rg.causal)[1] for _ in range(3)]
    repeated = prompt.reorder(torch.tensor(order))
    assert [fork.runs[0].prefix_length for fork in forks] == [0, 96, 96]
    assert repeated.runs[0].prefix_length == 96
    whole = rg.attend(q, k, v, mask=rg.causal)
    for fork in forks:
        out, _ = softmax.extend(*(t[:, :, 130:] for t in (q, k, v)), fork, mask=rg.causal)
        torch.testing.assert_close(out, whole[:, :, 130:], rtol=1e-12, atol=1e-12)
    out, longer = softmax.extend(*(t[order, :, 110:] for t in (q, k, v)), repeated, mask=rg.causal)
    torch.testing.assert_close(out, whole[order, :, 110:], rtol=1e-12, atol=1e-12)
    again = longer.reorder(torch.tensor([3, 1]))
    torch.testing.assert_close(again.keys, k[[0, 1]], rtol=0, atol=0)


def test_slots_share_a_prompt_and_give_it_back(whole_pages, monkeypatch):
    config = rg.DecoderConfig(vocabulary_size=61, embedding_dim=32, num_layers=2, num_heads=4, num_kv_heads=2)
    model = rg.Decoder(config).eval()
    prompt, options = [token % 61 for token in range(150)], {"max_new_tokens": 12, "n": 3, "temperature": 1.0}
    expected = rg.generate(model, [prompt], **options, seed=5)
    slotted = []
    monkeypatch.setattr(slots.SharedSlot, "__init__", _noted(slots.SharedSlot.__init__, slotted))
    monkeypatch.setattr(gpu, "serves", lambda q, v: True)
    monkeypatch.setattr(replay, "unfit", replay.uncapturable)
    texts = rg.generate(model, [prompt], **options, seed=5)
    assert [text.tokens for text in texts] == [text.tokens for text in expected]
    assert slotted
    assert all(state.runs[0].prefix_length == 128 for state in slotted)
    reading = replay.Reading(model, rg.prefill(model, [prompt]).chosen([0, 0]))
    for token in texts[0].tokens[:3]:
        reading.read([token, token], most=20)
    state = reading.prompt.state.layers[1]
    assert state.runs[0].prefix_length == 128
    whole, _ = model.extend(torch.tensor([[*prompt, *texts[0].tokens[:3]]]), model.start(batch=1, capacity=200))
    torch.testing.assert_close(reading.prompt.logits[:1], whole[:, -1], rtol=1e-4, atol=1e-4)


def _noted(make, states):
    def noted(self, state, *rest):
        states.append(state)
        make(self, state, *rest)

    return noted
