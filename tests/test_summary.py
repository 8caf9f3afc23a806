"""What a model says of itself is what counters count."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg

SIZES = {"vocabulary_size": 61, "embedding_dim": 16, "num_layers": 3, "num_heads": 4}
DECODERS = {
    "llama": rg.DecoderConfig(**SIZES, num_kv_heads=2, tied=False),
    "gpt2": rg.DecoderConfig.gpt2(**SIZES),
    "window": rg.DecoderConfig(**SIZES, window=rg.Window(4), window_layers=(1,)),
    "quadratic": rg.DecoderConfig(**SIZES, mechanism="quadratic", num_kv_heads=1),
}


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()  # what autograd records has no room to spare
def test_a_decoders_token(name):
    model = rg.Decoder(DECODERS[name]).eval()
    tokens = torch.zeros(1, 24, dtype=torch.long)
    _, state = model.extend(tokens[:, :23], model.start(batch=1, capacity=24))
    summary = model.summary(length=24)
    _, longer = model.extend(tokens[:, 23:], state)
    assert counted(lambda: model.extend(tokens[:, 23:], state)) == summary.flops
    assert longer.nbytes == summary.state_fixed + 24 * summary.state_per_token
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(part.parameters for part in summary.parts) == summary.parameters


@pytest.mark.parametrize("form", ["bert", "albert"])
def test_an_encoders_text(form):
    config = getattr(rg.EncoderConfig, form)(**SIZES, **({"factor_dim": 6} if form == "albert" else {}))
    model = rg.Encoder(config).eval()
    tokens, summary = torch.zeros(1, 30, dtype=torch.long), model.summary(length=30)

    def run():
        hidden = model(tokens)
        if config.masked_words:
            model.masked_words(hidden)

    assert counted(run) == summary.flops * 30
    assert sum(part.parameters for part in summary.parts) == summary.parameters


@torch.no_grad()
def test_a_transformers_token():
    model = rg.Transformer(rg.TransformerConfig(**SIZES)).eval()
    source, target = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, dtype=torch.long)
    summary = model.summary(length=20)
    _, state = model.extend(target[:, :19], model.start(source, capacity=20))
    assert counted(lambda: model.encode(source)) == 20 * summary.parts[1].flops
    assert counted(lambda: model.extend(target[:, 19:], state)) == summary.flops - summary.parts[1].flops
    assert state.nbytes == summary.state_fixed + 20 * summary.state_per_token


def test_an_image():
    vision = rg.VisionTransformer(
        rg.VisionConfig(image_size=24, patch_size=8, embedding_dim=16, num_layers=2, num_heads=2)
    )
    assert counted(lambda: vision(torch.zeros(1, 3, 24, 24))) == vision.summary().flops
    stages = {
        "embedding_dim": (8, 16),
        "num_layers": (1, 2),
        "num_heads": (2, 2),
        "num_groups": (2, 4),
        "window_size": 3,
    }
    patches = {"patch_size": (7, 2), "patch_stride": (4, 2), "patch_padding": (3, 0), "norm_first": (False, True)}
    davit = rg.DaViT(rg.DaViTConfig(**stages, **patches, num_classes=5))
    assert counted(lambda: davit(torch.zeros(1, 3, 32, 32))) == davit.summary(32).flops
    wide = rg.VisionConfig(image_size=(16, 32), patch_size=8, embedding_dim=16, num_layers=1, num_heads=2)
    assert "FLOPs at 16×32 pixels" in str(rg.VisionTransformer(wide).summary())
    with pytest.raises(ValueError, match="length: expected a whole number of at least 1, got 0"):
        davit.summary(0)
    with pytest.raises(ValueError, match="images: expected sides large enough"):
        davit.summary(1)
    for model in (vision, davit):
        assert sum(part.parameters for part in model.summary().parts) == model.summary().parameters


def test_published_models_have_their_published_sizes():
    base = rg.VisionConfig(embedding_dim=768, num_layers=12, num_heads=12)
    assert rg.VisionTransformer(base).summary().parameters == 86_567_656
    assert rg.DaViT(rg.DaViTConfig()).summary().parameters == 28_360_168
    gpt2 = rg.DecoderConfig.gpt2(vocabulary_size=50257, embedding_dim=768, num_layers=12, num_heads=12)
    with torch.device("meta"):
        assert rg.Decoder(gpt2).summary().parameters == 124_439_808


def test_it_reads_as_a_table_and_as_json():
    summary = rg.Decoder(DECODERS["llama"]).summary(length=100)
    text = str(summary)
    for word in ("stack", "4 on 2 kv", "Softmax()", "state 192 B per token: 19.2 kB at 100 tokens", "FLOPs / token"):
        assert word in text
    assert summary.to_json()["parts"][1]["layers"] == 3
    assert "at any length" in str(rg.Decoder(DECODERS["quadratic"]).summary())
    with pytest.raises(ValueError, match="length: expected a whole number"):
        rg.Decoder(DECODERS["llama"]).summary(length=0)
