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
"""Every model and its config, by the name files have for it."""
