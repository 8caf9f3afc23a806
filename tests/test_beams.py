"""Beam search: exhaustive with enough beams, the same in a batch, and the stop strings of beams."""

import itertools
from dataclasses import replace

import pytest
import torch

import peers
import regard as rg
from generating import DECODERS, PROMPTS, lettered, made


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 0.6, 2.0])
@pytest.mark.parametrize("name", ["mha", "quadratic", "window"])
@torch.no_grad()
def test_beam_search_with_beams_enough_is_exhaustive(name, length_penalty):
    torch.manual_seed(1)
    config = {**vars(DECODERS[name]), "vocabulary_size": 5, "end_tokens": (4,)}
    model = rg.Decoder(rg.DecoderConfig(**config)).double().eval()
    model.initialise(6)
    prompt, most = [1, 2, 0], 4
    every = []
    for length in range(1, most + 1):
        ended = [
            tokens
            for tokens in itertools.product(range(5), repeat=length)
            if 4 not in tokens[:-1] and (length == most or tokens[-1] == 4)
        ]
        logits = model(torch.tensor([[*prompt, *tokens] for tokens in ended])).log_softmax(-1)
        for tokens, log_probabilities in zip(ended, logits[:, len(prompt) - 1 : -1], strict=True):
            total = float(log_probabilities[range(length), tokens].sum())
            every.append((total / length**length_penalty, list(tokens)))
    every.sort(key=lambda entry: -entry[0])
    best = rg.generate(model, [prompt], max_new_tokens=most, beams=5**most, n=3, length_penalty=length_penalty)
    assert [text.tokens for text in best] == [tokens for _, tokens in every[:3]]
    assert [text.score for text in best] == pytest.approx([score for score, _ in every[:3]], abs=1e-10)


@pytest.mark.parametrize("name", ["gqa", "elu", "window", "t5"])
@torch.no_grad()
def test_beams_of_a_batch_are_those_of_one_alone_and_score_as_they_say(name):  # transformers#46612
    model = made(name)
    together = rg.generate(model, PROMPTS, max_new_tokens=12, beams=4)
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert rg.generate(model, [prompt], max_new_tokens=12, beams=4)[0].tokens == text.tokens
        if isinstance(model, rg.Decoder):
            tokens = torch.tensor([[*prompt, *text.tokens]])
            scores = model(tokens).log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])
            assert text.score == pytest.approx(float(scores.mean()), abs=1e-9)


@torch.no_grad()
def test_beams_are_those_of_transformers(tmp_path):
    theirs = peers.decoder("llama")
    ours = rg.load(peers.saved(theirs, tmp_path / "model"))
    tokens = peers.sequences(1, 12)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, 12:].tolist()
    assert rg.generate(ours, tokens.tolist(), max_new_tokens=10, beams=4)[0].tokens == expected


@torch.no_grad()
def test_a_stop_string_may_have_the_token_that_ends_a_beam():
    model, options = made("mha"), {"max_new_tokens": 4, "beams": 8, "n": 8}
    end = rg.generate(model, [PROMPTS[0]], **options)[0].tokens[2]
    model.tokenizer, model.config = lettered([end]), replace(model.config, end_tokens=(end,))
    plain = rg.generate(model, [PROMPTS[0]], **options)
    ended = [text for text in plain if text.reason == "end" and len(text.tokens) > 2]
    letter = model.tokenizer.tokens(ended[0].tokens)[-2]
    stopped_texts = rg.generate(model, [PROMPTS[0]], stop=f"{letter}<|unk|>", **options)
    assert [text.tokens for text in stopped_texts] == [text.tokens for text in plain]
    for text, other in zip(stopped_texts, plain, strict=True):
        stopped = other.reason == "end" and other.endswith(letter)
        assert (text, text.reason) == ((other[:-1], "stop") if stopped else (other, other.reason))


@torch.no_grad()
def test_beams_look_for_stop_strings_in_what_is_new():
    model, inner, decoded = made("mha"), lettered([0]), []

    class Counting:
        eos = None

        def decode(self, ids, special=False):
            decoded.append(len(ids))
            return inner.decode(ids, special)

    plain, model.tokenizer = rg.generate(model, [[5]], max_new_tokens=30, beams=2)[0].tokens, Counting()
    text = rg.generate(model, [[5]], max_new_tokens=30, beams=2, stop="no such letters")[0]
    assert (text.tokens, text) == (plain, inner.decode(plain))
    candidates = 4  # two for each beam
    assert sum(decoded) <= 6 * candidates * len(plain)
