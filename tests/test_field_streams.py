"""Defects reported against the libraries of the field: caches, and linear attention in chunks and steps."""

from pathlib import Path

import pytest
import torch

import regard as rg
from field_cases import (
    PAIRS,
    B,
    G,
    H,
    K,
    V,
    close,
    every_mechanism,
    inputs,
    lower,
    plain,
    plain_weights,
    stream,
    usable_paths,
)
from regard.core.families.features import RECENT

# Caches


@every_mechanism
@pytest.mark.parametrize("cuts", [[0, 1, 2, 50, 300], list(range(0, 301, 60))], ids=["uneven", "even"])
def test_x_transformers_219_cache_on_is_cache_off(name: str, cuts: list[int]) -> None:
    """Generating with a cache gave other numbers than without (also x-transformers#311)."""
    tensors = inputs(300)
    out, _ = stream(PAIRS[name], tensors, cuts)
    assert close(out, plain(PAIRS[name], *tensors, lower(300, 300)))


@pytest.mark.parametrize("name", [name for name, mechanism in PAIRS.items() if isinstance(mechanism, rg.Softmax)])
@pytest.mark.parametrize("before", [0, 1, 4, 63, 64])
def test_transformers_37574_a_window_is_as_wide_streamed_as_whole(name: str, before: int) -> None:
    """The sliding window was off by one between the cached and the whole form (also transformers#39408)."""
    mechanism, tensors, length = PAIRS[name], inputs(150), 150
    mask = rg.causal & rg.window(before=before)
    visible = lower(length, length) & ~lower(length, length).tril(-before - 1)
    assert visible.sum(-1).tolist() == [min(i, before) + 1 for i in range(length)]
    expected = plain(mechanism, *tensors, visible)
    assert close(rg.attend(*tensors, mechanism, mask), expected)
    out, _ = stream(mechanism, tensors, [0, 1, 2, 66, 67, length], lambda _: mask)
    assert close(out, expected)


@every_mechanism
@pytest.mark.parametrize("remembered", [False, True])
def test_transformers_25420_left_padding_is_as_if_it_were_not_there(name: str, remembered: bool) -> None:
    """Left-padded rows came out otherwise than the same rows alone (also unsloth#3699)."""
    mechanism, (q, k, v), pads = PAIRS[name], inputs(200), [0, 37]

    def mask(length: int) -> rg.Mask:
        left = rg.padding(valid=torch.arange(length) >= torch.tensor(pads)[:, None])
        return rg.causal if remembered and length > 60 else rg.causal & left

    out, _ = stream(mechanism, (q, k, v), [0, 60, 61, 62, 200], mask)
    for row, pad in enumerate(pads):
        alone = tuple(t[row : row + 1, :, pad:] for t in (q, k, v))
        assert close(out[row : row + 1, :, pad:], plain(mechanism, *alone, lower(200 - pad, 200 - pad)))
        assert (out[row, :, :pad] == 0).all()


@every_mechanism
def test_transformer_lens_1005_unequal_prompts_are_each_as_alone(name: str) -> None:
    """A batch of unequal prompts, then common steps, was wrong or missing (also litgpt#345)."""
    mechanism, (q, k, v), lengths, width = PAIRS[name], inputs(60), [25, 9], 25

    def mask(length: int) -> rg.Mask:
        return rg.causal & rg.padding(lengths) if length <= width else rg.causal

    out, _ = stream(mechanism, (q, k, v), [0, width, width + 1, 60], mask)
    for row, length in enumerate(lengths):
        places = [*range(length), *range(width, 60)]
        alone = tuple(t[row : row + 1, :, places] for t in (q, k, v))
        assert close(out[row : row + 1, :, places], plain(mechanism, *alone, lower(len(places), len(places))))


@every_mechanism
def test_transformers_46612_beam_search_reorders_every_part_of_a_state(name: str) -> None:
    """Beam search did not reorder the recurrent state: it stayed with another hypothesis."""
    mechanism, tensors, past = PAIRS[name], inputs(RECENT + 80), RECENT + 60
    _, state = stream(mechanism, tensors, [0, past])
    for index in ([1, 0], [1, 1], [0, 1, 1, 0]):
        rows = tuple(t[index] for t in tensors)
        out, _ = stream(mechanism, rows, [past, past + 20], state=state.reorder(torch.tensor(index)))
        assert close(out, plain(mechanism, *rows, lower(past + 20, past + 20))[:, :, past:])


@every_mechanism
def test_fla_1272_padding_enters_neither_the_sums_nor_the_normaliser(name: str) -> None:
    """Only v was masked, so the padding's keys stayed in the normaliser (also transformers#48256)."""
    mechanism, (q, k, v) = PAIRS[name], inputs(300)
    real = torch.arange(300) >= torch.tensor([[0], [200]])
    k[~real[:, None].expand(B, G, 300)] = v[~real[:, None].expand(B, G, 300)] = 50.0
    expected = plain(mechanism, q, k, v, lower(300, 300) & real[:, None, None])
    assert close(rg.attend(q, k, v, mechanism, rg.causal & rg.padding(valid=real)), expected)
    masks = {250: rg.causal & rg.padding(valid=real[:, :250]), 300: rg.causal}
    out, _ = stream(mechanism, (q, k, v), [0, 250, 300], masks.__getitem__)
    assert close(out, expected)


# Linear attention


KERNELS = [name for name, mechanism in PAIRS.items() if not isinstance(mechanism, rg.Softmax)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("length", [63, 255, 256, 257, 600])
def test_fla_285_whole_is_chunked_is_step(name: str, length: int) -> None:
    """The whole form, the chunked form and the step form disagreed (also fla#494)."""
    mechanism, tensors = PAIRS[name], inputs(length)
    expected = plain(mechanism, *tensors, lower(length, length))
    for path in usable_paths(mechanism, *tensors, rg.causal):
        assert close(rg.attend(*tensors, mechanism, rg.causal, path=path), expected), path
    out, _ = stream(mechanism, tensors, [*range(5), *range(5, length, 50), length])
    assert close(out, expected)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sana_267_long_sequences_do_not_overflow_in_half(name: str, dtype: torch.dtype) -> None:
    """Sums over many tokens overflowed float16: they are kept in float32."""
    length = 3000
    q = k = torch.full((1, 1, length, K), 4.0, dtype=dtype)
    v = torch.full((1, 1, length, V), 30.0, dtype=dtype)
    mechanism = PAIRS[name]
    out = rg.attend(q, k, v, mechanism, rg.causal)
    assert (out.double() - 30).abs().max() <= 30 * torch.finfo(dtype).eps
    streamed, _ = stream(mechanism, (q, k, v), [0, 2990, 2991, length]) if mechanism.linear(K) else (out, None)
    assert (streamed.double() - 30).abs().max() <= 30 * torch.finfo(dtype).eps


def test_fast_transformers_130_the_crossover_is_known() -> None:
    """ "Linear is slower than softmax": from which length it is not, by the very costs that are stated."""
    work = rg.Work(query_length=1024, key_length=1024, num_heads=4, num_kv_heads=4, mask=rg.causal)
    length = rg.crossover(rg.Softmax(), rg.Quadratic(), work)

    def flops(mechanism: rg.Mechanism, at: int) -> int:
        sized = rg.Work(query_length=at, key_length=at, num_heads=4, num_kv_heads=4, mask=rg.causal)
        return rg.cost(mechanism, sized).flops

    assert length is not None
    assert flops(rg.Quadratic(), length) < flops(rg.Softmax(), length)
    assert flops(rg.Quadratic(), length - 1) >= flops(rg.Softmax(), length - 1)


@pytest.mark.parametrize("name", KERNELS)
def test_performer_pytorch_85_attention_maps_of_linear_attention(name: str) -> None:
    """ "Attention maps are not possible" with linear attention: they are, exactly."""
    mechanism, (q, k, v) = PAIRS[name], inputs(30)
    weights = rg.weights(q, k, mechanism, rg.causal)
    assert (weights >= 0).all()
    assert close(weights, plain_weights(mechanism, q, k, lower(30, 30)))
    out = weights @ v.repeat_interleave(H // G, dim=1)
    assert close(out, rg.attend(q, k, v, mechanism, rg.causal, path="chunked" if mechanism.linear(K) else None))


def test_fast_transformers_128_there_is_nothing_to_compile() -> None:
    """A compiled extension did not build: the package is Python only."""
    files = [file for file in Path(rg.__file__).parent.rglob("*") if file.is_file()]
    sources = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".pyx", ".so", ".pyd"}
    assert files
    assert [file.name for file in files if file.suffix in sources] == []
