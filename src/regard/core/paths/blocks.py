"""Blocks of queries, each with only the keys that its mask can show it.

For a structured mask (sliding window, global tokens, segments, padding) a block of queries reads only the key spans
that contain all it may see, and the mask is evaluated only there. Time is proportional to the visible part, memory to
one block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.core.calls.call import Call, nothing
from regard.core.calls.choice import Path
from regard.core.eager import symbolic
from regard.core.masks import Span
from regard.core.masks.structure import QUERY_BLOCK, blocks, positions
from regard.core.paths import sdpa, torch_softmax
from regard.core.user_code import weigh

WINDOW_BLOCK = 64
"""Queries per block under a sliding window, whose spans are not much longer than the block."""


def cannot(call: Call) -> str | None:
    """Why this path cannot serve a call; None if it can."""
    if symbolic(call.queries, call.keys):
        return "a dynamic length in a trace cannot be cut into blocks"
    if call.mask is None and call.queries <= QUERY_BLOCK:
        return f"one block of {QUERY_BLOCK} queries sees all keys: nothing to split"
    return None


def run(call: Call) -> Tensor:
    """blocks of queries, each with only the keys its mask can show it."""
    return _in_blocks(call, _by_weights)


def run_fused(call: Call) -> Tensor:
    """blocks of queries, each with only the keys its mask can show it."""
    return _in_blocks(call, _by_weights if call.bias is not None or sdpa.unfit(call) is not None else _by_sdpa)


Block = Callable[[Call, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""Attention of a block's queries to its keys: call, q, k, v, what it sees, rows that see nothing, bias."""


def _in_blocks(call: Call, attend: Block) -> Tensor:
    size = WINDOW_BLOCK if call.structure.windowed else QUERY_BLOCK
    views, parts = _Views(call), []
    for start, stop, spans in blocks(call.mask, call.queries, call.keys, size):
        if not spans:
            parts.append(nothing(call, stop - start))
            continue
        visible, blind = views(start, stop, spans) if call.mask is not None else (None, None)
        bias = None if call.bias is None else _bias(call.bias, start, stop, spans)
        k, v = _gather(call.k, spans), _gather(call.v, spans)
        parts.append(attend(call, call.q[:, :, start:stop], k, v, visible, blind, bias))
    return torch.cat(parts, dim=2)


def _by_weights(
    call: Call, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, blind: Tensor | None, bias: Tensor | None
) -> Tensor:
    return call.mechanism.mix(weigh(call.mechanism, q, k, visible, bias), v).to(q.dtype)


def _by_sdpa(
    call: Call, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, blind: Tensor | None, bias: Tensor | None
) -> Tensor:
    if visible is None or blind is None:
        return torch_softmax.plain(q, k, v, scale=sdpa.scale(call), attn_mask=visible)
    q = q.masked_fill(blind, 0)
    return torch_softmax.plain(q, k, v, scale=sdpa.scale(call), attn_mask=visible | blind).masked_fill(blind, 0)


class _Views:
    """The mask of each block. A band looks the same at every position, so it is cached by the shape of the block."""

    def __init__(self, call: Call) -> None:
        self.call, self.structure = call, call.structure
        self.alike = self.structure.rest is None and len(self.structure.paddings) == 0
        # Sizes as a dictionary key would specialise dynamic ones.
        self.keeps = self.alike and not torch.compiler.is_compiling()
        self.views: dict[tuple[int, int, int], tuple[Tensor, Tensor | None]] = {}

    def __call__(self, start: int, stop: int, spans: list[Span]) -> tuple[Tensor, Tensor | None]:
        """What a block sees, broadcastable to (B, H, t, s), and its rows that see nothing, if any."""
        first = start + self.call.keys - self.call.queries
        shape = (stop - start, spans[0][1] - spans[0][0], first - spans[0][0])
        if self.keeps and shape in self.views:
            return self.views[shape]
        place = torch.arange(stop - start) + first
        assert self.call.mask is not None
        visible = self.call.mask.at(self.call.batch, self.call.heads, place, positions(spans), self.call.q.device)
        # Under a band every query sees the key at its position, if there is one.
        sees = self.alike and self.call.queries <= self.call.keys
        blind = None if sees else ~visible.any(-1, keepdim=True)
        if self.keeps:
            self.views[shape] = visible, blind
        return visible, blind


def _gather(tensor: Tensor, spans: list[Span]) -> Tensor:
    parts = [tensor[:, :, low:high] for low, high in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _bias(bias: Tensor, start: int, stop: int, spans: list[Span]) -> Tensor:
    rows = bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., start:stop, :]
    return rows if rows.ndim < 1 or rows.shape[-1] == 1 else rows[..., positions(spans).to(rows.device)]


def reads_hidden(call: Call) -> bool:
    """A single query under a band reads only the keys that it sees."""
    structure = call.structure
    return call.queries > 1 or structure.rest is not None or len(structure.paddings) > 0 or torch.is_grad_enabled()


PATH = Path("blocks", cannot, run, reads_hidden)
FUSED = Path("blocks", cannot, run_fused, reads_hidden)
"""For softmax: each block by PyTorch's fused kernel, if it can."""
