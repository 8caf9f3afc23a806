"""Multi-head attention: projections around a mechanism.

    q, k, v = split(W_q x_q), split(W_k x_k), split(W_v x_v)
    out     = W_o combine(attend(q, k, v))

`num_kv_heads` gives grouped-query (GQA) and, with 1, multi-query attention (MQA). Any mechanism works; the layer only
adds projections, rotary positions and, in training, dropout of attention weights. The mechanism's tensors belong to the
layer: they are in its `parameters()` and `state_dict()`, and `.to` moves them.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from regard.core.attention import attend, weights
from regard.core.calls.call import ordered
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Band, Mask, MaskFunction, Packed, as_mask
from regard.core.masks.guard import bad_keys, cleaned, poisoned
from regard.core.masks.structure import structure_of
from regard.core.mechanisms import Softmax, named
from regard.core.paths import gpu, split
from regard.core.tensors import constants, named_tensors, real_place, replaced
from regard.models.layers.linear import Linear, projections
from regard.models.layers.positions import Rotary, Tables
from regard.models.layers.ragged import Ragged

AnyMask = Mask | MaskFunction | Tensor | None


def as_mechanism(mechanism: Mechanism | str) -> Mechanism:
    """The mechanism itself, or the shipped mechanism with that name.

    >>> from regard.models.layers.attention import as_mechanism
    >>> as_mechanism("quadratic")
    Quadratic(c=1.0)
    """
    if isinstance(mechanism, str):
        return named(mechanism)
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax() or a name, got {mechanism!r}")
    return mechanism


def own_copy(mechanism: Mechanism | str) -> Mechanism:
    """A mechanism with copies of its tensors, for one layer: layers do not share what they learn.

    >>> import regard as rg, torch
    >>> shared = rg.Kernel(feature_map=torch.nn.Linear(4, 6))
    >>> own_copy(shared).feature_map.weight is shared.feature_map.weight
    False
    """
    mechanism = as_mechanism(mechanism)
    return replaced(mechanism, copy.deepcopy(mechanism.tensors()))


def without_mechanisms(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a module, without those that belong to mechanisms."""
    places = [inner for inner in module.modules() if isinstance(inner, Attend)]
    brought = {id(inner) for place in places for inner in place.modules() if inner is not place}
    return (inner for inner in module.modules() if id(inner) not in brought)


def check_learned(mechanism: Mechanism, qk_length: int) -> None:
    """Raise ValueError for a mechanism with tensors that a layer cannot register, or one that fails at qk_length."""
    for name, value in vars(mechanism).items():
        if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
            raise ValueError(
                f"{name}: expected an nn.Parameter, which a layer can register, got a tensor with requires_grad"
            )
        if isinstance(value, tuple | list | dict) and any(
            isinstance(part, Tensor | nn.Module) for part in tree_leaves(value)
        ):
            raise ValueError(
                f"{name}: expected tensors in fields of their own, or in an nn.ParameterList, nn.ModuleList or other "
                f"module, which a layer can register, got a {type(value).__name__} of them"
            )
    names = _captured_names(mechanism)
    try:
        learned, plain = mechanism.captured(qk_length), constants(mechanism, qk_length)
    except RuntimeError as error:
        if names:  # of another dtype or size, perhaps
            raise _stray("tensors", mechanism, list(names.values())) from error
        raise ValueError(
            f"mechanism: expected one that works with qk_length = {qk_length}, got {type(mechanism).__name__}, "
            f"which raises {str(error).splitlines()[0]}"
        ) from error
    if learned or plain:
        raise _stray("learned tensors" if learned else "tensors", mechanism, learned or plain)


def _stray(kind: str, mechanism: Mechanism, tensors: list[Tensor]) -> ValueError:
    """The error for tensors that a layer could not train, move or save."""
    names = {id(tensor): name for name, tensor in _captured_names(mechanism).items()}
    listed = ", ".join(f"{names.get(id(tensor), 'tensor without a name')} {tuple(tensor.shape)}" for tensor in tensors)
    return ValueError(
        f"mechanism: expected its {kind} in fields, as nn.Parameter, tensor or nn.Module, so that a layer registers "
        f"them, got {type(mechanism).__name__}, whose function captures {listed}"
    )


def _captured_names(mechanism: Mechanism) -> dict[str, Tensor]:
    """Tensors that the functions of a mechanism refer to and that are not among its fields."""
    formulas = [] if mechanism.shipped else [value for value in vars(type(mechanism)).values() if callable(value)]
    functions = [value for value in vars(mechanism).values() if not isinstance(value, Tensor | nn.Module)]
    return {name: tensor for function in (*functions, *formulas) for name, tensor in named_tensors(function).items()}


class Attend(nn.Module):
    """A mechanism as a module. All attention of a model goes through modules of this class, where a trace records it.

    The mechanism's tensors and modules are registered under the names of its fields; they are not copied.

    `dropout` drops attention weights in training, except when a state is extended.

    >>> import regard as rg, torch
    >>> from regard.models.layers.attention import Attend
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> out, _ = Attend(rg.Quadratic())(q, k, v, rg.causal)
    >>> torch.equal(out, rg.attend(q, k, v, rg.Quadratic(), rg.causal))
    True
    """

    def __init__(self, mechanism: Mechanism, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self._mechanism, self._fields = dropout, mechanism, tuple(mechanism.tensors())
        for name, value in mechanism.tensors().items():
            if hasattr(self, name):
                raise ValueError(
                    f"{name}: expected a field of another name, since the layer that registers it has an attribute of "
                    f"that name, got {type(mechanism).__name__}"
                )
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism with the tensors that are registered now: `.to`, `load_state_dict` and
        `torch.func.functional_call` replace the original ones."""
        tensors = {name: getattr(self, name) for name in self._fields}
        if all(value is getattr(self._mechanism, name) for name, value in tensors.items()):
            return self._mechanism
        return replaced(self._mechanism, tensors)

    # What is remembered of a mechanism (`user_code.read_only`) is remembered by its identity: where torch replaces
    # registered tensors for good, the mechanism with the new tensors is kept. `functional_call` lends its tensors.
    # A parametrized tensor is computed at each access and cannot be kept.
    def _apply(self, *arguments: Any, **options: Any) -> "Attend":
        nn.Module._apply(self, *arguments, **options)
        self._keep_mechanism()
        return self

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self._keep_mechanism()

    def _keep_mechanism(self) -> None:
        if not is_parametrized(self):
            self._mechanism = self.mechanism

    def forward(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S V"],
        mask: AnyMask = None,
        bias: Float[Tensor, "..."] | None = None,
        state: Any = None,
        *,
        cross: bool = False,
    ) -> tuple[Float[Tensor, "B H T V"], Any]:
        """The output and, if a state was given, the longer state; k and v are then those of the new tokens only.

        `cross` tells a trace that keys and values come from another sequence than the queries.
        """
        mechanism = self.mechanism
        if state is not None:
            return state.extended(mechanism, q, k, v, mask, bias)
        if self.training and self.dropout > 0:
            # Dropout needs the attention weights, so the plain formula computes them. Only a mask keeps a NaN out,
            # since 0 · NaN is NaN.
            mask = ordered(mechanism, as_mask(mask))
            bad = None if mask is None else bad_keys(k, v)
            kept = F.dropout(weights(q, cleaned(k, bad), mechanism, mask, bias=bias), self.dropout)
            visible = None if mask is None else mask.visible(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
            out = mechanism.mix(kept, cleaned(v, bad), visible).to(q.dtype)
            return poisoned(out, mask, bad), None
        return attend(q, k, v, mechanism, mask, bias=bias), None

    def extra_repr(self) -> str:
        return repr(self.mechanism)


class MultiHeadAttention(nn.Module):
    """Attention with projections, (B, T, E) to (B, T, E): self-attention, or cross-attention to inputs of any width.

    >>> import regard as rg, torch
    >>> layer = rg.MultiHeadAttention(embedding_dim=32, num_heads=4, num_kv_heads=2, mechanism="quadratic")
    >>> x = torch.randn(2, 10, 32)
    >>> y = layer(x, mask=rg.causal & rg.padding([10, 7]))
    >>> state = layer.start(batch=2, capacity=16)
    >>> first, state = layer.extend(x[:, :6], state, mask=rg.causal)
    >>> torch.allclose(first, y[:, :6], atol=1e-5)
    True
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        qk_length: int | None = None,
        value_length: int | None = None,
        mechanism: Mechanism | str = Softmax(),  # noqa: B008 - a frozen value
        bias: bool = True,
        dropout: float = 0.0,
        *,
        output_bias: bool | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        """`bias` is for all projections, `output_bias` for W_o if it differs. `key_dim` and `value_dim` are the widths
        of the inputs that keys and values are computed from, by default embedding_dim. The tensors of `mechanism` are
        not copied: layers built with the same mechanism share them. `dropout` drops attention weights in training,
        except in `extend`."""
        super().__init__()
        groups = num_heads if num_kv_heads is None else num_kv_heads
        lengths = {"qk_length": qk_length, "value_length": value_length, "key_dim": key_dim, "value_dim": value_dim}
        _check_heads(embedding_dim, num_heads, groups, dropout, **lengths)
        self.embedding_dim, self.num_heads, self.num_kv_heads = embedding_dim, num_heads, groups
        self.qk_length = qk_length or embedding_dim // num_heads
        self.value_length = value_length or self.qk_length
        if rotary is not None and rotary.length != self.qk_length:
            raise ValueError(f"rotary: expected one of length {self.qk_length} (qk_length), got {rotary.length}")
        self.rotary = rotary
        self.W_q = Linear(embedding_dim, num_heads * self.qk_length, bias=bias)
        self.W_k = Linear(key_dim or embedding_dim, groups * self.qk_length, bias=bias)
        self.W_v = Linear(value_dim or key_dim or embedding_dim, groups * self.value_length, bias=bias)
        out_bias = bias if output_bias is None else output_bias
        self.W_o = Linear(num_heads * self.value_length, embedding_dim, bias=out_bias)
        with real_place():
            mechanism = as_mechanism(mechanism).for_layer(self.qk_length)
        check_learned(mechanism, self.qk_length)
        self.attend = Attend(mechanism, dropout)

    @property
    def mechanism(self) -> Mechanism:
        return self.attend.mechanism

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer computes in: that of its weights, float32 if they are int8."""
        dtype = self.W_o.weight.dtype
        return dtype if dtype.is_floating_point else torch.float32

    def split_heads(self, x: Float[Tensor, "B T D"], length: int) -> Float[Tensor, "B H T K"]:
        """(B, T, H·K) to (B, H, T, K), for heads of `length`."""
        return x.unflatten(-1, (-1, length)).transpose(1, 2)

    def combine_heads(self, x: Float[Tensor, "B H T V"]) -> Float[Tensor, "B T D"]:
        """(B, H, T, V) to (B, T, H·V)."""
        return x.transpose(1, 2).flatten(2)

    def forward(
        self,
        query: Float[Tensor, "*b E"],
        key: Float[Tensor, "B S D"] | None = None,
        value: Float[Tensor, "B S W"] | None = None,
        mask: AnyMask = None,
        *,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | Tables | None = None,
        ragged: Ragged | None = None,
    ) -> Float[Tensor, "*b E"]:
        """Attention of `query` to itself, or to `key` and `value` (which is `key` if not given).

        `positions`, (T,) or (B, T), are the token positions for rotary heads, by default 0, 1, …; layers that share
        rotary tables pass those instead. With `ragged`, `query` and the result are the packed (N, E) of a padded
        batch.
        """
        if key is not None:
            if self.rotary is not None or positions is not None or ragged is not None:
                raise ValueError("key: expected None with rotary heads, positions or a ragged batch, got a tensor")
            return self._reach(query, *self.remember(key, value), mask, bias, cross=key is not query)
        if value is not None:
            raise ValueError("key: expected a tensor, since value is given, got None")
        if ragged is not None and (rule := self._packed(query, mask, bias, ragged)) is not None:
            q, k, v = self.project(query[None], ragged.packed_positions(positions))
            out, _ = self.attend(q, k, v, rule)
            return self._finish(out, None)[0]
        q, k, v = self.project(query, positions, ragged)
        out, _ = self.attend(q, k, v, mask, bias)
        return self._finish(out, ragged)

    def _packed(self, x: Tensor, mask: AnyMask, bias: Tensor | None, ragged: Ragged) -> Mask | None:
        """The mask of a ragged batch as packed sequences, if a kernel can compute those: padding then costs nothing.
        Otherwise None, and the batch is padded; a trace and a bias need rows."""
        mechanism, hooks = self.mechanism, self.attend._forward_hooks or self.attend._forward_pre_hooks
        if bias is not None or hooks or (self.training and self.attend.dropout > 0) or not gpu.packs(x):
            return None
        turned = None if self.rotary is None else self.rotary.scaling
        if split.scale(mechanism, self.qk_length) is None or (turned is not None and turned.kind == "dynamic"):
            return None
        tokens = ragged.valid.shape[1]
        structure = structure_of(as_mask(mask), tokens, tokens)
        if structure.rows is None or structure.rest is not None or max(self.qk_length, self.value_length) > gpu.LONGEST:
            return None
        rule = Packed(tuple(max(0, high - low) for low, high in structure.rows))
        if sum(rule.lengths) != len(x):
            return None
        return rule if not structure.positional else rule & Band(structure.before, structure.after)

    def project(
        self, x: Tensor, positions: Tensor | Tables | None = None, ragged: Ragged | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention, split into heads and rotated by their positions."""
        self._check_input("query", x, self.embedding_dim, 3 if ragged is None else 2)
        if self.W_k.in_features != self.embedding_dim or self.W_v.in_features != self.embedding_dim:
            raise ValueError(f"key: expected an input of width {self.W_k.in_features} (key_dim), got None")
        q, k, v = projections(x, self.W_q, self.W_k, self.W_v)
        if ragged is not None:
            q, k, v = ragged.pad(q), ragged.pad(k), ragged.pad(v)
        q, k = self.split_heads(q, self.qk_length), self.split_heads(k, self.qk_length)
        if self.rotary is not None:
            if positions is None:
                positions = torch.arange(q.shape[2], device=q.device)
            if isinstance(positions, Tensor) and positions.shape[-1:] != q.shape[2:3]:
                raise ValueError(f"positions: expected those of {q.shape[2]} tokens, got {tuple(positions.shape)}")
            tables = self.rotary.tables(positions) if isinstance(positions, Tensor) else positions
            if gpu.launches(q) and q.stride(3) == k.stride(3) == 1:
                # Triton is imported only where it is used.
                from regard.core.kernels import elementwise

                q, k = elementwise.turn(q, k, *tables, self.rotary.pairing == "neighbours")
            elif torch.is_grad_enabled() or q.shape[2] > 1:
                q, k = self.rotary.turn(q, tables), self.rotary.turn(k, tables)
            else:  # for one token, fewer operations save more than the copy costs
                q, k = self.rotary.turn(torch.cat([q, k], 1), tables).split([self.num_heads, self.num_kv_heads], 1)
        return q, k, self.split_heads(v, self.value_length)

    def remember(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The keys and values of cross-attention, split into heads: computed once, used at every decode step."""
        value = key if value is None else value
        self._check_input("key", key, self.W_k.in_features)
        self._check_input("value", value, self.W_v.in_features)
        k, v = self.W_k(key), self.W_v(value)
        return self.split_heads(k, self.qk_length), self.split_heads(v, self.value_length)

    def cross(
        self, query: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, *, bias: Tensor | None = None
    ) -> Float[Tensor, "B T E"]:
        """Attention of `query` to the keys and values that `remember` gave."""
        return self._reach(query, k, v, mask, bias, cross=True)

    def _reach(
        self, query: Tensor, k: Tensor, v: Tensor, mask: AnyMask, bias: Tensor | None, *, cross: bool
    ) -> Float[Tensor, "B T E"]:
        self._check_input("query", query, self.embedding_dim)
        out, _ = self.attend(self.split_heads(self.W_q(query), self.qk_length), k, v, mask, bias, cross=cross)
        return self._finish(out, None)

    def start(self, *, batch: int, capacity: int = 4096, storage: torch.dtype | None = None) -> Any:
        """An empty state for `extend`, in this layer's dtype and on its device; `storage=torch.int8` keeps it small."""
        return self.mechanism.start(
            batch=batch,
            num_kv_heads=self.num_kv_heads,
            qk_length=self.qk_length,
            value_length=self.value_length,
            capacity=capacity,
            dtype=self.dtype,
            device=self.W_k.weight.device,
            storage=storage,
        )

    def extend(
        self,
        x: Float[Tensor, "*b E"],
        state: Any,
        mask: AnyMask = None,
        *,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | Tables | None = None,
        ragged: Ragged | None = None,
    ) -> tuple[Float[Tensor, "*b E"], Any]:
        """Self-attention of T more tokens over the whole history. Gives the output and the longer state."""
        if not hasattr(state, "extended"):  # a state, or the slot that stands for it while a GPU replays steps
            raise ValueError(f"state: expected one from start(…), got {type(state).__name__}")
        if positions is None:
            count = x.shape[1] if ragged is None else ragged.valid.shape[1]
            positions = state.length + torch.arange(count, device=x.device)
        # The state has the layer's dtype, also if autocast gives the projections another.
        q, k, v = self.project(x, positions, ragged)
        if q.dtype != (dtype := self.dtype):
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out, state = self.attend(q, k, v, mask, bias, state)
        return self._finish(out, ragged), state

    def _finish(self, out: Tensor, ragged: Ragged | None) -> Tensor:
        together = self.combine_heads(out)
        return self.W_o(together if ragged is None else ragged.pack(together))

    def _check_input(self, name: str, x: Tensor, width: int, axes: int = 3) -> None:
        if not isinstance(x, Tensor) or x.ndim != axes or x.shape[-1] != width:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected {'(B, T, ' if axes == 3 else '(N, '}{width}), got {got}")
        dtype = self.W_o.weight.dtype
        if x.dtype == dtype or not dtype.is_floating_point:  # int8 projections check their input themselves
            return
        # Autocast converts any floating-point input to the projections' dtype.
        if not x.is_floating_point() or x.is_meta or not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name}: expected the layer's dtype {dtype}, got {x.dtype}")


def _check_heads(embedding_dim: int, num_heads: int, groups: int, dropout: float, **lengths: int | None) -> None:
    sizes = {"embedding_dim": embedding_dim, "num_heads": num_heads, "num_kv_heads": groups}
    qk_length = lengths["qk_length"]
    for name, size in {**sizes, **lengths}.items():
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1, got {size!r}")
    if num_heads % groups:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {groups}")
    if qk_length is None and embedding_dim % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of embedding_dim = {embedding_dim} (or qk_length given), got {num_heads}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected at least 0 and below 1, got {dropout}")
