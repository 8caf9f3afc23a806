"""A small model whose tokens are letters, for tests of generated text."""

from typing import Any

import torch

import regard as rg
from generating import redraw
from regard.checkpoints import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz.?!<>|"
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '|' }}{{ m.content }}>{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)
ENDLESS = "20000"
"""New tokens, of which some seconds could not give the last."""
SIZES = {"embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def tiny(**changes: Any) -> rg.Decoder:
    """A random model of letters, with a template: a letter is a token."""
    torch.manual_seed(3)
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=len(LETTERS), **{**SIZES, **changes})).eval()
    redraw(model, 0.3)
    model.tokenizer = Tokenizer.from_vocabulary(list(LETTERS), special={})
    model.tokenizer.chat_template = TEMPLATE
    return model
