"""Models of every kind, for tests of checkpoints."""

from safetensors.torch import load_file, save_file

import regard as rg

SIZES = {"vocabulary_size": 23, "embedding_dim": 12, "num_layers": 2, "num_heads": 2}
STAGES = {"embedding_dim": (4, 8), "num_layers": (1, 1), "num_heads": (1, 2), "num_groups": (1, 2), "window_size": 3}
PATCHES = {"patch_size": (7, 2), "patch_stride": (4, 2), "patch_padding": (3, 0), "norm_first": (False, True)}
MODELS = {
    "llama": lambda: rg.Decoder(
        rg.DecoderConfig(**SIZES, num_kv_heads=1, tied=False, window=rg.Window(3), window_layers=(1,))
    ),
    "gpt2": lambda: rg.Decoder(rg.DecoderConfig.gpt2(**SIZES, mechanism=rg.Softmax(beta=0.5, softcap=9.0))),
    "argmax": lambda: rg.Decoder(rg.DecoderConfig(**SIZES, mechanism="argmax")),
    "quadratic": lambda: rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=rg.Quadratic(c=0.5))),
    "scaled": lambda: rg.Decoder(
        rg.DecoderConfig(**SIZES, rotary_scaling=rg.RotaryScaling(kind="llama3", factor=8.0), start_token=1)
    ),
    "bert": lambda: rg.Encoder(rg.EncoderConfig.bert(**SIZES, num_classes=3, end_tokens=(2, 3))),
    "albert": lambda: rg.Encoder(rg.EncoderConfig.albert(**SIZES, factor_dim=5)),
    "transformer": lambda: rg.Transformer(rg.TransformerConfig(**SIZES, target_vocabulary_size=19)),
    "t5": lambda: rg.Transformer(rg.TransformerConfig.t5(**SIZES, qk_length=4)),
    "vision": lambda: rg.VisionTransformer(
        rg.VisionConfig(image_size=(8, 12), patch_size=4, embedding_dim=12, num_layers=2, num_heads=2, head="mlp")
    ),
    "davit": lambda: rg.DaViT(rg.DaViTConfig(**STAGES, **PATCHES)),
}


def change_tensors(folder, drop=(), **tensors):
    kept = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name not in drop}
    save_file(kept | tensors, folder / "model.safetensors")
