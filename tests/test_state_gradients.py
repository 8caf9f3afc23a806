"""Gradients of streams, and of what autograd has saved while states go on."""

import math

import pytest
import torch

import regard as rg
from regard.core.families.features import RECENT
from streams_and_histories import (
    LONG,
    STREAMS,
    B,
    H,
    V,
    close,
    every_stream,
    piece,
    plain,
    start,
    stream,
    tokens,
    triangle,
)


@every_stream
def test_gradients_of_a_stream_are_those_of_the_whole(name: str) -> None:
    mechanism, length = STREAMS[name], RECENT + 40
    cuts = [0, 3, 4, 100, RECENT + 5, length]
    streamed = tuple(t.requires_grad_() for t in tokens(length))
    whole = tuple(t.requires_grad_() for t in tokens(length))
    to = torch.randn(B, H, length, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out, _ = stream(mechanism, streamed, cuts, start(mechanism))
    actual = torch.autograd.grad(out, streamed, to, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(
        plain(mechanism, *whole, triangle(length)), whole, to, allow_unused=True, materialize_grads=True
    )
    for gradient, wanted in zip(actual, expected, strict=True):
        assert close(gradient, wanted)


@every_stream
def test_gradients_of_the_queries_alone(name: str) -> None:
    """Frozen keys and values, trained queries: later steps must not write into what backward needs."""
    mechanism, length = STREAMS[name], 20
    if name in ("argmax", "uniform"):
        pytest.skip("no gradient reaches these queries")
    q, k, v = tokens(length)
    q.requires_grad_()
    out, _ = stream(mechanism, (q, k, v), [0, 5, 6, 7, length], start(mechanism))
    (actual,) = torch.autograd.grad(out.sum(), q)
    other = q.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(mechanism, other, k, v, triangle(length)).sum(), other)
    assert close(actual, expected)


@every_stream
def test_gradients_of_the_first_values_alone(name: str) -> None:
    """A trained prefix of values (prefix tuning), then frozen tokens: these must not be written into the prefix."""
    mechanism, length = STREAMS[name], 20
    q, k, v = tokens(length)
    prefix = v[:, :, :5].clone().requires_grad_()
    first, state = mechanism.extend(q[:, :, :5], k[:, :, :5], prefix, start(mechanism), mask=rg.causal)
    rest, _ = stream(mechanism, (q, k, v), [5, 6, 7, length], state)
    (actual,) = torch.autograd.grad(torch.cat([first, rest], dim=2).sum(), prefix)
    other = prefix.detach().clone().requires_grad_()
    whole = plain(mechanism, q, k, torch.cat([other, v[:, :, 5:]], dim=2), triangle(length))
    (expected,) = torch.autograd.grad(whole.sum(), other)
    assert close(actual, expected)


@every_stream
def test_looking_ahead_without_gradients_spoils_no_backward(name: str) -> None:
    """A no_grad continuation from a state in a graph leaves the graph as it was."""
    mechanism, length = STREAMS[name], 12
    tensors = tuple(t.requires_grad_() for t in tokens(length))
    out, state = stream(mechanism, tensors, [0, 4, 8], start(mechanism))
    with torch.no_grad():
        stream(mechanism, tensors, [8, 9, 12], state)
    actual = torch.autograd.grad(out.sum(), tensors, allow_unused=True, materialize_grads=True)
    again = tuple(t.detach().clone().requires_grad_() for t in tensors)
    whole = plain(mechanism, *again, triangle(length))[:, :, :8]
    expected = torch.autograd.grad(whole.sum(), again, allow_unused=True, materialize_grads=True)
    for gradient, wanted in zip(actual, expected, strict=True):
        assert close(gradient, wanted)


@every_stream
@pytest.mark.parametrize("cuts", [[0, 150, 199, 200, 201, 202, LONG], [0, 201, LONG], [0, LONG]], ids=str)
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_a_bad_token_spoils_no_gradient_of_queries_before_it(name: str, cuts: list[int], which: int) -> None:
    """Also where later queries, which see it, are part of the graph and get a gradient of 0."""
    many, place = tokens(LONG), 200
    many[which][:, :, place, 0] = math.nan
    leaves = tuple(t.requires_grad_() for t in many)
    out, _ = stream(STREAMS[name], leaves, cuts, start(STREAMS[name]))
    assert out[:, :, :place].isfinite().all()
    assert out[:, :, place:].isnan().any(-1).all()
    gradients = torch.autograd.grad(out[:, :, :place].sum(), leaves, allow_unused=True)  # a choice has none for queries
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@every_stream
def test_a_bad_history_spoils_no_gradient(name: str) -> None:
    mechanism, many, past = STREAMS[name], tokens(LONG), RECENT + 20
    many[2][:, :, 10, 0] = math.nan
    with torch.no_grad():
        _, state = mechanism.extend(*piece(many, 0, past), start(mechanism), mask=rg.causal)
    leaves = tuple(t.clone().requires_grad_() for t in piece(many, past, LONG))
    out, _ = stream(mechanism, leaves, [0, 1, 2, LONG - past], state)
    assert out.isnan().any(-1).all()
    gradients = torch.autograd.grad(out, leaves, torch.zeros_like(out), allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def test_a_copy_of_recorded_prefixes_is_not_written_to(monkeypatch):
    """A fork of what autograd recorded, gone on with gradients: what comes later goes to another buffer."""
    monkeypatch.setattr("regard.core.states.buffer.FORKED", 8)
    softmax = rg.Softmax()

    def tokens(count):
        return [torch.randn(1, 2, count, 16) for _ in range(3)]

    state = softmax.start(batch=1, num_kv_heads=2, qk_length=16, value_length=16, capacity=64)
    learned = [x.requires_grad_() for x in tokens(20)]
    _, state = softmax.extend(*learned, state, mask=rg.causal)
    with torch.no_grad():
        _, fork = [softmax.extend(*tokens(1), state, mask=rg.causal)[1] for _ in range(2)]
    assert fork.in_parts
    out, longer = softmax.extend(*tokens(1), fork, mask=rg.causal)
    version = longer.buffer.keys._version
    with torch.no_grad():
        softmax.extend(*tokens(1), longer, mask=rg.causal)
    assert longer.buffer.keys._version == version
    out.sum().backward()
    assert all(x.grad is not None for x in learned[1:])


@pytest.mark.parametrize("mask", [rg.causal, rg.causal & rg.window(before=9)], ids=["prefix", "gap"])
def test_a_copy_that_autograd_reads_keys_from_is_marked(mask: rg.Mask) -> None:
    """Queries with a gradient over a shared prefix, or over a gap that a window fills: both are copied first."""
    softmax, pads = rg.Softmax(), rg.padding([256, 90])
    state = softmax.start(batch=2, num_kv_heads=1, qk_length=4, value_length=4, capacity=300)
    _, state = softmax.extend(*torch.randn(3, 2, 1, 256, 4), state, mask=rg.causal & pads)
    if mask is rg.causal:
        state = state.reorder(torch.tensor([0, 0]))
    q, k, v = torch.randn(3, 2, 1, 1, 4)
    _, longer = softmax.extend(q.requires_grad_(), k, v, state, mask=mask)
    assert all(run.buffer.recorded for run in longer.runs)
