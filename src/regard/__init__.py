"""Regard: define an attention mechanism once; compute, stream, see, count and check it.

Nothing is imported before it is asked for: `regard --help` needs no torch, and `rg.attend` no tokenizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.core.tiles import guard

guard()  # before anything can run on oneDNN

if TYPE_CHECKING:
    from regard import lab as lab
    from regard.checkpoints import CheckpointError as CheckpointError
    from regard.checkpoints import load as load
    from regard.checkpoints import save as save
    from regard.checkpoints.tokenizer import Tokenizer as Tokenizer
    from regard.core.attention import attend as attend
    from regard.core.attention import explain as explain
    from regard.core.attention import weights as weights
    from regard.core.calls.choice import Plan as Plan
    from regard.core.cost import Cost as Cost
    from regard.core.cost import LayerCost as LayerCost
    from regard.core.cost import Work as Work
    from regard.core.cost import cost as cost
    from regard.core.cost import crossover as crossover
    from regard.core.cost import layer_cost as layer_cost
    from regard.core.families.features import FeatureMechanism as FeatureMechanism
    from regard.core.families.mechanism import Mechanism as Mechanism
    from regard.core.families.mechanism import UnnormalisedMechanism as UnnormalisedMechanism
    from regard.core.families.scores import ScoreMechanism as ScoreMechanism
    from regard.core.laws import Report as Report
    from regard.core.laws import check as check
    from regard.core.masks import Mask as Mask
    from regard.core.masks import Window as Window
    from regard.core.masks import causal as causal
    from regard.core.masks import dense as dense
    from regard.core.masks import global_tokens as global_tokens
    from regard.core.masks import padding as padding
    from regard.core.masks import segments as segments
    from regard.core.masks import window as window
    from regard.core.masks import window2d as window2d
    from regard.core.mechanisms import Argmax as Argmax
    from regard.core.mechanisms import Channel as Channel
    from regard.core.mechanisms import Delta as Delta
    from regard.core.mechanisms import Elu as Elu
    from regard.core.mechanisms import Gated as Gated
    from regard.core.mechanisms import Kernel as Kernel
    from regard.core.mechanisms import Polynomial as Polynomial
    from regard.core.mechanisms import Quadratic as Quadratic
    from regard.core.mechanisms import RandomFeatures as RandomFeatures
    from regard.core.mechanisms import Retention as Retention
    from regard.core.mechanisms import Softmax as Softmax
    from regard.core.mechanisms import Taylor as Taylor
    from regard.core.mechanisms import Uniform as Uniform
    from regard.core.states.fixed_state import FixedState as FixedState
    from regard.core.states.state import Sizes as Sizes
    from regard.core.states.state import State as State
    from regard.explorer.notebook import view as view
    from regard.inference.effects import Effects as Effects
    from regard.inference.effects import effects as effects
    from regard.inference.generation import Generated as Generated
    from regard.inference.generation import Prompt as Prompt
    from regard.inference.generation import Stream as Stream
    from regard.inference.generation import generate as generate
    from regard.inference.generation import prefill as prefill
    from regard.inference.generation import stream as stream
    from regard.inference.intervene import intervene as intervene
    from regard.inference.trace import Trace as Trace
    from regard.inference.trace import TracedLayer as TracedLayer
    from regard.inference.trace import trace as trace
    from regard.models.davit import DaViT as DaViT
    from regard.models.davit import DaViTConfig as DaViTConfig
    from regard.models.decoder import Decoder as Decoder
    from regard.models.decoder import DecoderConfig as DecoderConfig
    from regard.models.encoder import Encoder as Encoder
    from regard.models.encoder import EncoderConfig as EncoderConfig
    from regard.models.layers.attention import MultiHeadAttention as MultiHeadAttention
    from regard.models.layers.positions import RotaryScaling as RotaryScaling
    from regard.models.layers.streaming import ModelState as ModelState
    from regard.models.quantized import quantized as quantized
    from regard.models.summary import Summary as Summary
    from regard.models.transformer import Transformer as Transformer
    from regard.models.transformer import TransformerConfig as TransformerConfig
    from regard.models.vision import VisionConfig as VisionConfig
    from regard.models.vision import VisionTransformer as VisionTransformer

_HOMES = {
    "regard.core.attention": "attend explain weights",
    "regard.core.calls.choice": "Plan",
    "regard.checkpoints": "CheckpointError load save",
    "regard.checkpoints.tokenizer": "Tokenizer",
    "regard.core.cost": "Cost LayerCost Work cost crossover layer_cost",
    "regard.inference.generation": "Generated Prompt Stream generate prefill stream",
    "regard.core.laws": "Report check",
    "regard.models.layers.attention": "MultiHeadAttention",
    "regard.models.layers.positions": "RotaryScaling",
    "regard.models.layers.streaming": "ModelState",
    "regard.core.masks": "Mask Window causal dense global_tokens padding segments window window2d",
    "regard.core.families.features": "FeatureMechanism",
    "regard.core.families.scores": "ScoreMechanism",
    "regard.core.families.mechanism": "Mechanism UnnormalisedMechanism",
    "regard.core.mechanisms": (
        "Argmax Channel Delta Elu Gated Kernel Polynomial Quadratic RandomFeatures Retention Softmax Taylor Uniform"
    ),
    "regard.core.states.fixed_state": "FixedState",
    "regard.core.states.state": "Sizes State",
    "regard.models.davit": "DaViT DaViTConfig",
    "regard.models.decoder": "Decoder DecoderConfig",
    "regard.models.encoder": "Encoder EncoderConfig",
    "regard.models.quantized": "quantized",
    "regard.models.summary": "Summary",
    "regard.models.transformer": "Transformer TransformerConfig",
    "regard.models.vision": "VisionConfig VisionTransformer",
    "regard.explorer.notebook": "view",
    "regard.inference.effects": "Effects effects",
    "regard.inference.intervene": "intervene",
    "regard.inference.trace": "Trace TracedLayer trace",
}
"""The public names, by the module that defines them; the imports above say the same to type checkers."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for."""
    if name == "lab":
        return import_module("regard.lab")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
