"""Every model and its config, by name."""

from regard.models.base import Model
from regard.models.config import Config
from regard.models.davit import DaViT, DaViTConfig
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.encoder import Encoder, EncoderConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import VisionConfig, VisionTransformer

MODELS: dict[str, tuple[type[Model], type[Config]]] = {
    "Decoder": (Decoder, DecoderConfig),
    "Encoder": (Encoder, EncoderConfig),
    "Transformer": (Transformer, TransformerConfig),
    "VisionTransformer": (VisionTransformer, VisionConfig),
    "DaViT": (DaViT, DaViTConfig),
}
"""Every model and its config, by the name that checkpoints use."""


def is_listed(model: object) -> bool:
    """Whether a checkpoint can name the class of a model, so that `load` builds it.

    >>> import regard as rg, torch
    >>> from regard.models.registry import is_listed
    >>> sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> is_listed(rg.Decoder(rg.DecoderConfig(**sizes))), is_listed(torch.nn.Linear(2, 3))
    (True, False)
    """
    return any(type(model) is listed for listed, _ in MODELS.values())


def build(config: Config) -> Model:
    """The model that a config describes, with random weights.

    >>> import regard as rg
    >>> from regard.models.registry import build
    >>> type(build(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))).__name__
    'Decoder'
    """
    return next(model for model, kind in MODELS.values() if kind is type(config))(config)
