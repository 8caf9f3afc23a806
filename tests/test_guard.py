"""Nothing masked leaks, and nobody reads a number to make it so."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

import regard as rg
from broken import Similar
from regard.core.calls.choice import Path, never, refusal
from regard.core.masks.guard import all_finite, bad_keys, cleaned, poisoned
from regard.core.mechanisms import REGISTRY
from regard.core.paths import reference

B, H, G, T = 2, 4, 2, 6
LEFT = rg.padding(valid=torch.arange(T) >= torch.tensor([[0], [2]]))
MASKS = {
    "none": None,
    "causal": rg.causal,
    "window": rg.causal & rg.window(before=2),
    "padding": LEFT,
    "causal padding": rg.causal & LEFT,
}


def tensors(dtype: torch.dtype = torch.float32, length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, heads, T, length, dtype=dtype) for heads in (H, G, G))
    return q, k, v


def refuse_to_be_read(tensor: Tensor, *_: object) -> None:
    raise AssertionError(f"a number of a tensor {tuple(tensor.shape)} was read")


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse_to_be_read)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("bad", [0.0, math.nan], ids=["finite", "bad"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", REGISTRY)
def test_no_call_reads_a_number(name: str, mask: str, bad: float, grad: bool, request: pytest.FixtureRequest) -> None:
    mechanism, rule = REGISTRY[name], MASKS[mask]
    if (reason := refusal(mechanism, rule)) is not None:
        pytest.skip(reason)
    q, k, v = tensors()
    k[0, 0, 3, 1] += bad
    rg.attend(q, k, v, mechanism, rule)  # machine code is probed where it was never run, in numbers of its own
    request.getfixturevalue("unreadable")
    with torch.set_grad_enabled(grad):
        rg.attend(q, k.requires_grad_(grad), v, mechanism, rule)
        rg.weights(q, k, mechanism, rule)


@pytest.mark.parametrize("bad", [0.0, math.nan], ids=["finite", "bad"])
@pytest.mark.parametrize("mask", ["none", "causal", "causal padding"])
@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if mechanism.streams(16) is None])
def test_no_step_reads_a_number(name: str, mask: str, bad: float, request: pytest.FixtureRequest) -> None:
    mechanism, q, k, v = REGISTRY[name], *tensors()
    k[0, 0, 3, 1] += bad
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=16, value_length=16, capacity=32)
    rg.attend(q, k, v, mechanism, MASKS[mask])
    request.getfixturevalue("unreadable")
    with torch.no_grad():
        _, state = mechanism.extend(q, k, v, state, MASKS[mask])
        for _ in range(3):
            _, state = mechanism.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, rg.causal)
    assert state.length == T + 3


def test_what_is_read_is_noticed(unreadable: None) -> None:
    with pytest.raises(AssertionError, match="a number of a tensor"):
        torch.ones(1).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_taint_is_exactly_where_a_bad_number_is(dtype: torch.dtype, bad: float, which: int) -> None:
    pair = [torch.full((1, 2, 3, 5), torch.finfo(dtype).max, dtype=dtype) for _ in range(2)]  # large, and finite
    pair[0][0, 0, 1], pair[1][0, 1, 2] = -pair[0][0, 0, 1], 0
    assert not bad_keys(*pair).any()
    pair[which][0, 1, 2, 4] = bad
    assert bad_keys(*pair).nonzero().tolist() == [[0, 1, 2]]


def test_values_of_no_length_taint_nothing() -> None:
    assert not bad_keys(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 0)).any()


def test_cleaned_and_poisoned_touch_nothing_else() -> None:
    bad = torch.tensor([[[False, True, False]]])
    x = torch.randn(1, 1, 3, 4)
    assert torch.equal(cleaned(x, bad)[0, 0], torch.stack([x[0, 0, 0], torch.zeros(4), x[0, 0, 2]]))
    out = poisoned(x, rg.causal, bad)
    assert torch.equal(out[0, 0, 0], x[0, 0, 0])
    assert out[0, 0, 1:].isnan().all()
    assert cleaned(x, None) is x
    assert poisoned(x, rg.causal, None) is x


class ClaimsToReadNothingHidden(Similar):
    def paths(self) -> tuple[Path, ...]:
        return (Path("careless", reference.cannot, reference.run, never),)


def test_a_path_that_claims_what_it_does_not_do_is_caught() -> None:
    q, k, v = tensors(torch.float64)
    v[0, 0, 5] = math.nan
    assert rg.attend(q, k, v, Similar(), rg.causal)[0, : H // G, :5].isfinite().all()
    report = rg.check(ClaimsToReadNothingHidden(), laws=["leakless"], dtypes=["float64"], masks=["causal"], examples=3)
    assert report.broken


def test_training_takes_numbers_to_be_finite() -> None:
    _, k, v = tensors()
    with all_finite():
        assert bad_keys(k, v) is None
    assert bad_keys(k, v) is not None


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("length", [16, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, rg.causal, rg.padding([1]), rg.causal & rg.padding([1])], ids=str)
def test_a_bad_key_that_is_alone_shows(mask: rg.Mask | None, dtype: torch.dtype, length: int, grad: bool) -> None:
    count = 1 if mask in (None, rg.causal) else 3
    q, k, v = (torch.randn(1, heads, count, length, dtype=dtype, requires_grad=grad) for heads in (2, 1, 1))
    bad = torch.where(torch.arange(count)[:, None] == 0, math.nan, k)
    with torch.set_grad_enabled(grad):
        out = rg.attend(q, bad, v, rg.Softmax(), mask)
    assert out[:, :, 0].isnan().all()
    state = rg.Softmax().start(batch=1, num_kv_heads=1, qk_length=length, value_length=length, dtype=dtype)
    out, _ = rg.Softmax().extend(q[:, :, :1], bad[:, :, :1], v[:, :, :1], state, rg.causal)
    assert out.isnan().all()


def test_masks_and_tables_are_not_kept_alive() -> None:
    q, k, v = tensors()
    alive = []
    gc.disable()
    try:
        for _ in range(5):
            mask = rg.dense(torch.rand(T, T) > 0.3)
            alive.append(weakref.ref(mask))
            rg.attend(q, k, v, mask=mask)
            padding = rg.padding(valid=torch.tensor([[True, False, True, True, True, True]] * B))
            alive.append(weakref.ref(padding))
            rg.attend(q, k, v, mask=rg.causal & padding)
        del mask, padding
        assert not any(reference() for reference in alive)
    finally:
        gc.enable()


def test_a_state_keeps_no_tables_of_steps_that_are_over() -> None:
    mechanism, (q, k, v) = rg.Softmax(), tensors()
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=16, value_length=16, capacity=64)
    holes = rg.padding(valid=torch.tensor([[True, False, True, True, True, True]] * B))
    _, state = mechanism.extend(q, k, v, state, rg.causal & holes)
    steps = []
    for _ in range(4):
        _, state = mechanism.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state, rg.causal)
        steps.append(weakref.ref(state.padding))
    del state
    gc.collect()
    assert not any(reference() for reference in steps)
