"""What a trace has besides weights: predictions, tokens, and all of it in a file."""

import pytest
import torch

import regard as rg
from regard.inference.trace import Trace, trace
from regard.inference.tracing.predictions import MOST
from traced_contents import FORM, WORDS, likeliest, ours, same, traced_davit, with_tokenizer
from traced_models import EVERYTHING, MODELS, SIZES, gpt2, inputs, transformers


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def pair():
    return rg.Transformer(rg.TransformerConfig(**FORM)).eval()


def encoder(**more):
    return rg.Encoder(rg.EncoderConfig(**FORM, **more)).eval()


def test_the_likeliest_tokens_of_a_decoder_at_every_position():
    model, ids = ours(), torch.randint(40, (2, 6))
    with trace(model) as traced:
        logits = model(ids, mask=rg.padding([6, 4]))
        same(traced.top(), likeliest(logits[0, 5], 5))  # also while it is recorded
    same(traced.top(), likeliest(logits[0, 5], 5))
    same(traced.top(3, sequence=1), likeliest(logits[1, 3], 3))  # after the last token that is not padding
    same(traced.top(MOST, position=2), likeliest(logits[0, 2], MOST))
    same(traced.top(1, position=-3, sequence=1), likeliest(logits[1, 3], 1))
    assert traced.top()[0].token == str(traced.top()[0].id)
    assert traced.predictions.ids.shape == (2, 6, MOST)


def test_predictions_of_chosen_rows_alone():
    model, ids = ours(), torch.randint(40, (1, 6))
    with trace(model, rows=[1, -1]) as traced:
        logits = model(ids)
    assert traced.predictions.positions == (1, 5)
    same(traced.top(position=1), likeliest(logits[0, 1], 5))
    same(traced.top(), likeliest(logits[0, 5], 5))
    with pytest.raises(ValueError, match=r"position: expected a recorded position, one of \[1, 5\], got 2"):
        traced.top(position=2)


def test_a_long_sequences_logits_are_not_kept():
    model, ids = ours(), torch.randint(40, (1, 64))
    with trace(model) as traced:
        model(ids)
    size = traced.predictions.ids.numel() * 8 + traced.predictions.probabilities.numel() * 4
    assert size == 64 * MOST * 12
    with trace(model, keep=("weights",)) as light:
        model(ids)
    with pytest.raises(ValueError, match=r"top: expected .* keep=\('predictions', …\), got a trace of Decoder"):
        light.top()


@pytest.mark.parametrize("rows", [None, [-1]])
def test_generation_has_predictions_and_tokens_of_all_its_passes(rows):
    model = with_tokenizer(ours())
    with trace(model, rows=rows) as traced:
        [written] = rg.generate(model, [[3, 4, 5]], max_new_tokens=5, alternatives=3)
    sequence = [3, 4, 5, *written.tokens][:-1]
    assert traced.tokens == [[WORDS[number] for number in sequence]]
    logits = model(torch.tensor([sequence]))[0]
    assert traced.predictions.positions == tuple(range(len(sequence)) if rows is None else range(2, len(sequence)))
    for position in traced.predictions.positions:
        same(traced.top(position=position), likeliest(logits[position], 5))
    assert [traced.top(3, position=2 + step)[0].id for step in range(len(written.tokens))] == list(written.tokens)
    assert traced.top()[0].token == WORDS[traced.top()[0].id]


def test_an_encoder_decoder_knows_both_its_texts():
    model = with_tokenizer(pair())
    source, target = torch.randint(1, 40, (2, 7)), torch.randint(1, 40, (2, 4))
    with trace(model) as traced:
        logits = model(source, target)
    assert traced.source_tokens == [[WORDS[number] for number in row] for row in source.tolist()]
    assert traced.tokens == [[WORDS[number] for number in row] for row in target.tolist()]
    same(traced.top(sequence=1), likeliest(logits[1, -1], 5))
    sides = [tuple(len(side[0]) for side in traced.labels(layer)) for layer in traced.layers]
    assert sides == [(7, 7), (7, 7), (4, 4), (4, 7), (4, 4), (4, 7)]
    assert traced.patterns().of(3, 0).rows["same word"] >= 0
    with trace(model) as generated:
        [written] = rg.generate(model, [source[0].tolist()], max_new_tokens=3)
    assert generated.source_tokens == traced.source_tokens[:1]
    start = model.config.start_token or 0
    assert generated.tokens == [model.tokenizer.tokens([start, *written.tokens][: len(generated.tokens[0])])]
    with trace(model, source_tokens=list("abcdefg")) as labelled:
        model(source[:1], target[:1])
    assert (labelled.source_tokens, len(labelled.tokens[0])) == ([list("abcdefg")], 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_called_so_whichever_token_fills_it(side):
    model, ids = with_tokenizer(ours()), torch.randint(1, 40, (2, 5))
    valid = torch.ones(2, 5, dtype=torch.bool)
    hidden = slice(0, 2) if side == "left" else slice(3, 5)
    valid[1, hidden] = False
    with trace(model) as traced:
        logits = model(ids, mask=rg.padding(valid=valid))
    assert traced.tokens[0] == model.tokenizer.tokens(ids[0])
    assert [token == "[PAD]" for token in traced.tokens[1]] == (~valid[1]).tolist()
    same(traced.top(sequence=1), likeliest(logits[1, 4 if side == "left" else 2], 5))


def test_logits_at_chosen_positions_are_not_taken_for_classes():
    model = pair()
    source, target = torch.randint(1, 40, (1, 7)), torch.randint(1, 40, (1, 4))
    with trace(model) as traced:
        model(source, target, at=torch.tensor([[False, True, False, True]]))
    assert traced.predictions.positions == (0, 1, 2, 3)
    same(traced.top(position=1), likeliest(model(source, target)[0, 1], 5))


def test_tokens_that_nobody_knows_are_none():
    model = with_tokenizer(ours())
    ids = torch.randint(1, 40, (2, 6))
    with trace(ours()) as bare:
        model(ids)
    assert bare.tokens is None
    _, state = model.extend(ids[:, :4], model.start(batch=2))
    with trace(model) as late:  # the first four came before it
        model.extend(ids[:, 4:], state)
    assert late.tokens is None
    with trace(model) as replaced:
        model(ids)
        model(ids[:1, :3])
        assert replaced.tokens == [model.tokenizer.tokens(ids[0, :3])]
    with trace(model, tokens=list("abc")) as labelled:
        model(ids[:1, :3])
    assert labelled.tokens == [["a", "b", "c"]]
    theirs = gpt2().eval()
    theirs.tokenizer = model.tokenizer
    with trace(theirs) as embedded:
        theirs(inputs_embeds=torch.randn(1, 5, 16))
    assert embedded.tokens is None
    assert len(embedded.patterns().heads) == 12


def test_hugging_face_models_predict_and_read_too():
    model, ids = gpt2().eval(), torch.randint(3, 40, (1, 5))
    model.tokenizer = with_tokenizer(ours()).tokenizer
    with trace(model) as traced:
        made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    sequence = made[:, :-1]
    assert traced.tokens == [[WORDS[number] for number in sequence[0].tolist()]]
    logits = model(sequence).logits[0]
    assert traced.predictions.positions == tuple(range(4, 8))  # it computes the last logits of the prompt alone
    for position in range(4, 8):
        same(traced.top(position=position), likeliest(logits[position], 5))
    both = MODELS["bart"]().eval()
    both.tokenizer = model.tokenizer
    with trace(both) as traced:
        out = both(**inputs("bart"))
    assert [len(traced.source_tokens[0]), len(traced.tokens[0])] == [9, 5]
    same(traced.top(sequence=1), likeliest(out.logits[1, -1], 5))


def test_masked_words_are_predicted_where_they_are():
    ids = torch.randint(1, 40, (1, 6))
    model = encoder(masked_words=True)
    with trace(model) as traced:
        hidden = model(ids)
    same(traced.top(position=2), likeliest(model.masked_words(hidden)[0, 2], 5))
    plain = encoder()
    with trace(plain) as traced:
        plain(ids)
    with pytest.raises(ValueError, match="an encoder needs masked_words"):
        traced.top()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    with trace(theirs) as traced:
        logits = theirs(ids).logits
    same(traced.top(position=2), likeliest(logits[0, 2], 5))


@pytest.mark.parametrize("name", ["gpt2", "bart", "vit", "davit", "ours"])
def test_a_file_has_all_of_it(name, tmp_path):
    if name == "davit":
        _, _, traced = traced_davit()
    elif name == "ours":
        model = with_tokenizer(ours())
        with trace(model, keep=(*EVERYTHING, "predictions")) as traced:
            model(torch.randint(1, 40, (2, 6)), mask=rg.padding([6, 4]))
    else:
        model = MODELS[name]().eval()
        with trace(model, keep=(*EVERYTHING, "predictions")) as traced:
            model(**inputs(name))
    again = Trace.open(traced.save(tmp_path / "trace.safetensors"))
    assert (again.tokens, again.source_tokens) == (traced.tokens, traced.source_tokens)
    assert (again.grid, again.class_token) == (traced.grid, traced.class_token)
    for mine, theirs in zip(again.layers, traced.layers, strict=True):
        assert mine.definition == theirs.definition
        assert torch.equal(mine.contributions(), theirs.contributions())
    if traced.predictions is not None:
        assert again.top(sequence=1) == traced.top(sequence=1)
        assert again.top(position=0) == traced.top(position=0)
