"""The encoder-decoder: T5's numbers against transformers, the original's against torch, and laws that hold for both."""

import json

import pytest
import torch
from torch import nn

import regard as rg
from encoder_decoders import SIZES, build, close, real, tokens
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.models.layers.positions import sinusoidal
from regard.models.transformer import Transformer, TransformerConfig

FORMS = {
    "original": TransformerConfig(**SIZES),
    "two vocabularies": TransformerConfig(**SIZES, target_vocabulary_size=50, num_decoder_layers=3, tied=False),
    "learned": TransformerConfig(**SIZES, positions="learned", context_length=64, num_kv_heads=2),
    "window": TransformerConfig(**SIZES, encoder_window=rg.Window(4, 4), decoder_window=rg.Window(3), num_kv_heads=1),
    "t5": TransformerConfig.t5(**SIZES, num_buckets=8, longest_distance=20),
    "t5 v1.1": TransformerConfig.t5(**SIZES, activation="geglu_tanh", tied=False, scaled_output=False, qk_length=5),
}


CAUSAL = [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8) and not mechanism.ordered]


@pytest.fixture(params=FORMS)
def model(request):
    return build(FORMS[request.param])


class TestOriginal:
    """Against torch.nn.Transformer, in float64."""

    @torch.no_grad()
    @pytest.mark.parametrize("pre_norm", [False, True])
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_hidden_tokens_are_torchs(self, pre_norm, side):
        ours = build(TransformerConfig(**SIZES, num_decoder_layers=3, pre_norm=pre_norm))
        theirs = torch_transformer(ours)
        source, target = tokens(3, 11), tokens(3, 8)
        # Targets are padded on the right: on the left, torch's queries that see nothing are NaN and spoil the rest.
        valid, target_valid = real((3, 11), [11, 4, 7], side), real((3, 8), [8, 5, 1], "right")
        expected = theirs(
            embedded(ours, source, valid),
            embedded(ours, target, target_valid),
            tgt_mask=torch.ones(8, 8, dtype=torch.bool).triu(1),
            src_key_padding_mask=~valid,
            tgt_key_padding_mask=~target_valid,
            memory_key_padding_mask=~valid,
        )
        logits = expected @ ours.embedding.weight.T
        actual = ours(source, target, rg.padding(valid=valid), rg.padding(valid=target_valid))
        close(actual[target_valid], logits[target_valid])

    def test_sinusoids_are_the_papers(self):
        place, pair = torch.arange(50.0).double()[:, None], torch.arange(12.0).double()
        angle = place / 10000 ** (2 * pair / 24)
        table = sinusoidal(torch.arange(50), 24)
        close(table[:, ::2].double(), angle.sin(), 1e-5)
        close(table[:, 1::2].double(), angle.cos(), 1e-5)


def embedded(model, ids, valid):
    """What the first layer reads: rows padded on the left start at position 0 with their first real token."""
    place = (valid.long().cumsum(-1) - 1).clamp(min=0)
    return model.embedding(ids) * 24**0.5 + sinusoidal(place, 24).double()


def torch_transformer(ours):
    """torch's own, with our weights; the paper's form has no norm at the end, which torch adds unless told."""
    config = ours.config
    options = {"dropout": 0.0, "batch_first": True, "norm_first": config.pre_norm, "dtype": torch.float64}
    final = [nn.LayerNorm(24, dtype=torch.float64) if config.pre_norm else None for _ in range(2)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 4, 96, **options), config.num_layers, final[0], enable_nested_tensor=False
    )
    layer = nn.TransformerDecoderLayer(24, 4, 96, **options)
    decoder = nn.TransformerDecoder(layer, config.decoder_layers, final[1])
    theirs = nn.Transformer(24, 4, custom_encoder=encoder, custom_decoder=decoder, **options).eval()
    for mine, stack in ((ours.encoder, encoder), (ours.decoder, decoder)):
        if config.pre_norm:
            stack.norm.load_state_dict(mine.norm.state_dict())
        for block, other in zip(mine.blocks, stack.layers, strict=True):
            pairs = [(block.attention, other.self_attn)]
            norms = [block.attention_norm, block.network_norm]
            if mine is ours.decoder:
                pairs.append((block.cross, other.multihead_attn))
                norms.insert(1, block.cross_norm)
            for attention, theirs_attention in pairs:
                qkv = (attention.W_q, attention.W_k, attention.W_v)
                theirs_attention.in_proj_weight.copy_(torch.cat([projection.weight for projection in qkv]))
                theirs_attention.in_proj_bias.copy_(torch.cat([projection.bias for projection in qkv]))
                theirs_attention.out_proj.load_state_dict(attention.W_o.state_dict())
            for index, norm in enumerate(norms, 1):
                getattr(other, f"norm{index}").load_state_dict(norm.state_dict())
            other.linear1.load_state_dict(block.network.up.state_dict())
            other.linear2.load_state_dict(block.network.down.state_dict())
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 1, 3, 1], [0, 2, 7]])
def test_a_stream_in_any_chunks_is_the_whole(model, chunks):
    source, target = tokens(2, 7), tokens(2, 9)
    mask = rg.padding([7, 4])
    state, parts = model.start(source, mask, capacity=9), []
    for part in target.split(chunks, dim=1):
        logits, state = model.extend(part, state)
        parts.append(logits)
    close(torch.cat(parts, dim=1), model(source, target, mask))


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_mechanism_runs_and_streams(name):
    model = build(TransformerConfig(**SIZES, mechanism=name))
    source, target = tokens(2, 7), tokens(2, 9)
    masks = rg.padding([7, 4]), rg.padding(valid=real((2, 9), [9, 6], "left"))
    whole = model(source, target, *masks)
    assert whole.isfinite().all()
    state, parts = model.start(source, masks[0], capacity=9), []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        seen = rg.padding(valid=real((2, 9), [9, 6], "left")[:, :stop])
        logits, state = model.extend(target[:, start:stop], state, seen)
        parts.append(logits)
    close(torch.cat(parts, dim=1), whole, 1e-9)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("target_side", ["left", "right"])
def test_a_batch_is_its_sequences_one_by_one(model, side, target_side):
    source, target = tokens(3, 37), tokens(3, 8)
    valid, target_valid = real((3, 37), [5, 37, 20], side), real((3, 8), [8, 3, 1], target_side)
    masks = rg.padding(valid=valid), rg.padding(valid=target_valid)
    together, memory = model(source, target, *masks), model.encode(source, masks[0])
    assert (memory[~valid] == 0).all()
    for row in range(3):
        row_source, row_target = source[row, valid[row]][None], target[row, target_valid[row]][None]
        close(memory[row, valid[row]], model.encode(row_source)[0])
        close(together[row, target_valid[row]], model(row_source, row_target)[0])


@torch.no_grad()
def test_what_stands_in_the_padding_changes_nothing(model):
    source, target = tokens(2, 9), tokens(2, 6)
    valid, target_valid = real((2, 9), [9, 4], "left"), real((2, 6), [3, 6], "right")
    masks = rg.padding(valid=valid), rg.padding(valid=target_valid)
    before = model(source, target, *masks)
    after = model(torch.where(valid, source, 0), torch.where(target_valid, target, 1), *masks)
    assert torch.equal(before, after)


@torch.no_grad()
def test_the_future_and_the_source_are_seen_as_they_should_be(model):
    source, target = tokens(1, 7), tokens(1, 6)
    before = model(source, target)
    later = target.clone()
    later[:, 4] = 1
    assert torch.equal(model(source, later)[:, :4], before[:, :4])
    for place in range(7):
        other = source.clone()
        other[:, place] = 1
        assert (model(other, target) - before).abs().amin(1).max() > 1e-6


@torch.no_grad()
def test_other_masks_of_the_source_are_the_encoders_alone(model):
    source, target = tokens(2, 7), tokens(2, 5)
    narrow = rg.padding([7, 5]) & rg.window(before=1, after=1)
    memory = model.encode(source, narrow)
    assert not torch.allclose(memory, model.encode(source, rg.padding([7, 5])))
    x = model._embed("target", target, None)
    expected, _ = model.decoder(x, memory=model.decoder.remember(memory), memory_mask=rg.padding([7, 5]))
    close(model(source, target, narrow), model.predict(expected))
    state = model.start(source, narrow)
    close(model.extend(target, state)[0], model.predict(expected))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_reordered_is_computed_again(model, side):
    source, target = tokens(3, 9), tokens(3, 8)
    valid = real((3, 9), [9, 4, 6], side)
    target_valid = real((3, 5), [5, 2, 4], "left")
    state = model.start(source, rg.padding(valid=valid), capacity=8)
    _, state = model.extend(target[:, :5], state, rg.padding(valid=target_valid))
    index = torch.tensor([1, 1, 2, 0])
    logits, longer = model.extend(target[index, 5:], state.reorder(index))
    whole = torch.cat([target_valid, torch.ones(3, 3, dtype=torch.bool)], dim=1)[index]
    expected = model(source[index], target[index], rg.padding(valid=valid[index]), rg.padding(valid=whole))
    close(logits, expected[:, 5:])
    assert longer.length == 8


@torch.no_grad()
def test_cropped_is_as_it_was(model):
    source, target = tokens(2, 9), tokens(2, 8)
    mask = rg.padding([9, 4])
    _, state = model.extend(target, model.start(source, mask, capacity=8))
    other = tokens(2, 3)
    logits, _ = model.extend(other, state.crop(5))
    close(logits, model(source, torch.cat([target[:, :5], other], dim=1), mask)[:, 5:])
    assert state.length == 8


@torch.no_grad()
def test_a_state_is_a_value():
    model = build(FORMS["t5"])
    state = model.start(tokens(1, 5), capacity=8)
    first, _ = model.extend(torch.tensor([[3, 4]]), state)
    model.extend(torch.tensor([[5, 6, 7]]), state)
    again, _ = model.extend(torch.tensor([[3, 4]]), state)
    assert torch.equal(first, again)
    assert state.length == 0


@torch.no_grad()
def test_a_window_is_what_a_mask_of_it_gives():
    windows = {"encoder_window": rg.Window(3, 1), "decoder_window": rg.Window(2)}
    model, near = build(FORMS["original"]), build(TransformerConfig(**SIZES, **windows))
    near.load_state_dict(model.state_dict())
    source, target = tokens(2, 13), tokens(2, 11)
    valid, target_valid = real((2, 13), [13, 6], "left"), real((2, 11), [11, 5], "right")
    masks = rg.padding(valid=valid), rg.padding(valid=target_valid)
    expected = model(source, target, masks[0] & rg.window(before=3, after=1), masks[1] & rg.window(before=2))
    close(near(source, target, *masks), expected)
    assert (model(source, target, *masks) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_windows_state_does_not_grow():
    model = build(TransformerConfig(**SIZES, encoder_window=rg.Window(3, 3), decoder_window=rg.Window(2)))
    source, target = tokens(1, 5), tokens(1, 40)
    state, sizes = model.start(source), set()
    for at in range(40):
        logits, state = model.extend(target[:, at : at + 1], state)
        sizes.add(state.nbytes)
    close(logits, model(source, target)[:, -1:])
    assert len(sizes) == 1
    assert state.nbytes < build(FORMS["original"]).start(source).nbytes


@torch.no_grad()
def test_logits_of_chosen_places_alone(model):
    source, target = tokens(2, 9), tokens(2, 6)
    masks, at = (rg.padding([9, 4]), rg.padding([3, 6])), real((2, 6), [3, 6], "right")
    close(model(source, target, *masks, at=at), model(source, target, *masks)[at])
    with pytest.raises(ValueError, match=r"at: expected bool \(2, 6\), got torch.bool \(2, 5\)"):
        model(source, target, at=at[:, 1:])


def test_every_weight_learns(model):
    model.train()
    model(tokens(2, 40), tokens(2, 40)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", FORMS)
def test_a_new_models_logits_are_of_size_one(name):
    model = Transformer(FORMS[name]).eval()
    assert 0.3 < model(tokens(4, 20), tokens(4, 20)).std() < 3


@torch.no_grad()
def test_saved_and_loaded_is_the_same(model, tmp_path):
    again = rg.load(rg.save(model, tmp_path / "model"))
    source, target = tokens(2, 7), tokens(2, 5)
    assert again.config == model.config
    assert torch.equal(again(source, target), model(source, target))


@pytest.mark.parametrize("name", FORMS)
def test_a_config_is_its_json(name):
    written = json.loads(json.dumps(FORMS[name].to_json()))
    assert TransformerConfig.from_json(written) == FORMS[name]


def test_a_shared_vocabulary_is_one_embedding():
    shared, apart = Transformer(FORMS["original"]), Transformer(FORMS["two vocabularies"])
    assert not hasattr(shared, "target_embedding")
    assert not hasattr(shared, "head")
    assert apart.target_embedding.weight.shape == apart.head.weight.shape == (50, 24)
    assert apart(tokens(1, 3, below=60), tokens(1, 2)).shape == (1, 2, 50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "elu"}, "mechanism: expected one with additive scores"),
        ({"mechanism": "argmax"}, "mechanism: expected one with additive scores"),
        ({"mechanism": "channel", "positions": "none"}, "mechanism: expected one that can be causal"),
        ({"positions": "rotary"}, "positions: expected one of sinusoidal, relative, learned, none, got 'rotary'"),
        ({"num_buckets": 7}, "num_buckets: expected an even number of at least 4, got 7"),
        ({"decoder_window": rg.Window(2, 2)}, "decoder_window: expected after=0"),
        ({"decoder_window": 3}, r"decoder_window: expected Window\(before, after\), got 3"),
        ({"longest_distance": 16}, "longest_distance: expected more than num_buckets / 2 = 16, got 16"),
        ({"num_decoder_layers": 0}, "num_decoder_layers: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Transformer(TransformerConfig.t5(**{**SIZES, **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": torch.tensor([[60], [1]])}, "source: expected tokens from 0 to 59, got 60"),
        ({"target": torch.tensor([[50], [1]])}, "target: expected tokens from 0 to 49, got 50"),
        ({"target": torch.tensor([[-1], [1]])}, "target: expected tokens from 0 to 49, got -1"),
        ({"target": torch.zeros(2, 3)}, "target: expected whole numbers of shape"),
        ({"source": [[1, 2]]}, "source: expected whole numbers of shape"),
        ({"target": torch.tensor([[1]])}, "target: expected as many sequences as the source's 2, got 1"),
        ({"source_mask": rg.padding([1, 2, 3])}, "mask: expected padding for 2 sequences"),
        ({"target_mask": rg.padding([9, 2])}, "mask: expected padding lengths of at most 3 keys, got 9"),
        ({"target_mask": torch.zeros(3, 3)}, "mask: expected a bool tensor"),
    ],
)
def test_a_call_that_cannot_be_is_refused(change, message):
    model = Transformer(FORMS["two vocabularies"])
    arguments = {"source": tokens(2, 4), "target": tokens(2, 3), **change}
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_learned_positions_end_and_sinusoids_do_not():
    limited = Transformer(TransformerConfig(**SIZES, positions="learned", context_length=8))
    with pytest.raises(ValueError, match=r"source: expected at most 8 tokens \(the model's context\), got 9"):
        limited.encode(tokens(1, 9))
    with pytest.raises(ValueError, match=r"target: expected at most 8 tokens \(the model's context\), got 9"):
        limited(tokens(1, 8), tokens(1, 9))
    _, state = limited.extend(tokens(1, 8), limited.start(tokens(1, 8), capacity=20))
    with pytest.raises(ValueError, match="target: expected at most 8 tokens"):
        limited.extend(tokens(1, 1), state)
    endless = Transformer(TransformerConfig(**SIZES, context_length=8))
    assert endless(tokens(1, 30), tokens(1, 30)).shape == (1, 30, 60)


def test_a_state_needs_a_source_and_room():
    model = Transformer(FORMS["original"])
    with pytest.raises(ValueError, match=r"state: expected one from start\(source, …\)"):
        model.extend(tokens(1, 2), model.decoder.start(batch=1, capacity=4))
    with pytest.raises(ValueError, match=r"state: expected at most 4 tokens \(its capacity\)"):
        model.extend(tokens(1, 5), model.start(tokens(1, 3), capacity=4))


@torch.no_grad()
def test_without_positions_the_sources_tokens_may_change_places():
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 31, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}
    model = rg.Transformer(rg.TransformerConfig(**sizes, positions="none")).double().eval()
    source, target = torch.randint(31, (2, 11)), torch.randint(31, (2, 5))
    order = torch.randperm(11)
    assert (model.encode(source[:, order]) - model.encode(source)[:, order]).abs().max() <= 1e-12
    assert (model(source[:, order], target) - model(source, target)).abs().max() <= 1e-12
