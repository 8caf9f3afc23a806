"""Regard: state an attention mechanism once; compute, stream, see, count and prove it.

Nothing is imported before it is asked for: `regard --help` needs no torch, and `rg.attend` no tokenizer.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from regard.tiles import guard

guard()  # before anything can run on oneDNN

if TYPE_CHECKING:
    from regard.attention import attend as attend
    from regard.attention import explain as explain
    from regard.attention import weights as weights
    from regard.checkpoints import CheckpointError as CheckpointError
    from regard.checkpoints import load as load
    from regard.checkpoints import save as save
    from regard.choice import Plan as Plan
    from regard.cost import Cost as Cost
    from regard.cost import LayerCost as LayerCost
    from regard.cost import Work as Work
    from regard.cost import cost as cost
    from regard.cost import crossover as crossover
    from regard.cost import layer_cost as layer_cost
    from regard.families.features import FeatureMechanism as FeatureMechanism
    from regard.families.scores import ScoreMechanism as ScoreMechanism
    from regard.generation import Generated as Generated
    from regard.generation import Prompt as Prompt
    from regard.generation import generate as generate
    from regard.generation import prefill as prefill
    from regard.generation import stream as stream
    from regard.laws import Report as Report
    from regard.laws import check as check
    from regard.layers.attention import MultiHeadAttention as MultiHeadAttention
    from regard.layers.positions import RotaryScaling as RotaryScaling
    from regard.mask import Mask as Mask
    from regard.mask import causal as causal
    from regard.mask import dense as dense
    from regard.mask import global_tokens as global_tokens
    from regard.mask import padding as padding
    from regard.mask import segments as segments
    from regard.mask import window as window
    from regard.mask import window2d as window2d
    from regard.mechanism import Mechanism as Mechanism
    from regard.mechanism import UnnormalisedMechanism as UnnormalisedMechanism
    from regard.mechanisms import Argmax as Argmax
    from regard.mechanisms import Channel as Channel
    from regard.mechanisms import Delta as Delta
    from regard.mechanisms import Elu as Elu
    from regard.mechanisms import Gated as Gated
    from regard.mechanisms import Kernel as Kernel
    from regard.mechanisms import Polynomial as Polynomial
    from regard.mechanisms import Quadratic as Quadratic
    from regard.mechanisms import RandomFeatures as RandomFeatures
    from regard.mechanisms import Retention as Retention
    from regard.mechanisms import Softmax as Softmax
    from regard.mechanisms import Taylor as Taylor
    from regard.mechanisms import Uniform as Uniform
    from regard.models.davit import DaViT as DaViT
    from regard.models.davit import DaViTConfig as DaViTConfig
    from regard.models.decoder import Decoder as Decoder
    from regard.models.decoder import DecoderConfig as DecoderConfig
    from regard.models.encoder import Encoder as Encoder
    from regard.models.encoder import EncoderConfig as EncoderConfig
    from regard.models.quantized import quantized as quantized
    from regard.models.transformer import Transformer as Transformer
    from regard.models.transformer import TransformerConfig as TransformerConfig
    from regard.models.vision import VisionConfig as VisionConfig
    from regard.models.vision import VisionTransformer as VisionTransformer
    from regard.trace import Trace as Trace
    from regard.trace import trace as trace

_HOMES = {
    "regard.attention": "attend explain weights",
    "regard.choice": "Plan",
    "regard.checkpoints": "CheckpointError load save",
    "regard.cost": "Cost LayerCost Work cost crossover layer_cost",
    "regard.generation": "Generated Prompt generate prefill stream",
    "regard.laws": "Report check",
    "regard.layers.attention": "MultiHeadAttention",
    "regard.layers.positions": "RotaryScaling",
    "regard.mask": "Mask causal dense global_tokens padding segments window window2d",
    "regard.families.features": "FeatureMechanism",
    "regard.families.scores": "ScoreMechanism",
    "regard.mechanism": "Mechanism UnnormalisedMechanism",
    "regard.mechanisms": (
        "Argmax Channel Delta Elu Gated Kernel Polynomial Quadratic RandomFeatures Retention Softmax Taylor Uniform"
    ),
    "regard.models.davit": "DaViT DaViTConfig",
    "regard.models.decoder": "Decoder DecoderConfig",
    "regard.models.encoder": "Encoder EncoderConfig",
    "regard.models.quantized": "quantized",
    "regard.models.transformer": "Transformer TransformerConfig",
    "regard.models.vision": "VisionConfig VisionTransformer",
    "regard.trace": "Trace trace",
}
"""The public names, by the module that defines them; the imports above say the same to type checkers."""
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


class _Package(ModuleType):
    """Public names are imported when they are first asked for, and a name means the same whatever was imported before.

    `cost` and `trace` are functions and also the submodules that define them. Python sets a package's attribute to a
    submodule once that is imported; here the attribute stays the function.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        of_submodule = isinstance(value, ModuleType) and name in _HOME
        super().__setattr__(name, getattr(value, name) if of_submodule else value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
