"""Runs every GPU kernel once, on small shapes with odd lengths, under a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python benchmarks/sanitize.py band

Without PyTorch's caching allocator each tensor is a separate allocation, so that an out-of-bounds access is detected.
"""

import sys

import torch

import regard as rg
from regard.core.kernels import band_attention, decode_attention, elementwise
from regard.core.states.buffer import quantize


def tokens(heads: int, count: int, size: int, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(batch, heads, count, size, device="cuda", dtype=dtype)


def derived(path: str, queries: int, keys: int, size: int, value: int, mask: rg.Mask | None, groups: int = 1) -> None:
    """Call a path, forward and backward."""
    leaves = [
        t.requires_grad_() for t in (tokens(2, queries, size), tokens(groups, keys, size), tokens(groups, keys, value))
    ]
    out = rg.attend(*leaves, mask=mask, path=path)
    torch.autograd.grad(out, leaves, torch.randn_like(out))


def band() -> None:
    derived("band", 77, 130, 40, 33, rg.causal)
    derived("band", 130, 130, 64, 64, rg.causal & rg.window(before=20))
    derived("band", 130, 130, 64, 64, rg.padding([101, 3]))
    derived("band", 130, 70, 128, 128, rg.causal)


def band_with_nan() -> None:
    """Keys and values that are not finite: tiles are computed again, with their gradients."""
    for size in (64, 128):
        q, k, v = tokens(4, 200, size), tokens(2, 200, size), tokens(2, 200, size)
        k[0, :, 150], v[1, :, 120] = torch.nan, torch.inf
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = rg.attend(*leaves, mask=rg.causal & rg.window(before=70), path="band")
        grads = torch.autograd.grad(out[:, :, :100].float().sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads)


def packed() -> None:
    derived("band", 130, 130, 64, 64, rg.causal & rg.segments(torch.arange(130)[None] // 41))


def split() -> None:
    with torch.no_grad():
        rg.attend(tokens(8, 1, 64), tokens(2, 3001, 64), tokens(2, 3001, 64), path="split")
        rg.attend(tokens(6, 5, 40), tokens(2, 177, 40), tokens(2, 177, 33), mask=rg.causal, path="split")
        rule = rg.causal & rg.window(before=30) & rg.padding([177, 20])
        rg.attend(tokens(6, 1, 128), tokens(2, 177, 128), tokens(2, 177, 128), mask=rule, path="split")
    (k, k_scale), (v, v_scale) = quantize(tokens(3, 300, 64)), quantize(tokens(3, 300, 64))
    length = torch.tensor([234], dtype=torch.int32, device="cuda")
    decode_attention.forward(tokens(9, 1, 64), k, v, 0.125, scales=(k_scale, v_scale), length=length)


def shared_prompt() -> None:
    """Rows that share a prompt, by few queries and by decode steps."""
    softmax, dtype = rg.Softmax(), torch.bfloat16
    state = softmax.start(
        batch=2, num_kv_heads=2, qk_length=40, value_length=33, capacity=600, dtype=dtype, device="cuda"
    )
    _, state = softmax.extend(tokens(6, 300, 40), tokens(2, 300, 40), tokens(2, 300, 33), state, mask=rg.causal)
    state = state.reorder(torch.tensor([0, 1, 1], device="cuda"))
    for count in (5, 1, 1):
        new = (tokens(heads, count, size, 3) for heads, size in ((6, 40), (2, 40), (2, 33)))
        _, state = softmax.extend(*new, state, mask=rg.causal & rg.window(before=250))
    assert state.has_prefix


def mend() -> None:
    q, k, v, grad = tokens(4, 130, 64), tokens(2, 130, 64), tokens(2, 130, 64), tokens(4, 130, 64)
    v[0, 1, 20] = torch.nan
    out, lse = torch.full_like(q, torch.nan), torch.zeros(q.shape[:3], device="cuda")
    work = band_attention.work_of(q, k, v, 0.125, None, 0)
    band_attention.mend(work, q, k, v, out, lse)
    grads = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    band_attention.mend_backward(work, q, k, v, grad, out, lse, grads)


def each_token() -> None:
    x = tokens(1, 5, 100)
    elementwise.rms_norm(x, torch.ones(100, device="cuda", dtype=x.dtype), 1e-6)
    tables = torch.randn(5, 20, device="cuda"), torch.randn(5, 20, device="cuda")
    elementwise.turn(tokens(3, 5, 20), tokens(2, 5, 20), *tables, False)
    elementwise.gated(x.clone(), x)


def stream(mechanism: rg.Mechanism, size: int, value: int) -> None:
    sizes = {"batch": 2, "num_kv_heads": 2, "qk_length": size, "value_length": value}
    state = mechanism.start(**sizes, dtype=torch.bfloat16, device="cuda")
    length = 0
    with torch.no_grad():
        for count in (300, 1, 61, *[1] * 10, 150):
            length += count
            rule = rg.causal & rg.padding(valid=torch.arange(length) >= torch.tensor([[0], [77]]))
            new = tokens(4, count, size), tokens(2, count, size), tokens(2, count, value)
            _, state = mechanism.extend(*new, state, mask=rule)


def steps(mechanism: rg.Mechanism, size: int, value: int) -> None:
    """Decode steps without padding, in which the attention kernel also stores the new key and value."""
    sizes = {"batch": 2, "num_kv_heads": 2, "qk_length": size, "value_length": value, "capacity": 150}
    state = mechanism.start(**sizes, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for count in (60, *[1] * 90):
            new = tokens(6, count, size), tokens(2, count, size), tokens(2, count, value)
            _, state = mechanism.extend(*new, state, mask=rg.causal)


def short(mechanism: rg.Mechanism) -> None:
    """A single chunk with gradients, and repeated calls without."""
    inputs = tokens(4, 300, 64), tokens(2, 300, 64), tokens(2, 300, 64)
    for mask in (rg.causal, rg.causal & rg.padding([300, 133])):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = rg.attend(*leaves, mechanism, mask, path="fused")
        torch.autograd.grad(out, leaves, torch.randn_like(out))
    with torch.no_grad():
        for _ in range(4):
            rg.attend(*inputs, mechanism, rg.causal)


def fused(mechanism: rg.Mechanism) -> None:
    leaves = [t.requires_grad_() for t in (tokens(4, 700, 64), tokens(2, 700, 64), tokens(2, 700, 64))]
    out = rg.attend(*leaves, mechanism, rg.causal & rg.padding([700, 333]), path="fused")
    torch.autograd.grad(out, leaves, torch.randn_like(out))


KERNELS = {
    "band": band,
    "band_with_nan": band_with_nan,
    "packed": packed,
    "split": split,
    "shared_prompt": shared_prompt,
    "mend": mend,
    "each_token": each_token,
    "elu_stream": lambda: stream(rg.Elu(), 64, 64),
    "elu_stream_33": lambda: stream(rg.Elu(), 33, 20),
    "quadratic_stream": lambda: stream(rg.Quadratic(), 32, 40),
    "given_stream": lambda: stream(rg.Kernel(feature_map=torch.relu), 64, 32),
    "softmax_steps": lambda: steps(rg.Softmax(), 40, 33),
    "quadratic_steps": lambda: steps(rg.Quadratic(), 40, 33),
    "elu_steps": lambda: steps(rg.Elu(), 64, 64),
    "quadratic_short": lambda: short(rg.Quadratic()),
    "elu_short": lambda: short(rg.Elu()),
    "quadratic": lambda: fused(rg.Quadratic()),
    "elu": lambda: fused(rg.Elu()),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or KERNELS:
        KERNELS[name]()
        torch.cuda.synchronize()
        print(name, "ran", flush=True)
