"""KV caches whose rows share tokens, as a GPU reads them: the kernel on the CPU, in Triton's interpreter, and slots."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.core.kernels import decode_attention
from regard.core.laws.case import within_budget
from regard.core.masks.structure import part_of
from regard.core.paths import gpu, shared_gpu, slots
from regard.core.states import key_value_runs
from regard.core.states.buffer import Buffer, quantize
from regard.core.states.key_value_runs import Prefix, Run
from regard.inference.generation import replay

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOTAL = 61 + 30 + 13
LEFT = rg.padding(valid=torch.arange(TOTAL) >= torch.tensor([[5], [7], [5], [70]]))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch, launches):
    """Steps so small that a hundred tokens cross every border."""
    decode_attention._work.cache_clear()
    monkeypatch.setattr(decode_attention, "plan", lambda *_: (decode_attention.Launch(16, 4, 1, (1.0,), (1.0,)), 3))


def made(rows, room, used, groups=2, length=16, value_length=8):
    return Buffer(torch.randn(rows, groups, room, length), torch.randn(rows, groups, room, value_length), used)


def run():
    """Four rows: 61 tokens of rows 1, 0, 1 and 2 of a buffer, then 30 of another's own, then 13."""
    prefixes = Prefix(made(3, 80, 70), 61, (1, 0, 1, 2)), Prefix(made(4, 50, 40), 30, (0, 1, 2, 3))
    return Run((0, 1, 2, 3), made(4, 40, 13), waiting=False, prefixes=prefixes)


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
    cache, q = run(), torch.randn(4, 6, queries, 16)
    out = shared_gpu.attend(rg.Softmax(), q, cache, TOTAL, mask)
    k, v = cache.read(0, TOTAL), cache.read(1, TOTAL)
    exact = rg.attend(q.double(), k.double(), v.double(), mask=mask, path="reference")
    within_budget("output", out, exact, rg.attend(q, k, v, mask=mask, path="reference"))


def test_a_new_token_is_stored_in_the_last_buffer():
    cache, q, new = run(), torch.randn(4, 6, 1, 16), (torch.randn(4, 2, 1, 16), torch.randn(4, 2, 1, 8))
    before = [tensor.clone() for part in cache.prefixes for tensor in part.buffer.tensors]
    length = torch.tensor([TOTAL + 1], dtype=torch.int32)
    out = decode_attention.forward_parts(q, shared_gpu.parts(cache), TOTAL + 20, 0.25, length=length, new=new)
    k, v = cache.read(0, TOTAL + 1), cache.read(1, TOTAL + 1)
    assert torch.equal(k[:, :, -1:], new[0])
    assert torch.equal(v[:, :, -1:], new[1])
    assert all(map(torch.equal, before, [tensor for part in cache.prefixes for tensor in part.buffer.tensors]))
    exact = rg.attend(q.double(), k.double(), v.double(), path="reference")
    within_budget("output", out, exact, exact.float())


def test_int8_parts():
    cache, q = run(), torch.randn(4, 6, 1, 16)

    def small(whole):
        (k, k_scale), (v, v_scale) = map(quantize, whole.tensors)
        return Buffer(k, v, whole.used, scales=(k_scale, v_scale), rounded=torch.float32)

    prefixes = tuple(replace(prefix, buffer=small(prefix.buffer)) for prefix in cache.prefixes)
    cache = replace(cache, buffer=small(cache.buffer), prefixes=prefixes)
    out = shared_gpu.attend(rg.Softmax(), q, cache, TOTAL, None)
    exact = rg.attend(q.double(), cache.read(0, TOTAL).double(), cache.read(1, TOTAL).double(), path="reference")
    within_budget("output", out, exact, exact.float())


def test_a_masked_nan_in_shared_tokens_stays_where_it_is():
    cache, q = run(), torch.randn(4, 6, 3, 16)
    cache.prefixes[0].buffer.keys[1, :, 6] = torch.nan
    cache.buffer.values[3, :, 12] = torch.nan
    out = shared_gpu.attend(rg.Softmax(), q, cache, TOTAL, rg.causal & LEFT)
    assert out[[0, 2]].isnan().all()
    assert not out[1].isnan().any()
    assert out[3, :, 2].isnan().all()
    assert not out[3, :, :2].isnan().any()
    out = shared_gpu.attend(rg.Softmax(), q, cache, TOTAL, rg.causal & rg.window(before=20))
    assert not out[:3].isnan().any()


def reason(mechanism=rg.Softmax(), q=None, cache=None, mask=rg.causal):  # noqa: B008 - frozen values
    q, cache = torch.randn(4, 6, 1, 16) if q is None else q, cache or run()
    return shared_gpu.cannot(mechanism, q, cache, TOTAL, part_of(mask, (0, 1, 2, 3), 0, TOTAL))


def test_what_no_kernel_serves_is_named(monkeypatch):
    assert reason() == "made for GPUs, heads of at most 128 numbers and at most float32"
    monkeypatch.setattr(gpu, "serves", lambda q, v: True)
    assert reason() is None
    assert reason(mask=rg.causal & LEFT) is None
    assert reason(rg.Softmax(softcap=5.0)) == "not plain softmax"
    with FlopCounterMode(display=False):
        assert reason() == "a mode must see every operator"
    assert "query rows" in reason(q=torch.randn(4, 6, 900, 16))
    assert "no band" in reason(mask=rg.global_tokens(3) | rg.causal)
    assert "up to each query" in reason(q=torch.randn(4, 6, 8, 16), mask=rg.window(before=3, after=3))
    assert "holes" in reason(mask=rg.padding(valid=(torch.arange(TOTAL) % 2 == 0).expand(4, -1)))
    unlike = rg.padding(valid=torch.arange(TOTAL) >= torch.tensor([[5], [5], [6], [5]]))
    assert reason(mask=unlike) == "rows that share tokens have different padding"


@pytest.fixture
def slotted(monkeypatch):
    """Kernels for GPUs serve on this CPU, steps go over slots and short prompts are shared: the states of shared slots
    that were made."""
    states = []
    monkeypatch.setattr(key_value_runs, "SHARED", 64)
    monkeypatch.setattr(slots.SharedSlot, "__init__", _noted(slots.SharedSlot.__init__, states))
    monkeypatch.setattr(gpu, "serves", lambda q, v: gpu._computes(max(q.shape[3], v.shape[3]), q.dtype))
    monkeypatch.setattr(replay, "unfit", replay.uncapturable)
    return states


def small_model(**changes):
    sizes = {"vocabulary_size": 61, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return rg.Decoder(rg.DecoderConfig(**sizes, **changes)).eval()


PROMPT = [token % 61 for token in range(150)]


@pytest.mark.parametrize("storage", [None, torch.int8], ids=str)
def test_samples_of_a_prompt_share_it_in_their_slots(storage, slotted, monkeypatch):
    model, options = small_model(), {"max_new_tokens": 12, "n": 3, "temperature": 1.0, "seed": 5, "storage": storage}
    texts = rg.generate(model, [PROMPT], **options)
    assert slotted
    assert all(state.runs[0].prefix_length == 150 for state in slotted)
    monkeypatch.undo()
    assert [text.tokens for text in texts] == [text.tokens for text in rg.generate(model, [PROMPT], **options)]


def test_prompts_padded_on_the_left_share_what_each_has(slotted, monkeypatch):
    model, options = small_model(), {"max_new_tokens": 12, "n": 2, "temperature": 1.0, "seed": 5}
    prompts = [PROMPT, PROMPT[7:]]
    texts = rg.generate(model, prompts, **options)
    assert slotted
    monkeypatch.undo()
    assert [text.tokens for text in texts] == [text.tokens for text in rg.generate(model, prompts, **options)]


def test_a_state_that_a_slot_gave_back_goes_on(slotted):
    model = small_model()
    reading = replay.Reading(model, rg.prefill(model, [PROMPT]).chosen([0, 0]))
    for token in (5, 6, 7):
        reading.read([token, token + 1], most=20)
    assert slotted
    state = reading.prompt.state
    assert state.layers[1].runs[0].prefix_length == 150
    rows = [[*PROMPT, 5, 6, 7], [*PROMPT, 6, 7, 8]]
    torch.testing.assert_close(reading.prompt.logits, model(torch.tensor(rows))[:, -1], rtol=1e-4, atol=1e-4)
    for changed, histories in (
        (state.reorder(torch.tensor([1])), rows[1:]),
        (state.crop(151), [row[:151] for row in rows]),
        (state.crop(40), [row[:40] for row in rows]),
    ):
        logits, _ = model.extend(torch.tensor([[9]] * len(histories)), changed)
        whole = model(torch.tensor([[*row, 9] for row in histories]))
        torch.testing.assert_close(logits[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)


def _noted(make, states):
    def noted(self, state, *rest):
        states.append(state)
        make(self, state, *rest)

    return noted
