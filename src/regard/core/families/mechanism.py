"""What a mechanism is.

The legend, for the whole project:

    B batch · T query length · S key length · H query heads · G key/value heads · K qk_length · V value_length
    E embedding_dim · C features of phi · N chunks · L layers

Tensors are (B, H, T, K) as in SDPA. Query head h reads key/value head h // (H // G).

A mechanism of your own is one class with one method, `similarity(q, k)`, how similar each query and key are. The
weights are the similarities of the visible keys, divided by their sum. Everything else (the output, the KV cache, the
exact weights, the cost, the laws of `regard.check`) follows from it. See examples/your_own_mechanism.py.

What a mechanism learns are its fields: an `nn.Parameter` or an `nn.Module`. `tensors` lists them, and a layer registers
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.calls import repeats
from regard.core.calls.call import Call, in_own_dtype, ordered
from regard.core.calls.checks import check_extend, check_start
from regard.core.calls.choice import Path
from regard.core.cost import Cost, Work, accumulator, own_state_cost, score_cost, similarity_flops
from regard.core.eager import recorded, symbolic
from regard.core.masks import Mask, MaskFunction, Window, as_mask
from regard.core.masks.structure import EVERYTHING, Structure, padding_between
from regard.core.paths import blocks, exact, reference, runs
from regard.core.paths.runs import over_runs, usable_state, with_space
from regard.core.paths.slots import Clock, Slot, cache_slot
from regard.core.states.key_values import KeyValueState
from regard.core.states.state import Sizes, State
from regard.core.tensors import brief, fitted, flat, leaves, made_on, own_dtype, probe, same
from regard.core.user_code import check_class, is_user_code, read_only, runs_user_code, undefined, weigh


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """An attention mechanism: a frozen dataclass.

    A field may be a tensor, an `nn.Parameter` or an `nn.Module`: a layer made with the mechanism registers these
    tensors, so that they are trained, moved and saved with the layer. A model gives each of its layers a copy.

    `similarity` does not know positions: it may be called with some of the queries, heads or keys, and in a decode step
    its first query is not the first token. A similarity that counts positions gives wrong results, and only the law
    `permuted` of `regard.check` notices. Such a mechanism sets `ordered` and defines `weigh` instead.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Sigmoid(rg.Mechanism):
    ...     def similarity(self, q, k):
    ...         return torch.sigmoid(q @ k.transpose(-1, -2))
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> rg.attend(q, k, v, Sigmoid(), mask=rg.causal).shape
    torch.Size([1, 2, 5, 4])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Defined here, so that dataclass does not generate others.
        cls.__repr__, cls.__eq__ = cls.__repr__, cls.__eq__  # type: ignore[method-assign]
        # Every decode step reads it: a class attribute, since torch.compile warns about functools caches.
        cls.shipped = all(parent is object or parent.__module__.startswith("regard.") for parent in cls.__mro__)
        if not cls.shipped:
            check_class(cls)

    def __repr__(self) -> str:
        shown = (f"{entry.name}={brief(getattr(self, entry.name))}" for entry in fields(self) if entry.repr)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal; tensors are compared and hashed by identity."""
        return same(other, self) if isinstance(other, Mechanism) else NotImplemented

    shipped: ClassVar[bool] = True
    """Whether the class and all its base classes belong to this package."""
    hidden_score: ClassVar[float] = 0.0
    """The score that a trace shows for a masked key."""
    excuses: ClassVar[Mapping[str, str]] = {}
    """Laws of `regard.check` that do not apply to this family, and why."""

    ordered: ClassVar[bool] = False
    """Whether the weights depend on the positions of tokens. Such a mechanism is causal by definition, whatever the
    mask, and `weigh` is called with all heads and all queries, the last of which is at the last key."""

    def for_layer(self, qk_length: int) -> "Mechanism":
        """The mechanism for a layer with this head dimension: with learned tensors, if it has none yet. They are made
        and initialised here, on a real device.

        >>> import regard as rg
        >>> rg.Gated(), rg.Gated().for_layer(8)
        (Gated(gate=None), Gated(gate=Gate))
        """
        return self

    def tensors(self) -> dict[str, Tensor | nn.Module]:
        """The fields that are tensors or modules, by name: what a layer registers.

        >>> import regard as rg, torch
        >>> list(rg.Kernel(feature_map=torch.nn.Linear(4, 6)).tensors()), list(rg.Softmax().tensors())
        (['feature_map'], [])
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor | nn.Module)}

    def parameters(self) -> tuple[Tensor, ...]:
        """The trained tensors: those in `tensors`, including parameters of modules, that require a gradient."""
        return tuple(tensor for tensor in flat(self) if tensor.requires_grad)

    def captured(self, qk_length: int) -> list[Tensor]:
        """Trained tensors that the weights depend on and `tensors` does not list, wherever they are: in a closure, a
        global, an object. They are the leaves of the autograd graph for one query and one key.

        >>> import regard as rg, torch
        >>> W = torch.randn(4, 6, requires_grad=True)
        >>> rg.Kernel(feature_map=lambda x: torch.relu(x @ W)).captured(4)[0] is W
        True
        """
        if not runs_user_code(self):
            return []
        listed = {id(tensor) for tensor in self.parameters()}
        x = probe(self, (1, 1, 1, qk_length))
        with torch.enable_grad(), made_on(x.device):
            compared = fitted(self, x.dtype).compare(x, x)
        # A result that is not a tensor has no graph; it is refused where it is used.
        graph = leaves(compared) if isinstance(compared, Tensor) else []
        return [leaf for leaf in graph if id(leaf) not in listed]

    def learns(self, qk_length: int) -> bool:
        """Whether autograd would record the weights of queries and keys that require no gradient."""
        if not torch.is_grad_enabled() or not runs_user_code(self):
            return False
        return torch.compiler.is_compiling() or bool(self.parameters()) or bool(self.captured(qk_length))

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        """How similar each query and key are: ≥ 0, in any scale. The one method that a new mechanism defines."""
        raise undefined(self, "similarity(q, k)")

    def compare(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "..."]:
        """What is computed for each query and key: the similarity, or the weights if only `weigh` is defined."""
        stated = type(self).similarity is not Mechanism.similarity
        return self.similarity(q, k) if stated else self.weigh(q, k, None)

    def compare_heads(self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B G S K"]) -> Float[Tensor, "..."]:
        """The same for H query heads over G key heads, as `attend` runs and checks it."""
        stated = type(self).similarity is not Mechanism.similarity
        return self._grouped(self.similarity, q, k) if stated else weigh(self, q, k, None, None)

    def normalise(self, similar: Float[Tensor, "*b T S"]) -> Float[Tensor, "*b T S"]:
        """Weights from the similarities of the visible keys: divided by their sum, 0 where that is 0."""
        total = similar.sum(-1, keepdim=True)
        return similar / total.masked_fill(total == 0, 1)

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """The exact weights: the similarities of the visible keys, normalised; 0 for hidden ones."""
        if visible is not None:
            # A query that sees no key must not contribute to the keys' gradients either.
            q = q.masked_fill(~visible.any(-1, keepdim=True), 0)
        similar = self.grouped(self.similarity, q, k)
        return self.normalise(similar if visible is None else similar.masked_fill(~visible, 0))

    def trace_scores(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"] | None:
        """What a trace shows as scores: the similarities; None if only weights are defined."""
        if type(self).similarity is Mechanism.similarity:
            return None
        return self.grouped(self.similarity, q, k)

    def mix(
        self,
        weights: Float[Tensor, "B H T S"],
        v: Float[Tensor, "B G S V"],
        visible: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T V"]:
        """The output from the weights: for each query the weighted sum of values. Masked keys have weight 0."""
        if symbolic(
            weights.shape[2], weights.shape[3]
        ):  # torch.export cannot prove that the reshape fits two dynamic lengths
            return weights @ v.to(weights.dtype).repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        tiled = rearrange(weights, "b (g r) t s -> b g (r t) s", g=v.shape[1])
        out = tiled @ v.to(weights.dtype)
        return rearrange(out, "b g (r t) v -> b (g r) t v", r=weights.shape[1] // v.shape[1])

    def choose_weights(self, call: Call, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        """The exact weights of chosen query rows and heads (None: all), NaN for a query that sees a NaN in a key."""
        if heads is not None and runs_user_code(self):  # a user's formula may depend on the index of a head
            return exact.weights(call, rows, None)[:, heads]
        return exact.weights(call, rows, heads)

    def grouped(self, compare: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
        """`compare` for H query heads over G key heads, with the queries of a group as rows of one comparison."""
        groups = k.shape[1]
        try:
            return self._grouped(compare, q, k)
        except RuntimeError as error:
            if groups == q.shape[1] or isinstance(error, torch.OutOfMemoryError | NotImplementedError):
                raise
            rows = q.shape[1] // groups
            raise ValueError(
                f"{compare.__name__}: expected a formula for queries (B, G, H / G · T, K) = "
                f"{(q.shape[0], groups, rows * q.shape[2], q.shape[3])} and keys (B, G, S, K) = {tuple(k.shape)}, the "
                f"{rows} query heads of a key/value head as rows of one, got {type(self).__name__}, which raises "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _grouped(self, compare: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
        groups, kind, name = k.shape[1], self.precision(q.dtype), compare.__name__
        tiled = rearrange(q, "b (g r) t k -> b g (r t) k", g=groups)
        if symbolic(q.shape[2]):
            # With the strides of a view, a user's matrix product would compare expressions of a dynamic length.
            tiled = tiled.clone(memory_format=torch.contiguous_format)
        dtype = self.formula_dtype(kind)
        tensors = tiled.to(dtype), k.to(dtype)
        # Our formulas write to nothing, and pass a user's phi to `read_only`.
        similar = read_only(self, name, compare, *tensors) if is_user_code(compare) else compare(*tensors)
        expected = (*tiled.shape[:3], k.shape[2])
        if not isinstance(similar, Tensor) or similar.shape != expected:
            shape = tuple(similar.shape) if isinstance(similar, Tensor) else type(similar).__name__
            raise ValueError(
                f"{name}: expected (…, T, S) = {expected} from queries {tuple(tiled.shape)} and keys "
                f"{tuple(k.shape)}, got {shape} from {type(self).__name__}"
            )
        return rearrange(similar.to(kind), "b g (r t) s -> b (g r) t s", r=q.shape[1] // groups)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype the weights are computed in."""
        return accumulator(dtype)

    def formula_dtype(self, precision: torch.dtype) -> torch.dtype:
        """The dtype of the queries and keys that `similarity` gets: that of the mechanism's tensors, if it has any (a
        `Call` and `extend` cast narrower tensors up to their inputs' dtype first)."""
        return own_dtype(self) or precision

    def refuses(self, call: Call) -> str | None:
        """Why this mechanism is not defined for a call, as an error message; None if it is."""
        return None if call.bias is None else f"bias: expected none, {self!r} has no additive scores, got one"

    def streams(self, qk_length: int, structure: Structure = EVERYTHING) -> str | None:
        """Why there is no token-by-token form under a mask of this structure, as an error message; None if there is.
        Only a KV cache can hide a key that it has taken in."""
        if (structure.rest is None and not structure.windowed) or self.state_type(qk_length).keeps_keys:
            return None
        kind = f"{structure.rest!r}" if structure.rest is not None else "a window"
        return f"mask: expected causal, padding, both or none for {self!r}: its state cannot drop a key, got {kind}"

    def paths(self) -> tuple[Path, ...]:
        """The paths of this mechanism, best first; the last can compute every call."""
        return (reference.PATH,) if self.ordered else (blocks.PATH, reference.PATH)

    def notes(self, call: Call) -> tuple[str, ...]:
        """Remarks on this call that `explain` prints below the path."""
        return ()

    def start(
        self,
        *,
        batch: int,
        num_kv_heads: int,
        qk_length: int,
        value_length: int,
        capacity: int = 4096,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        storage: torch.dtype | None = None,
    ) -> Any:
        """An empty state: a KV cache for `capacity` tokens, or the running sums of linear attention, which have room
        for any length.

        `storage=torch.int8` keeps keys and values in 8 bits, with a scale for each token and head, and allows no
        gradients. Softmax attention is then off by 0.8 % (normal keys and values of length 64), and SmolLM2's logits by
        0.07 on average and 1.6 at most, where their spread is 5.3: the most likely token is the same at 97.3 % of 512
        positions.

        >>> import regard as rg
        >>> sizes = {"batch": 1, "num_kv_heads": 1, "qk_length": 8, "value_length": 8}
        >>> rg.Softmax().start(**sizes, capacity=16).nbytes, rg.Elu().start(**sizes).nbytes
        (1024, 8480)
        """
        check_start(self, batch, num_kv_heads, qk_length, value_length, capacity, dtype, device)
        if storage not in (None, torch.int8):
            raise ValueError(f"storage: expected torch.int8 or None, got {storage!r}")
        if storage is not None and not self.state_type(qk_length).keeps_keys:
            raise ValueError(f"storage: expected None, since the state of {self!r} is no KV cache, got {storage}")
        return self.empty_state(Sizes(batch, num_kv_heads, qk_length, value_length, dtype, device, storage), capacity)

    def empty_state(self, sizes: Sizes, capacity: int) -> State:
        """The empty state, after its sizes are checked. A mechanism that keeps something other than keys and values
        returns its state here, and extends it in `advance`."""
        return KeyValueState.empty(sizes, capacity, sizes.storage)

    def state_type(self, qk_length: int) -> type[Any]:
        """The class of its states, for this head dimension."""
        return KeyValueState

    def extend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B G T V"],
        state: Any,
        mask: Mask | MaskFunction | Tensor | None = None,
        *,
        bias: Float[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "B H T V"], Any]:
        """Append T tokens and attend from them to the whole history. Returns the output and the new state.

        The mask uses absolute positions over the whole history, S = state.length + T. The state remembers padding: a
        key that `padding` hid when it was appended stays hidden.

        >>> import regard as rg, torch
        >>> q = k = v = torch.randn(1, 2, 6, 4)
        >>> m = rg.Softmax()
        >>> state = m.start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=8)
        >>> first, state = m.extend(q[:, :, :5], k[:, :, :5], v[:, :, :5], state, mask=rg.causal)
        >>> last, state = m.extend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], state, mask=rg.causal)
        >>> torch.allclose(torch.cat([first, last], 2), rg.attend(q, k, v, m, mask=rg.causal), atol=1e-6)
        True
        """
        key = repeats.step_key(q, k, v, self, mask, state) if bias is None else None
        step = None if key is None else repeats.find(key)
        if step is not None and (stepped := step(q, k, v, state)) is not None:
            return stepped
        rule = ordered(self, as_mask(mask))
        kind = self.state_type(k.shape[-1] if isinstance(k, Tensor) else 1)
        if type(state) is not kind or not same(state.mechanism, self):
            owner = getattr(state, "mechanism", None)
            actual = type(state).__name__ if owner is None else f"a {type(state).__name__} of {owner!r}"
            raise ValueError(f"state: expected one from {self!r}.start(…), got {actual}")
        check_extend(self, q, k, v, state, rule, bias)
        with in_own_dtype(q):
            computing = fitted(self, q.dtype) if runs_user_code(self) else self
            out, longer = computing.advance(q, k, v, state.recordable(), rule, bias)
        if key is not None and step is None and computing is self:  # a cast tensor would keep today's numbers
            repeats.keep_step(key, self.step(q, k, v, longer, rule))
        return out, longer

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, rule: Mask | None) -> repeats.Step | None:
        """A function that extends states like this one by one token on a GPU, without set-up; None: use `advance`."""
        return runs.step(self, q, k, v, state, rule)

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        rule: Mask | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """`extend`, after all checks. The new keys and values may contain a NaN or infinity: calls over a KV cache have
        their own guard, and for a `FixedState` see `receive`."""
        total = state.length + k.shape[2]
        fresh = padding_between(rule, state.length, total, total)
        state = with_space(state, rule, k.shape[2])
        derived = q.requires_grad or (bias is not None and bias.requires_grad) or self.learns(k.shape[3])
        longer = state.append(k, v, fresh, recorded=derived)
        longer = usable_state(self, q, longer, rule, bias, derived)
        out = over_runs(self, q, longer, rule, bias)
        if recorded(q, k, v) and not out.requires_grad:
            out = out + sum(t[..., :0].sum() for t in (q, k, v))  # only padding was read: 0, and part of the graph
        return out, longer

    slotted: ClassVar[bool] = True
    """Whether a GPU can capture its decode steps as a CUDA graph, through `slot`."""

    def slot(self, qk_length: int, state: Any, clock: Callable[[int], Clock], window: Window | None) -> Slot:
        """The state as memory at fixed addresses, for decode steps that a GPU replays. `clock(length)` is shared by the
        layers that keep as many tokens; `window` is the layer's sliding window."""
        if window is not None and state.length > 2 * window.width:
            state = state.resized(window.width, state.length - window.width)
        return cache_slot(self, qk_length, state, clock(state.length), None if window is None else window.before)

    def cost(self, work: Work) -> Cost:
        """What this mechanism costs on some work: the FLOPs of its similarity, and the steps and bytes of a state of
        its own, are counted as they run; see `regard.core.cost`."""
        counted = score_cost(work, self.precision(work.dtype), similarity_flops(self, work))
        return counted if self.state_type(work.qk_length) is KeyValueState else own_state_cost(self, work, counted)


@dataclass(frozen=True, kw_only=True)
class UnnormalisedMechanism(Mechanism):
    """A mechanism whose weights are the similarities themselves, of any size and sign, not divided by their sum.

    Published sigmoid attention is an example (Ramapuram et al. 2025, "Theory, analysis, and best practices for sigmoid
    self-attention"). The laws that weights are ≥ 0 and sum to 1 do not apply.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Sigmoid(rg.UnnormalisedMechanism):
    ...     def similarity(self, q, k):
    ...         return torch.sigmoid(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - 2)
    >>> q = k = torch.zeros(1, 1, 2, 4)
    >>> rg.weights(q, k, Sigmoid(), mask=rg.causal)[0, 0, 1].sum().item() < 0.5
    True
    """

    excuses: ClassVar[Mapping[str, str]] = {
        "normalised": "the weights are not normalised",
        "extremes": "weights that are not normalised grow with the scores",
    }

    def normalise(self, similar: Float[Tensor, "*b T S"]) -> Float[Tensor, "*b T S"]:
        return similar
