"""Change a model's attention while it runs, and see what comes of it.

    with rg.intervene(model, layers=[3], heads=[1], silence=True):
        logits = model(tokens)

Works on our models, whatever their mechanism, and on Hugging Face models, in whole passes and while generating. Heads
of the same layer that were not chosen are computed as without it, bit for bit. A trace inside shows the changed
weights; its queries, keys and scores are the model's. Contexts nest: changes of the same head add up.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from regard.core.families.mechanism import Mechanism
from regard.inference.interventions import ours as our_changes
from regard.inference.interventions.change import ACTIVE, Change, Place
from regard.inference.trace import Trace, attentions_of, chosen_numbers
from regard.inference.tracing import huggingface
from regard.inference.tracing.gather import Chosen, Recorder
from regard.models.layers.attention import Attend, as_mechanism

NOTHING = Chosen(frozenset(), None, None, frozenset({"weights"}))
_ADAPTERS: dict[nn.Module, our_changes.Adapter] = {}


@contextmanager
def intervene(
    model: nn.Module,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    silence: bool = False,
    mean: bool | Trace = False,
    hide: Sequence[int] = (),
    beta: float | None = None,
    mechanism: Mechanism | str | None = None,
    weights: Trace | None = None,
    values: Trace | None = None,
) -> Iterator[None]:
    """Change the attention of some layers and heads, by default all, while the context lasts.

    `layers` are numbered as in `trace`. What can be changed:

    - `silence`: the heads' outputs are 0;
    - `mean`: the mean of a head's outputs instead of them, over all tokens of the pass, padding apart, or over those
      of a trace (`mean=trace`), which also serves token by token and shows no token what comes after it;
    - `hide`: keys at these positions of the sequence are hidden; negative ones count from the end of each pass;
    - `beta`: another inverse temperature, from 0 (all visible keys alike) to inf (the best key alone);
    - `mechanism`: another mechanism, or the name of one;
    - `weights`, `values`: those of a trace of the same sizes, made with another input or another model.

    Contexts nest. Changes of the same head add up; where two replace the same thing, the inner one counts. A change
    reaches every thread that runs the model; two threads on one Hugging Face model at the same time are not supported.

    >>> import regard as rg, torch
    >>> layer = rg.MultiHeadAttention(16, 4)
    >>> x = torch.randn(1, 6, 16)
    >>> with rg.intervene(layer, heads=[2], silence=True), rg.trace(layer) as trace:
    ...     y = layer(x)
    >>> torch.equal(y, layer(x)), trace.layers[0].weights.shape
    (False, torch.Size([1, 4, 6, 6]))
    """
    if not isinstance(silence, bool):
        raise ValueError(f"silence: expected True or False; heads=[…] chooses, got {silence!r}")
    if weights is not None and (beta is not None or mechanism is not None):
        raise ValueError("weights: expected no beta and no mechanism beside them, which they replace, got both")
    if silence and mean:
        raise ValueError("mean: expected it without silence, got both")
    change = Change(
        layers=None if layers is None else frozenset(chosen_numbers("layers", layers, 0)),
        heads=None if heads is None else chosen_numbers("heads", heads),
        silence=silence,
        mean=mean if isinstance(mean, bool) else _trace("mean", mean) or False,
        hide=chosen_numbers("hide", hide) if hide else (),
        beta=_beta(beta),
        mechanism=None if mechanism is None else as_mechanism(mechanism),
        weights=_trace("weights", weights),
        values=_trace("values", values),
    )
    if not (silence or mean or hide or weights or values or beta is not None or mechanism is not None):
        raise ValueError("intervene: expected silence, mean, hide, beta, mechanism, weights or values, got none")
    with applied(model, change) as place:
        yield
    place.check()


@contextmanager
def applied(model: nn.Module, *changes: Change) -> Iterator[Place]:
    """Changes at every attention of a model."""
    attentions, theirs, starts = attentions_of(model, "use the model inside it")
    both = {module: name for name, module in model.named_modules() if module in attentions or module in theirs}
    recorder, place = Recorder(Trace(), NOTHING, both), Place(changes)
    with ExitStack() as stack:
        for handle in recorder.watch(starts):
            stack.callback(handle.remove)
        for module in both:
            handle = module.register_forward_pre_hook(_numbered(recorder, place))
            stack.callback(handle.remove)
            _begin(module, place)
            stack.callback(_end, module, place)
        if theirs:
            stack.enter_context(huggingface.eager(model, list(theirs)))
        yield place


def _numbered(recorder: Recorder, place: Place) -> Any:
    def before(module: nn.Module, args: Any) -> None:
        place.enter(module, recorder.enter(module))

    return before


def _begin(module: nn.Module, place: Place) -> None:
    ACTIVE.setdefault(module, []).append(place)
    if isinstance(module, Attend) and module not in _ADAPTERS:
        _ADAPTERS[module] = our_changes.Adapter(module)


def _end(module: nn.Module, place: Place) -> None:
    ACTIVE[module].remove(place)
    if not ACTIVE[module]:
        del ACTIVE[module]
        if module in _ADAPTERS:
            _ADAPTERS.pop(module).handle.remove()


def _beta(beta: float | None) -> float | None:
    if beta is not None and not (isinstance(beta, int | float) and beta >= 0 and not math.isnan(beta)):
        raise ValueError(f"beta: expected a number from 0 to inf, got {beta!r}")
    return beta


def _trace(name: str, trace: Trace | None) -> Trace | None:
    if trace is not None and not isinstance(trace, Trace):
        raise ValueError(f"{name}: expected a trace, got {type(trace).__name__}")
    return trace
