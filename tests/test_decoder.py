"""Decoders agree with transformers, and with themselves: streamed, padded, batched, exported."""

import copy
from dataclasses import fields, replace

import pytest
import torch
import transformers
from torch import Tensor

import peers
import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.models.registry import MODELS

FORMS = {
    "llama": rg.DecoderConfig(
        vocabulary_size=61, embedding_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, context_length=64
    ),
    "mqa-window": rg.DecoderConfig(
        vocabulary_size=61,
        embedding_dim=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=1,
        window=rg.Window(4),
        window_layers=(0, 2),
    ),
    "gpt2": rg.DecoderConfig.gpt2(vocabulary_size=61, embedding_dim=16, num_layers=2, num_heads=4, context_length=64),
    "alibi": rg.DecoderConfig(
        vocabulary_size=61, embedding_dim=16, num_layers=2, num_heads=3, qk_length=6, value_length=4, positions="alibi"
    ),
    "sinusoidal": rg.DecoderConfig(
        vocabulary_size=61, embedding_dim=16, num_layers=2, num_heads=2, positions="sinusoidal", tied=False
    ),
    "none": rg.DecoderConfig(vocabulary_size=61, embedding_dim=16, num_layers=2, num_heads=2, positions="none"),
}
SCALINGS = {
    "linear": rg.RotaryScaling(kind="linear", factor=3.0),
    "dynamic": rg.RotaryScaling(kind="dynamic", factor=2.5),
    "llama3": rg.RotaryScaling(kind="llama3", factor=5.0, original_context_length=8),
}
CAUSAL = [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)]


def made(config: rg.DecoderConfig) -> rg.Decoder:
    torch.manual_seed(0)
    model = rg.Decoder(config).double().eval()
    model.initialise(4)
    return model


@torch.no_grad()
def test_the_residual_stream_of_a_new_decoder_hardly_grows_with_its_layers():
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    growth = []
    for layers in (1, 16):
        torch.manual_seed(0)
        model = rg.Decoder(rg.DecoderConfig(vocabulary_size=64, embedding_dim=64, num_layers=layers, num_heads=4))
        model.stack.norm = torch.nn.Identity()
        embedded = model.embedding(tokens)
        growth.append(float(model.stack(embedded)[0].std() / embedded.std()))
        block = model.stack.blocks[-1]
        ratio = block.attention.W_o.weight.std() / block.attention.W_q.weight.std()
        assert ratio == pytest.approx((2 * layers) ** -0.5, rel=0.05)
        assert model.embedding.weight.std() == pytest.approx((3 * 64) ** -0.5, rel=0.05)
    assert growth[1] < 2 * growth[0]  # undivided it is as the root of the layers, four times as large


def greedy(model: rg.Decoder, prompt: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    state = model.start(batch=len(prompt), capacity=prompt.shape[1] + count)
    logits, state = model.extend(prompt, state, None if mask is None else rg.padding(valid=mask))
    chosen = []
    for _ in range(count):
        chosen.append(logits[:, -1].argmax(-1, keepdim=True))
        logits, state = model.extend(chosen[-1], state)
    return torch.cat(chosen, 1)


@pytest.mark.parametrize("name", peers.DECODERS)
@torch.no_grad()
def test_parity_with_transformers(name, tmp_path):
    theirs = peers.decoder(name)
    ours = rg.load(peers.saved(theirs, tmp_path / "model"))
    tokens = peers.sequences()
    valid, positions = peers.left_padded(3, 70, 32, 7, 0)
    assert ours.dtype == torch.float64
    whole = theirs(tokens).logits
    assert (ours(tokens) - whole).abs().max() <= 1e-10
    if name == "llama-dynamic":  # transformers scales a row by the longest one beside it, and by longer ones before
        rows = [peers.decoder(name)(row[real][None]).logits[0] for row, real in zip(tokens, valid, strict=True)]
        padded = whole.clone()
        padded[valid] = torch.cat(rows)
    else:
        padded = theirs(tokens, attention_mask=valid.long(), position_ids=positions).logits
    assert (ours(tokens, mask=rg.padding(valid=valid)) - padded)[valid].abs().max() <= 1e-10

    folder = rg.save(ours, tmp_path / "export", layout="huggingface")
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (back(tokens).logits - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("name", peers.DECODERS)
@torch.no_grad()
def test_64_greedy_chosenof_left_padded_prompts_equal_transformers(name, tmp_path):
    theirs = peers.decoder(name)
    ours = rg.load(peers.saved(theirs, tmp_path / "model"))
    prompts = peers.sequences(3, 40)
    valid, _ = peers.left_padded(3, 40, 32, 5, 0)
    options = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64, "pad_token_id": 0}
    if name == "llama-dynamic":
        rows = zip(prompts, valid, strict=True)
        alone = [peers.decoder(name).generate(row[real][None], **options)[:, -64:] for row, real in rows]
        expected = torch.cat(alone)
    else:
        expected = theirs.generate(prompts, attention_mask=valid.long(), **options)[:, 40:]
    assert torch.equal(greedy(ours, prompts, 64, valid), expected)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_streamed_in_any_chunks_is_whole_and_a_padded_row_is_itself(form):
    model = made(FORMS[form])
    tokens = peers.sequences(3, 23, 61)
    valid, _ = peers.left_padded(3, 23, 9, 2, 0)
    whole = model(tokens, mask=rg.padding(valid=valid))
    for row in range(3):
        alone = model(tokens[row : row + 1, valid[row]])
        assert (alone[0] - whole[row, valid[row]]).abs().max() <= 1e-12
    for cuts in ([23], [1] * 23, [4, 1, 8, 10], [12, 11]):
        state, outs, start = model.start(batch=3, capacity=24), [], 0
        for size in cuts:
            mask = rg.padding(valid=valid[:, : start + size])
            out, state = model.extend(tokens[:, start : start + size], state, mask)
            outs.append(out)
            start += size
        assert (torch.cat(outs, 1) - whole)[valid].abs().max() <= 1e-12
    assert state.length == 23


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mechanism", ["softmax", "quadratic"])
@pytest.mark.parametrize("scaling", SCALINGS)
@torch.no_grad()
def test_a_row_beyond_the_context_is_itself_beside_any_other(scaling, mechanism, side):
    config = replace(FORMS["llama"], context_length=10, rotary_scaling=SCALINGS[scaling], mechanism=mechanism)
    model, lengths = made(config), (4, 10, 11, 30)
    tokens = peers.sequences(4, 30, 61)
    valid = torch.stack([torch.arange(30) < length for length in lengths])
    valid = valid.flip(-1) if side == "left" else valid
    alone = [model(row[real][None])[0] for row, real in zip(tokens, valid, strict=True)]
    together = model(tokens, mask=rg.padding(valid=valid))
    assert (together[valid] - torch.cat(alone)).abs().max() <= 1e-12
    if side == "left":
        generated = greedy(model, tokens, 12, valid)
        for row, real in enumerate(valid):
            assert torch.equal(generated[row], greedy(model, tokens[row : row + 1, real], 12)[0])


@pytest.mark.parametrize("scaling", SCALINGS)
@torch.no_grad()
def test_a_model_forgets_the_length_of_the_request_before(scaling):
    model = made(replace(FORMS["llama"], context_length=10, rotary_scaling=SCALINGS[scaling]))
    tokens = peers.sequences(1, 40, 61)
    requests = [tokens[:, :length] for length in (6, 15, 40, 15, 6)]
    first, second, _, again, last = (model(request) for request in requests)
    assert torch.equal(first, last)
    assert torch.equal(second, again)
    assert torch.equal(greedy(model, requests[0], 9), greedy(copy.deepcopy(model), requests[0], 9))


@pytest.mark.parametrize("mechanism", CAUSAL)
@torch.no_grad()
def test_every_mechanism_streams_as_it_computes_whole(mechanism):
    model = made(FORMS["llama"].with_mechanism(mechanism))
    tokens = peers.sequences(2, 150, 61)
    valid, _ = peers.left_padded(2, 150, 11, 0)
    whole = model(tokens, mask=rg.padding(valid=valid))
    assert (model(tokens[:1, 11:])[0] - whole[0, 11:]).abs().max() <= 1e-10
    state, outs = model.start(batch=2, capacity=150), []
    for start in (0, 70, 71, 72, 100):
        stop = {0: 70, 100: 150}.get(start, 100 if start == 72 else start + 1)
        out, state = model.extend(tokens[:, start:stop], state, rg.padding(valid=valid[:, :stop]))
        outs.append(out)
    assert (torch.cat(outs, 1) - whole)[valid].abs().max() <= 1e-10


@torch.no_grad()
def test_right_padding_is_no_padding():
    model = made(FORMS["llama"])
    tokens = peers.sequences(3, 20, 61)
    whole = model(tokens, mask=rg.padding([20, 13, 0]))
    assert (model(tokens[1:2, :13])[0] - whole[1, :13]).abs().max() <= 1e-12
    assert whole[2].isfinite().all()


@torch.no_grad()
def test_a_state_forks_reorders_and_crops():
    model = made(FORMS["mqa-window"])
    tokens, more = peers.sequences(2, 12, 61), peers.sequences(2, 3, 61)
    valid, _ = peers.left_padded(2, 12, 4, 0)
    _, state = model.extend(tokens, model.start(batch=2, capacity=32), rg.padding(valid=valid))
    first, _ = model.extend(more, state)
    again, _ = model.extend(more, state)
    assert torch.equal(first, again)
    swapped, _ = model.extend(more[[1, 1, 0]], state.reorder(torch.tensor([1, 1, 0])))
    assert (swapped[2] - first[0]).abs().max() <= 1e-12
    assert (swapped[0] - swapped[1]).abs().max() == 0
    cropped = state.crop(9)
    out, _ = model.extend(tokens[:, 9:], cropped, rg.padding(valid=valid))
    assert (out - model(tokens, mask=rg.padding(valid=valid))[:, 9:]).abs().max() <= 1e-12
    assert cropped.length == 9
    assert state.nbytes == sum(layer.nbytes for layer in state.layers)


@torch.no_grad()
def test_a_narrower_band_stays_when_a_window_has_left_chosenbehind():
    model, tokens = made(FORMS["mqa-window"]), peers.sequences(2, 30, 61)
    whole, state, outs = model(tokens, mask=rg.window(before=1)), model.start(batch=2, capacity=30), []
    for place in range(30):
        out, state = model.extend(tokens[:, place : place + 1], state, rg.window(before=1))
        outs.append(out)
    assert (torch.cat(outs, 1) - whole).abs().max() <= 1e-10


def test_a_state_that_is_none_is_one_error():
    with pytest.raises(ValueError, match="state: expected one from start"):
        made(FORMS["llama"]).extend(peers.sequences(1, 3, 61), None)


@torch.no_grad()
def test_without_positions_earlier_chosenmay_change_places():
    model = made(FORMS["none"])
    tokens = peers.sequences(1, 9, 61)
    shuffled = torch.cat([tokens[:, torch.randperm(8, generator=torch.Generator().manual_seed(0))], tokens[:, 8:]], 1)
    # One layer of causal attention sees a set; two do not, since the set each earlier token saw differs.
    shallow = made(rg.DecoderConfig(vocabulary_size=61, embedding_dim=16, num_layers=1, num_heads=2, positions="none"))
    assert (shallow(tokens)[:, -1] - shallow(shuffled)[:, -1]).abs().max() <= 1e-12
    assert (model(tokens)[:, -1] - model(shuffled)[:, -1]).abs().max() > 1e-6


def test_rotary_tables_stay_float32_in_a_half_model():  # transformers#25681
    model = rg.Decoder(FORMS["llama"]).to(torch.bfloat16).eval()
    exact = copy.deepcopy(model).double()
    far = torch.full((1, 2), 3)
    rotary = model.stack.blocks[0].attention.rotary
    cos, sin = rotary.tables(torch.tensor([1000, 1001]))
    assert cos.dtype == sin.dtype == torch.float32
    assert not torch.equal(cos[0], cos[1])
    with torch.no_grad():
        assert (model(far).double() - exact(far)).abs().max() < 0.05


def test_a_stream_runs_under_autocast():
    model, tokens = rg.Decoder(FORMS["llama"]).eval(), peers.sequences(2, 9, 61)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits, state = model.extend(tokens[:, :5], model.start(batch=2, capacity=16))
        more, _ = model.extend(tokens[:, 5:], state)
        whole = model(tokens)
    assert (torch.cat([logits, more], 1) - whole).abs().max() <= 0.05 * whole.abs().max()


def test_dropout_acts_in_training_only():  # pytorch#124464
    config = rg.DecoderConfig(
        vocabulary_size=61, embedding_dim=16, num_layers=1, num_heads=2, dropout=0.5, attention_dropout=0.5
    )
    model, tokens = rg.Decoder(config).eval(), peers.sequences(1, 8, 61)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_training_reaches_every_parameter():
    for config in FORMS.values():
        model = rg.Decoder(config)
        model(peers.sequences(2, 9, 61), mask=rg.padding([9, 5])).square().sum().backward()
        untouched = [
            name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
        ]
        # nothing comes after the last token of GPT-2's table of positions
        assert untouched == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads: expected a divisor of embedding_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor"),
        ({"positions": "absolute"}, "positions: expected one of rotary"),
        ({"activation": "swish"}, "activation: expected one of"),
        ({"norm": "batch"}, "norm: expected layer, rms"),
        ({"window": 0}, r"window: expected Window\(before, after\), got 0"),
        (
            {"window": 16},
            r"window: expected Window\(before, after\), got 16; 16 tokens, itself among them, are Window\(before=15\)",
        ),
        (
            {"window": rg.Window(3, 1)},
            "window: expected after=0, since a decoder's tokens see no later ones, got Window",
        ),
        ({"vocabulary_size": 0}, "vocabulary_size: expected a whole number"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1"),
        ({"mechanism": "linear"}, "mechanism: expected one of softmax"),
        ({"mechanism": "channel"}, "mechanism: expected one that can be causal"),
        (
            {"mechanism": "elu", "window": rg.Window(3)},
            r"window: expected none with Elu\(\), whose sums cannot drop a key, got Window",
        ),
        (
            {"mechanism": "quadratic", "window": rg.Window(1), "window_layers": (0,)},
            "window: expected none with Quadratic",
        ),
        ({"mechanism": "quadratic", "positions": "alibi"}, "mechanism: expected one with additive scores"),
        ({"qk_length": 5, "positions": "rotary"}, "qk_length: expected an even number"),
    ],
)
def test_a_config_that_cannot_be_is_one_error(change, message):
    sizes = {"vocabulary_size": 9, "embedding_dim": 16, "num_layers": 1, "num_heads": 4}
    with pytest.raises(ValueError, match=message):
        rg.Decoder(rg.DecoderConfig(**{**sizes, **change}))


@pytest.mark.parametrize("config", [kind for _, kind in MODELS.values() if hasattr(kind, "num_kv_heads")])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads: expected a divisor of embedding_dim = 16"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        ({"num_kv_heads": 8}, "num_kv_heads: expected a divisor of num_heads = 4, got 8"),
        ({"end_tokens": (2, 9)}, r"end_tokens: expected tokens from 0 to 8, got \(2, 9\)"),
        ({"target_vocabulary_size": 5, "end_tokens": (5,)}, r"end_tokens: expected tokens from 0 to 4, got \(5,\)"),
    ],
)
def test_heads_and_end_chosenthat_cannot_be_are_refused_when_a_config_is_made(config, change, message):
    names = {entry.name for entry in fields(config)}
    sizes = {"vocabulary_size": 9, "image_size": 8, "patch_size": 4, "embedding_dim": 16}
    sizes = {name: size for name, size in {**sizes, "num_layers": 1, "num_heads": 4}.items() if name in names}
    config(**sizes, **{"num_kv_heads": 2} | ({"end_tokens": (8,)} if "vocabulary_size" in names else {}))
    if not change.keys() <= names or ("end_tokens" in change and "vocabulary_size" not in names):
        return
    with pytest.raises(ValueError, match=message):
        config(**{**sizes, **change})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[61]]), "tokens: expected tokens from 0 to 60, got 61"),
        (torch.tensor([[-1]]), "tokens: expected tokens from 0 to 60, got -1"),
        (torch.tensor([1, 2]), r"tokens: expected whole numbers of shape \(B, T\)"),
        (torch.ones(1, 2), "tokens: expected whole numbers"),
        (torch.zeros(1, 65, dtype=torch.long), "tokens: expected at most 64 tokens"),
    ],
)
def test_chosenthat_are_none_are_one_error(tokens, message):
    with pytest.raises(ValueError, match=message):
        made(FORMS["gpt2"])(tokens)


def test_an_empty_sequence_and_an_empty_batch_have_empty_logits():
    model = made(FORMS["llama"])
    assert model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 61)
    assert model(torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5, 61)


@pytest.mark.parametrize("streamed", [False, True])
def test_padding_of_another_batch_is_refused(streamed):
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    tokens, mask = torch.zeros(2, 9, dtype=torch.long), rg.padding([9, 2, 3])
    with pytest.raises(ValueError, match=r"mask: expected padding for 2 sequences \(the batch\), got 3"):
        model.extend(tokens, model.start(batch=2), mask=mask) if streamed else model(tokens, mask=mask)


def test_a_model_runs_on_meta_tensors_and_under_transforms():
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=1, num_heads=2))
    tokens = torch.randint(11, (3, 5))

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, tokens)
    model(tokens).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name].sum(0), parameter.grad, atol=1e-4), name
    assert model.to("meta")(tokens.to("meta")).shape == (3, 5, 11)
