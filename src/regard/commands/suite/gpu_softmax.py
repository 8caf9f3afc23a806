"""Softmax on a GPU against PyTorch's backends, and a decoder's token against transformers, in one run.

Times are GPU times: calls over several sets of inputs, which together exceed the cache, are captured in a CUDA graph,
and the graph is replayed; the result is the median of seven replays. Every row is first compared with the plain formula
in float64 on a shorter input, and is not timed unless it is within the error budget.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.core.attention import attend, explain
from regard.core.laws.case import within_budget
from regard.core.masks import Mask, Padding, Segments, causal, padding, segments, window
from regard.core.mechanisms import Softmax
from regard.inference.generation import generate
from regard.models.decoder import Decoder, DecoderConfig

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LONGEST = {"cuDNN": 1 << 20, "flash": 8192, "efficient": 2048}
"""The largest length at which a backend is timed; beyond, it is far slower."""
CACHE = 120_000_000
"""The least number of bytes of inputs that calls rotate through: twice the cache of an H200."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DECODE = [(batch, keys, groups) for batch, keys in ((1, 131072), (8, 16384), (64, 4096)) for groups in (32, 8, 1)]
SMOLLM2 = {
    "vocabulary_size": 49152, "embedding_dim": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3,
    "hidden_dim": 1536, "context_length": 8192, "rotary_base": 1e5, "norm_epsilon": 1e-5,
}  # fmt: skip


def milliseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """The GPU time of a call, by replays of a CUDA graph of many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # plans and compilation, which a capture must not do
        for run in runs:
            run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    runs[0]()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(20, math.ceil(3 / begin.elapsed_time(end) / len(runs))))
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    for _ in range(8):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    graph.reset()
    return sorted(times[1:])[3] / rounds / len(runs)


def inputs(shapes: Sequence[tuple[int, ...]], derived: bool = False) -> list[list[Tensor]]:
    """Several sets of random tensors, which together exceed the cache."""
    nbytes = sum(2 * math.prod(shape) for shape in shapes)
    return [
        [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=derived) for shape in shapes]
        for _ in range(max(1, min(8, math.ceil(CACHE / nbytes))))
    ]


def check(shapes: Sequence[tuple[int, ...]], mask: Mask | None, derived: bool) -> None:
    """Raise unless output and gradients are within the error budget."""
    [tensors] = inputs(shapes)[:1]
    q, k = tensors[:2]
    visible = None if mask is None else mask.visible(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).cuda()
    leaves = [[t.to(kind).requires_grad_(derived) for t in tensors] for kind in (q.dtype, torch.float64, q.dtype)]
    softmax, outs = Softmax(), [attend(leaves[0][0], leaves[0][1], leaves[0][2], mask=mask)]
    outs += [softmax.mix(softmax.weigh(a, b, visible).to(a.dtype), c).to(a.dtype) for a, b, c in leaves[1:]]
    within_budget("output", *outs)
    if derived:
        grad = torch.randn_like(outs[0])
        grads = [torch.autograd.grad(out, some, grad.to(out.dtype)) for out, some in zip(outs, leaves, strict=True)]
        for name, *some in zip("qkv", *grads, strict=True):
            within_budget(f"gradient of {name}", *some, gradient=True)


def timed(run: Callable[..., Tensor], sets: list[list[Tensor]], derived: bool) -> float | None:
    """The time of a call over all sets, with its backward pass if `derived`; None if it does not run."""

    def call(tensors: list[Tensor]) -> Any:
        out = run(*tensors)
        return torch.autograd.grad(out, tensors, grad) if derived else out

    try:
        grad = torch.randn_like(run(*sets[0])) if derived else None
        return milliseconds([lambda tensors=tensors: call(tensors) for tensors in sets])  # type: ignore[misc]
    except RuntimeError:  # what SDPA raises if a backend does not support the inputs
        return None


def backend(name: str, **options: Any) -> Callable[..., Tensor]:
    """One of SDPA's backends."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)

    return run


def row(name: str, shapes: Sequence[tuple[int, ...]], mask: Mask | None, derived: bool, peers: dict[str, Any]) -> Any:
    """Time ours and the peers on one shape."""
    short = [(min(shape[0], 2), *shape[1:2], min(shape[2], 2048), shape[3]) for shape in shapes]
    check(short, mask if short == list(shapes) else _shortened(mask, short[1][2]), derived)
    sets = inputs(shapes, derived)
    q, k, v = sets[0]
    path = explain(q, k, v, mask=mask).path
    ours = timed(lambda q, k, v: attend(q, k, v, mask=mask), sets, derived)
    theirs = {peer: timed(run, sets, derived) for peer, run in peers.items()}
    served = {peer: value for peer, value in theirs.items() if value is not None}
    assert ours is not None
    return {"name": name, "path": path, **compared(ours, served)}


def compared(ours_ms: float, peers_ms: dict[str, float]) -> dict[str, Any]:
    """Times, and the ratio of each peer's time to ours."""
    ratios = {peer: value / ours_ms for peer, value in peers_ms.items()}
    return {"ours_ms": ours_ms, "peers_ms": peers_ms, "ratios": ratios}


def _shortened(mask: Mask | None, keys: int) -> Mask | None:
    """A mask of the same kind for at most two rows of `keys` tokens."""

    def part(whole: Mask) -> Mask:
        if isinstance(whole, Padding):
            return padding([keys, keys // 3])
        return segments(torch.arange(keys)[None] // 300) if isinstance(whole, Segments) else whole

    return None if mask is None else reduce(and_, map(part, chain(*mask.terms())))


def softmax_rows(lengths: Sequence[int] = LENGTHS) -> list[Any]:
    """Causal, batch 1, 16 heads."""
    return [
        row(
            f"causal, D={size}, N={length}, {'forward + backward' if derived else 'forward'}",
            [(1, 16, length, size)] * 3,
            causal,
            derived,
            {name: backend(name, is_causal=True) for name, most in LONGEST.items() if length <= most},
        )
        for size in (64, 128)
        for length in lengths
        for derived in (False, True)
    ]


def decode_rows() -> list[Any]:
    """One query, 32 heads of 128."""
    rows = []
    for batch, keys, groups in DECODE:
        shapes = [(batch, 32, 1, 128), (batch, groups, keys, 128), (batch, groups, keys, 128)]
        measured = row(
            f"decode, batch {batch}, {keys} keys, {groups} kv heads",
            shapes,
            None,
            False,
            {name: backend(name) for name in ("cuDNN", "flash")},
        )
        measured["terabytes_per_s"] = 4 * math.prod(shapes[1]) / measured["ours_ms"] / 1e9
        rows.append(measured)
    return rows


def window_rows(passes: Sequence[bool] = (False, True)) -> list[Any]:
    """window(before=511), causal, 65,536 tokens, 16 heads, against compiled FlexAttention with a prepared block mask;
    the forward pass, and forward and backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex: Any = torch.compile(flex_attention)
    blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 511), None, None, 65536, 65536, device="cuda")
    return [
        row(
            f"window(before=511), D={size}, N=65536, {'forward + backward' if derived else 'forward'}",
            [(1, 16, 65536, size)] * 3,
            causal & window(before=511),
            derived,
            {"flex_attention, compiled": lambda q, k, v: flex(q, k, v, block_mask=blocks)},
        )
        for size in (64, 128)
        for derived in passes
    ]


def padded_rows() -> list[Any]:
    """64 rows of 64 to 1,024 tokens, 16 heads of 64, against cuDNN over the padded batch: packed into one row, and
    padded, where padded queries have an output, too."""
    lengths = torch.linspace(64, 1024, 64).long().tolist()
    shapes = [(64, 16, 1024, 64)] * 3
    rule = padding(lengths)
    packed = []
    for derived in (False, True):
        ids = torch.arange(64).repeat_interleave(torch.tensor(lengths))[None]
        measured = row(
            f"64 rows of 64 to 1,024 tokens, packed, causal, {'forward + backward' if derived else 'forward'}",
            [(1, 16, ids.shape[1], 64)] * 3,
            causal & segments(ids),
            derived,
            {},
        )
        peer = timed(backend("cuDNN", is_causal=True), inputs(shapes, derived), derived)
        assert peer is not None
        packed.append({**measured, **compared(measured["ours_ms"], {"cuDNN over the padded batch": peer})})
    return packed + [
        row(
            f"64 rows of 64 to 1,024 tokens, {name}, {'forward + backward' if derived else 'forward'}",
            shapes,
            causal & rule if name == "causal" else rule,
            derived,
            {"cuDNN over the padded batch": backend("cuDNN", is_causal=name == "causal")},
        )
        for name in ("causal", "not causal")
        for derived in (False, True)
    ]


def token_rows(batches: Sequence[int] = (1, 16), compiled: bool = True) -> list[Any]:
    """One token of a decoder of SmolLM2's form with random weights, against transformers' generate."""
    peers = _transformers(batches, compiled)
    rows = []
    for mechanism in ("softmax", "quadratic"):
        model = Decoder(DecoderConfig(**SMOLLM2, mechanism=mechanism)).cuda().bfloat16().eval()  # type: ignore[arg-type]
        nbytes = sum(t.nbytes for t in model.parameters())
        for batch in batches:
            prompts = torch.randint(49152, (batch, 64)).tolist()

            def run(count: int, prompts: Any = prompts, model: Any = model) -> None:
                generate(model, prompts, max_new_tokens=count)

            ours = per_token(run)
            theirs = peers.get(batch, {}) if mechanism == "softmax" else {}
            rows.append(
                {
                    "name": f"one token of SmolLM2's form, {mechanism}, batch {batch}",
                    **compared(ours, theirs),
                    "tokens_per_s": batch / ours * 1e3,
                    "terabytes_per_s": nbytes / ours / 1e9,
                }
            )
    return rows


def per_token(run: Callable[[int], Any], few: int = 16, many: int = 112) -> float:
    """Milliseconds per token, from the difference between a long and a short text: the median of three."""

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(count)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for count in (few, many):
        seconds(count)
    return sorted((seconds(many) - seconds(few)) / (many - few) * 1e3 for _ in range(3))[1]


def _transformers(batches: Sequence[int], compiled: bool) -> dict[int, dict[str, float]]:
    """Milliseconds per token of transformers' Llama of the same sizes; empty if transformers is not installed."""
    try:
        import transformers
    except ImportError:
        return {}
    library: Any = transformers
    form = library.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = library.LlamaForCausalLM(form).cuda().bfloat16().eval()
    times: dict[int, dict[str, float]] = {}
    for batch in batches:
        ids = torch.randint(49152, (batch, 64), device="cuda")

        def run(count: int, ids: Tensor = ids, **options: Any) -> None:
            fixed = {"min_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **fixed, **options)

        times[batch] = {"transformers, eager": per_token(run, 8, 40)}
        if compiled:
            # One length only: each length has its own static cache, and so its own compilation. Prefill is included.
            for _ in range(2):
                run(160, cache_implementation="static")
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(160, cache_implementation="static")
            torch.cuda.synchronize()
            times[batch]["transformers, static cache, compiled"] = (time.perf_counter() - start) / 160 * 1e3
    return times


def run() -> list[Any]:
    """All rows."""
    torch.manual_seed(0)
    return [*softmax_rows(), *decode_rows(), *window_rows(), *padded_rows(), *token_rows()]
