"""Small models with random weights for tests of the explorer."""

from io import BytesIO

import torch

import regard as rg
from regard.explorer.frames import read_frames
from regard.explorer.requests import run_request
from regard.explorer.session import Session
from regard.explorer.snapshot import take
from regard.explorer.subject import of_ids

LETTERS = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop"]
SIZES = {"vocabulary_size": len(LETTERS), "embedding_dim": 16, "num_heads": 4, "num_layers": 2}


def tokenizer():
    return rg.Tokenizer.from_vocabulary(LETTERS, special={"unk": "[UNK]", "classification": "[CLS]"})


def spread(model):
    """The model with larger weights, so that its attention is far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.4 if "embedding" not in name else 1.0))
    model.tokenizer = tokenizer()
    return model.eval()


def decoder(**changes):
    return spread(rg.Decoder(rg.DecoderConfig(**{**SIZES, **changes})))


def encoder(**changes):
    return spread(rg.Encoder(rg.EncoderConfig(**{**SIZES, "context_length": 512, **changes})))


def translator(**changes):
    config = rg.TransformerConfig(**{**SIZES, "start_token": 1, "end_tokens": (2,), **changes})
    return spread(rg.Transformer(config))


def davit():
    """A DaViT of two stages; the last windows of its maps reach beyond them."""
    sizes = {"embedding_dim": (8, 16), "num_layers": (1, 1), "num_heads": (2, 4), "num_groups": (2, 4)}
    patches = {"patch_size": (8, 2), "patch_stride": (8, 2), "patch_padding": (0, 0), "norm_first": (False, True)}
    model = rg.DaViT(rg.DaViTConfig(**sizes, **patches, window_size=4, num_classes=3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


MODELS = {
    "bert": lambda: spread(rg.Encoder(rg.EncoderConfig.bert(**SIZES))),
    "gpt2": lambda: spread(rg.Decoder(rg.DecoderConfig.gpt2(**SIZES))),
    "grouped": lambda: decoder(num_kv_heads=2),
    "t5": lambda: spread(rg.Transformer(rg.TransformerConfig.t5(**SIZES))),
    "softcap": lambda: decoder(mechanism=rg.Softmax(softcap=1.5, beta=0.7)),
    "argmax": lambda: decoder(mechanism=rg.Argmax()),
    "quadratic": lambda: encoder(mechanism=rg.Quadratic()),
    "elu": lambda: decoder(mechanism=rg.Elu(), num_kv_heads=1),
    "retention": lambda: decoder(mechanism=rg.Retention(), num_kv_heads=2),
    "gated": lambda: decoder(mechanism="gated", num_kv_heads=2),
    "delta": lambda: decoder(mechanism="delta"),
    "window": lambda: encoder(window=rg.Window(2, 2)),
}


def snapshot(model, length=9, source_length=6, changes=(), **more):
    ids = torch.randint(3, len(LETTERS), (length,)).tolist()
    reads_source = isinstance(model, rg.Transformer)
    source = torch.randint(3, len(LETTERS), (source_length,)).tolist() if reads_source else None
    return take("1", of_ids("model", model, ids, source), changes, **more)


def frames_of(compute, *arguments):
    parts = []
    compute(*arguments, parts.append)
    return list(read_frames(b"".join(parts)))


def session_of(**models):
    return Session(models)


def run(session, model="model", changes=(), twin=False, **chosen):
    body = {"model": model, "input": chosen or {"text": "a b c d e f"}, "changes": list(changes), "twin": twin}
    return frames_of(session.run, run_request(body))


def done_of(frames):
    """The frame with a run's output."""
    (done,) = (header for header, _ in frames if header["type"] == "done")
    return done


def table(data, rows, columns, dtype=torch.float32, offset=0):
    return torch.frombuffer(bytearray(data), dtype=dtype, count=rows * columns, offset=offset).view(rows, columns)


def png(size=20, mode="RGB"):
    from PIL import Image

    file = BytesIO()
    Image.new(mode, (size, size + 4), 128).save(file, "PNG")
    return file.getvalue()
